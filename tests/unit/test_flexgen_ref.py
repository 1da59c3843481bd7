"""The weight placement that we compute for FlexGen follows FlexGen's rule and fits the budget."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.adapters.flexgen_ref import _most_in_memory, _placement, _weights_by_tier
from engines.common.work_memory import SLACK_BYTES, working_bytes
from engines.models import shapes
from harness import api

OPT = shapes.shape("facebook/opt-1.3b")
#: FlexGen keeps the embeddings twice, at both ends.
WHOLE = 2 * (OPT.params_total + OPT.vocab * OPT.hidden)


def test_all_on_one_tier_is_all_of_the_weights():
    for tier, shares in enumerate([(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)]):
        by_tier = _weights_by_tier(OPT, shares, 16)
        assert by_tier[tier] == sum(by_tier)
        assert by_tier[tier] == pytest.approx(WHOLE, rel=1e-3)


def test_four_bits_and_their_scales_take_four_and_a_half_bits_a_weight():
    assert sum(_weights_by_tier(OPT, (0.0, 1.0, 0.0), 4)) == pytest.approx(WHOLE * 4.5 / 16, rel=0.01)


@given(st.floats(-1, 4e9), st.floats(0, 4e9), st.sampled_from([16, 4]))
def test_the_device_then_the_host_get_the_largest_shares_that_fit(device, host, bits):
    shares = _most_in_memory(OPT, device, host, bits)
    assert sum(shares) == pytest.approx(1)
    by_tier = _weights_by_tier(OPT, shares, bits)
    assert by_tier[0] <= max(device, 0)
    assert by_tier[1] <= host
    first, second = (round(100 * share) for share in shares[:2])
    if first < 100:
        assert _weights_by_tier(OPT, ((first + 1) / 100, 0.0, (99 - first) / 100), bits)[0] > device
    if first + second < 100:
        more = (first / 100, (second + 1) / 100, (99 - first - second) / 100)
        assert _weights_by_tier(OPT, more, bits)[1] > host


def test_without_a_device_no_share_is_on_one_and_with_room_for_all_each_is():
    assert _most_in_memory(OPT, math.inf, 0, 16) == (1.0, 0.0, 0.0)
    assert _most_in_memory(OPT, -1, math.inf, 16) == (0.0, 1.0, 0.0)


@pytest.mark.parametrize(("host", "on_disk"), [(16 << 30, False), (9 << 30, True)])
@pytest.mark.parametrize("cache", [None, (0.0, 1.0, 0.0)])
def test_weights_lie_beside_the_cache_and_what_flexgen_itself_takes(tmp_path, host, on_disk, cache):
    """Eight GiB of the host's memory are its disk's copy threads'."""
    device, policy = 2 << 30, api.OffloadPolicy(gpu_batch_size=4, cache=cache)
    limits, job = api.HardwareLimits(host_memory=host, device_memory=device), api.Job(tmp_path, tmp_path, 512, 4)
    shares = _placement(OPT, policy, limits, job, device)[0]
    by_tier = _weights_by_tier(OPT, shares, 16)
    kv, work = working_bytes(OPT, 4, 512, 2)
    layers = 4 * OPT.vocab * OPT.hidden  # the embedding is the largest
    fast_kv, host_kv = (kv, 0) if cache is None else (0, kv)
    percent = WHOLE / 100
    left = device - (by_tier[0] + fast_kv + work + layers + SLACK_BYTES)
    assert 0 <= left < 2 * max(percent, OPT.vocab * OPT.hidden)
    assert by_tier[1] + host_kv + (8 << 30) + SLACK_BYTES <= host
    assert (by_tier[2] > 0) == on_disk
    if on_disk:
        assert host - (by_tier[1] + host_kv + (8 << 30) + SLACK_BYTES) < 2 * max(percent, OPT.vocab * OPT.hidden)


def test_without_a_device_weights_lie_on_the_host_and_the_disk(tmp_path):
    limits, job = api.HardwareLimits(host_memory=2 << 30), api.Job(tmp_path, tmp_path, 512, 4)
    shares, *others = _placement(OPT, api.OffloadPolicy(gpu_batch_size=4), limits, job, None)
    kv, work = working_bytes(OPT, 4, 512, 2)
    assert others == [(0.0, 1.0, 0.0)] * 2
    assert shares[0] == 0
    assert 0 < shares[1] < 1
    on_host = _weights_by_tier(OPT, shares, 16)[1]
    left = (2 << 30) - (on_host + kv + work + 4 * OPT.vocab * OPT.hidden + SLACK_BYTES)
    assert 0 <= left < 2 * OPT.vocab * OPT.hidden


def test_the_middle_of_a_tensor_decides_its_tier():
    """The middle of attention's last matrix is at 87.5 % of its layer, that of the feed-forward's last one at 75 %."""
    on_host = _weights_by_tier(OPT, (0.0, 0.24, 0.76), 16)[1]
    attention, positions = 24 * 2 * OPT.hidden**2, 2 * (OPT.max_context + 2) * OPT.hidden
    assert on_host == pytest.approx(attention + positions, rel=0.005)
