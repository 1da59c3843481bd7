"""What plans say of fewer bits is what committed runs measured."""

import re
from pathlib import Path

import pytest
import yaml

from engines.planning.accuracy_costs import FILE, accuracy_cost
from harness.api import OffloadPolicy

RESULTS = Path(__file__).parents[2] / "docs" / "results"
COSTS = yaml.safe_load(FILE.read_text())["costs"]


@pytest.mark.parametrize("cost", COSTS, ids=lambda c: c["cell"])
def test_figures_are_those_of_the_committed_run(cost):
    report = (RESULTS / cost["run"] / "report.md").read_text().replace("\\", "")

    def row(cell, figure):
        (line,) = re.findall(rf"^\| {cell} \| {figure} \|(.*)$", report, re.MULTILINE)
        return [field.strip() for field in line.split("|")]

    _, _, examples, _, difference, interval, *_ = row(f"{cost['cell']}-lm_eval-lambada_openai", "acc")
    assert examples == "1000"
    assert 100 * float(difference) == pytest.approx(cost["points"], abs=0.051)
    assert [100 * float(x) for x in interval.split(" to ")] == pytest.approx(cost["interval"], abs=0.051)
    grown = row(f"{cost['cell']}-wikitext2_tokens", "token_perplexity")[4]
    assert float(grown.rstrip("%")) / 100 == pytest.approx(cost["perplexity"], abs=0.0005)


def test_exact_answers_cost_nothing_and_the_rest_is_named():
    assert accuracy_cost(OffloadPolicy()) is None
    (both,) = accuracy_cost(OffloadPolicy(weight_bits=4, kv_bits=4))["parts"]
    assert (both["kind"], both["points"]) == ("weights in 4 bits and cache in 4 bits", -8.0)
    weights, cache = accuracy_cost(OffloadPolicy(weight_bits=4, kv_bits=8))["parts"]
    assert (weights["kind"], weights["points"]) == ("weights in 4 bits", -5.1)
    assert (cache["kind"], cache["perplexity"]) == ("cache in 8 bits", 0.0)
    (unmeasured,) = accuracy_cost(OffloadPolicy(kv_bits=3))["parts"]
    assert unmeasured == {"kind": "cache in 3 bits"}
