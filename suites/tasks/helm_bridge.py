"""Runs crfm-helm's run specs on any engine: HELM makes the prompts and computes the metrics.

HELM calls a model while it runs, and needs its own environment. We run it there twice on the same entry: first with a
client that records all requests (helm_plugin.py), then with a client that replays an engine's answers.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.api import GenerationRequest, HarnessError, SamplingParams
from harness.api.task import Answers, Circumstances, Judged, Questions, Report
from suites.tasks.measures import judged
from suites.tasks.prompts import request_seed, room_beside

#: The interpreter of an environment with crfm-helm.
PYTHON = "HARNESS_HELM_PYTHON"
_HINT = f"`make helm` creates its environment; set {PYTHON} to the interpreter in it (docs/guides/accuracy.md)"
_PLUGIN = "harness_helm_plugin"
#: More instances than any scenario has: HELM requires a limit.
_ALL = 10**9
#: Prefixes of HELM's statistics that are not metrics of an answer.
_BOOKKEEPING = ("num_", "training_", "inference_", "finish_reason_", "batch_size", "prompt_truncated", "max_prob",
                "logprob")  # fmt: skip


@dataclass(frozen=True)
class HelmRun:
    """A run entry of HELM's command line, without its model: `mmlu:subject=abstract_algebra`."""

    entry: str

    @property
    def name(self) -> str:
        """The task's name in suites."""
        return f"helm_run:{self.entry}"

    @property
    def protocol(self) -> str:
        """HELM's version and the entry, which decide all settings."""
        return f"crfm-helm {_version()}, its own run spec {self.entry}"

    def questions(self, given: Circumstances, report: Report) -> Questions:
        """Records HELM's requests. Raises HarnessError where HELM is missing or cannot run the entry."""
        report(0, 1)
        with tempfile.TemporaryDirectory() as folder:
            requests = _run(self.entry, given, Path(folder), None)[0]
        report(1, 1)
        prompts, truncated = [], 0
        for i, request in enumerate(requests):
            room = room_beside(int(request["max_tokens"]), given.context, self.name)
            ids = given.tokens.encode(str(request["prompt"]))
            truncated += len(ids) > room
            completions = range(int(request["num_completions"]))
            prompts += [_prompt(request, given.seed, i, k, ids[-room:]) for k in completions]
        return Questions(tuple(prompts), examples=len(requests), truncated=truncated)

    def judge(self, given: Circumstances, answers: Answers) -> Judged:
        """HELM's metrics of the answers, over the instances that it reports."""
        with tempfile.TemporaryDirectory() as folder:
            requests, run = _run(self.entry, given, Path(folder), answers.texts)
            if sum(int(request["num_completions"]) for request in requests) != len(answers.texts):
                raise HarnessError(f"HELM sent different requests for {self.entry!r} in the second run")
            values = _metrics(json.loads((run / "per_instance_stats.json").read_text(encoding="utf-8")))
            return replace(judged(values), examples=max(map(len, values.values())))


def _prompt(request: Mapping[str, Any], seed: int, i: int, k: int, ids: tuple[int, ...]) -> GenerationRequest:
    sampling = SamplingParams(
        max_tokens=int(request["max_tokens"]),
        temperature=float(request["temperature"]),
        top_p=float(request["top_p"]),
        stop=tuple(request["stop_sequences"]),
        seed=request_seed(seed, i, k),
    )
    return GenerationRequest(f"h{i:06d}.{k}", ids, sampling)


def _metrics(instances: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Values by metric, one an unperturbed instance, of the split that HELM's tables report."""
    stats = list(_stats(instances))
    reported = "test" if any(split == "test" for split, _, _ in stats) else "valid"
    values: dict[str, list[float]] = {}
    for split, name, value in stats:
        if split == reported and not name.startswith(_BOOKKEEPING):
            values.setdefault(name, []).append(value)
    if not values:
        raise HarnessError("HELM returned no metric of these answers")
    return values


def _stats(instances: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, float]]:
    """(Split, metric, value) of each unperturbed instance, in HELM's order."""
    for instance in sorted(instances, key=lambda item: (item["train_trial_index"], str(item["instance_id"]))):
        if not instance.get("perturbation"):
            for stat in instance["stats"]:
                if stat.get("mean") is not None:
                    yield str(stat["name"].get("split")), str(stat["name"]["name"]), float(stat["mean"])


def _run(
    entry: str, given: Circumstances, folder: Path, answers: Sequence[str] | None
) -> tuple[list[Mapping[str, Any]], Path]:
    """Runs HELM on an entry; returns its requests in order and the folder of its results. Raises HarnessError."""
    if given.model is None or given.cache is None:
        raise HarnessError("HELM needs a model with a tokenizer")
    recording = folder / "requests.jsonl"
    recording.touch()
    job = {"tokenizer": str(given.model), "context": given.context, "recording": str(recording), "answers": answers}
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    (folder / f"{_PLUGIN}.py").write_text((Path(__file__).parent / "helm_plugin.py").read_text(encoding="utf-8"))
    out, scenarios = folder / "out", given.cache / "helm" / "scenarios"
    scenarios.mkdir(parents=True, exist_ok=True)  # keeps HELM's downloads
    out.mkdir()
    (out / "scenarios").symlink_to(scenarios.resolve())
    arguments = ["--run-entries", f"{entry}{',' if ':' in entry else ':'}model=harness/model", "--suite", "harness",
             "-m", str(given.count or _ALL), "-n", "1", "--plugins", _PLUGIN, "--local-path", str(folder / "local"),
             "-o", str(out), "--disable-cache", "--exit-on-error"]  # fmt: skip
    _python(["-c", "from helm.benchmark.run import main; main()", *arguments], folder)
    runs = [path.parent for path in (out / "runs").glob("*/*/per_instance_stats.json")]
    if len(runs) != 1:
        raise HarnessError(f"HELM makes {len(runs)} runs of the entry {entry!r}; name an entry of a single run")
    return [json.loads(line) for line in recording.read_text(encoding="utf-8").splitlines()], runs[0]


def _version() -> str:
    return _python(["-c", "from importlib import metadata; print(metadata.version('crfm-helm'))"], None).strip()


def _python(arguments: Sequence[str], folder: Path | None) -> str:
    """Runs HELM's interpreter in `folder` and returns its output. Raises HarnessError with its last line on failure."""
    python = os.environ.get(PYTHON)
    if not python:
        raise HarnessError(f"crfm-helm is not installed here: {_HINT}")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    if folder is not None:
        environment |= {"HARNESS_HELM_JOB": str(folder / "job.json"), "PYTHONPATH": str(folder)}
        environment |= {"PYTHONHASHSEED": "0"}  # some scenarios iterate over sets, and both runs must be equal
    command = [python, *arguments]
    try:
        process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    except OSError as exc:
        raise HarnessError(f"{PYTHON}={python} does not run: {exc.strerror}; {_HINT}") from None
    if process.returncode:
        last = next((line for line in reversed(process.stderr.splitlines()) if line.strip()), "without a message")
        raise HarnessError(f"crfm-helm failed: {last.strip()}")
    return process.stdout
