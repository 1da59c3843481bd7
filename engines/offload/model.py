"""Any transformers causal model on the meta device, taken over where it needs weights and where it attends.

No model code of our own: transformers builds the model from its configuration without weights. Small parameters
(norms, biases) are bound once, embeddings to mapped tables; every linear layer asks the `Weights` in charge for
its product, and every attention goes to the `Attention` of the batch in hand. A batch is packed: its tokens lie
one after the other in one row, without padding, and who owns which is the attention's to know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
from transformers.pytorch_utils import Conv1D

from engines.offload.layout import Matrix
from engines.offload.rule import Rule
from harness.api import HarnessError, ModelShape, UnsupportedError

_SEAM, _DRY_SEAM = "offload", "offload-dry"
#: Keywords that attention layers pass on and that change nothing in a packed batch.
_HARMLESS = frozenset({"position_ids", "cache_position", "dropout"})
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


class Attention(Protocol):
    """What attends for the tokens of one packed batch."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule
    ) -> torch.Tensor:
        """Query [heads, tokens, head_dim], key and value [kv_heads, tokens, head_dim]; returns [tokens, heads, dim]."""
        ...


@dataclass(frozen=True)
class PackedBatch:
    """Tokens of several sequences in one row: ids and positions [tokens], and the rows whose logits are wanted."""

    ids: torch.Tensor
    positions: torch.Tensor
    wanted: torch.Tensor
    attention: Attention


#: The batch in hand; each batch runs in a greenlet, and so in a context, of its own.
_batch: ContextVar[PackedBatch] = ContextVar("batch")


class SeamedModel:
    """A model without weights, and what it needs of them: learnt from a dry pass before anything is read.

    `matrices` are in the order of use; `tables` are embeddings [entries, width]; `small` is all the rest.
    `keeps_scores`: some layer's rule is more than torch's fused attention can follow, so that scores are held.
    Raises UnsupportedError, with the reason, for a model that the seams do not carry or that is not of `shape`.
    """

    def __init__(self, path: Path, shape: ModelShape, dtype: torch.dtype) -> None:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        _refuse_batch_dependent(config)
        if not AutoModelForCausalLM._model_mapping[type(config)]._supports_attention_backend:
            raise UnsupportedError(f"{config.model_type}: transformers lets nobody replace its attention")
        with init_empty_weights():
            self._module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=_DRY_SEAM).eval()
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
        if any(m.expert is not None for m in found.values()):
            self._module.set_experts_implementation(_SEAM)
        dry = self._dry_pass(found)
        self.matrices = [found[name] for name in dry.order]
        self._after_attention = frozenset(dry.order[dry.attended :])
        self.keeps_scores = dry.keeps_scores
        self._refuse_what_is_not_streamed()
        self._module.set_attn_implementation(_SEAM)

    def bind(self, tables: Mapping[str, torch.Tensor], small: Mapping[str, torch.Tensor]) -> None:
        """Puts real tensors behind embeddings and small parameters."""
        for name, tensor in tables.items():
            self._put(name, _Table.of(tensor, self.dtype))
        for name, tensor in small.items():
            self._put(name, tensor.to(self.dtype))

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
        hit = sorted(e for e in set(index.flatten().tolist()) if e < count)
        out = torch.zeros_like(x)
        for e in self.weights.visit((f"{path}.{first}", f"{path}.{second}"), hit, count):
            row, place = torch.where(index == e)
            inner = self._product(f"{path}.{first}[{e}]", x[row], _of(module, f"{first}_bias", e))
            inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
            outer = self._product(f"{path}.{second}[{e}]", inner, _of(module, f"{second}_bias", e))
            out.index_add_(0, row, outer * share[row, place, None])
        return out

    def _product(self, name: str, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x times the transpose of a matrix. After the last attention a row serves its own logits only, so those
        that nobody wants are not computed: of a prompt all but the last."""
        assert self.weights is not None
        wanted, tokens = _batch.get().wanted, len(_batch.get().ids)
        if name not in self._after_attention or len(wanted) == tokens or len(x) != tokens:
            return self.weights.product(name, x, bias)
        rows = self.weights.product(name, x[wanted], bias)
        return rows.new_zeros(tokens, rows.shape[1]).index_copy_(0, wanted, rows)

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        module, leaf = self._owners[name]
        # `.data =` refuses on meta; a Parameter would lose what makes a table one
        bound: Any = tensor if isinstance(tensor, _Table) else nn.Parameter(tensor, requires_grad=False)
        module._parameters[leaf] = bound

    # ------------------------------------------------------------------- the dry pass

    @torch.inference_mode()
    def _dry_pass(self, found: Mapping[str, Matrix]) -> _Dry:
        """Runs two tokens through zeros: which matrices are used in which order, and that every layer attends once."""
        dry = _Dry({matrix.name: matrix.rows for matrix in found.values()})
        for name, shape in self.tables.items():
            self._put(name, torch.zeros(1, dtype=self.dtype).expand(shape))
        for name, small in self.small.items():
            self._put(name, torch.zeros(1, dtype=self.dtype).expand(small))
        self.weights = dry
        two = torch.arange(2)
        try:
            logits = self(PackedBatch(two, two, two[1:], dry))
        except UnsupportedError as exc:
            raise UnsupportedError(f"{self._module.config.model_type}: {exc}") from exc
        except Exception as exc:  # whatever a model does that the seams do not know
            raise UnsupportedError(f"{self._module.config.model_type}: a packed pass fails ({exc})") from exc
        if problem := dry.problem(self._shape) or _logits_problem(logits, self._shape):
            raise UnsupportedError(f"{self._module.config.model_type}: {problem}")
        return dry

    def _refuse_what_is_not_streamed(self) -> None:
        """Only what belongs to linear layers and embeddings is streamed, so the rest must be small parameters."""
        kind = self._module.config.model_type
        for name, shape in self.small.items():
            if len(shape) > 1 and torch.Size(shape).numel() > 1 << 22:
                raise UnsupportedError(f"{kind}: {name} {list(shape)} belongs to no plain linear layer or embedding")
        if others := set(self._module.state_dict()) - set(self._owners):
            raise UnsupportedError(f"{kind}: its checkpoint holds {min(others)}, which is no parameter")


def _of(module: Any, name: str, expert: int) -> torch.Tensor | None:
    """An expert's bias, where experts have one."""
    stack = getattr(module, name, None)
    return None if stack is None else stack[expert]


class _Table(torch.Tensor):
    """An embedding in its stored dtype that gives its rows, and itself out, as of the compute dtype.

    So whatever a model does with what it looked up, such as scaling it, is done in the compute dtype.
    """

    _as: torch.dtype

    @staticmethod
    def of(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`stored` itself where it has that dtype."""
        if stored.dtype == dtype:
            return stored
        table = stored.as_subclass(_Table)
        table._as = dtype
        return table

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.embedding:
            table = args[1]
            rows = nn.functional.embedding(args[0], table.as_subclass(torch.Tensor), *args[2:], **(kwargs or {}))
            return rows.to(table._as)
        if func == torch.Tensor.dtype.__get__:  # type: ignore[attr-defined]
            return args[0]._as
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class _Dry:
    """Weights and attention of a pass that computes nothing: zeros of the right shapes, and notes."""

    def __init__(self, outputs: Mapping[str, int]) -> None:
        self._outputs = outputs
        self.order: list[str] = []
        self.attended = 0  # matrices used before the last attention
        self.keeps_scores = False
        self._layers: list[int] = []
        self._shapes: set[tuple[int, ...]] = set()

    def problem(self, shape: ModelShape) -> str:
        """What the pass did that the engine does not expect; empty if nothing."""
        if unused := set(self._outputs) - set(self.order):
            return f"{min(unused)} is not used in every pass"
        if len(self.order) != len(self._outputs):
            return "a matrix is used twice in a pass"
        if sorted(self._layers) != list(range(shape.num_layers)):
            return (
                f"{len(self._layers)} attention calls reached the seam, {shape.num_layers} layers should make one each"
            )
        expected = (
            shape.num_heads,
            shape.head_dim,
            shape.num_kv_heads,
            shape.head_dim,
            shape.num_kv_heads,
            shape.head_dim,
        )
        if self._shapes != {expected}:
            return f"its heads (query, key, value: number and width) are {sorted(self._shapes)}, not {expected}"
        return ""

    def product(self, matrix: str, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self.order.append(matrix)
        return x.new_zeros(x.shape[0], self._outputs[matrix])

    def visit(self, stacks: Sequence[str], hit: Sequence[int], count: int) -> Sequence[int]:
        return range(count)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule
    ) -> torch.Tensor:
        self._layers.append(layer)
        self.keeps_scores |= rule.softcap is not None or rule.sinks is not None
        self.attended = len(self.order)
        self._shapes.add(tuple(n for t in (query, key, value) for n in (t.shape[0], t.shape[2])))
        return query.new_zeros(query.shape[1], query.shape[0], value.shape[2])


@dataclass(frozen=True)
class _Mask:
    """What a model asks for as a mask in the dry pass: who sees whom, to be held against what attention is told."""

    sees: Callable[..., torch.Tensor]

    def is_window(self, window: int | None) -> bool:
        """Whether it is causal and lets a token see `window` tokens, or all where that is None."""
        width = 1 << 20 if window is None else window
        positions = {q for q in (0, 1, width - 1, width, width + 1, 3 * width) if q >= 0}
        pairs = [(q, k) for q in positions for k in (0, q - width, q - width + 1, q - 1, q, q + 1) if k >= 0]
        zero = torch.tensor(0)
        return all(
            bool(self.sees(zero, zero, torch.tensor(q), torch.tensor(k)))
            == (k <= q and (window is None or k > q - window))
            for q, k in pairs
        )


def _attention_seam(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: _Mask | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    offload_attention: Attention | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every attention layer: query [1, heads, tokens, dim], key and value alike."""
    kind = type(module).__name__
    unknown = sorted(k for k, v in others.items() if k not in _HARMLESS and v is not None and not isinstance(v, bool))
    if not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        raise UnsupportedError(f"{kind} looks ahead; engine offload attends causally")
    if unknown or offload_attention is None:
        raise UnsupportedError(f"{kind} asks attention for {', '.join(unknown)}, which engine offload has not")
    if attention_mask is not None and not attention_mask.is_window(sliding_window):
        raise UnsupportedError(f"{kind} asks for a mask that is neither causal nor the window it names")
    sinks = None if s_aux is None else s_aux.reshape(-1).float()
    rule = Rule(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, sinks)
    return offload_attention.attend(module.layer_idx, query[0], key[0], value[0], rule)[None], None


def _experts_seam(
    module: Any, hidden: torch.Tensor, index: torch.Tensor, share: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """What transformers calls for a mixture of experts."""
    return torch.as_tensor(module.offload_experts(hidden, index, share))


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Attention knows by itself who sees whom."""


def _mask_to_check(*args: Any, mask_function: Any = causal_mask_function, **kwargs: Any) -> _Mask:
    """For the dry pass."""
    return _Mask(mask_function)


ALL_EXPERTS_FUNCTIONS.register(_SEAM, _experts_seam)
for _name, _mask in ((_SEAM, _no_mask), (_DRY_SEAM, _mask_to_check)):
    AttentionInterface.register(_name, _attention_seam)
    AttentionMaskInterface.register(_name, _mask)


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
    """Ids that end a sequence, and the one that begins an empty one, as `generate` and lm-eval find them.

    Those outside the vocabulary, which some configurations inherit, can never be generated and are left out.
    """
    try:
        found = GenerationConfig.from_pretrained(path, local_files_only=True)
    except OSError:  # it has none: the model's configuration says
        found = config.get_text_config()
    except ValueError as exc:
        raise HarnessError(f"{path / 'generation_config.json'} cannot be read: {exc}") from exc
    eos = () if found.eos_token_id is None else found.eos_token_id
    ends = tuple(e for e in ((eos,) if isinstance(eos, int) else eos) if e < vocab)
    begin = found.bos_token_id
    return ends, begin if begin is not None and begin < vocab else next(iter(ends), None)


def _group(name: str) -> str:
    """The file a matrix belongs to: one for each decoder layer, one for all that is outside of them."""
    parts = name.split(".")
    number = next((p for p in parts if p.isdigit()), None)
    return "outside" if number is None else f"layer-{int(number):05d}"
