"""FlexGen, the published package (`flexgen` 0.1.8), with its own policy and block schedule. OPT only.

We drive its model class as its `run_flexgen` does, but with the checkpoint's weights, written once as the float16 files
that FlexGen reads, and with the job's prompts: one block of gpu_batch_size x num_gpu_batches prompts of equal length at
a time. Copies of the last prompt fill an incomplete block and count as padding.

FlexGen does not start without CUDA. There a shim replaces its "gpu" by a second CPU device and leaves its files
unchanged: its fast tier is RAM, its slow tier the disk, and its copy threads and schedule work as with CUDA. The record
notes the shim. Known limits without CUDA: activations stay in RAM (FlexGen hangs with them on disk), and float16
products are slow on CPUs without float16 arithmetic.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engines.adapters import refusals
from engines.common.cuda_device import device_budget
from engines.common.folders import build_once
from engines.common.requests import batches, generation_settings, next_batch, special_tokens
from engines.common.sampling import finish_reason
from engines.common.work_memory import SLACK_BYTES, require_memory, working_bytes
from engines.models.checkpoints import content_digest, evict
from engines.models.safetensors_file import read_shards, values
from harness import api

_Shares = tuple[float, float, float]  # of device, host, disk

_NAME = "weights"  # FlexGen reads its weights from the folder `<name>-np`
_FLOAT16_BYTES = 2
#: Pinned memory of FlexGen's disk with a device: four copy threads, each with 2^30 values (pytorch_backend.TorchDisk).
_COPY_BYTES = 4 * _FLOAT16_BYTES << 30
_GROUP = 64  # FlexGen's group size: along the outputs for weights, along the head for the KV cache


class FlexGenEngine(api.Engine):
    """Takes no options. Honours placements, 4 bits, overlap, CPU attention and value sparsity.

    Where the policy leaves `weights` out, the device and then the host get as many weights as fit beside the KV cache,
    the disk the rest. Raises UnsupportedError for per-request sampling, stop strings and scores.
    """

    name = "flexgen_ref"
    _lm: Any = None
    _env: Any = None

    def capabilities(self) -> api.Capabilities:
        return api.Capabilities(device=True, packages=("torch", "transformers", "flexgen", "numpy"))

    def load(
        self, model: api.LocalModel, policy: api.OffloadPolicy, limits: api.HardwareLimits, job: api.Job
    ) -> api.LoadReport:
        refusals.flexgen_ref(policy, limits, model)
        if limits.threads is not None:
            torch.set_num_threads(limits.threads)
        device = device_budget(limits)
        on_device = device is not None
        shares = _placement(model.shape, policy, limits, job, device)
        if not on_device:
            _replace_cuda()
        from flexgen import compression, flex_opt, opt_config, pytorch_backend

        shape = model.shape
        config = opt_config.OptConfig(
            name=_NAME,
            num_hidden_layers=shape.num_layers,
            max_seq_len=shape.max_context,
            hidden_size=shape.hidden,
            n_head=shape.num_heads,
            input_dim=shape.hidden,
            ffn_embed_dim=shape.ffn,
            vocab_size=shape.vocab,
            pad_token_id=-1,  # no prompt is padded, so no prompt token may count as padding
        )
        fast = pytorch_backend.TorchDevice("cuda:0" if on_device else "cpu")
        host = pytorch_backend.TorchDevice("cpu")
        disk = pytorch_backend.TorchDisk(str(job.scratch / "flexgen"))
        mixed = pytorch_backend.TorchMixedDevice([fast, host, disk])
        self._env = flex_opt.ExecutionEnv(gpu=fast, cpu=host, disk=disk, mixed=mixed)
        # FlexGen's --percent: gpu and cpu of each. Without CUDA its gpu is our host, and its cpu stays empty
        tiers = (0, 1) if on_device else (1, 0)
        percents = [100 * triple[tier] for triple in shares for tier in tiers]
        flexgen_policy = flex_opt.Policy(
            policy.gpu_batch_size,
            policy.num_gpu_batches,
            *percents,
            overlap=policy.overlap,
            sep_layer=True,
            pin_weight=on_device,
            cpu_cache_compute=policy.cpu_attention,
            attn_sparsity=policy.value_sparsity,
            compress_weight=policy.weight_bits == 4,
            comp_weight_config=compression.CompressionConfig(4, _GROUP, group_dim=0, symmetric=False),
            compress_cache=policy.kv_bits == 4,
            comp_cache_config=compression.CompressionConfig(4, _GROUP, group_dim=2, symmetric=False),
        )
        self._lm = flex_opt.OptLM(config, self._env, str(_weight_files(model, job)), flexgen_policy)
        evict(job.scratch)  # FlexGen has copied its disk tier there
        self._timers = flex_opt.timers
        self._model, self._block_size = model, policy.block_size
        weights, cache, activations = shares
        shim = () if on_device else ("no CUDA: a shim outside FlexGen's code makes its gpu a second CPU device",)
        return api.LoadReport(
            vocab=shape.vocab,
            max_context=shape.max_context,
            block_size=self._block_size,
            policy=replace(policy, weights=weights, cache=cache, activations=activations, compute_dtype="float16"),
            compute_dtype="float16",
            weights_by_tier=_weights_by_tier(shape, weights, policy.weight_bits),
            notes=(*shim, f"--percent {' '.join(f'{percent:g}' for percent in percents)}"),
        )

    def generate(self, requests: Sequence[api.GenerationRequest]) -> Iterator[api.GenerationResult]:
        """Checks all requests before any work, then runs blocks of prompts of equal length in order of arrival."""
        for request in requests:
            request.require_valid(self._model.shape)
            request.refuse_settings(self.name, "temperature", "stop", "logprobs", "json_schema")
        began = time.perf_counter()
        blocks = batches(requests, partial(next_batch, size=self._block_size), began)
        return (result for block in blocks for result in self._run_block(block, began))

    def _run_block(self, block: list[api.GenerationRequest], began: float) -> Iterator[api.GenerationResult]:
        rows = [list(r.prompt) for r in block]
        copies = self._block_size - len(rows)
        steps = max(r.sampling.max_tokens for r in block)
        timer = self._timers("generate")
        timer.reset()
        start = time.perf_counter() - began
        output = self._lm.generate([*rows, *[rows[-1]] * copies], max_new_tokens=steps)
        end = time.perf_counter() - began
        # a step's tokens exist when its last layer is done; the last step's when FlexGen has written everything back
        times = [stop - began for stop in timer.stop_times[:-1]] + [end]
        eos = special_tokens(generation_settings(self._model.path), self._model.shape.vocab)[0]
        for row, request in enumerate(block):
            prompt_len = len(request.prompt)
            tokens = [int(t) for t in output[row, prompt_len:]]
            reasons = (finish_reason(request.sampling, tokens[:n], eos, None) for n in range(1, steps + 1))
            length, reason = next((n, reason) for n, reason in enumerate(reasons, 1) if reason)
            copied = copies * (prompt_len + steps) if row == len(block) - 1 else 0
            yield api.GenerationResult(
                id=request.id,
                tokens=tuple(tokens[:length]),
                start_s=start,
                token_times_s=tuple(times[:length]),
                prompt_tokens=prompt_len,
                padding_tokens=steps - length + copied,
                finish_reason=reason,
            )

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[api.Score]:
        raise api.UnsupportedError("FlexGen does not return logits: it cannot score")

    def close(self) -> None:
        if self._env is not None:
            self._lm = None  # its destructor deletes the files of its disk tier
            with contextlib.suppress(AttributeError):
                self._env.close_copy_threads()
        self._env = None


def _placement(
    shape: api.ModelShape, policy: api.OffloadPolicy, limits: api.HardwareLimits, job: api.Job, device: int | None
) -> tuple[_Shares, _Shares, _Shares]:
    """Shares of (device, host, disk) for weights, KV cache and activations; `device` is its budget in bytes.

    Raises UnsupportedError for what FlexGen cannot place, InfeasibleError where two layers do not fit the budget.
    """
    on_device = device is not None
    fast: _Shares = (1.0, 0.0, 0.0) if on_device else (0.0, 1.0, 0.0)
    cache, activations = policy.cache or fast, policy.activations or fast
    for field, shares in (("weights", policy.weights), ("cache", cache), ("activations", activations)):
        if shares and shares[0] and not on_device:
            raise api.UnsupportedError(f"policy.{field} has a share on a device, and the cell has none")
    if activations[2] and not on_device:
        raise api.UnsupportedError("policy.activations: without CUDA FlexGen hangs with activations on disk")
    if policy.value_sparsity != 1.0 and not on_device:
        raise api.UnsupportedError("policy.value_sparsity: FlexGen supports sparse values only on a device")
    for field, bits in (("weight_bits", policy.weight_bits), ("kv_bits", policy.kv_bits)):
        if bits not in (16, 4):
            raise api.UnsupportedError(f"policy.{field}: FlexGen stores 16 or 4 bits, not {bits}")
        if bits == 4 and not on_device:
            raise api.UnsupportedError(f"policy.{field}: FlexGen decompresses 4 bits only on a device")
    if policy.weights is not None:
        return policy.weights, cache, activations
    kv, work = working_bytes(shape, policy.block_size, job.max_sequence, _FLOAT16_BYTES)
    # FlexGen copies one layer to where it is computed while it reads the next
    two_layers = 2 * max(shape.params_per_layer, shape.vocab * shape.hidden) * _FLOAT16_BYTES
    fast_budget = device if on_device else limits.host_memory
    require_memory("flexgen_ref", two_layers + work, fast_budget, "two layers and its working memory")
    kv = kv * policy.kv_bits // 16

    def free(budget: int | None, tier: int, reserved: int) -> float:
        return math.inf if budget is None else budget - kv * cache[tier] - reserved - SLACK_BYTES

    if on_device:
        on_fast = free(device, 0, work + two_layers)
        on_host = free(limits.host_memory, 1, _COPY_BYTES + math.ceil(work * activations[1]))
    else:
        on_fast, on_host = -1, free(limits.host_memory, 1, work + two_layers)  # not even a share of no bytes
    return _most_in_memory(shape, on_fast, on_host, policy.weight_bits), cache, activations


def _weights_by_tier(shape: api.ModelShape, shares: _Shares, bits: int) -> tuple[int, int, int]:
    """Bytes of weights on (device, host, disk) for these shares, by FlexGen's rule (flex_opt.init_weight_list).

    In each half of a layer the first tensors go to disk, the next to the host and the last to the device. A tensor is
    not split: its middle decides. FlexGen keeps the embeddings twice, for the first and the last layer.
    """
    h, ffn = shape.hidden, shape.ffn
    embeddings = [shape.vocab * h, (shape.max_context + 2) * h]
    attention = [n for _ in range(4) for n in (h * h, h)] + [h, h]
    feed_forward = [ffn * h, ffn, h * ffn, h, h, h]
    tiers = [0, 0, 0]
    for tensors in (embeddings, [h, h, shape.vocab * h], *[attention, feed_forward] * shape.num_layers):
        total, before = sum(tensors), 0
        for size in tensors:
            middle = (before + size / 2) / total
            tier = 2 if middle < shares[2] else 1 if middle < shares[2] + shares[1] else 0
            quantized = bits == 4 and size > ffn  # matrices only, with a float16 scale and minimum a group
            tiers[tier] += size // 2 + 2 * _FLOAT16_BYTES * size // _GROUP if quantized else size * _FLOAT16_BYTES
            before += size
    return tiers[0], tiers[1], tiers[2]


def _most_in_memory(shape: api.ModelShape, device: float, host: float, bits: int) -> _Shares:
    """The shares, in whole percent, that put as many weights as fit `device` bytes there, as many of the others as fit
    `host` bytes there, and the rest on disk."""

    def fit(percents: range, tier: int, free: float, shares: Callable[[int], _Shares]) -> int:
        return next((p for p in percents if _weights_by_tier(shape, shares(p), bits)[tier] <= free), 0)

    first = fit(range(100, -1, -1), 0, device, lambda p: (p / 100, 0.0, (100 - p) / 100))
    second = fit(range(100 - first, -1, -1), 1, host, lambda p: (first / 100, p / 100, (100 - first - p) / 100))
    return first / 100, second / 100, (100 - first - second) / 100


def _weight_files(model: api.LocalModel, job: api.Job) -> Path:
    """The parent of FlexGen's folder `<name>-np`, which holds each tensor as a float16 .npy file; written once."""
    folder = job.cache / "flexgen" / content_digest(model, job.cache, job.on_progress)

    def write(temporary: Path) -> None:
        inner = temporary / f"{_NAME}-np"
        inner.mkdir()
        for tensor in (t for shard in read_shards(Path(model.path)) for t in shard.tensors):
            name = tensor.name.removeprefix("model.").replace("decoder.final_layer_norm", "decoder.layer_norm")
            if name != "lm_head.weight":  # tied to the embeddings
                with (inner / name).open("wb") as file:
                    header = {"descr": "<f2", "fortran_order": False, "shape": tensor.shape}
                    np.lib.format.write_array_header_1_0(file, header)
                    for piece in tensor.pieces():
                        file.write(values(piece, tensor.dtype).astype(np.float16).tobytes())

    build_once(folder, "FlexGen's copy of the weights", model.shape.params_total * _FLOAT16_BYTES, write)
    evict(folder / f"{_NAME}-np")
    return folder


def _replace_cuda() -> None:
    """The shim, for this process: the CUDA functions that FlexGen calls do nothing, and pinned memory is pageable."""

    def nothing(*args: Any, **kwargs: Any) -> int:
        return 0

    class Stream:
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    cuda: Any = torch.cuda
    cuda.Stream = Stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    for name in ("synchronize", "set_device", "memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
        setattr(cuda, name, nothing)
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.pin_memory = lambda self, *args, **kwargs: self
    empty = torch.empty

    def pageable(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        return empty(*args, **kwargs)

    torch.empty = pageable
