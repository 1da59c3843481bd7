"""The error bars of plans: from the committed runs they name, and from published figures."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from engines.planning.prediction_errors import FILE, prediction_error
from harness import hardware
from harness.api import OffloadPolicy

SCRIPT = Path(__file__).parents[2] / "docs" / "model" / "errors.py"
T4, LAPTOP = (hardware.load(name) for name in ("t4_gcp", "laptop_cpu"))


def test_the_file_is_what_the_committed_runs_say():
    assert runpy.run_path(str(SCRIPT))["measured"]() == yaml.safe_load(FILE.read_text())["measured"]


def test_a_range_is_that_of_the_schedule_on_a_host_and_of_the_engine_on_a_device():
    content = yaml.safe_load(FILE.read_text())
    row = content["measured"]["schedules"]["row"]
    found = prediction_error(200.0, "offload", LAPTOP, OffloadPolicy(schedule="row"))
    assert (found["low_tok_s"], found["high_tok_s"]) == (row["ratio"][0] * 200.0, row["ratio"][2] * 200.0)
    assert found["count"] == row["count"]
    accelerate = prediction_error(2.0, "accelerate", T4, OffloadPolicy())
    assert accelerate["high_tok_s"] == 2.0 * content["published"]["t4_gcp"]["accelerate"]["ratio"][2]


@pytest.mark.parametrize(
    ("engine", "machine", "words"),
    [
        ("offload", "t4_gcp", "no run of our engine on a device has been compared"),
        ("flexgen_ref", "t4_gcp", "published figures of flexgen_ref"),
        ("lm_offload", "t4_gcp", "nothing was measured"),
        ("offload", "rtx4090", "nothing was measured or published to compare with on rtx4090"),
    ],
)
def test_what_an_error_stands_on_is_said(engine, machine, words):
    profile = replace(T4, name=machine)
    assert words in prediction_error(1.0, engine, profile, OffloadPolicy())["stands_on"]
