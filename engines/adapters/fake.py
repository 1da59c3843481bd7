"""A deterministic engine without torch that drives the harness's tests and fails in chosen ways."""

import ctypes
import errno
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from engines.adapters.fake_passes import SHAPE, Passes, fake_logprob, fake_token
from harness import api

Crash = Literal["exception", "sigkill", "exit", "segv", "enospc", "oom_device", "memory_error"]
Refusal = Literal["unsupported", "infeasible"]
Nonsense = Literal["pad", "vocab", "times", "duplicate", "unknown"]

#: The model behind the id `fake`; it has no files.
MODEL = api.LocalModel(path="", shape=SHAPE, weight_bytes=0, dtype="float32", digest="fake-0000000000000000")


def longest_sequence(spec: api.RunSpec, model: api.LocalModel, shortest: int) -> int:
    """The option `longest`, or the model's context. Raises InfeasibleError where that is less than `shortest`."""
    limit: int | None = spec.options.get("longest")
    _require_length(limit, shortest)
    return model.shape.max_context if limit is None else limit


def _require_length(limit: int | None, tokens: int) -> None:
    if limit is not None and tokens > limit:
        raise api.InfeasibleError(f"engine fake holds {limit} tokens of a sequence, not {tokens}")


def refuse(policy: api.OffloadPolicy, limits: api.HardwareLimits, model: api.LocalModel | None) -> None:
    """Raises UnsupportedError for settings that this engine lacks."""
    policy.require_defaults_except("fake", "gpu_batch_size", "num_gpu_batches")
    if limits.disk_bandwidth is not None:
        raise api.UnsupportedError("engine fake does not read the disk: leave limits.disk_bandwidth out")


class OutOfMemoryError(RuntimeError):
    """Stands in for `torch.OutOfMemoryError`: the same class name and the same start of the message."""


@dataclass(kw_only=True, eq=False)
class FakeEngine(api.OnlineEngine):
    """Tokens are a hash of (seed, prompt, position) and times come from a virtual clock, so results repeat exactly.

    A pass over n sequences takes n / `rate_tok_s` virtual seconds, and prefill is the pass that gives the first token:
    generation throughput is `rate_tok_s` at any batch size. `generate` runs blocks one after the other; requests that
    are submitted share passes as they come.

    Options that inject faults, each where a real engine would show it:

    - `crash`: dies in the pass that ends the first request, or in `load` for a `Refusal`.
    - `eat_bytes`: allocates and touches that much anonymous memory in `load`.
    - `hang`: sleeps for ever in the first pass; `sleep_s`: sleeps that long in each.
    - `spawn_child`: leaves a `sleep` process behind.
    - `max_batch`: MemoryError for a larger block; `longest`: InfeasibleError for a longer sequence.
    - `lose_request`: `generate` drops the last result; `wrong_count`: the last token of each.
    - `nonsense`: `generate` gives only pad tokens, ids outside the vocabulary, decreasing times, each result twice, or
      unknown ids.
    """

    rate_tok_s: float = 1000.0
    sleep_s: float = 0.0
    crash: Crash | Refusal | None = None
    eat_bytes: int = 0
    hang: bool = False
    lose_request: bool = False
    wrong_count: bool = False
    nonsense: Nonsense | None = None
    spawn_child: bool = False
    max_batch: int | None = None
    longest: int | None = None

    def capabilities(self) -> api.Capabilities:
        return api.Capabilities(simulated=True)

    def load(
        self, model: api.LocalModel, policy: api.OffloadPolicy, limits: api.HardwareLimits, job: api.Job
    ) -> api.LoadReport:
        """Raises UnsupportedError or InfeasibleError for a `crash` of that kind, InfeasibleError above `longest`."""
        if self.crash == "unsupported":
            raise api.UnsupportedError("engine fake was told to refuse this model")
        if self.crash == "infeasible":
            raise api.InfeasibleError("engine fake needs at least 2 bytes, budget is 1")
        _require_length(self.longest, job.max_sequence)
        refuse(policy, limits, model)
        if self.spawn_child:
            subprocess.Popen(["sleep", "600"])
        self._eaten = b"\x01" * self.eat_bytes  # non-zero, to touch every page
        self._block_size = policy.block_size
        self._passes = self._new_passes()
        return api.LoadReport(
            vocab=SHAPE.vocab,
            max_context=SHAPE.max_context,
            block_size=policy.block_size,
            policy=policy,
            compute_dtype="float32",
            weights_by_tier=(0, model.weight_bytes, 0),
        )

    def generate(self, requests: Sequence[api.GenerationRequest]) -> Iterator[api.GenerationResult]:
        last = requests[-1].id if requests else None
        for result in self._blocks(requests):
            if not (self.lose_request and result.id == last):
                yield from self._corrupt(result)

    def submit(self, request: api.GenerationRequest) -> None:
        self._passes.submit(request)

    def cancel(self, request_id: str) -> None:
        self._passes.cancel(request_id)

    def step(self) -> list[api.Event]:
        return self._step(self._passes)

    def pending(self) -> int:
        return self._passes.pending()

    def clock(self) -> float:
        return self._passes.clock()

    def stats(self) -> api.OnlineStats:
        return self._passes.stats()

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[api.Score]:
        """A log-likelihood between -8 and 0 a token; greedy when every token is the one that `generate` gives."""
        scores = []
        for context, continuation in pairs:
            full = (*context, *continuation)
            logprob = sum(fake_logprob(full[:i], i) for i in range(len(context), len(full)))
            greedy = all(token == fake_token(0, context, i) for i, token in enumerate(continuation))
            scores.append(api.Score(logprob, greedy))
        return scores

    def close(self) -> None:
        self._eaten = b""

    def _new_passes(self) -> Passes:
        return Passes(self._block_size, self.rate_tok_s, self.longest)

    def _blocks(self, requests: Sequence[api.GenerationRequest]) -> Iterator[api.GenerationResult]:
        """The results of blocks that run one after the other, on a clock of their own."""
        passes = self._new_passes()
        for first in range(0, len(requests), self._block_size):
            for request in requests[first : first + self._block_size]:
                passes.submit(request)
            while passes.pending():
                for event in self._step(passes):
                    match event:
                        case api.FinishedEvent(result):
                            yield result
                        case api.RefusedEvent(_, reason, kind):
                            raise (api.HarnessError if kind == "invalid" else api.InfeasibleError)(reason)

    def _step(self, passes: Passes) -> list[api.Event]:
        """A pass, with its faults."""
        if not passes.pending():
            return []
        while self.hang:
            time.sleep(3600)
        if self.max_batch is not None and self._block_size > self.max_batch:
            raise MemoryError(f"engine fake holds {self.max_batch} sequences, the block has {self._block_size}")
        time.sleep(self.sleep_s)
        events = passes.step()
        if self.crash is not None and any(isinstance(event, api.FinishedEvent) for event in events):
            _die(self.crash)
        return events

    def _corrupt(self, result: api.GenerationResult) -> Iterator[api.GenerationResult]:
        if self.wrong_count:
            result = replace(result, tokens=result.tokens[:-1], token_times_s=result.token_times_s[:-1])
        match self.nonsense:
            case "pad":
                result = replace(result, tokens=(1,) * len(result.tokens))
            case "vocab":
                result = replace(result, tokens=tuple(t + SHAPE.vocab for t in result.tokens))
            case "times":
                result = replace(result, token_times_s=result.token_times_s[::-1])
            case "unknown":
                result = replace(result, id=f"unknown-{result.id}")
            case "duplicate":
                yield result
        yield result


class FakeText:
    """The fake model's tokenizer: encodes text as bytes, and decodes an unprintable id as its number."""

    def __init__(self, model: api.LocalModel) -> None: ...

    def problem(self) -> str:
        return ""

    @property
    def begin(self) -> int:
        return 1

    @property
    def end(self) -> int:
        return 2

    def encode(self, prompt: str) -> tuple[int, ...]:
        return tuple(prompt.encode())

    encode_plain = encode

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        return self.encode("".join(f"{m['role']}: {m['content']}\n" for m in messages))

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(self.token, tokens))

    def token(self, token: int) -> str:
        return chr(token) if 32 <= token < 127 else f"[{token}]"

    def close(self) -> None: ...


def _die(crash: str) -> None:
    match crash:
        case "exception":
            raise RuntimeError("engine fake was told to fail")
        case "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(3)
        case "segv":
            ctypes.string_at(0)
        case "enospc":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        case "oom_device":
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        case "memory_error":
            raise MemoryError("engine fake was told to run out of memory")
        case _:
            raise TypeError(f"engine fake does not know crash {crash!r}")
