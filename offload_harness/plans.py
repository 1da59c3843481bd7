"""Plans: which policy is best for a model on a machine, and how fast it will be, before anything is downloaded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.common.files import default_cache
from offload_harness.frames import frame_of, html_of

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Plan:
    """A plan as plain data, `data`: that of `harness plan --json`. A notebook shows its candidates as a table."""

    data: Mapping[str, Any]

    @property
    def policy(self) -> Mapping[str, Any]:
        """The best policy."""
        policy: Mapping[str, Any] = self.data["policy"]
        return policy

    @property
    def predicted(self) -> Mapping[str, Any]:
        """What the policy will do: `throughput_tok_s`, `block_latency_s`, `peak_bytes` by tier, `bottleneck` ..."""
        predicted: Mapping[str, Any] = self.data["predicted"]
        return predicted

    @property
    def frame(self) -> pd.DataFrame:
        """A row for the plan and one for each policy that it rejected: its `kind`, whether it was `chosen`, its
        `throughput_tok_s` where it fits, the `reason` against it, and the settings of its policy."""
        return frame_of(self._rows())

    def __str__(self) -> str:
        return f"{self._title()}: {self.predicted['throughput_tok_s']:.3g} token/s with {json.dumps(self.policy)}"

    def _repr_html_(self) -> str:
        from reports.tables import Cell, Column, plain_table
        from reports.text import MISSING

        shown = ("kind", "throughput_tok_s", "schedule", "gpu_batch_size", "num_gpu_batches", "reason")
        units = {"throughput_tok_s": "tok/s"}
        columns = [Column(name.partition("_tok_s")[0].replace("_", " "), units.get(name, ""), numeric=False,
                          wide=name == "reason") for name in shown]  # fmt: skip
        rows = [[Cell(MISSING if row[name] is None else _text(row[name])) for name in shown] for row in self._rows()]
        return html_of([self._title(), plain_table("The plan, and what it rejected", columns, rows)])

    def _title(self) -> str:
        lengths = f"{self.data['prompt_len']} + {self.data['gen_len']} tokens"
        return f"{self.data['model']} on {self.data['hardware']}, {lengths}, engine {self.data['engine']}"

    def _rows(self) -> list[dict[str, Any]]:
        chosen = {"kind": "plan", "chosen": True, "reason": "", "policy": self.policy}
        chosen["throughput_tok_s"] = self.predicted["throughput_tok_s"]
        others = [{"chosen": False, **other} for other in self.data["rejected"]]
        head = ("kind", "chosen", "throughput_tok_s", "reason")
        return [
            {name: row.get(name) for name in head} | {name: (row.get("policy") or {}).get(name) for name in self.policy}
            for row in (chosen, *others)
        ]


def plan(
    model: str | Path, *, memory: str | int | None = None, device_memory: str | int | None = None,
    disk: str | int | None = None, prompt_len: int = 512, gen_len: int = 32, hardware: str = "local",
    engine: str = "offload", schedules: Sequence[str] = (), quantize: str = "none", latency_s: float | None = None,
    stages: int | None = None, policy: Mapping[str, Any] | None = None, cache_dir: str | Path | None = None,
) -> Plan:  # fmt: skip
    """Says which policy is best for a model, and how fast it will be, as `harness plan` does; nothing is downloaded.

    `hardware` names a profile of `harness ls hardware` or a file; "local" is this machine, as `harness calibrate`
    measured it. `memory`, `device_memory` and `disk` are what the job may take of it, in bytes or as a size.
    `quantize`: "none", "auto", bits such as "4", or bits of weights and KV cache such as "4:16". `latency_s` is the
    longest time of a block. A `policy` is predicted as it is.

    Raises HarnessError for what cannot be planned, and InfeasibleError where nothing fits.
    """
    from harness.planning.plan import PlanOptions, make_plan

    options = PlanOptions(
        model=str(model), prompt_len=prompt_len, gen_len=gen_len, hardware=hardware, engine=engine,
        schedules=tuple(schedules), quantize=quantize, latency=latency_s, stages=stages,
        policy=None if policy is None else json.dumps(policy), memory=_size(memory),
        device_memory=_size(device_memory), disk=_size(disk),
        cache=default_cache() if cache_dir is None else Path(cache_dir),
    )  # fmt: skip
    return Plan(make_plan(options, lambda done, total: None))


def _size(given: str | int | None) -> str | None:
    return f"{given}B" if isinstance(given, int) else given


def _text(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
