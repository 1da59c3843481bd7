"""Plans from Python: those of the command line, as frames and as HTML."""

import pytest

from harness.api import HarnessError, InfeasibleError
from offload_harness import plan

pytest.importorskip("pandas")
GIVEN = {"hardware": "t4_gcp", "schedules": ["sweep"]}


def test_a_plan_is_the_first_row_of_its_frame():
    made = plan("facebook/opt-6.7b", memory="20GiB", **GIVEN)
    first = made.frame.iloc[0]
    assert first["chosen"] and not made.frame["chosen"][1:].any()
    assert first["throughput_tok_s"] == made.predicted["throughput_tok_s"]
    assert first["gpu_batch_size"] == made.policy["gpu_batch_size"]
    assert made.frame["throughput_tok_s"].max() == first["throughput_tok_s"]
    assert "facebook/opt-6.7b on t4_gcp, 512 + 32 tokens" in str(made)
    assert "opt-6.7b" in made._repr_html_() and "<script" not in made._repr_html_()
    again = plan("facebook/opt-6.7b", memory=20 << 30, policy=made.policy, **GIVEN)
    assert again.predicted["throughput_tok_s"] == pytest.approx(first["throughput_tok_s"])


@pytest.mark.parametrize(
    ("given", "kind", "told"),
    [
        ({"hardware": "nope"}, HarnessError, "no hardware profile 'nope'"),
        ({"policy": {"schedule": "rwo"}}, HarnessError, "'row', 'zigzag' or 'sweep'"),
        ({"memory": "lots"}, HarnessError, "expected a size"),
        ({"memory": 1000}, InfeasibleError, "use larger limits"),
    ],
)
def test_what_cannot_be_planned_is_one_line(given, kind, told):
    with pytest.raises(kind, match=told) as error:
        plan("facebook/opt-6.7b", **GIVEN | given)
    assert "\n" not in str(error.value)
