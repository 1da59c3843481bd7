"""Which way to multiply was fastest on this machine, kept: a busy moment must not change a job's arithmetic."""

import json
from collections.abc import Hashable
from contextlib import suppress
from pathlib import Path

import torch

from engines.offload.kernels.build import kernels_here
from harness.common.files import replace_with
from harness.common.regular_file import read_kept


class KeptChoices:
    """Names by what was chosen among, for this CPU, torch and these kernels. A file that cannot be read or written
    keeps nothing: then the next load measures again."""

    def __init__(self, cache: Path) -> None:
        self._path = cache / "gemm_choices.json"

    def get(self, *among: Hashable) -> str | None:
        """The name that was kept, if any."""
        return self._read().get(_key(among))

    def keep(self, name: str, *among: Hashable) -> None:
        """Keeps a name. Of two processes that keep different ones at once, one wins, for both at their next load."""
        with suppress(OSError):
            replace_with(self._path, json.dumps(self._read() | {_key(among): name}, indent=1, sort_keys=True))

    def clear(self) -> None:
        """Forgets all, so that the next loads measure again."""
        with suppress(OSError):
            self._path.unlink()

    def _read(self) -> dict[str, str]:
        return {k: v for k, v in read_kept(self._path).items() if isinstance(v, str)}


def _key(among: tuple[Hashable, ...]) -> str:
    return " | ".join(map(str, (*among, torch.__version__, kernels_here())))
