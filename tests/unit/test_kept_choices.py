"""What multiplies is chosen once on a machine, and stays chosen however busy a later moment is."""

import pytest
import torch

from engines.offload.kernels import HostKernels
from engines.offload.memory.storage import Plain
from engines.offload.weights import gemm, torch_threads
from engines.offload.weights.kept_choices import KeptChoices
from engines.offload.weights.torch_threads import choose_torch_threads
from tests.offload import with_kernels

STORED = Plain("bfloat16")


@pytest.fixture
def kernels(tmp_path):
    found = HostKernels(with_kernels(tmp_path / "cache"), threads=1)
    KeptChoices(found.cache).clear()
    yield found
    found.close()


@pytest.fixture
def measured(monkeypatch):
    """What trials were timed; the last in the list is the fastest, or the first."""
    calls, order = [], {"reverse": False}

    def seconds(trials):
        calls.append(len(trials))
        times = [2.0**-i for i in range(len(trials))]
        return times[::-1] if order["reverse"] else times

    monkeypatch.setattr(gemm, "_seconds_per_flop", seconds)
    return calls, order


def choose(kernels, **options):
    return gemm.choose_gemm(STORED, 64, ["bfloat16", "float32"], kernels, **options).label


def test_a_choice_stays_until_the_machine_is_calibrated(kernels, measured):
    calls, order = measured
    first = choose(kernels)
    order["reverse"] = True
    assert choose(kernels) == first
    assert calls[0] > 1
    assert calls[-1] == 1, "the kept way alone is timed"
    KeptChoices(kernels.cache).clear()
    assert choose(kernels) != first


def test_a_way_must_be_fast_with_many_rows_and_with_few(kernels, monkeypatch):
    """It is not known which a load will run. The second way is slow with few, the third with many."""
    times = iter([[1.0, 0.9, 9.0], [1.0, 9.0, 0.9]])
    monkeypatch.setattr(gemm, "_seconds_per_flop", lambda trials: [*next(times), *[9.0] * len(trials)][: len(trials)])
    assert choose(kernels) == "torch bfloat16"


def test_another_question_has_an_answer_of_its_own(kernels, measured):
    first = choose(kernels)
    measured[1]["reverse"] = True
    other = HostKernels(kernels.cache, threads=2)
    assert choose(other) != first
    other.close()
    assert gemm.choose_gemm(STORED, 64, ["float32"], kernels).dtype == "float32"
    assert choose(kernels) == first


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1', '{"a": [2]}', "\x00", "[" * 100_000])
def test_a_damaged_file_keeps_nothing(kernels, measured, text):
    path = kernels.cache / "gemm_choices.json"
    path.write_text(text)
    first = choose(kernels)
    measured[1]["reverse"] = True
    assert choose(kernels) == first


def test_a_kept_way_that_is_gone_is_replaced(kernels, measured):
    first = choose(kernels)
    path = kernels.cache / "gemm_choices.json"
    path.write_text(path.read_text().replace(f': "{first}"', ': "abacus"'))
    assert choose(kernels) == first
    assert "abacus" not in path.read_text()


def test_a_cache_that_cannot_be_written_only_forgets(kernels, measured):
    path = kernels.cache / "gemm_choices.json"
    path.unlink(missing_ok=True)
    path.mkdir()
    try:
        assert choose(kernels) == choose(kernels)
        assert measured[0][0] == measured[0][1] > 1
    finally:
        path.rmdir()


@pytest.fixture
def pool(monkeypatch):
    """A pool in a process whose idle threads sleep, of two threads."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    return object()


@pytest.fixture
def timed(monkeypatch):
    """The rows that were timed, and the seconds that one thread takes, and both."""
    asked, seconds = [], [1.0, 1.0]

    def times(counts, rows, hidden, dtype):
        asked.append(rows)
        return seconds

    monkeypatch.setattr(torch_threads, "_seconds", times)
    return asked, seconds


def test_all_threads_of_torch_must_be_clearly_faster_than_one(pool, timed, tmp_path):
    _, seconds = timed
    for hidden, (both, chosen) in enumerate([(1.2, 1), (0.9, 1), (0.7, 2)], 64):
        seconds[1] = both
        assert choose_torch_threads([pool], 100, hidden, "bfloat16", KeptChoices(tmp_path)) == chosen


def test_torchs_threads_stay_chosen_for_loads_of_about_as_many_rows(pool, timed, tmp_path):
    asked, seconds = timed
    choices = KeptChoices(tmp_path)
    assert choose_torch_threads([pool], 100, 64, "bfloat16", choices) == 1
    seconds[1] = 0.1
    assert choose_torch_threads([pool], 128, 64, "bfloat16", choices) == 1
    assert choose_torch_threads([pool], 129, 64, "bfloat16", choices) == 2
    assert asked == [128, 256]


def test_torch_has_all_its_threads_where_nothing_else_multiplies(pool, timed, tmp_path):
    assert choose_torch_threads([None], 100, 64, "bfloat16", KeptChoices(tmp_path)) == 2
    assert timed[0] == []


def test_torch_has_one_thread_where_its_idle_ones_spin(pool, timed, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    timed[1][1] = 0.1
    assert choose_torch_threads([None, pool], 100, 64, "bfloat16", KeptChoices(tmp_path)) == 1


def test_timing_torchs_threads_leaves_their_number():
    before = torch.get_num_threads()
    one, two = torch_threads._seconds((1, 2), 64, 64, torch.bfloat16)
    assert 0 < one < 1
    assert 0 < two < 1
    assert torch.get_num_threads() == before


class Trial:
    """A product that takes so many milliseconds by its turn, the last for ever, on a clock of its own."""

    pool = None

    def __init__(self, clock, *milliseconds):
        self.clock, self.milliseconds, self.turns = clock, milliseconds, []

    def seconds(self, turn):
        self.turns.append(turn)
        took = self.milliseconds[min(turn, len(self.milliseconds) - 1)] / 1000
        self.clock[0] += took
        return took


@pytest.mark.parametrize(("others", "rounds"), [(1, 12), (40, 8), (1000, 4)])
def test_a_load_waits_for_few_rounds_where_they_are_slow(monkeypatch, others, rounds):
    """The fastest of each counts, and all have as many."""
    clock = [100.0]
    monkeypatch.setattr(gemm.time, "monotonic", lambda: clock[0])
    slow, quick = Trial(clock, others), Trial(clock, 2, 1, 0.5, 3)
    best = gemm._seconds_per_flop([slow, quick])
    assert best == [others / 1000, 0.0005]
    assert slow.turns == quick.turns == list(range(rounds))
