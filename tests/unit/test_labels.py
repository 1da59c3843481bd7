"""Labels of scatter charts: none overlaps another, each is near its point, and axes know where values lie."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.labels import GAP, Axis, height_for, labels, layers, spread
from reports.latency import pareto_panel
from reports.summary import summary_rows
from tests.records import cell, record

PLACES = st.lists(st.floats(0.0, 300.0), max_size=20)
POSITIVE = st.floats(1e-3, 1e6)


@given(PLACES)
def test_places_are_apart_inside_and_in_order(wanted):
    places = spread(wanted, 0.0, 300.0)
    assert all(-1e-9 <= place <= 300.0 + 1e-9 for place in places)
    assert all(b - a >= GAP - 1e-9 for a, b in itertools.pairwise(sorted(places)))
    assert all(places[i] < places[j] for i in range(len(wanted)) for j in range(len(wanted)) if wanted[i] < wanted[j])


@given(PLACES)
def test_places_that_are_apart_stay_and_no_small_move_comes_nearer(wanted):
    places = spread(wanted, 0.0, 300.0)
    assert spread(places, 0.0, 300.0) == pytest.approx(places)

    def far(tried: list[float]) -> float:
        return sum((a - b) ** 2 for a, b in zip(tried, wanted, strict=True))

    for i, step in itertools.product(range(len(places)), (-0.5, 0.5)):
        moved = [place + step * (k == i) for k, place in enumerate(places)]
        apart = all(b - a >= GAP for a, b in itertools.pairwise(sorted(moved)))
        if apart and min(moved) >= 0 and max(moved) <= 300:
            assert far(moved) >= far(places) - 1e-6


def test_no_room_is_an_error_and_a_chart_grows():
    with pytest.raises(ValueError, match="labels"):
        spread([1.0] * 30, 0.0, 300.0)
    assert (height_for(5, 320), height_for(30, 320)) == (320, 465)
    assert spread([1.0] * 30, GAP / 2, height_for(30, 320) - GAP / 2)[0] >= GAP / 2


@given(st.lists(POSITIVE, min_size=1, max_size=10))
def test_an_axis_shows_its_values_and_finds_them_again(values):
    axis = Axis.of(values)
    assert axis.logarithmic == (max(values) / min(values) > 30)
    for value in values:
        assert 0 < axis.share(value) < 1
        assert axis.value(axis.share(value)) == pytest.approx(value)


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=16))
def test_no_two_labels_overlap_at_any_width(points):
    x, y = Axis.of(a for a, _ in points), Axis.of(b for _, b in points)
    height = height_for(len(points), 320)
    placed = labels([(str(i), a, b) for i, (a, b) in enumerate(points)], x, y, height, points[::2])
    pixels = sorted(y.share(label["at"]) * height for label in placed)
    assert all(b - a >= GAP - 1e-3 for a, b in itertools.pairwise(pixels)), "each has a line of its own"
    assert pixels[0] >= GAP / 2 - 1e-3 and pixels[-1] <= height - GAP / 2 + 1e-3
    assert all(label["left"] == (x.share(label["x"]) > 0.5) for label in placed)
    assert all(label["moved"] or label["at"] > label["y"] for label in placed[::2]), "no line goes through it"


def test_a_chart_draws_a_line_to_a_label_that_moved():
    rows = summary_rows([record(cell(f"c{i}", seed=i), speed=2.0 + i / 1000) for i in range(4)])
    drawn = pareto_panel(rows).spec["layer"]
    rule, *texts = drawn[-3:]
    assert rule["mark"]["type"] == "rule" and [t["mark"]["align"] for t in texts] == ["left", "right"]
    assert [label["name"] for label in rule["data"]["values"]] == [f"c{i}" for i in (3, 2, 1, 0)]
    assert layers([], "red") == []
