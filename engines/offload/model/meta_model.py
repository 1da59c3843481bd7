"""Any transformers causal model on the meta device: its linear layers ask for products, its attention goes to a hook.

There is no model code of our own: transformers builds the model from its configuration, without weights. Small
parameters (norms, biases) are bound once and embeddings to mapped tables. Every linear layer asks the `Weights` in
charge for its product (`LayerProducts`), and every attention goes to the `Attention` of the current batch.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.pytorch_utils import Conv1D

from engines.offload.device.protocol import Device
from engines.offload.memory.layout import Matrix
from engines.offload.memory.tensor_shard import Role, TensorShard
from engines.offload.model.build import DryPass, build_on_meta, load_config, require_small, stop_and_begin_tokens
from engines.offload.model.embedding_table import EmbeddingTable
from engines.offload.model.hooks import OFFLOAD
from engines.offload.model.layer_products import LayerProducts, PackedBatch, Weights, current_batch
from engines.offload.model.matrix_parts import Collectives, MatrixParts
from engines.offload.model.row_by_row import RowByRow
from engines.offload.model.stage import LayerFlow, Stage, StageEnd, cut
from engines.offload.model.tensor_dtypes import TensorDtypes
from engines.offload.model.tensor_roles import TensorRoles, divide_heads
from harness.api import ModelShape, UnsupportedError, first_line


class MetaModel:
    """A model without weights, and what a dry pass has learnt of it before anything is read.

    `matrices` are in order of use. `joins` are their names, those together that multiply the same input one after the
    other; `attends` says how many of these come before each attention. `tables` are embeddings [entries, width],
    `small` all other parameters, `experts` the matrices of all experts, also those of other ranks. `eos` are the tokens
    that end a sequence, `bos` begins one; `module` is transformers' own. `flow` tells how layers hand on what they
    computed; `part`, a stage and the flow of the whole model, leaves only what the stage needs, and `tensor` a part of
    every matrix. Raises UnsupportedError, with the reason, for a model that the hooks cannot run, that is not of
    `shape`, or that has no such part.
    """

    def __init__(
        self, path: Path, shape: ModelShape, dtype: torch.dtype, part: tuple[Stage, LayerFlow] | None = None,
        tensor: TensorShard | None = None,
    ) -> None:  # fmt: skip
        config = load_config(path)
        self.module = build_on_meta(config, dtype)
        self._kind = config.model_type
        self._what = self._kind if tensor is None else f"policy.tensor: a part of {self._kind}"
        self.dtype = dtype
        self.prefix = self.module.base_model_prefix
        self.aliases: Mapping[str, str] = self.module.all_tied_weights_keys
        self.transforms = get_model_conversion_mapping(self.module)
        self.eos, self.bos = stop_and_begin_tokens(path, config, shape.vocab)
        self._parts = MatrixParts(tensor)
        self._layers = LayerProducts(self._parts)
        self._shape = shape
        self._tensor = tensor
        self._roles = None if tensor is None else TensorRoles(self.module, self._kind)
        if tensor is not None:
            divide_heads(self.module, shape, tensor)
        self._stage = None if part is None else part[0]
        self.flow = LayerFlow() if part is None else part[1]
        if self._stage is not None:
            self.flow.require(self._kind)
            cut(self._all_layers(), self._stage, self.flow, lambda: current_batch.get().entering())
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        self.dtypes = TensorDtypes(self.module, dtype)
        self._unused: dict[str, tuple[nn.Module, tuple[int, ...]]] = {}
        self.experts: list[Matrix] = []
        self.tables: dict[str, tuple[int, int]] = {}
        self.small: dict[str, tuple[int, ...]] = {}
        matrices = self._sorted_parameters()
        if any(m.expert is not None for m in matrices.values()):
            self.module.set_experts_implementation(OFFLOAD)
        dry = self._dry_pass(matrices)
        self.joins, self.attends, self.has_windows = dry.joins, dry.attends, dry.has_windows
        self.matrices = [matrices[name] for join in dry.joins for name in join]
        self._layers.learn(dry, ends_in_logits=self._stage is None or self._stage.is_last)
        if self._stage is None:
            outside = [{name for name in join if not matrices[name].in_layer} for join in dry.joins]
            before, after = outside[: dry.attends[0]], outside[dry.attends[-1] :]
            self.flow.outside_before, self.flow.outside_after = (frozenset(chain(*names)) for names in (before, after))
        embedding = self.module.get_input_embeddings()
        self.token_table = next((name for name, (owner, _) in self._owners.items() if owner is embedding), "")
        require_small(self._kind, self.module, self.small)
        self.module.set_attn_implementation(OFFLOAD)

    def _sorted_parameters(self) -> dict[str, Matrix]:
        """Finds out what each parameter is: returns matrices by name, and fills `tables`, `small`, `experts` and what
        is known of owners and unused ones."""
        matrices: dict[str, Matrix] = {}
        for path_, module in self.module.named_modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                name = f"{path_}.{leaf}" if path_ else leaf
                self._owners[name] = (module, leaf)
                self.dtypes.learn(name, parameter.dtype)
                if hasattr(module, "is_transposed") and parameter.dim() == 3:
                    each = self._layers.replace_experts(module, path_, leaf, tuple(parameter.shape))
                    self.experts += each
                    own = self._parts.experts(len(each))
                    matrices |= {m.name: m for m in each[own.start : own.stop]}
                elif not self._needs(name):
                    self._unused[name] = (module, tuple(parameter.shape))
                elif leaf == "weight" and type(module).forward in (nn.Linear.forward, Conv1D.forward):
                    role: Role = "whole" if self._roles is None else self._roles.of(path_)
                    matrices[name] = self._layers.replace_linear(module, name, tuple(parameter.shape), role)
                elif isinstance(module, nn.Embedding):
                    self.tables[name] = (parameter.shape[0], parameter.shape[1])
                else:
                    self.small[name] = tuple(parameter.shape)
            for leaf, buffer in module.named_buffers(recurse=False):
                if leaf not in module._non_persistent_buffers_set:  # checkpoints hold it, such as a router's bias
                    name = f"{path_}.{leaf}" if path_ else leaf
                    self._owners[name] = (module, leaf)
                    self.dtypes.learn(name, buffer.dtype)
                    self.small[name] = tuple(buffer.shape)
        return matrices

    def layers(self) -> Sequence[nn.Module]:
        """The decoder layers, those of the stage. Raises UnsupportedError where they are no plain list."""
        layers, stage = self._all_layers(), self._stage
        return layers if stage is None else layers[stage.first : stage.last]

    def _all_layers(self) -> Sequence[nn.Module]:
        lists = [m for m in self.module.modules() if isinstance(m, nn.ModuleList)]
        layers = [m for m in lists if len(m) == self._shape.num_layers]
        if len(layers) != 1:
            raise UnsupportedError(f"{self._kind}: its layers are no plain list")
        return list(layers[0])

    def bind(
        self,
        tables: Mapping[str, torch.Tensor],
        small: Mapping[str, torch.Tensor],
        device: Device,
        reproducible: bool = False,
    ) -> None:
        """Puts real tensors behind embeddings and small parameters, where `device` computes. The table of token
        embeddings stays in host memory: the host looks rows up and uploads them. `reproducible`: products of small
        parameters, which are routers', are the same for a row in any company."""
        on_host = device.where.type == "cpu"
        for name, tensor in tables.items():
            if on_host or name == self.token_table:
                self._put(name, EmbeddingTable.of(tensor, self.dtype, device))
            else:
                self._put(name, tensor.to(self.dtype).to(device.where))
        for name, tensor in small.items():
            placed = self._parts.small(name, tensor).to(device.where)
            if reproducible and tensor.dim() == 2:
                placed = placed.to(self.dtypes.of(name)).as_subclass(RowByRow)
            self._put(name, placed)
        for name, (module, shape_) in self._unused.items():
            if name == self.token_table:  # looked up by the host
                module.forward = _zeros_of_tokens(shape_[1], self.dtype, device.where)
            else:
                self._put(name, torch.zeros(1, dtype=self.dtype, device=device.where).expand(shape_))
        for module in self.module.modules():
            real = {leaf: buffer for leaf, buffer in module._buffers.items() if buffer is not None}
            module._buffers.update({leaf: buffer.to(device.where) for leaf, buffer in real.items()})

    def use(self, weights: Weights | None) -> None:
        """Linear layers and mixtures get their products from `weights` from now on."""
        self._layers.use(weights)

    def use_collectives(self, collectives: Collectives) -> None:
        """Products with parts of matrices are put together by `collectives` from now on."""
        self._parts.collectives = collectives

    def __call__(self, batch: PackedBatch) -> torch.Tensor:
        """Logits [rows of logits_indices, vocabulary] of one pass, in the compute dtype; of a stage but the last, its
        hidden states [tokens, hidden]."""
        current_batch.set(batch)
        try:
            output = self.module(
                input_ids=batch.ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=batch.logits_indices,
                offload_attention=batch.attention,
            )
        except StageEnd as end:
            return end.hidden[0]
        return torch.as_tensor(output.logits[0])

    def _needs(self, name: str) -> bool:
        """Whether the stage needs a parameter outside of its layers: embeddings only the first, the head the last."""
        stage, flow = self._stage, self.flow
        if stage is None:
            return True
        if name in flow.outside_before or self._is_table_outside(name):
            return stage.is_first
        return stage.is_last or name not in flow.outside_after

    def _is_table_outside(self, name: str) -> bool:
        module, _ = self._owners[name]
        return isinstance(module, nn.Embedding) and not any(part.isdigit() for part in name.split("."))

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        module, leaf = self._owners[name]
        if module._buffers.get(leaf) is not None:
            module._buffers[leaf] = tensor.to(self.dtypes.of(name))
            return
        # `.data =` refuses on meta; a Parameter would lose what makes a table one
        bound: Any = tensor
        if not isinstance(tensor, EmbeddingTable | RowByRow):
            bound = nn.Parameter(tensor.to(self.dtypes.of(name)), requires_grad=False)
        module._parameters[leaf] = bound

    @torch.no_grad()
    def _dry_pass(self, matrices: Mapping[str, Matrix]) -> DryPass:
        """Runs two tokens through zeros: which matrices are used in which order, and that every layer attends once."""
        each = matrices.values()
        dry = DryPass({matrix.name: matrix.rows for matrix in each}, {matrix.name: matrix.group for matrix in each})
        for name, shape in self.tables.items():
            self._put(name, torch.zeros(1, dtype=self.dtype).expand(shape))
        for name, small in self.small.items():
            self._put(name, torch.zeros((), dtype=self.dtype).expand(small))
        for name, (module, whole) in self._unused.items():
            self._put(name, torch.zeros(1, dtype=self.dtype).expand(whole))
            if not isinstance(module, nn.Embedding):
                module.forward = _zeros(whole[1] if isinstance(module, Conv1D) else whole[0])
        self.use(dry)
        self.use_collectives(dry)
        two = torch.arange(2)
        entering = torch.zeros(2, self._shape.hidden, dtype=self.dtype)
        end = self._watched()
        try:
            logits = self(PackedBatch(two, two, two[1:], dry, entering))
        except UnsupportedError as exc:
            raise UnsupportedError(f"{self._what}: {exc}") from exc
        except Exception as exc:  # whatever a model does that the hooks do not cover
            words = f"{type(exc).__name__}: {first_line(exc)}"
            raise UnsupportedError(f"{self._what}: a packed pass fails ({words})") from exc
        finally:
            end()
        if problem := dry.problem(self._shape, logits, self._stage, self._tensor):
            raise UnsupportedError(f"{self._what}: {problem}")
        return dry

    def _watched(self) -> Callable[[], None]:
        """Lets `flow` watch the layers of a whole model."""
        if self._stage is not None:
            return lambda: None
        try:
            return self.flow.watch(self._all_layers())
        except UnsupportedError as exc:
            self.flow.other = str(exc)
            return lambda: None


def _zeros(outputs: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A linear layer before a stage that is not the first: what it computes, the stage's first layer drops."""
    return lambda x: x.new_zeros(*x.shape[:-1], outputs)


def _zeros_of_tokens(width: int, dtype: torch.dtype, where: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """An embedding before such a stage."""
    return lambda ids: torch.zeros(*ids.shape, width, dtype=dtype, device=where)
