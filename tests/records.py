"""Records as a suite may leave them, for tests of what is made of records."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import api
from reports.build import build

GIB = 2**30
#: The smallest cell there is.
FAKE = api.RunSpec("fake", api.ModelSpec("fake"), api.WorkloadSpec())
#: A model of two small layers, and the rates of a machine that computes and reads slowly.
SMALL = api.ModelShape("x", 2, 64, 256, 4, 4, 16, 1000, 2048, params_per_layer=49152, params_total=162304)
SMALL_MODEL = api.LocalModel("m", SMALL, weight_bytes=400_000, dtype="bfloat16", digest="d")


def rates(flops: float = 1e9, disk: float = 1e6) -> api.MachineRates:
    return api.MachineRates((disk,), (64, 256), {"float32": {"1": (flops,), "1024": (flops,)}})


MODEL = api.ModelSpec("facebook/opt-1.3b", "dummy", "bfloat16")
PROVENANCE = {
    "machine": {"cpu": "Intel(R) Xeon(R) Platinum 8481C", "cores_usable": 8, "ram_bytes": 67_416_000_000, "gpus": []},
    "python": "3.11.2",
    "git": {"commit": "c8102f3d0c6f4c7f9b0d1e2f3a4b5c6d7e8f9a0b", "dirty": False},
    "packages": {"torch": "2.8.0"},
}


def cell(name: str = "accelerate-float32", engine: str = "accelerate", **changes: Any) -> api.RunSpec:
    """A cell of the suite `demo`."""
    base = api.RunSpec(
        engine, MODEL, api.WorkloadSpec(), limits=api.HardwareLimits(host_memory=GIB), suite="demo", name=name
    )
    return replace(base, **changes)


def record(
    spec: api.RunSpec,
    repeat: int = 0,
    speed: float = 2.0,
    digests: Sequence[str] = ("a", "b", "c", "d"),
    dtype: str = "float32",
    batch: int = 4,
    **changes: Any,
) -> api.RunRecord:
    """A repeat that ended ok at `speed` tokens/s, on a machine whose disk allows 4 and whose compute 10."""
    tokens = 16 * len(digests)
    prefill = 0.25 * tokens / speed
    base = api.RunRecord(
        spec=spec,
        fingerprint=spec.fingerprint(),
        repeat=repeat,
        status="ok",
        started_at=f"2026-11-21T05:{repeat:02}:00+00:00",
        wall_s=60.0,
        load=api.LoadReport(50272, 2048, batch, replace(spec.policy, gpu_batch_size=batch), dtype, (0, GIB, GIB)),
        requests=tuple(
            api.RequestTrace(str(i), 128, 16, 0, 0.0, (prefill, tokens / speed), "length", d)
            for i, d in enumerate(digests)
        ),
        metrics={
            "generation_throughput_tok_s": speed,
            "decode_throughput_tok_s": speed * 1.25,
            "total_throughput_tok_s": speed * 9,
            "padded_throughput_tok_s": speed * 9,
            "total_s": tokens / speed,
            "prefill_s": prefill,
            "decode_s": 3 * prefill,
            "generated_tokens": float(tokens),
            "prompt_tokens": 8.0 * tokens,
            "padding_tokens": 0.0,
            "num_requests": float(len(digests)),
            "ttft_p50_s": prefill,
            "ttft_p99_s": prefill * 1.5,
            "tpot_p50_s": batch / speed,
            "tpot_p99_s": batch / speed * 1.1,
            "launch_s": 0.5,
            "import_s": 4.0,
        },
        measurements=(
            api.Measurement("wall_s", "s", (5.0,), "load"),
            api.Measurement("read_bytes", "bytes", (2.6e9,), "load"),
            api.Measurement("read_bytes", "bytes", (1e9 * tokens / 16,), "generate"),
            api.Measurement("write_bytes", "bytes", (0.0,), "generate"),
            api.Measurement("rss_anon_bytes", "bytes", (0.5 * GIB, 0.75 * GIB), "generate"),
            api.Measurement("rss_file_bytes", "bytes", (0.25 * GIB,), "generate"),
            api.Measurement("energy_j", "J", (), "generate", "no RAPL"),
        ),
        memory=api.MemoryLimit("cgroup-v2", GIB // 2, GIB, 3 * GIB // 2, 5 * GIB // 4, True),
        bound=api.Bound(4.0, 6.4, 16.0, "disk"),
        job_bound=api.Bound(5.0, 12.8, 16.0, "disk"),
        machine=api.MachineRates(
            (2.0e9, 2.1e9 + repeat * 1e8),
            (2048, 8192),
            {"float32": {"1": (8e9,), "64": (210e9,), "256": (400e9,)}, "bfloat16": {"64": (510e9,)}},
            f"2026-11-21T05:{repeat:02}:00+00:00",
        ),
        provenance=PROVENANCE,
        command=f"harness run demo --cell {spec.name}",
        log=f"logs/{spec.name}.log",
    )
    return replace(base, **changes)


def failed(spec: api.RunSpec, status: api.Status, reason: str, repeat: int = 0, **changes: Any) -> api.RunRecord:
    """A repeat that gave nothing."""
    plain = api.RunRecord(spec, spec.fingerprint(), repeat, status, reason, log=f"logs/{spec.name}.log")
    return replace(plain, **({"provenance": PROVENANCE, "started_at": "2026-11-21T05:00:00+00:00"} | changes))


def repeats(spec: api.RunSpec, speeds: Iterable[float], **changes: Any) -> list[api.RunRecord]:
    """One record a speed."""
    return [record(spec, i, speed, **changes) for i, speed in enumerate(speeds)]


def beside(others_s: float, launch: api.RunRecord) -> api.RunRecord:
    """The launch, with ten seconds of CPU time of its own during which other processes used `others_s`."""
    used = (("cpu_own_s", 10.0), ("cpu_other_s", others_s))
    return replace(launch, measurements=tuple(api.Measurement(name, "s", (s,), "generate") for name, s in used))


def write(folder: Path, records: Iterable[api.RunRecord], tail: str = "") -> Path:
    """A run directory."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(api.to_json(r)) + "\n" for r in records]
    (folder / "records.jsonl").write_text("".join(lines) + tail)
    return folder


def report(folder: Path, records: Iterable[api.RunRecord], suffix: str = "html", **options: Any) -> str:
    """The report of a run with these records, of one kind."""
    build([write(folder, records)], **options)
    return (folder / f"report.{suffix}").read_text()


def assert_tables_are_whole(document: str) -> None:
    """All rows of a table of Markdown have as many columns."""
    for block in re.findall(r"(?:^\|.*\n)+", document, re.M):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1, block


class Letters:
    """A tokenizer: a token a letter, numbered as in Unicode."""

    begin = end = 0

    def encode(self, prompt: str) -> tuple[int, ...]:
        return self.encode_plain(prompt)

    def encode_plain(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))


def quiet(done: int, total: int) -> None:
    """Reports no progress."""


def demo() -> list[api.RunRecord]:
    """A suite as it may come out: our engine, baselines, references, failures of both kinds."""
    unlimited: dict[str, Any] = {"limits": api.HardwareLimits(), "reference": True, "engine": "transformers"}
    resident = {"bound": None, "job_bound": None, "memory": api.MemoryLimit("none", GIB // 2, None, None, 4 * GIB)}
    oom = cell("transformers-within-limit", "transformers", expect="oom_host")
    broken = cell("flexgen-percent-50", "flexgen_ref")
    trials = (
        api.Trial(4, "ok", 1.1),
        api.Trial(8, "ok", 2.0),
        api.Trial(16, "oom_host", None, "cgroup OOM event at 1.5 GiB"),
    )
    reason = "killed by the host limit (cgroup OOM event)"
    return [
        *repeats(cell(policy=api.OffloadPolicy(gpu_batch_size=8)), (2.0, 2.2, 1.9), batch=8, tuning=trials),
        *repeats(cell("accelerate-bfloat16"), (1.0, 1.1, 1.05), dtype="bfloat16", digests=("a", "b", "x", "d")),
        *repeats(cell("offload-zigzag", "offload"), (3.0, 3.2, 3.1)),
        *[failed(oom, "oom_host", reason, i) for i in range(3)],
        *[failed(broken, "error", "RuntimeError: expected scalar type Half but found Float", i) for i in range(3)],
        *repeats(cell("resident-float32", **unlimited), (11.0, 12.0, 11.5), **resident),
        *repeats(
            cell("resident-bfloat16", **unlimited, seed=0, warmup=2), (8.0, 8.2, 8.1), dtype="bfloat16", **resident
        ),
    ]


HOSTILE = "<script>alert(1)</script> | `code` \n# *x* [l](javascript:1) ![i](//e) @all \x1b[31m \u202e \ud800 {{7*7}}"


def hostile_records() -> list[api.RunRecord]:
    """Every string a record carries is an attack."""
    spec = cell(HOSTILE, suite=HOSTILE, model=api.ModelSpec(HOSTILE, revision=HOSTILE))
    changes: dict[str, Any] = {
        "provenance": {HOSTILE: HOSTILE, "list": [HOSTILE, {HOSTILE: HOSTILE}]},
        "command": HOSTILE,
        "tuning": (api.Trial(1, "error", None, HOSTILE),),
    }
    machine = api.MachineRates((1.0,), (1, 1), {HOSTILE: {HOSTILE: (1.0,)}}, HOSTILE)
    load = api.LoadReport(1, 1, 1, api.OffloadPolicy(), HOSTILE, (0, 0, 0))
    memory = api.MemoryLimit(HOSTILE, 1, 1, 1, 1)
    reference = cell(HOSTILE, reference=True, seed=2, model=spec.model)
    return [
        record(spec, started_at=HOSTILE, machine=machine, load=load, memory=memory, **changes),
        failed(spec, "error", HOSTILE, 1, log=HOSTILE, **changes),
        record(reference, simulated=True),
    ]
