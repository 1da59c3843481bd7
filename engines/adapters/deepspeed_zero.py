"""DeepSpeed ZeRO-Inference: ZeRO stage 3, each parameter fetched from RAM or disk when its module runs.

Configured after DeepSpeed's ZeRO-Inference example, for a budget of memory (deepspeed 0.19.8):

- `HfDeepSpeedConfig` exists before `from_pretrained`, so that no more than a shard is ever in memory at load.
- Parameters on disk pass through `buffers` pinned buffers, each as large as the largest parameter (the embedding): with
  the default of five a small budget holds nothing else. Two are the least that lets reads run ahead.
- The prefetch bucket and the limit of live parameters are two layers' worth: the next layer's parameters are read while
  one runs. What is smaller than `hidden` values stays in memory.
- Without a device the accelerator is the CPU and the backend gloo; with one they are CUDA and NCCL.
"""

from __future__ import annotations

import contextlib
import fcntl
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

from engines.adapters.causal_lm import CausalLMEngine, Placement, from_checkpoint
from engines.common.cuda_device import cuda
from engines.common.work_memory import SLACK_BYTES, working_bytes
from harness.api import (
    DTYPE_BYTES,
    Capabilities,
    Dtype,
    HardwareLimits,
    HarnessError,
    InfeasibleError,
    Job,
    LocalModel,
    ModelShape,
    OffloadPolicy,
    UnsupportedError,
)

#: Of the asynchronous reads: large blocks and a deep queue, read ahead of the computation.
_AIO = {"block_size": 1 << 20, "queue_depth": 16, "thread_count": 1, "single_submit": False, "overlap_events": True}


class DeepSpeedZeroEngine(CausalLMEngine):
    """Honours policy.gpu_batch_size, policy.compute_dtype and policy.weight_bits (16, or on a device 4 in groups
    of group_size, in float16 and with parameters in RAM).

    `parameters` says where they are: `disk` (DeepSpeed's nvme), `host` or, under a limit of host memory, `auto`: in RAM
    where they fit it beside the work. `buffers` is the number of pinned buffers for those on disk. DeepSpeed computes
    in the dtype it stores: parameters on disk are written in `compute_dtype` at load, into the job's scratch folder.
    """

    name = "deepspeed_zero"
    honours = ("gpu_batch_size", "compute_dtype", "weight_bits", "group_size")
    _engine: Any = None
    _config: Any = None

    def __init__(self, *, parameters: str = "auto", buffers: int = 2) -> None:
        if parameters not in ("auto", "disk", "host"):
            raise TypeError("parameters must be auto, disk or host")
        if buffers < 1:
            raise TypeError("buffers must be at least 1")
        self._parameters, self._buffers = parameters, buffers

    def capabilities(self) -> Capabilities:
        return Capabilities(device=True, packages=("torch", "transformers", "safetensors", "deepspeed"))

    def _place(
        self, model: LocalModel, dtype: Dtype, policy: OffloadPolicy, limits: HardwareLimits, job: Job
    ) -> Placement:
        device = "cpu" if cuda(limits) is None else "cuda"
        if policy.weight_bits not in (16, 4):
            raise UnsupportedError(f"engine {self.name} stores weights in 16 or 4 bits, not {policy.weight_bits}")
        if dtype == "float16" and device == "cpu":
            raise UnsupportedError("DeepSpeed computes in float16 only on a device: compute_dtype float32 or bfloat16")
        if policy.weight_bits == 4 and dtype != "float16":
            raise UnsupportedError(
                "DeepSpeed quantizes only what is in float16: weight_bits 4 needs compute_dtype float16"
            )
        on_disk, note = self._tier(model, dtype, policy, limits, job)
        with _builds(job.cache / "torch_extensions"):
            deepspeed = _alone(device)
            if self._parameters != "host":  # also where it is not used: what it takes belongs to the idle footprint
                _load_disk_reads(on_disk)
        config = self._settings(model, dtype, job.scratch, on_disk, device)
        self._config = HfDeepSpeedConfig(config)  # transformers looks for it, so it has to live as long as the model
        module = from_checkpoint(model, dtype)
        if policy.weight_bits == 4:
            from deepspeed.inference.quantization.quantization import _init_group_wise_weight_quantization

            module = _init_group_wise_weight_quantization(module, config | _in_four_bits(policy.group_size))
        self._engine = deepspeed.initialize(model=module, config_params=config)[0]
        total = model.shape.params_total * DTYPE_BYTES[dtype] * policy.weight_bits // 16
        return Placement(self._engine.module, (0, 0, total) if on_disk else (0, total, 0), (note,), device)

    def _tier(
        self, model: LocalModel, dtype: Dtype, policy: OffloadPolicy, limits: HardwareLimits, job: Job
    ) -> tuple[bool, str]:
        """Whether parameters go to disk, and why. Raises InfeasibleError where not even the buffers fit."""
        budget = limits.host_memory
        width = DTYPE_BYTES[dtype]
        weights = model.shape.params_total * width * policy.weight_bits // 16
        work = sum(working_bytes(model.shape, policy.gpu_batch_size, job.max_sequence, width)) + SLACK_BYTES
        buffers = self._buffers * _buffer_elements(model.shape) * width
        fits = budget is None or weights + work <= budget
        if self._parameters == "host" and not fits:
            raise InfeasibleError(
                f"{self.name} needs {(weights + work) / 2**20:.1f} MiB for parameters in RAM and to work; the budget "
                f"is {(budget or 0) / 2**20:.1f} MiB"
            )
        on_disk = not fits if self._parameters == "auto" else self._parameters == "disk"
        if on_disk and policy.weight_bits != 16:
            raise UnsupportedError("DeepSpeed keeps quantized weights in memory: weight_bits 4 needs parameters: host")
        if on_disk and budget is not None and buffers > budget:
            raise InfeasibleError(
                f"{self.name} needs {buffers / 2**20:.1f} MiB for {self._buffers} buffers of its largest parameter in "
                f"{dtype}; the budget is {budget / 2**20:.1f} MiB"
            )
        if on_disk and buffers > _lockable():
            raise UnsupportedError(
                f"DeepSpeed locks its buffers in memory, {buffers / 2**20:.1f} MiB, and this user may lock "
                f"{_lockable() / 2**20:.1f} MiB: run it under ulimit -l unlimited"
            )
        where = f"disk, through {self._buffers} buffers of {buffers // self._buffers} bytes" if on_disk else "RAM"
        return on_disk, f"parameters in {where}; weights {weights}, work {work} bytes, budget {budget}"

    def _settings(self, model: LocalModel, dtype: Dtype, scratch: Path, on_disk: bool, device: str) -> dict[str, Any]:
        """DeepSpeed's configuration."""
        hidden = model.shape.hidden
        layer = model.shape.params_per_layer
        place: dict[str, Any] = {"device": "cpu", "pin_memory": device == "cuda"}
        if on_disk:
            place |= {
                "device": "nvme",
                "nvme_path": str(scratch),
                "buffer_count": self._buffers,
                "buffer_size": _buffer_elements(model.shape),
            }
        return {
            "fp16": {"enabled": dtype == "float16"},
            "bf16": {"enabled": dtype == "bfloat16"},
            "zero_optimization": {
                "stage": 3,
                "offload_param": place,
                "stage3_prefetch_bucket_size": 2 * layer,
                "stage3_max_live_parameters": 2 * layer,
                "stage3_param_persistence_threshold": hidden,
            },
            "aio": _AIO,
            "train_micro_batch_size_per_gpu": 1,
            "train_batch_size": 1,
            "wall_clock_breakdown": False,
        }

    def close(self) -> None:
        super().close()
        if self._engine is not None:
            self._engine.destroy()
        self._engine = self._config = None


@contextlib.contextmanager
def _builds(folder: Path) -> Iterator[None]:
    """For DeepSpeed's compiling on first use, which takes minutes: into `folder`, by one process at a time. What a
    killed one left locked would be waited for without end."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    with (folder / ".building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for stale in folder.glob("*/lock"):
            stale.unlink()
        yield


def _alone(device: str) -> Any:
    """The module deepspeed, with a process group of this one process."""
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(alone)
    import deepspeed

    if not torch.distributed.is_initialized():
        deepspeed.init_distributed("nccl" if device == "cuda" else "gloo", verbose=False)
    return deepspeed


def _lockable() -> float:
    """Bytes that this process may lock in memory; root any number."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return math.inf if soft == resource.RLIM_INFINITY or os.geteuid() == 0 else soft


def _load_disk_reads(needed: bool) -> None:
    """Builds or loads DeepSpeed's asynchronous I/O, if it can be. Raises UnsupportedError where it is `needed` and
    cannot."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not needed:
        with contextlib.suppress(Exception):
            AsyncIOBuilder().load(verbose=False)
        return
    if not shutil.which(os.environ.get("CXX", "c++")):
        raise UnsupportedError("DeepSpeed builds its disk I/O on first use and finds no C++ compiler here: install g++")
    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise UnsupportedError("DeepSpeed's disk I/O needs libaio with its headers: install libaio-dev")
    try:
        AsyncIOBuilder().load(verbose=False)
    except Exception as exc:
        raise HarnessError(f"DeepSpeed's disk I/O cannot be built: {str(exc).splitlines()[0]}") from exc


def _buffer_elements(shape: ModelShape) -> int:
    """Of the largest parameter: a buffer takes whole ones."""
    return max(shape.vocab * shape.hidden, shape.ffn * shape.hidden, shape.hidden * shape.hidden)


def _in_four_bits(group: int) -> dict[str, Any]:
    """ZeRO-Inference's quantization of all linear layers after they are loaded."""
    how = {"num_bits": 4, "group_size": group, "group_dim": 1, "symmetric": False}
    return {"weight_quantization": {"post_init_quant": {"fc": how, "self_attn": how, "mlp": how}}}
