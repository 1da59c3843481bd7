"""Writes a checkpoint as a GGUF file for llama.cpp: one tensor at a time, with a stand-in vocabulary."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants

from engines.common.folders import build_once
from engines.common.requests import generation_settings, special_tokens
from engines.models.checkpoints import content_digest, evict
from engines.models.safetensors_file import RawTensor, read_shards, values
from harness.api import Job, LocalModel, UnsupportedError

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
}
_NAMES_OUTSIDE_LAYERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
#: Part of the folder's name: raise it when the same checkpoint is written differently.
_RECIPE = 2


def to_gguf(model: LocalModel, job: Job, kind: str) -> Path:
    """The checkpoint of a LLaMA or Qwen 2 model as a GGUF file with matrices of `kind`, one of FLOAT_TYPES, written
    once into `job.cache`. Rounds to the nearest value where that type is not the stored one.

    Drops the file from the page cache, where an earlier launch's pages would be free memory for this launch. Raises
    UnsupportedError for a model that this writer does not cover.
    """
    config = json.loads((Path(model.path) / "config.json").read_text())
    family, rope_base = _architecture(model, config)
    folder = job.cache / "gguf" / f"{content_digest(model, job.cache, job.on_progress)}-{_RECIPE}-{kind}"
    width = 4 if kind == "F32" else 2

    def write(temporary: Path) -> None:
        writer = GGUFWriter(temporary / "model.gguf", family)
        _write_metadata(writer, model, config, rope_base)
        tensors = [t for shard in read_shards(Path(model.path)) for t in shard.tensors if _gguf_name(t.name)]
        if config.get("tie_word_embeddings"):
            tensors = [t for t in tensors if t.name != "lm_head.weight"]
        for tensor in tensors:
            vector = len(tensor.shape) == 1
            stored = GGMLQuantizationType.F32 if vector else FLOAT_TYPES[kind]
            size = int(np.prod(tensor.shape)) * (4 if vector else width)
            writer.add_tensor_info(_gguf_name(tensor.name), tensor.shape, np.dtype(np.float32), size, stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(_gguf_values(tensor, model, family, kind))
        writer.close()

    build_once(folder, "the weights as a GGUF file", model.shape.params_total * width, write)
    evict(folder)
    return folder / "model.gguf"


def _architecture(model: LocalModel, config: dict[str, Any]) -> tuple[str, float]:
    """GGUF's architecture name and the rotary base. Raises UnsupportedError."""
    family = model.shape.family
    if family not in ("llama", "qwen2"):
        raise UnsupportedError(f"engine llama_cpp writes GGUF files of llama and qwen2, not {family}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UnsupportedError(f"engine llama_cpp cannot write scaled rotary positions to a GGUF file ({rope})")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise UnsupportedError("engine llama_cpp cannot write the biases of a llama model to a GGUF file")
    return family, float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))


def _write_metadata(writer: GGUFWriter, model: LocalModel, config: dict[str, Any], rope_base: float) -> None:
    """Adds the model's sizes and the stand-in vocabulary."""
    shape = model.shape
    writer.add_context_length(shape.max_context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.ffn)
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


def _gguf_name(name: str) -> str:
    """GGUF's name of a tensor; empty for one that GGUF does not hold."""
    stem, _, suffix = name.rpartition(".")
    if stem in _NAMES_OUTSIDE_LAYERS:
        return f"{_NAMES_OUTSIDE_LAYERS[stem]}.{suffix}"
    if not stem.startswith("model.layers."):
        return ""
    layer, _, module = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_NAMES[module]}.{suffix}" if module in _NAMES else ""


def _gguf_values(tensor: RawTensor, model: LocalModel, family: str, kind: str) -> npt.NDArray[Any]:
    """A tensor's values as GGUF holds them: vectors in float32, matrices in `kind`, and the rows of LLaMA's query and
    key projections with the two halves of each head interleaved, since llama.cpp rotates neighbouring pairs."""
    bits = tensor.bits()
    if len(tensor.shape) == 1:
        return values(bits, tensor.dtype).astype(np.float32)
    heads = {"q_proj": model.shape.num_heads, "k_proj": model.shape.num_kv_heads}
    module = tensor.name.rsplit(".", 2)[-2]
    if family == "llama" and module in heads:
        rows, columns = tensor.shape
        halves = bits.reshape(heads[module], 2, rows // heads[module] // 2, columns)
        bits = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))
    if tensor.dtype == kind:
        return bits
    return quants.quantize(values(bits, tensor.dtype).astype(np.float32), FLOAT_TYPES[kind])
