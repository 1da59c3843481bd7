"""What the engine itself takes beside products: measured on jobs with a small model whose weights are all in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, OPTConfig
from transformers.utils import logging

from engines.models.checkpoints import prepare
from engines.offload.engine import OffloadEngine
from harness.api import (
    Bits,
    Dtype,
    GenerationRequest,
    HardwareLimits,
    Job,
    LocalModel,
    ModelSpec,
    OffloadPolicy,
    SamplingParams,
)

_LAYERS, _HIDDEN, _VOCAB = 4, 2048, 512
#: Rows of a pass over prompts, as they are under a limit of a few GiB.
_CHUNK = 256
#: Jobs as (prompts, tokens of each, generated): as many rows in short prompts as in long ones, and passes of few rows.
_SHORT, _LONG, _FEW = (8, 64, 1), (1, 512, 1), (8, 8, 17)
#: A rate where less time was seen than the clock can tell apart.
_LEAST_S = 1e-6


@dataclass(frozen=True)
class Beside:
    """Rates of the host, by their names in Processor: samples of each."""

    prompts: Mapping[str, Sequence[float]]
    cached: Mapping[str, Sequence[float]]
    elementwise: Sequence[float]
    layer_call_s: Sequence[float]
    beside_disk: Sequence[float]


def measure(cache: Path, dtype: Dtype, kinds: Sequence[Bits], rounds: int) -> Beside:
    """With caches of `kinds` of bits, computing in `dtype`; scratch and kernels under `cache`."""
    prompts: dict[str, list[float]] = {}
    cached: dict[str, list[float]] = {}
    elementwise, calls = [], []
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        model = _model(Path(folder))
        apart = Path(folder) / "cache"  # what is converted goes with the folder; kernels stay
        apart.mkdir()
        kernels = cache.resolve() / "kernels"
        kernels.mkdir(exist_ok=True)
        (apart / "kernels").symlink_to(kernels)
        for bits in kinds:
            with _loaded(model, Path(folder), apart, _policy(bits, dtype)) as engine:
                for found in _rounds(engine, rounds):
                    prompts.setdefault(str(bits), []).append(found[0])
                    cached.setdefault(str(bits), []).append(found[1])
                    elementwise.append(found[2])
                    calls.append(found[3])
        shares = _beside_disk(model, Path(folder), apart, dtype, -(-rounds // 2))
    return Beside(prompts, cached, elementwise, calls, shares)


def _beside_disk(model: LocalModel, folder: Path, cache: Path, dtype: Dtype, rounds: int) -> list[float]:
    """Of the rate of products with weights in memory, what is left while others stream; in turns."""
    held, streamed = _policy(16, dtype), replace(_policy(16, dtype), weights=(0.0, 0.0, 1.0))
    found = []
    for _ in range(rounds):
        seconds = []
        for policy in (held, streamed):
            with _loaded(model, folder, cache, policy) as engine:
                _run(engine, _FEW)
                seconds.append(_run(engine, _SHORT)["task_products_s"])
        found.append(min(1.0, seconds[0] / seconds[1]))
    return found


def _rounds(engine: OffloadEngine, rounds: int) -> Iterator[tuple[float, float, float, float]]:
    """FLOP/s of prompts' attention, values/s cached, values/s between products, seconds of a pass in a layer."""
    _run(engine, _SHORT)  # what is made ready on first use
    for _ in range(rounds):
        short, long, few = (_run(engine, job) for job in (_SHORT, _LONG, _FEW))
        rows = _SHORT[0] * _SHORT[1] * _LAYERS
        flops = [4 * count * tokens**2 / 2 * _HIDDEN * _LAYERS for count, tokens, _ in (_SHORT, _LONG)]
        longer = long["task_attention_s"] - short["task_attention_s"]
        # where the short ones were disturbed, all of the long one's time tells the least rate
        rate = (flops[1] - flops[0]) / longer if longer > 0 else flops[1] / long["task_attention_s"]
        storing = max(short["task_attention_s"] - flops[0] / rate, _LEAST_S)
        call = few["task_other_s"] / few["passes"] / _LAYERS
        between = max(short["task_other_s"] - call * short["passes"] * _LAYERS, _LEAST_S)
        yield rate, 2 * rows * _HIDDEN / storing, rows * _HIDDEN / between, call


def _run(engine: OffloadEngine, job: tuple[int, int, int]) -> Mapping[str, float]:
    count, prompt, generated = job
    sampling = SamplingParams(max_tokens=generated, ignore_eos=True)
    ids = torch.randint(8, _VOCAB, (count, prompt)).tolist()  # never the same: the engine remembers prompts
    requests = [GenerationRequest(f"r{i}", tuple(one), sampling) for i, one in enumerate(ids)]
    for _ in engine.generate(requests):
        pass
    return {name: value or 0.0 for name, value in engine.trace().metrics.items()}


def _model(folder: Path) -> LocalModel:
    """Four layers of the size of opt-1.3b, with random weights."""
    config = OPTConfig(
        vocab_size=_VOCAB, hidden_size=_HIDDEN, word_embed_proj_dim=_HIDDEN, ffn_dim=4 * _HIDDEN,
        num_hidden_layers=_LAYERS, num_attention_heads=_HIDDEN // 64, max_position_embeddings=1024,
    )  # fmt: skip
    logging.disable_progress_bar()
    module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    module.save_pretrained(folder / "model")
    return prepare(ModelSpec(str(folder / "model")), folder / "cache")


def _policy(bits: Bits, dtype: Dtype) -> OffloadPolicy:
    return OffloadPolicy(16, schedule="row", kv_bits=bits, prefill_chunk=_CHUNK, compute_dtype=dtype)


@contextmanager
def _loaded(model: LocalModel, folder: Path, cache: Path, policy: OffloadPolicy) -> Iterator[OffloadEngine]:
    """The engine, ready."""
    engine = OffloadEngine()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        try:
            engine.load(model, policy, HardwareLimits(), Job(Path(scratch), cache, 1024, 512))
            yield engine
        finally:
            engine.close()
