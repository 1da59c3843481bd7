"""Launches cells, each in a fresh worker of the sandbox that it names, and judges how they ended from evidence."""

import hashlib
import json
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from harness import api, registry
from harness.common.classify import classify
from harness.hardware import provenance
from harness.launchers.kept import KeptAnswers
from harness.launchers.links.network import require_links
from harness.launchers.memory import sweep_stale_groups
from harness.launchers.process import ProcessSandbox
from harness.launchers.protocol import EXIT_DISK_FULL
from harness.launchers.sandbox import hide_in_log, settings

_HELPER_TIMEOUT_S = 600.0
_PREPARE_TIMEOUT_S = 24 * 3600.0

T = TypeVar("T")


class CellLauncher:
    """Launches cells. `places` maps folders of this machine to the names that records have for them.

    Only the engine runs in the cell's sandbox. Models, probes of the machine, questions of tasks and their judgement
    are the work of processes of this interpreter. Methods raise Refusal for what a cell's record has to tell, and
    HarnessError where the run cannot go on, such as for a full disk under the exchange folder.
    """

    def __init__(self, cache: Path, places: Mapping[str, str]) -> None:
        self._cache = cache
        self._places = places
        self._idle: dict[str, int] = {}
        self._helper = ProcessSandbox()
        self._launchers: dict[str, api.Launcher] = {}
        self._sandboxes: dict[str, api.Sandbox] = {}
        sweep_stale_groups()

    def ready(self, names: Iterable[str]) -> None:
        """Makes the launchers of these names. Raises HarnessError with the remedy where one cannot work here."""
        for name in names:
            self._launchers[name] = registry.make_launcher(name, self._cache)

    def environment(self, spec: api.RunSpec, exchange: api.Exchange) -> Mapping[str, str]:
        """What identifies the packages that a cell's engine runs with. Raises Refusal where it has none."""
        sandbox = self._sandbox(spec, exchange)
        versions = sandbox.identity() or provenance.package_versions(registry.engine_entry(spec.engine).requires)
        return {**versions, **self.inherited(spec, sandbox)}

    def inherited(self, spec: api.RunSpec, sandbox: api.Sandbox) -> Mapping[str, str]:
        """Settings that reach the engine from the user's environment and that the cell does not decide."""
        if not sandbox.inherits_environment:
            return {}
        ours = settings(spec.limits.threads, spec.limits.gpu, engine_env(spec))
        return {name: self.scrub(value) for name, value in provenance.settings().items() if name not in ours}

    def _sandbox(self, spec: api.RunSpec, exchange: api.Exchange) -> api.Sandbox:
        """The sandbox of a cell's engine, made ready once."""
        key = f"{spec.launcher} {spec.image} {spec.environment} {spec.engine}"
        if key not in self._sandboxes:
            try:
                self._sandboxes[key] = self._launchers[spec.launcher].sandbox(spec, exchange)
            except api.HarnessError as exc:
                raise self._scrubbed(classify(exc)) from exc
        return self._sandboxes[key]

    def launch(self, request: api.LaunchRequest) -> api.LaunchResult:
        """How one launch ended, whatever the engine did, with the cell's secrets neither in its reason nor in its log.
        KeyboardInterrupt passes once the worker is gone."""
        secrets = request.spec.secrets()
        try:
            launch = self._launch(request)
        finally:
            hide_in_log(request.exchange.log, secrets)
        return replace(launch, reason=api.without_these(launch.reason, secrets))

    def _launch(self, request: api.LaunchRequest) -> api.LaunchResult:
        started_at = provenance.now()
        try:
            if request.spec.limits.link is not None:
                require_links()
            sandbox = self._sandbox(request.spec, request.exchange)
            idle = self._idle_bytes(sandbox, request) if request.spec.limits.host_memory is not None else 0
            questions = self._questions(request) if request.spec.workload.kind == "task" else None
        except api.Refusal as exc:
            return api.LaunchResult(exc.status, exc.reason, started_at)
        kept = KeptAnswers(request, questions)
        launch = kept.read() or self._run(sandbox, request, questions, idle)
        if launch.status != "ok" or questions is None:
            return launch
        kept.write(launch)
        judge_task = api.JudgeTask(self._task(request, questions), launch.measured.answers)
        try:
            accuracy = self._help(api.Accuracy, judge_task, request.exchange, "no judgement")
        except api.Refusal as exc:
            reason = f"its answers were not judged, and are kept until it runs again: {exc.reason}"
            return replace(launch, status=exc.status, reason=reason)
        kept.drop()
        return replace(launch, accuracy=accuracy)

    def _run(
        self, sandbox: api.Sandbox, request: api.LaunchRequest, questions: Path | None, idle: int
    ) -> api.LaunchResult:
        """The launch itself, within the cell's limits."""
        spec, budget = request.spec, request.spec.limits.host_memory
        limit = None if budget is None else spec.policy.ranks * (idle + budget)  # of all ranks together
        work = api.RunCell(spec, request.model, self._cache, time.monotonic(), questions)
        started_at, start = provenance.now(), time.monotonic()
        outcome = sandbox.run(self._engine_request(work, request.exchange, spec.timeout_s, limit))
        wall_s = round(time.monotonic() - start, 3)
        refusal = judge(outcome, spec.timeout_s, limit, spec.policy.ranks)
        measured = api.CellResult()
        if outcome.result and outcome.result.value is not None:
            measured = api.from_json(api.CellResult, outcome.result.value)
        measured = replace(measured, measurements=(*outcome.measurements, *measured.measurements))
        return api.LaunchResult(
            status=refusal.status if refusal else "ok",
            reason=self.scrub(refusal.reason) if refusal else "",
            started_at=started_at,
            wall_s=wall_s,
            measured=measured,
            memory=api.MemoryLimit(
                outcome.cap_method, idle, budget, limit, outcome.peak_bytes, outcome.counts_page_cache
            ),
            provenance={"packages": measured.packages, "settings": self.inherited(spec, sandbox)}
            | ({"python": measured.python} if measured.python else {})
            | dict(sandbox.identity()),
        )  # fmt: skip

    def scrub(self, text: str) -> str:
        """`text` without the folders of this machine."""
        return provenance.scrub(text, self._places)

    def _scrubbed(self, refusal: api.Refusal) -> api.Refusal:
        return api.Refusal(refusal.status, self.scrub(refusal.reason))

    def prepare(self, engine: str, model: api.ModelSpec, exchange: api.Exchange) -> api.LocalModel:
        """Makes a model ready, outside any limit and any timing. Raises Refusal where it cannot be."""
        work = api.PrepareModel(engine, model, self._cache)
        return self._help(api.LocalModel, work, exchange, "the model could not be prepared")

    def measure_machine(
        self, model: api.LocalModel, dtypes: Iterable[str], limits: api.HardwareLimits, exchange: api.Exchange
    ) -> api.MachineRates:
        """Disk bandwidth on the model's files, and GEMM rates at its shape on the threads or the device of `limits`, as
        they are now; empty where they cannot be measured."""
        shape, gpu = (model.shape.hidden, model.shape.ffn), limits.gpu
        kinds = tuple(sorted({"float32", model.dtype, *dtypes} - ({"auto", "int8"} if gpu else {"auto"})))
        work = api.MeasureMachine(Path(model.path), shape, kinds, limits.threads, gpu)
        exchange = replace(exchange, on_event=api.ignore_events)
        request = api.WorkerRequest(work, exchange, _HELPER_TIMEOUT_S, threads=limits.threads, gpu=gpu)
        result = self._helper.run(request).result
        rates = (
            api.from_json(api.MachineRates, result.value) if result and result.value is not None else api.MachineRates()
        )
        return replace(rates, measured_at=provenance.now())

    def calibrate(self, exchange: api.Exchange) -> None:
        """Leaves a quick profile of this host in the cache. Raises Refusal where it cannot."""
        request = api.WorkerRequest(api.CalibrateHost(self._cache), exchange, _HELPER_TIMEOUT_S)
        if refusal := judge(self._helper.run(request), _HELPER_TIMEOUT_S, None):
            raise api.Refusal("error", f"this host could not be measured: {self.scrub(refusal.reason)}")

    def _questions(self, request: api.LaunchRequest) -> Path:
        """The file of a task's questions, made once for all cells that ask the same model the same."""
        spec, model = request.spec, request.model
        key = json.dumps([api.to_json(spec.workload), spec.seed, model.digest, spec.engine, str(request.data)])
        name = f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        path = request.exchange.folder.parent / "questions" / name
        if not path.exists():
            self._help(type(None), self._task(request, path), request.exchange, "the task could not be read")
        return path

    def _task(self, request: api.LaunchRequest, questions: Path) -> api.AskTask:
        data = None if request.data is None else request.data.resolve()
        return api.AskTask(request.spec, request.model, self._cache, data, questions)

    def _idle_bytes(self, sandbox: api.Sandbox, request: api.LaunchRequest) -> int:
        """Anonymous memory of the engine's process after it ran a negligible model, measured once an engine.

        File-backed pages are left out: shared libraries that are cached already are not charged to the cell. Raises
        Refusal for an engine that cannot run even a negligible model.
        """
        spec, model = request.spec, request.model
        place = [spec.launcher, spec.image, spec.environment, spec.limits.threads, spec.limits.gpu]
        engine = [spec.engine, api.to_json(spec.options), model.dtype, model.shape.family]
        kernels = [spec.policy.compute_dtype, spec.policy.weight_bits, spec.policy.kv_bits]
        key = json.dumps([*place, *engine, *kernels])
        if key not in self._idle:
            exchange = replace(request.exchange, on_event=api.ignore_events)
            tiny = None
            if model.path:
                small = api.ModelSpec(registry.shapes().tiny(model.shape.family), "dummy", model.dtype)
                tiny = self.prepare(spec.engine, small, exchange)
            work = self._engine_request(api.MeasureIdle(spec, tiny, self._cache), exchange, _HELPER_TIMEOUT_S, None)
            self._idle[key] = self._value(int, sandbox, work, "its idle footprint could not be measured")
        return self._idle[key]

    @staticmethod
    def _engine_request(
        work: api.RunCell | api.MeasureIdle, exchange: api.Exchange, timeout_s: float, limit: int | None
    ) -> api.WorkerRequest:
        limits, ranks = work.spec.limits, work.spec.policy.ranks
        env = engine_env(work.spec)
        link = limits.link if isinstance(work, api.RunCell) else None  # an idle engine has one rank
        return api.WorkerRequest(work, exchange, timeout_s, limit, limits.threads, limits.gpu, env, ranks, link)

    def _help(self, kind: type[T], work: api.Work, exchange: api.Exchange, failed: str) -> T:
        """What a helper's work gives, of type `kind`; see `_value`."""
        return self._value(kind, self._helper, api.WorkerRequest(work, exchange, _PREPARE_TIMEOUT_S), failed)

    def _value(self, kind: type[T], sandbox: api.Sandbox, request: api.WorkerRequest, failed: str) -> T:
        """What a worker gives, of type `kind`. Raises Refusal, its reason beginning with `failed` where the worker ran
        out of time or memory."""
        outcome = sandbox.run(request)
        if refusal := judge_helper(outcome, request.timeout_s, failed):
            raise self._scrubbed(refusal)
        assert outcome.result is not None
        return api.from_json(kind, outcome.result.value)


def judge_helper(outcome: api.Outcome, timeout_s: float, failed: str) -> api.Refusal | None:
    """As `judge`. A helper that takes too long or too much says nothing about the cell, which may be tried again."""
    refusal = judge(outcome, timeout_s, None)
    if refusal and refusal.status in ("timeout", "oom_host", "oom_device"):
        return api.Refusal("error", f"{failed}: {refusal.reason}")
    return refusal


def judge(outcome: api.Outcome, timeout_s: float, limit: int | None, ranks: int = 1) -> api.Refusal | None:
    """Why an outcome is no success, None where it is one. `limit`: bytes of all `ranks` together.

    From the evidence in this order: the kernel's count of OOM kills, the clock, the worker's word, its exit code.
    """
    if outcome.refusal:
        return outcome.refusal
    result = outcome.result
    if outcome.oom_kills and (result is None or result.status != "ok"):
        where = "for want of memory outside the cell" if limit is None else f"at its limit of {limit / 2**20:.0f} MiB"
        where += f" over {ranks} ranks" if ranks > 1 else ""
        return api.Refusal("oom_host", f"killed {where} ({outcome.oom_kills} OOM kills)")
    if outcome.timed_out:
        return api.Refusal("timeout", f"not done after {timeout_s:.0f} s")
    if result is not None:
        return None if result.status == "ok" else api.Refusal(result.status, result.reason)
    if outcome.exit_code == EXIT_DISK_FULL:
        return api.Refusal("disk_full", "no space left for the worker's result; free space where the cache is")
    code = outcome.exit_code
    died = -code in {s.value for s in signal.Signals}
    end = f"died of {signal.Signals(-code).name}" if died else f"exited with {code}"
    return api.Refusal("error", f"worker {end}; last log lines: {outcome.log_tail}")


def engine_env(spec: api.RunSpec) -> Mapping[str, str]:
    """Environment variables that a cell's engine asks for, under those that the cell sets."""
    return {**registry.engine_entry(spec.engine).env, **spec.env}
