"""The roofline of one cell: the least time compute and disk could take for its batch on this machine.

A block of B sequences (prompt s, generated n) needs B*(s + n - 1) rows. In step they are one prefill pass of B*s
rows and n - 1 decode passes of B; mixed, with a sequence entering whenever one ends, n passes of B*(s + n - 1)/n.
Compute time of a pass is its FLOPs over the GEMM rate measured at that many rows (so small passes are held to
what memory bandwidth allows), and the better of the two ways counts, for every engine alike. Disk time of a pass
is what the budget cannot hold of the weights (without experts that nobody need ask for) and of the KV cache, at
its mean over the passes, over the measured sequential read bandwidth. Of a rate's samples the best counts: noise
only slows, and a bound is what the machine can do. The bound assumes perfect overlap, and that all of the budget
holds weights and KV cache.

With a device compute is its own, and what its memory cannot hold of the weights crosses the link once a pass: all of
its memory holds weights, and the cache is attended to where it is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from harness.api.common import DTYPE_BYTES, Dtype
from harness.api.machine import LocalModel, MachineRates
from harness.api.record import Bound, RunRecord
from harness.api.spec import RunSpec
from harness.common.curve import interpolate


def roofline(model: LocalModel, spec: RunSpec, batch: int, compute_dtype: str, machine: MachineRates) -> Bound | None:
    """Best generated tokens/s for whole blocks of `batch` (or of all requests, where they are fewer).

    With the layers' weights and the cache in the policy's bits, and under the limits of `spec`. None where a needed
    rate was not measured.
    """
    workload, policy, limits = spec.workload, spec.policy, spec.limits
    if workload.num_requests != "auto":
        batch = min(batch, workload.num_requests)
    curve = machine.gemm_flops.get(compute_dtype)
    prompt, generated = workload.prompt_len, workload.gen_len
    shape = model.shape
    # Of n passes the first needs none of the cache, and the others s + n / 2 tokens of it on average.
    cached = batch * (prompt + generated / 2) * (generated - 1) / generated
    in_layers = shape.params_per_layer * shape.num_layers
    saved = DTYPE_BYTES[model.dtype] - _value_bytes(policy.weight_bits, policy.group_size, model.dtype)
    weights = model.weight_bytes * (1 - shape.params_idle / shape.params_total) - in_layers * saved
    key_or_value = _value_bytes(policy.kv_bits, policy.group_size, model.dtype)
    needed = weights + cached * shape.kv_bytes_per_token(1) * key_or_value
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
    times: dict[Literal["compute", "disk", "link"], float] = {"compute": compute_s, "disk": disk_s, "link": link_s}
    limited_by = max(times, key=lambda resource: times[resource])
    return Bound(batch * generated / times[limited_by], compute_s, disk_s, limited_by, link_s)


def bound_of(record: RunRecord, machine: MachineRates) -> Bound | None:
    """The bound of a finished launch: of the batch and bits that were loaded, and of its requests' mean lengths."""
    spec, load, model = record.spec, record.load, record.model
    if load is None or model is None or spec.workload.kind == "task":
        return None  # examples of a task begin alike, and what they share need not be computed twice
    job = spec.workload
    if job.kind == "trace" and record.requests:
        prompt = round(statistics.mean(r.prompt_tokens for r in record.requests))
        generated = round(statistics.mean(r.generated_tokens for r in record.requests))
        job = replace(job, prompt_len=max(1, prompt), gen_len=max(1, generated))
    spec = replace(spec, workload=job, policy=load.policy or spec.policy)
    return roofline(model, spec, load.block_size, load.compute_dtype, machine)


def _value_bytes(bits: int, group: int, dtype: Dtype) -> float:
    """Bytes of a stored value; a group has a step and a least value of 16 bits each beside its codes."""
    return DTYPE_BYTES[dtype] if bits == 16 else (bits + 32 / group) / 8


def rate_at(curve: Mapping[str, Sequence[float]], rows: float) -> float:
    """FLOP/s at `rows` by the best sample, log-linear between measured rows and flat beyond the ends."""
    points = sorted((float(r), max(samples)) for r, samples in curve.items())
    # Fewer rows than measured are bound by reading the weights: the rate falls in proportion.
    return interpolate(points, rows) * min(1.0, rows / points[0][0])
