"""Rotary embeddings in one call: bit by bit torch's, and which of transformers' modules they stand in for."""

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from engines.offload.kernels.rotary import can_rotate, compiled_rotary
from engines.offload.model.fused_rotary import fuse_rotary
from tests.offload import COMMON, load, tiny

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


@pytest.fixture(scope="module")
def rotary(cache):
    return compiled_rotary(cache)


@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(0, 40), st.integers(1, 40), st.integers(0, 9), st.booleans(),
    st.sampled_from([*BITS]), st.floats(-6, 6),
)  # fmt: skip
def test_every_bit_is_transformers_own(rotary, heads, kv_heads, tokens, half, margin, by_token, dtype, size):
    """Whatever the layout and the size: halves that fill no vector, rows apart, zeros of either sign."""
    torch.manual_seed(half)

    def random(count):
        shape = (1, tokens, count, 2 * half + margin) if by_token else (1, count, tokens, 2 * half + margin)
        values = (torch.randn(shape) * 10**size).to(dtype)[..., : 2 * half]
        return values.transpose(1, 2) if by_token else values

    query, key = random(heads), random(kv_heads)
    cos, sin = (torch.randn(1, tokens, 2 * half).to(dtype) for _ in range(2))
    cos[:, :1] = 0.0
    assert can_rotate(query, key, cos, sin)
    for found, expected in zip(rotary(query, key, cos, sin), apply_rotary_pos_emb(query, key, cos, sin), strict=True):
        assert torch.equal(found.contiguous().view(BITS[dtype]), expected.contiguous().view(BITS[dtype]))


@pytest.mark.parametrize("dtype", BITS)
def test_tokens_are_rotated_alike_on_several_threads(rotary, dtype):
    query, key = (torch.randn(1, heads, 700, 64).to(dtype) for heads in (3, 1))
    cos, sin = (torch.randn(1, 700, 64).to(dtype) for _ in range(2))
    assert all(map(torch.equal, rotary(query, key, cos, sin), apply_rotary_pos_emb(query, key, cos, sin)))


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, c, s: (q.half(), k.half(), c.half(), s.half()),
        lambda q, k, c, s: (q.bfloat16(), k.bfloat16(), c, s),
        lambda q, k, c, s: (q, k, c[..., :8], s[..., :8]),
        lambda q, k, c, s: (q.expand(2, -1, -1, -1), k.expand(2, -1, -1, -1), c, s),
        lambda q, k, c, s: (q[0], k[0], c, s),
        lambda q, k, c, s: (q[..., ::2], k[..., ::2], c[..., ::2], s[..., ::2]),
        lambda q, k, c, s: (q[..., :15], k[..., :15], c[..., :15].contiguous(), s[..., :15].contiguous()),
        lambda q, k, c, s: (q, k[:, :, :2], c, s),
    ],
)
def test_other_operands_are_not_the_kernel_s(change):
    operands = torch.ones(1, 2, 3, 16), torch.ones(1, 1, 3, 16), torch.ones(1, 3, 16), torch.ones(1, 3, 16)
    assert can_rotate(*operands)
    assert not can_rotate(*change(*operands))


#: By architecture: what its configuration has beside COMMON, and whether its function computes what LLaMA's does.
KINDS = {
    "llama": ({"intermediate_size": 160, "num_key_value_heads": 2}, True),
    "gpt_neox": ({"intermediate_size": 160}, True),  # of a part of each head, which its function cuts off
    "glm": ({"intermediate_size": 160, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}, False),
    "cohere": ({"intermediate_size": 160, "num_key_value_heads": 2}, False),  # rounds once
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_the_kernel_has_its_own_logits_to_the_last_bit(rotary, kind):
    more, is_same = KINDS[kind]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **COMMON, **more)
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    calls = []

    def counted(*operands):
        calls.append(operands)
        return rotary(*operands)

    ids = torch.arange(5, 12)[None]
    with torch.inference_mode():
        before = module(ids).logits
        layers = COMMON["num_hidden_layers"]
        assert fuse_rotary(module, counted, torch.bfloat16) == ((layers, 0) if is_same else (0, layers))
        calls.clear()
        assert torch.equal(module(ids).logits, before)
    assert len(calls) == (COMMON["num_hidden_layers"] if kind == "llama" else 0)


@pytest.mark.parametrize(("kind", "told"), [("llama", False), ("cohere", True)])
def test_a_load_tells_where_the_kernel_is_not_used(kind, told, tmp_path, cache):
    engine, report = load(tiny(tmp_path / "m", kind, **{**COMMON, **KINDS[kind][0]}), cache)
    engine.close()
    assert any("rotary embeddings in 3 of 3 layers" in note for note in report.notes) == told
