"""Upper bounds on throughput: the least time that compute, disk and link can take for sequences in step or mixed.

A block of B sequences (prompt s, generated n) needs B*(s + n - 1) rows: in step, one prefill pass of B*s rows and n - 1
decode passes of B; mixed, with a sequence entering whenever one ends, n passes of B*(s + n - 1)/n. A pass computes at
the GEMM rate measured for its rows, so memory bandwidth limits small passes; weights smaller than those measured are
read faster by as much as they are smaller, up to the best rate of any rows. The bound takes the faster of the two ways
for every engine.
In each pass the disk reads the part of the weights (without idle experts and without tables that are only looked up;
bfloat16 in twelve bits, which hold its values, unless the policy says plain) and of the KV cache at its mean length
that exceeds the memory budget.

A cell has two bounds: that of the batch it loaded, and that of its job, under the best batch of any size. Both assume
perfect overlap, a budget filled with weights and cache, and the best sample of each rate, since noise only slows a
machine. With a device, its GEMM rates count, its memory is full of weights, the remaining weights cross the link once
per pass, and attention runs where the cache is. Of several ranks each has the limits and rates to itself, as if it were
a machine of its own.

The planner also bounds a profile by `block_bound`.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from harness.api.common import DTYPE_BYTES
from harness.api.machine import LocalModel, MachineRates, mean_cached_tokens
from harness.api.record import Bound, RunRecord
from harness.api.spec import OffloadPolicy, RunSpec
from harness.common.curve import interpolate

#: From one batch that is tried to the next.
_STEP = 1.02


def roofline(model: LocalModel, spec: RunSpec, batch: int, compute_dtype: str, machine: MachineRates) -> Bound | None:
    """The bound for whole blocks of `batch` sequences, or for all requests if they are fewer.

    Weights and cache take the policy's bits, and memory stays within the limits of `spec`. None if a required rate was
    not measured.
    """
    workload, policy, limits, ranks = spec.workload, spec.policy, spec.limits, spec.policy.ranks
    if workload.num_requests != "auto":
        batch = min(batch, workload.num_requests)
    curve = machine.gemm_flops.get(compute_dtype)
    prompt, generated = workload.prompt_len, workload.gen_len
    shape = model.shape
    # the first of n passes reads no cache
    cached = batch * mean_cached_tokens(prompt, generated) * (generated - 1) / generated
    plain = DTYPE_BYTES[model.dtype]
    in_layers = shape.params_per_layer * shape.num_layers
    exact = least_bytes(model.dtype, policy)
    value = exact if policy.weight_bits == 16 else policy.value_bytes(policy.weight_bits, plain)
    weights = in_layers * value + shape.head_params * exact
    needed = weights + cached * shape.kv_bytes_per_token(1) * policy.value_bytes(policy.kv_bits, plain)
    on_device = ranks * (limits.device_memory or 0)
    on_disk = 0 if limits.host_memory is None else max(0, needed - ranks * limits.host_memory - on_device)
    if not curve or (on_disk and not machine.disk_read) or bool(on_device) != bool(machine.h2d):
        return None
    prefill, decode = shape.block_flops(batch, prompt, generated)
    smaller = _bytes(compute_dtype) / value  # than the probe's weights
    in_step = prefill / rate_at(curve, batch * prompt, smaller) + decode / rate_at(curve, batch, smaller)
    mixed = (prefill + decode) / rate_at(curve, batch * (prompt + generated - 1) / generated, smaller)
    compute_s = min(in_step, mixed)
    disk_s = generated * on_disk / min(max(machine.disk_read), limits.disk_bandwidth or math.inf) if on_disk else 0.0
    link_s = generated * max(0, weights - on_device) / max(machine.h2d) if on_device else 0.0
    return block_bound(batch * generated, compute_s / ranks, disk_s / ranks, link_s / ranks)


def job_roofline(
    model: LocalModel, spec: RunSpec, requests: int, compute_dtype: str, machine: MachineRates
) -> Bound | None:
    """The bound for `requests` requests, in the best batch of any size; None if a required rate was not measured."""
    batches, batch = {requests}, 1.0
    while batch < requests:
        batches.add(int(batch))
        batch = max(batch + 1, batch * _STEP)
    return _highest(roofline(model, spec, batch, compute_dtype, machine) for batch in sorted(batches))


def block_bound(tokens: float, compute_s: float, disk_s: float, link_s: float = 0.0) -> Bound:
    """The bound for a block that generates `tokens` tokens and occupies each resource for the given seconds."""
    times: dict[Literal["compute", "disk", "link"], float] = {"compute": compute_s, "disk": disk_s, "link": link_s}
    limited_by = max(times, key=lambda resource: times[resource])
    return Bound(tokens / times[limited_by], compute_s, disk_s, limited_by, link_s)


def bounds_of(
    record: RunRecord, machine: MachineRates, requests: int | None = None
) -> tuple[Bound | None, Bound | None]:
    """The bounds of a finished launch for its loaded batch and for its job, by its policy and the mean lengths of its
    requests.

    The job has `requests` requests, or as many as the launch. Its bound takes the fastest dtype that was probed, since
    an engine may choose it; int8, whose answers differ, only where the launch computed in it. The batch's takes the
    fastest that is no less exact than the launch's: where a CPU has no units for bfloat16, engines that say bfloat16
    multiply in float32. What the launch itself read in a second counts among the disk's samples.
    """
    spec, load, model = record.spec, record.load, record.model
    if load is None or model is None or spec.workload.kind == "task" or spec.workload.online:
        return None, None  # a task's examples share prefixes, which an engine may compute once; arrivals set the pace
    workload = spec.workload
    if workload.kind == "trace" and record.requests:
        prompt = round(statistics.mean(r.prompt_tokens for r in record.requests))
        generated = round(statistics.mean(r.generated_tokens for r in record.requests))
        workload = replace(workload, prompt_len=max(1, prompt), gen_len=max(1, generated))
    spec = replace(spec, workload=workload, policy=load.policy or spec.policy)
    machine = replace(machine, disk_read=(*machine.disk_read, *_read_rate(record)))
    dtypes = [dtype for dtype in machine.gemm_flops if dtype in DTYPE_BYTES or dtype == load.compute_dtype]
    exact = _no_less_exact(load.compute_dtype, dtypes)
    own = _highest(roofline(model, spec, load.block_size, dtype, machine) for dtype in exact)
    requests = max(requests or len(record.requests), load.block_size)
    spec = replace(spec, workload=replace(workload, num_requests="auto"))
    return own, _highest(job_roofline(model, spec, requests, dtype, machine) for dtype in dtypes)


def _no_less_exact(dtype: str, others: Sequence[str]) -> list[str]:
    """`dtype` and the wider of `others`; `dtype` alone if it was not measured. int8 is the narrowest."""
    if dtype not in others:
        return [dtype]
    return [other for other in others if other == dtype or _bytes(other) > _bytes(dtype)]


def least_bytes(dtype: str, policy: OffloadPolicy) -> float:
    """Bytes of a weight that keeps its value: bfloat16 needs no more than twelve bits."""
    return 1.5 if dtype == "bfloat16" and policy.weight_format != "plain" else DTYPE_BYTES[dtype]


def _bytes(compute_dtype: str) -> int:
    """Of a weight that the probe multiplied."""
    return DTYPE_BYTES.get(compute_dtype, 1)


def _highest(bounds: Iterable[Bound | None]) -> Bound | None:
    return max((b for b in bounds if b), key=lambda b: b.throughput_tok_s, default=None)


def _read_rate(record: RunRecord) -> tuple[float, ...]:
    """Bytes/s that a launch read from the disk while it generated."""
    samples = {m.name: sum(m.samples) for m in record.measurements if m.phase == "generate" and m.samples}
    read, wall = samples.get("read_bytes", 0.0), samples.get("wall_s", 0.0)
    return (read / wall,) if read and wall else ()


def merged(before: MachineRates, after: MachineRates) -> MachineRates:
    """The samples of two probes of one machine."""
    dtypes = {**before.gemm_flops, **after.gemm_flops}
    products = {
        dtype: {
            rows: (*before.gemm_flops.get(dtype, {}).get(rows, ()), *after.gemm_flops.get(dtype, {}).get(rows, ()))
            for rows in {**before.gemm_flops.get(dtype, {}), **after.gemm_flops.get(dtype, {})}
        }
        for dtype in dtypes
    }
    return replace(
        before, disk_read=before.disk_read + after.disk_read, gemm_flops=products, h2d=before.h2d + after.h2d
    )


def rate_at(curve: Mapping[str, Sequence[float]], rows: float, smaller: float = 1.0) -> float:
    """FLOP/s at `rows` from the best samples, log-log linear between measured rows and constant above them.

    With weights so many times `smaller` than those that were measured it is at most as many times higher, and at most
    the highest.
    """
    best = {measured: max(samples) for measured, samples in curve.items() if samples}
    # below the fewest measured rows, reading the weights is the limit: the rate falls in proportion to the rows
    rate = interpolate(best, rows) * min(1.0, rows / min(map(float, best)))
    return max(rate, min(rate * smaller, max(best.values())))
