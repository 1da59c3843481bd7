"""The runner's own decisions, with launches that end as they are told to."""

from dataclasses import replace

import pytest

from engines.adapters.fake import MODEL
from harness.api import (
    CellResult,
    HarnessError,
    LaunchResult,
    ModelSpec,
    OffloadPolicy,
    RunSpec,
    SuiteSpec,
    WorkloadSpec,
)
from harness.run import runner
from harness.run.store import Store


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
        return LaunchResult(status, "told", "2026-11-01", wall_s=1.0, measured=CellResult(metrics=metrics))


class Silent:
    """Progress that nobody sees, less what is noted."""

    def __init__(self):
        self.notes, self.steps, self.done = [], 0, 0

    def planned(self, steps, already_done):
        self.steps = len(steps)

    def added(self, steps):
        self.steps += len(steps)

    def finished(self, step, record):
        self.done += 1

    def note(self, text):
        self.notes.append(text)

    def __getattr__(self, name):
        return lambda *_: None


CELL = RunSpec("fake", ModelSpec("fake"), WorkloadSpec(num_requests=8), OffloadPolicy(gpu_batch_size=8), suite="s",
               name="cell", tune="max_batch")  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs cells with a launcher; gives the last record of each launch, and the progress."""
    suite = tmp_path / "s.yaml"
    suite.write_text("")

    def go(launcher, *cells, out="out"):
        monkeypatch.setattr(runner, "CellLauncher", lambda cache, places: launcher)
        progress = Silent()
        made = SuiteSpec("s", "", cells, machine_probe=False)
        return runner.Runner(made, suite, tmp_path / out, tmp_path / "cache", progress, "c").run(cells), progress

    return go


def test_a_batch_that_does_not_survive_again_gives_way_to_a_smaller_one_in_all_repeats(run, tmp_path):
    def survives(batch, time):
        return "ok" if batch < 8 or (batch == 8 and time <= 2) else "oom_host"  # the trial and the first repeat

    launcher = Launcher(survives)
    records, progress = run(launcher, CELL)
    assert [(r.status, r.spec.policy.gpu_batch_size) for r in records] == [("ok", 8)] * 3, "the cell as it was asked"
    assert [r.metrics["generation_throughput_tok_s"] for r in records] == [7.0] * 3
    assert [r.status for r in Store(tmp_path / "out").records()] == ["ok", "oom_host", "ok", "ok", "ok"]
    tried = [(t.gpu_batch_size, t.status) for t in records[-1].tuning]
    assert tried == [(8, "ok"), (8, "oom_host"), (4, "ok"), (7, "ok")]
    assert progress.steps == progress.done == 5
    assert "cell: batch 8 did not survive again; a smaller one is taken" in progress.notes
    again = Launcher(survives)
    run(again, CELL, out="other")
    assert set(again.launched) == {7}, "what was learnt is remembered"


def test_where_nothing_is_left_the_failure_stands(run):
    launcher = Launcher(lambda batch, time: "ok" if batch == 1 and time == 1 else "oom_host")
    records, _ = run(launcher, CELL)
    assert {r.status for r in records} == {"oom_host"}


@pytest.mark.parametrize(("status", "searches"), [("unsupported", 2), ("oom_host", 2), ("infeasible", 1)])
def test_only_what_cannot_end_otherwise_is_remembered(run, status, searches):
    counts = []
    for out in ("one", "two"):
        launcher = Launcher(lambda batch, time: status)
        run(launcher, CELL, out=out)
        counts.append(bool(launcher.launched))
    assert sum(counts) == searches


def test_a_model_that_changed_since_the_first_repeat_is_told(run, tmp_path):
    cell = replace(CELL, tune="none", repeats=1)
    run(Launcher(lambda *_: "ok", "old"), cell)
    with pytest.raises(HarnessError, match=r"^model fake changed since cell was measured; --fresh"):
        run(Launcher(lambda *_: "ok", "new"), replace(cell, repeats=2))


def test_a_model_s_own_folder_is_in_no_record(run, tmp_path):
    folder = tmp_path / "models" / "mine"
    folder.mkdir(parents=True)
    cell = replace(CELL, model=ModelSpec(str(folder)), tune="none", repeats=1)
    (record,), _ = run(Launcher(lambda *_: "ok"), cell)
    assert record.spec.model.id == "$MODELS/mine"
