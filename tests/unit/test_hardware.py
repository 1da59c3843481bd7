"""Hardware profiles: what is shipped holds together, what is wrong is refused; this host is measured once."""

from dataclasses import replace
from unittest.mock import Mock

import pytest

from harness import hardware
from harness.api import HarnessError, Prices
from harness.hardware import LocalProfile, provenance


def test_every_figure_of_a_shipped_profile_has_a_source():
    assert len(hardware.names()) >= 3
    for name in hardware.names():
        profile = hardware.load(name)
        assert profile.name == name
        sources = profile.sources
        for part in ("device", "host"):
            processor = getattr(profile, part)
            figures = ("memory", "bandwidth", "flops", "batched_flops", "attention", "dequantize", "attention_call_s")
            for figure in figures if processor is not None else ():
                if getattr(processor, figure):
                    assert f"{part}.{figure}" in sources or part in sources, (name, part, figure)
        assert any(key.startswith("disk") for key in sources)
        assert set(profile.fitted) <= set(sources)


GOOD = (
    'name: x\ndescription: ""\nhost: {name: h, memory: 1.0e+10, bandwidth: 1.0e+10, flops: {"256": 1.0e+11}}\n'
    "disk: {capacity: 1.0e+12, read: 1.0e+9, write: 1.0e+9}\n"
)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("read: 1.0e+9", "read: -1.0", "disk.read is -1.0; it must be a positive number"),
        ("read: 1.0e+9", "read: 0", "disk.read is 0"),
        ("memory: 1.0e+10", "memory: 1.0e+30", "host.memory is 1e"),
        ("read: 1.0e+9, ", "", "missing key 'read'"),
        ("read: 1.0e+9", "reed: 1.0e+9", "unknown key 'reed'"),
        ("read: 1.0e+9", "read: fast", "expected a number"),
        ('"256": 1.0e+11', "", "host.flops is empty"),
        ('"256"', '"many"', "has a rate at 'many'"),
        ("name: x", "name: x\ndevices: 1", "device, link and devices come together"),
    ],
)
def test_a_wrong_figure_is_named(tmp_path, old, new, words):
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    assert hardware.load(str(path)).host.memory == 1e10
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(HarnessError) as caught:
        hardware.load(str(path))
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == (2 if new.startswith("reed") else 1)  # one for each problem


def test_an_unknown_profile_has_a_nearest_name():
    with pytest.raises(HarnessError, match=r"did you mean 't4_gcp'\? \(shipped: "):
        hardware.load("t4_gpc")


LAPTOP = hardware.load("laptop_cpu")


def test_a_host_is_measured_where_nobody_has(tmp_path):
    measured = replace(LAPTOP, host_id=provenance.machine_key())
    measure = Mock(side_effect=lambda: hardware.save(measured, hardware.local_path(tmp_path)))
    known = LocalProfile(tmp_path)
    assert known.get(measure).host == known.get(measure).host == LAPTOP.host
    assert LocalProfile(tmp_path).get(measure).host == LAPTOP.host
    assert measure.call_count == 1


def test_a_measurement_that_failed_is_not_tried_before_every_launch(tmp_path):
    measure = Mock(side_effect=HarnessError("no room to measure the disk"))
    known = LocalProfile(tmp_path)
    for _ in range(3):
        with pytest.raises(HarnessError, match="no room"):
            known.get(measure)
    assert measure.call_count == 1


def test_costs_are_those_of_flexgen_s_first_version():
    """Section 6.3: OPT-175B on a T4 at home, and FasterTransformer on eight A100 in a cloud."""
    home, cloud = hardware.load("t4_gcp").prices, hardware.load("a100_80g_sxm_x8").prices
    assert home.metrics(0.69)["tokens_per_dollar"] == pytest.approx(49_680)
    assert home.metrics(0.69)["tokens_per_joule"] == pytest.approx(0.69 / 250)
    assert cloud.metrics(497_355 / 3600)["tokens_per_dollar"] == pytest.approx(12_142, abs=0.5)
    assert "tokens_per_joule" not in cloud.metrics(1.0)
    assert Prices(power=250).metrics(1.0) == {"tokens_per_joule": 1 / 250}
    assert Prices(hire=2.0, power=250, electricity=0.2).dollars_per_hour == 2.0, "hire includes electricity"
