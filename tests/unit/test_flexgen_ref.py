"""Where FlexGen's rule puts weights, and how much of them is asked for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.adapters.flexgen_ref import _homes, _largest_share
from engines.models import shapes

OPT = shapes.shape("facebook/opt-1.3b")
#: FlexGen keeps the embeddings twice, at both ends.
WHOLE = 2 * (OPT.params_total + OPT.vocab * OPT.hidden)


def test_all_on_one_tier_is_all_of_the_weights():
    for tier, shares in enumerate([(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)]):
        found = _homes(OPT, shares, 16)
        assert found[tier] == sum(found)
        assert found[tier] == pytest.approx(WHOLE, rel=1e-3)


def test_four_bits_take_four_and_a_half_of_sixteen():
    assert sum(_homes(OPT, (0.0, 1.0, 0.0), 4)) == pytest.approx(WHOLE * 4.5 / 16, rel=0.01)


@given(st.floats(0, 4e9), st.sampled_from([16, 4]))
def test_as_much_as_fits_is_asked_for_and_no_more(free, bits):
    shares = _largest_share(OPT, free, bits, 1)
    assert sum(shares) == pytest.approx(1)
    assert _homes(OPT, shares, bits)[1] <= free
    more = round(shares[1], 2) + 0.01
    if more < 1:
        assert _homes(OPT, (0.0, more, 1 - more), bits)[1] > free


def test_whole_tensors_are_placed_by_their_middle():
    """Of attention's four equal matrices the last is past 87.5 % of its layer, of the feed-forward's two past 75 %."""
    one_in_four = _homes(OPT, (0.0, 0.24, 0.76), 16)[1]
    of_attention, positions = 24 * 2 * OPT.hidden**2, 2 * (OPT.max_context + 2) * OPT.hidden
    assert one_in_four == pytest.approx(of_attention + positions, rel=0.005)
