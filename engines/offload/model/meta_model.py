"""Any transformers causal model on the meta device, taken over where it needs weights and where it attends.

No model code of our own: transformers builds the model from its configuration without weights. Small parameters
(norms, biases) are bound once, embeddings to mapped tables; every linear layer asks the `Weights` in charge for
its product, and every attention goes to the `Attention` of the batch in hand. A batch is packed: its tokens lie
one after the other in one row, without padding, and who owns which is the attention's to know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.pytorch_utils import Conv1D

from engines.common.requests import special_tokens
from engines.offload.device.protocol import Device
from engines.offload.memory.layout import OUTSIDE, Matrix
from engines.offload.model.dry_pass import DryPass
from engines.offload.model.embedding_table import Table
from engines.offload.model.hooks import DRY_RUN, OFFLOAD, Attention
from harness.api import HarnessError, ModelShape, UnsupportedError, first_line

#: Rotary scalings whose frequencies depend on the longest position of the pass, and so on the batch.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


class Weights(Protocol):
    """Where linear layers get their products from."""

    def product(self, matrix: str, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x[rows, columns] times the transpose of the named matrix, plus bias[outputs]: a new [rows, outputs]."""
        ...

    def visit(self, stacks: Sequence[str], hit: Sequence[int], count: int) -> Sequence[int]:
        """Which of `count` experts to compute, in this order, of those that are hit; told before their products.

        `stacks` are the parameters that hold the experts' matrices.
        """
        ...


@dataclass(frozen=True)
class PackedBatch:
    """Tokens of several sequences in one row: ids and positions [tokens], and the rows whose logits are wanted.

    The ids are in host memory, all else is where the model computes.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    wanted: torch.Tensor
    attention: Attention


#: The batch in hand; each batch runs in a greenlet, and so in a context, of its own.
_batch: ContextVar[PackedBatch] = ContextVar("batch")


class _EmptyOnMeta(TorchFunctionMode):
    """Room for weights is never taken, not even for the moment before `init_empty_weights` gives it back.

    A stack of experts can be larger than memory. Buffers, which are computed, are real.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


class MetaModel:
    """A model without weights, and what it needs of them: learnt from a dry pass before anything is read.

    `matrices` are in the order of use, of which `attends` come before each attention; `tables` are embeddings
    [entries, width]; `small` is all the rest.
    Raises UnsupportedError, with the reason, for a model that the seams do not carry or that is not of `shape`.
    """

    def __init__(self, path: Path, shape: ModelShape, dtype: torch.dtype) -> None:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        _refuse_batch_dependent(config)
        if not AutoModelForCausalLM._model_mapping[type(config)]._supports_attention_backend:
            raise UnsupportedError(f"{config.model_type}: transformers lets nobody replace its attention")
        try:
            with init_empty_weights(), _EmptyOnMeta():
                module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=DRY_RUN)
        except Exception as exc:  # some check their sizes, some need packages that are not here
            raise UnsupportedError(f"{config.model_type}: transformers cannot build it: {first_line(exc)}") from exc
        self._module = module.eval()
        self.dtype = dtype
        self.prefix = self._module.base_model_prefix
        self.aliases: Mapping[str, str] = self._module.all_tied_weights_keys
        self.transforms = get_model_conversion_mapping(self._module)
        self._after_attention: frozenset[str] = frozenset()
        self.eos, self.begin = _special_tokens(path, config, shape.vocab)
        self.weights: Weights | None = None
        self._shape = shape
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        found: dict[str, Matrix] = {}
        self.tables: dict[str, tuple[int, int]] = {}
        self.small: dict[str, tuple[int, ...]] = {}
        for path_, module in self._module.named_modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                name = f"{path_}.{leaf}" if path_ else leaf
                self._owners[name] = (module, leaf)
                if hasattr(module, "is_transposed") and parameter.dim() == 3:
                    found |= {m.name: m for m in self._take_over_stack(module, path_, leaf, tuple(parameter.shape))}
                elif leaf == "weight" and type(module).forward in (nn.Linear.forward, Conv1D.forward):
                    found[name] = self._take_over(module, name, tuple(parameter.shape))
                elif isinstance(module, nn.Embedding):
                    self.tables[name] = (parameter.shape[0], parameter.shape[1])
                else:
                    self.small[name] = tuple(parameter.shape)
            for leaf, buffer in module.named_buffers(recurse=False):
                if leaf not in module._non_persistent_buffers_set:  # checkpoints hold it, such as a router's bias
                    name = f"{path_}.{leaf}" if path_ else leaf
                    self._owners[name] = (module, leaf)
                    self.small[name] = tuple(buffer.shape)
        if any(m.expert is not None for m in found.values()):
            self._module.set_experts_implementation(OFFLOAD)
        dry = self._dry_pass(found)
        self.matrices = [found[name] for name in dry.order]
        self.attends, self.has_windows = dry.attends, dry.has_windows
        self._after_attention = frozenset(dry.order[dry.attends[-1] :])
        self.token_table = self._name_of_token_table()
        self._refuse_what_is_not_streamed()
        self._module.set_attn_implementation(OFFLOAD)

    def layers(self) -> Sequence[nn.Module]:
        """The decoder layers. Raises UnsupportedError where they are no plain list."""
        lists = [m for m in self._module.modules() if isinstance(m, nn.ModuleList)]
        found = [m for m in lists if len(m) == self._shape.num_layers]
        if len(found) != 1:
            raise UnsupportedError(f"{self._module.config.model_type}: its layers are no plain list")
        return list(found[0])

    def bind(
        self, tables: Mapping[str, torch.Tensor], small: Mapping[str, torch.Tensor], device: Device | None = None
    ) -> None:
        """Puts real tensors behind embeddings and small parameters, on `device` but for the table of tokens: its rows
        are looked up by the host, and follow."""
        for name, tensor in tables.items():
            if device is None or name == self.token_table:
                self._put(name, Table.of(tensor, self.dtype, device))
            else:
                self._put(name, tensor.to(self.dtype).to(device.where))
        for name, tensor in small.items():
            self._put(name, tensor if device is None else tensor.to(device.where))
        if device is not None:
            for module in self._module.modules():
                real = {leaf: buffer for leaf, buffer in module._buffers.items() if buffer is not None}
                module._buffers.update({leaf: buffer.to(device.where) for leaf, buffer in real.items()})

    def __call__(self, batch: PackedBatch) -> torch.Tensor:
        """Logits [wanted rows, vocabulary] of one pass, in the compute dtype."""
        _batch.set(batch)
        output = self._module(
            input_ids=batch.ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.wanted,
            offload_attention=batch.attention,
        )
        return torch.as_tensor(output.logits[0])

    def _name_of_token_table(self) -> str:
        embedding = self._module.get_input_embeddings()
        return next((name for name, (module, _) in self._owners.items() if module is embedding), "")

    # ------------------------------------------------------------------- taking over

    def _take_over(self, module: Any, name: str, shape: tuple[int, ...]) -> Matrix:
        transposed = isinstance(module, Conv1D)
        rows, columns = shape[::-1] if transposed else shape

        def forward(x: torch.Tensor) -> torch.Tensor:
            return self._product(name, x.reshape(-1, columns), module.bias).view(*x.shape[:-1], rows)

        module.forward = forward
        return Matrix(name, rows, columns, _group(name), transposed)

    def _take_over_stack(self, module: Any, path: str, leaf: str, shape: tuple[int, ...]) -> list[Matrix]:
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
        if self._is_for_wanted(f"{path}.{first}[0]", len(x)):
            every = torch.ones(len(x), 1, dtype=torch.bool, device=x.device)
            unwanted = every.index_fill_(0, _batch.get().wanted, False)
            index = index.masked_fill(unwanted, count)  # no expert
        hit = sorted(e for e in set(index.flatten().cpu().tolist()) if e < count)
        out = torch.zeros_like(x)
        for e in self.weights.visit((f"{path}.{first}", f"{path}.{second}"), hit, count):
            row, place = torch.where(index == e)
            inner = self._product(f"{path}.{first}[{e}]", x[row], _of(module, f"{first}_bias", e))
            inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
            outer = self._product(f"{path}.{second}[{e}]", inner, _of(module, f"{second}_bias", e))
            out.index_add_(0, row, (outer * share[row, place, None]).to(out.dtype))  # some share in float32
        return out

    def _product(self, name: str, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x times the transpose of a matrix. After the last attention a row serves its own logits only, so those
        that nobody wants are not computed: of a prompt all but the last."""
        assert self.weights is not None
        if not self._is_for_wanted(name, len(x)):
            return self.weights.product(name, x, bias)
        wanted = _batch.get().wanted
        rows = self.weights.product(name, x[wanted], bias)
        return rows.new_zeros(len(x), rows.shape[1]).index_copy_(0, wanted, rows)

    def _is_for_wanted(self, name: str, rows: int) -> bool:
        """Whether a matrix comes after the last attention and its `rows` are the batch's, some of them unwanted."""
        tokens = len(_batch.get().ids)
        return name in self._after_attention and len(_batch.get().wanted) < tokens == rows

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        module, leaf = self._owners[name]
        if (buffer := module._buffers.get(leaf)) is not None:
            module._buffers[leaf] = tensor.to(buffer.dtype)  # its own: some are integers, some always float32
            return
        # `.data =` refuses on meta; a Parameter would lose what makes a table one
        bound: Any = tensor
        if not isinstance(tensor, Table):
            bound = nn.Parameter(tensor.to(self.dtype), requires_grad=False)
        module._parameters[leaf] = bound

    # ------------------------------------------------------------------- the dry pass

    @torch.inference_mode()
    def _dry_pass(self, found: Mapping[str, Matrix]) -> DryPass:
        """Runs two tokens through zeros: which matrices are used in which order, and that every layer attends once."""
        dry = DryPass({matrix.name: matrix.rows for matrix in found.values()})
        for name, shape in self.tables.items():
            self._put(name, torch.zeros(1, dtype=self.dtype).expand(shape))
        for name, small in self.small.items():
            self._put(name, torch.zeros((), dtype=self.dtype).expand(small))
        self.weights = dry
        two = torch.arange(2)
        try:
            logits = self(PackedBatch(two, two, two[1:], dry))
        except UnsupportedError as exc:
            raise UnsupportedError(f"{self._module.config.model_type}: {exc}") from exc
        except Exception as exc:  # whatever a model does that the seams do not know
            words = f"{type(exc).__name__}: {first_line(exc)}"
            raise UnsupportedError(f"{self._module.config.model_type}: a packed pass fails ({words})") from exc
        if problem := dry.problem(self._shape) or _logits_problem(logits, self._shape):
            raise UnsupportedError(f"{self._module.config.model_type}: {problem}")
        return dry

    def _refuse_what_is_not_streamed(self) -> None:
        """Only what belongs to linear layers and embeddings is streamed, so the rest must be small parameters."""
        if meta := [name for name, buffer in self._module.named_buffers() if buffer.is_meta]:
            raise UnsupportedError(f"{self._module.config.model_type}: {min(meta)} is left without values")
        for name, shape in self.small.items():
            if len(shape) > 1 and torch.Size(shape).numel() > 1 << 22:
                kind = self._module.config.model_type
                raise UnsupportedError(f"{kind}: {name} {list(shape)} belongs to no plain linear layer or embedding")


def _of(module: Any, name: str, expert: int) -> torch.Tensor | None:
    """An expert's bias, where experts have one."""
    stack = getattr(module, name, None)
    return None if stack is None else stack[expert]


def _logits_problem(logits: torch.Tensor, shape: ModelShape) -> str:
    if tuple(logits.shape) != (1, shape.vocab):
        return f"one wanted row gave logits {list(logits.shape)} instead of {[1, shape.vocab]}"
    return ""


def _refuse_batch_dependent(config: Any) -> None:
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    nested = [v for v in parameters.values() if isinstance(v, Mapping)]
    for rope in [parameters, *nested]:
        if rope.get("rope_type") in _BATCH_DEPENDENT_ROPE:
            raise UnsupportedError(
                f"{config.model_type}: its {rope['rope_type']!r} rotary scaling depends on the batch's longest sequence"
            )


def _special_tokens(path: Path, config: Any, vocab: int) -> tuple[tuple[int, ...], int | None]:
    """As engines.common.requests.special_tokens, from where `generate` finds them."""
    try:
        found = GenerationConfig.from_pretrained(path, local_files_only=True)
    except OSError:  # it has none: the model's configuration says
        found = config.get_text_config()
    except ValueError as exc:
        raise HarnessError(f"{path / 'generation_config.json'} cannot be read: {first_line(exc)}") from exc
    return special_tokens(found, vocab)


def _group(name: str) -> str:
    """The file a matrix belongs to: one for each decoder layer, one for all that is outside of them."""
    parts = name.split(".")
    number = next((p for p in parts if p.isdigit()), None)
    return OUTSIDE if number is None else f"layer-{int(number):05d}"
