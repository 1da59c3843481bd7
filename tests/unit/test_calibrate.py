"""What calibration derives from the times it measures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.offload.calibrate.engine import bare_products_s, remaining_share


@given(st.floats(0.1, 100), st.floats(0.1, 100), st.floats(0.15, 1), st.floats(0.15, 1))
def test_the_shares_are_those_that_slowed_the_work(products, reads, of_products, of_reads):
    """Two kinds of work begin together and slow each other until the first is done."""
    first = min(products / of_products, reads / of_reads)
    both = [first + (work - share * first) for work, share in ((products, of_products), (reads, of_reads))]
    assert remaining_share(products, *both) == pytest.approx(of_products)
    assert remaining_share(reads, *reversed(both)) == pytest.approx(of_reads)


def test_noise_gives_neither_more_than_the_whole_rate_nor_none():
    assert remaining_share(alone=2.0, beside=1.9, other=1.0) == 1.0
    assert 0 < remaining_share(alone=1.0, beside=9.0, other=2.0) < 0.2


def test_products_by_themselves_take_their_operations_at_the_rate_of_their_rows():
    """Twelve passes of 96 rows, which meet the head too, and 384 rows of prompts in two: of four layers of opt-1.3b's
    size and 512 words."""
    layers, head = 4 * 12 * 2048**2, 512 * 2048
    seconds = bare_products_s(14, {"96": 1e12, "192": 2e12})
    assert seconds == pytest.approx(2 * ((layers + head) * 12 * 96 / 1e12 + layers * 384 / 2e12))
