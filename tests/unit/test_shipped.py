"""What `harness ls suites` tells of shipped suites beside their cells: time of committed runs, and disk."""

import json
from pathlib import Path

from engines.models import shapes
from harness.suite import shipped
from harness.suite.shipped import EXPECTED, checkpoint_bytes, expected_minutes, find_suite, shipped_suites

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_times_are_of_shipped_suites_and_committed_runs():
    entries = json.loads(EXPECTED.read_text())
    assert {suite.name for suite in shipped_suites()} >= entries.keys()
    assert "quickstart" in entries
    for name, entry in entries.items():
        assert (RESULTS / entry["run"] / "records.jsonl").exists()
        assert expected_minutes()[name] == entry["minutes"] > 0


def test_disk_is_what_a_suite_says_or_what_its_random_checkpoints_take(tmp_path):
    suite = shipped.load_suite(find_suite("quickstart"))
    assert checkpoint_bytes(suite) == suite.requires.disk_free == 3 << 30
    text = """
name: two
workload: {}
engine: offload
model: [{id: tiny/opt, weights: dummy}, {id: tiny/llama, weights: dummy, dtype: float32}, {id: owner/hub}]
matrix: {schedule: [row, sweep]}
"""
    path = tmp_path / "two.yaml"
    path.write_text(text)
    opt, llama = (shapes.shape(f"tiny/{family}").params_total for family in ("opt", "llama"))
    assert checkpoint_bytes(shipped.load_suite(path)) == 2 * opt + 4 * llama, "each once, and none of the hub"
