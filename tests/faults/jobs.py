"""The commands that the lanes disturb: how each is prepared, and what must come of it whatever happened."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import hardware
from tests.integration.conftest import Cli

if TYPE_CHECKING:
    from tests.faults.bench import Bench

_CELLS = "\n".join(f"  - {{name: c{i}, engine: fake, options: {{sleep_s: 0.03}}, seed: {i}}}" for i in range(3))
_KERNEL = (
    "import sys; from pathlib import Path; from engines.offload.kernels import build\n"
    "try: build.load(build.CSRC / 'hadamard.cpp', Path(sys.argv[1]))\n"
    "except build.NoCompilerError as exc: sys.exit(str(exc))"
)


@dataclass(frozen=True)
class Job:
    """`prepare` makes its inputs in a place; `command` is its command line there; `lines` are what it has acknowledged,
    in order; `outcome` is what an undisturbed run gives too."""

    name: str
    prepare: Callable[[Cli, "Bench"], None]
    command: Callable[[Cli], list[str]]
    lines: Callable[[Cli], list[bytes]]
    outcome: Callable[[Cli], Any]


def _whole_lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


# harness run


def _write_suite(cli: Cli, bench: "Bench") -> None:
    cli.suite(_CELLS, repeats=2)


def _run_command(cli: Cli) -> list[str]:
    return cli.command(*cli.running(cli.folder / "tiny.yaml"))


def _records(cli: Cli) -> list[bytes]:
    return _whole_lines(cli.out / "records.jsonl")


def _launches(cli: Cli) -> Any:
    """Each launch that succeeded, which none may do twice, and its answers."""
    found = [(r.spec.name, r.repeat, *(t.digest for t in r.requests)) for r in cli.records() if r.status == "ok"]
    assert len({launch[:2] for launch in found}) == len(found), "a launch was recorded twice"
    return sorted(found)


# harness generate


def output(cli: Cli) -> Path:
    """The answers of a job."""
    return cli.folder / "answers.jsonl"


def _write_lines(cli: Cli, lines: list[dict[str, Any]]) -> None:
    (cli.folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _generate(cli: Cli, model: object, engine: str, *more: object) -> list[str]:
    files = ("--input", cli.folder / "in.jsonl", "--output", output(cli))
    return cli.command("generate", "--model", model, "--engine", engine, "--memory", "300MiB", *files, *more)


def _answers(cli: Cli) -> list[bytes]:
    return _whole_lines(output(cli))


def _sorted_answers(cli: Cli) -> list[bytes]:
    """Each line's answer, byte for byte; in which order they finish depends on what was left to do."""
    lines = sorted(_answers(cli), key=lambda line: int(json.loads(line)["line"]))
    numbers = [json.loads(line)["line"] for line in lines]
    assert len(set(numbers)) == len(numbers), "a line was answered twice"
    return lines


def _fake_lines(cli: Cli, bench: "Bench") -> None:
    _write_lines(cli, [{"custom_id": f"r{i}", "prompt": f"prompt {i}", "max_tokens": 2} for i in range(24)])


def _fake_command(cli: Cli) -> list[str]:
    return _generate(cli, "fake", "fake", "--set", "options.sleep_s=0.02", "--set", "policy.gpu_batch_size=2")


def _offload_lines(cli: Cli, bench: "Bench") -> None:
    """A cold cache but for kernels, which take a compiler half a minute; and a copy of the model, to be damaged."""
    from tests.offload import with_kernels  # imports torch

    with_kernels(cli.folder / "cache")
    shutil.copytree(bench.model, cli.folder / "tiny-llama")
    prompts = [" ".join(f"w{(7 * i + 31 * j) % 500 + 3}" for j in range(3 + 5 * i % 23)) for i in range(12)]
    _write_lines(cli, [{"prompt": prompt, "max_tokens": 8, "ignore_eos": True} for prompt in prompts])


def _offload_command(cli: Cli) -> list[str]:
    """All weights are streamed, and half of the KV cache is on disk."""
    policy = ("policy.gpu_batch_size=4", "policy.weights=[0,0,1]", "policy.cache=[0,0.5,0.5]")
    return _generate(cli, cli.folder / "tiny-llama", "offload", *(word for p in policy for word in ("--set", p)))


# the rest


def _finished_run(cli: Cli, bench: "Bench") -> None:
    bench.reference(RUN)
    shutil.copytree(bench.folder / f"reference-{RUN.name}" / "out", cli.out)
    for report in cli.out.glob("report.*"):
        report.unlink()


def _reports(cli: Cli) -> Any:
    assert all((cli.out / f"report.{kind}").stat().st_size for kind in ("html", "md", "xml"))
    return (cli.out / "report.csv").read_text()


def _no_input(cli: Cli, bench: "Bench") -> None:
    (cli.folder / "cache").mkdir()


def _kernels(cli: Cli) -> Any:
    return sorted(str(path.relative_to(cli.folder)) for path in (cli.folder / "cache" / "kernels").glob("*/*"))


def _profile(cli: Cli) -> Any:
    return hardware.load(str(cli.folder / "here.yaml")).name


RUN = Job("run", _write_suite, _run_command, _records, _launches)
GENERATE = Job("generate", _fake_lines, _fake_command, _answers, _sorted_answers)
OFFLOAD = Job("offload", _offload_lines, _offload_command, _answers, _sorted_answers)
REPORT = Job("report", _finished_run, lambda cli: cli.command("report", cli.out), _records, _reports)
KERNEL = Job(
    "kernel", _no_input, lambda cli: [sys.executable, "-c", _KERNEL, str(cli.folder / "cache")], lambda cli: [],
    _kernels,
)  # fmt: skip
CALIBRATE = Job(
    "calibrate", _no_input, lambda cli: cli.command("calibrate", "--quick", "--out", cli.folder / "here.yaml"),
    lambda cli: [], _profile,
)  # fmt: skip
