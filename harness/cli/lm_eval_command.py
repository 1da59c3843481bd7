"""`harness lm-eval`: lm-eval's own command line, with our engines among its models and a folder for its data."""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from importlib import metadata
from pathlib import Path
from typing import Any

from harness import registry
from harness.api import Engine, GenerationRequest, HarnessError, Job, RunSpec, Score, to_json
from harness.api.task import Pair, Questions
from harness.batch import generate
from harness.cli.job_progress import make_job_progress

#: Words of `--model_args` that are not settings of the engine.
_MODEL, _MEMORY = "pretrained", "memory"


def main(arguments: Sequence[str], data: Path | None, cache: Path) -> int:
    """Hands `arguments` to lm-eval; returns its exit code. Raises HarnessError where it is not installed, and for data
    that are broken."""
    command = registry.lm_eval()
    engines = [name for name, entry in registry.engines().items() if not (entry.missing() or entry.builtin_model)]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        words = list(arguments)
        if words and data is not None:
            if any(word.startswith("--include_path") for word in words):
                raise HarnessError("--include_path and --data-dir are both folders of tasks: give one of them")
            command.write_local(data, Path(folder))
            words += ["--include_path", folder]

        def opening(engine: str) -> Callable[[Mapping[str, Any]], _Ready]:
            return lambda settings: opened.enter_context(closing(_Ready(engine, settings, cache)))

        command.register(engines, opening, cache / "scores")
        return int(command.run(words))


class _Ready:
    """An engine and a model, by the words after `--model_args`; it is loaded when it is first asked, and again where
    what it is asked then is longer."""

    def __init__(self, engine: str, settings: Mapping[str, Any], cache: Path) -> None:
        left = {key: value for key, value in settings.items() if key not in (_MODEL, _MEMORY)}
        if _MODEL not in settings:
            raise HarnessError(f"--model_args: name the model, such as {_MODEL}=./opt-6.7b,{_MEMORY}=4GiB")
        overrides = [f"{key}={value}" for key, value in left.items()]
        with make_job_progress() as progress:
            self._cell: RunSpec = generate.cell(
                str(settings[_MODEL]), engine, settings.get(_MEMORY), overrides, progress
            )

            def show(phase: str) -> Callable[[int, int], None]:
                return lambda done, total: progress.advance(phase, done, total)

            self._model = registry.prepare_model(engine, self._cell.model, cache, show("preparing"))
            identity = registry.identity(engine, self._model, cache, show("reading the model"))
        self.tokens = registry.text(engine, self._model)
        self.context = self._model.shape.max_context
        versions = {name: metadata.version(name) for name in ("torch", "transformers", "offload-harness")}
        known = [engine, identity, to_json(self._cell.policy), to_json(self._cell.options), versions]
        self.fingerprint = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]
        self._cache = cache
        self._engine: Engine | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._longest = 0

    def score(self, pairs: Sequence[Pair]) -> Sequence[Score]:
        return self._loaded(Questions(pairs=tuple(pairs))).score(pairs)

    def write(self, prompts: Sequence[GenerationRequest]) -> Sequence[str]:
        asked = Questions(prompts=tuple(prompts))
        results = {result.id: result.tokens for result in self._loaded(asked).generate(prompts)}
        return [self.tokens.decode(results[prompt.id]) for prompt in prompts]

    def close(self) -> None:
        """Frees the engine and what it has on disk. Idempotent."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def _loaded(self, asked: Questions) -> Engine:
        if self._engine is not None and asked.max_sequence <= self._longest:
            return self._engine
        self.close()
        self._scratch = tempfile.TemporaryDirectory(prefix="harness-lm-eval-", dir=self._cache)
        job = Job(Path(self._scratch.name), self._cache, asked.max_sequence, max(1, asked.mean_sequence))
        self._engine = engine = registry.make_engine(self._cell.engine, dict(self._cell.options))
        for note in engine.load(self._model, self._cell.policy, self._cell.limits, job).notes:
            sys.stderr.write(f"{note}\n")
        self._longest = asked.max_sequence
        return engine
