"""Verdicts on runs and engines: each kind by a small case, every format, and the rates of errors by simulation."""

import json
import random
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from harness.api import Accuracy, HarnessError, OffloadPolicy, RunRecord
from reports.compare import compare_engines, compare_records, compare_runs, more_failures
from reports.compare_formats import FORMATS
from reports.records import Runs
from reports.samples import Sample, in_turns
from reports.speed import Rules
from reports.verdicts import ORDER, Comparison
from tests import simulate_noise
from tests.records import HOSTILE, PROVENANCE, assert_tables_are_whole, beside, cell, failed, record, repeats, write
from tests.simulate_compare import Case, alarm, rate, seen, turns

SPEEDS = (10.1, 9.8, 10.4, 9.9, 10.0, 10.2, 9.7)


def slower(part: float, speeds: Sequence[float] = SPEEDS) -> list[float]:
    """The same launches at `part` of the speed."""
    return [part * v for v in speeds]


def compared(base: Sequence[RunRecord], head: Sequence[RunRecord], **options: Any) -> Comparison:
    return compare_records(Runs(tuple(base)), Runs(tuple(head)), Rules(**options))


def verdict(base: Sequence[RunRecord], head: Sequence[RunRecord], **options: Any) -> tuple[str, str]:
    """Verdict and reason of the only cell."""
    (found,) = compared(base, head, **options).cells
    return found.verdict, found.reason


BASE = repeats(cell(), SPEEDS)


def test_the_same_again_is_no_change():
    (found,) = compared(BASE, repeats(cell(), SPEEDS[::-1])).cells
    assert found.verdict == "no change"
    assert found.ratio == pytest.approx(1.0) and found.p == 1.0
    assert found.low < 1 < found.high
    assert (found.base, found.head, found.base_launches, found.head_launches) == (10.0, 10.0, 7, 7)


def test_a_planted_slowdown_of_ten_percent():
    head = repeats(cell(), slower(0.9))
    (found,) = compared(BASE, head).cells
    assert found.verdict == "regression" and found.reason == "10.0% slower"
    assert found.ratio == pytest.approx(0.9) and found.p < 0.002
    assert verdict(head, BASE)[0] == "improvement"


def test_a_difference_below_three_percent_is_none():
    """However sure it is."""
    exact = [10.0 + i / 1000 for i in range(7)]
    (found,) = compared(repeats(cell(), exact), repeats(cell(), slower(0.98, exact))).cells
    assert found.p < 0.002
    assert found.verdict == "no change" and found.threshold == 0.03
    assert found.reason.startswith("2.0% slower, below the threshold of 3.0%")


def test_noise_raises_what_counts():
    noisy = (10.0, 13.0, 9.0, 12.0, 8.0, 11.0, 12.5)
    (found,) = compared(repeats(cell(), noisy), repeats(cell(), slower(0.6, noisy))).cells
    assert pytest.approx(2 * found.noise_floor) == found.threshold > 0.03


def test_another_run_of_the_base_counts_as_noise():
    again = [Runs(tuple(repeats(cell(), slower(1.06))))]
    head = repeats(cell(), slower(0.9))
    assert verdict(BASE, head)[0] == "regression"
    (found,) = compared(BASE, head, again=again).cells
    assert found.noise_floor == pytest.approx(0.06)
    assert found.verdict != "regression"  # 11 % is less than twice 6 %


def test_three_launches_are_inconclusive_never_a_pass():
    kind, reason = verdict(BASE[:3], repeats(cell(), slower(0.5, SPEEDS[:3])))
    assert kind == "inconclusive"
    assert reason == "3 and 3 launches cannot give p < 0.02 over 1 cell: run 5 on each side"
    assert compared(BASE[:3], repeats(cell(), SPEEDS[:3])).verdict == "inconclusive"


def test_more_cells_need_more_launches():
    specs = [cell(f"c{i}", seed=i) for i in range(4)]
    base = [r for s in specs for r in repeats(s, SPEEDS[:5])]
    head = [r for s in specs for r in repeats(s, slower(0.5, SPEEDS[:5]))]
    found = compared(base, head)
    assert {c.verdict for c in found.cells} == {"inconclusive"}  # 4 x 2/252 is more than 0.02
    assert "run 6 on each side" in found.cells[0].reason
    assert {c.verdict for c in compared(base, head, alpha=0.05).cells} == {"regression"}


def test_noise_that_could_hide_a_slowdown_is_inconclusive():
    wild = (10.0, 13.0, 7.0, 12.0, 8.0, 11.0, 12.5)
    kind, reason = verdict(repeats(cell(), wild), repeats(cell(), wild[::-1]))
    assert kind == "inconclusive" and "a slowdown of 10% is not excluded" in reason


def under(**provenance: Any) -> list[RunRecord]:
    """As `BASE`, but for these parts of the provenance."""
    return repeats(cell(), SPEEDS, provenance=PROVENANCE | provenance)


FLAKY = [*repeats(cell(), SPEEDS[:6]), failed(cell(), "oom_host", "killed at its limit", 6)]
BROKEN = [failed(cell(), "error", "segfault", i) for i in range(7)]
STOPPED = [failed(cell(), "interrupted", "", i) for i in range(7)]
LACKING = [*BASE[:5], *(replace(r, metrics={}) for r in BASE[5:])]
AT_ANOTHER_COMMIT = under(git={"commit": "f" * 40, "dirty": True})
ELSEWHERE = under(machine=PROVENANCE["machine"] | {"cpu": "AMD EPYC"})
MIXED = [*BASE[:6], ELSEWHERE[6]]
ONE_THREAD, TWO_THREADS = (under(settings={"OMP_NUM_THREADS": threads}) for threads in ("1", "2"))
LARGER = repeats(cell(policy=OffloadPolicy(gpu_batch_size=16)), SPEEDS)
FIRST_FAIL = ("regression", "1 of 7 launches newly fail, oom_host: killed at its limit")
CHANGED = ("not comparable", "another cell of the same name: policy.gpu_batch_size was 1, is 16")
INTEL = PROVENANCE["machine"]["cpu"]


def environment(difference: str) -> tuple[str, str]:
    return "not comparable", f"another environment: {difference}"


def simulated(speed: float) -> list[RunRecord]:
    return [record(cell(), 0, speed, simulated=True)]


#: Base, head, and the verdict, with its reason where that says more.
VERDICTS: dict[str, tuple[list[RunRecord], list[RunRecord], tuple[str, ...]]] = {
    "a cell that newly fails": (BASE, FLAKY, FIRST_FAIL),
    "a cell that newly fails always": (BASE, BROKEN, ("regression",)),
    "a cell that no longer fails": (BROKEN, BASE, ("improvement", "no longer fails (error in the base)")),
    "a cell that fails as before": (BROKEN, BROKEN, ("not comparable",)),
    "nothing in the base": (STOPPED, BROKEN, ("not comparable",)),
    "an interrupted launch is no failure": (BASE, [*BASE[:6], STOPPED[6]], ("no change",)),
    "launches without the figure": (BASE, LACKING, ("not comparable", "2 of 7 launches of the head lack this figure")),
    "another commit is what comparisons are for": (BASE, AT_ANOTHER_COMMIT, ("no change",)),
    "another machine": (BASE, ELSEWHERE, environment(f"machine.cpu was {INTEL}, is AMD EPYC")),
    "two machines in the base": (MIXED, BASE, environment(f"machine.cpu was AMD EPYC or {INTEL}, is {INTEL}")),
    "another setting": (TWO_THREADS, ONE_THREAD, environment("settings.OMP_NUM_THREADS was 2, is 1")),
    "a setting of one side": (BASE, ONE_THREAD, environment("settings.OMP_NUM_THREADS was unknown, is 1")),
    "a changed cell of the same name": (BASE, LARGER, CHANGED),
    "simulations are exact": (simulated(10.0), simulated(9.9), ("no change",)),
    "a slower simulation": (simulated(10.0), simulated(9.0), ("regression",)),
    "a simulation and a measurement": (simulated(10.0), [record(cell(), 0, 9.0)], ("not comparable",)),
}


@pytest.mark.parametrize(("base", "head", "expected"), VERDICTS.values(), ids=VERDICTS)
def test_verdicts(base, head, expected):
    assert verdict(base, head)[: len(expected)] == expected


def test_a_base_that_fails_now_and_then_hides_nothing():
    assert verdict(FLAKY, repeats(cell(), slower(0.5)))[0] == "regression"
    kind, reason = verdict(FLAKY, BROKEN)
    assert kind == "regression" and reason == "7 of 7 launches fail (1 of 7 in the base), error: segfault"
    (found,) = compared(FLAKY, FLAKY).cells
    assert found.verdict == "no change"
    assert found.remarks[0] == "launches fail: 1 of 7 in the base, 1 of 7 in the head"


@pytest.mark.parametrize(("tune", "fails"), [("none", True), ("max_batch", False)])
def test_memory_that_ran_out_for_a_searched_batch_is_no_failure_once_a_smaller_one_holds(tmp_path, tune, fails):
    spec = cell(tune=tune)
    again = [failed(spec, "oom_host", "limit hit", 6), *repeats(spec, SPEEDS)]
    base, head = write(tmp_path / "a", repeats(spec, SPEEDS)), write(tmp_path / "b", again)
    (found,) = compare_runs(base, [head])[0].cells
    assert (found.verdict == "regression") is fails
    assert any("launches fail" in remark for remark in found.remarks) is False
    assert ("newly fail" in found.reason) is fails


@pytest.mark.parametrize(("base", "head"), [((6, 1), (7, 0)), ((6, 1), (1, 6)), ((3, 4), (4, 3)), ((0, 7), (7, 0))])
def test_more_failures_is_fishers_exact_test(base, head):
    from scipy.stats import fisher_exact

    def sample(ok: int, bad: int) -> Sample:
        return Sample(tuple([record(cell())] * ok + [failed(cell(), "error", "")] * bad))

    a, b = sample(*base), sample(*head)
    expected = fisher_exact([[base[1], base[0]], [head[1], head[0]]], alternative="less").pvalue
    assert more_failures(a, b) == pytest.approx(expected)


def test_a_failure_that_a_second_try_mended_was_one(tmp_path):
    """Runs that go on try crashed launches again; a head that crashes now and then must not look well."""
    base = write(tmp_path / "base", BASE)
    head = write(tmp_path / "head", [failed(cell(), "error", "segfault", 2), *repeats(cell(), SPEEDS)])
    (found,) = compare_runs(base, [head], Rules())
    assert found.cells[0].reason == "1 of 8 launches newly fail, error: segfault"


def test_a_cell_with_many_launches_is_judged_beside_one_with_few():
    """Holm goes step by step: the first cells' p leave the third a larger share."""
    many = [cell(f"c{i}", seed=i) for i in range(2)]
    few = cell("few", seed=9)
    speeds = [10.0 + i / 100 for i in range(10)]
    base = [r for s in many for r in repeats(s, speeds)] + repeats(few, speeds[:5])
    head = [r for s in many for r in repeats(s, slower(0.5, speeds))] + repeats(few, slower(0.5, speeds[:5]))
    assert {c.verdict for c in compared(base, head).cells} == {"regression"}


def test_expected_failures_stay_out():
    spec = cell("refused", seed=9, expect="infeasible")
    refused = [failed(spec, "infeasible", "too small", i) for i in range(7)]
    found = compared([*BASE, *refused], [*BASE, *refused])
    assert [c.verdict for c in found.cells] == ["no change", "as expected"]
    assert found.verdict == "no change"
    assert verdict(refused, refused)[0] == "as expected"
    other = [replace(r, status="error") for r in refused]
    assert verdict(refused, other)[0] == "regression"  # it fails, but not as it is meant to


def test_other_packages_are_not_comparable_unless_they_are_what_is_compared():
    head = repeats(cell(), slower(0.9), provenance=PROVENANCE | {"packages": {"torch": "2.9.0"}})
    assert "packages.torch was 2.8.0, is 2.9.0" in verdict(BASE, head)[1]
    for allowed, kind in (("packages.torch", "regression"), ("packages", "regression"), ("pack", "not comparable")):
        assert verdict(BASE, head, allow=[allowed])[0] == kind


def test_cells_of_one_side():
    with_another = [*BASE, *repeats(cell("more", seed=3), SPEEDS)]
    added = compared(BASE, with_another)
    assert ([c.verdict for c in added.cells], added.verdict) == (["no change", "new"], "no change")
    gone = compared(with_another, BASE)
    assert ([c.verdict for c in gone.cells], gone.verdict) == (["no change", "not comparable"], "not comparable")


def test_times_count_the_other_way_round():
    (found,) = compared(BASE, repeats(cell(), slower(0.8)), metric="ttft_p99_s").cells
    assert found.verdict == "regression"
    assert found.ratio == pytest.approx(0.8)  # as speed
    assert found.head > found.base  # as it was recorded
    words = "no speed or time is named 'padding_tokens'; the records have throughput, decode_"
    with pytest.raises(HarnessError, match=words):
        compared(BASE, BASE, metric="padding_tokens")


def test_answers_that_differ_are_told():
    (found,) = compared(BASE, repeats(cell(), SPEEDS, digests=("a", "b", "x", "d"))).cells
    assert found.remarks == ("7 of 28 answers differ from the base's",)


def test_a_loss_of_accuracy_is_a_regression():
    right, rng = [1.0] * 200, random.Random(0)
    worse = [float(rng.random() > 0.1) for _ in right]
    old, new = (
        Accuracy("lambada", "", 200, {"acc": sum(v) / 200, "acc_stderr": 0.01}, {"acc": tuple(v)})
        for v in (right, worse)
    )
    kind, reason = verdict(repeats(cell(), SPEEDS, accuracy=old), repeats(cell(), SPEEDS, accuracy=new))
    assert kind == "regression" and reason.startswith("less accurate: acc 1 in the base, 0.")
    assert verdict(repeats(cell(), SPEEDS, accuracy=new), repeats(cell(), SPEEDS, accuracy=new))[0] == "no change"


def at(records: Sequence[RunRecord], day: int) -> list[RunRecord]:
    """The same launches on another day."""
    return [replace(r, started_at=r.started_at.replace("11-21", f"11-{day}")) for r in records]


def test_sides_that_ran_one_after_the_other_decide_nothing():
    head = at(repeats(cell(), slower(0.5)), 22)
    (found,) = compared(BASE, head).cells
    assert (found.verdict, found.low, found.p) == ("inconclusive", None, None)
    assert found.ratio == pytest.approx(0.5) and found.reason.startswith("50.0% slower, but the sides ran one after")
    assert "ci/interleave.sh" in found.reason and "--aa" in found.reason
    assert verdict(BASE, [replace(r, started_at="") for r in BASE])[0] == "inconclusive"
    assert "in turns (ci/interleave.sh)" in verdict(BASE[:3], at(BASE[:3], 22))[1]


def test_other_runs_of_the_base_say_how_far_runs_drift():
    """With one, hardly anything is decided; with more, as much as runs of one code allow."""
    nights = [Runs(tuple(at(repeats(cell(), slower(part)), 22 + i))) for i, part in enumerate((1.01, 0.99, 1.02, 1.0))]
    head = at(repeats(cell(), slower(0.85)), 27)
    assert verdict(BASE, head, again=nights[:1])[0] == "inconclusive"
    (found,) = compared(BASE, head, again=nights).cells
    assert found.verdict == "regression" and found.low < 0.85 < found.high < 0.9
    assert verdict(BASE, at(BASE, 27), again=nights)[0] == "no change"
    kind, reason = verdict(BASE, at(repeats(cell(), slower(0.93)), 27), again=nights[:2])
    assert kind == "inconclusive" and "not excluded" in reason and "name more runs of the base" in reason


@pytest.mark.parametrize(
    ("order", "taken"),
    [
        ([0] * 7 + [1] * 7, False),
        ([1] * 7 + [0] * 7, False),
        ([0] * 4 + [1] * 7 + [0] * 3, False),  # balanced, but in three blocks
        ([0] * 5 + [1, 0, 1, 0] + [1] * 5, False),  # changes often enough, but one is early and the other late
        ([0, 1] * 7, True),
        ([0, 1, 1, 0] * 3 + [0], True),  # one round is not complete
        ([0, 1, 0, 1, 0, 1], True),
    ],
)
def test_in_turns(order, taken):
    times = [f"2026-11-21T05:{i:02}" for i in range(len(order))]
    a, b = (Sample(tuple(record(cell(), started_at=t) for t, s in zip(times, order, strict=True) if s == side))
            for side in (0, 1))  # fmt: skip
    assert in_turns(a, b) is taken


@pytest.mark.parametrize("launches", range(2, 12))
def test_interleave_takes_turns(launches):
    order = turns(launches)
    a, b = (Sample(tuple(record(cell(), started_at=f"{i:03}") for i, s in enumerate(order) if s == side))
            for side in (0, 1))  # fmt: skip
    assert in_turns(a, b)


def loaded(speeds: Sequence[float], others: Sequence[float]) -> list[RunRecord]:
    """Launches that used ten seconds of CPU time, during which other processes used so many."""
    return [beside(other, r) for r, other in zip(repeats(cell(), speeds), others, strict=True)]


#: Launches of one code on a machine that others load now and then, by a factor of up to forty.
LOADED = (10.1, 0.8, 10.4, 0.26, 8.0, 0.5, 0.3)


@pytest.mark.parametrize("others", [(0.0,) * 7, (30.0,) * 7, (30, 30, 0.1, 30, 30, 30, 30)])
@pytest.mark.parametrize("turned", [False, True])
def test_a_machine_under_load_decides_nothing(turned, others):
    """Once such a comparison was "no change", beside an interval of [1.19, 37.8], and a regression the other way."""
    base, head = loaded(LOADED, others), loaded(SPEEDS, (0.1,) * 7)
    kind, reason = verdict(head, base) if turned else verdict(base, head)
    assert kind == "inconclusive"
    assert "excluded" not in reason or "not excluded" in reason


def test_disturbed_launches_are_left_out_visibly():
    head = loaded((*SPEEDS[:6], 4.0), (0.1,) * 6 + (8.0,))
    (found,) = compared(BASE, head).cells
    assert (found.verdict, found.head_launches) == ("no change", 6)
    assert found.remarks == ("1 of 7 launches of the head left out: others took 44% of the CPU",)


def test_a_slow_launch_is_not_left_out_for_being_slow():
    head = loaded((*SPEEDS[:6], 4.0), (0.1,) * 7)
    kind, reason = verdict(BASE, head)
    assert kind == "inconclusive" and "differ by a factor of 2.60 without a known cause" in reason


def test_a_regression_of_undisturbed_launches_stands_and_one_of_disturbed_launches_does_not():
    some = (0.1,) * 5 + (2.0, 2.0)
    assert verdict(BASE, loaded(slower(0.8), some))[0] == "regression"
    slow_where_disturbed = loaded((9.9, 10.1, 8.0, 7.9, 8.1, 8.2, 7.8), (0.1, 0.1, 2.0, 2.0, 2.0, 2.0, 2.0))
    kind, reason = verdict(repeats(cell(), [10 + i / 10 for i in range(7)]), slow_where_disturbed)
    assert kind == "inconclusive" and "disturbed launches decide: with them regression (21." in reason
    kind, reason = verdict(BASE, loaded(slower(0.8), (2.0,) * 7))
    assert kind == "inconclusive" and reason.startswith("others disturbed every launch of the head (with them: 20.0%")


def test_a_faster_head_that_noise_could_explain_is_inconclusive_and_not_unchanged():
    """Another run of the base differs by 30 %: 40 % are less than twice that, and no slowdown either."""
    again = [Runs(tuple(repeats(cell(), slower(1.3))))]
    kind, reason = verdict(BASE, repeats(cell(), slower(1.4)), again=again)
    assert kind == "inconclusive"
    assert reason.startswith("40.0% faster, but neither p nor a threshold of 60.0% is met")


def test_runs_of_one_name_are_told_apart_by_more_of_their_paths(tmp_path):
    base, head = (write(tmp_path / side / "run", repeats(cell(), SPEEDS)) for side in ("a", "b"))
    (found,) = compare_runs(base, [head])
    assert (found.base, found.head) == ("a/run", "b/run")


def test_what_needs_attention_first_is_the_verdict_and_the_first_row():
    kinds = [c.verdict for c in (c for x in comparisons() for c in x.cells)]
    (found,) = comparisons()
    assert found.verdict == min(kinds, key=ORDER.index) == "regression"
    assert FORMATS["text"]([found]).index("regression") < FORMATS["text"]([found]).index("new")


def test_many_heads(tmp_path):
    parts = {"base": 1.0, "one": 1.0, "two": 0.8}
    base, *heads = [write(tmp_path / name, repeats(cell(), slower(part))) for name, part in parts.items()]
    found = compare_runs(base, heads, Rules())
    assert [(c.base, c.head, c.verdict) for c in found] == [("base", "one", "no change"), ("base", "two", "regression")]


def test_engines_against_one_of_them(tmp_path):
    records = [
        *repeats(cell("slow", "accelerate"), slower(0.5)),
        *repeats(cell("ours", "offload", seed=1), SPEEDS),
        *repeats(cell("best-of-theirs", "accelerate", seed=2), slower(0.6)),
        *repeats(cell("resident", "transformers", seed=3, reference=True), slower(3.0)),
    ]
    (found,) = compare_engines([write(tmp_path, records)], "accelerate", Rules())
    assert found.base == "best-of-theirs"
    assert {c.name: c.verdict for c in found.cells} == {"slow": "behind", "ours": "ahead"}
    assert found.cells[1].ratio == pytest.approx(1 / 0.6)
    assert found.verdict == "behind" and not found.cells[1].remarks
    with pytest.raises(HarnessError, match="named 'llama'"):
        compare_engines([tmp_path], "llama", Rules())
    with pytest.raises(HarnessError, match="named 'transformers'"):  # a reference is no base, unless it is asked for
        compare_engines([tmp_path], "transformers", Rules())
    assert compare_engines([tmp_path], "resident", Rules())[0].base == "resident"
    assert ET.fromstring(FORMATS["junit"]([found]).encode())[0].get("failures") == "0"


def test_engines_of_one_run_are_decided_by_more_of_it_and_not_by_two_versions(tmp_path):
    ours, theirs = cell("ours", "offload", seed=1), cell("theirs", "accelerate")
    few = [*repeats(ours, SPEEDS[:2]), *repeats(theirs, slower(0.5)[:2])]
    later = at([*repeats(ours, SPEEDS)], 22)
    advised = {
        "run 5 on each side (--set repeats=5)": few,
        "run both anew (harness run --fresh)": [*later, *repeats(theirs, slower(0.5))],
    }
    for i, (advice, records) in enumerate(advised.items()):
        (found,) = compare_engines([write(tmp_path / str(i), records)], "theirs", Rules())
        assert found.verdict == "inconclusive" and found.cells[0].reason.endswith(advice)
        assert "interleave" not in found.cells[0].reason


def comparisons() -> list[Comparison]:
    """One with every kind of verdict, in hostile words."""
    base = [*BASE, *repeats(cell("gone", seed=4), SPEEDS), *repeats(cell(HOSTILE, seed=5), SPEEDS)]
    head = [
        *repeats(cell(), slower(0.9)),
        *repeats(cell("more", seed=6), SPEEDS),
        failed(cell(HOSTILE, seed=5), "error", HOSTILE),
    ]
    return [replace(compared(base, head), base=HOSTILE.replace("\ud800", ""), head="head")]


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_holds_every_cell(form):
    words = FORMATS[form](comparisons())
    words.encode()
    assert "more" in words
    assert "\x1b" not in words and "\u202e" not in words
    if form == "text":
        assert max(map(len, words.splitlines())) <= 100


def test_markdown_is_inert_and_whole():
    document = FORMATS["md"](comparisons())
    assert "Base (tok/s)" in document
    assert "<script" not in document and "@all" not in document
    assert_tables_are_whole(document)


def test_json_has_every_figure():
    (found,) = json.loads(FORMATS["json"](comparisons()))
    assert found["verdict"] == "regression"
    assert found["cells"][0]["ratio"] == pytest.approx(0.9)


def test_junit_counts():
    (suite,) = ET.fromstring(FORMATS["junit"](comparisons()).encode())
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("4", "2", "1")
    kinds = [[child.tag for child in case] for case in suite]
    assert sorted(kinds) == [["failure"], ["failure"], ["skipped"], ["system-out"]]


def test_github_action_benchmark():
    entries = json.loads(FORMATS["gab"](comparisons()))
    assert [set(e) for e in entries] == [{"name", "unit", "value", "range", "extra"}] * 2
    assert entries[0]["value"] == pytest.approx(9.0) and entries[0]["unit"] == "tok/s"


def test_the_simulated_noise_is_as_it_says():
    import numpy as np

    rng = np.random.default_rng(0)
    for kind in simulate_noise.KINDS[:3]:
        assert simulate_noise.noise(kind, 0.03, 400, 140, rng).std() == pytest.approx(0.03, rel=0.1)
    runs = simulate_noise.noise("drift", 0.03, 400, 140, rng)
    neighbours = np.corrcoef(runs[:, :-1].ravel(), runs[:, 1:].ravel())[0, 1]
    assert neighbours == pytest.approx(0.45, abs=0.05)  # half of the variance, of which 0.9 stays
    slow = simulate_noise.noise("slow stretches", 1e-6, 400, 140, rng) < -0.3
    assert slow.mean() == pytest.approx(0.05 / (0.05 + 1 / 3), abs=0.02)
    assert (slow[:, 1:] & slow[:, :-1]).sum() / slow[:, :-1].sum() == pytest.approx(2 / 3, abs=0.05)


def test_few_simulated_pairs():
    calm = {"cells": 5, "variation": 0.03, "kind": "drift"}
    assert rate(Case(**calm, launches=7), 40, alarm) <= 0.05
    assert rate(Case(**calm, launches=7, slowdown=0.1), 40, seen) >= 0.8
    assert rate(Case(**calm, launches=3, slowdown=0.5), 5, seen) == 0
    assert rate(Case(**calm, launches=7, slowdown=0.5, runs=1), 5, seen) == 0


@pytest.mark.slow
@pytest.mark.parametrize("runs", [None, 2, 4])
@pytest.mark.parametrize("cells", [1, 10])
def test_at_most_one_unchanged_suite_in_a_hundred_is_a_regression(cells, runs):
    """In turns, and one after the other with other runs of the base; within the error of so many pairs."""
    assert rate(Case(cells, launches=7, runs=runs), 2000, alarm) <= 0.015


@pytest.mark.slow
@pytest.mark.parametrize("cells", [1, 5])
def test_nine_of_ten_slowdowns_by_ten_percent_are_seen(cells):
    assert rate(Case(cells, 7, 0.1, 0.03, "drift"), 500, seen, seed=1) >= 0.9
