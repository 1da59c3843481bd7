"""Prints each cell's median throughput and its ratio to one cell, from a run's records.

python examples/ratios.py docs/results/cpu_offload-2026-11-23 accelerate-bfloat16
"""

import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

from reports.records import load_records, workload_of
from reports.stats import ratio_of


def main(run: Path, base: str) -> None:
    """Reads `run`/records.jsonl. A ratio above 1 means faster than `base`; ranges are over launches."""
    rates: dict[str, list[float]] = defaultdict(list)
    workloads = {}
    for record in load_records([run]):
        rate = record.metrics.get("generation_throughput_tok_s")
        if record.status == "ok" and rate:
            rates[record.spec.name].append(rate)
            workloads[record.spec.name] = workload_of(record)
    if base not in rates:
        sys.exit(f"{run} has no finished cell {base!r}; it has {', '.join(rates)}")
    print(f"{'cell':24} {'tok/s':>7} {'lowest':>7} {'highest':>7} {'ratio':>6}")
    for name, values in sorted(rates.items(), key=lambda item: -median(item[1])):
        same = workloads[name] == workloads[base]  # only cells of one workload can be compared
        ratio = f"{ratio_of(rates[base], values).ratio:6.2f}" if same else f"{'':6}"
        print(f"{name:24} {median(values):7.2f} {min(values):7.2f} {max(values):7.2f} {ratio}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2])
