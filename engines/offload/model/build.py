"""Builds transformers' module of a configuration on the meta device, or says why the engine cannot run it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from engines.common.meta_device import NothingDrawn
from engines.common.requests import special_tokens
from engines.offload.kernels import AttentionSpec
from engines.offload.memory.tensor_shard import TensorShard
from engines.offload.model.dry_hooks import DRY_RUN
from engines.offload.model.stage import Stage
from engines.offload.weights.gemm import padded_output
from engines.offload.weights.host_experts import Mixture, RoutedRows
from harness.api import HarnessError, ModelShape, UnsupportedError, first_line

#: Rotary scalings whose frequencies depend on the longest position of the pass, and so on the batch.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
#: Parameters of more values than this must belong to a linear layer, a mixture or an embedding.
_LARGEST_SMALL = 1 << 22


class _EmptyOnMeta(NothingDrawn):
    """Weights take no memory, not even for the moment before `init_empty_weights` frees it: a stack of experts can be
    larger than RAM. Buffers, which are computed, are real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return super().__torch_function__(func, types, args, kwargs)


def load_config(path: Path) -> Any:
    """The configuration in a model's folder. Raises UnsupportedError for one whose results depend on the batch, or
    whose attention transformers does not let be replaced."""
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    for rope in [parameters, *(v for v in parameters.values() if isinstance(v, Mapping))]:
        if rope.get("rope_type") in _BATCH_DEPENDENT_ROPE:
            raise UnsupportedError(
                f"{config.model_type}: its {rope['rope_type']!r} rotary scaling depends on the batch's longest sequence"
            )
    if not AutoModelForCausalLM._model_mapping[type(config)]._supports_attention_backend:
        raise UnsupportedError(f"{config.model_type}: transformers does not allow its attention to be replaced")
    return config


def build_on_meta(config: Any, dtype: torch.dtype) -> Any:
    """The module without weights, its attention set to the dry run's hook. Raises UnsupportedError where transformers
    cannot build it."""
    try:
        with init_empty_weights(), _EmptyOnMeta():
            return AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=DRY_RUN, trust_remote_code=False
            ).eval()
    except Exception as exc:  # some check their sizes, some need packages that are not installed
        raise UnsupportedError(f"{config.model_type}: transformers cannot build it: {first_line(exc)}") from exc


def require_small(kind: str, module: Any, small: Mapping[str, tuple[int, ...]]) -> None:
    """Only weights of linear layers and embeddings are streamed: raises UnsupportedError where other parameters are
    large, or buffers have no values."""
    if meta := [name for name, buffer in module.named_buffers() if buffer.is_meta]:
        raise UnsupportedError(f"{kind}: {min(meta)} is left without values")
    for name, shape in small.items():
        if len(shape) > 1 and torch.Size(shape).numel() > _LARGEST_SMALL:
            raise UnsupportedError(f"{kind}: {name} {list(shape)} belongs to no plain linear layer or embedding")


def stop_and_begin_tokens(path: Path, config: Any, vocab: int) -> tuple[tuple[int, ...], int | None]:
    """See engines.common.requests.special_tokens: read where `generate` reads them."""
    try:
        source = GenerationConfig.from_pretrained(path, local_files_only=True)
    except OSError:  # there is none: the model's configuration tells
        source = config.get_text_config()
    except ValueError as exc:
        raise HarnessError(f"{path / 'generation_config.json'} cannot be read: {first_line(exc)}") from exc
    return special_tokens(source, vocab)


class DryPass:
    """Serves a model zeros of the right shapes as products and attention, and notes what it asks for.

    `joins`: matrices in order of use, those together that follow each other in one of `groups` (by matrix) and multiply
    the same input. It is the same as long as the model hands over the same tensor and has not written to it; so the
    pass must not run in inference mode, where writes are not counted.
    """

    def __init__(self, outputs: Mapping[str, int], groups: Mapping[str, str]) -> None:
        self._outputs = outputs
        self._groups = groups
        self._last: tuple[torch.Tensor, int, str] | None = None  # the last product's input, its writes, its group
        self.joins: list[tuple[str, ...]] = []
        self.attends: list[int] = []  # of each attention, how many joins came before it
        self.has_windows = False
        self._layers: list[int] = []
        self._shapes: set[tuple[int, ...]] = set()

    def problem(
        self, shape: ModelShape, logits: torch.Tensor, stage: Stage | None = None, shard: TensorShard | None = None
    ) -> str:
        """Why the engine cannot serve a model, or a stage of it, or a part of its matrices, that did this and returned
        `logits` for one row, or hidden states for two; empty if it can."""
        if unused := set(self._outputs).difference(*self.joins):
            return f"{min(unused)} is not used in every pass"
        if sum(map(len, self.joins)) != len(self._outputs):
            return "a matrix is used twice in a pass"
        layers = range(shape.num_layers) if stage is None else range(stage.first, stage.last)
        if sorted(self._layers) != list(layers):
            return f"{len(self._layers)} attention calls reached the hook, {len(layers)} layers should make one each"
        own = shape if shard is None else shard.shape(shape)
        kv = (own.num_kv_heads, own.head_dim)
        expected = (own.num_heads, own.head_dim, *kv, *kv)
        if self._shapes != {expected}:
            return f"its heads (query, key, value: number and width) are {sorted(self._shapes)}, not {expected}"
        expected_logits = (1, shape.vocab) if stage is None or stage.is_last else (2, shape.hidden)
        if tuple(logits.shape) != expected_logits:
            return f"one row gave logits {list(logits.shape)} instead of {list(expected_logits)}"
        return ""

    def gemm(
        self, matrices: Sequence[str], x: torch.Tensor, biases: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        [matrix], last = matrices, self._last
        self._last = x, x._version, self._groups[matrix]
        if last is not None and last[0] is x and last[1:] == self._last[1:]:
            self.joins[-1] = (*self.joins[-1], matrix)
        else:
            self.joins.append((matrix,))
        return [padded_output(x.numel() // x.shape[-1], self._outputs[matrix], x).zero_()]

    def route_experts(self, mixture: Mixture, routed: RoutedRows) -> tuple[Sequence[int], None]:
        return range(len(routed.counts)), None

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def gather(self, part: torch.Tensor, outputs: int) -> torch.Tensor:
        return part.new_zeros(len(part), outputs)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        self._last = None
        if spec.sinks is not None and len(spec.sinks) != len(query):
            raise UnsupportedError(f"attention has {len(query)} heads and {len(spec.sinks)} sinks")
        self._layers.append(layer)
        self.has_windows |= spec.window is not None
        self.attends.append(len(self.joins))
        self._shapes.add(tuple(n for t in (query, key, value) for n in (t.shape[0], t.shape[2])))
        return query.new_zeros(query.shape[1], query.shape[0], value.shape[2])
