"""Any transformers causal model on the meta device: its linear layers ask for products, its attention goes to a hook.

There is no model code of our own: transformers builds the model from its configuration, without weights. Small
parameters (norms, biases) are bound once and embeddings to mapped tables. Every linear layer asks the `Weights` in
charge for its product, and every attention goes to the `Attention` of the current batch. A batch is packed: its
sequences' tokens lie one after the other in one row, without padding; only the attention knows whose they are.
"""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.pytorch_utils import Conv1D

from engines.offload.device.protocol import Device
from engines.offload.memory.layout import OUTSIDE, Matrix
from engines.offload.model.build import DryPass, build_on_meta, load_config, require_small, stop_and_begin_tokens
from engines.offload.model.embedding_table import EmbeddingTable
from engines.offload.model.hooks import OFFLOAD, Attention
from harness.api import ModelShape, UnsupportedError, first_line


class Weights(Protocol):
    """Where linear layers get their products from: the executor, or the dry pass."""

    def gemm(self, matrix: str, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x[rows, columns] times the transpose of the named matrix, plus bias[outputs]: a new [rows, outputs]."""

    def route_experts(self, stacks: Sequence[str], experts: Sequence[int], count: int) -> Sequence[int]:
        """Which of a mixture's `count` experts to compute, in order, where tokens go to `experts`; called before their
        products. `stacks` are the parameters that hold the experts' matrices."""


@dataclass(frozen=True)
class PackedBatch:
    """Tokens of several sequences, concatenated without padding: ids [tokens] in host memory; where the model computes,
    positions [tokens] and the indices of tokens whose logits are needed."""

    ids: torch.Tensor
    positions: torch.Tensor
    logits_indices: torch.Tensor
    attention: Attention


#: The current batch; each batch runs in a greenlet, and so in a context, of its own.
_batch: ContextVar[PackedBatch] = ContextVar("batch")


class MetaModel:
    """A model without weights, and what a dry pass has learnt of it before anything is read.

    `matrices` are in order of use; `attends` says how many come before each attention. `tables` are embeddings
    [entries, width], `small` all other parameters. `eos` are the tokens that end a sequence, `bos` begins one; `module`
    is transformers' own. Raises UnsupportedError, with the reason, for a model that the hooks cannot run or that is not
    of `shape`.
    """

    def __init__(self, path: Path, shape: ModelShape, dtype: torch.dtype) -> None:
        config = load_config(path)
        self.module = build_on_meta(config, dtype)
        self._kind = config.model_type
        self.dtype = dtype
        self.prefix = self.module.base_model_prefix
        self.aliases: Mapping[str, str] = self.module.all_tied_weights_keys
        self.transforms = get_model_conversion_mapping(self.module)
        self._after_attention: frozenset[str] = frozenset()
        self.eos, self.bos = stop_and_begin_tokens(path, config, shape.vocab)
        self.weights: Weights | None = None
        self._shape = shape
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        matrices: dict[str, Matrix] = {}
        self.tables: dict[str, tuple[int, int]] = {}
        self.small: dict[str, tuple[int, ...]] = {}
        for path_, module in self.module.named_modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                name = f"{path_}.{leaf}" if path_ else leaf
                self._owners[name] = (module, leaf)
                if hasattr(module, "is_transposed") and parameter.dim() == 3:
                    matrices |= {m.name: m for m in self._replace_experts(module, path_, leaf, tuple(parameter.shape))}
                elif leaf == "weight" and type(module).forward in (nn.Linear.forward, Conv1D.forward):
                    matrices[name] = self._replace_linear(module, name, tuple(parameter.shape))
                elif isinstance(module, nn.Embedding):
                    self.tables[name] = (parameter.shape[0], parameter.shape[1])
                else:
                    self.small[name] = tuple(parameter.shape)
            for leaf, buffer in module.named_buffers(recurse=False):
                if leaf not in module._non_persistent_buffers_set:  # checkpoints hold it, such as a router's bias
                    name = f"{path_}.{leaf}" if path_ else leaf
                    self._owners[name] = (module, leaf)
                    self.small[name] = tuple(buffer.shape)
        if any(m.expert is not None for m in matrices.values()):
            self.module.set_experts_implementation(OFFLOAD)
        dry = self._dry_pass(matrices)
        self.matrices = [matrices[name] for name in dry.order]
        self.attends, self.has_windows = dry.attends, dry.has_windows
        self._after_attention = frozenset(dry.order[dry.attends[-1] :])
        embedding = self.module.get_input_embeddings()
        self.token_table = next((name for name, (owner, _) in self._owners.items() if owner is embedding), "")
        require_small(self._kind, self.module, self.small)
        self.module.set_attn_implementation(OFFLOAD)

    def layers(self) -> Sequence[nn.Module]:
        """The decoder layers. Raises UnsupportedError where they are no plain list."""
        lists = [m for m in self.module.modules() if isinstance(m, nn.ModuleList)]
        layers = [m for m in lists if len(m) == self._shape.num_layers]
        if len(layers) != 1:
            raise UnsupportedError(f"{self._kind}: its layers are no plain list")
        return list(layers[0])

    def bind(self, tables: Mapping[str, torch.Tensor], small: Mapping[str, torch.Tensor], device: Device) -> None:
        """Puts real tensors behind embeddings and small parameters, where `device` computes. The table of token
        embeddings stays in host memory: the host looks rows up and uploads them."""
        on_host = device.where.type == "cpu"
        for name, tensor in tables.items():
            if on_host or name == self.token_table:
                self._put(name, EmbeddingTable.of(tensor, self.dtype, device))
            else:
                self._put(name, tensor.to(self.dtype).to(device.where))
        for name, tensor in small.items():
            self._put(name, tensor.to(device.where))
        for module in self.module.modules():
            real = {leaf: buffer for leaf, buffer in module._buffers.items() if buffer is not None}
            module._buffers.update({leaf: buffer.to(device.where) for leaf, buffer in real.items()})

    def __call__(self, batch: PackedBatch) -> torch.Tensor:
        """Logits [rows of logits_indices, vocabulary] of one pass, in the compute dtype."""
        _batch.set(batch)
        output = self.module(
            input_ids=batch.ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.logits_indices,
            offload_attention=batch.attention,
        )
        return torch.as_tensor(output.logits[0])

    def _replace_linear(self, module: Any, name: str, shape: tuple[int, ...]) -> Matrix:
        transposed = isinstance(module, Conv1D)
        rows, columns = shape[::-1] if transposed else shape

        def forward(x: torch.Tensor) -> torch.Tensor:
            return self._gemm(name, x.reshape(-1, columns), module.bias).view(*x.shape[:-1], rows)

        module.forward = forward
        return Matrix(name, rows, columns, _group(name), transposed)

    def _replace_experts(self, module: Any, path: str, leaf: str, shape: tuple[int, ...]) -> list[Matrix]:
        """The matrices of a mixture's experts, by transformers' experts interface."""
        if module.has_post_expert_norm:
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
        first, second = ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"
        count = len(getattr(module, first))
        if self._serves_logits_only(f"{path}.{first}[0]", len(x)):
            every = torch.ones(len(x), 1, dtype=torch.bool, device=x.device)
            without_logits = every.index_fill_(0, _batch.get().logits_indices, False)
            index = index.masked_fill(without_logits, count)  # no expert
        hit = sorted(e for e in set(index.flatten().cpu().tolist()) if e < count)
        out = torch.zeros_like(x)
        for e in self.weights.route_experts((f"{path}.{first}", f"{path}.{second}"), hit, count):
            row, place = torch.where(index == e)
            inner = self._gemm(f"{path}.{first}[{e}]", x[row], _of(module, f"{first}_bias", e))
            inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
            outer = self._gemm(f"{path}.{second}[{e}]", inner, _of(module, f"{second}_bias", e))
            out.index_add_(0, row, (outer * share[row, place, None]).to(out.dtype))  # some share in float32
        return out

    def _gemm(self, name: str, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x times the transpose of a matrix. After the last attention a row serves its own logits only, so rows without
        logits, such as all of a prompt's but the last, are not computed."""
        assert self.weights is not None
        if not self._serves_logits_only(name, len(x)):
            return self.weights.gemm(name, x, bias)
        indices = _batch.get().logits_indices
        rows = self.weights.gemm(name, x[indices], bias)
        return rows.new_zeros(len(x), rows.shape[1]).index_copy_(0, indices, rows)

    def _serves_logits_only(self, name: str, rows: int) -> bool:
        """Whether a matrix comes after the last attention and its `rows` are the batch's, some without logits."""
        tokens = len(_batch.get().ids)
        return name in self._after_attention and len(_batch.get().logits_indices) < tokens == rows

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        module, leaf = self._owners[name]
        if (buffer := module._buffers.get(leaf)) is not None:
            module._buffers[leaf] = tensor.to(buffer.dtype)  # its own: some are integers, some always float32
            return
        # `.data =` refuses on meta; a Parameter would lose what makes a table one
        bound: Any = tensor
        if not isinstance(tensor, EmbeddingTable):
            bound = nn.Parameter(tensor.to(self.dtype), requires_grad=False)
        module._parameters[leaf] = bound

    @torch.inference_mode()
    def _dry_pass(self, matrices: Mapping[str, Matrix]) -> DryPass:
        """Runs two tokens through zeros: which matrices are used in which order, and that every layer attends once."""
        dry = DryPass({matrix.name: matrix.rows for matrix in matrices.values()})
        for name, shape in self.tables.items():
            self._put(name, torch.zeros(1, dtype=self.dtype).expand(shape))
        for name, small in self.small.items():
            self._put(name, torch.zeros((), dtype=self.dtype).expand(small))
        self.weights = dry
        two = torch.arange(2)
        try:
            logits = self(PackedBatch(two, two, two[1:], dry))
        except UnsupportedError as exc:
            raise UnsupportedError(f"{self._kind}: {exc}") from exc
        except Exception as exc:  # whatever a model does that the hooks do not cover
            words = f"{type(exc).__name__}: {first_line(exc)}"
            raise UnsupportedError(f"{self._kind}: a packed pass fails ({words})") from exc
        if problem := dry.problem(self._shape, logits):
            raise UnsupportedError(f"{self._kind}: {problem}")
        return dry


def _of(module: Any, name: str, expert: int) -> torch.Tensor | None:
    """An expert's bias, where experts have one."""
    stack = getattr(module, name, None)
    return None if stack is None else stack[expert]


def _group(name: str) -> str:
    """The file a matrix belongs to: one for each decoder layer, one for all that is outside of them."""
    parts = name.split(".")
    number = next((p for p in parts if p.isdigit()), None)
    return OUTSIDE if number is None else f"layer-{int(number):05d}"
