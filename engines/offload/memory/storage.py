"""How rows of values are stored: plain, in panels, quantized in groups; and what takes how many bytes; no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.api import DTYPE_BYTES, Dtype, OffloadPolicy, UnsupportedError

#: Bits per quantized value, and values per group, that the kernels support.
BITS, GROUPS = (3, 4, 8), (32, 64, 128)
#: Values that are packed together: the codes of eight fill whole bytes at any number of bits.
CODES_PER_WORD = 8
#: Rows of a panel.
PANEL = 16
#: In twelve bits: columns of a panel's chunk, and its bytes, of which 16 are a header.
CHUNK = 64
CHUNK_BYTES = 16 + PANEL * CHUNK * 12 // 8


@dataclass(frozen=True)
class Plain:
    """Values in `dtype`, one after the other."""

    dtype: Dtype

    @property
    def name(self) -> str:
        return self.dtype

    @property
    def grain(self) -> int:
        """A row can be cut at multiples of so many values."""
        return 1

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` values."""
        return columns * DTYPE_BYTES[self.dtype]

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a weight W[rows, columns]."""
        return rows * self.row_bytes(columns)


@dataclass(frozen=True)
class Grouped:
    """Codes of `bits` bits in groups of `group` values, each group with a scale and a minimum in float16.

    kernels/quantize.py defines them. `group_axis`: the axis of a weight W[outputs, inputs] that groups run along. 1
    stores the rows of W; 0, FlexGen's choice, stores the rows of W^T.
    """

    bits: int
    group: int
    group_axis: int = 1

    def __post_init__(self) -> None:
        if self.bits not in BITS or self.group not in GROUPS:
            raise UnsupportedError(
                f"cannot quantize to {self.bits} bits in groups of {self.group}; bits are one of "
                f"{', '.join(map(str, BITS))}, groups of {', '.join(map(str, GROUPS))}"
            )

    @property
    def name(self) -> str:
        return f"bits{self.bits}"

    @property
    def grain(self) -> int:
        """A row can be cut at multiples of so many values."""
        return self.group

    def groups(self, columns: int) -> int:
        """Groups in a row of `columns` values; the last may be shorter."""
        return -(-columns // self.group)

    def code_bytes(self, columns: int) -> int:
        """Bytes of the codes of a row, which precede its scales and minima."""
        return -(-columns // CODES_PER_WORD) * self.bits

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` values."""
        return self.code_bytes(columns) + 4 * self.groups(columns)

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a weight W[rows, columns]."""
        return rows * self.row_bytes(columns) if self.group_axis else columns * self.row_bytes(rows)


@dataclass(frozen=True)
class Panels:
    """Weights as a CPU's units take them, in bfloat16 or quantized: panels of PANEL rows, in each pairs of columns one
    after the other, and of a pair both values of every row. What is missing at the ends is padded.

    The layout is the same for every CPU: csrc/panel_product.h multiplies it by AVX512-BF16's units or
    AMX's (csrc/amx.h), or in float32.
    """

    grouped: Grouped | None = None
    exact12: bool = False  # bfloat16 in twelve bits: see csrc/exact12.h

    @property
    def name(self) -> str:
        return "panels12" if self.exact12 else f"panels{self.grouped.bits}" if self.grouped else "panels"

    @property
    def grain(self) -> int:
        """A matrix can be cut between so many rows."""
        return PANEL

    def panel_bytes(self, columns: int) -> int:
        """Bytes of a panel of `columns` columns."""
        if self.exact12:
            return -(-columns // CHUNK) * CHUNK_BYTES
        if self.grouped is None:
            return PANEL * -(-columns // 2) * 2 * DTYPE_BYTES["bfloat16"]
        bits, group = self.grouped.bits, self.grouped.group
        return self.grouped.groups(columns) * PANEL * (4 + bits * group // 8)

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a weight W[rows, columns]."""
        return -(-rows // PANEL) * self.panel_bytes(columns)


Storage = Plain | Grouped
#: Weights on the host can be in panels, keys and values cannot.
WeightStorage = Storage | Panels


def storages(dtype: Dtype, policy: OffloadPolicy) -> tuple[Storage, Storage, Storage]:
    """The storage of the decoder layers' weights, of weights outside them, and of keys and values.

    The head keeps the checkpoint's precision, as embeddings do: it is small beside the layers, and an error there is in
    every logit.
    """
    plain = Plain(dtype)
    layers: Storage = plain
    if policy.weight_bits != 16:
        layers = Grouped(policy.weight_bits, policy.group_size, group_axis=0 if policy.weight_groups == "output" else 1)
    return layers, plain, plain if policy.kv_bits == 16 else Grouped(policy.kv_bits, policy.group_size)


def panels_of(stored: Storage, twelve_bits: bool) -> Panels | None:
    """The panels in which a host can keep weights that are to be `stored` so, in `twelve_bits` if they are bfloat16.
    None where there are none."""
    if isinstance(stored, Grouped):
        return Panels(stored) if stored.group_axis == 1 else None
    return Panels(exact12=twelve_bits) if stored.dtype == "bfloat16" else None


def weight_formats(policy: OffloadPolicy, limited: bool) -> Sequence[bool]:
    """Whether a host keeps bfloat16 in twelve bits; both where the plan of the job decides, which is where memory is
    `limited` or weights are to be on disk: else nothing has to be saved."""
    if policy.weight_format != "auto":
        return (policy.weight_format == "exact12",)
    streams = limited or (policy.weights is not None and policy.weights[2] > 0)
    return (False, True) if streams and policy.weight_bits == 16 else (False,)
