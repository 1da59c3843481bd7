"""The profile of this host for a run: measured once, and not again where that fails."""

from dataclasses import replace

import pytest

from harness import hardware
from harness.api import HarnessError
from harness.hardware import provenance
from harness.hardware.local_profile import LocalProfile

LAPTOP = hardware.load("laptop_cpu")


def test_a_host_is_measured_where_nobody_has(tmp_path):
    calls = []

    def measure():
        calls.append(1)
        hardware.save(replace(LAPTOP, host_id=provenance.machine_key()), hardware.local_path(tmp_path))

    known = LocalProfile(tmp_path)
    assert known.get(measure).host == known.get(measure).host == LAPTOP.host
    assert LocalProfile(tmp_path).get(measure).host == LAPTOP.host
    assert len(calls) == 1


def test_a_measurement_that_failed_is_not_tried_before_every_launch(tmp_path):
    calls = []

    def measure():
        calls.append(1)
        raise HarnessError("no room to measure the disk")

    known = LocalProfile(tmp_path)
    for _ in range(3):
        with pytest.raises(HarnessError, match="no room"):
            known.get(measure)
    assert len(calls) == 1
