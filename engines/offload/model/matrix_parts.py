"""A rank's part of every matrix of linear layers and mixtures, and how the products with parts become whole."""

from collections.abc import Sequence
from typing import Protocol

import torch

from engines.offload.memory.layout import Matrix
from engines.offload.memory.tensor_shard import Role, TensorShard
from harness.api import UnsupportedError


class Collectives(Protocol):
    """The collective operations of tensor parallelism, which all ranks call in the same order. The dry pass stands for
    one rank."""

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' [rows, outputs], the same on all."""

    def gather(self, part: torch.Tensor, outputs: int) -> torch.Tensor:
        """[rows, outputs] on rank 0, of all ranks' [rows, their part of the outputs]; elsewhere the rank's own part."""


class MatrixParts:
    """The matrices of which the rank has a `shard`, or all of them (None); `collectives` put products together."""

    def __init__(self, shard: TensorShard | None) -> None:
        self.collectives: Collectives | None = None
        self._shard = shard
        self._roles: dict[str, Role] = {}  # by matrix
        self._outputs: dict[str, int] = {}  # by matrix, those of all ranks together

    def of(self, matrix: Matrix, role: Role) -> Matrix:
        """The rank's part of a linear layer's matrix. Raises UnsupportedError for one without equal parts."""
        if self._shard is None:
            return matrix
        self._roles[matrix.name], self._outputs[matrix.name] = role, matrix.rows
        return self._shard.of_matrix(matrix, role)

    def experts(self, count: int) -> range:
        """Which of a mixture's experts the rank has. Raises UnsupportedError where ranks would not have as many."""
        if self._shard is None:
            return range(count)
        if count % self._shard.ranks:
            raise UnsupportedError(f"policy.tensor: {count} experts are no {self._shard.ranks} equal parts")
        return self._shard.of(count)

    def bias(self, matrix: str, bias: torch.Tensor | None) -> torch.Tensor | None:
        """What the rank adds to a linear layer's product: of products that are added up, one has the bias."""
        adds_up = self._shard is not None and self._roles[matrix] == "inputs"
        return None if adds_up and self._shard is not None and self._shard.rank else bias

    def small(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """Of a small parameter what the rank needs: of a bias [outputs] the part beside its part of the matrix."""
        role = self._roles.get(f"{name.removesuffix('bias')}weight") if name.endswith(".bias") else None
        if self._shard is None or role not in ("outputs", "vocabulary"):
            return parameter
        own = self._shard.of(len(parameter))
        return parameter[own.start : own.stop]

    def mixture(self, out: torch.Tensor) -> torch.Tensor:
        """What a mixture returns, of what the rank's experts add to it, [rows, hidden]."""
        if self._shard is None:
            return out
        assert self.collectives is not None
        return self.collectives.all_reduce(out)

    def whole(self, matrices: Sequence[str], products: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """What linear layers return, of the products with the rank's parts of their matrices."""
        if self._shard is None:
            return products
        assert self.collectives is not None
        outputs: list[torch.Tensor] = []
        for name, product in zip(matrices, products, strict=True):
            match self._roles.get(name):  # an expert has none: it is its rank's own
                case "inputs":
                    outputs.append(self.collectives.all_reduce(product))
                case "vocabulary":
                    outputs.append(self.collectives.gather(product, self._outputs[name]))
                case _:
                    outputs.append(product)
        return outputs
