"""Any transformers causal model on the meta device, taken over where it needs weights and where it attends.

No model code of our own: transformers builds the model from its configuration without weights. Small parameters
(norms, biases) are bound once, embeddings to mapped tables; every linear layer asks the `Weights` in charge for
its product, and every attention goes to the `Attention` of the batch in hand. A batch is packed: its tokens lie
one after the other in one row, without padding, and who owns which is the attention's to know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.masking_utils import AttentionMaskInterface
from transformers.pytorch_utils import Conv1D

from engines.offload.layout import Matrix
from harness.api import HarnessError, UnsupportedError

_SEAM = "offload"
#: Keywords that attention layers pass on and that change nothing in a packed batch.
_HARMLESS = frozenset({"position_ids", "cache_position", "is_causal", "dropout"})
#: Rotary scalings whose frequencies depend on the longest position of the pass, and so on the batch.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


class Weights(Protocol):
    """Where linear layers get their products from."""

    def product(self, matrix: str, x: torch.Tensor) -> torch.Tensor:
        """x[rows, columns] times the transpose of the named matrix: a new tensor [rows, outputs]."""
        ...


class Attention(Protocol):
    """What attends for the tokens of one packed batch."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
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


class SeamedModel:
    """A model without weights, and what it needs of them: learnt from a dry pass before anything is read.

    `matrices` are in the order of use; `tables` are embeddings [entries, width]; `small` is all the rest.
    Raises UnsupportedError, with the reason, for a model that the seams do not carry.
    """

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        _refuse_batch_dependent(config)
        if not AutoModelForCausalLM._model_mapping[type(config)]._supports_attention_backend:
            raise UnsupportedError(f"{config.model_type}: transformers lets nobody replace its attention")
        with init_empty_weights():
            self._module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=_SEAM).eval()
        self.dtype = dtype
        self.prefix = self._module.base_model_prefix
        self.aliases: Mapping[str, str] = self._module.all_tied_weights_keys
        self.eos, self.begin = _special_tokens(path, config)
        self.weights: Weights | None = None
        self._layers = int(config.get_text_config().num_hidden_layers)
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        found: dict[str, Matrix] = {}
        self.tables: dict[str, tuple[int, int]] = {}
        self.small: dict[str, tuple[int, ...]] = {}
        for path_, module in self._module.named_modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                name = f"{path_}.{leaf}" if path_ else leaf
                self._owners[name] = (module, leaf)
                if isinstance(module, nn.Linear | Conv1D) and leaf == "weight":
                    found[name] = self._take_over(module, name, tuple(parameter.shape))
                elif isinstance(module, nn.Embedding):
                    self.tables[name] = (parameter.shape[0], parameter.shape[1])
                else:
                    self.small[name] = tuple(parameter.shape)
        self.matrices = [found[name] for name in self._dry_pass(found)]
        self._refuse_large(found)

    def bind(self, tables: Mapping[str, torch.Tensor], small: Mapping[str, torch.Tensor]) -> None:
        """Puts real tensors behind embeddings and small parameters. Lookups are cast to the compute dtype."""
        for name, tensor in tables.items():
            self._put(name, tensor)
        for name, tensor in small.items():
            self._put(name, tensor.to(self.dtype))

    def __call__(self, batch: PackedBatch) -> torch.Tensor:
        """Logits [wanted rows, vocabulary] of one pass, in the compute dtype."""
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
            assert self.weights is not None
            out = self.weights.product(name, x.reshape(-1, columns))
            if module.bias is not None:
                out += module.bias
            return out.view(*x.shape[:-1], rows)

        module.forward = forward
        return Matrix(name, rows, columns, _group(name), transposed)

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        module, leaf = self._owners[name]
        if isinstance(module, nn.Embedding) and tensor.dtype != self.dtype:
            module.register_forward_hook(lambda _module, _args, rows: rows.to(self.dtype))
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)  # `.data =` refuses on meta

    # ------------------------------------------------------------------- the dry pass

    @torch.inference_mode()
    def _dry_pass(self, found: Mapping[str, Matrix]) -> list[str]:
        """Runs two tokens through zeros: which matrices are used in which order, and that every layer attends once."""
        dry = _Dry({matrix.name: matrix.rows for matrix in found.values()})
        for name, shape in self.tables.items():
            self._put(name, torch.zeros(1, dtype=self.dtype).expand(shape))
        for name, small in self.small.items():
            self._put(name, torch.zeros(1, dtype=self.dtype).expand(small))
        self.weights = dry
        two = torch.arange(2)
        try:
            self(PackedBatch(two, two, two[1:], dry))
        except UnsupportedError:
            raise
        except Exception as exc:  # whatever a model does that the seams do not know
            raise UnsupportedError(f"{self._module.config.model_type}: a packed pass fails ({exc})") from exc
        if sorted(dry.layers) != list(range(self._layers)):
            raise UnsupportedError(
                f"{self._module.config.model_type}: {len(dry.layers)} attention calls reached the seam, "
                f"{self._layers} layers should have made one each"
            )
        return dry.order

    def _refuse_large(self, found: Iterable[str]) -> None:
        """Only what belongs to linear layers and embeddings is streamed, so the rest must be small."""
        if unused := set(found) - {m.name for m in self.matrices}:
            raise UnsupportedError(f"{self._module.config.model_type}: {min(unused)} is not used in every pass")
        for name, shape in self.small.items():
            if len(shape) > 1 and torch.Size(shape).numel() > 1 << 20:
                raise UnsupportedError(
                    f"{self._module.config.model_type}: {name} {list(shape)} belongs to no linear layer or embedding"
                )


class _Dry:
    """Weights and attention of a pass that computes nothing: zeros of the right shapes, and notes."""

    def __init__(self, outputs: Mapping[str, int]) -> None:
        self._outputs = outputs
        self.order: list[str] = []
        self.layers: list[int] = []

    def product(self, matrix: str, x: torch.Tensor) -> torch.Tensor:
        self.order.append(matrix)
        return x.new_zeros(x.shape[0], self._outputs[matrix])

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        self.layers.append(layer)
        return query.new_zeros(query.shape[1], query.shape[0], value.shape[2])


def _attention_seam(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    offload_attention: Attention | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every attention layer: query [1, heads, tokens, dim], key and value alike."""
    unknown = sorted(k for k, v in others.items() if k not in _HARMLESS and v is not None and v is not False)
    if unknown or attention_mask is not None or offload_attention is None:
        what = ", ".join(unknown) or "an attention mask"
        raise UnsupportedError(f"{type(module).__name__} asks attention for {what}, which engine offload has not")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return offload_attention.attend(module.layer_idx, query[0], key[0], value[0], scale)[None], None


AttentionInterface.register(_SEAM, _attention_seam)
AttentionMaskInterface.register(_SEAM, lambda *args, **kwargs: None)


def _refuse_batch_dependent(config: Any) -> None:
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    nested = [v for v in parameters.values() if isinstance(v, Mapping)]
    for rope in [parameters, *nested]:
        if rope.get("rope_type") in _BATCH_DEPENDENT_ROPE:
            raise UnsupportedError(
                f"{config.model_type}: its {rope['rope_type']!r} rotary scaling depends on the batch's longest sequence"
            )


def _special_tokens(path: Path, config: Any) -> tuple[tuple[int, ...], int | None]:
    """Ids that end a sequence, and the one that begins an empty one, as `generate` and lm-eval find them."""
    try:
        found = GenerationConfig.from_pretrained(path, local_files_only=True)
    except OSError:  # it has none: the model's configuration says
        found = config.get_text_config()
    except ValueError as exc:
        raise HarnessError(f"{path / 'generation_config.json'} cannot be read: {exc}") from exc
    eos = () if found.eos_token_id is None else found.eos_token_id
    ends = (eos,) if isinstance(eos, int) else tuple(eos)
    return ends, found.bos_token_id if found.bos_token_id is not None else next(iter(ends), None)


def _group(name: str) -> str:
    """The file a matrix belongs to: one for each decoder layer, one for all that is outside of them."""
    parts = name.split(".")
    number = next((p for p in parts if p.isdigit()), None)
    return "outside" if number is None else f"layer-{int(number):05d}"
