"""Nano-batches: what a layer's operations take on a machine, the pipeline that a search makes of them, and the order of
products that an engine runs of it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from harness.api.common import HarnessError


@dataclass(frozen=True)
class LayerTimes:
    """A layer in one pass of a sweep's batch, as measured on a machine. Seconds are of the whole batch on all threads.

    `weight_s`: of the products, for each weight of the layer; `attention_s`: of decode attention; `read_s`: of reading
    the layer's weights from disk, 0 where they are in memory. `cut`: by how much longer the products take in so many
    parts. `beside`: for `memory` (attention) and `disk`, points (units, performance): the share of their rate that
    products lost beside it, and the share of its own rate that it kept. `attention`: points (units, share of the
    threads) of what attention ran on for the points of `memory`.
    """

    weight_s: float
    attention_s: float
    read_s: float
    cut: Mapping[int, float]
    beside: Mapping[str, tuple[tuple[float, float], ...]]
    attention: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class NanoOperation:
    """An operation of one nano-batch of one layer: `rows` are the fractions of the batch where it begins and ends,
    `units` the fraction of the machine's threads or multiprocessors that it holds from start to end."""

    name: str
    kind: str
    layer: int
    part: int
    rows: tuple[float, float]
    start_s: float
    end_s: float
    units: float


@dataclass(frozen=True)
class NanoPipeline:
    """The operations of some layers in order of their start. `sequential_s` is their length one after the other."""

    operations: tuple[NanoOperation, ...]
    sequential_s: float

    @property
    def length_s(self) -> float:
        """Seconds until the last operation ends."""
        return max(operation.end_s for operation in self.operations)

    @property
    def parts(self) -> Mapping[str, int]:
        """Into how many nano-batches each operation is cut."""
        return {operation.name: operation.part + 1 for operation in sorted(self.operations, key=lambda o: o.part)}

    @property
    def nano_batches(self) -> int:
        """The most parts of an operation; 1 where nothing is cut."""
        return max(self.parts.values())


#: A layer's products in the order in which a nano-batch needs them: one or more matrices before its attention, the one
#: after it, those of the rest of the layer but the last, and the last.
PRODUCTS = ("KQV", "O", "UG", "D")
#: One part of a product: its name and the part's number.
NanoProduct = tuple[str, int]
_WORD = re.compile(f"({'|'.join(PRODUCTS)})([0-9]{{1,3}})")
_SHARE = re.compile(r"(cut|attention)=(0?\.[0-9]+|1(?:\.0*)?)")
_FIELD = "policy.nano_batches"


@dataclass(frozen=True)
class NanoOrder:
    """The order in which the parts of a layer's products run, over and over, one layer after the other.

    The parts of KQV are the nano-batches, in order; each attends as soon as it has its own. The parts of another
    product have equal numbers of them. A product that stands before KQV of its nano-batches is the layer before's: one
    part of the batch is then a layer ahead of another. `cut`: the fraction of the batch's rows where it is cut in two;
    each half has half the nano-batches. `attention`: the share of the threads that attends beside products.

    As text: `KQV0 KQV1 O0 UG0 D0 O1 UG1 D1 cut=0.4 attention=0.5`. Source: NanoFlow (Zhu et al. 2025), section 4.
    Raises HarnessError for an order in which a nano-batch could not run.
    """

    products: tuple[NanoProduct, ...]
    cut: float = 0.5
    attention: float = 1.0

    def __post_init__(self) -> None:
        for name in PRODUCTS:
            numbers = [part for product, part in self.products if product == name]
            if sorted(numbers) != list(range(len(numbers))) or not numbers:
                raise HarnessError(f"{_FIELD}: an order has each part of {name} once, from {name}0 on")
            if name == "KQV" and (len(numbers) < 2 or numbers != sorted(numbers)):
                raise HarnessError(f"{_FIELD}: an order has KQV0, KQV1 and so on, in order, two or more")
            if self.nano_batches % len(numbers):
                raise HarnessError(
                    f"{_FIELD}: {len(numbers)} parts of {name} do not divide {self.nano_batches} nano-batches equally"
                )
        if not 0 < self.cut < 1 or not 0 < self.attention <= 1:
            raise HarnessError(f"{_FIELD}: cut is a fraction between 0 and 1, attention one above 0")
        if self.cut != 0.5 and self.nano_batches % 2:
            raise HarnessError(f"{_FIELD}: with a cut halves have equal numbers of nano-batches; "
                               f"{self.nano_batches} is odd")  # fmt: skip
        for number in range(self.nano_batches):
            times = [self._time(product) for product in self._of(number)]
            if sorted(set(times)) != times or times[-1] > times[0] + len(self.products):
                raise HarnessError(f"{_FIELD}: in this order nano-batch {number} would not run {', '.join(PRODUCTS)} "
                                   "one after the other")  # fmt: skip

    @classmethod
    @lru_cache(256)
    def parse(cls, text: str) -> "NanoOrder":
        """The order that a text has."""
        products: list[NanoProduct] = []
        shares: dict[str, float] = {}
        for word in text.split():
            if product := _WORD.fullmatch(word):
                products.append((product[1], int(product[2])))
            elif (share := _SHARE.fullmatch(word)) and share[1] not in shares:
                shares[share[1]] = float(share[2])
            else:
                raise HarnessError(f"{_FIELD}: {word[:40]!r} is no number, auto, or word of an order such as "
                                   "KQV0 KQV1 O0 UG0 D0 O1 UG1 D1")  # fmt: skip
        return cls(tuple(products), **shares)

    @classmethod
    def apart(cls, nano_batches: int) -> "NanoOrder":
        """Each nano-batch has its own KQV and O, around its attention; what follows is for all of them at once."""
        each = [(name, part) for name in PRODUCTS[:2] for part in range(nano_batches)]
        return cls((*each, *((name, 0) for name in PRODUCTS[2:])))

    def __str__(self) -> str:
        words = [f"{name}{part}" for name, part in self.products]
        words += [f"cut={self.cut:g}"] if self.cut != 0.5 else []
        words += [f"attention={self.attention:g}"] if self.attention != 1 else []
        return " ".join(words)

    @property
    def nano_batches(self) -> int:
        """How many there are."""
        return self.parts["KQV"]

    @cached_property
    def parts(self) -> Mapping[str, int]:
        """Into how many parts each product is cut."""
        return {name: sum(product == name for product, _ in self.products) for name in PRODUCTS}

    def batches(self, product: NanoProduct) -> range:
        """The nano-batches of one part of a product."""
        name, part = product
        each = self.nano_batches // self.parts[name]
        return range(part * each, (part + 1) * each)

    def over_layers(self, layers: int) -> Iterator[tuple[NanoProduct, int]]:
        """The products of so many layers in order, each with its layer's number."""
        behind = {product: self._time(product) // len(self.products) for product in self.products}
        for turn in range(layers + max(behind.values())):
            for product in self.products:
                if 0 <= turn - behind[product] < layers:
                    yield product, turn - behind[product]

    def share(self, middle: float) -> float:
        """Where rows at a fraction `middle` of the batch would be if both halves had equal numbers of them."""
        return middle / (2 * self.cut) if middle < self.cut else (1 + (middle - self.cut) / (1 - self.cut)) / 2

    def _of(self, nano_batch: int) -> Sequence[NanoProduct]:
        """What a nano-batch runs in one layer, in order."""
        return [(name, nano_batch * self.parts[name] // self.nano_batches) for name in PRODUCTS]

    @cached_property
    def _positions(self) -> Mapping[NanoProduct, int]:
        return {product: position for position, product in enumerate(self.products)}

    def _time(self, product: NanoProduct) -> int:
        """When a product of a layer runs, counted in products from the turn in which the layer begins."""
        position = self._positions[product]
        later = any(position < self._positions["KQV", number] for number in self.batches(product))
        return position + later * len(self.products)
