"""Refuses files and numbers that no model folder has, before libraries that trust them read them or build by them."""

import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engines.models.hub import METADATA
from harness.api import HarnessError

_MAX_BYTES = 512 << 20
#: Of numbers whose key ends so: what is built in a loop, or listed by its number.
_COUNTS = (
    (re.compile(r"(layers?|blocks|depth|stages)$"), 4096),
    (re.compile(r"(experts|heads|labels|codebooks)$"), 1 << 16),
)
_MAX_NUMBER = 1 << 40


def check_files(folder: Path) -> None:
    """Raises HarnessError for a configuration, tokenizer or template that is no regular file, or is huge."""
    for path in sorted({path for pattern in METADATA for path in folder.glob(pattern)}):
        if not path.exists():  # a dangling link, which is as good as no file
            continue
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise HarnessError(f"{path} is not a regular file")
        if status.st_size > _MAX_BYTES:
            raise HarnessError(f"{path} has {status.st_size} bytes, more than any model's ({_MAX_BYTES >> 20} MiB)")


def check_numbers(config: Mapping[str, Any], source: Path) -> None:
    """Raises HarnessError where a configuration, which `source` holds, has a number that is beyond any model's."""
    for key, number in _numbers(config):
        most = next((limit for pattern, limit in _COUNTS if pattern.search(key)), _MAX_NUMBER)
        if abs(number) > most:
            raise HarnessError(f"{source}: {key} is {str(number)[:20]}, more than any model has ({most})")


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, int]]:
    """All whole numbers inside, each with the key that it stands under."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(inner, str(name))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner, key)
    elif type(value) is int:
        yield key, value
