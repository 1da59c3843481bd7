"""Between a request's text and an engine's tokens: requests from a line, text from results, whole or as it comes."""

from collections.abc import Sequence
from dataclasses import replace

from harness.api import GenerationRequest, GenerationResult, HarnessError, ModelShape, SamplingParams
from harness.api.task import Pair, Text
from harness.batch.format import BatchLine, Echo
from harness.common.surrogates import lone_surrogate

#: Between the seeds of a request's samples, so that they lie far apart: 2^64 divided by the golden ratio.
_SEED_STEP = 0x9E3779B97F4A7C15
_SEEDS = 1 << 64
#: What a decoder writes for bytes that are only part of a character.
_PART = "\ufffd"
#: Of a text that grows, so many tokens are decoded again with each new one before the first of them are left out; and
#: so many of the rest still are, since what a decoder writes for a token may depend on its neighbours.
_WINDOW, _CONTEXT = 8, 8


def requests_of(line: BatchLine, shape: ModelShape, text: Text | None) -> tuple[GenerationRequest, ...]:
    """The requests of a line, one a sample; a prompt of token ids needs no `text`.

    Raises HarnessError for what a model of this shape cannot run.
    """
    ids = line.prompt
    if text is None:
        assert not line.messages and not isinstance(ids, str), "text needs a tokenizer"
    elif line.messages:
        ids = text.encode_chat(line.messages)
    elif isinstance(ids, str):
        ids = text.encode(ids)
    name, sampling = f"{line.number}.", line.sampling
    requests = tuple(
        GenerationRequest(f"{name}{i}", tuple(ids), replace(sampling, seed=_seed(sampling.seed, i)))
        for i in range(line.samples)
    )
    try:
        requests[0].require_valid(shape)
    except HarnessError as exc:
        raise HarnessError(str(exc).removeprefix(f"request {name}0: ")) from exc
    return requests


def _seed(seed: int | None, sample: int) -> int | None:
    return seed if seed is None or not sample else (seed + sample * _SEED_STEP) % _SEEDS


def pair_of(text: Text, context: str | Sequence[int], continuation: str | Sequence[int]) -> Pair:
    """A context and its continuation as token ids, each given as text or ids.

    Text as lm-eval encodes it: spaces between both belong to the continuation, whose ids are those that it adds to the
    context's. Raises HarnessError for text with half a surrogate pair.
    """
    for given in (context, continuation):
        if isinstance(given, str) and (escape := lone_surrogate(given)):
            raise HarnessError(f"a text to score is not Unicode text: {escape} is half of a surrogate pair")
    if isinstance(context, str) and isinstance(continuation, str):
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        head = text.encode(stripped) if stripped else ()
        whole = text.encode(stripped + continuation) if stripped else text.encode_plain(continuation)
        return head, whole[len(head) :]
    head = text.encode(context) if isinstance(context, str) else tuple(context)
    return head, text.encode_plain(continuation) if isinstance(continuation, str) else tuple(continuation)


def echo_of(text: Text, line: BatchLine, request: GenerationRequest) -> Echo | None:
    """What the answers to a line begin with, if its `request` asks for the prompt."""
    if not line.echo:
        return None
    return Echo(line.prompt if isinstance(line.prompt, str) else text.decode(request.prompt), request.prompt)


def generated_text(text: Text, result: GenerationResult, sampling: SamplingParams) -> str:
    """The generated text, cut before the stop string that ended it."""
    whole = text.decode(result.tokens)
    if result.finish_reason != "stop":
        return whole
    too_early = len(text.decode(result.tokens[: max(0, sampling.min_tokens - 1)]))
    return whole[: sampling.stop_at(whole, too_early)]


class GrowingText:
    """The text of tokens that come one by one, as far as no later token can change it.

    Holds back what may become a character or a stop string, so that the pieces together are `generated_text`.
    """

    def __init__(self, text: Text, sampling: SamplingParams) -> None:
        self._text = text
        self._sampling = sampling
        self._tokens: list[int] = []
        self._whole = self._shown = ""
        self._first, self._before, self._context = 0, "", ""  # see _decoded
        self._following: int | None = None  # the next `_first`

    def add(self, token: int) -> str:
        """The piece of text that this token settles, often empty."""
        before = len(self._whole.rstrip(_PART))  # a part of a character may become one that ends a stop string
        self._tokens.append(token)
        self._whole = self._decoded()
        settled = self._whole.rstrip(_PART)
        settled = settled[: len(settled) - self._held_back(settled, before)]
        if not settled.startswith(self._shown):
            return ""  # a decoder may still change its mind about spaces
        return self._piece(settled)

    def end(self, result: GenerationResult) -> str:
        """The last piece."""
        return self._piece(generated_text(self._text, result, self._sampling))

    def _decoded(self) -> str:
        """The text of all tokens, of which those from `_first` on are decoded: the text `_before`, whose end they begin
        with as `_context`, and what follows that. So a token takes as long late in a text as early."""
        text = self._text.decode(self._tokens[self._first :])
        if not text.startswith(self._context):  # the decoder has changed what it wrote
            self._first, self._before, self._context = 0, "", ""
            text = self._text.decode(self._tokens)
        whole = self._before + text[len(self._context) :]
        if not whole.endswith(_PART):  # else a character would be cut
            self._leave_out(whole)
        return whole

    def _leave_out(self, whole: str) -> None:
        """Leaves tokens out of what is decoded, where there are many and the text of all of them is `whole`."""
        count = len(self._tokens)
        if self._following is None:
            self._following = count if count - self._first >= _WINDOW else None
        elif count - self._following >= _CONTEXT:
            context = self._text.decode(self._tokens[self._following :])
            if context and whole.endswith(context):  # none: of special tokens alone
                self._first, self._before, self._context = self._following, whole, context
            self._following = None

    def _piece(self, text: str) -> str:
        same = len(self._shown)
        if not text.startswith(self._shown):
            same = next((i for i, (a, b) in enumerate(zip(text, self._shown, strict=False)) if a != b), same)
        piece = text[same:]
        self._shown = text
        return piece

    def _held_back(self, text: str, before: int) -> int:
        """How many characters at the end of `text` may begin a stop string, or are one that the last token completed;
        `before`: characters of the text before it."""
        held = 0
        for stop in self._sampling.stop:
            at = text.find(stop, max(0, before - len(stop) + 1)) if self._may_stop else -1
            most = min(len(stop) - 1, len(text))
            begun = next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
            held = max(held, begun, len(text) - at if at >= 0 else 0)
        return held

    @property
    def _may_stop(self) -> bool:
        return len(self._tokens) >= self._sampling.min_tokens
