"""How often a model's experts were used, kept in the cache: where to place weights, never what to answer."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from engines.offload.memory.expert_usage import MixtureCounts
from engines.offload.memory.layout import Matrix
from harness.api import LocalModel
from harness.common.files import replace_with
from harness.common.regular_file import read_json

#: From so many tokens on, a mixture's counts are halved before others are added: what a model is asked changes.
_MOST_TOKENS = 1 << 20


class KeptUsage:
    """Counts of one model's mixtures, by mixture: `counts` since the load, and those of all loads in the file `path`.

    A file that is damaged or not of this model keeps nothing; `note` says so, and the next `keep` replaces it.
    """

    def __init__(self, cache: Path, model: LocalModel, matrices: Sequence[Matrix]) -> None:
        self._sizes: dict[str, int] = {}  # by mixture, of how many experts
        for matrix in matrices:
            if matrix.expert is not None:
                self._sizes[matrix.mixture] = max(self._sizes.get(matrix.mixture, 0), matrix.expert + 1)
        self._model = {"name": _name(Path(model.path)), "digest": model.digest}
        key = hashlib.sha256(json.dumps(self._model).encode()).hexdigest()[:16]
        self.path = cache / f"expert_usage-{key}.json"
        self.counts: dict[str, MixtureCounts] = {}
        self._unkept: dict[str, MixtureCounts] = {}
        self.note = ""

    def add(self, mixture: str, counted: MixtureCounts) -> None:
        """Counts a pass."""
        for counts in (self.counts, self._unkept):
            counts[mixture] = counts[mixture] + counted if mixture in counts else counted

    def read(self) -> dict[str, MixtureCounts]:
        """The counts of earlier loads; empty if there are none, or none that can be used."""
        self.note = ""
        if not self._sizes:
            return {}
        try:
            return self._checked(read_json(self.path))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, LookupError, TypeError) as exc:
            self.note = f"counts of experts in {self.path.name} cannot be used and start anew: {exc or 'damaged'}"
            return {}

    def keep(self) -> None:
        """Adds what was counted since the last call to the file. Of two processes that do so at once, one's counts are
        lost; where the file cannot be written, all are."""
        if not self._unkept:
            return
        kept = {mixture: _aged(counts) for mixture, counts in self.read().items()}
        for mixture, counts in self._unkept.items():
            kept[mixture] = kept[mixture] + counts if mixture in kept else counts
        self._unkept = {}
        mixtures = {mixture: vars(counts) for mixture, counts in kept.items()}
        with suppress(OSError):
            replace_with(self.path, json.dumps({"model": self._model, "mixtures": mixtures}, sort_keys=True))

    def _checked(self, content: Any) -> dict[str, MixtureCounts]:
        """Raises ValueError, LookupError or TypeError for counts that are damaged or another model's."""
        if content["model"] != self._model:
            raise ValueError("they are another model's")
        mixtures: Mapping[str, Any] = content["mixtures"]
        return {
            mixture: _counts(mixtures[mixture], size) for mixture, size in self._sizes.items() if mixture in mixtures
        }


def kept_for(model: str, cache: Path) -> tuple[str, list[MixtureCounts]] | None:
    """Of a model by its id, such as org/name, the counts of its mixtures in order, and the name of the checkpoint that
    they are of: its own weights or, where none of these ran, dummy weights. None if there are none."""
    own = model.replace("/", "--")
    dummy = re.compile(re.escape(own) + r"-(float32|float16|bfloat16)-[0-9a-f]{8}")
    found: list[tuple[bool, int, str, list[MixtureCounts]]] = []
    for path in sorted(cache.glob("expert_usage-*.json")):
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            content = read_json(path)
            name, mixtures = content["model"]["name"], content["mixtures"]
            if name == own or dummy.fullmatch(name):
                counts = [_counts(mixtures[mixture], len(mixtures[mixture]["rows"])) for mixture in _in_order(mixtures)]
                found.append((name == own, max(c.passes for c in counts), name, counts))
    return max(found)[2:] if found else None


def _name(path: Path) -> str:
    """A checkpoint's name: of its folder, or of the repository on the hub that it is a snapshot of."""
    return path.parts[-3].removeprefix("models--") if path.parent.name == "snapshots" else path.name


def _in_order(mixtures: Iterable[str]) -> list[str]:
    """Names by the numbers of their layers."""
    return sorted(mixtures, key=lambda name: [int(part) for part in name.split(".") if part.isdigit()])


def _counts(content: Mapping[str, Any], size: int) -> MixtureCounts:
    """The counts of a mixture of `size` experts. Raises ValueError, LookupError or TypeError for what is none."""
    counts = MixtureCounts(content["tokens"], content["passes"], tuple(content["rows"]), tuple(content["used"]))
    numbers = (counts.tokens, counts.passes, *counts.rows, *counts.used)
    if not all(type(n) is int and n >= 0 for n in numbers) or not len(counts.rows) == len(counts.used) == size:
        raise ValueError("damaged")
    if max(counts.rows) > counts.tokens or max(counts.used) > counts.passes:
        raise ValueError("damaged")
    return counts


def _aged(counts: MixtureCounts) -> MixtureCounts:
    if counts.tokens < _MOST_TOKENS:
        return counts
    rows, used = (tuple(n // 2 for n in numbers) for numbers in (counts.rows, counts.used))
    return MixtureCounts(counts.tokens // 2, counts.passes // 2, rows, used)
