"""Makes our engines models of lm-eval's command line, with a cache of their answers."""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import lm_eval.models  # noqa: F401  (registers lm-eval's models, which it skips once others are registered)
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model

from harness.api import GenerationRequest, HarnessError, Score, first_line
from harness.api.services import LmEvalModel, OpenModel
from harness.api.task import Circumstances, Pair
from harness.common.files import os_errors
from harness.common.regular_file import open_regular, read_regular
from suites.tasks.lm_eval_bridge import TokenModel, write_local

__all__ = ["register", "run", "write_local"]  # implements harness.api.services.LmEval

Q = TypeVar("Q")

#: Requests that an engine answers before the cache is written.
_BATCH = 1024
_MAX_CACHE_BYTES = 1 << 30


def run(arguments: Sequence[str]) -> int:
    """Runs lm-eval's command line; returns its exit code. Raises HarnessError for its errors."""
    before, sys.argv = sys.argv, ["lm-eval", *arguments]
    try:
        cli_evaluate()
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except HarnessError:
        raise
    except Exception as exc:  # lm-eval, its tasks' code and the hub client raise anything
        raise HarnessError(f"lm-eval: {first_line(exc)}") from exc
    finally:
        sys.argv = before
    return 0


def register(name: str, load: OpenModel, cache: Path) -> None:
    """Registers an engine with lm-eval by its name; the folder `cache` keeps its answers for the next run."""
    register_model(name)(_model_class(load, cache))


def _model_class(load: OpenModel, cache: Path) -> type[TokenModel]:
    class EngineModel(TokenModel):
        """An engine behind lm-eval's interface."""

        def __init__(self, model: LmEvalModel) -> None:
            super().__init__(Circumstances(model.tokens, model.context))
            self._engine = model
            self._cache = AnswerCache(cache / f"{model.fingerprint}.jsonl")

        @classmethod
        def create_from_arg_obj(
            cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
        ) -> Any:
            """lm-eval's constructor for its command line; `additional_config` holds options of lm-eval's models."""
            if str((additional_config or {}).get("batch_size") or 1) != "1":
                raise HarnessError(
                    "--batch_size is for lm-eval's own models: set policy.gpu_batch_size in --model_args"
                )
            return cls(load(arg_dict))

        def scores(self, pairs: Sequence[Pair]) -> Sequence[Score]:
            def score(batch: Sequence[Pair]) -> list[tuple[float, bool]]:
                return [(s.logprob, s.is_greedy) for s in self._engine.score(batch)]

            answers = self._cache.answers(
                [_key(pair) for pair in pairs], pairs, lambda pair: sum(map(len, pair)), score, "scored"
            )
            self._report_truncation()
            return [Score(float(logprob), bool(greedy)) for logprob, greedy in answers]

        def texts(self, prompts: Sequence[GenerationRequest]) -> Sequence[str]:
            keys = [_key((prompt.prompt, asdict(prompt.sampling))) for prompt in prompts]

            def size(prompt: GenerationRequest) -> int:
                return len(prompt.prompt) + prompt.sampling.max_tokens

            answers = self._cache.answers(keys, prompts, size, self._engine.write, "written")
            self._report_truncation()
            return answers

        def _report_truncation(self) -> None:
            if self.truncated:
                sys.stderr.write(
                    f"{self.truncated} prompts were longer than the model's context of {self._engine.context} and "
                    "lost their beginning\n"
                )
                self.truncated = 0

    return EngineModel


class AnswerCache:
    """Answers by key, in an append-only file of one line each. Raises HarnessError for a file it cannot read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._answers: dict[str, Any] = {}
        try:
            lines = read_regular(path, _MAX_CACHE_BYTES).decode().splitlines() if path.exists() else []
        except (OSError, UnicodeDecodeError) as exc:
            raise HarnessError(f"{path}: answers of an earlier run cannot be read: {exc}; remove the file") from None
        for line in lines:
            try:
                key, answer = json.loads(line)
                self._answers[str(key)] = answer
            except (ValueError, TypeError):
                continue  # the incomplete last line of a killed run

    def answers(
        self,
        keys: Sequence[str],
        questions: Sequence[Q],
        size: Callable[[Q], int],
        compute: Callable[[Sequence[Q]], Sequence[Any]],
        action: str,
    ) -> list[Any]:
        """The answer to each question from the cache, or else by `compute`, cached batch by batch.

        `action` names the work on the progress line. Raises HarnessError where the cache cannot be written.
        """
        missing = {key: question for key, question in zip(keys, questions, strict=True) if key not in self._answers}
        # longest first, so that an engine loaded for the first batch has memory for the others
        order = sorted(missing, key=lambda key: -size(missing[key]))
        for start in range(0, len(order), _BATCH):
            _show_progress(action, start, len(order))
            batch = order[start : start + _BATCH]
            self._add(batch, compute([missing[key] for key in batch]))
        if order:
            _show_progress(action, len(order), len(order))
        return [self._answers[key] for key in keys]

    def _add(self, keys: Sequence[str], answers: Sequence[Any]) -> None:
        lines = [json.dumps([key, answer]) for key, answer in zip(keys, answers, strict=True)]
        with os_errors(f"{self._path} cannot be written", "free space"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open_regular(self._path, "ab") as file:
                file.write(("\n" + "\n".join(lines) + "\n").encode())  # a killed run may have left an incomplete line
        self._answers |= dict(zip(keys, answers, strict=True))


def _key(question: Any) -> str:
    return hashlib.sha256(json.dumps(question).encode()).hexdigest()


def _show_progress(action: str, done: int, total: int) -> None:
    sys.stderr.write(f"{action} {done} of {total}\n")
    sys.stderr.flush()
