"""The offload engine behind the Engine protocol: load, generate, score."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from engines.common.requests import decoder, full_sequence
from engines.offload.admission import AverageLength
from engines.offload.backend.base import LoadRequest
from engines.offload.backend.choice import backend_for
from engines.offload.kernels import HostKernels
from engines.offload.kv_store.options import kv_store_options
from engines.offload.loaded_model import EngineStats, LoadedModel
from engines.offload.loader import load
from engines.offload.model_runner import ModelRunner
from engines.offload.open_store import limits_beside_store, open_store
from engines.offload.pass_model import LatencyBudget
from engines.offload.pipeline.started import world
from engines.offload.prefill_budget import PrefillBudget
from engines.offload.refusals import refuse
from engines.offload.scheduled_pass import Share, blocks_by_tier
from engines.offload.score_job import score
from engines.offload.scoring import Scoring
from engines.offload.session import Session
from engines.offload.session_groups import SessionGroups, run
from harness import api


class OffloadEngine(api.OnlineEngine):
    """Any transformers decoder, its weights streamed from disk or host memory in `row`, `zigzag` or `sweep` order.
    Honours every field of the policy.

    `attention_units`: multiprocessors of a CUDA device that attention beside products is held to. `tpot_target_s`:
    seconds within which submitted requests that run should get their next token; prompts of others take what time is
    left. `kv_store`: see kv_store_options. `admission`: a request is admitted if its `max_tokens` fit the KV cache
    (exact), or if as many tokens do as requests generated on average.
    """

    def __init__(
        self,
        *,
        attention_units: int | None = None,
        tpot_target_s: float | None = None,
        kv_store: Mapping[str, Any] | None = None,
        admission: str = "exact",
    ) -> None:
        if attention_units is not None and attention_units < 1:
            raise TypeError("attention_units must be at least 1")
        if tpot_target_s is not None and not tpot_target_s > 0:
            raise TypeError("tpot_target_s must be a number of seconds above 0")
        if admission not in ("exact", "average"):
            raise TypeError(f"admission must be exact or average, not {admission}")
        self._average = AverageLength() if admission == "average" else None
        self._tpot_target_s = tpot_target_s
        self._kv_store = None if kv_store is None else kv_store_options(kv_store)
        self._attention_units = attention_units
        self._runner: ModelRunner | None = None
        self._session: Session | SessionGroups | None = None  # of the requests that `submit` queues
        self._resources = ExitStack()  # what `close` must end

    def capabilities(self) -> api.Capabilities:
        return api.Capabilities(
            phased=False,
            device=True,
            packages=("torch", "transformers", "safetensors", "accelerate", "greenlet", "numpy"),
            batch_policy=api.OffloadPolicy(schedule="sweep", gpu_batch_size=256),
        )

    def load(
        self, model: api.LocalModel, policy: api.OffloadPolicy, limits: api.HardwareLimits, job: api.Job
    ) -> api.LoadReport:
        """Plans the memory, converts the checkpoint on first use, starts the stream.

        Raises UnsupportedError for models and policies it cannot run and InfeasibleError for too small a budget,
        both before weights are read or written.
        """
        self.close()
        refuse(policy, limits, model)
        for option, value in (("tpot_target_s", self._tpot_target_s), ("admission: average", self._average)):
            if value is not None and policy.schedule != "sweep":
                raise api.UnsupportedError(
                    f"options.{option}: schedule {policy.schedule} starts prompts in blocks; use sweep"
                )
        if self._kv_store is not None:
            if policy.ranks > 1:
                raise api.UnsupportedError("options.kv_store: several ranks keep nothing: leave one out")
            limits = limits_beside_store(limits, self._kv_store)
        request = LoadRequest.of(model, policy, limits, job)
        with ExitStack() as resources:  # a load that fails ends what it has started
            resources.callback(torch.set_num_threads, torch.get_num_threads())
            if threads := [count for count in (policy.threads, limits.threads) if count is not None]:
                torch.set_num_threads(min(threads))
            if policy.ranks > 1 or world() not in (None, 1):
                from engines.offload.pipeline.leader import runner_of_ranks

                runner: ModelRunner = runner_of_ranks(request, resources, self._attention_units)
            else:
                kernels = HostKernels(job.cache, torch.get_num_threads())
                resources.callback(kernels.close)
                backend = backend_for(request, kernels, resources, self._attention_units)
                runner = ModelRunner(load(request, backend, kernels, resources), kernels)
            if self._kv_store is not None:
                store = open_store(self._kv_store, runner.loaded, job.cache, runner.pass_model.row_s)
                resources.callback(store.close)
            self._runner, self._session = runner, self._sessions(runner, self._online_budget)
            self._resources = resources.pop_all()
        return self.loaded.report

    def generate(self, requests: Sequence[api.GenerationRequest]) -> Iterator[api.GenerationResult]:
        """Checks all requests before any work; raises HarnessError naming the first that cannot be run."""
        runner = self._idle_runner()
        for request in requests:
            runner.require_request(request)
        decoder(runner.loaded.model.path, requests)  # raises where a stop string needs a tokenizer and there is none
        return self._run_job(runner, requests)

    def submit(self, request: api.GenerationRequest) -> None:
        """Queues a request for the next step, which checks it."""
        self._loaded_session().submit(request)

    def cancel(self, request_id: str) -> None:
        self._loaded_session().cancel(request_id)

    def step(self) -> list[api.Event]:
        """Raises HarnessError while an iterator of `generate` is open."""
        session = self._loaded_session()
        if not session.pending():
            return []
        with self._loaded_runner().exclusive():
            events = session.step()
        if not session.pending():
            self.loaded.expert_counts.keep()
        return events

    def pending(self) -> int:
        return self._loaded_session().pending()

    def clock(self) -> float:
        return self._loaded_session().clock()

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[api.Score]:
        """Scores from the logits of the continuation's positions only; an empty context becomes the token that
        begins a sequence, or else the one that ends it."""
        runner = self._idle_runner()
        loaded = runner.loaded
        sequences = []
        for i, (context, continuation) in enumerate(pairs):
            full = full_sequence(i, context, continuation, loaded.model.shape, loaded.meta_model.bos)
            runner.require_blocks(f"pair {i}", len(full) - 1)
            sequences.append(Scoring(i, full, len(continuation)))
        if not sequences:
            return []
        continued = sum(len(continuation) for _, continuation in pairs) / sum(len(s.tokens) for s in sequences)
        done = score(runner, sequences, *loaded.plan.chunk_limits(continued))
        scores = {sequence.index: sequence.result() for sequence in done}
        return [scores[i] for i in range(len(pairs))]

    def trace(self) -> api.EngineTrace:
        trace, ranks, memory = self.loaded.trace(), self._loaded_runner().ranks(), self.loaded.device.memory()
        return api.EngineTrace({**trace.metrics, **memory, **ranks.metrics}, (*trace.events, *ranks.events))

    @property
    def loaded(self) -> LoadedModel:
        """The loaded model: its plan, tiles, cache and timeline. Raises HarnessError if nothing is loaded."""
        return self._loaded_runner().loaded

    def stats(self) -> EngineStats:
        """Counts and bytes of what is loaded and was moved. Raises HarnessError if nothing is loaded."""
        session = self._loaded_session()
        blocks = blocks_by_tier(self._loaded_runner().shares)
        return self.loaded.stats(session.pending() - session.running, session.running, blocks)

    def close(self) -> None:
        if loaded := self._runner is not None:
            self._loaded_runner().close()
        self._runner = self._session = None  # its tensors must be gone when the device returns memory
        self._resources.close()
        if loaded:
            gc.collect()  # modules refer to each other in circles, and the tables that they hold keep a file open each

    def _sessions(
        self, runner: ModelRunner, budget: Callable[[ModelRunner, Share], Callable[[int], int]]
    ) -> Session | SessionGroups:
        sessions = [Session(runner, share, budget(runner, share), self._average) for share in runner.shares]
        return sessions[0] if len(sessions) == 1 else SessionGroups(sessions)

    def _run_job(
        self, runner: ModelRunner, requests: Sequence[api.GenerationRequest]
    ) -> Iterator[api.GenerationResult]:
        work = [(request.prompt, request.sampling.max_tokens) for request in requests]
        part = work[: -(-len(work) // len(runner.shares))]  # of those alike, what one scheduler gets
        with runner.exclusive(), runner.one_run():
            session = self._sessions(runner, lambda _, share: runner.job_budget(part, share.plan.chunk, share))
            try:
                yield from run(session, requests)
            finally:
                session.close()

    def _online_budget(self, runner: ModelRunner, share: Share) -> Callable[[int], int]:
        """Prompt tokens of a pass while requests come: all that memory allows, or what the target leaves time for."""
        loaded, most = runner.loaded, share.plan.chunk
        if self._tpot_target_s is None:
            return PrefillBudget(most, loaded.io_compute_balance_rows, most)
        return LatencyBudget(self._tpot_target_s, most, runner.pass_model)

    def _idle_runner(self) -> ModelRunner:
        """Raises HarnessError while submitted requests are pending."""
        if pending := self._loaded_session().pending():
            raise api.HarnessError(f"engine offload has {pending} submitted requests pending: step until they are done")
        return self._loaded_runner()

    def _loaded_session(self) -> Session | SessionGroups:
        if self._session is None:
            raise api.HarnessError("engine offload has no model loaded")
        return self._session

    def _loaded_runner(self) -> ModelRunner:
        if self._runner is None:
            raise api.HarnessError("engine offload has no model loaded")
        return self._runner
