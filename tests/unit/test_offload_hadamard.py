"""Turning keys and values: orthogonal, its own inverse, the same bits whatever is turned with a row."""

import pytest
import torch

from engines.offload.kernels.hadamard import compiled_hadamard, hadamard
from tests.offload import hadamard_matrix, with_kernels


@pytest.mark.parametrize(("columns", "size"), [(1, 1), (7, 1), (24, 8), (64, 64), (80, 16), (128, 128)])
def test_it_is_a_hadamard_matrix_in_parts(columns, size):
    x = torch.randn(3, 5, columns)
    matrix = torch.block_diag(*[hadamard_matrix(size)] * (columns // size))
    torch.testing.assert_close(hadamard(x).double(), x.double() @ matrix.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hadamard(hadamard(x)), x, rtol=1e-5, atol=1e-5)


def test_a_rotated_row_does_not_depend_on_the_others():
    x = torch.randn(50, 64).bfloat16()
    assert torch.equal(hadamard(x)[17], hadamard(x[17]))


@pytest.mark.parametrize("columns", [1, 2, 7, 24, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_kernel_is_the_same_to_the_bit(tmp_path, columns, dtype):
    x = torch.randn(3, 5, columns).to(dtype).transpose(0, 1)
    before = x.clone()
    assert torch.equal(compiled_hadamard(with_kernels(tmp_path), 2)(x), hadamard(x))
    assert torch.equal(x, before)


def test_one_large_column_no_longer_decides_the_step():
    x = torch.randn(100, 64)
    x[:, 3] += 40
    assert (hadamard(x).amax(1) - hadamard(x).amin(1)).max() < 0.6 * (x.amax(1) - x.amin(1)).min()
