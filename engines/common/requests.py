"""What engines do with requests: sequences to score, batches, special tokens and stop strings."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engines.common.text import load_tokenizer
from harness.api import GenerationRequest, HarnessError, ModelShape


def full_sequence(
    index: int, context: Sequence[int], continuation: Sequence[int], shape: ModelShape, begin: int | None
) -> list[int]:
    """Joins the context and continuation of a pair to score; an empty context becomes the token `begin`.

    Raises HarnessError naming pair `index` where the model of this shape cannot score it.
    """
    if not context:
        if begin is None:
            raise HarnessError(
                f"pair {index}: empty context, and the model has no beginning-of-sequence or end-of-sequence token"
            )
        context = [begin]
    full = [*context, *continuation]
    if not continuation:
        raise HarnessError(f"pair {index}: the continuation is empty")
    if len(full) - 1 > shape.max_context:  # the last token is only predicted
        raise HarnessError(
            f"pair {index}: {len(full)} tokens exceed the model's context of {shape.max_context} by more than one"
        )
    shape.require_ids(f"pair {index}", full)
    return full


def batches(
    requests: Sequence[GenerationRequest],
    select: Callable[[Sequence[GenerationRequest], float], list[GenerationRequest]],
    began: float,
) -> Iterator[list[GenerationRequest]]:
    """Yields all requests in batches, and sleeps until a request has arrived.

    `select` picks the next batch from the pending requests, in order of arrival, given the seconds since `began` (of
    `time.perf_counter`).
    """
    pending = sorted(requests, key=lambda r: r.arrival_s)  # stable: equal arrivals keep their order
    while pending:
        wait = pending[0].arrival_s - (time.perf_counter() - began)
        if wait > 0:
            time.sleep(wait)
        batch = select(pending, time.perf_counter() - began)
        selected = {id(r) for r in batch}
        pending = [r for r in pending if id(r) not in selected]
        yield batch


def next_batch(pending: Sequence[GenerationRequest], now_s: float, size: int) -> list[GenerationRequest]:
    """The first `size` requests that have arrived by `now_s` and whose prompt is as long as the first one's."""
    length = len(pending[0].prompt)
    return [r for r in pending if r.arrival_s <= now_s and len(r.prompt) == length][:size]


def generation_settings(folder: str) -> SimpleNamespace:
    """Fields of a model folder's generation_config.json, or else of its config.json, such as `eos_token_id`."""
    files = [path for name in ("generation_config.json", "config.json") if (path := Path(folder) / name).is_file()]
    return SimpleNamespace(**json.loads(files[0].read_text())) if files else SimpleNamespace()


def decoder(folder: str, requests: Sequence[GenerationRequest]) -> Callable[[Sequence[int]], str] | None:
    """A function from token ids to text, by the model folder's tokenizer; None if no request has stop strings, which
    need it. Raises UnsupportedError where the folder has none."""
    if not any(request.sampling.stop for request in requests):
        return None
    tokenizer = load_tokenizer(Path(folder), "stop strings need one")
    return lambda tokens: str(tokenizer.decode(tokens))


def special_tokens(config: Any, vocab: int) -> tuple[tuple[int, ...], int | None]:
    """The end-of-sequence ids, and the id that stands for an empty context (as lm-eval chooses it).

    Leaves out ids at or above `vocab`, which some configurations inherit: no model can generate them.
    """
    eos = getattr(config, "eos_token_id", None)
    eos = () if eos is None else (eos,) if isinstance(eos, int) else eos
    end_ids = tuple(e for e in eos if e < vocab)
    begin = getattr(config, "bos_token_id", None)
    return end_ids, begin if begin is not None and begin < vocab else next(iter(end_ids), None)
