"""Jobs one after another in one process, and beside it commands that are killed: nothing grows.

`python -m tests.faults.soak FOLDER MODEL SECONDS SEED` is that process: a line of JSON a job, what it holds after it.
"""

import json
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from harness.batch.generate import run as run_job
from harness.batch.job import BatchJob
from tests.faults.bench import Bench, leftovers, require_no_traceback, said_file, start
from tests.faults.jobs import OFFLOAD
from tests.faults.processes import Marker, send

_ROOT = Path(__file__).parents[2]
#: Samples that are left out, as a share: caches fill, and allocators find their size.
_WARM_UP = 0.3
_FEWEST = 6
#: By how much each may grow over all jobs, by a linear fit: bytes beside a tenth of the mean, else a number.
_BYTES_MORE, _MORE = 16 << 20, 1.5


def trial(bench: Bench, seed: int) -> None:
    """Memory, descriptors, threads and files of the process show no growth, and each killed command's job completes."""
    rng = random.Random(seed)
    cli = bench.place(f"soak-{seed}")
    OFFLOAD.prepare(cli, bench)
    arguments = (cli.folder, bench.model, 60 * bench.minutes, seed)
    command = [sys.executable, "-m", "tests.faults.soak", *map(str, arguments)]
    process = start(cli, command, Marker(), {"PYTHONPATH": str(_ROOT)})
    killed = 0
    while process.poll() is None:
        _kill_one(bench, rng, f"soak-{seed}-{killed}")
        killed += 1
        time.sleep(min(10.0, 6 * bench.minutes))
    require_no_traceback(cli)
    lines = said_file(cli).read_text().splitlines()
    samples = [json.loads(line) for line in lines if line.startswith("{")]
    assert process.returncode == 0, lines[-3:]
    assert not (grown := growth(samples)), f"over {len(samples)} jobs: {grown}"
    assert not (left := leftovers(cli.folder)), left


def growth(samples: list[dict[str, float]]) -> dict[str, str]:
    """What grew, and by how much over all samples but the first. Raises AssertionError for too few samples."""
    steady = samples[int(_WARM_UP * len(samples)) :]
    assert len(steady) >= _FEWEST, f"{len(samples)} jobs are too few to tell"
    grown = {}
    for name in steady[0]:
        values = [sample[name] for sample in steady]
        slope = float(np.polyfit(range(len(values)), values, 1)[0])
        more = slope * len(values)
        allowed = _BYTES_MORE + 0.1 * float(np.mean(values)) if name.endswith("_bytes") else _MORE
        if more > allowed:
            grown[name] = f"{more:.0f} more, {allowed:.0f} allowed"
    return grown


def _kill_one(bench: Bench, rng: random.Random, name: str) -> None:
    expected, marker = bench.reference(OFFLOAD), Marker()
    cli = bench.place(name)
    OFFLOAD.prepare(cli, bench)
    process = start(cli, OFFLOAD.command(cli), marker)
    time.sleep(rng.uniform(0.0, expected.seconds))
    send(process.pid, signal.SIGKILL)
    process.wait()
    marker.require_gone(bench.patience_s)
    bench.require_whole(OFFLOAD, cli, OFFLOAD.lines(cli))


class _Quiet:
    def note(self, text: str) -> None: ...
    def advance(self, phase: str, done: int, total: int, tokens: int = 0) -> None: ...


def _requests(rng: random.Random) -> list[dict[str, Any]]:
    """Completions and chats of mixed lengths, with samples, log-probabilities and stop strings."""
    found = []
    for _ in range(rng.randint(1, 24)):
        text = " ".join(f"w{rng.randint(3, 511)}" for _ in range(rng.randint(1, 60)))
        line: dict[str, Any] = {"max_tokens": rng.randint(1, 24), "n": rng.choice((1, 1, 1, 3))}
        line |= {"temperature": 1.0, "seed": rng.randint(0, 99)} if rng.random() < 0.5 else {}
        line |= {"stop": f"w{rng.randint(3, 511)}"} if rng.random() < 0.3 else {}
        if rng.random() < 0.3:
            line["messages"] = [{"role": "user", "content": text}]
            line |= {"logprobs": True, "top_logprobs": 2} if rng.random() < 0.3 else {}
        else:
            line["prompt"] = text
            line |= {"logprobs": 2} if rng.random() < 0.3 else {}
        found.append(line)
    return found


def _held(folder: Path) -> dict[str, float]:
    """What this process holds."""
    rollup = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return {
        "pss_bytes": 1024 * int(rollup["Pss"].split()[0]),
        "rss_bytes": 1024 * int(rollup["Rss"].split()[0]),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "files": len(list((folder / "cache").rglob("*"))),
    }


def main(folder: Path, model: str, seconds: float, seed: int) -> None:
    """Runs jobs for so long, at least a few."""
    rng, end, count = random.Random(seed), time.monotonic() + seconds, 0
    source, output = folder / "mixed.jsonl", folder / "mixed-answers.jsonl"
    while time.monotonic() < end or count < 2 * _FEWEST:
        lines = _requests(rng)
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        policy = (f"policy.gpu_batch_size={rng.choice((2, 8))}", f"policy.schedule={rng.choice(('row', 'sweep'))}")
        job = BatchJob(model, "offload", "300MiB", policy, source, output, folder / "cache", max_tokens=16)
        run_job(job, _Quiet(), lambda answer: None)
        answered = len(output.read_text().splitlines())
        assert answered == len(lines), f"{answered} of {len(lines)} lines were answered"
        output.unlink()
        count += 1
        sys.stdout.write(json.dumps(_held(folder)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
