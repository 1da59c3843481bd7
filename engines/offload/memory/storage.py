"""How a row of values is stored: plain, or quantized in groups. Sizes only."""

from __future__ import annotations

from dataclasses import dataclass

from harness.api import DTYPE_BYTES, Dtype, OffloadPolicy, UnsupportedError

#: Bits of a code and values of a group for which there are kernels.
BITS, GROUPS = (3, 4, 8), (32, 64, 128)
#: So many codes fill whole bytes at any number of bits.
EIGHT = 8


@dataclass(frozen=True)
class Plain:
    """Values in `dtype`, not quantized."""

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
    """Codes of `bits` bits in groups of `group` values; each group has a scale and a minimum in float16.

    The quantizer defines the codes. `across`: the stored rows are the columns of W[outputs, inputs], so that groups run
    along the outputs, as in FlexGen.
    """

    bits: int
    group: int
    across: bool = False

    def __post_init__(self) -> None:
        if self.bits not in BITS or self.group not in GROUPS:
            raise UnsupportedError(
                f"{self.bits} bits in groups of {self.group} are not quantized to; bits are one of "
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
        """Groups of a row of `columns` values; the last may be shorter."""
        return -(-columns // self.group)

    def code_bytes(self, columns: int) -> int:
        """Bytes of a row's codes; scales and minima follow them."""
        return -(-columns // EIGHT) * self.bits

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` values."""
        return self.code_bytes(columns) + 4 * self.groups(columns)

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a weight W[rows, columns]."""
        return columns * self.row_bytes(rows) if self.across else rows * self.row_bytes(columns)


Storage = Plain | Grouped


def storages(dtype: Dtype, policy: OffloadPolicy) -> tuple[Storage, Storage, Storage]:
    """How weights of decoder layers, weights outside of them, and the KV cache are stored.

    The head keeps the checkpoint's precision, as embeddings do: it is small beside the layers, and its quantization
    error would be in every logit.
    """
    plain = Plain(dtype)
    layers: Storage = plain
    if policy.weight_bits != 16:
        layers = Grouped(policy.weight_bits, policy.group_size, across=policy.weight_groups == "output")
    return layers, plain, plain if policy.kv_bits == 16 else Grouped(policy.kv_bits, policy.group_size)
