"""The order of launches: repeats in rounds, each of which begins with another cell."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from harness.api import RunRecord
from harness.run.progress import QuietProgress, describe, duration
from harness.run.steps import Step, interleave
from tests.records import FAKE, cell, failed, record


def test_three_cells_take_turns() -> None:
    a, b, c = (replace(FAKE, name=name, repeats=count) for name, count in (("a", 3), ("b", 1), ("c", 4)))
    order = [(step.cell.name, step.repeat) for step in interleave([a, b, c])]
    assert order == [("a", 0), ("b", 0), ("c", 0), ("c", 1), ("a", 1), ("c", 2), ("a", 2), ("c", 3)]
    assert interleave([]) == []


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_each_launch_comes_once_and_rounds_begin_in_turn(repeats: list[int]) -> None:
    cells = [replace(FAKE, name=str(i), repeats=count) for i, count in enumerate(repeats)]
    steps = interleave(cells)
    assert sorted((int(s.cell.name), s.repeat) for s in steps) == [
        (i, r) for i, n in enumerate(repeats) for r in range(n)
    ]
    assert [s.repeat for s in steps] == sorted(s.repeat for s in steps), "a round ends before the next begins"
    for r in range(max(repeats)):
        turn = [(i + r) % len(cells) for i in range(len(cells))]
        assert [int(s.cell.name) for s in steps if s.repeat == r] == [i for i in turn if r < repeats[i]]


def test_the_time_left_is_by_each_cells_own_launches_and_by_all_for_a_cell_not_timed_yet() -> None:
    a, b = (replace(FAKE, name=name) for name in "ab")
    progress = QuietProgress()
    progress.planned([Step(a, 0), Step(a, 1), Step(b, 0)], 0)
    assert progress.left(0.0) == ""
    progress.finished(Step(a, 0), RunRecord(a, a.fingerprint(), 0, "ok", wall_s=40.0))
    assert (progress.left(0.0), progress.left(10.0)) == ("about 80 s", "about 70 s")
    progress.finished(Step(b, 0), RunRecord(b, b.fingerprint(), 0, "ok", wall_s=200.0))
    assert (progress.left(0.0), progress.left(50.0)) == ("40 s", "0 s")
    assert (duration(89.4, True), duration(90.0, True), duration(600.0, False)) == ("89 s", "2 min", "about 10 min")


def test_a_launch_is_told_in_a_line() -> None:
    assert describe(record(cell())) == "accelerate-float32 repeat 1/3: 2 tok/s in 60 s"
    told = describe(failed(cell(expect="oom_host"), "oom_host", "killed", 1))
    assert told == "accelerate-float32 repeat 2/3: oom_host (expected): killed"
