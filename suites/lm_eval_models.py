"""Our engines as models of lm-eval's own command line: loaded when they are first asked, and never asked twice."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import lm_eval.models  # noqa: F401  (registers its own models; lm-eval leaves them out where it finds others)
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model

from harness.api import GenerationRequest, HarnessError, Score, first_line
from harness.api.services import LmEvalModel, OpenModel
from harness.api.task import Pair
from suites import lm_eval_local
from suites.lm_eval_bridge import TokenModel

Q = TypeVar("Q")

#: Questions that are answered, and then kept, at a time.
_PIECE = 1024


def run(words: Sequence[str]) -> int:
    """lm-eval's command line on `words`; returns its exit code. Raises HarnessError for what it does not know."""
    before, sys.argv = sys.argv, ["lm-eval", *words]
    try:
        cli_evaluate()
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except HarnessError:
        raise
    except Exception as exc:  # lm-eval, its tasks' code and the hub raise whatever they like
        raise HarnessError(f"lm-eval: {first_line(exc)}") from exc
    finally:
        sys.argv = before
    return 0


def write_local(data: Path, into: Path) -> None:
    """Task files that read the folder `data`; see lm_eval_local.py."""
    lm_eval_local.write(data, into)


def register(names: Sequence[str], opening: Callable[[str], OpenModel], kept: Path) -> None:
    """Makes engines known to lm-eval by their names; answers are kept in the folder `kept` for the next run."""
    for name in names:
        register_model(name)(_class_of(opening(name), kept))


def _class_of(opening: OpenModel, kept: Path) -> type[TokenModel]:
    class EngineModel(TokenModel):
        """One engine behind lm-eval's interface."""

        def __init__(self, ready: LmEvalModel) -> None:
            super().__init__(ready.tokens, ready.context, 0)
            self._ready = ready
            self._kept = Kept(kept / f"{ready.fingerprint}.jsonl")

        @classmethod
        def create_from_arg_obj(
            cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
        ) -> Any:
            """As its command line calls it, with what it adds for its own models."""
            if str((additional_config or {}).get("batch_size") or 1) != "1":
                raise HarnessError(
                    "--batch_size is for lm-eval's own models: set policy.gpu_batch_size in --model_args"
                )
            return cls(opening(arg_dict))

        def scores(self, pairs: Sequence[Pair]) -> Sequence[Score]:
            def scored(piece: Sequence[Pair]) -> list[tuple[float, bool]]:
                return [(score.logprob, score.is_greedy) for score in self._ready.score(piece)]

            found = self._kept.answers(
                [_key(pair) for pair in pairs], pairs, lambda pair: sum(map(len, pair)), scored, "scored"
            )
            self._tell_what_was_cut()
            return [Score(float(logprob), bool(greedy)) for logprob, greedy in found]

        def texts(self, prompts: Sequence[GenerationRequest]) -> Sequence[str]:
            keys = [_key((prompt.prompt, asdict(prompt.sampling))) for prompt in prompts]

            def size(prompt: GenerationRequest) -> int:
                return len(prompt.prompt) + prompt.sampling.max_tokens

            found = self._kept.answers(keys, prompts, size, self._ready.write, "written")
            self._tell_what_was_cut()
            return found

        def _tell_what_was_cut(self) -> None:
            if self.truncated:
                sys.stderr.write(
                    f"{self.truncated} prompts were longer than the model's context of {self._ready.context} and "
                    "lost their beginning\n"
                )
                self.truncated = 0

    return EngineModel


class Kept:
    """Answers that are known, a line each in a file that is only ever added to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Any] = {}
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        except (OSError, UnicodeDecodeError) as exc:
            raise HarnessError(f"{path}: answers of an earlier run cannot be read: {exc}; remove the file") from None
        for line in lines:
            try:
                key, answer = json.loads(line)
                self._known[str(key)] = answer
            except (ValueError, TypeError):
                continue  # the last line of a run that was killed

    def answers(
        self,
        keys: Sequence[str],
        questions: Sequence[Q],
        size: Callable[[Q], int],
        ask: Callable[[Sequence[Q]], Sequence[Any]],
        done: str,
    ) -> list[Any]:
        """To each question what is known under its key, or else what `ask` says, kept as soon as it is there.

        Raises HarnessError where that cannot be written.
        """
        todo = {key: question for key, question in zip(keys, questions, strict=True) if key not in self._known}
        left = sorted(todo, key=lambda key: -size(todo[key]))  # the longest first: what is ready for it is for the rest
        for start in range(0, len(left), _PIECE):
            _show(done, start, len(left))
            piece = left[start : start + _PIECE]
            self._add(piece, ask([todo[key] for key in piece]))
        if left:
            _show(done, len(left), len(left))
        return [self._known[key] for key in keys]

    def _add(self, keys: Sequence[str], answers: Sequence[Any]) -> None:
        lines = [json.dumps([key, answer]) for key, answer in zip(keys, answers, strict=True)]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n" + "\n".join(lines) + "\n")  # after what a killed run may have left
        except OSError as exc:
            raise HarnessError(f"{self._path} cannot be written: {exc.strerror or exc}; free space") from None
        self._known |= dict(zip(keys, answers, strict=True))


def _key(question: Any) -> str:
    return hashlib.sha256(json.dumps(question).encode()).hexdigest()


def _show(what: str, done: int, total: int) -> None:
    sys.stderr.write(f"{what} {done} of {total}\n")
    sys.stderr.flush()
