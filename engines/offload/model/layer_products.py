"""What a model's linear layers and mixtures do in a pass instead of multiplying: they ask the executor for products.

A batch is packed: its sequences' tokens lie one after the other in one row, without padding; only the attention knows
whose they are.
"""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain
from typing import Any, Protocol

import torch
from transformers.pytorch_utils import Conv1D

from engines.offload.memory.layout import OUTSIDE, Matrix
from engines.offload.memory.tensor_shard import Role
from engines.offload.model.build import DryPass
from engines.offload.model.hooks import Attention
from engines.offload.model.matrix_parts import MatrixParts
from engines.offload.weights.host_experts import AddExperts, Mixture, RoutedRows
from harness.api import HarnessError, UnsupportedError


class Weights(Protocol):
    """Where linear layers get their products from: the executor, or the dry pass."""

    def gemm(
        self, matrices: Sequence[str], x: torch.Tensor, biases: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        """x[..., columns] times the transpose of each of the named matrices, plus its bias[outputs]: of each a new
        [rows, outputs]."""

    def route_experts(self, mixture: Mixture, routed: RoutedRows) -> tuple[Sequence[int], AddExperts | None]:
        """Which of a mixture's experts this batch multiplies by `gemm`, in order; called before those products. Others,
        if any, run elsewhere: the function returned adds their outputs to the mixture's [rows, hidden]."""


@dataclass(frozen=True)
class PackedBatch:
    """Tokens of several sequences, concatenated without padding: ids [tokens] in host memory; where the model computes,
    positions [tokens] and the indices of tokens whose logits are needed.

    `hidden`: what enters a stage of a pipeline but the first, [tokens, hidden]. `ahead`: by matrix, products that were
    computed before the model asks for them, and their input."""

    ids: torch.Tensor
    positions: torch.Tensor
    logits_indices: torch.Tensor
    attention: Attention
    hidden: torch.Tensor | None = None
    ahead: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def entering(self) -> torch.Tensor:
        """What enters a stage, as layers take it: [1, tokens, hidden]."""
        assert self.hidden is not None
        return self.hidden[None]


#: The current batch; each batch runs in a greenlet, and so in a context, of its own.
current_batch: ContextVar[PackedBatch] = ContextVar("batch")


class LayerProducts:
    """The forward methods of linear layers and mixtures: products with `parts` of their matrices by `weights`."""

    def __init__(self, parts: MatrixParts) -> None:
        self.weights: Weights | None = None
        self._parts = parts
        self._biases: Mapping[str, torch.Tensor | None] = {}  # by matrix
        self._after_attention: frozenset[str] = frozenset()
        self._join_of: Mapping[str, Sequence[str]] = {}  # by its first matrix
        self._linears: dict[str, Any] = {}  # by matrix

    def use(self, weights: Weights | None) -> None:
        """Asks `weights` for products from now on, with the biases that the modules have now."""
        self.weights = weights
        self._biases = {name: self._parts.bias(name, module.bias) for name, module in self._linears.items()}

    def learn(self, dry: DryPass, ends_in_logits: bool = True) -> None:
        """What the dry pass found: which matrices multiply the same input, and which come after the last attention, so
        that only rows with logits need them; all rows do where the pass ends in hidden states."""
        self._join_of = {join[0]: join for join in dry.joins}
        if ends_in_logits:
            self._after_attention = frozenset(chain.from_iterable(dry.joins[dry.attends[-1] :]))

    def replace_linear(self, module: Any, name: str, shape: tuple[int, ...], role: Role) -> Matrix:
        transposed = isinstance(module, Conv1D)
        rows, columns = shape[::-1] if transposed else shape
        self._linears[name] = module

        def forward(x: torch.Tensor) -> torch.Tensor:
            output = self._linear(name, x)
            return output.view(*x.shape[:-1], output.shape[-1])

        module.forward = forward
        return self._parts.of(Matrix(name, rows, columns, _group(name), transposed), role)

    def replace_experts(self, module: Any, path: str, leaf: str, shape: tuple[int, ...]) -> list[Matrix]:
        """The matrices of all of a mixture's experts, by transformers' experts interface."""
        if getattr(module, "has_post_expert_norm", False):  # not every transformers has it
            raise UnsupportedError(f"{type(module).__name__} norms each expert's output, which engine offload does not")
        name = f"{path}.{leaf}"
        module.offload_experts = partial(self._experts, module, path)
        rows, columns = shape[:0:-1] if module.is_transposed else shape[1:]
        return [Matrix(name, rows, columns, _group(name), module.is_transposed, e) for e in range(shape[0])]

    def _experts(
        self, module: Any, path: str, x: torch.Tensor, index: torch.Tensor, share: torch.Tensor
    ) -> torch.Tensor:
        """The mixture for x [rows, hidden], whose row i goes to experts index[i] at the shares share[i]."""
        assert self.weights is not None
        mixture, count = _mixture(module, path)
        own = self._parts.experts(count)
        if self._serves_logits_only(f"{mixture.first}[{own.start}]", len(x)):
            every = torch.ones(len(x), 1, dtype=torch.bool, device=x.device)
            without_logits = every.index_fill_(0, current_batch.get().logits_indices, False)
            index = index.masked_fill(without_logits, count)  # no expert
        index = index.clamp(max=count)
        chosen = index.cpu()
        rows = torch.bincount(chosen.flatten(), minlength=count + 1)[:count].tolist()
        out = torch.zeros_like(x)
        tokens = int((chosen < count).any(dim=1).sum())
        here, add_others = self.weights.route_experts(mixture, RoutedRows(x, chosen, share, rows, tokens))
        width, order, ends = index.shape[1], index.flatten().argsort(stable=True), [*accumulate(rows)]
        for e in (e for e in here if e in own):
            at = order[ends[e] - rows[e] : ends[e]]  # a search for them would wait for a device
            row, place = at // width, at % width
            [inner] = self._gemm([f"{mixture.first}[{e}]"], x[row], [_of(mixture.first_biases, e)])
            [outer] = self._gemm([f"{mixture.second}[{e}]"], mixture.activate(inner), [_of(mixture.second_biases, e)])
            out.index_add_(0, row, (outer * share[row, place, None]).to(out.dtype))  # some share in float32
        if add_others is not None:
            add_others(out)
        return self._parts.mixture(out)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """A linear layer's output [rows, outputs] for x [..., columns]. The first of a join has those of the others
        computed with it."""
        ahead = current_batch.get().ahead
        if name in ahead:
            given, output = ahead.pop(name)
            if given is not x:
                raise HarnessError(f"{name} multiplies another input than the matrices that it was joined with")
            return output
        join = self._join_of.get(name, (name,))
        first, *others = self._gemm(join, x, [self._biases[matrix] for matrix in join])
        for matrix, output in zip(join[1:], others, strict=True):
            ahead[matrix] = x, output
        return first

    def _gemm(
        self, names: Sequence[str], x: torch.Tensor, biases: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor]:
        """x [..., columns] times the transpose of each of the joined matrices. After the last attention a row serves
        its own logits only, so rows without logits, such as all of a prompt's but the last, are not computed."""
        assert self.weights is not None
        count = x.numel() // x.shape[-1]
        if not self._serves_logits_only(names[0], count):
            return self._parts.whole(names, self.weights.gemm(names, x, biases))
        indices = current_batch.get().logits_indices
        computed = self._parts.whole(names, self.weights.gemm(names, x.reshape(count, -1)[indices], biases))
        return [rows.new_zeros(count, rows.shape[1]).index_copy_(0, indices, rows) for rows in computed]

    def _serves_logits_only(self, name: str, rows: int) -> bool:
        """Whether a matrix comes after the last attention and its `rows` are the batch's, some without logits."""
        if name not in self._after_attention:
            return False
        batch = current_batch.get()
        return len(batch.logits_indices) < len(batch.ids) == rows


def _mixture(module: Any, path: str) -> tuple[Mixture, int]:
    """What transformers' module at `path` computes of each of its experts, and how many they are."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    activate = module._apply_gate if module.has_gate else module.act_fn
    biases = [getattr(module, f"{name}_bias", None) for name in (first, "down_proj")]
    return Mixture(path, f"{path}.{first}", f"{path}.down_proj", activate, *biases), len(getattr(module, first))


def _of(biases: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    """An expert's bias, where experts have one."""
    return None if biases is None else biases[expert]


def _group(name: str) -> str:
    """The file a matrix belongs to: one for each decoder layer, one for all that is outside of them."""
    parts = name.split(".")
    number = next((p for p in parts if p.isdigit()), None)
    return OUTSIDE if number is None else f"layer-{int(number):05d}"
