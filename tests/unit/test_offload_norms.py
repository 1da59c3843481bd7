"""Norms in one call: against float64, and which of transformers' modules they stand in for."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from engines.offload.kernels.rms_norm import DTYPES, compiled_rms_norm, rms_norm
from engines.offload.model.fused_norms import fuse_rms_norms


@pytest.fixture(scope="module")
def norm(cache):
    return compiled_rms_norm(cache)


@given(
    st.integers(0, 5), st.integers(1, 70), st.integers(0, 9), st.sampled_from(DTYPES), st.sampled_from((1e-6, 1e-2)),
    st.floats(-6, 6),
)  # fmt: skip
def test_rows_are_normed_as_in_float64(norm, rows, columns, margin, dtype, epsilon, size):
    torch.manual_seed(columns)
    wide = (torch.randn(rows, columns + margin) * 10**size).to(dtype)
    x, weight = wide[:, :columns], torch.randn(columns).to(dtype)
    exact = weight.double() * x.double() / (x.double().square().mean(1, keepdim=True) + epsilon).sqrt()
    # what is rounded twice, and in bfloat16 once more when it is multiplied
    torch.testing.assert_close(norm(x, weight, epsilon).double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_normed_alike_in_any_company(norm, dtype):
    x, weight = torch.randn(300, 333).to(dtype), torch.randn(333).to(dtype)  # so many that threads share them
    alone = torch.cat([norm(row[None], weight, 1e-5) for row in x])
    assert torch.equal(norm(x, weight, 1e-5), alone)
    assert torch.equal(norm(x.view(3, 100, 333), weight, 1e-5), alone.view(3, 100, 333))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_none(norm, dtype, value):
    x, weight = torch.ones(2, 20).to(dtype), torch.ones(20).to(dtype)
    x[1, 17] = value
    torch.testing.assert_close(norm(x, weight, 1e-5), rms_norm(x, weight, 1e-5), equal_nan=True, rtol=1e-2, atol=0)


def with_weight(module, dtype=torch.bfloat16):
    torch.manual_seed(0)
    module.weight = nn.Parameter(torch.randn(module.weight.shape).to(dtype), requires_grad=False)
    return module


def fused(module, norm):
    """The module, what it gave before, and of how many norms in it the method was replaced."""
    x = torch.randn(7, 24).to(module.weight.dtype)
    before = module(x)
    return x, before, fuse_rms_norms(nn.Sequential(module), norm)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norms_of_llama_are_computed_in_one_call(norm, dtype):
    module = with_weight(LlamaRMSNorm(24, 1e-5), dtype)
    x, before, count = fused(module, norm)
    assert count == 1
    # each of the two is up to two float32 roundings off; in bfloat16 that decides a rounding here and there
    off = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(module(x), before, rtol=off, atol=0)
    assert torch.equal(module(hidden_states=x), norm(x, module.weight, 1e-5))
    assert module(x.float()).dtype == torch.float32, "by its own method where the dtypes differ"


class Gated(LlamaRMSNorm):
    """Takes more than rows, as the norms of some linear attentions do."""

    def forward(self, hidden_states, gate=None):
        return super().forward(hidden_states)


@pytest.mark.parametrize("kind", [Gemma2RMSNorm, GptOssRMSNorm, Gated, partial(nn.LayerNorm, bias=False)])
def test_norms_that_compute_something_else_stay(norm, kind):
    module = with_weight(kind(24, eps=1e-5))
    x, before, count = fused(module, norm)
    assert count == 0
    assert torch.equal(module(x), before)
