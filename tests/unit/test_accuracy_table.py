"""What reports say of answers: losses by hand, perplexities as ratios, and what a reader must be told."""

import math
from collections.abc import Sequence
from dataclasses import replace

from harness.api import Accuracy, Bits, LoadReport, OffloadPolicy, RunRecord, WorkloadSpec
from reports.accuracy import accuracy_remarks, accuracy_table
from reports.sections import provenance
from reports.summary import summary_rows
from reports.text import MISSING
from tests import records
from tests.records import SMALL_MODEL, cell


def record(name: str, bits: Bits, right: Sequence[float], nats: Sequence[float], reference: bool = False) -> RunRecord:
    engine, workload = "lm_eval_hf" if reference else "offload", WorkloadSpec(kind="task", task="t")
    spec = cell(name, engine, workload=workload, policy=OffloadPolicy(weight_bits=bits), reference=reference)
    figures = {"acc": sum(right) / len(right), "acc_stderr": 0.1, "word_perplexity": math.exp(-sum(nats) / len(nats))}
    return records.record(
        spec, requests=(),
        load=LoadReport(10, 10, 1, spec.policy, "float32", (0, 1, 0)),
        metrics={"score_throughput_tok_s": 5.0 + bits},
        model=replace(SMALL_MODEL, quantized_as="Q4_1"),
        accuracy=Accuracy("t", "by hand", len(right), figures, {"acc": tuple(right), "word_perplexity": tuple(nats)},
                          {"word_perplexity": (1.0,) * len(nats)}, truncated=2),
    )  # fmt: skip


def lines(*records: RunRecord) -> dict[tuple[str, str], list[str]]:
    table = accuracy_table(summary_rows(records))
    assert "by hand" in table.caption
    found = [[cell.text for cell in row] for body in table.bodies for row in body.rows]
    return {(line[0], line[1]): line[2:] for line in found}


def test_answers_are_compared_in_pairs_with_the_exact_ones():
    exact = record("exact", 16, [1.0] * 60 + [0.0] * 40, [-3.0, -5.0] * 50)
    few = record("four", 4, [1.0] * 45 + [0.0] * 55, [-3.1, -5.1] * 50)
    found = lines(exact, few)
    assert found["exact", "acc"][4:] == [MISSING] * 4 + [""]
    *known, interval, largest, p, verdict = found["four", "acc"]
    assert known == ["0.450", "0.100", "100", "2", "-0.15"]
    assert (largest, p, verdict[:6]) == ("1", "< 0.001", "lower,")
    low, high = map(float, interval.split(" to "))
    assert -0.23 < low < -0.15 < high < -0.07


def test_perplexities_are_compared_as_ratios():
    exact = record("exact", 16, [1.0, 0.0] * 6, [-3.0, -5.0] * 6)
    same = record("8", 8, [1.0, 0.0] * 6, [-3.0, -5.0] * 6)
    found = lines(exact, same, record("four", 4, [1.0, 0.0] * 6, [-3.1, -5.1] * 6))
    *_, against, interval, largest, p, verdict = found["four", "word_perplexity"]
    assert against == f"+{100 * math.expm1(0.1):.2f}%"
    assert interval == f"{against} to {against}"
    assert (largest, p, verdict[:6]) == ("0.1", MISSING, "a loss")
    assert found["8", "word_perplexity"][-1] == "the same answers"
    assert "the test detects 0.658 with" in found["8", "acc"][-1]


def test_exact_answers_are_compared_with_a_reference_by_their_largest_difference():
    ours = record("ours", 16, [1.0, 0.0], [-3.0, -5.0])
    other = record("reference", 16, [1.0, 0.0], [-3.0, -5.0001], reference=True)
    *_, largest, _, verdict = lines(ours, other)["ours", "word_perplexity"]
    assert largest in ("0.0001", "1e-04") and verdict == ""


def test_a_quantized_file_gets_a_remark_and_the_provenance_names_the_hash_of_each_data_file():
    one = record("exact", 16, [1.0], [-1.0])
    (remark,) = accuracy_remarks(summary_rows([one]))
    assert "(Q4_1)" in remark and "only indicate" in remark
    told = provenance([replace(one, accuracy=replace(one.accuracy, files={"a/b.csv": "0f" * 32}))])
    assert ["sha256.a/b.csv", "0f" * 32] in [[cell.text for cell in row] for row in told.bodies[0].rows]


def test_what_a_search_chose_decides_whether_answers_are_exact():
    """A cell that asked for 16 bits and ran in 8, as that was faster, is judged and judges none."""
    exact, found = (record(name, 16, [1.0, 0.0] * 6, [-3.0, -5.0] * 6) for name in ("exact", "found"))
    assert found.load is not None
    spec = replace(found.spec, candidates={"policy.kv_bits": (8,)})
    found = replace(found, spec=spec, fingerprint=spec.fingerprint(),
                    load=replace(found.load, policy=OffloadPolicy(kv_bits=8)))  # fmt: skip
    shown = lines(exact, found)
    assert shown["exact", "acc"][4:8] == [MISSING] * 4
    assert shown["found", "acc"][4] != MISSING


def test_few_examples_are_not_judged():
    exact, few = record("exact", 16, [1.0] * 9, [-3.0] * 9), record("four", 4, [0.0] * 9, [-9.0] * 9)
    assert lines(exact, few)["four", "acc"][-1] == "fewer than 10 examples: too few to judge"
