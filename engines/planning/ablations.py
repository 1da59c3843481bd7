"""Published ablations beside simulations with a technique, an overlap or a resource turned off.

Sources: FlexGen (Sheng et al. 2023), table 4; LM-Offload (Wu et al. 2024), its comparison of quantization and
attention, and its gain by threads; NanoFlow (Zhu et al. 2025), figure 13.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engines.models.shapes import shape
from engines.planning import published
from engines.planning.engine_cost_models import engine_cost_model
from engines.planning.interference import LEAST_UNITS, Interference
from engines.planning.nano_layer import NANOFLOW_ROWS, PUBLISHED_CUT, LayerOperation, network_points, published_layer
from engines.planning.nano_search import search
from engines.planning.planned_job import PlannedJob
from engines.planning.planners import planner_for
from engines.planning.workload import VALUE_BYTES, Lengths, kv_values
from harness.api import HardwareProfile, OffloadPolicy

#: By table, the cell that the others are compared with, by the beginning of its name.
_TABLES = {"4": ("FlexGen", "all optimizations"), "LM-Offload 1": ("LM-Offload", "device attention")}
#: LM-Offload's decoding with threads of its choice takes 38 % less time, of OPT-30B with 64 + 8 tokens.
_WITH_THREADS = 1 / (1 - 0.38)
_THREADS = OffloadPolicy(64, 28, "zigzag", (0.55, 0.45, 0.0), (0.0, 1.0, 0.0), (0.0, 1.0, 0.0), cpu_attention=True)
#: NanoFlow's throughput with network overlapped, and memory too, over that without overlap; and with the KV cache
#: offloaded over that without.
_NETWORK, _NETWORK_AND_MEMORY, _OFFLOADED = 1.07, 1.17, 1 - 0.03
_NANOFLOW_MACHINE = "a100_80g_sxm_x8"
#: Layers of a pass that are searched.
_LAYERS = 8


@dataclass(frozen=True)
class Ablation:
    """Throughput over that of the run which a paper compares it with: published, and simulated.

    error: relative, to the nearer end of a figure's interval.
    fitted: a constant was fitted on one of both runs.
    """

    source: str
    name: str
    published: float
    simulated: float
    error: float
    fitted: bool = False


def rows(profiles: Mapping[str, HardwareProfile]) -> list[dict[str, Any]]:
    """All ablations, as plain data."""
    return [
        {"paper": a.source, "ablation": a.name, "published": f"{a.published:.3g}", "simulated": f"{a.simulated:.3g}",
         "error": a.error, "fitted": a.fitted}
        for a in (*of_tables(profiles), *of_threads(profiles), *of_nanoflow(profiles[_NANOFLOW_MACHINE]))
    ]  # fmt: skip


def of_tables(profiles: Mapping[str, HardwareProfile]) -> Iterator[Ablation]:
    """The cells of a table with a technique turned off or on, over the one with which the paper compares them."""
    cells = [cell for cell in published.cells() if cell.table in _TABLES and cell.figure]
    outcomes = published.evaluate(cells, profiles)
    for (table, model), group in itertools.groupby(
        sorted(outcomes, key=lambda o: (o.cell.table, o.cell.model)), lambda o: (o.cell.table, o.cell.model)
    ):
        source, first = _TABLES[table]
        compared = list(group)
        base = next(o for o in compared if o.cell.name.startswith(first))
        for o in compared:
            if o is base:
                continue
            of_base, ratio = float(base.cell.figure or 0), o.predicted / base.predicted
            yield Ablation(
                source,
                f"{o.cell.name.partition(' (')[0]}, {model.rpartition('/')[2]}",
                float(o.cell.figure or 0) / of_base,
                ratio,
                published.error_of(ratio * of_base, o.cell.figure or ""),
                o.cell.fitted or base.cell.fitted,
            )


def of_threads(profiles: Mapping[str, HardwareProfile]) -> Iterator[Ablation]:
    """Host attention on the threads that LM-Offload's model chooses, over a library's default."""
    job = PlannedJob(shape("facebook/opt-30b"), [Lengths(64, 8)])
    planner = planner_for(job, profiles["a100_40g"], engine_cost_model("flexgen_ref"), 1)
    controlled, default = (planner.with_thread_control(control).predict(_THREADS) for control in (True, False))
    yield _of_ratio("LM-Offload", "thread control, decoding", _WITH_THREADS, default.decode_s / controlled.decode_s)


def of_nanoflow(machine: HardwareProfile) -> Iterator[Ablation]:
    """Pipelines of nano-batches on the measured times of NanoFlow's table 2.

    What nano-batches cost without any overlap is the paper's figure and not simulated. That decode attention gains from
    few multiprocessors as the network's kernels do is our assumption.
    """
    sequential = sum(operation.seconds for operation in published_layer())
    network = _layer_seconds(published_layer(PUBLISHED_CUT), ["network"])
    memory = _layer_seconds(published_layer(PUBLISHED_CUT), ["network", "memory"])
    offloaded = _layer_seconds([*published_layer(PUBLISHED_CUT), _offload(machine)], ["network", "memory", "copies"])
    yield _of_ratio("NanoFlow", "network overlaps", _NETWORK, sequential / network)
    yield _of_ratio("NanoFlow", "network and memory overlap", _NETWORK_AND_MEMORY, sequential / memory)
    yield _of_ratio("NanoFlow", "KV cache offloaded", _OFFLOADED, memory / offloaded)


def _of_ratio(source: str, name: str, ratio: float, simulated: float) -> Ablation:
    return Ablation(source, name, ratio, simulated, simulated / ratio - 1)


def _layer_seconds(operations: list[LayerOperation], beside: Collection[str]) -> float:
    """Seconds of a layer in the best pipeline where only kinds of `beside` run beside products."""
    alone = [replace(o, kind=o.kind if o.kind in beside else "compute") for o in operations]
    # a copy engine needs no multiprocessors
    points = {"network": network_points(), "memory": network_points(), "copies": ((LEAST_UNITS, 1.0),)}
    return search(alone, Interference(points), _LAYERS).length_s / _LAYERS


def _offload(machine: HardwareProfile) -> LayerOperation:
    """The new keys and values of a pass of NanoFlow's, copied to the host beside the rest of the layer."""
    assert machine.link is not None
    nbytes = NANOFLOW_ROWS * kv_values(shape("meta-llama/Llama-2-70b-hf")) * VALUE_BYTES
    return LayerOperation("StoreKV", "copies", nbytes / (machine.devices * machine.link.d2h), ("GEMM-KQV",), (), 1)
