"""Outputs that a change of structure must leave as they are: `python -m tests.frozen` writes tests/golden/frozen.json.

Greedy tokens of small random models over schedules, placements and bits, plans of memory over models and budgets,
`harness plan --json` and `harness check-model --json`. Only requests whose every choice is clear are kept: the best
token leads the second by `MARGIN` in log-probability, so another CPU's rounding cannot change the answer.
"""

import itertools
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner

from engines.models import checkpoints, shapes
from engines.offload.memory.device import plan_device_memory, tile_values
from engines.offload.memory.host import plan_host_memory
from engines.offload.memory.layout import matrices_of, tiles_of
from engines.offload.memory.plan import MemoryPlan, MemoryRequest
from engines.offload.memory.storage import Grouped, Plain
from harness.api import GenerationRequest, InfeasibleError, ModelSpec, OffloadPolicy, SamplingParams
from harness.cli.main import cli
from tests.offload import OTHERS, VOCAB, load, save

GOLDEN = Path(__file__).parent / "golden" / "frozen.json"
MARGIN = 0.05
MIB, GIB = 1 << 20, 1 << 30

MODELS: dict[str, dict[str, Any]] = {"opt": {}, "llama": {}} | OTHERS
POLICIES: dict[str, dict[str, Any]] = {
    "row": {"schedule": "row", "gpu_batch_size": 4},
    "zigzag": {"schedule": "zigzag", "gpu_batch_size": 3, "num_gpu_batches": 2, "weights": (0.0, 0.4, 0.6)},
    "sweep": {"schedule": "sweep", "gpu_batch_size": 6, "prefill_chunk": 7},
    "nano": {"schedule": "sweep", "gpu_batch_size": 6, "nano_batches": 2, "weights": (0.0, 0.0, 1.0)},
    "bits4": {"schedule": "sweep", "gpu_batch_size": 6, "weight_bits": 4, "kv_bits": 4},
    "bits8": {"schedule": "zigzag", "gpu_batch_size": 3, "num_gpu_batches": 2, "weight_bits": 8, "kv_bits": 8,
              "weight_groups": "output"},
    "disk": {"schedule": "zigzag", "gpu_batch_size": 3, "num_gpu_batches": 2, "cache": (0.0, 0.5, 0.5),
             "activations": (0.0, 0.5, 0.5)},
    "sparse": {"schedule": "row", "gpu_batch_size": 4, "value_sparsity": 0.4},
}  # fmt: skip
JOBS = (
    ("facebook/opt-30b", 512, 32, "t4_gcp", "--quantize", "4"),
    ("facebook/opt-30b", 512, 32, "t4_gcp", "--engine", "flexgen_ref"),
    ("facebook/opt-6.7b", 256, 32, "t4_gcp", "--schedule", "sweep"),
    ("facebook/opt-175b", 512, 32, "t4_gcp", "--quantize", "4", "--schedule", "zigzag"),
    ("facebook/opt-30b", 512, 32, "t4_gcp", "--engine", "accelerate"),
    ("facebook/opt-1.3b", 128, 16, "laptop_cpu", "--schedule", "sweep"),
    ("facebook/opt-6.7b", 128, 16, "laptop_cpu", "--quantize", "4", "--schedule", "zigzag"),
    ("facebook/opt-30b", 512, 32, "v100x4", "--stages", "4"),
)


def tokens(kind: str, folder: Path) -> dict[str, dict[str, list[int]]]:
    """By policy and request the greedy tokens of a small random model."""
    model = checkpoints.prepare(ModelSpec(str(save(folder / kind, kind, **MODELS[kind]))), folder / "cache")
    found: dict[str, dict[str, list[int]]] = {}
    for name, policy in POLICIES.items():
        engine, _ = load(model, folder / "cache", **policy)
        try:
            results = list(engine.generate(_requests()))
        finally:
            engine.close()
        found[name] = {result.id: list(result.tokens) for result in results if _clear(result.logprobs)}
    return found


def _requests() -> list[GenerationRequest]:
    rng = random.Random(28)
    return [
        GenerationRequest(
            f"r{i}",
            tuple(rng.randrange(5, VOCAB) for _ in range(rng.randint(1, 40))),
            SamplingParams(max_tokens=rng.randint(4, 12), ignore_eos=True, logprobs=2),
        )
        for i in range(12)
    ]


def _clear(logprobs: Any) -> bool:
    return all(one.top[0][1] - one.top[1][1] >= MARGIN for one in logprobs)


def memory_plans() -> dict[str, Any]:
    """Plans of host memory and of a device, or the refusals, over models, schedules, placements and budgets."""
    found: dict[str, Any] = {}
    weights = (None, (0.0, 0.5, 0.5))
    for model, bits, schedule, held in itertools.product(
        ("facebook/opt-1.3b", "facebook/opt-30b"), (16, 4), ("row", "zigzag", "sweep"), weights
    ):
        policy = OffloadPolicy(8, 4 if schedule == "zigzag" else 1, schedule, held)
        for budget in (1200 * MIB, 6 * GIB, 80 * GIB, None):
            name = f"host {model} {bits} bits {schedule} weights {held} budget {budget}"
            found[name] = _plan(plan_host_memory, _demand(model, bits, None), policy, budget)
        for device, host in ((4 * GIB, 16 * GIB), (16 * GIB, 100 * GIB)):
            name = f"device {model} {bits} bits {schedule} weights {held} limits {device} {host}"
            demand = _demand(model, bits, tile_values(shapes.shape(model)))
            found[name] = _plan(plan_device_memory, demand, policy, device, host)
    return found


def _demand(model: str, bits: int, values: int | None) -> MemoryRequest:
    shape, plain = shapes.shape(model), Plain("float16")
    matrices = matrices_of(shape)
    stored = plain if bits == 16 else Grouped(4, 64)
    tiles = tiles_of(matrices, [stored if m.in_layer else plain for m in matrices], values)
    return MemoryRequest(shape, tiles, stored, 2, 0 if bits == 16 else 64 * MIB, 50 * MIB, (9 * MIB, 4096), 544, 528)


def _plan(make: Callable[..., MemoryPlan], *arguments: Any) -> Any:
    try:
        plan = make(*arguments)
    except InfeasibleError as exc:
        return {"refused": str(exc), "lacking": dict(exc.lacking)}
    places = [sorted(chosen) for chosen in (plan.resident, plan.pinned)]
    return {
        "cache": [plan.kv_blocks, plan.host_kv_blocks, plan.disk_kv_blocks],
        "run": [plan.sequences, plan.slots, plan.chunk],
        "bytes": [plan.activation_bytes, plan.row_bytes, plan.logits_bytes, plan.total_bytes, plan.pinned_bytes],
        "weights": [[len(chosen), sum(chosen), chosen[:3]] for chosen in places],
    }


def plan(job: tuple[Any, ...]) -> Any:
    """What `harness plan --json` prints for a job."""
    model, prompt, new, machine, *options = map(str, job)
    return printed("plan", model, "--prompt-len", prompt, "--gen-len", new, "--hardware", machine, "--json", *options)


def title(job: tuple[Any, ...]) -> str:
    """A job's key in the golden file."""
    return " ".join(map(str, job))


def printed(*arguments: str) -> Any:
    """The JSON that a command prints."""
    done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def everything() -> dict[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return {
            "tokens": {kind: tokens(kind, Path(folder)) for kind in MODELS},
            "memory_plans": memory_plans(),
            "plans": {title(job): plan(job) for job in JOBS},
            "check_model": printed("check-model", "--json"),
        }


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(everything(), indent=1) + "\n")
