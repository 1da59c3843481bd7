"""Puts records together: what a launch measured, what the runner knows of its cell, and what holds for the run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.api import Forecast, LaunchResult, LocalModel, MachineRates, Prices, Refusal, RunRecord, RunSpec, Trial
from harness.common.roofline import bounds_of, merged
from harness.hardware import provenance
from harness.launchers.images import code_digest


@dataclass
class Draft:
    """What the runner learns of one launch before it: filled in step by step, so that a refusal loses none of it.

    `settled`: the cell with its policy as launched. `notes`: what the load's report should say of that.
    """

    settled: RunSpec
    repeat: int
    model: LocalModel | None = None
    tuning: tuple[Trial, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    machine: MachineRates | None = None
    machine_after: MachineRates | None = None


class RecordBuilder:
    """Builds the records of one run. `places` maps folders of this machine to the names that records have for them."""

    def __init__(self, command: str, places: Mapping[str, str]) -> None:
        self._command = command
        self._places = places
        self._provenance: Mapping[str, Any] = {}
        self._prices = Prices()

    def collect_provenance(self, prices: Prices | None = None) -> None:
        """Reads what the run's records say of machine and code; before the first. `prices`: of the machine."""
        self._prices = prices or Prices()
        self._provenance = provenance.collect()
        if self._provenance["git"] is None:  # such as in a container: a digest of the code identifies it instead
            self._provenance = {**self._provenance, "code": code_digest()}

    def build(
        self, cell: RunSpec, draft: Draft, launch: LaunchResult,
        predict: Callable[[RunRecord], Forecast | None] = lambda record: None,
    ) -> RunRecord:  # fmt: skip
        """The record of a launch of `cell`, with its bounds and its prediction where it was successful."""
        measured = launch.measured
        speed = measured.metrics.get("generation_throughput_tok_s")
        record = RunRecord(
            spec=draft.settled,
            fingerprint=cell.fingerprint(),
            repeat=draft.repeat,
            status=launch.status,
            reason=launch.reason,
            started_at=launch.started_at,
            wall_s=launch.wall_s,
            load=measured.load and replace(measured.load, notes=(*measured.load.notes, *draft.notes)),
            requests=measured.requests,
            served=measured.served,
            metrics={**measured.metrics, **(self._prices.metrics(speed) if speed else {})},
            notes=measured.notes,
            measurements=measured.measurements,
            memory=launch.memory,
            accuracy=launch.accuracy,
            machine=draft.machine,
            machine_after=draft.machine_after,
            model=None if draft.model is None else replace(draft.model, path=Path(draft.model.path).name),
            tuning=draft.tuning,
            settings=draft.settings,
            trace=measured.trace,
            provenance={**self._provenance, **launch.provenance},
            command=self.command_of(cell),
            log=f"logs/{cell.name}.log",
            simulated=measured.simulated,
        )
        if draft.machine and record.status == "ok":
            rates = merged(draft.machine, draft.machine_after) if draft.machine_after else draft.machine
            bound, job_bound = bounds_of(record, rates)
            record = replace(record, bound=bound, job_bound=job_bound, predicted=predict(record))
        return replace(record, spec=self.shareable(cell))

    def refused(self, cell: RunSpec, draft: Draft, refusal: Refusal) -> RunRecord:
        """The record of a launch that did not come to be, or was interrupted."""
        return self.build(cell, draft, LaunchResult(refusal.status, refusal.reason, provenance.now()))

    def simulated(self, cell: RunSpec, prediction: RunRecord, hardware: str) -> RunRecord:
        """The record of a cell that was predicted for `hardware` instead of launched."""
        return replace(
            prediction,
            spec=cell.without_secrets(),
            fingerprint=cell.fingerprint(),
            started_at=provenance.now(),
            provenance={"hardware": hardware, "harness": self._provenance["harness"]},
            command=self.command_of(cell),
        )

    def relabelled(self, record: RunRecord, cell: RunSpec) -> RunRecord:
        """An earlier record under the labels that its cell has now; the record itself where they are the same."""
        labels = {name: getattr(cell, name) for name in ("suite", "name", "expect", "reference")}
        spec = replace(record.spec, **labels)
        return record if spec == record.spec else replace(record, spec=spec, command=self.command_of(cell))

    def shareable(self, cell: RunSpec) -> RunSpec:
        """The cell without folders of this machine and without secrets."""
        model = replace(cell.model, id=provenance.scrub(cell.model.id, self._places))
        job = replace(cell.workload, trace=provenance.scrub(cell.workload.trace, self._places))
        return replace(cell.without_secrets(), model=model, workload=job)

    def command_of(self, cell: RunSpec) -> str:
        """The command that runs this cell again."""
        return provenance.scrub(f"{self._command} --cell {cell.name}", self._places)
