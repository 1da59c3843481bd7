"""Online workloads: arrival processes and lengths have the moments they claim, seeds fix prefixes, refusals."""

import itertools
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import registry
from harness.api import Conversation, HarnessError, LengthSpec, RunSpec, Slo, WorkloadSpec, from_json, to_json
from harness.suite.config import load_cell
from suites.lengths import DATA_SETS, lengths_of

DATA = Path(__file__).parents[3] / "shared" / "data"
AZURE = DATA / "trace_azure_llm_2023" / "AzureLLMInferenceTrace_conv.csv"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
CELL = {"engine": "fake", "model": {"id": "fake"}}


def taken(spec: WorkloadSpec, count: int, seed: int = 0, rate: float | None = None) -> list[Conversation]:
    return list(itertools.islice(registry.arrivals(spec).conversations(1000, seed, rate), count))


def arrivals(count: int, seed: int = 0, rate: float | None = None, **keys: object) -> list[float]:
    spec = WorkloadSpec("arrivals", 4, 4, **{"rate": 2.0} | keys)
    return [c.arrival_s for c in taken(spec, count, seed, rate)]


@pytest.mark.parametrize(("process", "cv"), [("poisson", 1.0), ("gamma", 0.5), ("gamma", 2.5), ("constant", 0.0)])
def test_intervals_have_the_mean_of_the_rate_and_the_variation_of_the_process(process: str, cv: float) -> None:
    times = arrivals(6000, seed=3, process=process, rate=5.0, cv=cv if process == "gamma" else 1.0)
    gaps = [b - a for a, b in itertools.pairwise([0.0, *times])]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.09)
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.1, abs=1e-6)


@pytest.mark.parametrize("name", DATA_SETS)
def test_data_sets_have_nanoflows_means_and_deviations(name: str) -> None:
    expected = {"splitwise": (1155, 1109, 211, 163), "lmsys": (102, 169, 222, 210), "sharegpt": (246, 547, 322, 244)}
    drawn = [lengths_of(name, 10**9, 10**9).of(i, 0) for i in range(20000)]
    for side in (0, 1):
        mean, deviation = expected[name][2 * side : 2 * side + 2]
        values = [lengths[side] for lengths in drawn]
        assert statistics.mean(values) == pytest.approx(mean, rel=0.05)
        assert statistics.pstdev(values) == pytest.approx(deviation, rel=0.2)  # heavy tails


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["poisson", "gamma", "constant"]), st.integers(0, 2**32 - 1), st.integers(1, 20),
    st.integers(1, 20), st.floats(0.01, 1000), st.sampled_from(["arrivals", "conversation"]), st.integers(1, 4),
)  # fmt: skip
def test_a_seed_fixes_every_prefix_and_a_rate_only_stretches_it(
    process: str, seed: int, few: int, more: int, rate: float, kind: str, rounds: int
) -> None:
    spec = WorkloadSpec(kind, 30, 20, process=process, rate=1.0, lengths="lmsys", rounds=rounds, think_s=1.5)
    long, short, fast = taken(spec, few + more, seed), taken(spec, few, seed), taken(spec, few, seed, rate)
    assert long[:few] == short
    of = [[(len(t.prompt), t.max_tokens, t.think_s) for t in c.turns] for c in short]
    assert [[(len(t.prompt), t.max_tokens, t.think_s) for t in c.turns] for c in fast] == of
    assert [c.arrival_s * rate for c in fast] == pytest.approx([c.arrival_s for c in short])
    assert all(a.arrival_s <= b.arrival_s for a, b in itertools.pairwise(long))
    assert all(1 <= len(t.prompt) <= 30 and 1 <= t.max_tokens <= 20 for c in long for t in c.turns)
    assert {len(c.turns) for c in long} == {rounds if kind == "conversation" else 1}
    assert all(c.turns[0].think_s == 0 for c in long)
    assert len({c.id for c in long}) == few + more


def test_two_seeds_are_two_samples() -> None:
    assert arrivals(5, seed=1) != arrivals(5, seed=2)


def test_think_times_are_exponential_of_the_mean() -> None:
    spec = WorkloadSpec("conversation", 1, 1, rate=1.0, rounds=5, think_s=2.0)
    times = [t.think_s for c in taken(spec, 1000) for t in c.turns[1:]]
    assert statistics.mean(times) == pytest.approx(2.0, rel=0.08)
    assert statistics.pstdev(times) == pytest.approx(2.0, rel=0.12)


def test_a_trace_sets_times_and_lengths_and_a_rate_stretches_its_times(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(HEADER + "2023-11-16 18:17:03.5000000,5,3\n2023-11-16 18:17:04.5000000,400,2\n"
                    "2023-11-16 18:17:07.5000000,9,900\n")  # fmt: skip
    spec = WorkloadSpec("arrivals", 100, 50, trace=str(path), process="trace")
    own = taken(spec, 9)
    assert [c.arrival_s for c in own] == [0.0, 1.0, 4.0]
    assert [(len(c.turns[0].prompt), c.turns[0].max_tokens) for c in own] == [(5, 3), (100, 2), (9, 50)]
    assert [c.arrival_s for c in taken(spec, 9, rate=5.0)] == pytest.approx([0.0, 0.1, 0.4])
    only_lengths = WorkloadSpec("arrivals", 100, 50, trace=str(path), rate=2.0)
    assert [len(c.turns[0].prompt) for c in taken(only_lengths, 4)] == [5, 100, 9, 5]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("XXX,5,3\n", "t.csv:2: TIMESTAMP is no time"),
        ("2023-11-16 18:17:03,5,3\n2023-11-16 18:17:02,5,3\n", "t.csv:3: TIMESTAMP is earlier than the line before"),
        ("2023-11-16 18:17:03,5,3\n2023-11-16 18:17:04+00:00,5,3\n", "t.csv:3: TIMESTAMP is no time"),
    ],
)
def test_a_trace_without_usable_times_is_told_with_its_line(tmp_path: Path, lines: str, words: str) -> None:
    (tmp_path / "t.csv").write_text(HEADER + lines)
    with pytest.raises(HarnessError, match=words):
        taken(WorkloadSpec("arrivals", 9, 9, trace=str(tmp_path / "t.csv"), process="trace"), 3)


@pytest.mark.skipif(not AZURE.exists(), reason=f"needs {AZURE.name}")
def test_azures_own_timestamps() -> None:
    spec = WorkloadSpec("arrivals", 10**6, 10**6, trace=str(AZURE), process="trace")
    times = [c.arrival_s for c in taken(spec, 300)]
    assert times[1] == pytest.approx(4.314579, abs=1e-6)
    assert times == sorted(times)


@pytest.mark.parametrize("text", ["lognormal(5)", "lognormal(0, 3)", "uniform(9, 3)", "constant(0)", "zipf(3)", "1.2.3",
                                  "constant(1.2.3)", "uniform(0, 3)", "constant(5, 6)", ""])  # fmt: skip
def test_what_is_no_distribution_is_told(text: str) -> None:
    with pytest.raises(HarnessError, match="no distribution of lengths"):
        lengths_of(LengthSpec(text, "constant(3)"), 10, 10)


ONLINE = {"kind": "arrivals", "rate": 2, "duration": "5min"}


def test_a_suites_keys_become_the_workload() -> None:
    spec = load_cell(CELL | {"workload": ONLINE | {"lengths": "lmsys", "slo": {"normalized_s": 0.2}}})
    workload = spec.workload
    assert (workload.duration_s, workload.rate, workload.slo) == (300.0, 2.0, Slo(normalized_s=0.2))
    assert (
        workload.words
        == "requests, poisson, at 2/s, lengths of lmsys up to prompt 128, generate 16, within normalized_s 0.2 (90 %)"
    )
    assert workload.label == "poisson-2-lmsys-p128g16"
    assert from_json(RunSpec, to_json(spec)) == spec
    chat = load_cell(CELL | {"workload": {"kind": "conversation", "concurrency": 4, "num_requests": 9, "rounds": 3,
                                          "think_time": "2s"}}).workload  # fmt: skip
    assert chat.think_s == 2.0
    assert chat.words == "conversations of 3 rounds of 4 users in a closed loop, prompt 128, generate 16"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_requests": 5}, "ends after `duration` or after `num_requests`"),
        ({"rate": None}, "needs a `rate`"),
        ({"concurrency": 4}, "a closed loop sends when answers come"),
        ({"cv": 2.0}, "workload.cv goes with `process: gamma`"),
        ({"process": "trace"}, "goes with workload.trace"),
        ({"rounds": 2}, "workload.rounds goes with `kind: conversation`"),
        ({"lengths": "lmsis"}, "did you mean 'lmsys'"),
        ({"slo": {}}, "sets no limit"),
        ({"slo": {"ttft_s": 0}}, "workload.slo.ttft_s is 0; it must be more than 0"),
        ({"slo": {"ttft_s": 1, "attainment": 1.5}}, "it must lie in"),
        ({"stop_when": {"ci_width": 5}}, "workload.stop_when.ci_width is 5; it must lie in"),
        ({"stop_when": {"width": 0.05}}, "unknown key 'width' in stop_when"),
        ({"lengths": {"prompt": "constant(3)", "outputs": "constant(3)"}}, "unknown key 'outputs' in workload.lengths"),
        ({"duration_s": 3}, "did you mean 'duration'"),
        ({"rate": "swept"}, "expected a number or 'sweep'"),
        ({"kind": "synthetic", "duration": None}, "workload.rate goes with `kind: arrivals` or `conversation`"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(changed: dict[str, object], words: str) -> None:
    with pytest.raises(HarnessError, match=words):
        load_cell(CELL | {"workload": ONLINE | changed})


def test_an_environment_goes_with_the_launcher_of_environments() -> None:
    server = CELL | {"workload": ONLINE, "environment": "vllm_cpu"}
    assert load_cell(server | {"launcher": "venv"}).environment == "vllm_cpu"
    with pytest.raises(HarnessError, match="environment goes with `launcher: venv`"):
        load_cell(server)
    with pytest.raises(HarnessError, match="did you mean 'vllm_cpu'"):
        load_cell(server | {"launcher": "venv", "environment": "vllm-cpu"})
    other = load_cell(server | {"launcher": "venv", "environment": "llamacpp"})
    assert other.fingerprint() != load_cell(server | {"launcher": "venv"}).fingerprint()


def test_an_online_workload_needs_a_given_policy() -> None:
    with pytest.raises(HarnessError, match="needs a given policy"):
        load_cell(CELL | {"workload": ONLINE, "policy": "max_batch"})
