"""Events of the engine to OpenAI's answers: whole, or in chunks of a stream."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.api import FinishedEvent, GenerationRequest, GenerationResult, TokenEvent
from harness.api.task import Text
from harness.batch.format import BatchLine, answer, chat_logprobs, completion_logprobs
from harness.batch.texts import GrowingText, echo_of, generated_text
from harness.serve.requests import ParsedRequest

_encode = json.JSONEncoder(ensure_ascii=False).encode
#: Stands for a piece of text in a chunk that is prepared; nothing else of a chunk has it.
_PIECE = "\0piece\0"


@dataclass
class Answer:
    """The answer that is under way to one HTTP request, named `id`."""

    id: str
    asked: ParsedRequest
    requests: Sequence[GenerationRequest]
    model: str
    text: Text
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._index = {request.id: i for i, request in enumerate(self.requests)}
        self._growing = [GrowingText(self.text, request.sampling) for request in self.requests]
        self._results: dict[int, GenerationResult] = {}
        self._streamed = 0  # tokens
        kind = "chat.completion.chunk" if self.asked.chat else "text_completion"
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        self._head = _encode(head).removesuffix("}")  # of every chunk
        self._around: dict[int, list[str]] = {}  # by the choice, what is the same in the chunks of all its tokens

    @property
    def done(self) -> bool:
        """Whether all choices are."""
        return len(self._results) == len(self.requests)

    @property
    def is_large(self) -> bool:
        """Whether to make the whole of it may take long: log-probabilities name twenty tokens at each."""
        return any(request.sampling.logprobs is not None for request in self.requests)

    def finish(self, event: FinishedEvent) -> None:
        """Keeps the result of a choice."""
        self._results[self._index[event.result.id]] = event.result

    def whole(self) -> dict[str, Any]:
        """The body of the answer, of all choices."""
        results = [self._results[i] for i in range(len(self.requests))]
        texts = [
            generated_text(self.text, result, request.sampling)
            for result, request in zip(results, self.requests, strict=True)
        ]
        choices: list[dict[str, Any]] = []
        body: dict[str, Any] = {}
        for line, first in self._lines():
            echo = echo_of(self.text, line, self.requests[first])
            own = slice(first, first + line.samples)
            body = answer(line, self.model, results[own], texts[own], self.text.token, echo)["response"]["body"]
            choices += body["choices"]
        numbered = [{**choice, "index": i} for i, choice in enumerate(choices)]
        return {"id": self.id, "created": self.created, **body, "choices": numbered, "usage": self._usage()}

    def opening(self) -> Iterator[str]:
        """The chunks with which a stream begins."""
        if self.asked.chat:
            for i in range(len(self.requests)):
                yield self._chunk([{"index": i, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        for line, first in self._lines():
            if echo := echo_of(self.text, line, self.requests[first]):
                for i in range(first, first + line.samples):
                    yield self._chunk([self._choice(i, echo.text, None, None)])

    def chunks(self, event: TokenEvent | FinishedEvent) -> str:
        """The chunks that an event settles, as lines of a stream of server-sent events; often none."""
        if isinstance(event, FinishedEvent):
            index = self._index[event.result.id]
            piece = self._growing[index].end(event.result)
            return self._chunk([self._choice(index, piece, event.result.finish_reason, None)])
        index = self._index[event.id]
        self._streamed += 1
        piece = self._growing[index].add(event.token)
        if event.logprob is not None or self.asked.usage_so_far:
            return self._chunk([self._choice(index, piece, None, event)]) if piece or event.logprob else ""
        if not piece:
            return ""
        if index not in self._around:
            self._around[index] = self._chunk([self._choice(index, _PIECE, None, None)]).split(_encode(_PIECE))
        return _encode(piece).join(self._around[index])

    def closing(self) -> Iterator[str]:
        """The chunks with which a stream ends."""
        if self.asked.with_usage:
            yield self._chunk([], usage=self._usage())
        yield "data: [DONE]\n\n"

    def _usage_so_far(self) -> dict[str, Any]:
        """Tokens of the prompts, and of all choices as far as they are streamed."""
        prompt = sum(len(self.requests[first].prompt) for _, first in self._lines())
        return {
            "prompt_tokens": prompt, "completion_tokens": self._streamed, "total_tokens": prompt + self._streamed,
        }  # fmt: skip

    def _usage(self) -> dict[str, Any]:
        """Tokens of the prompts, each counted once, and of all choices."""
        firsts = [self._results[first] for _, first in self._lines()]
        prompt = sum(result.prompt_tokens for result in firsts)
        cached = sum(result.cached_tokens or 0 for result in firsts)
        generated = sum(len(result.tokens) for result in self._results.values())
        return {
            "prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip

    def _lines(self) -> Iterator[tuple[BatchLine, int]]:
        """The prompts that were asked, and the number of each one's first choice."""
        first = 0
        for line in self.asked.lines:
            yield line, first
            first += line.samples

    def _choice(self, index: int, piece: str, reason: str | None, event: TokenEvent | None) -> dict[str, Any]:
        logprobs = None
        if event is not None and event.logprob is not None:
            of = chat_logprobs if self.asked.chat else completion_logprobs
            logprobs = of([event.token], [event.logprob], self.text.token)
        what = {"delta": {"content": piece} if piece else {}} if self.asked.chat else {"text": piece}
        return {"index": index, **what, "logprobs": logprobs, "finish_reason": reason}

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> str:
        if self.asked.usage_so_far:
            more = {"usage": self._usage_so_far(), **more}
        return f"data: {self._head}, {_encode({'choices': choices, **more})[1:]}\n\n"
