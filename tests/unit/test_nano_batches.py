"""Pipelines of nano-batches: against NanoFlow's published table, and what must hold of any."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.planning.interference import LEAST_UNITS, Interference
from engines.planning.nano_layer import (
    PUBLISHED_CUT,
    layer_operations,
    measured_layer,
    published_interference,
    published_layer,
)
from engines.planning.nano_search import search, search_measured
from harness import api
from tests.pipelines import check_pipeline

#: Layers that are searched here, of the 80 whose pass is published.
LAYERS, ALL = 8, 80
#: A pass of table 2 has 2048 rows. NanoFlow reaches 68.5 % of 1857 token/s on each of 8 devices; and its ablation has
#: 1.07 times the throughput without overlap where network overlaps, and 1.17 times where memory does too. The
#: operations of table 2 one after the other take 225.05 ms.
BY_THROUGHPUT, SEQUENTIAL = 2048 / (8 * 1857 * 0.685), 0.22505
#: Not published in our record: decode attention that gains from few multiprocessors as the network's kernels do.
AS_NETWORK = {35 / 108: 0.92}


@pytest.mark.parametrize(
    ("memory", "cut", "published"),
    [({}, 1.0, BY_THROUGHPUT), (AS_NETWORK, 1.0, SEQUENTIAL / 1.17), (AS_NETWORK, PUBLISHED_CUT, BY_THROUGHPUT)],
    ids=["network", "memory", "memory-and-the-cost-of-cuts"],
)  # fmt: skip
def test_on_nanoflows_table_the_pipeline_is_no_longer_than_published(memory, cut, published):
    operations, interference = published_layer(cut), published_interference(memory)
    assert sum(o.seconds for o in operations) * ALL == pytest.approx(SEQUENTIAL)
    found = search(operations, interference, LAYERS)
    check_pipeline(found, operations, interference, LAYERS)
    assert found.length_s * ALL / LAYERS <= published
    assert found.nano_batches > 1


SECONDS = st.floats(0.01, 10)


@st.composite
def layers(draw):
    names = ("ReadWeights", "GEMM-KQV", "DecodeAttention", "PrefillAttention", "GEMM-O", "AllReduce-O", "GEMM-UG",
             "GEMM-D", "AllReduce-D")  # fmt: skip
    seconds = {name: draw(SECONDS) for name in names if name.startswith("GEMM") or draw(st.booleans())}
    return layer_operations(seconds, {"compute": {2: draw(st.floats(1, 1.3)), 4: draw(st.floats(1.3, 1.6))}})


@st.composite
def tables(draw):
    point = st.tuples(st.floats(0.05, 0.9), st.floats(0.05, 1))
    return Interference({kind: draw(st.lists(point, max_size=2)) for kind in ("memory", "network", "disk")})


@settings(max_examples=8, deadline=None)
@given(layers(), tables(), st.integers(1, 2))
def test_of_any_pipeline(operations, interference, count):
    check_pipeline(search(operations, interference, count), operations, interference, count)


def test_what_gains_nothing_from_fewer_units_is_not_cut():
    """Units are then worth as much anywhere, and cuts cost."""
    operations = layer_operations({"GEMM-KQV": 1, "DecodeAttention": 2, "GEMM-O": 1, "GEMM-UG": 3, "GEMM-D": 1})
    found = search(operations, Interference({}), 2)
    assert found.nano_batches == 1
    assert found.length_s == pytest.approx(found.sequential_s) == pytest.approx(16)


def test_reads_that_cost_products_little_hide_beneath_them():
    operations = layer_operations({"ReadWeights": 5, "GEMM-KQV": 2, "GEMM-O": 1, "GEMM-UG": 2, "GEMM-D": 1})
    found = search(operations, Interference({"disk": [(0.05, 1.0)]}), 4)
    assert found.length_s < 1.05 * (5 + 4 * 6 / 0.95)


@given(tables(), st.sampled_from(["memory", "network", "disk", "compute"]), st.floats(0.02, 1), st.floats(0.02, 1))
def test_more_units_never_run_slower(interference, kind, units, more):
    few, many = sorted((units, more))
    assert 0 < interference.performance(kind, few) <= interference.performance(kind, many) <= 1
    assert interference.performance("compute", few) == pytest.approx(few)


def test_a_measured_layer_has_the_weights_of_its_shape():
    shape = api.ModelShape("llama", 3, 64, 160, 4, 2, 16, 512, 128, 64 * 16 * 12 + 3 * 64 * 160, 10**6)
    times = api.LayerTimes(1e-9, 1e-5, 0.0, {1: 1.0, 2: 1.1, 4: 1.2}, {"memory": ((0.4, 0.8),)})
    operations = {operation.name: operation for operation in measured_layer(shape, times)}
    products = [operation.seconds for operation in operations.values() if operation.kind == "compute"]
    assert sum(products) == pytest.approx(shape.params_per_layer * 1e-9)
    assert operations["GEMM-D"].seconds == pytest.approx(64 * 160 * 1e-9)
    assert "ReadWeights" not in operations
    pipeline = search_measured(shape, times)
    assert {operation.layer for operation in pipeline.operations} == {0, 1, 2}
    assert all(operation.units >= LEAST_UNITS for operation in pipeline.operations)


@pytest.mark.parametrize("point", [(0.0, 0.5), (1.0, 0.5), (0.5, 1.1), (0.5, 0.0)])
def test_a_table_of_interference_has_shares(point):
    with pytest.raises(ValueError, match="of the units"):
        Interference({"memory": [point]})
