"""The search for the largest batch: right for any threshold, few launches, never the same batch twice."""

from hypothesis import given
from hypothesis import strategies as st

from harness.api import ModelSpec, RunSpec, Trial, WorkloadSpec
from harness.run.tuning import Patience, Remembered, choose, search_max_batch

SPEC = RunSpec("fake", ModelSpec("fake"), WorkloadSpec(), tune="max_batch")


@given(start=st.integers(1, 300), largest=st.integers(0, 2000), ceiling=st.integers(1, 3000))
def test_the_search_ends_within_a_quarter_of_the_largest(start, largest, ceiling):
    tried = []

    def attempt(batch):
        tried.append(batch)
        return Trial(batch, "ok" if batch <= largest else "oom_host", float(batch))

    found = choose(search_max_batch(start, attempt, ceiling))
    largest = min(largest, ceiling)
    assert max(tried) <= ceiling
    assert len(tried) == len(set(tried)) <= 16
    if largest == 0:
        assert found is None
    else:
        assert found <= largest < found + max(2, found // 4 + 1)


def test_a_failure_that_is_not_about_size_stops_the_search():
    trials = search_max_batch(8, lambda batch: Trial(batch, "unsupported", None))
    assert len(trials) == 1
    assert choose(trials) is None


def test_a_passing_trouble_in_the_bisection_ends_it_too():
    ends = {8: "ok", 16: "oom_host", 12: "disk_full"}
    trials = search_max_batch(8, lambda batch: Trial(batch, ends[batch], 1.0))
    assert [t.gpu_batch_size for t in trials] == [8, 16, 12]


def test_what_survives_but_does_not_pay_ends_the_search():
    speeds = {8: 2.0, 16: 3.0, 32: 3.2, 64: 2.5}
    trials = search_max_batch(8, lambda batch: Trial(batch, "ok", speeds[batch]))
    assert [t.gpu_batch_size for t in trials] == [8, 16, 32, 64]
    assert choose(trials) == 32


def test_a_cache_that_cannot_be_written_costs_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    Remembered(tmp_path / "file" / "max_batch.json", "m").put("key", [Trial(1, "ok", 1.0)])


def test_the_fastest_survivor_is_chosen_not_the_largest():
    trials = [Trial(8, "ok", 2.0), Trial(16, "ok", 1.5), Trial(32, "timeout", None)]
    assert choose(trials) == 8


def test_searches_are_remembered_per_machine_cell_and_version(tmp_path):
    memory = Remembered(tmp_path / "max_batch.json", "machine-a")
    key = memory.key(SPEC, {"torch": "2"}, "model", "cgroup-v1")
    trials = (Trial(4, "ok", 1.0), Trial(8, "oom_host", None, "killed"))
    memory.put(key, trials)
    assert Remembered(tmp_path / "max_batch.json", "machine-a").get(key) == trials
    other = Remembered(tmp_path / "max_batch.json", "machine-b")
    assert other.get(other.key(SPEC, {"torch": "2"}, "model", "cgroup-v1")) is None
    assert memory.get(memory.key(SPEC, {"torch": "3"}, "model", "cgroup-v1")) is None
    assert memory.get(memory.key(SPEC, {"torch": "2"}, "model", "monitor")) is None


def test_damaged_memory_costs_a_search_not_a_run(tmp_path):
    path = tmp_path / "max_batch.json"
    memory = Remembered(path, "m")
    for damage in ("{half", "[]", '{"key": 3}', '{"key": [{"new": 1}]}', '{"key": [3]}'):
        path.write_text(damage)
        assert memory.get("key") is None
    memory.put("key", [Trial(1, "ok", 1.0)])
    assert memory.get("key")


def test_the_first_trial_has_the_cells_own_timeout():
    assert Patience(1800).seconds(8) == 1800


def test_a_trial_that_thrashes_is_ended_early_and_an_honest_one_is_not():
    patience = Patience(1800)
    patience.learn(8, 100)
    assert 200 < patience.seconds(16) < 2 * 200  # twice the batch at the same speed, and hardly twice that
    assert patience.seconds(4) == patience.seconds(8) > 100  # a smaller one is mostly start-up
    assert patience.seconds(4096) == 1800
    patience.learn(16, 400)
    assert patience.seconds(24) > 600
