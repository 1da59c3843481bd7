"""Allots the host's threads between the operators of host attention and the streams that load and store beside it.

Source: LM-Offload (Wu et al. 2024), section 4: Kahn's algorithm gives the operators that can run at a time (inter-op),
enumeration how many do, with how many threads each (intra-op), and a stream's threads follow from the bytes it moves.
"""

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from typing import Any

from engines.planning.engine_cost_models import EngineCostModel
from engines.planning.machine import attention_rate
from engines.planning.workload import VALUE_BYTES, Lengths, kv_bytes, model_weight_bytes
from harness.api import HardwareProfile, Link, ModelShape, OffloadPolicy, Processor
from harness.common.curve import interpolate

#: The tasks beside the computation, each with a thread or more of its own.
STREAMS = ("load_weight", "load_cache", "load_activation", "store_cache", "store_activation")
#: An operator graph: by operator, those that it waits for.
Graph = Mapping[str, Collection[str]]
#: Decode attention on the host by operators of a library, as FlexGen writes it (`mha_gen` and what it calls). Operators
#: too small to be worth a thread are bundled with the one they feed. The paper gives 12, this graph's degree and the
#: streams, but does not print its graph.
LIBRARY_ATTENTION: Graph = {
    "project_query": (),
    "project_key": (),
    "project_value": (),
    "widen_cached_keys": (),
    "widen_cached_values": (),
    "expand_mask": (),
    "keep_residual": (),
    "append_key": ("project_key", "widen_cached_keys"),
    "append_value": ("project_value", "widen_cached_values"),
    "scores": ("project_query", "append_key"),
    "softmax": ("scores", "expand_mask"),
    "weighted_sum": ("softmax", "append_value"),
    "project_output": ("weighted_sum",),
    "add_residual": ("project_output", "keep_residual"),
}
#: The same by one kernel, which divides sequences and heads between its threads.
FUSED_ATTENTION: Graph = {"attention": ()}

#: LLC misses in billions, of loads and stores together, with the threads of the default and of LM-Offload's choice:
#: 7 operators of 56 threads each on 112 hardware threads, and of 16. Memory traffic sets the time of decode attention.
_MISSES, _MISSES_CONTROLLED = 10 + 19, 6 + 12
_OVERSUBSCRIBED = 7 * 56 / 112
#: Times closer than this count as equal; the fewest threads win.
_ALIKE = 0.01


def degree_of_concurrency(graph: Graph) -> int:
    """The most operators that are ready at a time if all ready ones run and end together (Kahn's algorithm).

    Raises graphlib.CycleError for a graph with a cycle.
    """
    sorter = TopologicalSorter(graph)
    sorter.prepare()
    degree = 0
    while sorter.is_active():
        ready = sorter.get_ready()
        degree = max(degree, len(ready))
        sorter.done(*ready)
    return degree


@dataclass(frozen=True)
class Allotment:
    """How the host's threads are divided.

    operators: that compute at a time; 0 if the host does not attend.
    intra_op, default_intra_op: threads of each operator, as allotted and as a library takes them.
    default_inter_op: operators and streams at a time, as a library allows.
    streams: threads of each stream.
    time: of host attention, relative to the default.
    """

    operators: int
    intra_op: int
    streams: Mapping[str, int]
    default_intra_op: int
    default_inter_op: int
    time: float

    @property
    def inter_op(self) -> int:
        """Operators and streams at a time."""
        return self.operators + sum(self.streams.values())

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "intra_op": self.intra_op,
            "inter_op": self.inter_op,
            "operators": self.operators,
            "streams": dict(self.streams),
            "default": {"intra_op": self.default_intra_op, "inter_op": self.default_inter_op},
            "attention_time": self.time,
        }


def allot(
    profile: HardwareProfile, engine: EngineCostModel, shape: ModelShape, policy: OffloadPolicy, lengths: Lengths
) -> Allotment:
    """The allotment for a job on a machine with a device. The policy has all fractions."""
    assert profile.link is not None
    host, degree = profile.host, concurrent_operators(engine)
    attends = host_attends(policy, engine)
    operators, intra_op = best_threads(host, degree) if attends else (0, host.cores)
    moved = volumes(shape, policy, lengths, engine)
    return Allotment(
        operators=operators,
        intra_op=intra_op,
        streams=stream_threads(moved, hardware_threads(host) - operators * intra_op, profile.link),
        default_intra_op=host.cores,
        default_inter_op=hardware_threads(host) if degree > 1 else degree + len(STREAMS),
        time=relative_time(host, degree, operators, intra_op) if attends else 1.0,
    )


def host_attends(policy: OffloadPolicy, engine: EngineCostModel) -> bool:
    """Whether the host attends to the part of the cache that is not on the device."""
    assert policy.cache is not None
    return policy.cpu_attention and policy.cache[0] < 1 and (policy.kv_bits == 16 or engine.packed_attention)


def concurrent_operators(engine: EngineCostModel) -> int:
    """Operators of the engine's host attention that are ready together: only its own kernel reads a packed cache."""
    return degree_of_concurrency(FUSED_ATTENTION if engine.packed_attention else LIBRARY_ATTENTION)


def hardware_threads(host: Processor) -> int:
    """Threads that the host runs at a time."""
    return host.cores * host.threads_per_core


def best_threads(host: Processor, degree: int) -> tuple[int, int]:
    """Operators at a time, and threads of each, with which host attention is fastest, and the fewest threads of those.

    Enumerated: operators to the graph's degree, threads to all cores less one for each stream; and the default, so that
    the choice is never slower than that.
    """
    counts = range(1, host.cores - len(STREAMS) + 1)
    default = (degree, host.cores)
    choices = [default, *itertools.product(range(1, degree + 1), counts)]
    times = {choice: relative_time(host, degree, *choice) for choice in choices}
    enough = min(times[default], (1 + _ALIKE) * min(times.values()))
    return min(
        (choice for choice in choices if times[choice] <= enough), key=lambda choice: (math.prod(choice), choice)
    )


def relative_time(host: Processor, degree: int, operators: int, intra_op: int) -> float:
    """Time of host attention with so many operators at a time and threads of each, relative to a library's default.

    The default runs all `degree` operators that are ready, with a thread for each core, and the profile's rate is that
    of the default. Threads add up, as calibrated or else evenly, up to the number that the hardware runs and to the
    memory's bandwidth. Beyond that number they evict each other's data from the last-level cache. Where fewer operators
    run than are ready, they take turns.
    """
    return _time(host, degree, operators, intra_op) / _time(host, degree, degree, host.cores)


def with_attention_time(profile: HardwareProfile, time: float) -> HardwareProfile:
    """The machine with host attention that takes so much of its time.

    Copies from and to pageable memory change with it: a library stages them with as many threads as it computes with.
    A pinned copy needs no threads.
    """
    assert profile.link is not None
    host, link = profile.host, profile.link
    host = replace(
        host,
        attention={bits: rate / time for bits, rate in (host.attention or {"16": host.bandwidth}).items()},
        attention_call_s=host.attention_call_s and host.attention_call_s * time,
    )
    link = replace(
        link,
        h2d_pageable=min(link.h2d, link.h2d_pageable / time),
        d2h_pageable=min(link.d2h, link.d2h_pageable / time),
    )
    return replace(profile, host=host, link=link)


def policy_threads(profile: HardwareProfile, engine: EngineCostModel) -> int | None:
    """The threads that a policy of our engine asks for; None for all cores.

    Beside a device they attend. Without one they do all arithmetic: the fewest that compute as fast as any number that
    leaves each stream a thread, if the machine has enough of them and their rates were measured.
    """
    host = profile.host
    if engine.name != "offload":
        return None
    if profile.device:
        _, threads = best_threads(host, concurrent_operators(engine))
        return threads if threads < host.cores else None
    if host.cores <= len(STREAMS) or not host.by_threads:
        return None
    rates = {count: interpolate(host.by_threads, count) for count in range(1, host.cores - len(STREAMS) + 1)}
    most = max(rates.values())
    return min(count for count, rate in rates.items() if rate >= (1 - _ALIKE) * most)


def volumes(shape: ModelShape, policy: OffloadPolicy, lengths: Lengths, engine: EngineCostModel) -> dict[str, float]:
    """Bytes that each stream moves in a decode step of one block, on average. The policy has all fractions."""
    assert policy.weights and policy.cache and policy.activations
    weights, cache, activations = (1 - kind[0] for kind in (policy.weights, policy.cache, policy.activations))
    token = cache * policy.block_size * kv_bytes(shape, policy) * shape.num_layers
    rows = activations * policy.block_size * shape.hidden * VALUE_BYTES * shape.num_layers
    old = 0.0 if host_attends(policy, engine) else token * lengths.mean_cached
    moved = (weights * model_weight_bytes(shape, policy), old, rows, token, rows)
    return dict(zip(STREAMS, moved, strict=True))


def stream_threads(moved: Mapping[str, float], spare: int, link: Link) -> dict[str, int]:
    """Threads of each stream: one, and of the spare threads a share in proportion to its bytes.

    No more in all than the busiest stream, which fills the link, calls for: a thread that copies through a pinned
    buffer reaches the link's pageable rate.
    """
    most = max(moved.values())
    if not most:
        return dict.fromkeys(moved, 1)
    filling = max(link.h2d / link.h2d_pageable, link.d2h / link.d2h_pageable)
    called_for = sum(max(1, math.ceil(filling * size / most)) for size in moved.values())
    extra = max(0, min(spare, called_for) - len(moved))
    shares = {name: extra * size / sum(moved.values()) for name, size in moved.items()}
    threads = {name: 1 + int(share) for name, share in shares.items()}
    left = extra - sum(int(share) for share in shares.values())
    for name in sorted(shares, key=lambda name: int(shares[name]) - shares[name])[:left]:
        threads[name] += 1
    return threads


def _time(host: Processor, degree: int, operators: int, intra_op: int) -> float:
    """Seconds per stored byte that host attention reads, by the 16-bit rate."""
    curve, running, default = host.attention_by_threads or host.by_threads, operators * intra_op, degree * host.cores
    each = attention_rate(host, 16) * _traffic(host, default) / _reached(host, curve, default)
    idle_in_turns = math.ceil(degree / operators) * operators / degree
    return idle_in_turns * _traffic(host, running) / min(each * _reached(host, curve, running), host.bandwidth)


def _reached(host: Processor, curve: Mapping[str, float], running: int) -> float:
    """What so many threads compute, in any unit."""
    used = min(running, hardware_threads(host))
    return interpolate(curve, used) if curve else float(used)


def _traffic(host: Processor, running: int) -> float:
    """Memory traffic with so many threads, relative to that with no more than the hardware runs at a time.

    Between LM-Offload's two measurements in proportion; beyond them nothing is known, and it stays.
    """
    excess = (running / hardware_threads(host) - 1) / (_OVERSUBSCRIBED - 1)
    return 1 + (_MISSES / _MISSES_CONTROLLED - 1) * min(1.0, max(0.0, excess))
