"""The order of launches: repeats in rounds, each of which begins with another cell."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from harness.run.steps import interleave
from tests.records import FAKE


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
