"""Tensor parallelism: which shard of every matrix a rank has, and what cannot be divided so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from engines.offload.memory.layout import Matrix
from engines.offload.memory.storage import Grouped, Storage
from harness.api import HardwareLimits, ModelShape, OffloadPolicy, UnsupportedError

#: How ranks divide y = x W^T: its outputs (rows of W), so that each has a part of y; its inputs (columns of W), so that
#: their products have to be added up; outputs that rank 0 gathers, as the vocabulary's; or not at all.
#: Source: Megatron-LM (Shoeybi et al. 2019), section 3, column and row parallel layers.
Role = Literal["outputs", "inputs", "vocabulary", "whole"]


@dataclass(frozen=True)
class TensorShard:
    """Shard `rank` of the `ranks` shards of every matrix."""

    rank: int
    ranks: int

    @classmethod
    def under(cls, policy: OffloadPolicy, rank: int) -> TensorShard | None:
        """The shard of a rank; None where matrices are whole."""
        return cls(rank, policy.tensor) if policy.tensor > 1 else None

    def of(self, length: int) -> range:
        """Its part of so many things: parts follow each other, and differ by one at most."""
        return range(length * self.rank // self.ranks, length * (self.rank + 1) // self.ranks)

    def of_matrix(self, matrix: Matrix, role: Role) -> Matrix:
        """Its part of a whole matrix. Raises UnsupportedError for one that cannot be cut into equal parts."""
        if role == "whole":
            return matrix
        length = matrix.columns if role == "inputs" else matrix.rows
        if role != "vocabulary" and length % self.ranks:
            raise UnsupportedError(
                f"policy.tensor: the {length} {role} of {matrix.name} are no {self.ranks} equal parts"
            )
        own, sizes = self.of(length), (matrix.rows, matrix.columns)
        if role == "inputs":
            return replace(matrix, columns=len(own), start=(0, own.start), whole=sizes)
        return replace(matrix, rows=len(own), start=(own.start, 0), whole=sizes)

    def shape(self, whole: ModelShape) -> ModelShape:
        """The sizes of its part of a model. All ranks see the whole hidden states and vocabulary; experts are whole on
        the rank that has them."""
        idle, layer = whole.params_idle // self.ranks, whole.params_per_layer // self.ranks
        return replace(
            whole,
            num_heads=whole.num_heads // self.ranks,
            num_kv_heads=whole.num_kv_heads // self.ranks,
            ffn=whole.ffn if whole.params_idle else whole.ffn // self.ranks,
            params_per_layer=layer,
            params_idle=idle,
            params_total=idle + layer * whole.num_layers + whole.head_params // self.ranks,
        )


def refuse_undivided(policy: OffloadPolicy, limits: HardwareLimits, shape: ModelShape | None) -> None:
    """Raises UnsupportedError for a policy, limits or model for which there is no tensor parallelism."""
    if policy.pipeline > 1:
        raise UnsupportedError("policy.tensor: ranks hold a part of the layers or of every matrix, not both yet: leave "
                               "out policy.pipeline")  # fmt: skip
    if limits.gpu:
        raise UnsupportedError("policy.tensor: ranks compute on hosts only yet: leave out limits.device_memory")
    if policy.nano_batches != 1:
        raise UnsupportedError("policy.tensor: ranks have one order of sums, nano-batches have several: leave out "
                               "policy.nano_batches")  # fmt: skip
    if policy.compute_dtype == "int8":
        raise UnsupportedError("policy.tensor: int8 rounds activations by groups of a whole row: leave out "
                               "policy.compute_dtype")  # fmt: skip
    if shape is None:
        return
    if policy.num_gpu_batches > 1 and shape.params_idle:
        raise UnsupportedError("policy.tensor: a mixture's experts end in another order for each batch: leave out "
                               "policy.num_gpu_batches")  # fmt: skip
    counts = {"attention heads": shape.num_heads, "KV heads": shape.num_kv_heads}
    if not shape.params_idle:
        counts["inner values of the feed-forward layers"] = shape.ffn
    for name, count in counts.items():
        if count % policy.tensor:
            fitting = [n for n in range(2, shape.num_kv_heads + 1) if not any(each % n for each in counts.values())]
            hint = f"use {', '.join(map(str, fitting))}" if fitting else "leave it out"
            raise UnsupportedError(f"policy.tensor: {count} {name} are no {policy.tensor} equal parts: {hint}")


def require_whole_groups(matrices: Sequence[Matrix], layers: Storage) -> None:
    """Raises UnsupportedError for a part of a matrix that begins or ends inside a quantized group: its codes would not
    be those of the whole matrix."""
    if not isinstance(layers, Grouped):
        return
    for matrix in matrices:
        if matrix.whole is None or not matrix.in_layer:
            continue
        along, whole = (matrix.rows, matrix.columns)[layers.group_axis], matrix.whole[layers.group_axis]
        if along < whole and along % layers.group:
            raise UnsupportedError(
                f"policy.tensor: a rank has {along} of the {whole} values of {matrix.name} along which groups of "
                f"{layers.group} run: choose policy.group_size or policy.weight_groups so that parts are whole groups"
            )
