"""Greedy tokens, memory plans, `harness plan` and `check-model` are as in tests/golden/frozen.json."""

import json

import pytest

from tests import frozen

GOLDEN = json.loads(frozen.GOLDEN.read_text())


def close(found, expected):
    """Equal, but for the last digits of floats, which another build of a solver or of libm may round otherwise."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(close(found[k], expected[k]) for k in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(close, found, expected))
    if isinstance(expected, float):
        return found == pytest.approx(expected, rel=1e-6)
    return found == expected


#: Each takes seconds by the dozen; two of them have what most changes touch: grouped queries, and a mixture.
FAST = ("llama", "mixtral")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in FAST else pytest.mark.slow) for kind in frozen.MODELS]
)
def test_greedy_tokens(kind, tmp_path):
    found = frozen.tokens(kind, tmp_path)
    assert found.keys() == GOLDEN["tokens"][kind].keys()
    for policy, expected in GOLDEN["tokens"][kind].items():
        assert len(expected) >= 4, "few requests are clear enough to be compared"
        assert found[policy] == expected, policy


def test_memory_plans():
    found = json.loads(json.dumps(frozen.memory_plans()))
    assert found.keys() == GOLDEN["memory_plans"].keys()
    for name, plan in found.items():
        assert close(plan, GOLDEN["memory_plans"][name]), name


@pytest.mark.parametrize("job", frozen.JOBS, ids=lambda job: " ".join(map(str, job)))
def test_plans(job):
    assert close(frozen.plan(job), GOLDEN["plans"][frozen.title(job)])


def test_check_model():
    assert close(frozen.printed("check-model", "--json"), GOLDEN["check_model"])
