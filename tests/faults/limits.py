"""Random policies within a memory limit: never over it, and a refusal says what would fit."""

import json
import random
import re
from dataclasses import replace
from typing import Any

from harness import hardware
from harness.hardware import provenance
from tests.faults.bench import Bench, run
from tests.integration.conftest import Cli
from tests.offload import with_kernels

_CELLS = 4
_WOULD_FIT = re.compile(r"would fit|use a larger|at least \d+|shorten")


def trial(bench: Bench, seed: int) -> None:
    """Runs four cells with policies drawn by `seed`."""
    rng = random.Random(seed)
    cli = bench.place(f"limits-{seed}")
    _keep_a_profile(cli)
    with_kernels(cli.folder / "cache")
    cells = [_cell(rng, f"c{i}") for i in range(_CELLS)]
    model = "{id: tiny/opt, weights: dummy, dtype: float32}"
    workload = "{kind: synthetic, prompt_len: 24, gen_len: 6, num_requests: 12}"
    matrix = "\n".join(f"  - {json.dumps(cell)}" for cell in cells)
    suite = cli.suite(matrix, model=model, workload=workload, repeats=1, timeout="5min")
    run(cli, cli.command(*cli.running(suite)), code=None)
    records = cli.by_name()
    assert len(records) == len(cells)
    for name, record in records.items():
        told = f"{name}: {record.status}: {record.reason}; {next(c for c in cells if c['name'] == name)}"
        if record.status == "ok":
            memory = record.memory
            assert memory.peak_bytes <= memory.limit_bytes, told
        else:
            assert record.status == "infeasible", told
            assert _WOULD_FIT.search(record.reason), told


def _keep_a_profile(cli: Cli) -> None:
    """A profile of this host that says nothing true of it: predictions are not tested, and measuring takes a minute."""
    profile = replace(hardware.load("laptop_cpu"), name="local", host_id=provenance.machine_key())
    hardware.save(profile, hardware.local_path(cli.folder / "cache"))


def _cell(rng: random.Random, name: str) -> dict[str, Any]:
    schedule = rng.choice(("row", "zigzag", "sweep"))
    policy: dict[str, Any] = {
        "schedule": schedule,
        "gpu_batch_size": rng.choice((1, 2, 5, 12, 200)),
        "num_gpu_batches": rng.randint(1, 3) if schedule == "zigzag" else 1,
        "weight_bits": rng.choice((16, 16, 8, 4)),
        "kv_bits": rng.choice((16, 16, 8, 4)),
        "group_size": 32,  # a head of this model
    }
    for field, shares in (("weights", (None, 0.0, 0.4, 1.0)), ("cache", (None, None, 0.5, 1.0))):
        if (share := rng.choice(shares)) is not None:
            policy[field] = [0.0, share, 1.0 - share]
    if (chunk := rng.choice((None, 1, 8, 64))) is not None:
        policy["prefill_chunk"] = chunk
    return {
        "name": name, "engine": "offload", "policy": policy, "limits": {"host_memory": f"{rng.randint(20, 160)}MiB"}
    }  # fmt: skip
