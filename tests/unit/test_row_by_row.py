"""A router's product of a row: torch's, and the same bits in any company."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.offload.model.row_by_row import RowByRow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(first=st.integers(0, 60), count=st.integers(1, 60), experts=st.sampled_from([4, 7, 64]), bias=st.booleans())
def test_a_row_has_the_same_product_in_any_company(dtype, first, count, experts, bias):
    torch.manual_seed(experts)
    x, weight = torch.randn(120, 48).to(dtype), torch.randn(experts, 48).to(dtype)
    added = torch.randn(experts).to(dtype) if bias else None
    router = weight.as_subclass(RowByRow)
    whole = torch.nn.functional.linear(x, router, added)
    assert type(whole) is torch.Tensor
    company = torch.nn.functional.linear(x[None, first : first + count].clone(), router, bias=added)
    assert torch.equal(company[0], whole[first : first + count])
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if added is None else added.double())
    torch.testing.assert_close(whole.double(), exact, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-2)


def test_a_router_that_computes_in_another_dtype_keeps_it():
    """DeepSeek's casts its weight first."""
    router = torch.randn(4, 8).bfloat16().as_subclass(RowByRow).type(torch.float32)
    x = torch.randn(5, 8)
    alone = torch.cat([torch.nn.functional.linear(row[None], router) for row in x])
    assert isinstance(router, RowByRow) and torch.equal(torch.nn.functional.linear(x, router), alone)
