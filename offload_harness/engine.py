"""A model in an engine: generates, streams and scores, from text, chats or token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeAlias, TypedDict, Unpack, cast

from harness import api
from harness.batch.format import BatchLine, LineError, parse_line
from harness.batch.job import Lengths, engine_errors, job_cell
from harness.batch.progress import QUIET, make_job_progress
from harness.batch.session import ModelSession
from harness.batch.stream import Streamed
from harness.batch.texts import generated_text, pair_of
from harness.common.files import default_cache
from harness.common.locks import in_use
from harness.common.scratch import remove_abandoned
from harness.common.words import nearest

Message: TypeAlias = Mapping[str, Any]
#: Text, token ids, or the messages of a chat, each with `role` and `content`.
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]

#: Tokens of the shortest sequence that an engine is loaded for, so that the next prompt seldom loads it again.
_LEAST_TOKENS = 512


class Sampling(TypedDict, total=False):
    """How answers are decoded; see `harness.api.SamplingParams`, whose defaults these have but `max_tokens`, 256.

    `response_format` as OpenAI has it: `{"type": "json_object"}`, or `{"type": "json_schema", "json_schema": {...}}`.
    """

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: str | Sequence[str]
    ignore_eos: bool
    logprobs: int | None
    response_format: Mapping[str, Any]


@dataclass(frozen=True)
class Completion:
    """An answer. Times are seconds since its `generate` began: of the start of work on it, and of every token.

    `text` is empty for a model without a tokenizer. `finish_reason` is "length" or "stop". `logprobs`: one a token
    where they were asked for, else empty.
    """

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    finish_reason: str
    start_s: float
    token_times_s: tuple[float, ...]
    logprobs: tuple[api.TokenLogprob, ...] = ()


class Engine:
    """A model in an engine, for as long as a `with` block lasts.

    `model`: a folder of safetensors, a GGUF file, a hub id, `package:NAME`, or a mapping as in a suite such as
    `{"id": "facebook/opt-125m", "weights": "dummy"}`. `memory` and `device_memory`: what the engine plans for, in bytes
    or as a size such as "4GiB"; most of the free RAM and no device by default. `policy` and `options`: as in a suite
    ([their keys](../reference/suites.md)). `progress`: whether stderr shows what takes long. The engine is loaded by
    the first question, and again for one that is longer or of more prompts than it was loaded for.

    Raises HarnessError for settings that are unknown or malformed and for a model that cannot be made ready. Methods
    raise InfeasibleError where the memory is too small, and HarnessError for prompts that the model cannot run.
    """

    def __init__(
        self, model: str | Path | Mapping[str, Any], memory: str | int | None = None, *,
        device_memory: str | int | None = None, policy: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None, engine: str = "offload", cache_dir: str | Path | None = None,
        progress: bool = False,
    ) -> None:  # fmt: skip
        for name, given in (("policy", policy), ("options", options)):
            if not isinstance(given or {}, Mapping):
                raise api.HarnessError(f"{name}: expected a mapping of keys, as in a suite, got {given!r:.60}")
        if not isinstance(model, str | Path | Mapping):
            raise api.HarnessError(f"model: expected a folder, a name or a mapping as in a suite, got {model!r:.60}")
        spec = dict(model) if isinstance(model, Mapping) else {"id": str(model)}
        settings = {"model": spec, "policy": policy or {}, "options": options or {}}
        if device_memory is not None:
            settings["limits"] = {"device_memory": device_memory}
        cache = Path(cache_dir) if cache_dir is not None else default_cache()
        with ExitStack() as opened:
            self._progress = opened.enter_context(make_job_progress()) if progress else QUIET
            cell = job_cell(str(spec.get("id", "")), engine, memory, (), self._progress.note, settings)
            opened.enter_context(in_use(cache))
            remove_abandoned(cache)
            with engine_errors(engine):
                self._session = opened.enter_context(closing(ModelSession(cell, cache, self._progress)))
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees memory and disk. Idempotent."""
        self._opened.close()

    @property
    def context(self) -> int:
        """The most tokens of a sequence, prompt and answer together."""
        return self._session.model.shape.max_context

    def generate(self, prompts: Prompt | Sequence[Prompt], **sampling: Unpack[Sampling]) -> list[Completion]:
        """Answers to prompts, in their order; a single prompt gives a list of one. Greedy unless `temperature` is set.

        A prompt without a `seed` gets one by its place, so that calls repeat.
        """
        lines = [self._line(i, prompt, sampling) for i, prompt in enumerate(_listed(prompts), 1)]
        requests = [self._request(line) for line in lines]
        if not requests:
            return []
        done: dict[str, api.GenerationResult] = {}
        tokens = 0
        with engine_errors(self._session.cell.engine):
            for result in self._loaded(requests).generate(requests):
                done[result.id] = result
                tokens += len(result.tokens)
                self._progress.advance("generating", len(done), len(requests), tokens)
        return [self._completion(line, done[r.id]) for line, r in zip(lines, requests, strict=True)]

    def stream(self, prompt: Prompt, **sampling: Unpack[Sampling]) -> Iterator[str]:
        """The pieces of one answer's text as its tokens come; together they are the text that `generate` gives."""
        line = self._line(1, prompt, sampling)
        request = self._request(line)
        return self._pieces(line, request)

    def score(self, pairs: Sequence[tuple[str | Sequence[int], str | Sequence[int]]]) -> list[api.Score]:
        """The log-likelihood of each continuation after its context, in nats, and whether greedy decoding gives it.

        Text is encoded as lm-eval does: spaces between context and continuation belong to the continuation.
        """
        encoded = [pair_of(self._session.text, context, continuation) for context, continuation in pairs]
        if not encoded:
            return []
        lengths = [(len(context) + len(continuation), 0) for context, continuation in encoded]
        with engine_errors(self._session.cell.engine):
            return self._sized(lengths).score(encoded)

    def _pieces(self, line: BatchLine, request: api.GenerationRequest) -> Iterator[str]:
        with engine_errors(self._session.cell.engine):
            engine = self._loaded([request])
        yield from Streamed(self._session, line, engine, request).pieces()

    def _line(self, number: int, prompt: Prompt, sampling: Sampling) -> BatchLine:
        """A prompt and its settings, checked as a line of a batch job is."""
        known = list(Sampling.__annotations__)
        if unknown := [name for name in sampling if name not in known]:
            raise api.HarnessError(f"{unknown[0]} is not a known setting; {nearest(unknown[0], known)}")
        settings: dict[str, Any] = dict(sampling)
        logprobs = settings.pop("logprobs", None)
        if logprobs is not None and (not isinstance(logprobs, int) or isinstance(logprobs, bool)):
            raise api.HarnessError(f"logprobs: expected a count of alternatives, got {logprobs!r:.60}")
        try:
            chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
            raw = json.dumps({"messages" if chat else "prompt": prompt, **settings})
            line = parse_line(raw.encode(), number, max_tokens=256, seed=0)
        except LineError as exc:
            raise api.HarnessError(f"prompt {number}: {exc}") from None
        except (TypeError, ValueError) as exc:
            raise api.HarnessError(f"prompt {number}: expected text, token ids or messages: {exc}") from None
        return replace(line, sampling=replace(line.sampling, logprobs=logprobs))

    def _request(self, line: BatchLine) -> api.GenerationRequest:
        try:
            return self._session.request(line)
        except api.HarnessError as exc:
            raise api.HarnessError(f"prompt {line.number}: {exc}") from None

    def _completion(self, line: BatchLine, result: api.GenerationResult) -> Completion:
        try:
            text = generated_text(self._session.text, result, line.sampling)
        except api.UnsupportedError:  # no tokenizer
            text = ""
        return Completion(
            text, result.tokens, result.prompt_tokens, result.finish_reason, result.start_s, result.token_times_s,
            result.logprobs,
        )  # fmt: skip

    def _loaded(self, requests: Sequence[api.GenerationRequest]) -> api.Engine:
        return self._sized([(len(r.prompt), r.sampling.max_tokens) for r in requests])

    def _sized(self, lengths: Sequence[tuple[int, int]]) -> api.Engine:
        """The engine, loaded for sequences of these prompt and new tokens, with room for longer ones if it has any."""
        exact = Lengths.of(lengths)
        roomy = min(self.context, max(_LEAST_TOKENS, 1 << (exact.longest - 1).bit_length()))
        try:
            return self._session.engine(replace(exact, longest=max(exact.longest, roomy)), len(lengths))
        except api.InfeasibleError:
            if roomy <= exact.longest:
                raise
            return self._session.engine(exact, len(lengths))


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Several prompts; one prompt as a list of one. Raises HarnessError for what is neither."""
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise api.HarnessError(f"prompts: expected text, token ids, messages or a list of these, got {prompts!r:.60}")
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | Mapping)):
        return [cast(Prompt, prompts)]
    return cast(Sequence[Prompt], prompts)
