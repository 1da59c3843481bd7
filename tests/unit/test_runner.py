"""The runner's own decisions, with launches that end as they are told to, and its search for the largest batch."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.adapters.fake import MODEL
from harness import api
from harness.run import runner
from harness.run.options import Selection
from harness.run.store import Store
from harness.run.tuning import (
    Patience,
    Remembered,
    choose,
    lasting,
    search_max_batch,
    search_settings,
    without_slow_dtypes,
)
from tests.records import FAKE


class Launcher:
    """Stands in for CellLauncher: `survives` says how a launch of a batch ends, given how many there were of it."""

    def __init__(self, survives, digest="d"):
        self.survives, self.digest = survives, digest
        self.launched = []

    def ready(self, kinds):
        pass

    def environment(self, *_):
        return {"package": "1"}

    def prepare(self, *_):
        return replace(MODEL, digest=self.digest)

    def launch(self, request):
        batch = request.spec.policy.gpu_batch_size
        self.launched.append(batch)
        status = self.survives(batch, self.launched.count(batch))
        metrics = {"generation_throughput_tok_s": float(batch)} if status == "ok" else {}
        load = api.LoadReport(9, 9, batch, request.spec.policy, "float32", (0, 0, 0))
        return api.LaunchResult(
            status, "told", "2026-11-01", wall_s=1.0, measured=api.CellResult(load, metrics=metrics)
        )


CELL = replace(
    FAKE, workload=api.WorkloadSpec(num_requests=8), policy=api.OffloadPolicy(8), name="cell", tune="max_batch"
)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs cells with a launcher; gives the last record of each launch, and the progress."""
    suite = tmp_path / "s.yaml"
    suite.write_text("")

    def go(launcher, *cells, out="out", machine_probe=False, predictions=True, **options):
        monkeypatch.setattr(runner, "CellLauncher", lambda cache, places: launcher)
        progress = Mock()
        made = api.SuiteSpec("s", "", cells, machine_probe=machine_probe, predictions=predictions)
        selection = Selection(made, suite, list(cells), "c")
        return runner.Runner(selection, tmp_path / out, tmp_path / "cache", progress, **options).run(), progress

    return go


def test_a_batch_that_does_not_survive_again_gives_way_to_a_smaller_one_in_all_repeats(run, tmp_path):
    def survives(batch, time):
        return "ok" if batch < 8 or (batch == 8 and time <= 2) else "oom_host"  # the trial and the first repeat

    launcher = Launcher(survives)
    records, progress = run(launcher, CELL)
    assert [(r.status, r.spec.policy.gpu_batch_size) for r in records] == [("ok", 8)] * 3, "the cell as it was asked"
    assert [r.metrics["generation_throughput_tok_s"] for r in records] == [7.0] * 3
    assert [r.status for r in Store(tmp_path / "out").records()] == ["ok", "oom_host", "ok", "ok", "ok"]
    tried = [(t.gpu_batch_size, t.status, t.throughput_tok_s) for t in records[-1].tuning]
    assert tried == [(8, "ok", 8), (8, "ok", 8), (8, "oom_host", None), (4, "ok", 4), (7, "ok", 7)], "2 of 3 survived"
    steps = [told.args[0] for told in (*progress.planned.call_args_list, *progress.added.call_args_list)]
    assert sum(map(len, steps)) == progress.finished.call_count == 5
    progress.note.assert_any_call("cell: batch 8 did not survive again; a smaller one is taken")
    again = Launcher(survives)
    run(again, CELL, out="other")
    assert set(again.launched) == {7}, "what was learnt is remembered"


@pytest.mark.parametrize("ended", [2, 3, 4])
def test_a_run_that_ends_while_a_smaller_batch_is_tried_goes_on_with_it(run, tmp_path, ended):
    """By Ctrl-C at the first redone repeat, the second, or the last one: a cell's figures are of one batch."""

    def survives(batch, time):
        if batch == 7 and time == ended - 1 and not told:
            told.append(batch)
            raise KeyboardInterrupt
        return "ok" if batch < 8 or (batch == 8 and time <= 2) else "oom_host"

    told = []
    launcher = Launcher(survives)
    with pytest.raises(KeyboardInterrupt):
        run(launcher, CELL)
    records, _ = run(launcher, CELL)
    assert [r.status for r in records] == ["ok"] * 3
    assert {r.load.policy.gpu_batch_size for r in records} == {7}
    launched = len(launcher.launched)
    again, _ = run(launcher, CELL)
    assert again == records and len(launcher.launched) == launched, "it is done then"


def test_a_cell_of_which_no_batch_survives_is_not_tried_for_ever(run):
    launcher = Launcher(lambda batch, time: "oom_host")
    records, _ = run(launcher, CELL)
    launched = len(launcher.launched)
    again, _ = run(launcher, CELL)
    assert again == records and len(launcher.launched) == launched


def test_a_trial_that_others_disturbed_is_launched_once_more(run):
    """The slow one would end the search, and be remembered."""

    class Slowed(Busy):
        def launch(self, request):
            done = super().launch(request)
            slow = 0.1 if self.others[len(self.launched) - 1] > 1 else 1.0
            metrics = {name: slow * value for name, value in done.measured.metrics.items()}
            return replace(done, measured=replace(done.measured, metrics=metrics))

    cell = replace(CELL, policy=api.OffloadPolicy(2), repeats=1)
    launcher = Slowed(0.0, 5.0, *[0.0] * 9)  # the trial of four
    records, _ = run(launcher, cell)
    assert launcher.launched == [2, 4, 4, 8, 8]
    assert records[0].load.policy.gpu_batch_size == 8


def test_a_search_of_what_only_scores_compares_what_is_scored(run):
    class Scores(Launcher):
        def launch(self, request):
            done, batch = super().launch(request), request.spec.policy.gpu_batch_size
            metrics = {"generation_throughput_tok_s": None, "score_throughput_tok_s": batch if batch <= 4 else 1.0}
            return replace(done, measured=replace(done.measured, metrics=metrics))

    records, _ = run(Scores(lambda batch, time: "ok"), replace(CELL, policy=api.OffloadPolicy(2), repeats=1))
    assert records[0].load.policy.gpu_batch_size == 4
    assert [t.throughput_tok_s for t in records[0].tuning] == [2, 4, 1.0]


CANDIDATES = {"options.width": (1, 2, 3), "policy.kv_bits": (8,), "policy.compute_dtype": ("float32", "auto")}


@pytest.mark.parametrize(
    ("tune", "tried"),
    [
        # width 1 is the cell's own; width 3 survives 16 only; 8 bits are slower; float32 survives 8 only, and is faster
        ("max_batch", "16 32 24 20 20w2 20w3 10w3 15w3 17w3 15w3k8 15w3f 7w3f 11w3f 9w3f 8w3f"),
        ("none", "16 16w2 16w3 16w3k8 16w3f"),
    ],
)
def test_candidates_are_tried_at_the_best_batch_so_far_and_where_that_dies_at_smaller_ones(tune, tried):
    cell, launched = replace(CELL, tune=tune, options={"width": 1}, candidates=CANDIDATES), []

    def attempt(settings, batch):
        width = settings.get("options.width", 1)
        kv, single = "policy.kv_bits" in settings, "policy.compute_dtype" in settings
        launched.append(f"{batch}{f'w{width}' if width > 1 else ''}{'k8' if kv else ''}{'f' if single else ''}")
        most = 8 if single else 16 if width == 3 else 20
        speed = batch * {1: 1.0, 2: 0.9, 3: 1.5}[width] * (0.5 if kv else 9.0 if single else 1.0)
        return api.Trial(batch, *(("ok", speed) if batch <= most else ("oom_host", None)), "", settings)

    best = choose(search_settings(cell, 16, attempt, 64))
    assert " ".join(launched) == tried
    expected = (8, {"options.width": 3, "policy.compute_dtype": "float32"}), (16, {"options.width": 3})
    assert (best.gpu_batch_size, best.settings) == expected[tune == "none"]


def test_a_candidate_that_cannot_catch_up_is_given_up():
    """At batch 8 it has a third of the speed of batch 16: no batch up to 16 can make that up."""
    cell = replace(CELL, candidates={"options.width": (2,)})
    speeds = {(16, 0): 15.0, (8, 2): 5.0}
    found = search_settings(
        cell, 16, lambda s, batch: api.Trial(batch, *(("ok", v) if (v := speeds.get((batch, s.get("options.width", 0))))
                                                      else ("oom_host", None)), "", s), 16
    )  # fmt: skip
    assert [t.gpu_batch_size for t in found] == [16, 16, 8]


def test_a_cell_that_searches_no_batch_can_list_some():
    cell = replace(CELL, tune="none", candidates={"policy.gpu_batch_size": (16, 32), "options.width": (2,)})
    found = search_settings(cell, 8, lambda s, batch: api.Trial(batch, "ok", 20.0 - abs(batch - 16), "", s))
    assert [(t.gpu_batch_size, t.settings) for t in found] == [(8, {}), (16, {}), (32, {}), (16, {"options.width": 2})]


def test_a_cell_runs_with_the_candidates_that_won_and_says_so(run):
    class Widths(Launcher):
        def launch(self, request):
            result = super().launch(request)
            speed = {1: 1.0, 2: 3.0, 3: 2.0}[request.spec.options.get("width", 1)]
            return replace(result, measured=api.CellResult(metrics={"generation_throughput_tok_s": speed}))

    launcher = Widths(lambda batch, time: "ok")
    cell = replace(CELL, tune="none", candidates={"options.width": (2, 3)})
    records, _ = run(launcher, cell)
    assert [t.settings for t in records[0].tuning] == [{}, {"options.width": 2}, {"options.width": 3}]
    assert {r.metrics["generation_throughput_tok_s"] for r in records} == {3.0}
    assert {(r.spec.options.get("width"), r.settings["options.width"]) for r in records} == {(None, 2)}
    assert len(launcher.launched) == 6
    again = Widths(lambda batch, time: "ok")
    run(again, cell, out="other")
    assert len(again.launched) == 3, "the search is remembered"


@pytest.mark.parametrize("tune", ["none", "max_batch"])
def test_a_known_refusal_needs_no_environment_and_no_launch(run, monkeypatch, tune):
    launcher = Launcher(lambda batch, time: "ok")
    monkeypatch.setattr(launcher, "environment", Mock(side_effect=AssertionError("built")))
    cell = replace(CELL, tune=tune, policy=api.OffloadPolicy(8, schedule="sweep"), repeats=3)
    (record,), _ = run(launcher, cell)
    assert record.status == "unsupported" and record.reason.startswith("engine fake has no policy.schedule")
    assert record.model is not None and not launcher.launched


def test_a_cell_without_a_surviving_batch_keeps_its_failure(run):
    launcher = Launcher(lambda batch, time: "ok" if batch == 1 and time == 1 else "oom_host")
    records, _ = run(launcher, CELL)
    assert {r.status for r in records} == {"oom_host"}


@pytest.mark.parametrize(("status", "searches"), [("unsupported", 2), ("oom_host", 2), ("infeasible", 1)])
def test_only_infeasible_searches_are_remembered(run, status, searches):
    counts = []
    for out in ("one", "two"):
        launcher = Launcher(lambda batch, time: status)
        run(launcher, CELL, out=out)
        counts.append(bool(launcher.launched))
    assert sum(counts) == searches


def test_a_model_that_changed_since_the_first_repeat_is_told(run, tmp_path):
    cell = replace(CELL, tune="none", repeats=1)
    run(Launcher(lambda *_: "ok", "old"), cell)
    with pytest.raises(api.HarnessError, match=r"^model fake changed since cell was measured; --fresh"):
        run(Launcher(lambda *_: "ok", "new"), replace(cell, repeats=2))


def test_a_model_s_own_folder_is_in_no_record(run, tmp_path):
    folder = tmp_path / "models" / "mine"
    folder.mkdir(parents=True)
    cell = replace(CELL, model=api.ModelSpec(str(folder)), tune="none", repeats=1)
    (record,), _ = run(Launcher(lambda *_: "ok"), cell)
    assert record.spec.model.id == "$MODELS/mine"


@given(start=st.integers(1, 300), largest=st.integers(0, 2000), ceiling=st.integers(1, 3000))
def test_the_search_ends_within_a_quarter_of_the_largest(start, largest, ceiling):
    tried = []

    def attempt(batch):
        tried.append(batch)
        return api.Trial(batch, "ok" if batch <= largest else "oom_host", float(batch))

    best = choose(search_max_batch(start, attempt, ceiling))
    found = best and best.gpu_batch_size
    largest = min(largest, ceiling)
    assert max(tried) <= ceiling
    assert len(tried) == len(set(tried)) <= 16
    if largest == 0:
        assert found is None
    else:
        assert found <= largest < found + max(2, found // 4 + 1)


@pytest.mark.parametrize(
    ("ends", "chosen"),
    [
        ({8: ("unsupported", None)}, None),
        ({8: ("ok", 1.0), 16: ("oom_host", 1.0), 12: ("disk_full", 1.0)}, 8),
        ({8: ("ok", 2.0), 16: ("ok", 3.0), 32: ("ok", 3.2), 64: ("ok", 2.5)}, 32),
    ],
    ids=["a failure that is not about size", "a full disk during the bisection", "a larger batch that is slower"],
)
def test_what_ends_the_search(ends, chosen):
    trials = search_max_batch(8, lambda batch: api.Trial(batch, *ends[batch]))
    assert [t.gpu_batch_size for t in trials] == list(ends)
    best = choose(trials)
    assert (best and best.gpu_batch_size) == chosen


def test_the_fastest_survivor_is_chosen_not_the_largest():
    trials = [api.Trial(8, "ok", 2.0), api.Trial(16, "ok", 1.5), api.Trial(32, "timeout", None)]
    assert choose(trials).gpu_batch_size == 8


def test_searches_are_remembered_per_machine_cell_and_version(tmp_path):
    def remembered(machine="a", torch="2", cap="cgroup-v1"):
        memory = Remembered(tmp_path / "max_batch.json", machine)
        return memory, memory.key(CELL, {"torch": torch}, "model", cap)

    trials = (api.Trial(4, "ok", 1.0), api.Trial(8, "oom_host", None, "killed"))
    memory, key = remembered()
    memory.put(key, trials)
    for changes in ({}, {"machine": "b"}, {"torch": "3"}, {"cap": "monitor"}):
        memory, key = remembered(**changes)
        assert memory.get(key) == (None if changes else trials)


def test_damaged_memory_costs_a_search_not_a_run(tmp_path):
    path = tmp_path / "max_batch.json"
    path.write_text("")
    Remembered(path / "below a file", "m").put("key", [api.Trial(1, "ok", 1.0)])
    memory = Remembered(path, "m")
    for damage in ("{half", "[]", '{"key": 3}', '{"key": [{"new": 1}]}', '{"key": [3]}'):
        path.write_text(damage)
        assert memory.get("key") is None
    memory.put("key", [api.Trial(1, "ok", 1.0)])
    assert memory.get("key")


def test_a_trial_that_thrashes_is_ended_early_and_an_honest_one_is_not():
    patience = Patience(1800)
    assert patience.seconds(8) == 1800  # the first trial has the cell's own timeout
    patience.learn(8, 100)
    assert 200 < patience.seconds(16) < 2 * 200  # twice the batch at the same speed, and hardly twice that
    assert patience.seconds(4) == patience.seconds(8) > 100  # a smaller one is mostly start-up
    assert patience.seconds(4096) == 1800
    patience.learn(16, 400)
    assert patience.seconds(24) > 600


class Busy(Launcher):
    """A machine on which other processes take so many seconds of CPU time during each launch, of ten of its own."""

    def __init__(self, *others):
        super().__init__(lambda batch, time: "ok")
        self.others = others

    def launch(self, request):
        done = super().launch(request)
        other = self.others[len(self.launched) - 1]
        used = (("cpu_own_s", 10.0), ("cpu_other_s", other), ("cpu_steal_s", 0.0))
        measurements = tuple(api.Measurement(name, "s", (seconds,), "generate") for name, seconds in used)
        return replace(done, measured=replace(done.measured, measurements=measurements))


def test_a_launch_that_others_disturbed_runs_again_a_bounded_number_of_times(run, tmp_path):
    """And its last try counts, even if that was disturbed too: reports and compare leave it out."""
    cell = replace(CELL, tune="none", repeats=2)
    records, progress = run(Busy(5.0, 0.1, 3.0, 3.0, 3.0), cell)
    assert [(r.repeat, r.disturbed) for r in records] == [(0, False), (1, True)]
    stored = list(Store(tmp_path / "out").records())
    assert [(r.repeat, r.disturbed) for r in stored] == [(0, True), (0, False), *[(1, True)] * 3]
    assert progress.finished.call_count == 5
    progress.note.assert_any_call("cell: others took 33% of the CPU; it runs again")
    again, _ = run(Busy(), cell)
    assert again == records, "a resumed run does not try for ever"
    run(Busy(5.0, 5.0), cell, out="once", extra_tries=0)
    assert len(list(Store(tmp_path / "once").records())) == 2


def test_where_tries_do_not_help_disturbed_launches_run_once(run, tmp_path):
    """Until one was not disturbed: then others may have gone."""
    cell = replace(CELL, tune="none", repeats=6)
    busy = [*[3.0] * 3, *[4.0] * 3, 2.0, 0.1, *[5.0, 0.1], 1.0, 0.1]
    records, progress = run(Busy(*busy), cell)
    stored = [(r.repeat, r.disturbed) for r in Store(tmp_path / "out").records()]
    tries = {repeat: [disturbed for other, disturbed in stored if other == repeat] for repeat in range(6)}
    assert tries == {0: [True] * 3, 1: [True] * 3, 2: [True], 3: [False], 4: [True, False], 5: [True, False]}
    assert [r.disturbed for r in records] == [True, True, True, False, False, False]
    progress.note.assert_any_call("cell: others took 17% of the CPU, as in the last 4 tries; it does not run again")


RATES = {"bfloat16": {"16": (300.0, 410.0), "64": (779.0,), "256": (952.0,)},
         "float32": {"16": (121.0,), "64": (206.0,), "256": (245.0,)}}  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "single", "spared"),
    [
        (64, RATES["float32"], ["float32"]),
        (64, {**RATES["float32"], "256": (500.0,)}, []),  # more than half, by some rows of a pass
        (64, {**RATES["float32"], "16": (400.0,)}, ["float32"]),  # by fewer rows than the batch has
        (512, RATES["float32"], []),  # nothing was measured
        (64, {}, []),
    ],
)
def test_a_dtype_that_multiplies_at_less_than_half_the_rate_is_not_tried(batch, single, spared):
    cell = replace(CELL, policy=api.OffloadPolicy(batch), candidates=CANDIDATES)
    rates = api.MachineRates(gemm_flops={**RATES, "float32": single})
    trials, searched = without_slow_dtypes(cell, "bfloat16", lambda: rates)
    assert [t.settings["policy.compute_dtype"] for t in trials] == spared
    assert searched.candidates["policy.compute_dtype"] == tuple(
        dtype for dtype in ("float32", "auto") if dtype not in spared
    )
    assert searched.candidates["options.width"] == (1, 2, 3)
    assert lasting((*trials, api.Trial(batch, "ok", 1.0)))
    assert choose((*trials, api.Trial(batch, "ok", 1.0))).settings == {}


def test_the_machine_is_measured_for_a_search_among_dtypes_only():
    def unasked():
        raise AssertionError("measured")

    assert without_slow_dtypes(replace(CELL, candidates={"policy.kv_bits": (8,)}), "bfloat16", unasked)[0] == ()
    cell = replace(CELL, candidates={"policy.compute_dtype": ("float32",)})
    assert without_slow_dtypes(cell, "bfloat16", lambda: None) == ((), cell), "a suite without probes"
    own = replace(
        cell, policy=replace(cell.policy, compute_dtype="float32"), candidates={"policy.compute_dtype": ("bfloat16",)}
    )
    rates = api.MachineRates(gemm_flops=RATES)
    assert without_slow_dtypes(own, "bfloat16", lambda: rates)[0] == ()


@pytest.mark.parametrize("predictions", [True, False])
def test_a_host_is_measured_for_predictions_only(run, monkeypatch, tmp_path, predictions):
    launcher = Launcher(lambda batch, time: "ok")
    launcher.prepare = lambda *_: replace(MODEL, path=str(tmp_path / "model"))
    launcher.measure_machine = lambda *_: api.MachineRates()
    launcher.calibrate = Mock(side_effect=api.Refusal("error", "too small"))
    entry = replace(runner.registry.ENGINES["fake"], predicted=True)
    monkeypatch.setattr(runner.registry, "engine_entry", lambda name: entry)
    run(launcher, replace(CELL, tune="none", repeats=1), machine_probe=True, predictions=predictions)
    assert launcher.calibrate.called is predictions
