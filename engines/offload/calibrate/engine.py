"""Measures what the engine does beside products, on jobs of a small random model with all weights in memory."""

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from engines.models import dummy_weights
from engines.models.checkpoints import prepare
from engines.offload.engine import OffloadEngine
from harness import api
from harness.common.curve import interpolate
from harness.common.disk_rate import sequential_read_rates
from harness.common.scratch import scratch_folder

_LAYERS, _HIDDEN, _VOCAB = 4, 2048, 512
#: Values of the layers' matrices.
_PARAMS = 12 * _HIDDEN * _HIDDEN * _LAYERS
#: Prompt tokens of a pass, as under a limit of a few GiB.
_CHUNK = 256
#: Jobs as (prompts, tokens of each, generated): equal rows in short and in long prompts, and passes of few rows.
_SHORT, _LONG, _FEW = (8, 64, 1), (1, 512, 1), (8, 8, 17)
#: Passes of few rows that are shorter than reading the weights, so that the disk is busy all the time.
_STREAMED = (96, 4, 13)
#: Seconds of a read of the disk alone.
_READ_S = 0.5
#: The smallest share of a rate that is believed.
_LEAST_SHARE = 0.1
#: Seconds that stand in for a time below the clock's resolution.
_LEAST_S = 1e-6


def measure(
    cache: Path, dtype: api.Dtype, kinds: Sequence[api.Bits], flops: Mapping[str, float], rounds: int
) -> dict[str, list[float]]:
    """Samples of the host's rates by their path in a profile, for KV caches of `kinds` bits, computing in `dtype`.

    Scratch files and kernels go under `cache`. `flops`: FLOP/s of products by themselves, by rows.
    """
    samples: dict[str, list[float]] = defaultdict(list)
    with scratch_folder(cache) as folder:
        model = random_model(folder)
        kernels = cache.resolve() / "kernels"  # compiled kernels stay; converted weights go with the folder
        kernels.mkdir(exist_ok=True)
        (folder / "cache").mkdir(exist_ok=True)
        (folder / "cache" / "kernels").symlink_to(kernels)
        for bits in kinds:
            with _loaded(model, folder, _policy(bits, dtype)) as (engine, _):
                for rates in _rounds(engine, bits, rounds):
                    for path, rate in rates.items():
                        samples[path].append(rate)
        for shares in _shares(model, folder, dtype, flops, -(-rounds // 2)):
            for path, share in shares.items():
                samples[path].append(share)
    return dict(samples)


def _shares(
    model: api.LocalModel, folder: Path, dtype: api.Dtype, flops: Mapping[str, float], rounds: int
) -> Iterator[dict[str, float]]:
    """By round: what a pass reaches of the products' own rate, what is left of that while the disk is read, and what is
    left of the disk's rate while products run.

    The engine runs with all weights in memory, then with all on disk, which is then read alone.
    """
    policy = replace(_policy(16, dtype), gpu_batch_size=_STREAMED[0])
    for _ in range(rounds):
        with _loaded(model, folder, replace(policy, weights=(0.0, 1.0, 0.0))) as (engine, _):
            _run(engine, _STREAMED)  # warms up: a library prepares for each number of rows
            held = _run(engine, _STREAMED)
        with _loaded(model, folder, replace(policy, weights=(0.0, 0.0, 1.0))) as (engine, report):
            _run(engine, _STREAMED)
            both = _run(engine, _STREAMED)
        rates = sequential_read_rates(Path(model.path), _READ_S)
        if not rates:  # a file system without direct I/O
            return
        alone, products, reads = held["task_products_s"], both["task_products_s"], both["task_load_weights_s"]
        reading_alone = report.weights_by_tier[2] * both["passes"] / max(rates)
        yield {
            "host.in_passes": min(1.0, bare_products_s(round(held["passes"]), flops) / alone),
            "host.beside_disk": remaining_share(alone, products, reads),
            "disk.beside_products": remaining_share(reading_alone, reads, products),
        }


def bare_products_s(passes: int, flops: Mapping[str, float]) -> float:
    """Seconds of the products of _STREAMED at rates by rows: of its decoding, and of its prompts in other passes."""
    count, prompt, generated = _STREAMED
    prefills = passes - (generated - 1)
    decoded = _PARAMS + _VOCAB * _HIDDEN  # of prompts only the last rows meet the head
    runs = [(generated - 1, float(count), decoded), (prefills, count * prompt / prefills, _PARAMS)]
    return sum(times * 2 * params * rows / interpolate(flops, rows) for times, rows, params in runs)


def remaining_share(alone: float, beside: float, other: float) -> float:
    """The share of its rate that work keeps while other work runs, which takes `other` seconds.

    The work takes `alone` seconds by itself, and `beside` seconds with the other: `alone` = share * overlap + the rest.
    """
    return min(1.0, max(_LEAST_SHARE, 1 - (beside - alone) / min(beside, other)))


def _rounds(engine: OffloadEngine, bits: api.Bits, rounds: int) -> Iterator[dict[str, float]]:
    """By round: FLOP/s of prefill attention, values/s cached, values/s between products, seconds a layer and pass, and
    seconds of attention a sequence and layer beside what it reads and stores."""
    _run(engine, _SHORT)  # warms up
    for _ in range(rounds):
        short, long, few = (_run(engine, job) for job in (_SHORT, _LONG, _FEW))
        rows = _SHORT[0] * _SHORT[1] * _LAYERS
        flops = [4 * count * tokens**2 / 2 * _HIDDEN * _LAYERS for count, tokens, _ in (_SHORT, _LONG)]
        longer = long["task_attention_s"] - short["task_attention_s"]
        # if the short prompts were disturbed, the long ones alone give a lower bound
        rate = (flops[1] - flops[0]) / longer if longer > 0 else flops[1] / long["task_attention_s"]
        storing = max(short["task_attention_s"] - flops[0] / rate, _LEAST_S)
        count, prompt, generated = _FEW
        cached = 2 * count * (prompt + generated - 1) * _HIDDEN * _LAYERS
        attended = few["task_attention_s"] - cached * storing / (2 * rows * _HIDDEN)
        call = few["task_other_s"] / few["passes"] / _LAYERS
        between = max(short["task_other_s"] - call * short["passes"] * _LAYERS, _LEAST_S)
        yield {
            f"host.prompts.{bits}": rate,
            f"host.cached.{bits}": 2 * rows * _HIDDEN / storing,
            "host.elementwise": rows * _HIDDEN / between,
            "host.layer_call_s": call,
            "host.sequence_call_s": max(attended, _LEAST_S) / (count * generated * _LAYERS),
        }


def _run(engine: OffloadEngine, job: tuple[int, int, int]) -> Mapping[str, float]:
    count, prompt, generated = job
    sampling = api.SamplingParams(max_tokens=generated, ignore_eos=True)
    ids = torch.randint(8, _VOCAB, (count, prompt)).tolist()  # new ones each time: the engine caches prefixes
    requests = [api.GenerationRequest(f"r{i}", tuple(one), sampling) for i, one in enumerate(ids)]
    list(engine.generate(requests))
    return engine.trace().metrics


def random_model(folder: Path) -> api.LocalModel:
    """Four layers of opt-1.3b's size with random weights."""
    config = {
        "model_type": "opt", "vocab_size": _VOCAB, "hidden_size": _HIDDEN, "word_embed_proj_dim": _HIDDEN,
        "ffn_dim": 4 * _HIDDEN, "num_hidden_layers": _LAYERS, "num_attention_heads": _HIDDEN // 64,
        "max_position_embeddings": 1024,
    }  # fmt: skip
    (folder / "model").mkdir()
    dummy_weights.write(dummy_weights.plan(config, "bfloat16"), lambda done, total: None, folder / "model")
    return prepare(api.ModelSpec(str(folder / "model")), folder / "cache")


def _policy(bits: api.Bits, dtype: api.Dtype) -> api.OffloadPolicy:
    return api.OffloadPolicy(16, schedule="row", kv_bits=bits, prefill_chunk=_CHUNK, compute_dtype=dtype)


@contextmanager
def _loaded(
    model: api.LocalModel, folder: Path, policy: api.OffloadPolicy
) -> Iterator[tuple[OffloadEngine, api.LoadReport]]:
    with tempfile.TemporaryDirectory(dir=folder) as scratch, closing(OffloadEngine()) as engine:
        job = api.Job(Path(scratch), folder / "cache", 1024, 512)
        yield engine, engine.load(model, policy, api.HardwareLimits(), job)
