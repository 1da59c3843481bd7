"""DeepSpeed ZeRO-Inference: ZeRO stage 3 fetches each parameter from RAM or disk when its module runs.

Configured after DeepSpeed's ZeRO-Inference example, for a memory budget (deepspeed 0.19.8):

- `HfDeepSpeedConfig` exists before `from_pretrained`, so that loading holds at most one shard in memory.
- Parameters on disk pass through `buffers` pinned buffers, each as large as the largest parameter (the embedding).
  DeepSpeed reads ahead as long as a buffer is free, so that more of them (its default is five) read further ahead and
  leave less of a small budget to the batch: two are the least that allow read-ahead, and a suite tries more.
- The prefetch bucket and the live parameter limit are two layers: DeepSpeed reads the next layer's parameters while one
  runs. Parameters of fewer than `hidden` values stay in memory.
- Without a device the accelerator is the CPU and the backend gloo; with a device they are CUDA and NCCL.
"""

import contextlib
import math
import os
import resource
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.integrations import HfDeepSpeedConfig

from engines.adapters import refusals
from engines.adapters.causal_lm import CausalLMEngine, PlacedModule, PlacementRequest, from_checkpoint
from engines.common.work_memory import SLACK_BYTES, require_memory
from harness.api import Capabilities, HarnessError, ModelShape, UnsupportedError, first_line
from harness.common.locks import waiting


class DeepSpeedZeroEngine(CausalLMEngine):
    """Honours policy.gpu_batch_size, policy.compute_dtype and policy.weight_bits (16, or on a device 4 in groups
    of group_size, in float16 and with parameters in RAM).

    `parameters` places them: `disk` (DeepSpeed's nvme), `host`, or `auto`: in RAM where they fit the host memory limit
    beside the working memory. `buffers` is the number of pinned buffers for parameters on disk; `io_threads` (its
    intra_op_parallelism), `queue_depth` and `block_size` (bytes) are those of its reads. DeepSpeed computes in the
    dtype that it stores: at load it writes parameters on disk in `compute_dtype`, into the job's scratch folder.
    """

    name = "deepspeed_zero"
    honours = ("gpu_batch_size", "compute_dtype", "weight_bits", "group_size")
    _engine: Any = None
    _config: Any = None

    def __init__(
        self, *, parameters: str = "auto", buffers: int = 2, io_threads: int = 1, queue_depth: int = 16,
        block_size: int = 1 << 20,
    ) -> None:  # fmt: skip
        if parameters not in ("auto", "disk", "host"):
            raise TypeError("parameters must be auto, disk or host")
        if buffers < 1:
            raise TypeError("buffers must be at least 1")
        self._parameters, self._buffers = parameters, buffers
        # asynchronous I/O, ahead of the computation: the keys that deepspeed 0.19.8 reads; it drops any other
        self._aio = {"block_size": block_size, "queue_depth": queue_depth, "intra_op_parallelism": io_threads,
                     "single_submit": False, "overlap_events": True}  # fmt: skip

    def capabilities(self) -> Capabilities:
        return Capabilities(device=True, packages=("torch", "transformers", "safetensors", "deepspeed"))

    def _place(self, request: PlacementRequest) -> PlacedModule:
        device, bits = request.device, request.policy.weight_bits
        refusals.deepspeed_zero(request.policy, request.limits, request.model)
        stored = request.weight_bytes * bits // 16
        on_disk, note = self._tier(request, stored)
        with _extension_builds(request.job.cache / "torch_extensions"):
            deepspeed = _single_process_deepspeed(device)
            if self._parameters != "host":  # even where unused, so that its memory counts as idle footprint
                _load_async_io(required=on_disk)
        self._require_aio_keys()
        config = self._settings(request, on_disk)
        self._config = HfDeepSpeedConfig(config)  # transformers looks it up, so it must live as long as the model
        module = from_checkpoint(request)
        if bits == 4:
            from deepspeed.inference.quantization.quantization import _init_group_wise_weight_quantization

            module = _init_group_wise_weight_quantization(module, config | _four_bit_config(request.policy.group_size))
        self._engine = deepspeed.initialize(model=module, config_params=config)[0]
        return PlacedModule(self._engine.module, (0, 0, stored) if on_disk else (0, stored, 0), (note,))

    def _tier(self, request: PlacementRequest, stored: int) -> tuple[bool, str]:
        """Whether parameters of `stored` bytes go to disk, and a note that says why.

        Raises InfeasibleError where the budget is too small; UnsupportedError where this user may not lock the pinned
        buffers, or where weights on disk would be quantized.
        """
        budget = request.limits.host_memory
        # with a device the cache and activations are there
        work = SLACK_BYTES + (sum(request.working_bytes) if request.device_budget is None else 0)
        if self._parameters == "host":
            require_memory(self.name, stored + work, budget, "parameters in RAM and its working memory")
        on_disk = self._parameters == "disk" or (
            self._parameters == "auto" and budget is not None and stored + work > budget
        )
        tier = "RAM"
        if on_disk:
            if request.policy.weight_bits != 16:
                raise UnsupportedError(
                    "DeepSpeed keeps quantized weights in memory: weight_bits 4 needs parameters: host"
                )
            buffers = self._buffers * _buffer_elements(request.model.shape) * request.dtype_bytes
            purpose = f"{self._buffers} buffers of its largest parameter in {request.dtype}"
            require_memory(self.name, buffers, budget, purpose)
            if buffers > _lockable_bytes():
                raise UnsupportedError(
                    f"DeepSpeed locks its buffers of {buffers / 2**20:.1f} MiB in memory, and this user may lock "
                    f"{_lockable_bytes() / 2**20:.1f} MiB: run under ulimit -l unlimited"
                )
            reads = ", ".join(f"{key} {value}" for key, value in self._aio.items())
            tier = f"disk, through {self._buffers} buffers of {buffers // self._buffers} bytes ({reads})"
        return on_disk, f"parameters in {tier}; weights {stored}, working memory {work} bytes, budget {budget}"

    def _settings(self, request: PlacementRequest, on_disk: bool) -> dict[str, Any]:
        """DeepSpeed's configuration."""
        shape = request.model.shape
        offload_param: dict[str, Any] = {"device": "cpu", "pin_memory": request.device == "cuda"}
        if on_disk:
            offload_param |= {
                "device": "nvme",
                "nvme_path": str(request.job.scratch),
                "buffer_count": self._buffers,
                "buffer_size": _buffer_elements(shape),
            }
        return {
            "fp16": {"enabled": request.dtype == "float16"},
            "bf16": {"enabled": request.dtype == "bfloat16"},
            "zero_optimization": {
                "stage": 3,
                "offload_param": offload_param,
                "stage3_prefetch_bucket_size": 2 * shape.params_per_layer,
                "stage3_max_live_parameters": 2 * shape.params_per_layer,
                "stage3_param_persistence_threshold": shape.hidden,
            },
            "aio": self._aio,
            "train_micro_batch_size_per_gpu": 1,
            "train_batch_size": 1,
            "wall_clock_breakdown": False,
        }

    def _require_aio_keys(self) -> None:
        """Raises HarnessError where the installed DeepSpeed would drop a setting of its reads without a word."""
        from deepspeed.runtime.swap_tensor.aio_config import get_aio_config

        if dropped := sorted(self._aio.keys() - get_aio_config({"aio": self._aio}).keys()):
            raise HarnessError(f"this DeepSpeed does not read aio.{dropped[0]}: it has another name in this version")

    def close(self) -> None:
        super().close()
        if self._engine is not None:
            self._engine.destroy()
        self._engine = self._config = None


@contextlib.contextmanager
def _extension_builds(folder: Path) -> Iterator[None]:
    """Lets one process at a time compile DeepSpeed's extensions into `folder`, which takes minutes on first use.

    Removes the lock files of killed builds, on which torch would wait for ever.
    """
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    with waiting(folder / ".building", "DeepSpeed's extensions to be compiled"):
        for stale in folder.glob("*/lock"):
            stale.unlink()
        yield


def _single_process_deepspeed(device: str) -> Any:
    """Imports deepspeed and initialises a process group of this process only."""
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    import deepspeed

    if not torch.distributed.is_initialized():
        deepspeed.init_distributed("nccl" if device == "cuda" else "gloo", verbose=False)
    return deepspeed


def _lockable_bytes() -> float:
    """Bytes that this process may lock in memory; unlimited for root."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return math.inf if soft == resource.RLIM_INFINITY or os.geteuid() == 0 else soft


def _load_async_io(required: bool) -> None:
    """Builds or loads DeepSpeed's asynchronous I/O extension. Raises only where it is `required`: UnsupportedError
    without a compiler or libaio, HarnessError where the build fails."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not required:
        with contextlib.suppress(Exception):
            AsyncIOBuilder().load(verbose=False)
        return
    if not shutil.which(os.environ.get("CXX", "c++")):
        raise UnsupportedError("DeepSpeed builds its disk I/O on first use and there is no C++ compiler: install g++")
    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise UnsupportedError("DeepSpeed's disk I/O needs libaio with its headers: install libaio-dev")
    try:
        AsyncIOBuilder().load(verbose=False)
    except Exception as exc:
        raise HarnessError(f"DeepSpeed's disk I/O cannot be built: {first_line(exc)}") from exc


def _buffer_elements(shape: ModelShape) -> int:
    """Elements of the largest parameter: a buffer holds whole parameters."""
    return max(shape.vocab * shape.hidden, shape.ffn * shape.hidden, shape.hidden * shape.hidden)


def _four_bit_config(group: int) -> dict[str, Any]:
    """ZeRO-Inference's configuration to quantize all linear layers after loading."""
    quantizer = {"num_bits": 4, "group_size": group, "group_dim": 1, "symmetric": False}
    return {"weight_quantization": {"post_init_quant": dict.fromkeys(("fc", "self_attn", "mlp"), quantizer)}}
