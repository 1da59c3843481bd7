"""A machine as plans see it: capacities, and rates as curves or numbers, each with its source."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.api.common import FORBID, Dtype, HarnessError

#: Above any real machine's figure, in every unit: a larger value is a typing error.
_ABSURD = 1e18

#: The resources that can limit a plan, as messages name them.
RESOURCE_WORDS: Mapping[str, str] = {
    "device": "the device",
    "host": "the host's arithmetic",
    "h2d": "copies to the device",
    "d2h": "copies to the host",
    "disk": "the disk",
    "network": "the links between stages",
}


@dataclass(frozen=True)
class Processor:
    """A device or the host's CPU.

    `memory`: bytes available to programs. `bandwidth`: bytes/s of its memory, as a copy or a stream reaches it.
    `flops`: FLOP/s of dense products by rows, in 16 bits (on a CPU in its fastest dtype), measured in `dtype`;
    `flops_exact12` those with weights in twelve bits, from `flops` and `dequantize` if missing.

    Derived from `flops` and `bandwidth` if missing: `batched_flops`, FLOP/s of attention's batched products;
    `prompts`, FLOP/s of our prompt attention by KV bits; `cached`, values/s that it writes to the KV cache, by bits;
    `attention`, bytes/s of stored keys and values that decode attention reads, by bits; `dequantize`, weights
    unpacked per second.

    Free of cost if missing: `attention_call_s`, the overhead in seconds per sequence and head of an engine that calls
    a library for attention; `elementwise`, values/s (rows times hidden size, per layer) of the operations between
    products; `layer_call_s`, the remaining seconds of a pass per layer; `sequence_call_s`, the seconds of our
    attention per sequence and layer beside what it reads and stores; `in_passes`, the fraction of their rate that
    products reach within a pass, beside the rest of its work; `beside_disk`, the fraction of it that remains while the
    disk is read.

    `probed`: FLOP/s at 256 rows by columns of the matrix, measured as beside each launch, to tell how far the machine
    has drifted. `by_threads`: FLOP/s at 256 rows by number of threads, and
    `attention_by_threads`: bytes/s of decode attention in 16 bits. `threads_per_core`: hardware threads.
    """

    __pydantic_config__ = FORBID

    name: str
    memory: float
    bandwidth: float
    flops: Mapping[str, float]
    flops_exact12: Mapping[str, float] = field(default_factory=dict)
    batched_flops: float | None = None
    prompts: Mapping[str, float] = field(default_factory=dict)
    cached: Mapping[str, float] = field(default_factory=dict)
    attention: Mapping[str, float] = field(default_factory=dict)
    dequantize: float | None = None
    attention_call_s: float | None = None
    elementwise: float | None = None
    layer_call_s: float | None = None
    sequence_call_s: float | None = None
    in_passes: float | None = None
    beside_disk: float | None = None
    probed: Mapping[str, float] = field(default_factory=dict)
    cores: int = 1
    threads_per_core: int = 1
    by_threads: Mapping[str, float] = field(default_factory=dict)
    attention_by_threads: Mapping[str, float] = field(default_factory=dict)
    dtype: Dtype = "float32"


@dataclass(frozen=True)
class Link:
    """The link between host and device, bytes/s: from pinned memory, and from pageable memory by a pinned buffer.

    `copy_s`: seconds until a copy's first byte; free of cost if missing.
    """

    __pydantic_config__ = FORBID

    h2d: float
    d2h: float
    h2d_pageable: float
    d2h_pageable: float
    copy_s: float | None = None


@dataclass(frozen=True)
class Disk:
    """A disk: capacity in bytes, and bytes/s of large concurrent reads and writes.

    `beside_products`: the fraction of the read rate that remains while the host multiplies; 1 if missing.
    """

    __pydantic_config__ = FORBID

    capacity: float
    read: float
    write: float
    beside_products: float | None = None


@dataclass(frozen=True)
class Prices:
    """What a machine costs: its hire in dollars an hour, or its power in watts while it works, and electricity in
    dollars a kWh. Hire includes electricity."""

    __pydantic_config__ = FORBID

    hire: float | None = None
    power: float | None = None
    electricity: float | None = None

    @property
    def dollars_per_hour(self) -> float | None:
        """The hire, else the electricity; None if neither is known."""
        if self.hire is None and self.power is not None and self.electricity is not None:
            return self.power / 1000 * self.electricity
        return self.hire

    def metrics(self, tokens_per_s: float) -> dict[str, float]:
        """`tokens_per_dollar` and `tokens_per_joule` at a throughput, where the prices say."""
        found = {}
        if self.dollars_per_hour:
            found["tokens_per_dollar"] = 3600 * tokens_per_s / self.dollars_per_hour
        if self.power:
            found["tokens_per_joule"] = tokens_per_s / self.power
        return found


@dataclass(frozen=True)
class HardwareProfile:
    """One machine with `devices` equal devices, or none.

    `sources` gives the source of each figure by its path (`device.bandwidth`); `fitted` lists the published cells that
    each fitted figure was fitted on; `spread` gives the lowest and highest round of each measured figure. `between`:
    bytes/s from one device to another. `prices`: of the whole machine. `host_id` identifies the machine of a measured
    profile.
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
    prices: Prices = Prices()
    sources: Mapping[str, str] = field(default_factory=dict)
    fitted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    spread: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    host_id: str = ""

    def validate(self) -> None:
        """Raises HarnessError naming the first figure that is missing or out of range."""
        for path, value in _figures(self):
            if not (isinstance(value, (int, float)) and math.isfinite(value) and _least(path) <= value < _ABSURD):
                raise HarnessError(f"hardware {self.name}: {path} is {value}; it must be a positive number, in bytes, "
                                   "values or operations (a second), dollars or watts")  # fmt: skip
        shares = {
            "host.in_passes": self.host.in_passes,
            "host.beside_disk": self.host.beside_disk,
            "disk.beside_products": self.disk.beside_products,
        }
        for path, share in shares.items():
            if share is not None and share > 1:
                raise HarnessError(f"hardware {self.name}: {path} is {share}; a fraction is at most 1")
        if self.devices < 0:
            raise HarnessError(f"hardware {self.name}: devices is {self.devices}; it must be 0 or more")
        if (self.device is None) != (self.devices == 0) or (self.device is None) != (self.link is None):
            raise HarnessError(f"hardware {self.name}: device, link and devices come together, or not at all")
        for name, part in {"device": self.device, "host": self.host}.items():
            if part is None:
                continue
            curves = (
                part.flops,
                part.prompts,
                part.cached,
                part.attention,
                part.by_threads,
                part.attention_by_threads,
                part.probed,
            )
            for key in itertools.chain(*curves):
                if not (key.isdecimal() and 0 < int(key) < 1 << 31):
                    raise HarnessError(
                        f"hardware {self.name}: {name} has a rate at {key!r}; it must be a positive whole number"
                    )
            if not part.flops:
                raise HarnessError(f"hardware {self.name}: {name}.flops is empty; give FLOP/s by rows")


def _least(path: str) -> float:
    """The least plausible figure: 1 for rates (per second) and memory (bytes), next to 0 for seconds, fractions and
    prices."""
    return (
        1e-12
        if path.endswith(("_s", "in_passes", "beside_disk", "beside_products")) or path.startswith("prices.")
        else 1.0
    )


def _figures(part: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """Every numeric figure of a profile, with its path."""
    for f in dataclasses.fields(part):
        value, name = getattr(part, f.name), f"{path}{f.name}"
        if f.name in ("sources", "fitted", "spread", "devices") or isinstance(value, str) or value is None:
            continue
        if dataclasses.is_dataclass(value):
            yield from _figures(value, f"{name}.")
        elif isinstance(value, Mapping):
            yield from ((f"{name}.{key}", rate) for key, rate in value.items())
        else:
            yield name, value
