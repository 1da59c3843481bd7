"""The lines of a batch job: requests in OpenAI's batch format or as plain prompts, and the answers to them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from harness.api import GenerationResult, HarnessError, SamplingParams, TokenLogprob
from harness.common.regular_file import parse_json
from harness.common.surrogates import lone_surrogate
from harness.common.words import nearest

#: OpenAI's limits on `n` and `top_logprobs`.
_MAX_SAMPLES, _MAX_ALTERNATIVES = 128, 20
#: Stop strings of a request, and characters of one: each is looked for at every token.
_MAX_STOPS, _MAX_STOP = 64, 1024
#: More than any object of a request has.
_MAX_SETTINGS = 100

#: Settings of OpenAI's chats with which a model calls functions.
_CALLS = ("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call")

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
#: A list of which the first wrong item is told: an error for each of millions would take gigabytes.
Items = Annotated[list[T], Field(fail_fast=True)]


@dataclass(frozen=True)
class BatchLine:
    """A line of the input: a prompt as text or token ids, or a chat's messages, each with `role` and `content`.

    `model`: the name that the line gives, which a job of one model leaves aside. `echo`: the answer begins with the
    prompt.
    """

    number: int
    id: str | None
    prompt: str | tuple[int, ...]
    messages: tuple[Mapping[str, str], ...]
    sampling: SamplingParams
    samples: int
    model: str | None = None
    echo: bool = False


@dataclass(frozen=True)
class Echo:
    """The prompt with which an answer begins."""

    text: str
    tokens: tuple[int, ...]


class LineError(HarnessError):
    """What is wrong with a line; `id` is its custom_id if that is valid."""

    def __init__(self, message: str, id_: str | None = None) -> None:
        super().__init__(message)
        self.id = id_


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few(cls, data: Any) -> Any:
        """There would be an error for each that is unknown."""
        if isinstance(data, dict) and len(data) > _MAX_SETTINGS:
            raise PydanticCustomError("too_many", "has {count} settings, more than there are", {"count": len(data)})
        return data


class _Text(_Strict):
    type: Literal["text"]
    text: str


class _Message(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[_Text]


class _Schema(_Strict):
    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class _Form(_Strict):
    """The form that an answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None

    @property
    def schema_text(self) -> str | None:
        """The schema of an answer in JSON. Raises LineError where the form has none."""
        if (self.type == "json_schema") is not (self.json_schema is not None):
            raise LineError("response_format: json_schema goes with type json_schema")
        if self.json_schema is not None:
            return json.dumps(self.json_schema.schema_)
        return '{"type": "object"}' if self.type == "json_object" else None


class _Body(_Strict):
    """Settings of completions and chats. Those that a job does not support are accepted at their neutral value only."""

    model: str | None = None  # part of the format; the job runs its own --model
    user: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int = 0
    min_p: float = 0.0
    n: Annotated[int, Field(ge=1, le=_MAX_SAMPLES)] | None = None
    seed: int | None = None
    stop: str | Items[str] | None = None
    ignore_eos: bool = False
    stream: Literal[False] | None = None
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    response_format: _Form | None = None


class _Prompt(_Strict):
    prompt: str | Items[int]


class _Completion(_Body, _Prompt):
    logprobs: Annotated[int, Field(ge=0, le=_MAX_ALTERNATIVES)] | None = None
    echo: bool | None = None


class _Chat(_Body):
    messages: Annotated[Items[_Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_MAX_ALTERNATIVES)] | None = None


class _Row(_Strict):
    """A line of OpenAI's batch format."""

    custom_id: Annotated[str, Field(min_length=1)]
    method: Literal["POST"] = "POST"
    url: Literal["/v1/completions", "/v1/chat/completions"]
    body: dict[str, Any]


def parse_line(raw: bytes, number: int, max_tokens: int, seed: int) -> BatchLine:
    """Parses line `number`. `max_tokens` and `seed` are the defaults for lines without them.

    A line in OpenAI's batch format has its defaults (temperature 1). A plain line, an object with `prompt` or
    `messages` and the same settings beside it, decodes greedily. A request without a seed gets one derived from `seed`
    and its line number, so that reruns are reproducible. Raises LineError.
    """
    data = parse_object(raw)
    custom_id = data.get("custom_id")
    id_ = custom_id if isinstance(custom_id, str) and custom_id else None
    rest = {key: data[key] for key in data if key != "custom_id"}
    try:
        require_unicode(rest)
        if "body" in data:
            row = checked(_Row, data, "")
            settings, where, temperature = row.body, "body.", 1.0
            chat = row.url.endswith("/chat/completions")
        else:
            if custom_id is not None and id_ is None:
                raise LineError("custom_id: expected a string that is not empty")
            settings, where, temperature = rest, "", 0.0
            chat = "messages" in settings
        return parse_body(settings, chat, number, max_tokens, seed, id_, where, temperature)
    except LineError as exc:
        raise LineError(str(exc), id_) from None


def parse_body(
    settings: Mapping[str, Any], chat: bool, number: int, max_tokens: int, seed: int, id_: str | None = None,
    where: str = "", temperature: float = 1.0,
) -> BatchLine:  # fmt: skip
    """Request `number` with the `settings` of a completion or a `chat`, which messages call by `where` and their name;
    the rest as in `parse_line`. Raises LineError."""
    require_unicode(settings)
    body = checked(_Chat, settings, where) if chat else checked(_Completion, settings, where)
    return _line(body, number, id_, temperature, max_tokens, seed)


def parse_prompts(
    settings: Mapping[str, Any], prompts: Sequence[Any], number: int, max_tokens: int, seed: int
) -> tuple[BatchLine, ...]:
    """Requests of completions, the first of number `number`, that differ in their prompts: other settings are checked
    once. Raises LineError."""
    first = parse_body({**settings, "prompt": prompts[0]}, False, number, max_tokens, seed)
    lines = [first]
    for prompt in prompts[1:]:
        number += 1
        require_unicode({"prompt": prompt})
        sampling = first.sampling
        if settings.get("seed") is None:
            sampling = replace(sampling, seed=_seed_of(number, seed))
        given = _prompt_of(checked(_Prompt, {"prompt": prompt}, ""))
        lines.append(replace(first, number=number, prompt=given, sampling=sampling))
    return tuple(lines)


def body_schema(chat: bool) -> dict[str, Any]:
    """The JSON Schema of a completion's settings, or a chat's, without references."""
    schema = (_Chat if chat else _Completion).model_json_schema()
    parts = schema.pop("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, list):
            return [inlined(one) for one in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return inlined(parts[node["$ref"].rpartition("/")[2]])
        return {key: inlined(value) for key, value in node.items()}

    return cast(dict[str, Any], inlined(schema))


def answer(line: BatchLine, model: str, results: Sequence[GenerationResult], texts: Sequence[str],
           token_text: Callable[[int], str], echo: Echo | None = None) -> dict[str, Any]:  # fmt: skip
    """The output line for a request that was run, in OpenAI's batch format with the number of the input line added.

    `results` and `texts` hold one entry per sample; `token_text` decodes a single token; `echo` begins each text.
    """
    make = _chat_choice if line.messages else partial(_completion_choice, echo)
    prompt, generated = results[0].prompt_tokens, sum(len(r.tokens) for r in results)
    body = {
        "object": "chat.completion" if line.messages else "text_completion",
        "model": model,
        "choices": [make(i, r, t, token_text) for i, (r, t) in enumerate(zip(results, texts, strict=True))],
        "usage": {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated},
    }
    return {"line": line.number, "custom_id": line.id, "response": {"status_code": 200, "body": body}, "error": None}


def refusal(number: int, id_: str | None, message: str) -> dict[str, Any]:
    """The output line for a line that was refused."""
    error = {"code": "invalid_request", "message": message}
    return {"line": number, "custom_id": id_, "response": None, "error": error}


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object that a line or body is. Raises LineError."""
    try:
        data = parse_json(raw.decode("utf-8"))
    except UnicodeDecodeError as exc:
        raise LineError(f"is not UTF-8 text (byte {exc.start + 1})") from None
    except ValueError as exc:
        raise LineError(f"is not JSON: {exc}") from None
    if not isinstance(data, dict):
        raise LineError(f"expected a JSON object, got {type(data).__name__}")
    return data


def require_unicode(settings: Mapping[str, Any]) -> None:
    """Refuses text that no tokenizer reads and pydantic does not expect. A custom_id only comes back."""
    try:
        text = json.dumps(settings, ensure_ascii=False)
    except RecursionError:  # writing takes a little more of the stack than reading
        raise LineError("is nested too deeply") from None
    if escape := lone_surrogate(text):
        raise LineError(f"is not Unicode text: {escape} is half of a surrogate pair")


def checked(kind: type[M], data: Mapping[str, Any], where: str) -> M:
    """`data` as a model of pydantic's, whose settings messages call by `where` and their name. Raises LineError for
    what is unknown, missing or of another type."""
    # a misspelt key comes before the key that is missing because of it; and one of a million is told, not each
    if (unknown := next((key for key in data if key not in kind.model_fields), None)) is not None:
        raise LineError(_unknown(unknown, where + unknown, kind))
    try:
        return kind.model_validate(data)
    except ValidationError as exc:
        errors = exc.errors(include_url=False, include_input=False)
    error = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    key = str(error["loc"][0])
    path = where + (".".join(map(str, error["loc"])) if error["type"] != "union" else key)
    if error["type"] == "extra_forbidden":
        raise LineError(_unknown(key, path, kind))
    if error["type"] == "missing":
        raise LineError(f"{path} is missing")
    if key in ("prompt", "stop"):
        expected = "token ids" if key == "prompt" else "strings"
        raise LineError(f"{where}{key}: expected a string or a list of {expected}")
    raise LineError(f"{path}: {error['msg'][0].lower()}{error['msg'][1:]}")


def _unknown(key: str, path: str, kind: type[BaseModel]) -> str:
    """That there is no setting `path`, whose first part is `key`."""
    if key in _CALLS:
        return f"{path}: functions are not called; ask for an answer by response_format json_schema instead"
    return f"{path} is not a known setting; {nearest(key, kind.model_fields)}"


def _line(
    body: _Completion | _Chat, number: int, id_: str | None, temperature: float, max_tokens: int, seed: int
) -> BatchLine:
    messages: tuple[Mapping[str, str], ...] = ()
    if isinstance(body, _Chat):
        messages = tuple({"role": m.role, "content": _plain(m.content)} for m in body.messages)
        alternatives = (body.top_logprobs or 0) if body.logprobs else None
        if body.top_logprobs and not body.logprobs:
            raise LineError("top_logprobs needs logprobs: true")
        own_limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    else:
        alternatives, own_limit = body.logprobs, body.max_tokens
    echo = isinstance(body, _Completion) and bool(body.echo)
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if "" in stop:
        raise LineError("stop: an empty string would end every answer at once")
    if len(stop) > _MAX_STOPS or any(len(one) > _MAX_STOP for one in stop):
        raise LineError(f"stop: expected at most {_MAX_STOPS} strings of at most {_MAX_STOP} characters")
    sampling = SamplingParams(
        max_tokens=max_tokens if own_limit is None else own_limit,
        min_tokens=body.min_tokens,
        temperature=temperature if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=_seed_of(number, seed) if body.seed is None else body.seed,
        stop=stop,
        ignore_eos=body.ignore_eos,
        logprobs=alternatives,
        prompt_logprobs=echo and alternatives is not None,
        json_schema=None if body.response_format is None else body.response_format.schema_text,
    )
    prompt = _prompt_of(body) if isinstance(body, _Completion) else ()
    return BatchLine(number, id_, prompt, messages, sampling, body.n or 1, body.model, echo)


def _seed_of(number: int, seed: int) -> int:
    """Of request `number`, if it gives none."""
    return (seed << 32) + number


def _prompt_of(body: _Prompt) -> str | tuple[int, ...]:
    return body.prompt if isinstance(body.prompt, str) else tuple(body.prompt)


def _plain(content: str | list[_Text]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _completion_choice(
    echo: Echo | None, index: int, result: GenerationResult, text: str, token_text: Callable[[int], str]
) -> dict[str, Any]:
    tokens, values = result.tokens, list[TokenLogprob | None](result.logprobs)
    if echo is not None:
        text = echo.text + text
        tokens, values = (*echo.tokens, *tokens), [None, *result.prompt_logprobs, *values]
    logprobs = completion_logprobs(tokens, values, token_text) if result.logprobs else None
    return {"index": index, "text": text, "finish_reason": result.finish_reason, "logprobs": logprobs}


def _chat_choice(index: int, result: GenerationResult, text: str, token_text: Callable[[int], str]) -> dict[str, Any]:
    logprobs = chat_logprobs(result.tokens, result.logprobs, token_text) if result.logprobs else None
    message = {"role": "assistant", "content": text}
    return {"index": index, "message": message, "finish_reason": result.finish_reason, "logprobs": logprobs}


def completion_logprobs(
    tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None], token_text: Callable[[int], str]
) -> dict[str, Any]:
    """Log-probabilities of tokens as a completion has them; the first of a prompt has none."""
    return {
        "tokens": [token_text(t) for t in tokens],
        "token_logprobs": [p and p.logprob for p in logprobs],
        # in ascending order, so that among tokens with the same text the likeliest wins
        "top_logprobs": [p and {token_text(t): value for t, value in reversed(p.top)} for p in logprobs],
    }


def chat_logprobs(
    tokens: Sequence[int], logprobs: Sequence[TokenLogprob], token_text: Callable[[int], str]
) -> dict[str, Any]:
    """Log-probabilities of tokens as a chat has them."""

    def entry(token: int, logprob: TokenLogprob) -> dict[str, Any]:
        top = [{"token": token_text(t), "logprob": value} for t, value in logprob.top]
        return {"token": token_text(token), "logprob": logprob.logprob, "top_logprobs": top}

    return {"content": [entry(t, p) for t, p in zip(tokens, logprobs, strict=True)]}
