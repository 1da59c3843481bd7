"""An engine and a model as lm-eval's command line asks for them: loaded on the first question, then kept."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from harness import registry
from harness.api import Engine, GenerationRequest, HarnessError, Score, to_json
from harness.api.task import Pair, Questions
from harness.batch.job import Lengths, Progress, job_cell
from harness.batch.session import ModelSession

#: Keys of `--model_args` that are not settings of the engine.
_MODEL, _MEMORY = "pretrained", "memory"


class EngineModel:
    """Implements harness.api.services.LmEvalModel by an engine.

    `settings` are the pairs of `--model_args`: the model, its memory, and overrides as of `harness generate --set`.
    `progress` shows how the model is prepared, and `note` takes what the engine says when it loads. Raises HarnessError
    for settings that are unknown or malformed.
    """

    def __init__(
        self, engine: str, settings: Mapping[str, Any], cache: Path, progress: Progress, note: Callable[[str], None]
    ) -> None:
        if _MODEL not in settings:
            raise HarnessError(f"--model_args: name the model, such as {_MODEL}=./opt-6.7b,{_MEMORY}=4GiB")
        overrides = [f"{key}={value}" for key, value in settings.items() if key not in (_MODEL, _MEMORY)]
        cell = job_cell(str(settings[_MODEL]), engine, settings.get(_MEMORY), overrides, progress.note)
        self._session = ModelSession(cell, cache, progress, note)
        model = self._session.model
        identity = registry.identity(engine, model, cache, partial(progress.advance, "reading the model"))
        self.tokens = self._session.text
        self.context = model.shape.max_context
        versions = {name: metadata.version(name) for name in ("torch", "transformers", "offload-harness")}
        decisive = [engine, identity, to_json(cell.policy), to_json(cell.options), versions]
        self.fingerprint = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]

    def score(self, pairs: Sequence[Pair]) -> Sequence[Score]:
        """Log-likelihoods of continuations."""
        return self._loaded(Questions(pairs=tuple(pairs))).score(pairs)

    def write(self, prompts: Sequence[GenerationRequest]) -> Sequence[str]:
        """The text generated after each prompt."""
        engine = self._loaded(Questions(prompts=tuple(prompts)))
        tokens = {result.id: result.tokens for result in engine.generate(prompts)}
        return [self.tokens.decode(tokens[prompt.id]) for prompt in prompts]

    def close(self) -> None:
        """Frees the engine and what it has on disk. Idempotent."""
        self._session.close()

    def _loaded(self, questions: Questions) -> Engine:
        """The engine, loaded again where these questions are longer than those it was loaded for."""
        sequences = self._session.cell.policy.gpu_batch_size
        return self._session.engine(Lengths.of(questions.lengths), sequences)
