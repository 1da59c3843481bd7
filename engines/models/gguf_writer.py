"""Writes a checkpoint as a GGUF file for llama.cpp: one tensor at a time, with a stand-in vocabulary."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants

from engines.common.folders import build_once
from engines.common.requests import generation_settings, special_tokens
from engines.models.checkpoints import content_digest, evict
from engines.models.gguf_architectures import architecture
from engines.models.safetensors_file import RawTensor, read_shards, values
from harness.api import Job, LocalModel

FLOAT_TYPES = {"F32": GGMLQuantizationType.F32, "F16": GGMLQuantizationType.F16, "BF16": GGMLQuantizationType.BF16}
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
}
#: Of a mixture: GGUF stacks the experts' matrices, transformers too, the first two in one, and published checkpoints
#: have one of each for each expert.
_STACKS = {"mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "mlp.experts.down_proj": ("ffn_down_exps",)}
_EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(\w+)\.weight$")
_NAMES_OUTSIDE_LAYERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
#: Part of the folder's name: raise it when the same checkpoint is written differently.
_RECIPE = 2


def to_gguf(model: LocalModel, job: Job, kind: str) -> Path:
    """The checkpoint of a LLaMA, Qwen 2, OLMoE or Qwen 3 MoE model as a GGUF file with matrices of `kind`, one of
    FLOAT_TYPES, written once into `job.cache`. Rounds to the nearest value where that type is not the stored one.

    Drops the file from the page cache, where an earlier launch's pages would be free memory for this launch. Raises
    UnsupportedError for a model that this writer does not cover.
    """
    config = json.loads((Path(model.path) / "config.json").read_text())
    family, rope_base = architecture(model, config)
    folder = job.cache / "gguf" / f"{content_digest(model, job.cache, job.on_progress)}-{_RECIPE}-{kind}"
    width = 4 if kind == "F32" else 2

    def write(temporary: Path) -> None:
        writer = GGUFWriter(temporary / "model.gguf", family)
        _write_metadata(writer, model, config, rope_base)
        tied = config.get("tie_word_embeddings")
        stored = [tensor for shard in read_shards(Path(model.path)) for tensor in shard.tensors]
        tensors = _parts([tensor for tensor in stored if not (tied and tensor.name == "lm_head.weight")])
        for tensor in tensors:
            written = GGMLQuantizationType.F32 if tensor.in_float32 else FLOAT_TYPES[kind]
            size = int(np.prod(tensor.shape)) * (4 if tensor.in_float32 else width)
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, written)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(_gguf_values(tensor, model, family, kind))
        writer.close()

    build_once(folder, "the weights as a GGUF file", model.shape.params_total * width, write)
    evict(folder)
    return folder / "model.gguf"


def _experts(config: dict[str, Any]) -> int | None:
    """How many a layer has; transformers gives the number either name."""
    found = config.get("num_experts", config.get("num_local_experts"))
    return None if found is None else int(found)


def _write_metadata(writer: GGUFWriter, model: LocalModel, config: dict[str, Any], rope_base: float) -> None:
    """Adds the model's sizes and the stand-in vocabulary."""
    shape = model.shape
    writer.add_context_length(shape.max_context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.ffn)
    if (experts := _experts(config)) is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", shape.ffn))
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_freq_base(rope_base)
    writer.add_layer_norm_rms_eps(float(config.get("rms_norm_eps", 1e-6)))
    writer.add_vocab_size(shape.vocab)
    eos = special_tokens(generation_settings(model.path), shape.vocab)[0]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{i} " for i in range(shape.vocab)])
    writer.add_token_scores([0.0] * shape.vocab)
    writer.add_token_types([TokenType.CONTROL if i in eos else TokenType.NORMAL for i in range(shape.vocab)])
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    if eos:
        writer.add_eos_token_id(eos[0])


@dataclass(frozen=True)
class _Part:
    """A tensor of the GGUF file: a source; some `rows` of one that stacks matrices [experts, rows, columns]; or, where
    experts are `apart`, a stack of theirs."""

    name: str
    sources: Sequence[RawTensor]
    rows: slice | None = None
    apart: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.sources[0].shape
        if self.rows is not None:
            return (shape[0], self.rows.stop - self.rows.start, shape[2])
        return (len(self.sources), *shape) if self.apart else shape

    @property
    def in_float32(self) -> bool:
        """Whether llama.cpp expects it so: vectors, and what chooses the experts."""
        return len(self.shape) == 1 or "ffn_gate_inp" in self.name


def _parts(tensors: Sequence[RawTensor]) -> list[_Part]:
    """What tensors become, without those that GGUF does not hold."""
    parts: list[_Part] = []
    experts: dict[str, dict[int, RawTensor]] = {}
    for tensor in tensors:
        stem, _, suffix = tensor.name.rpartition(".")
        if stem in _NAMES_OUTSIDE_LAYERS:
            parts.append(_Part(f"{_NAMES_OUTSIDE_LAYERS[stem]}.{suffix}", [tensor]))
        if not tensor.name.startswith("model.layers."):
            continue
        layer, _, name = tensor.name.removeprefix("model.layers.").partition(".")
        if (module := name.rpartition(".")[0]) in _NAMES:
            parts.append(_Part(f"blk.{layer}.{_NAMES[module]}.{suffix}", [tensor]))
        elif (expert := _EXPERT.match(name)) and expert[2] in _EXPERTS:
            experts.setdefault(f"blk.{layer}.{_EXPERTS[expert[2]]}.weight", {})[int(expert[1])] = tensor
        stacks = _STACKS.get(name, ())
        for i, stack in enumerate(stacks):
            rows = tensor.shape[1] // len(stacks)
            parts.append(_Part(f"blk.{layer}.{stack}.weight", [tensor], slice(i * rows, (i + 1) * rows)))
    return parts + [_Part(name, [found[e] for e in sorted(found)], apart=True) for name, found in experts.items()]


def _gguf_values(part: _Part, model: LocalModel, family: str, kind: str) -> npt.NDArray[Any]:
    """A tensor's values as GGUF holds them: vectors and routers in float32, matrices in `kind`, and the rows of LLaMA's
    query and key projections with the two halves of each head interleaved: llama.cpp rotates neighbouring pairs."""
    tensor = part.sources[0]
    if part.rows is not None:
        return np.stack([_converted(expert[part.rows], tensor.dtype, kind) for expert in tensor.mapped()])
    if part.apart:
        return np.stack([_converted(source.bits(), source.dtype, kind) for source in part.sources])
    bits = tensor.bits()
    if part.in_float32:
        return values(bits, tensor.dtype).astype(np.float32)
    heads = {"q_proj": model.shape.num_heads, "k_proj": model.shape.num_kv_heads}
    module = tensor.name.rsplit(".", 2)[-2]
    if family == "llama" and module in heads:
        rows, columns = tensor.shape
        halves = bits.reshape(heads[module], 2, rows // heads[module] // 2, columns)
        bits = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))
    return _converted(bits, tensor.dtype, kind)


def _converted(bits: npt.NDArray[Any], dtype: str, kind: str) -> npt.NDArray[Any]:
    """Stored values in `kind`."""
    if dtype == kind:
        return bits
    return quants.quantize(values(bits, dtype).astype(np.float32), FLOAT_TYPES[kind])
