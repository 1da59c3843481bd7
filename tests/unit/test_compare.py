"""Verdicts on runs and engines: each kind by a small case, every format, and the rates of errors by simulation."""

import json
import random
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from harness.api import Accuracy, HarnessError, OffloadPolicy, RunRecord
from reports.compare import Rules, compare_engines, compare_records, compare_runs, more_failures
from reports.compare_formats import FORMATS
from reports.records import Runs
from reports.samples import Sample
from reports.verdicts import Comparison
from tests import simulate_compare
from tests.records import HOSTILE, PROVENANCE, assert_tables_are_whole, cell, failed, record, repeats, write
from tests.simulate_compare import Case, alarm, rate, seen

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
    again = Runs(tuple(repeats(cell(), slower(1.06))))
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
    wild = (10.0, 16.0, 7.0, 14.0, 6.0, 11.0, 12.5)
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


@pytest.mark.parametrize(("base", "head"), [((6, 1), (7, 0)), ((6, 1), (1, 6)), ((3, 4), (4, 3)), ((0, 7), (7, 0))])
def test_more_failures_is_fishers_exact_test(base, head):
    from scipy.stats import fisher_exact

    def sample(ok: int, bad: int) -> Sample:
        return Sample(tuple([record(cell())] * ok + [failed(cell(), "error", "")] * bad), (1.0,) * ok)

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


def test_sides_that_ran_one_after_the_other_are_told():
    later = [replace(r, started_at=r.started_at.replace("T05", "T09")) for r in BASE]
    assert "one after the other" in compared(BASE, later).notes[0]
    between = [replace(r, started_at=r.started_at.replace(":00+", ":30+")) for r in BASE]
    assert not compared(BASE, between).notes


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
    runs = np.stack([simulate_compare.noise(140, rng) for _ in range(400)])
    assert runs.std() == pytest.approx(simulate_compare.VARIATION, rel=0.1)
    neighbours = np.corrcoef(runs[:, :-1].ravel(), runs[:, 1:].ravel())[0, 1]
    assert neighbours == pytest.approx(0.45, abs=0.05)  # half of the variance, of which 0.9 stays


def test_few_simulated_pairs():
    assert rate(Case(cells=5, launches=7), 40, alarm) <= 0.05
    assert rate(Case(cells=5, launches=7, slowdown=0.1), 40, seen) >= 0.8
    assert rate(Case(cells=5, launches=3, slowdown=0.5), 5, seen) == 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cells", [1, 10])
def test_at_most_one_unchanged_suite_in_a_hundred_is_a_regression(cells):
    assert rate(Case(cells, launches=7), 2000, alarm) <= 0.01


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cells", [1, 5])
def test_nine_of_ten_slowdowns_by_ten_percent_are_seen(cells):
    assert rate(Case(cells, launches=7, slowdown=0.1), 500, seen, seed=1) >= 0.9
