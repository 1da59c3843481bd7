"""Which checkpoints can be written as GGUF files, and under which architecture; needs no package of GGUF's."""

from collections.abc import Mapping
from typing import Any

from harness.api import LocalModel, UnsupportedError

#: GGUF's name of an architecture by transformers'.
_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "olmoe": "olmoe", "qwen3_moe": "qwen3moe"}
#: Whether llama.cpp makes the shares of the chosen experts sum to one.
_NORMS_TOP_K = {"olmoe": False, "qwen3_moe": True}


def architecture(model: LocalModel, config: Mapping[str, Any]) -> tuple[str, float]:
    """GGUF's architecture name and the rotary base. Raises UnsupportedError."""
    family = model.shape.family
    if family not in _ARCHITECTURES:
        raise UnsupportedError(f"engine llama_cpp writes GGUF files of {', '.join(_ARCHITECTURES)}, not {family}")
    # what llama.cpp takes for granted of these mixtures
    refused = {
        "clip_qkv": config.get("clip_qkv") is not None,
        "norm_topk_prob": family in _NORMS_TOP_K and bool(config.get("norm_topk_prob")) != _NORMS_TOP_K[family],
        "mlp_only_layers": bool(config.get("mlp_only_layers")),
        "decoder_sparse_step": config.get("decoder_sparse_step", 1) != 1,
        "num_key_value_heads": family == "olmoe" and model.shape.num_kv_heads != model.shape.num_heads,
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise UnsupportedError(
                f"engine llama_cpp cannot write a {family} with {name} {config.get(name)} to a GGUF file"
            )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UnsupportedError(f"engine llama_cpp cannot write scaled rotary positions to a GGUF file ({rope})")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise UnsupportedError(f"engine llama_cpp cannot write the biases of a {family} to a GGUF file")
    return _ARCHITECTURES[family], float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
