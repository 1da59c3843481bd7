"""`python -m engines.offload.kernels` prints a row for every kernel, whatever weights it draws."""

import pytest
import torch

from engines.offload.kernels import __main__ as table
from engines.offload.kernels.kernel_sets import HostKernels
from engines.offload.memory.storage import Panels


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Sizes that take no time."""
    sizes = {"_ROUNDS": 1, "_LAYERS": 1, "_LAYER": ((64, 128), (48, 64)), "_HOT_ROWS": 4, "_HOT": 64, "_COPIED": 4096,
             "_ATTENTIONS": (("multi-head", 2, 4, 4, 64), ("2 heads a group", 2, 4, 2, 64))}  # fmt: skip
    for name, size in sizes.items():
        monkeypatch.setattr(table, name, size)


def cells(lines):
    """The first two cells of each row below a table's head."""
    return [tuple(cell.strip() for cell in line.split("|")[1:3]) for line in list(lines)[2:]]


def test_each_way_of_storing_weights_has_a_row_for_each_number_of_rows(cache):
    kinds = ("12 bit, exact", "16 bit", "8 bit", "4 bit", "3 bit", "8 bit, int8", "4 bit, int8")
    expected = [(str(rows), kind) for rows in (1, 4, 8, 16, 64, 256) for kind in kinds]
    assert cells(table._products(cache, 2)) == expected


def test_attention_has_a_row_for_each_way_of_storing_keys_and_values(cache):
    names = [name for name, _ in cells(table._attention(cache, 2))]
    assert names == [f"{heads}, {bits} bit" for heads in ("multi-head", "2 heads a group") for bits in (16, 8, 4, 3)]


def test_weights_that_do_not_fit_in_twelve_bits_are_drawn_again(cache, monkeypatch):
    """Of a layer's normally distributed matrices some do not: the table then ended in an assertion."""
    pack, drawn = HostKernels(cache, 1).weight_packer(Panels(exact12=True)), []

    def packs_every_other(x: torch.Tensor) -> torch.Tensor | None:
        drawn.append(tuple(x.shape))
        return pack(x) if len(drawn) % 2 == 0 else None

    kernels = HostKernels(cache, 1)
    monkeypatch.setattr(kernels, "weight_packer", lambda stored: packs_every_other)
    packed = table._panels(Panels(exact12=True), kernels)
    assert drawn == [(64, 128), (64, 128), (48, 64), (48, 64)]
    assert [tile.nbytes for tile in packed] == [Panels(exact12=True).matrix_bytes(*size) for size in table._LAYER]
