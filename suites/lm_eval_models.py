"""Our engines as models of lm-eval's own command line: loaded when they are first asked, and never asked twice."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import lm_eval.models  # noqa: F401  (its own models are known by this)
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model

from harness.api import GenerationRequest, HarnessError, Score, first_line
from harness.api.task import Pair, Tokens
from suites import lm_eval_local
from suites.lm_eval_bridge import TokenModel

#: Pairs that are scored, and then kept, at a time.
_PIECE = 1024


class Ready(Protocol):
    """A model that can be asked. `fingerprint`: of all that decides its answers."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def tokens(self) -> Tokens: ...

    @property
    def context(self) -> int: ...

    def score(self, pairs: Sequence[Pair]) -> Sequence[Score]: ...

    def write(self, prompts: Sequence[GenerationRequest]) -> Sequence[str]: ...


#: Makes one from the words after `--model_args`.
Opening = Callable[[Mapping[str, Any]], Ready]


def run(words: Sequence[str]) -> int:
    """lm-eval's command line on `words`; returns its exit code. Raises HarnessError for what it does not know."""
    before, sys.argv = sys.argv, ["lm-eval", *words]
    try:
        cli_evaluate()
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except ValueError as exc:  # how it says so of models and tasks
        raise HarnessError(f"lm-eval: {first_line(exc)}") from exc
    finally:
        sys.argv = before
    return 0


def write_local(data: Path, into: Path) -> None:
    """Task files that read the folder `data`; see lm_eval_local.py."""
    lm_eval_local.write(data, into)


def register(names: Sequence[str], opening: Callable[[str], Opening], kept: Path) -> None:
    """Makes engines known to lm-eval by their names; scores are kept in the folder `kept` for the next run."""
    for name in names:
        register_model(name)(_class_of(opening(name), kept))


def _class_of(opening: Opening, kept: Path) -> type[TokenModel]:
    class EngineModel(TokenModel):
        """One engine behind lm-eval's interface."""

        def __init__(self, ready: Ready) -> None:
            super().__init__(ready.tokens, ready.context, 0)
            self._ready = ready
            self._kept = Kept(kept / f"{ready.fingerprint}.jsonl")

        @classmethod
        def create_from_arg_string(cls, arg_string: str, additional_config: Mapping[str, Any] | None = None) -> Any:
            """`a=b,c=d`; what lm-eval adds for its own models, such as a device, has no meaning here."""
            pairs = [part.partition("=") for part in arg_string.split(",") if part]
            return cls.create_from_arg_obj({key.strip(): value.strip() for key, _, value in pairs})

        @classmethod
        def create_from_arg_obj(
            cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
        ) -> Any:
            return cls(opening(arg_dict))

        def scores(self, pairs: Sequence[Pair]) -> Sequence[Score]:
            known = self._kept.known
            keys = [_key(pair) for pair in pairs]
            asked = {key: pair for key, pair in zip(keys, pairs, strict=True) if key not in known}
            todo = list(asked.items())
            for start in range(0, len(todo), _PIECE):
                _show(start, len(todo))
                piece = todo[start : start + _PIECE]
                self._kept.add([key for key, _ in piece], self._ready.score([pair for _, pair in piece]))
            if todo:
                _show(len(todo), len(todo))
            return [known[key] for key in keys]

        def texts(self, prompts: Sequence[GenerationRequest]) -> Sequence[str]:
            return self._ready.write(prompts)

    return EngineModel


class Kept:
    """Scores that are known, a line each in a file that is only ever added to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.known: dict[str, Score] = {}
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        except (OSError, UnicodeDecodeError) as exc:
            raise HarnessError(f"{path}: scores of an earlier run cannot be read: {exc}; remove the file") from None
        for line in lines:
            try:
                key, logprob, greedy = json.loads(line)
                self.known[str(key)] = Score(float(logprob), bool(greedy))
            except (ValueError, TypeError):
                continue  # the last line of a run that was killed

    def add(self, keys: Sequence[str], scores: Sequence[Score]) -> None:
        """Keeps scores, at once on disk. Raises HarnessError where they cannot be written."""
        lines = [json.dumps([key, s.logprob, s.is_greedy]) for key, s in zip(keys, scores, strict=True)]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n" + "\n".join(lines) + "\n")  # after what a killed run may have left
        except OSError as exc:
            raise HarnessError(f"{self._path} cannot be written: {exc.strerror or exc}; free space") from None
        self.known |= dict(zip(keys, scores, strict=True))


def _key(pair: Pair) -> str:
    return hashlib.sha256(json.dumps(pair).encode()).hexdigest()


def _show(done: int, total: int) -> None:
    sys.stderr.write(f"scored {done} of {total}\n")
    sys.stderr.flush()
