"""Published throughputs, and the model's error on each.

Sources: FlexGen (Sheng et al. 2023), tables 3, 4, 14 to 16, 21 and 24; LM-Offload (Wu et al. 2024), table 3 and its
comparison of quantization; from harness.common.published. A figure counts as an interval of half its last digit to both
sides. Cells that constants were fitted on are marked: they are no evidence.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from engines.models.shapes import shape
from engines.planning import nanoflow
from engines.planning.closed_form_planner import ClosedFormPlanner
from engines.planning.engine_cost_models import EngineCostModel, engine_cost_models
from engines.planning.planned_job import PlannedJob
from engines.planning.planners import planner_for
from engines.planning.search import SearchSpace, search
from engines.planning.workload import Lengths
from harness.api import Bits, HardwareProfile, OffloadPolicy, Schedule
from harness.common.published import published_rows

#: LM-Offload's machine has 280 GB, 240 of the host and 40 of the device: rows that need more cannot have run there.
_LM_OFFLOAD_GB = 280
#: Its batch size: the table gives only the product with the number of batches.
_LM_OFFLOAD_BATCH = 64
#: Bytes/s that FlexGen's table 24 gives for its local disk: what one stream reads, and all without read-ahead.
_ONE_STREAM = 1.6e9
#: Policies on four machines: the paper gives none, these are in the scripts of FlexGen's repository for its table 3
#: (benchmark/flexgen/bench_*_4x1.sh). Four groups are under way, in batches of 24, 3 x 64 and 40 sequences. The scripts
#: leave OPT-175B's weights unpinned.
_ON_FOUR = {
    "opt-6.7b": OffloadPolicy(4 * 24, 1, "row", (1.0, 0.0, 0.0), (1.0, 0.0, 0.0), (1.0, 0.0, 0.0), cpu_attention=False),
    "opt-30b": OffloadPolicy(4 * 64, 3, "zigzag", (0.2, 0.8, 0.0), (0.0, 1.0, 0.0), (0.0, 1.0, 0.0),
                             cpu_attention=True),
    "opt-175b": OffloadPolicy(4 * 40, 1, "row", (0.0, 1.0, 0.0), (0.0, 1.0, 0.0), (0.0, 1.0, 0.0), cpu_attention=True),
}  # fmt: skip
#: The fits of constants, with the labels of the cells that each used.
FITS = Path(__file__).with_name("fits.yaml")
FITTED: frozenset[str] = frozenset(label for fit in yaml.safe_load(FITS.read_text()).values() for label in fit["cells"])


@dataclass(frozen=True)
class Cell:
    """One published run.

    figure: its throughput in token/s, as text, whose last digit tells the precision; None if it ran out of memory.
    policy: searched if it has no fractions.
    disk: rates of reading and writing, as shares of the machine's own disk.
    stages: of a pipeline, one machine each.
    decoding: whether the figure is that of decoding alone: generated tokens but the first, by the time after prefill.
    fitted: constants were fitted on it.
    repeated: an earlier table has the same run.
    """

    table: str
    name: str
    hardware: str
    model: str
    engine: str
    lengths: Lengths
    policy: OffloadPolicy
    figure: str | None
    page_cache: bool = True
    disk: tuple[float, float] | None = None
    stages: int = 1
    decoding: bool = False
    fitted: bool = False
    repeated: bool = False

    @property
    def unseen(self) -> bool:
        """Whether it is evidence: nothing was fitted on it, and no earlier cell is the same run."""
        return not (self.fitted or self.repeated)

    @property
    def paper_table(self) -> str:
        """The paper's own table: those from 14 to 16 differ by the prompt."""
        return {256: "14", 512: "15", 1024: "16"}[self.lengths.prompt] if self.table == "14-16" else self.table

    @property
    def label(self) -> str:
        """Its unique name: table, system, model, lengths, batches, and percents on device/host of weights and cache."""
        policy = self.policy
        size = self.model.rpartition("-")[2]
        lengths = f"{self.lengths.prompt}+{self.lengths.generated}"
        if not (policy.weights and policy.cache):
            return f"{self.table} {self.name} {size} {lengths} searched"
        device, host = (round(100 * part) for part in policy.weights[:2])
        cached = "/".join(f"{100 * part:.0f}" for part in policy.cache[:2])
        batches = f"{policy.gpu_batch_size}x{policy.num_gpu_batches}"
        return f"{self.table} {self.name} {size} {lengths} {batches} w{device}/{host} c{cached}"


@dataclass(frozen=True)
class Outcome:
    """The prediction for a cell.

    predicted: token/s.
    error: relative to the nearer end of the figure's interval; None if the run was out of memory.
    fits: whether the model says that the memory suffices.
    """

    cell: Cell
    predicted: float
    error: float | None
    fits: bool


def evaluate(
    cells: Sequence[Cell], profiles: Mapping[str, HardwareProfile],
    cost_models: Mapping[str, EngineCostModel] | None = None, simulate: bool = True,
) -> list[Outcome]:  # fmt: skip
    """Each cell's prediction on its machine, in virtual time or else by the closed form alone. `cost_models`: of
    engines, if not the shipped ones."""
    cost_models = cost_models or engine_cost_models()
    outcomes = []
    for cell in cells:
        profile, engine = profiles[cell.hardware], cost_models[cell.engine]
        disk = profile.disk
        if cell.disk:
            disk = replace(disk, read=cell.disk[0] * disk.read, write=cell.disk[1] * disk.write)
        if not cell.page_cache:
            disk, engine = replace(disk, read=min(disk.read, _ONE_STREAM)), replace(engine, direct_io=True)
        job = PlannedJob(shape(cell.model), [cell.lengths])
        planner = planner_for(job, replace(profile, disk=disk), engine, cell.stages)
        policy = _complete(planner, cell.policy)
        prediction = planner.predict(policy) if simulate else planner.estimate(policy)
        rate = prediction.throughput_tok_s
        if cell.decoding:
            rate = prediction.requests * (cell.lengths.generated - 1) / prediction.decode_s
        error = None if cell.figure is None else error_of(rate, cell.figure)
        outcomes.append(Outcome(cell, rate, error, not planner.missing(prediction)))
    return outcomes


def _complete(planner: ClosedFormPlanner, policy: OffloadPolicy) -> OffloadPolicy:
    """The policy, or the best of its schedule and bits if it has no fractions."""
    if policy.weights:
        return policy
    best = search(planner, SearchSpace([policy.schedule], [(policy.weight_bits, policy.kv_bits)])).best
    assert best is not None
    return best.policy


def error_of(predicted: float, figure: str) -> float:
    """Distance of a prediction from the figure's interval, relative to the interval's nearer end."""
    half = 0.5 * 10.0 ** -len(figure.partition(".")[2])
    low, high = float(figure) - half, float(figure) + half
    return predicted / high - 1 if predicted > high else predicted / low - 1 if predicted < low else 0.0


def cells() -> list[Cell]:
    """All published cells, in the order of the tables."""
    first: dict[Cell, Cell] = {}  # by all but table and name: tables that repeat a run have one figure
    marked = []
    for cell in (*_flexgen(), *_ablation(), *_scaling(), *_disks(), *_lm_offload()):
        run = replace(cell, table="", name="")
        marked.append(replace(first[run], table=cell.table, name=cell.name, repeated=True) if run in first
                      else replace(cell, fitted=cell.label in FITTED))  # fmt: skip
        first.setdefault(run, marked[-1])
    return marked


def _flexgen() -> Iterator[Cell]:
    engines = {"deepspeed": "deepspeed_zero", "flexgen": "flexgen_ref", "flexgen_c": "flexgen_ref"}
    for row in published_rows("flexgen_throughput_t4"):
        system, bits = row["system"], 4 if row["system"] == "flexgen_c" else 16
        engine = engines.get(system, system)
        policy = _policy(row, weight_bits=bits, kv_bits=bits, cpu_attention=engine == "flexgen_ref" and bits == 16)
        lengths = Lengths(int(row["prompt_len"]), int(row["gen_len"]))
        if engine == "flexgen_ref" and bits == 16 and (row["model"], lengths.prompt) == ("opt-30b", 512):
            # its latency fits 128 sequences, the policy of the paper's first version (see the file)
            policy = replace(policy, gpu_batch_size=64, num_gpu_batches=2)
        model = f"facebook/{row['model']}"
        yield Cell("14-16", system, "t4_gcp", model, engine, lengths, policy, row["throughput"] or None)


def _ablation() -> Iterator[Cell]:
    for row in published_rows("flexgen_ablation_t4"):
        for model in ("opt-30b", "opt-175b"):
            figure = row[f"{model}_tok_s"]
            if not figure:
                continue
            policy = _policy(row, cpu_attention="no CPU" not in row["case"], overlap="no overlap" not in row["case"])
            page_cache = row["table"] == "4"  # table 21 ran without it
            throughput = None if figure == "OOM" else figure
            yield Cell(row["table"], row["case"], "t4_gcp", f"facebook/{model}", "flexgen_ref", Lengths(512, 32),
                       policy, throughput, page_cache)  # fmt: skip


def _scaling() -> Iterator[Cell]:
    """One machine with table 15's policies, and four with a T4 each, with those of FlexGen's own scripts."""
    of_one = {cell.model: cell.policy for cell in _flexgen() if cell.name == "flexgen" and cell.lengths.prompt == 512}
    machines = {"1": ("one machine", 1), "4": ("four machines", 4)}
    for row in _other("3"):
        size, count, *rest = row["key"].split()
        if "DeepSpeed" in rest:
            continue
        (name, stages), measure = machines[count], "decoding" if "decoding" in row["field"] else "generation"
        model = f"facebook/{size}"
        policy = of_one[model] if stages == 1 else _ON_FOUR[size]
        yield Cell("3", f"flexgen on {name}{', decoding' * (measure == 'decoding')}", "t4_gcp", model, "flexgen_ref",
                   Lengths(512, 32), policy, row["value"], stages=stages, decoding=measure == "decoding")  # fmt: skip


def _other(table: str) -> Iterator[dict[str, str]]:
    """The rows of one of FlexGen's small tables."""
    return (row for row in published_rows("flexgen_other") if row["table"] == table)


def _disks() -> Iterator[Cell]:
    """OPT-175B with table 2's policy on other disks."""
    policy = OffloadPolicy(32, 8, "zigzag", (0.0, 0.5, 0.5), (0.0, 0.0, 1.0), (0.0, 1.0, 0.0), cpu_attention=True)
    slow = (0.5 / 1.6, 0.5 / 1.3)  # of the local disk's 1.6e9 and 1.3e9 bytes/s
    for row in _other("24"):
        name, figure = row["key"], row["value"].split("/")[1]  # the first is OPT-30B's, which needs no disk
        yield Cell("24", name, "t4_gcp", "facebook/opt-175b", "flexgen_ref", Lengths(512, 32), policy, figure,
                   "page cache off" not in name, slow if "persistent" in name else None)  # fmt: skip


def _lm_offload() -> Iterator[Cell]:
    engines = {"flexgen": "flexgen_ref", "zero_inference": "deepspeed_zero"}
    for row in published_rows("lm_offload_a100"):
        if float(row["mem_gb"]) > _LM_OFFLOAD_GB:
            continue
        batches = max(1, round(int(row["batch"]) / _LM_OFFLOAD_BATCH))
        row |= {"gpu_batch_size": str(round(int(row["batch"]) / batches)), "num_gpu_batches": str(batches)}
        row |= {f"{kind}c": str(100 - float(row[f"{kind}g"])) for kind in "wch"}
        name, model, lengths = row["system"], f"facebook/{row['model']}", Lengths(64, int(row["gen_len"]))
        policy = _policy(row, cpu_attention=name == "flexgen", weight_bits=4 if name == "zero_inference" else 16,
                         kv_bits=4 if name == "lm_offload" else 16)  # fmt: skip
        engine = engines.get(name, name)
        yield Cell("LM-Offload 3", name, "a100_40g", model, engine, lengths, policy, row["throughput"])
    yield from _lm_offload_comparisons()


def _lm_offload_comparisons() -> Iterator[Cell]:
    """Its comparison of quantization and attention: OPT-30B, 64+128, 640 sequences.

    With attention on the device 38.88 GB of weights are moved for each token, which are 66 %.
    """
    base = OffloadPolicy(64, 10, "zigzag", (0.34, 0.66, 0.0), (0.0, 1.0, 0.0), (0.0, 1.0, 0.0), cpu_attention=False)
    of_table_3 = (0.55, 0.45, 0.0)
    compared: tuple[tuple[str, Bits, Bits, bool, str], ...] = (
        ("host attention", 16, 16, True, "41"),
        ("device attention", 16, 16, False, "46"),
        ("device attention, weights in 4 bits", 4, 16, False, "35"),
        ("device attention, cache in 4 bits", 16, 4, False, "82"),
        ("device attention, both in 4 bits", 4, 4, False, "55"),
    )
    for name, weight_bits, kv_bits, on_host, figure in compared:
        policy = replace(base, weight_bits=weight_bits, kv_bits=kv_bits, cpu_attention=on_host,
                         weights=of_table_3 if on_host else base.weights)  # fmt: skip
        engine = "flexgen_ref" if on_host else "lm_offload"
        yield Cell("LM-Offload 1", name, "a100_40g", "facebook/opt-30b", engine, Lengths(64, 128), policy, figure)


def _policy(row: Mapping[str, str], **settings: Any) -> OffloadPolicy:
    schedule: Schedule = "row" if int(row["num_gpu_batches"]) == 1 else "zigzag"
    return OffloadPolicy(
        int(row["gpu_batch_size"]), int(row["num_gpu_batches"]), schedule, _fractions(row, "w"), _fractions(row, "c"),
        _fractions(row, "h"), **settings,
    )  # fmt: skip


def _fractions(row: Mapping[str, str], kind: str) -> tuple[float, float, float]:
    device, host = float(row[f"{kind}g"]) / 100, float(row[f"{kind}c"]) / 100
    return device, host, max(0.0, 1 - device - host)


def table(profiles: Mapping[str, HardwareProfile]) -> list[dict[str, Any]]:
    """Each published figure with its prediction, as plain data: in token/s, NanoFlow's operations in ms. `error` is in
    virtual time, `closed form` that of the closed form."""
    columns = ("hardware", "engine", "cell", "published", "predicted", "error", "closed form", "fitted", "repeated")
    rows: list[tuple[Any, ...]] = [
        ("a100_80g_sxm_x8", "nanoflow", f"NanoFlow 2 {name}, ms", figure, f"{predicted:.3g}",
         error_of(predicted, figure), error_of(predicted, figure), False, False)
        for name, figure, predicted in nanoflow.published()
    ]  # fmt: skip
    estimates = evaluate(cells(), profiles, simulate=False)
    for o, estimate in zip(evaluate(cells(), profiles), estimates, strict=True):
        predicted = f"{o.predicted:.3g}" if o.fits else f"{o.predicted:.3g}, does not fit"
        rows.append((o.cell.hardware, o.cell.engine, o.cell.label, o.cell.figure or "out of memory", predicted,
                     o.error, estimate.error, o.cell.fitted, o.cell.repeated))  # fmt: skip
    return [dict(zip(columns, row, strict=True)) for row in rows]
