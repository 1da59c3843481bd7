"""Power and cost: joules of counters beside declared watts, and when the joules are not the cell's."""

from collections.abc import Sequence

import pytest

from harness.api import Measurement, Prices, RunRecord
from reports.power import energy_of, power_table
from reports.summary import summary_rows
from tests.records import PROVENANCE, cell, demo, record, report


def metered(
    joules: float | None = 640.0,
    seconds: float = 10.0,
    own: float | None = 19.0,
    other: float = 0.5,
    device: float | None = None,
    prices: Prices | None = None,
) -> RunRecord:
    """A launch of 64 tokens at 2 tokens a second, on two cores."""
    counted = {"energy_j": joules, "device_energy_j": device, "wall_s": seconds, "cpu_own_s": own, "cpu_other_s": other}
    base = record(cell())
    measurements = tuple(
        Measurement(name, "", () if value is None else (value,), "generate") for name, value in counted.items()
    )
    machine = {**PROVENANCE, "machine": {**PROVENANCE["machine"], "cores_usable": 2}}
    metrics = base.metrics | (prices.metrics(2.0) if prices else {})
    return record(cell(), measurements=measurements, metrics=metrics, provenance=machine)


def line(records: Sequence[RunRecord]) -> tuple[list[str], str]:
    """The figures and the verdict of the table's only row."""
    table = power_table(summary_rows(records))
    ((_, *figures, verdict),) = table.bodies[0].rows
    return [c.text for c in figures], verdict.text


def test_measured_beside_declared():
    figures, verdict = line([metered(prices=Prices(power=250, electricity=0.2))])
    assert figures == ["64", "250", "10", "125", "6.94"]  # W, W, J/token, J/token, dollars a million tokens
    assert verdict == (
        "valid for CPU packages (RAPL) over 10 s; 97% of the CPU time used was its own; 95% of the cores' time; "
        "26% of the declared power"
    )


def test_declared_watts_are_each_launch_s_own_quotient():
    """The same profile, whatever the launches' speeds are."""
    launches = [record(cell(), i, speed, metrics=Prices(power=100).metrics(speed) | record(cell(), i, speed).metrics)
                for i, speed in enumerate((10.0, 20.0))]  # fmt: skip
    figures, _ = line(launches)
    assert figures[1] == "100"


def test_a_device_counts_too_and_hire_is_a_cost():
    figures, verdict = line([metered(device=360.0, prices=Prices(hire=3.6))])
    assert figures == ["100", "\u2013", "15.6", "\u2013", "500"]
    assert verdict.startswith("valid for CPU packages (RAPL) and device (NVML) over 10 s")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"seconds": 0.5, "own": 0.9, "other": 0.0}, "not valid: 0.50 s are shorter than counters need (1 s)"),
        (
            {"other": 5.0},
            "not valid: others took 21% of the CPU time, and a counter cannot tell whose joules are whose",
        ),
        ({"own": None}, "not valid: whose CPU time it was is not recorded"),
    ],
)
def test_joules_that_are_not_the_cells_are_said_to_be(changes, why):
    _, verdict = line([metered(**changes)])
    assert verdict.replace("0.500 s", "0.50 s").startswith(why)


def test_declared_only_and_nothing_at_all(tmp_path):
    figures, verdict = line([metered(None, prices=Prices(power=250))])
    assert figures == ["\u2013", "250", "\u2013", "125", "\u2013"]
    assert verdict.startswith("not measured: no counter")
    assert power_table(summary_rows([metered(None)])) is None and power_table(summary_rows(demo())) is None
    assert "<span>Power and cost" not in report(tmp_path / "without", demo())
    assert "<span>Power and cost: measured" in report(tmp_path / "with", [metered()])


@pytest.mark.parametrize("bad", [{"joules": -1.0}, {"seconds": 0.0}, {"joules": 0.0}])
def test_a_counter_that_says_nothing_is_none(bad):
    assert energy_of(metered(**bad)) is None
