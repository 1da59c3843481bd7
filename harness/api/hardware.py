"""A machine as plans see it: capacities, and rates as curves or numbers, each with its source."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.api.common import FORBID, Dtype, HarnessError

#: No machine has more of anything, in any unit: what is beyond is a slip of the pen.
_ABSURD = 1e18

#: What can limit a plan, in words.
RESOURCE_WORDS: Mapping[str, str] = {
    "device": "the device",
    "host": "the host's arithmetic",
    "h2d": "copies to the device",
    "d2h": "copies to the host",
    "disk": "the disk",
}


@dataclass(frozen=True)
class Processor:
    """A device or the host's CPU. `flops`: FLOP/s of dense products in 16 bits (on a CPU in the dtype that is fastest
    there), by rows; `bandwidth`: bytes/s of its memory, as a copy or a stream reaches it.

    `batched_flops`: FLOP/s of attention's batched products; `prompts`: FLOP/s of our attention of prompts, by bits of
    the cache, and `cached`: values/s that it puts there before; `attention`: bytes/s of what is stored that attention
    of one token reads, by bits; `dequantize`: values/s of weights unpacked; all of them derived from `flops` and
    `bandwidth` where they are missing. `attention_call_s`: seconds around one sequence's head in the attention of an
    engine that calls a library for it. `elementwise`: values/s (rows times hidden size, a layer) that pass through what
    is between products, and `layer_call_s`: seconds that a pass takes in a layer besides; no time where missing.
    `beside_disk`: the part of the products' rate that is left while weights stream from the disk; all where missing.
    `probed`: FLOP/s at 256 rows, by columns of the matrix, by the measure that is also taken beside each launch: how
    far a machine has drifted.
    `memory`: bytes that programs can have.
    `by_threads`: FLOP/s at 256 rows on so many threads. `dtype`: in which `flops` were measured.
    """

    __pydantic_config__ = FORBID

    name: str
    memory: float
    bandwidth: float
    flops: Mapping[str, float]
    batched_flops: float | None = None
    prompts: Mapping[str, float] = field(default_factory=dict)
    cached: Mapping[str, float] = field(default_factory=dict)
    attention: Mapping[str, float] = field(default_factory=dict)
    dequantize: float | None = None
    attention_call_s: float | None = None
    elementwise: float | None = None
    layer_call_s: float | None = None
    beside_disk: float | None = None
    probed: Mapping[str, float] = field(default_factory=dict)
    cores: int = 1
    by_threads: Mapping[str, float] = field(default_factory=dict)
    dtype: Dtype = "float32"


@dataclass(frozen=True)
class Link:
    """Between host and device, bytes/s: of pinned memory, and of memory that is copied into a pinned buffer first."""

    __pydantic_config__ = FORBID

    h2d: float
    d2h: float
    h2d_pageable: float
    d2h_pageable: float


@dataclass(frozen=True)
class Disk:
    """A disk, bytes/s: read and written in large pieces, several at a time."""

    __pydantic_config__ = FORBID

    capacity: float
    read: float
    write: float


@dataclass(frozen=True)
class HardwareProfile:
    """One machine with `devices` equal devices, or none.

    `sources` says where each figure comes from, by its path (`device.bandwidth`); `fitted` names for each figure that
    was fitted the published cells it was fitted on. `between`: bytes/s from one device to another.
    `host_id`: of a measured profile the machine it is of.
    """

    __pydantic_config__ = FORBID

    name: str
    description: str
    host: Processor
    disk: Disk
    device: Processor | None = None
    link: Link | None = None
    devices: int = 0
    between: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    fitted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    spread: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    host_id: str = ""

    def validate(self) -> None:
        """Raises HarnessError naming the first figure that no machine has, or that is missing."""
        for path, value in _figures(self):
            if not (isinstance(value, (int, float)) and math.isfinite(value) and _least(path) <= value < _ABSURD):
                raise HarnessError(f"hardware {self.name}: {path} is {value}; it must be a positive number, in bytes, "
                                   "values or operations (a second)")  # fmt: skip
        if (share := self.host.beside_disk) is not None and share > 1:
            raise HarnessError(f"hardware {self.name}: host.beside_disk is {share}; it is a part of a rate, at most 1")
        if self.devices < 0:
            raise HarnessError(f"hardware {self.name}: devices is {self.devices}; it must be 0 or more")
        if (self.device is None) != (self.devices == 0) or (self.device is None) != (self.link is None):
            raise HarnessError(f"hardware {self.name}: device, link and devices come together, or not at all")
        for name in ("device", "host"):
            processor = getattr(self, name)
            names = ("flops", "prompts", "cached", "attention", "by_threads", "probed")
            for curve in () if processor is None else (getattr(processor, kind) for kind in names):
                if unknown := next((key for key in curve if not (key.isdecimal() and 0 < int(key) < 1 << 31)), None):
                    raise HarnessError(
                        f"hardware {self.name}: {name} has a rate at {unknown!r}, which is no whole number"
                    )
            if processor is not None and not processor.flops:
                raise HarnessError(f"hardware {self.name}: {name}.flops is empty; give FLOP/s by rows")


def _least(path: str) -> float:
    """No rate is below one a second, and no memory below a byte; of seconds and shares anything above 0 may be."""
    return 1e-12 if path.endswith(("_s", "beside_disk")) else 1.0


def _figures(part: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """Every number of a profile that must be one, with its path."""
    for f in dataclasses.fields(part):
        value, own = getattr(part, f.name), f"{path}{f.name}"
        if f.name in ("sources", "fitted", "spread", "devices") or isinstance(value, str) or value is None:
            continue
        if dataclasses.is_dataclass(value):
            yield from _figures(value, f"{own}.")
        elif isinstance(value, Mapping):
            yield from ((f"{own}.{key}", one) for key, one in value.items())
        else:
            yield own, value
