"""Every lane in short: `python -m tests.load LANE` runs it at length."""

import pytest

from tests.load.bench import Bench
from tests.load.lanes import LANES

#: What is smaller here; each takes some seconds.
SHORT = {
    "crowd": {"clients": 50, "requests": 600},
    "overhead": {"clients": 8, "requests": 40, "turns": 1},
    "connections": {"connections": 2000},
    "bodies": {"body_mib": 24},
    "slow_reader": {"seconds": 3.0},
}


def test_every_lane_is_tried_in_short():
    assert SHORT.keys() == LANES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("lane", SHORT)
def test_a_lane_in_short(lane, tmp_path):
    LANES[lane](Bench(tmp_path, **SHORT[lane]))


@pytest.mark.slow
def test_the_offload_engine_s_clients_in_short(tmp_path):
    """With a KV cache that does not hold all who ask."""
    LANES["crowd"](Bench(tmp_path, engine="offload", memory="128MiB", clients=40, requests=400))
