"""FlexGen's own code (the published package `flexgen`, 0.1.8), with its own policy and block schedule. OPT only.

Its model class is driven as its `run_flexgen` does, but on the checkpoint's own weights, written once as the files
that it reads (float16, as all of it is), and on the job's own prompts, a block of gpu_batch_size x num_gpu_batches at a
time, all of one length. A block that is not full is filled with copies, which count as padding.

Without CUDA FlexGen does not start. Then its "gpu" is made a second CPU device by the shim below, which changes
nothing in its files: its fast tier is RAM, its slow tier the disk, and its copy threads and schedule work as they
would. Records say so. Known bounds of it there: activations stay in RAM (on disk it hangs), and float16 products are
slow on CPUs without units for them.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from engines.common import requests as checks
from engines.common.cuda_device import cuda
from engines.common.folders import build_once
from engines.common.work_memory import SLACK_BYTES, working_bytes
from engines.models import raw_tensors
from engines.models.checkpoints import content_digest, evict
from harness.api import (
    Capabilities,
    EngineTrace,
    GenerationRequest,
    GenerationResult,
    HardwareLimits,
    InfeasibleError,
    Job,
    LoadReport,
    LocalModel,
    ModelShape,
    OffloadPolicy,
    Score,
    UnsupportedError,
)

_HONOURED = ("gpu_batch_size", "num_gpu_batches", "schedule", "weights", "cache", "activations", "weight_bits",
             "kv_bits", "cpu_attention", "value_sparsity", "overlap")  # fmt: skip
_NAME = "weights"  # of which FlexGen makes the name of its folder
_WIDTH = 2  # bytes of a float16
_GROUP = 64  # FlexGen's own, of weights along the outputs and of the cache along the head


class FlexGenEngine:
    """Takes no options. Honours placements, 4 bits, overlap, attention on the CPU and to part of the values.

    Where `weights` is left out as much of them as fits beside the cache lies in the fast tier and the rest on disk.
    Raises UnsupportedError for sampling, stop strings and scores, which FlexGen has not per request or not at all.
    """

    name = "flexgen_ref"
    _lm: Any = None
    _env: Any = None

    def capabilities(self) -> Capabilities:
        return Capabilities(device=True, packages=("torch", "transformers", "flexgen", "numpy"))

    def load(self, model: LocalModel, policy: OffloadPolicy, limits: HardwareLimits, job: Job) -> LoadReport:
        policy.require_defaults_except(self.name, *_HONOURED)
        if policy.schedule == "sweep":
            raise UnsupportedError("FlexGen's block schedule is row (one batch) or zigzag (several): not sweep")
        _require_opt(model)
        if limits.disk_bandwidth is not None:
            raise UnsupportedError("flexgen_ref reads as fast as the disk does: it has no limits.disk_bandwidth")
        if limits.threads is not None:
            torch.set_num_threads(limits.threads)
        given = cuda(limits)
        on_device = given is not None
        placed = self._placement(model, policy, limits, job, given)
        if not on_device:
            _without_cuda()
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
            pad_token_id=-1,  # nothing is padded, and no token of a prompt may be taken for padding
        )
        fast = pytorch_backend.TorchDevice("cuda:0" if on_device else "cpu")
        host = pytorch_backend.TorchDevice("cpu")
        disk = pytorch_backend.TorchDisk(str(job.scratch / "flexgen"))
        mixed = pytorch_backend.TorchMixedDevice([fast, host, disk])
        self._env = flex_opt.ExecutionEnv(gpu=fast, cpu=host, disk=disk, mixed=mixed)
        tiers = [100 * share for triple in (placed.weights, placed.cache, placed.activations) for share in triple]
        own = flex_opt.Policy(
            policy.gpu_batch_size,
            policy.num_gpu_batches,
            *(tiers[i] for i in _slots(on_device)),
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
        files = _as_files(model, job)
        self._lm = flex_opt.OptLM(config, self._env, str(files), own)
        evict(job.scratch)  # what it copied to its disk
        self._timers = flex_opt.timers
        self._model, self._block = model, policy.block_size
        shim = () if on_device else ("no CUDA: FlexGen's gpu is a second CPU device, by a shim outside its code",)
        return LoadReport(
            vocab=shape.vocab,
            max_context=shape.max_context,
            block_size=self._block,
            policy=placed.policy,
            compute_dtype="float16",
            weights_by_tier=_homes(shape, placed.weights, policy.weight_bits),
            notes=(*shim, f"--percent {' '.join(f'{tiers[i]:g}' for i in _slots(on_device))}"),
        )

    def _placement(
        self, model: LocalModel, policy: OffloadPolicy, limits: HardwareLimits, job: Job, given: int | None
    ) -> SimpleNamespace:
        """Shares of (device, host, disk) for weights, cache and activations, and the policy that says them."""
        shape, block, on_device = model.shape, policy.block_size, given is not None
        fast = (1.0, 0.0, 0.0) if on_device else (0.0, 1.0, 0.0)
        cache, activations = policy.cache or fast, policy.activations or fast
        for what, triple in (("weights", policy.weights), ("cache", cache), ("activations", activations)):
            if triple and triple[0] and not on_device:
                raise UnsupportedError(f"policy.{what} puts a part on a device, and there is none here")
        if activations[2] and not on_device:
            raise UnsupportedError("policy.activations: on disk FlexGen hangs without CUDA; keep them in RAM")
        if policy.value_sparsity != 1.0 and not on_device:
            raise UnsupportedError("policy.value_sparsity: FlexGen leaves values out only on a device")
        for what, bits in (("weight_bits", policy.weight_bits), ("kv_bits", policy.kv_bits)):
            if bits not in (16, 4):
                raise UnsupportedError(f"policy.{what}: FlexGen stores 16 or 4 bits, not {bits}")
            if bits == 4 and not on_device:
                raise UnsupportedError(f"policy.{what}: FlexGen decompresses 4 bits only on a device")
        weights = policy.weights
        if weights is None:
            kv, work = working_bytes(shape, block, job.max_sequence, _WIDTH)
            # a layer is copied to where it is computed while the next one is read
            passing = 2 * max(shape.params_per_layer, shape.vocab * shape.hidden) * _WIDTH
            budget = given if on_device else limits.host_memory
            free = math.inf if budget is None else budget - kv * policy.kv_bits // 16 - work - passing - SLACK_BYTES
            if budget is not None and passing + work > budget:
                raise InfeasibleError(
                    f"flexgen_ref needs {(passing + work) / 2**20:.1f} MiB for two layers and its work; the budget is "
                    f"{budget / 2**20:.1f} MiB"
                )
            weights = _largest_share(shape, free, policy.weight_bits, 0 if on_device else 1)
        said = replace(policy, weights=weights, cache=cache, activations=activations, compute_dtype="float16")
        return SimpleNamespace(weights=weights, cache=cache, activations=activations, policy=said)

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        """In blocks of prompts of one length, in order of arrival. Raises before any work for what it cannot run."""
        for request in requests:
            checks.validate(request, self._model.shape)
            if request.sampling.temperature or request.sampling.stop or request.sampling.logprobs is not None:
                raise UnsupportedError(
                    f"request {request.id}: FlexGen decodes greedily here: no sampling, stop strings or logprobs"
                )
        return self._blocks(requests, time.perf_counter())

    def _blocks(self, requests: Sequence[GenerationRequest], began: float) -> Iterator[GenerationResult]:
        take = partial(checks.next_batch, size=self._block)
        for block in checks.in_turn(requests, take, began):
            yield from self._run(block, began)

    def _run(self, block: list[GenerationRequest], began: float) -> Iterator[GenerationResult]:
        rows = [list(r.prompt) for r in block]
        filled = self._block - len(rows)
        steps = max(r.sampling.max_tokens for r in block)
        timer = self._timers("generate")
        timer.reset()
        start = time.perf_counter() - began
        tokens = self._lm.generate([*rows, *[rows[-1]] * filled], max_new_tokens=steps)
        end = time.perf_counter() - began
        # a step's tokens are there when its last layer is; the last ones when all is written back
        times = [stop - began for stop in timer.stop_times[:-1]] + [end]
        ends = checks.special_tokens(checks.generation_settings(self._model.path), self._model.shape.vocab)[0]
        for row, request in enumerate(block):
            prompt = len(request.prompt)
            found = [int(t) for t in tokens[row, prompt:]]
            length, reason = _length(found, request, ends)
            copies = filled * (prompt + steps) if row == len(block) - 1 else 0
            yield GenerationResult(
                id=request.id,
                tokens=tuple(found[:length]),
                start_s=start,
                token_times_s=tuple(times[:length]),
                prompt_tokens=prompt,
                padding_tokens=steps - length + copies,
                finish_reason="stop" if reason else "length",
            )

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        raise UnsupportedError("FlexGen keeps no logits: it cannot score")

    def trace(self) -> EngineTrace:
        return EngineTrace()

    def close(self) -> None:
        if self._env is not None:
            self._lm = None  # its destructor deletes its files
            with contextlib.suppress(AttributeError):
                self._env.close_copy_threads()
        self._env = None


def _homes(shape: ModelShape, shares: tuple[float, float, float], bits: int) -> tuple[int, int, int]:
    """Bytes on device, host and disk that shares of weights come to, by FlexGen's rule (flex_opt.init_weight_list).

    Of each half of a layer the first tensors go to disk, the next to the host, the last to the device: each as a whole,
    by where its middle falls. Shares are therefore coarse. The embeddings are there twice, at both ends.
    """
    h, ffn = shape.hidden, shape.ffn
    table = [shape.vocab * h, (shape.max_context + 2) * h]
    attention = [n for _ in range(4) for n in (h * h, h)] + [h, h]
    layers = [[table], [[h, h, shape.vocab * h]], *[[attention, [ffn * h, ffn, h * ffn, h, h, h]]] * shape.num_layers]
    found = [0, 0, 0]
    for tensors in (part for layer in layers for part in layer):
        total, before = sum(tensors), 0
        for size in tensors:
            middle = (before + size / 2) / total
            tier = 2 if middle < shares[2] else 1 if middle < shares[2] + shares[1] else 0
            matrix = size > ffn  # in 4 bits with a scale and a minimum for each group
            found[tier] += size // 2 + 2 * _WIDTH * size // _GROUP if matrix and bits == 4 else size * _WIDTH
            before += size
    return found[0], found[1], found[2]


def _largest_share(shape: ModelShape, free: float, bits: int, tier: int) -> tuple[float, float, float]:
    """Shares of weights of which as much as fits `free` bytes lies in `tier`, in whole percent, the rest on disk."""
    for percent in range(100, -1, -1):
        shares = [0.0, 0.0, 1 - percent / 100]
        shares[tier] = percent / 100
        if _homes(shape, (shares[0], shares[1], shares[2]), bits)[tier] <= free:
            break
    return shares[0], shares[1], shares[2]


def _slots(on_device: bool) -> tuple[int, ...]:
    """Of (device, host, disk) for weights, cache and activations those that FlexGen's --percent names: its gpu and cpu.

    Without CUDA its gpu is RAM and its cpu is left empty.
    """
    return (0, 1, 3, 4, 6, 7) if on_device else (1, 0, 4, 3, 7, 6)


def _length(tokens: list[int], request: GenerationRequest, ends: Sequence[int]) -> tuple[int, bool]:
    """How many of the generated tokens the request asked for, and whether an end of sequence ended it."""
    sampling = request.sampling
    if not sampling.ignore_eos:
        for i, token in enumerate(tokens[: sampling.max_tokens]):
            if token in ends and i + 1 >= sampling.min_tokens:
                return i + 1, True
    return sampling.max_tokens, False


def _require_opt(model: LocalModel) -> None:
    """Raises UnsupportedError for what FlexGen has no code for."""
    config = json.loads((Path(model.path) / "config.json").read_text())
    if model.shape.family != "opt":
        raise UnsupportedError(f"FlexGen's code is for OPT, not {model.shape.family}")
    if config.get("word_embed_proj_dim", model.shape.hidden) != model.shape.hidden:
        raise UnsupportedError("FlexGen has no code for OPT with projected embeddings (opt-350m)")


def _as_files(model: LocalModel, job: Job) -> Path:
    """The folder in which FlexGen finds `<name>-np`: each tensor as a float16 .npy file, written once."""
    folder = job.cache / "flexgen" / content_digest(model, job.cache, job.on_progress)

    def write(temporary: Path) -> None:
        inner = temporary / f"{_NAME}-np"
        inner.mkdir()
        for tensor in raw_tensors.read(Path(model.path)):
            name = tensor.name.removeprefix("model.").replace("decoder.final_layer_norm", "decoder.layer_norm")
            if name != "lm_head.weight":  # tied to the embeddings
                with (inner / name).open("wb") as file:
                    header = {"descr": "<f2", "fortran_order": False, "shape": tensor.shape}
                    np.lib.format.write_array_header_1_0(file, header)
                    for piece in tensor.pieces():
                        file.write(raw_tensors.values(piece, tensor.dtype).astype(np.float16).tobytes())

    build_once(folder, "FlexGen's copy of the weights", model.shape.params_total * _WIDTH, write)
    evict(folder / f"{_NAME}-np")
    return folder


def _without_cuda() -> None:
    """The shim: what FlexGen calls of CUDA does nothing, and pinned memory is plain memory. For this process."""

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

    def plain(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        return empty(*args, **kwargs)

    torch.empty = plain
