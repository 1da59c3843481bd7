"""A model that answers questions one after another: loaded on the first, and again for a longer one."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from harness import registry
from harness.api import Engine, GenerationRequest, HarnessError, LocalModel, RunSpec
from harness.api.task import Text
from harness.batch.format import BatchLine
from harness.batch.job import Lengths, Progress, loaded_engine
from harness.batch.texts import requests_of

#: The shortest sequence that a model is loaded for where nobody says how long one may be.
_SHORTEST = 64


class ModelSession:
    """The model of a cell in its engine. `note` takes what the engine says when it loads.

    Raises HarnessError for a model that cannot be made ready.
    """

    def __init__(
        self, cell: RunSpec, cache: Path, progress: Progress, note: Callable[[str], None] | None = None
    ) -> None:
        self.cell = cell
        self._cache = cache
        self._progress = progress
        self._note = note or progress.note
        self.model: LocalModel = registry.prepare_model(
            cell.engine, cell.model, cache, partial(progress.advance, "preparing")
        )
        self._opened = ExitStack()
        self._engine: Engine | None = None
        self._longest = self._sequences = 0

    @cached_property
    def text(self) -> Text:
        """The model's tokenizer. Raises UnsupportedError where it has none."""
        return registry.text(self.cell.engine, self.model)

    def engine(self, lengths: Lengths, sequences: int) -> Engine:
        """The engine, loaded for sequences of these lengths and for as many at once as its policy allows, at most
        `sequences`; it stays as it is where it was loaded for as much.

        Raises InfeasibleError where the engine has no memory for them, and whatever else an engine raises.
        """
        sequences = min(sequences, self.cell.policy.gpu_batch_size)
        if self._engine is None or lengths.longest > self._longest or sequences > self._sequences:
            self.close()
            sized = replace(self.cell, policy=replace(self.cell.policy, gpu_batch_size=sequences))
            shown = partial(self._progress.advance, "loading")
            loading = loaded_engine(sized, self.model, self._cache, lengths, self._note, shown)
            self._engine = self._opened.enter_context(loading)
            self._longest, self._sequences = lengths.longest, sequences
        return self._engine

    def engine_for(self, lengths: Sequence[tuple[int, int]]) -> Engine:
        """The engine, loaded for sequences of these prompt and new tokens."""
        return self.engine(Lengths.of(lengths), len(lengths))

    def request(self, line: BatchLine) -> GenerationRequest:
        """The request of a line with one sample. Raises HarnessError for what the model cannot run."""
        # a model without a tokenizer still takes token ids
        text = self.text if line.messages or isinstance(line.prompt, str) else None
        return requests_of(line, self.model.shape, text)[0]

    def close(self) -> None:
        """Frees the engine and what it has on disk; the next question loads it again. Idempotent."""
        self._engine, self._longest, self._sequences = None, 0, 0
        self._opened.close()


def longest_request(asked: int | None, cell: RunSpec, model: LocalModel) -> int:
    """The most tokens of a request: as many as are asked for, or else as the model and the memory plan allow.

    Raises HarnessError for more than the model's context, InfeasibleError where the memory holds no short one.
    """
    context = model.shape.max_context
    if asked is not None:
        if asked > context:
            raise HarnessError(f"--max-sequence {asked}: the model's context has {context} tokens")
        return asked
    planned = registry.longest_sequence(cell, model, min(_SHORTEST, context))
    return context if planned is None else min(context, planned)
