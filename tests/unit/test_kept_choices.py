"""What multiplies is chosen once on a machine, and stays chosen however busy a later moment is."""

import pytest

from engines.offload.kernels import HostKernels
from engines.offload.memory.storage import Plain
from engines.offload.weights import gemm
from engines.offload.weights.kept_choices import KeptChoices
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
