"""Operations and bytes that bounds and predictions stand on: as torch counts them, and as papers have them."""

import statistics

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from engines.common import machine_rates
from engines.models.shapes import shape
from engines.planning.workload import Lengths, kv_bytes, model_weight_bytes
from harness.api import ModelShape, OffloadPolicy
from harness.api.machine import mean_cached_length

OPT_175B = "facebook/opt-175b"


def test_operations_are_those_that_torch_counts() -> None:
    """Of a model with fewer key and value heads, wide ones; transformers multiplies masked positions as well, so each
    of the tokens attends to all of them."""
    hidden, ffn, layers, heads, kv_heads, dim, vocab, tokens = 48, 80, 3, 4, 2, 16, 101, 23
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=dim, vocab_size=vocab, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    matrices = [p.numel() for p in model.model.layers[0].parameters() if p.dim() == 2]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, tokens, dtype=torch.long), logits_to_keep=1, use_cache=False)
    ours = ModelShape("llama", layers, hidden, ffn, heads, kv_heads, dim, vocab, 64, sum(matrices),
                      sum(p.numel() for p in model.parameters()))  # fmt: skip
    assert counter.get_total_flops() == ours.flops(tokens, tokens, 1)
    assert ours.attention_params == sum(matrices) - 3 * hidden * ffn
    assert ours.head_params == vocab * hidden


@given(st.integers(1, 64), st.integers(1, 600), st.integers(1, 40))
def test_a_block_is_its_passes(sequences: int, prompt: int, generated: int) -> None:
    """The prompts, whose tokens see half of them; then each token but the first sees all that came before, and
    itself."""
    model = shape("meta-llama/Meta-Llama-3-8B")
    prefill, decode = model.block_flops(sequences, prompt, generated)
    assert prefill == model.flops(sequences * prompt, prompt / 2, sequences)
    passes = (model.flops(sequences, prompt + i, sequences) for i in range(1, generated))
    assert decode == pytest.approx(sum(passes))


def test_bytes_of_weights_and_cache_are_flexgens() -> None:
    """FlexGen, section 3: OPT-175B has 325 GB of weights, and 512 sequences of 512 + 32 tokens a KV cache of 1.2 TB,
    3.8 times as much; its tera and giga are powers of two."""
    model, exact = shape(OPT_175B), OffloadPolicy()
    cache = 512 * (512 + 32) * model.kv_bytes_per_token(2)
    assert cache / 2**40 == pytest.approx(1.2, abs=0.05)
    assert model_weight_bytes(model, exact) / 2**30 == pytest.approx(325, rel=0.01)
    assert cache / model_weight_bytes(model, exact) == pytest.approx(3.8, abs=0.1)
    assert model.num_layers * kv_bytes(model, exact) == model.kv_bytes_per_token(2)
    packed = OffloadPolicy(weight_bits=4, kv_bits=4, group_size=64)  # and a pair of float16 for each group
    assert kv_bytes(model, packed) / kv_bytes(model, exact) == pytest.approx((4 + 32 / 64) / 16)


@given(st.lists(st.tuples(st.integers(1, 2000), st.integers(1, 500)), min_size=1, max_size=20))
def test_a_request_holds_its_prompt_and_half_of_its_answer(lengths: list[tuple[int, int]]) -> None:
    exact = statistics.mean(prompt + generated / 2 for prompt, generated in lengths)
    assert exact - 1.5 < mean_cached_length(lengths) <= exact
    assert all(Lengths(*each).mean_cached == each[0] + each[1] / 2 for each in lengths)


class Clock:
    """A clock on which a millisecond passes whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


def test_a_probe_s_samples_are_operations_by_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever multiplies: on a clock that ticks once in each product all samples of as many rows are alike."""
    monkeypatch.setattr("time.perf_counter", Clock())
    rates = machine_rates.gemm_rates(("float32", "bfloat16", "int8"), [1, 6], k=64, n=32, threads=1, seconds=5)
    for curve in rates.values():
        for rows, samples in curve.items():
            assert len(samples) % 5 == 0, "five of each way to multiply"
            assert samples == pytest.approx([2 * int(rows) * 64 * 32 / 1e-3] * len(samples))
    assert len(rates["int8"]["1"]) < len(rates["float32"]["1"]), "numpy multiplies float32 too"
