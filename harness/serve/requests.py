"""HTTP bodies to requests: what a client asks for, checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.api import GenerationRequest, HarnessError, ModelShape
from harness.api.task import Text
from harness.batch.format import BatchLine, LineError, parse_body, parse_object, parse_prompts
from harness.batch.texts import requests_of

#: Settings that are the stream's, not the answer's, and its options.
_STREAM = ("stream", "stream_options")
_USAGE = ("include_usage", "continuous_usage_stats")


class RequestError(HarnessError):
    """What is wrong with a request, by the HTTP `status` and OpenAI's `code` of it."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.http_status, self.code = status, code

    @classmethod
    def of_line(cls, exc: LineError) -> "RequestError":
        """A line's error as a request's; one that begins with its verb (`is not JSON`) gets the request as subject."""
        return cls(f"the request {exc}" if str(exc).startswith("is ") else str(exc))


def no_model(asked: str, served: str) -> str:
    """The message for a request that names another model than the one served."""
    return f"no model {asked!r} here; this server has {served!r}"


@dataclass(frozen=True)
class ParsedRequest:
    """What a client asks for: a line for each of its prompts, and whether the answer is to be streamed, with its usage
    at the end, and so far in each chunk (`usage_so_far`, as vLLM's servers have it)."""

    lines: tuple[BatchLine, ...]
    chat: bool
    stream: bool
    with_usage: bool
    usage_so_far: bool = False

    @property
    def choices(self) -> int:
        """How many answers there will be."""
        return sum(line.samples for line in self.lines)


def parse(raw: bytes, chat: bool, number: int, model: str, max_tokens: int, most: int) -> ParsedRequest:
    """The body of request `number` to a server of `model` that holds `most` answers at a time. Raises RequestError."""
    try:
        settings = parse_object(raw)
        stream, usage = _stream(settings)
        settings = {key: value for key, value in settings.items() if key not in _STREAM}
        prompts = _prompts(settings, chat)
        _refuse_too_many(len(prompts), settings.get("n"), most)
        if prompts:
            lines = parse_prompts(settings, prompts, number, max_tokens, seed=0)
        else:
            lines = (parse_body(settings, chat, number, max_tokens, seed=0),)
    except LineError as exc:
        raise RequestError.of_line(exc) from None
    if lines[0].model not in (None, model):
        raise RequestError(no_model(str(lines[0].model), model), 404, "model_not_found")
    if stream and lines[0].sampling.prompt_logprobs:
        raise RequestError("echo with logprobs: only without stream")
    return ParsedRequest(lines, chat, stream, "include_usage" in usage, usage == set(_USAGE))


def requests_for(asked: ParsedRequest, shape: ModelShape, text: Text, longest: int) -> list[GenerationRequest]:
    """The engine's requests, one for each choice. Raises RequestError for what it cannot run."""
    requests = list[GenerationRequest]()
    for line in asked.lines:
        try:
            requests += requests_of(line, shape, text)
        except HarnessError as exc:
            raise RequestError(str(exc)) from None
        tokens = len(requests[-1].prompt) + requests[-1].sampling.max_tokens
        if tokens > longest:
            raise RequestError(
                f"{len(requests[-1].prompt)} prompt + {requests[-1].sampling.max_tokens} new tokens exceed the "
                f"{longest} that this server holds for a request", code="context_length_exceeded",
            )  # fmt: skip
    return requests


def _stream(settings: Mapping[str, Any]) -> tuple[bool, set[str]]:
    """Whether the answer is streamed, and its options that are set."""
    stream, options = settings.get("stream"), settings.get("stream_options")
    if stream not in (None, True, False):
        raise RequestError("stream: expected true or false")
    if options is None:
        return bool(stream), set()
    if not stream:
        raise RequestError("stream_options: only for a stream")
    if not isinstance(options, dict) or not set(options) <= set(_USAGE):
        raise RequestError(f"stream_options: expected an object with {' and '.join(_USAGE)}")
    return True, {name for name in options if options[name] is True}


def _prompts(settings: Mapping[str, Any], chat: bool) -> Sequence[str | list[Any]]:
    """The prompts of a list of them; none where it is no such list."""
    prompt = settings.get("prompt")
    if chat or not isinstance(prompt, list) or not all(isinstance(one, str | list) for one in prompt):
        return []
    return prompt


def _refuse_too_many(prompts: int, samples: Any, most: int) -> None:
    """Raises RequestError for more answers than a server can ever hold."""
    answers = max(1, prompts) * (samples if isinstance(samples, int) else 1)
    if answers > most:
        raise RequestError(f"the request asks for {answers} answers, and this server holds at most {most} at a time; "
                           "send several requests")  # fmt: skip
