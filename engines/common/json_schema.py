"""Holds an answer to a JSON schema: which tokens may come next, by llguidance."""

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from engines.common.text import load_tokenizer
from harness.api import HarnessError, UnsupportedError, first_line
from harness.common.packages import install_extra

#: Without a bound a model may write blanks for ever.
_COMPILED: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Constraint:
    """One answer that is to be JSON; `accept` takes its tokens in turn."""

    def __init__(self, matcher: Any, vocab: int) -> None:
        self._matcher = matcher
        self._vocab = vocab

    def allowed(self) -> torch.Tensor:
        """Which tokens may come next: booleans [vocab]."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return torch.from_numpy(np.unpackbits(bits, bitorder="little", count=self._vocab).astype(bool))

    def accept(self, token: int) -> Literal["stop", "length"] | None:
        """Takes the next token; returns why none may follow: the answer is complete, or llguidance gives up on a schema
        that takes too much of it."""
        self._matcher.consume_token(token)
        if self._matcher.is_error():
            return "length"
        return "stop" if self._matcher.is_stopped() else None


def constraints(folder: Path, vocab: int, eos: Sequence[int]) -> Callable[[str], Constraint]:
    """Makes the constraint of a schema in JSON for a model's tokenizer, which ends answers with one of `eos`.

    Raises UnsupportedError where llguidance is not installed or the folder has no fast tokenizer. What is returned
    raises HarnessError for a schema that cannot be followed.
    """
    if not importlib.util.find_spec("llguidance"):
        raise UnsupportedError(f"response_format needs llguidance: {install_extra('structured')}")
    import llguidance.hf

    tokenizer = load_tokenizer(folder, "response_format needs one")
    try:
        known = llguidance.hf.from_tokenizer(tokenizer, n_vocab=max(vocab, len(tokenizer)), eos_token=list(eos) or None)
    except Exception as exc:
        raise UnsupportedError(f"response_format: llguidance does not take this tokenizer: {first_line(exc)}") from exc

    def make(schema: str) -> Constraint:
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(json.loads(schema), overrides=_COMPILED)
            matcher = llguidance.LLMatcher(known, grammar, log_level=0)
        except (ValueError, RecursionError) as exc:
            raise HarnessError(f"response_format: the schema cannot be followed: {first_line(exc)}") from None
        if error := matcher.get_error():
            raise HarnessError(f"response_format: the schema cannot be followed: {first_line(Exception(error))}")
        return Constraint(matcher, vocab)

    return make
