"""Upper bounds on throughput: the least time that compute, disk and link can take for one block of sequences.

`roofline` bounds a cell by the rates measured beside its launch. A block of B sequences (prompt s, generated n) needs
B*(s + n - 1) rows: in step, one prefill pass of B*s rows and n - 1 decode passes of B; mixed, with a sequence entering
whenever one ends, n passes of B*(s + n - 1)/n. A pass computes at the GEMM rate measured for its rows, so memory
bandwidth limits small passes, and the faster of the two ways counts, for every engine alike. The disk reads in each
pass what the memory budget cannot hold of the weights (without idle experts) and of the KV cache at its mean length.

The bound assumes perfect overlap and a budget full of weights and cache, and takes the best sample of each rate, since
noise only slows. With a device, compute is the device's, its memory is full of weights, and the remaining weights cross
the link once a pass; attention runs where the cache is.

The planner bounds a profile by `block_bound` too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from harness.api.common import DTYPE_BYTES
from harness.api.machine import LocalModel, MachineRates, mean_cached_tokens
from harness.api.record import Bound, RunRecord
from harness.api.spec import RunSpec
from harness.common.curve import interpolate
from harness.common.sizes import value_bytes


def roofline(model: LocalModel, spec: RunSpec, batch: int, compute_dtype: str, machine: MachineRates) -> Bound | None:
    """The bound for whole blocks of `batch` sequences, or of all requests if they are fewer.

    Weights and cache are in the policy's bits, memory is within the limits of `spec`. None if a rate that it needs was
    not measured.
    """
    workload, policy, limits = spec.workload, spec.policy, spec.limits
    if workload.num_requests != "auto":
        batch = min(batch, workload.num_requests)
    curve = machine.gemm_flops.get(compute_dtype)
    prompt, generated = workload.prompt_len, workload.gen_len
    shape = model.shape
    # the first of n passes reads no cache
    cached = batch * mean_cached_tokens(prompt, generated) * (generated - 1) / generated
    in_layers = shape.params_per_layer * shape.num_layers
    plain = DTYPE_BYTES[model.dtype]
    saved = plain - value_bytes(policy.weight_bits, policy.group_size, plain)
    weights = model.weight_bytes * (1 - shape.params_idle / shape.params_total) - in_layers * saved
    cached_value = value_bytes(policy.kv_bits, policy.group_size, plain)
    needed = weights + cached * shape.kv_bytes_per_token(1) * cached_value
    on_device = limits.device_memory or 0
    on_disk = 0 if limits.host_memory is None else max(0, needed - limits.host_memory - on_device)
    if not curve or (on_disk and not machine.disk_read) or bool(on_device) != bool(machine.h2d):
        return None
    prefill, decode = shape.block_flops(batch, prompt, generated)
    in_step = prefill / rate_at(curve, batch * prompt) + decode / rate_at(curve, batch)
    mixed = (prefill + decode) / rate_at(curve, batch * (prompt + generated - 1) / generated)
    compute_s = min(in_step, mixed)
    disk_s = generated * on_disk / min(max(machine.disk_read), limits.disk_bandwidth or math.inf) if on_disk else 0.0
    link_s = generated * max(0, weights - on_device) / max(machine.h2d) if on_device else 0.0
    return block_bound(batch * generated, compute_s, disk_s, link_s)


def block_bound(tokens: float, compute_s: float, disk_s: float, link_s: float = 0.0) -> Bound:
    """The bound for a block that generates `tokens` and needs each resource for so many seconds."""
    times: dict[Literal["compute", "disk", "link"], float] = {"compute": compute_s, "disk": disk_s, "link": link_s}
    limited_by = max(times, key=lambda resource: times[resource])
    return Bound(tokens / times[limited_by], compute_s, disk_s, limited_by, link_s)


def bound_of(record: RunRecord, machine: MachineRates) -> Bound | None:
    """The bound of a finished launch, for the batch and policy that it loaded and the mean lengths of its requests."""
    spec, load, model = record.spec, record.load, record.model
    if load is None or model is None or spec.workload.kind == "task":
        return None  # examples of a task share prefixes, which need not be computed twice
    job = spec.workload
    if job.kind == "trace" and record.requests:
        prompt = round(statistics.mean(r.prompt_tokens for r in record.requests))
        generated = round(statistics.mean(r.generated_tokens for r in record.requests))
        job = replace(job, prompt_len=max(1, prompt), gen_len=max(1, generated))
    spec = replace(spec, workload=job, policy=load.policy or spec.policy)
    return roofline(model, spec, load.block_size, load.compute_dtype, machine)


def rate_at(curve: Mapping[str, Sequence[float]], rows: float) -> float:
    """FLOP/s at `rows` by the best sample, log-linear between measured rows and flat above them."""
    points = sorted((float(r), max(samples)) for r, samples in curve.items())
    # reading the weights limits fewer rows than were measured: the rate falls in proportion
    return interpolate(points, rows) * min(1.0, rows / points[0][0])
