"""Every lane in short: `python -m tests.faults LANE` runs it at length."""

import os
import random
from pathlib import Path

import pytest

from tests.faults import shim as shims
from tests.faults.bench import Bench
from tests.faults.lanes import LANES, trial_of
from tests.faults.power import Disk, Entry

#: Seeds of the trials here, which together take minutes. Disk faults at calls that are spread over each job.
SHORT = {
    "kill": range(4),
    "disk_full": (0, 2, 8, 13),
    "read_errors": range(4),
    "power_cut": range(4),
    "clock": range(3),
    "crowd": range(3),
    "stop": range(3),
    "soak": range(1),
    "limits": range(1),
}
TRIALS = [(lane, seed) for lane, seeds in SHORT.items() for seed in seeds]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """Where other tests share the machine, a process may need longer to end; a stop and a soak are short."""
    try:
        shims.built()
    except shims.NoShimError as exc:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(exc))
    return Bench(tmp_path_factory.mktemp("faults"), patience_s=20.0, stop_s=3.0, minutes=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(("lane", "seed"), TRIALS, ids=[f"{lane}-{seed}" for lane, seed in TRIALS])
def test_a_lane_in_short(bench, lane, seed):
    trial_of(lane)(bench, seed)


def test_every_lane_is_tried_in_short():
    assert SHORT.keys() == LANES.keys()
    assert all((Path(__file__).with_name(f"{lane}.py")).exists() for lane in LANES)


def test_growth_is_told_from_noise():
    from tests.faults.soak import growth

    rng = random.Random(0)
    steady = [{"rss_bytes": 3e8 + rng.uniform(-2e7, 2e7), "threads": 9.0} for _ in range(40)]
    assert growth(steady) == {}
    leaky = [{"rss_bytes": s["rss_bytes"] + 4e6 * i, "threads": 9.0 + i // 5} for i, s in enumerate(steady)]
    assert growth(leaky).keys() == {"rss_bytes", "threads"}
    with pytest.raises(AssertionError, match="too few"):
        growth(steady[:4])


FILE = "/d/f"


def disk(*calls):
    made = Disk(Path("/d"))
    for call, path, *more in calls:
        to, offset, data = (*more, *("", 0, b"")[len(more) :])
        made.apply(Entry(call, path, to, offset, data))
    return made


def states(made, tmp_path, count=400):
    """Contents of /d/f after so many cuts; None where it is not there."""
    found = set()
    for seed in range(count):
        target = tmp_path / str(seed)
        made.cut(random.Random(seed), target)
        path = target / "f"
        found.add(path.read_bytes() if path.exists() else None)
    return found


WRITTEN = (("create", FILE), ("write", FILE, "", 0, b"ab\n"))


def test_a_cut_may_lose_a_name_or_data_that_was_not_synced(tmp_path):
    assert {None, b"", b"ab\n", b"\0\0\0"} <= states(disk(*WRITTEN), tmp_path)


def test_what_was_synced_stays_once_its_folder_was_synced_too(tmp_path):
    assert states(disk(*WRITTEN, ("sync", FILE)), tmp_path / "a") == {None, b"ab\n"}
    assert states(disk(*WRITTEN, ("sync", FILE), ("sync", "/d")), tmp_path / "b") == {b"ab\n"}


def test_a_rename_may_outlive_data_that_was_not_synced(tmp_path):
    new = (("create", "/d/new"), ("write", "/d/new", "", 0, b"new"))
    old = (*WRITTEN, ("sync", FILE), ("sync", "/d"))
    renamed = ("rename", "/d/new", FILE)
    assert {b"ab\n", b"new", b""} <= states(disk(*old, *new, renamed), tmp_path / "a")
    assert states(disk(*old, *new, ("sync", "/d/new"), renamed), tmp_path / "b") == {b"ab\n", b"new"}


def test_lines_before_the_last_were_acknowledged():
    two = (*WRITTEN, ("sync", FILE), ("write", FILE, "", 3, b"cd\n"))
    assert disk(*two).acknowledged(Path(FILE)) == b"ab\n"
    assert disk(*WRITTEN).acknowledged(Path(FILE)) == b""
