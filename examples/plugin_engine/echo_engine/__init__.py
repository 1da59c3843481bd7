"""An engine that repeats the prompt's tokens: the least that the harness asks of an engine."""

import time
from collections.abc import Iterator, Sequence

from harness.api import (
    Capabilities,
    Engine,
    GenerationRequest,
    GenerationResult,
    HardwareLimits,
    Job,
    LoadReport,
    LocalModel,
    OffloadPolicy,
    Score,
    UnsupportedError,
)


class EchoEngine(Engine):
    """Options of a suite's cell (`options: {delay_s: 0.01}`) arrive as keywords; an unknown one is a TypeError."""

    def __init__(self, *, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s

    def capabilities(self) -> Capabilities:
        return Capabilities(packages=("echo-engine",))  # its version belongs in every record

    def load(self, model: LocalModel, policy: OffloadPolicy, limits: HardwareLimits, job: Job) -> LoadReport:
        # Refuse what would have no effect: a figure must not be shown under a setting that was ignored.
        policy.require_defaults_except("echo", "gpu_batch_size", "num_gpu_batches")
        return LoadReport(
            vocab=model.shape.vocab,
            max_context=model.shape.max_context,
            block_size=policy.block_size,
            policy=policy,
            compute_dtype="float32",
            weights_by_tier=(0, model.weight_bytes, 0),  # bytes on the device, in RAM and on disk
        )

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        began = time.perf_counter()
        for request in requests:
            start, tokens, times = time.perf_counter() - began, list[int](), list[float]()
            for i in range(request.sampling.max_tokens):
                time.sleep(self._delay_s)
                tokens.append(request.prompt[i % len(request.prompt)])
                times.append(time.perf_counter() - began)
            yield GenerationResult(request.id, tuple(tokens), start, tuple(times), len(request.prompt))

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        raise UnsupportedError("engine echo has no model: it cannot score")

    def close(self) -> None:
        """Nothing to free."""
