"""What engines with environments of their own cannot run, as far as a cell and its model's configuration tell.

The harness asks before it builds an environment, which takes minutes, or starts a process; `load` asks again. So this
module imports nothing of those environments. Each function raises UnsupportedError; without `model` it judges the
policy and the limits only.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from engines.common.work_memory import refuse_disk_limit
from engines.models.gguf_architectures import architecture
from harness.api import HardwareLimits, LocalModel, OffloadPolicy, UnsupportedError
from harness.common.regular_file import read_json

#: The policy fields of an engine that places its weights itself and quantizes nothing.
BATCH_AND_DTYPE = ("gpu_batch_size", "compute_dtype")
#: Values of a block of llama.cpp's quantized weights.
_LLAMA_CPP_BLOCK = 32
#: Architectures whose modules have the names that AirLLM looks for.
_AIRLLM = ("llama", "mistral", "mixtral", "qwen2", "qwen3")
_FLEXGEN = ("gpu_batch_size", "num_gpu_batches", "schedule", "weights", "cache", "activations", "weight_bits",
            "kv_bits", "cpu_attention", "value_sparsity", "overlap")  # fmt: skip


def airllm(policy: OffloadPolicy, limits: HardwareLimits, model: LocalModel | None) -> None:
    _require(policy, limits, "airllm", BATCH_AND_DTYPE)
    if model is not None and model.shape.family not in _AIRLLM:
        raise UnsupportedError(f"engine airllm runs {', '.join(_AIRLLM)}, not {model.shape.family}")
    if model is not None and "auto_map" in _config(model):
        raise UnsupportedError(
            "engine airllm would run the code that this model brings (auto_map in its config.json); use another"
        )


def openai_api(policy: OffloadPolicy, limits: HardwareLimits, model: LocalModel | None) -> None:
    policy.require_defaults_except("openai_api", "gpu_batch_size")
    refuse_disk_limit("openai_api", limits)


def deepspeed_zero(policy: OffloadPolicy, limits: HardwareLimits, model: LocalModel | None) -> None:
    _require(policy, limits, "deepspeed_zero", (*BATCH_AND_DTYPE, "weight_bits", "group_size"))
    if policy.weight_bits not in (16, 4):
        raise UnsupportedError(f"engine deepspeed_zero stores weights in 16 or 4 bits, not {policy.weight_bits}")
    if model is None:
        return
    dtype = policy.float_dtype("deepspeed_zero", model.dtype)
    if dtype == "float16" and not limits.gpu:
        raise UnsupportedError(
            "DeepSpeed computes in float16 only on a device: set compute_dtype to float32 or bfloat16"
        )
    if policy.weight_bits == 4 and dtype != "float16":
        raise UnsupportedError("DeepSpeed quantizes only float16 weights: weight_bits 4 needs compute_dtype float16")


def flexgen_ref(policy: OffloadPolicy, limits: HardwareLimits, model: LocalModel | None) -> None:
    policy.require_defaults_except("flexgen_ref", *_FLEXGEN)
    if policy.schedule == "sweep":
        raise UnsupportedError("FlexGen's block schedule is row (one batch) or zigzag (several batches), not sweep")
    if model is not None:
        _require_opt(model)
    refuse_disk_limit("flexgen_ref", limits)


def _require_opt(model: LocalModel) -> None:
    if model.shape.family != "opt":
        raise UnsupportedError(f"FlexGen implements OPT, not {model.shape.family}")
    config = _config(model)
    if config.get("word_embed_proj_dim", model.shape.hidden) != model.shape.hidden:
        raise UnsupportedError("FlexGen does not implement OPT with projected embeddings (opt-350m)")


def llama_cpp(policy: OffloadPolicy, limits: HardwareLimits, model: LocalModel | None) -> None:
    policy.require_defaults_except("llama_cpp", "gpu_batch_size", "kv_bits", "weight_bits", "group_size")
    if policy.kv_bits not in (16, 8):
        raise UnsupportedError(f"policy.kv_bits: engine llama_cpp stores 16 or 8 bits, not {policy.kv_bits}")
    refuse_disk_limit("llama_cpp", limits)
    if policy.weight_bits == 3 or (policy.weight_bits != 16 and policy.group_size != _LLAMA_CPP_BLOCK):
        raise UnsupportedError(
            f"engine llama_cpp quantizes weights to 8 or 4 bits in groups of {_LLAMA_CPP_BLOCK}: set weight_bits, "
            "group_size"
        )
    if model is not None:
        architecture(model, _config(model))


def ollm(policy: OffloadPolicy, limits: HardwareLimits, model: LocalModel | None) -> None:
    _require(policy, limits, "ollm", BATCH_AND_DTYPE)
    if model is not None and model.shape.family != "llama":
        raise UnsupportedError(f"engine ollm runs llama here, not {model.shape.family}")
    if model is not None:
        for what, dtype in (("stored", model.dtype), ("computed", policy.float_dtype("ollm", model.dtype))):
            if dtype != "bfloat16":
                raise UnsupportedError(f"engine ollm runs weights {what} in bfloat16 only, not {dtype}")
    if policy.gpu_batch_size != 1:
        raise UnsupportedError(
            "engine ollm runs one sequence at a time, because its feed-forward drops the batch dimension: set "
            "policy.gpu_batch_size to 1"
        )


def openvino(policy: OffloadPolicy, limits: HardwareLimits, model: LocalModel | None) -> None:
    _require(policy, limits, "openvino", (*BATCH_AND_DTYPE, "weight_bits", "kv_bits"))
    if policy.weight_bits not in (16, 8) or policy.kv_bits not in (16, 8):
        raise UnsupportedError("engine openvino stores weights, keys and values in 16 or 8 bits here")


def vllm(policy: OffloadPolicy, limits: HardwareLimits, model: LocalModel | None) -> None:
    policy.require_defaults_except("vllm", *BATCH_AND_DTYPE)
    if limits.threads is not None or limits.disk_bandwidth is not None:
        raise UnsupportedError("engine vllm does not support limits.threads or limits.disk_bandwidth")
    if not limits.gpu:
        raise UnsupportedError("vLLM offloads from a CUDA device: it needs limits.device_memory")


def vllm_cpu(policy: OffloadPolicy, limits: HardwareLimits, model: LocalModel | None) -> None:
    _require(policy, limits, "vllm_cpu", BATCH_AND_DTYPE)


def _require(policy: OffloadPolicy, limits: HardwareLimits, engine: str, honoured: Collection[str]) -> None:
    policy.require_defaults_except(engine, *honoured)
    refuse_disk_limit(engine, limits)


def _config(model: LocalModel) -> Mapping[str, Any]:
    config: Mapping[str, Any] = read_json(Path(model.path) / "config.json")
    return config
