"""Checks a GGUF file's header within fixed bounds, before a library that trusts it reads the file."""

import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from gguf import GGML_QUANT_SIZES

from harness.api import HarnessError
from harness.common.regular_file import open_regular

_MAX_FIELDS, _MAX_TENSORS, _MAX_DIMS = 1 << 16, 1 << 18, 4
_MAX_STRING_BYTES = 16 << 20  # a chat template
#: Of all arrays together: twice a vocabulary, its scores, its types and its merges.
_MAX_ELEMENTS = 8 << 20
_MAX_ALIGNMENT = 1 << 16
_STRING, _ARRAY = 8, 9
#: struct's format of each scalar type.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
#: (Values, bytes) of a block of each tensor type.
_TYPES = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}


def check(path: Path) -> None:
    """Raises HarnessError for a file whose header is no GGUF header, asks for more than any model needs, or names
    tensors that the file does not hold."""
    try:
        with open_regular(path) as file:
            _check(_Header(file, os.fstat(file.fileno()).st_size))
    except OSError as exc:
        raise HarnessError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    except ValueError as exc:
        raise HarnessError(f"{path} is not a whole GGUF file ({path.stat().st_size} bytes): {exc}") from exc


class _Header:
    """Reads a header from its beginning. Raises ValueError for what a file of `size` bytes cannot hold."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file = file
        self.size = size
        self._order = "<"
        self._elements = 0

    @property
    def position(self) -> int:
        return self._file.tell()

    def take(self, count: int, what: str) -> bytes:
        """The next `count` bytes, of `what`."""
        content = self._file.read(count) if count <= self.size else b""
        if len(content) < count:
            raise ValueError(f"it ends within {what}")
        return content

    def number(self, kind: str, what: str) -> Any:
        """The next number, in struct's format `kind`."""
        return struct.unpack(self._order + kind, self.take(struct.calcsize(kind), what))[0]

    def count(self, most: int, what: str) -> int:
        """The next number of things, at most `most`."""
        number = int(self.number("Q", f"the number of {what}"))
        if number > most:
            raise ValueError(f"{number} {what} are more than any model has")
        return number

    def begin(self) -> None:
        """Reads magic and version; a version in the other byte order says that all numbers are."""
        if self.take(4, "its magic") != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self.number("I", "its version")
        if version & 0xFFFF == 0:
            self._order, version = ">", int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not known")

    def string(self, what: str) -> bytes:
        return self.take(self.count(_MAX_STRING_BYTES, f"bytes of {what}"), what)

    def value(self, name: str) -> Any:
        """A field's value; None for an array."""
        kind = self.number("I", name)
        if kind != _ARRAY:
            return self._scalar(kind, name)
        kind = self.number("I", name)
        if kind == _ARRAY:
            raise ValueError(f"{name} is an array of arrays")
        length = self.count(_MAX_ELEMENTS, f"elements of {name}")
        self._elements += length
        if self._elements > _MAX_ELEMENTS:
            raise ValueError(f"with {name} its arrays have more elements than any model's")
        if kind in _SCALARS:
            self.take(length * struct.calcsize(_SCALARS[kind]), name)
        else:
            for _ in range(length):
                self._scalar(kind, name)
        return None

    def _scalar(self, kind: int, name: str) -> Any:
        if kind == _STRING:
            return self.string(name)
        if kind not in _SCALARS:
            raise ValueError(f"{name} has the unknown type {kind}")
        return self.number(_SCALARS[kind], name)


def _check(header: _Header) -> None:
    header.begin()
    tensors = header.count(_MAX_TENSORS, "tensors")
    fields: dict[str, Any] = {}
    for _ in range(header.count(_MAX_FIELDS, "fields")):
        name = header.string("the name of a field").decode()
        fields[name] = header.value(name)
    alignment = fields.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise ValueError(f"its alignment {alignment!r} is no power of two")
    ends = list(_ends(header, tensors))
    start = -(-header.position // alignment) * alignment
    for name, end in ends:
        if start + end > header.size:
            raise ValueError(f"it ends within {name}")


def _ends(header: _Header, tensors: int) -> Iterator[tuple[str, int]]:
    """Each tensor's name and the end of its data, counted from where all data begin."""
    for _ in range(tensors):
        name = header.string("the name of a tensor").decode()
        dims = header.number("I", name)
        if dims > _MAX_DIMS:
            raise ValueError(f"{name} has {dims} dimensions")
        shape = [int(header.number("Q", name)) for _ in range(dims)]
        kind, offset = header.number("I", name), int(header.number("Q", name))
        if kind not in _TYPES:
            raise ValueError(f"{name} has the unknown type {kind}")
        block, nbytes = _TYPES[kind]
        if shape and shape[0] % block:
            raise ValueError(f"the rows of {name} are no whole blocks of {block}")
        yield name, offset + math.prod(shape) // block * nbytes
