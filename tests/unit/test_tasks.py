"""Accuracy tasks: prompts byte for byte as they were given, figures by hand, and what is told of broken data."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from harness.api import HarnessError, Score
from harness.api.task import Answers, Circumstances
from suites.tasks import known, measures, names, task
from suites.tasks.data import Data
from suites.tasks.helm import Instance, sampled
from suites.tasks.measures import f1, mean
from suites.tasks.wikitext import FILE, WINDOW, WikiText, _text
from tests.records import Letters, quiet

DATA = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.exists(), reason="needs shared/data")

GIVEN = {
    "em_beer": "em_beer/prompts_test.jsonl",
    "em_fodors_zagats": "em_fodors_zagats/prompts_test.jsonl",
    "em_itunes_amazon": "em_itunes_amazon/prompts_test.jsonl",
    "di_buy": "di_buy/prompts_test.jsonl",
    "di_restaurant": "di_restaurant/prompts_test.jsonl",
    "ed_hospital": "ed_hospital/prompts_sample200.jsonl",
    "helm_mmlu_abstract_algebra": "helm_prompts/mmlu_abstract_algebra.jsonl",
    "helm_mmlu_us_foreign_policy": "helm_prompts/mmlu_us_foreign_policy.jsonl",
    "helm_synthetic_reasoning_pattern_match": "helm_prompts/synthetic_reasoning_pattern_match.jsonl",
    "helm_synthetic_reasoning_natural_easy": "helm_prompts/synthetic_reasoning_natural_easy.jsonl",
    "helm_summarization_xsum": "helm_prompts/summarization_xsum_standin.jsonl",
}


@needs_data
@pytest.mark.parametrize("name", GIVEN)
def test_prompts_are_those_that_were_given_byte_for_byte(name):
    lines = [json.loads(line) for line in (DATA / GIVEN[name]).read_text(encoding="utf-8").splitlines()]
    one = task(name)
    material = one.material(DATA)
    assert len(material.examples) == len(lines)
    for example, line in zip(material.examples, lines, strict=True):
        shown = (example.prompt, *example.shorter)
        left_out = len(example.shorter) - line["n_shots"] if "n_shots" in line else 0
        assert shown[left_out] == line["prompt"]
        right = line.get("gold", line.get("label"))
        assert right in example.answers
        assert one.max_tokens == line["max_tokens"]
        assert list(one.stop) == ([line["stop"]] if isinstance(line["stop"], str) else line["stop"])
    assert {len(digest) for digest in material.files.values()} == {64}


@needs_data
@pytest.mark.parametrize("name", GIVEN)
def test_right_answers_are_worth_all_and_wrong_ones_nothing(name):
    one = task(name)
    examples = one.material(DATA).examples[:300]
    right = one.evaluate(examples, [(f" {e.answers[0]}",) for e in examples])
    first = next(iter(right.outcomes))
    if one.stop == ("\n",):
        assert right.figures[first] == 1
    for wrong in ("zzz", "the"):  # "the" is neither right nor a choice
        assert one.evaluate(examples, [(wrong,)] * len(examples)).figures[first] == 0
    questions = {e.key for e in examples} - {-1}  # one that is asked in three trials is one question
    assert len(right.outcomes[first]) == (right.examples if questions else len(examples))
    assert right.examples == (len(questions) or None)


def test_figures_by_hand():
    assert mean("a", [1.0, 0.0, 1.0, 1.0]) == {"a": 0.75, "a_stderr": pytest.approx((0.75 / 3 / 4) ** 0.5)}
    assert mean("a", [0.5]) == {"a": 0.5, "a_stderr": 0.0}
    # of two yes one was found; of three no one was not said: a wrong answer to it counts as a yes, whatever it was
    assert f1([True, True, False, False, False], [True, False, True, True, False]) == pytest.approx(0.5)
    assert f1([False], [True]) == f1([True], [False]) == 0


@pytest.mark.parametrize(
    ("metric", "gold", "answer", "worth"),
    [
        ("exact_match", "The cat", " The cat ", 1),
        ("exact_match", "The cat", "the cat", 0),
        ("quasi_exact_match", "The cat!", "cat", 1),
        ("quasi_exact_match", "The cat!", "", 0),
        ("prefix_exact_match", "soft", " soft and warm", 1),
        ("quasi_prefix_exact_match", "Soft", "soft. And", 1),
        ("f1_score", "a b c", "b c d", 0.8),  # the article goes: of {b, c} and {b, c, d}
        ("f1_set_match", "The dog is sad and big.", "The dog is big and old.", 0.5),
        ("f1_set_match", "Nothing.", "Nothing.\nRules", 1),
        ("exact_set_match", "The dog is sad and big.", "The dog is big and sad.", 1),
        ("iou_set_match", "The dog is sad and big.", "The dog is big.", 0.5),
        ("iou_set_match", "Nothing.", "The dog is big.", 0),
        ("rouge_2", "the cat sat", "the cat sat", 1),
        ("rouge_2", "the cat sat down", "a cat sat up", 1 / 3),
        ("rouge_2", "cat", "cat", 0),
        ("rouge_2", "dogs barked loudly", "dog barks loudly", 1),  # by their stems
    ],
)
def test_metrics_of_helm(metric, gold, answer, worth):
    assert measures.METRICS[metric](gold, answer) == pytest.approx(worth)


def test_the_best_of_several_answers_and_of_several_right_ones():
    metrics = ("quasi_exact_match", "quasi_exact_match@2")
    found = measures.by_name(metrics, [("Rome", "Roma")], [("Paris", "roma", "rome")], [0]).figures
    assert [found[metric] for metric in metrics] == [0, 1]


def test_trials_of_one_question_count_as_one_example():
    found = measures.by_name(("exact_match",), [("a",)] * 4, [("a",), ("b",), ("a",), ("a",)], [0, 1, 0, 1])
    assert found.outcomes == {"exact_match": (1.0, 0.5)}
    assert found.examples == 2
    assert found.figures["exact_match_stderr"] == pytest.approx(0.25)


@pytest.mark.parametrize("answer", ["BC", ""])
def test_answers_of_multiple_choice_are_one_letter(tmp_path, answer):
    (tmp_path / "mmlu").mkdir()
    for name in ("dev", "val", "test"):
        (tmp_path / "mmlu" / f"abstract_algebra_{name}.csv").write_text(f"q,a,b,c,Answer,{answer}\n")
    with pytest.raises(HarnessError, match=f"'{answer}' is not a letter"):
        task("helm_mmlu_abstract_algebra").material(tmp_path)


def test_worked_examples_are_of_every_class_and_differ_by_trial():
    train = [Instance(f"q{i}", "", "yes" if i < 8 else "no") for i in range(10)]
    for trial in range(3):
        assert [one.label for one in sampled(train, 5, trial)] == ["yes", "no", "yes", "no", "yes"]
    assert sampled(train, 5, 0) != sampled(train, 5, 1)
    assert len(sampled(train[:3], 5, 0)) == 3


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("name,description\na,b\n", "has no column manufacturer"),
        ("name,description,manufacturer\n", "has no rows"),
        ("name,description,manufacturer\na,b\n", "test.csv:2: the row has too few fields"),
        ('name,description,manufacturer\n"a,b,c\n', "test.csv:\\d: unexpected end of data"),
    ],
)
def test_a_broken_table_is_told_with_its_line(tmp_path, table, words):
    for name, text in (("di_buy/test.csv", table), ("wrangling_prefixes/di_buy.txt", "Is it?\n")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(HarnessError, match=words):
        task("di_buy").material(tmp_path)


def test_files_that_are_not_there_not_text_or_not_json(tmp_path):
    data = Data(tmp_path)
    with pytest.raises(HarnessError, match=r"a\.txt does not exist: name the data folder with --data-dir"):
        data.text("a.txt")
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    with pytest.raises(HarnessError, match=r"not UTF-8 \(byte 2\)"):
        data.text("a.txt")
    (tmp_path / "a.jsonl").write_text('{"input": "x", "output": "y"}\n{"input": 1}\n')
    with pytest.raises(HarnessError, match=r"a\.jsonl:2: expected an object with strings for input, output"):
        data.objects("a.jsonl", ("input", "output"))
    (tmp_path / "a.json").write_text("[" * 100_000)
    with pytest.raises(HarnessError, match="not JSON"):
        data.json_object("a.json")
    (tmp_path / "a.csv").write_text("a,b\n")
    with pytest.raises(HarnessError, match=r"a\.csv:1: expected 6 fields, found 2"):
        data.bare_rows("a.csv", 6)


def test_tasks_without_data_say_where_to_get_them(monkeypatch):
    with pytest.raises(HarnessError, match=r"em_beer.*--data-dir"):
        task("em_beer").material(None)
    with pytest.raises(HarnessError, match="it reads no files"):
        task("helm_wikifact_plaintiff").material(Path())
    with pytest.raises(HarnessError, match="did you mean 'em_beer'"):
        task("em_bear")
    assert len(names()) == 14
    assert known("lm_eval:anything") and known("helm_run:mmlu:subject=anatomy") and known("em_beer")
    assert not (known("lm_eval:") or known("helm_run:") or known("em_bear"))


def test_the_hub_is_asked_where_no_folder_is_named(monkeypatch):
    rows = [{"question": f"q{i} is by", "references": [f"p{i}", "x"]} for i in range(6)]
    hub = Mock(**{"load_dataset.return_value": rows})
    monkeypatch.setitem(sys.modules, "datasets", hub)
    one = task("helm_wikifact_plaintiff")
    examples = one.material(None).examples
    splits = [call("lighteval/wikifact", "plaintiff", split=split) for split in ("train", "test")]
    assert hub.load_dataset.call_args_list == splits
    assert len(examples) == 3 * 6
    assert examples[0].prompt.endswith("\n\nq0 is by")
    assert examples[0].answers == ("p0", "x")
    assert one.evaluate(examples[:1], [("no", "x", "", "", "")]).figures == {
        "quasi_exact_match": 0, "quasi_exact_match_stderr": 0, "quasi_exact_match@5": 1, "quasi_exact_match@5_stderr": 0
    }  # fmt: skip

    hub.load_dataset.side_effect = ConnectionError("no route")
    with pytest.raises(HarnessError, match=r"lighteval/wikifact cannot be loaded: no route; connect to the hub"):
        one.material(None)


class Begun(Letters):
    """With a beginning."""

    def encode(self, prompt: str) -> tuple[int, ...]:
        return (0, *self.encode_plain(prompt))


def test_wikitext_by_tokens_is_windows_of_lines_as_datasets_joins_them(tmp_path):
    (tmp_path / FILE).parent.mkdir()
    (tmp_path / FILE).write_text(" \n = A = \n \n" + "x" * 3 * WINDOW + "\n", encoding="utf-8")
    given, one = Circumstances(Begun(), WINDOW, folder=tmp_path), WikiText()
    asked = one.questions(given, quiet)
    assert asked.examples == len(asked.pairs) == 3
    whole = "".join(map(chr, (t for context, window in asked.pairs for t in (*context, *window))))
    assert whole.startswith("\0\n\n = A = \n\n\n\n\nxxx")
    assert all((len(context), len(window)) == (1, WINDOW - 1) for context, window in asked.pairs)
    assert len(one.questions(replace(given, count=2), quiet).pairs) == 2
    scores = [Score(-2.0 * (WINDOW - 1), False), Score(-4.0 * (WINDOW - 1), False)]
    found = one.judge(given, Answers(scores=scores))
    assert found.figures["token_perplexity"] == pytest.approx(math.exp(3))
    assert found.figures["token_perplexity_stderr"] == pytest.approx(math.exp(3) * 1.0)
    assert found.outcomes == {"token_perplexity": (-2.0, -4.0)}
    with pytest.raises(HarnessError, match="windows of 2048 tokens, the model's context is 2047"):
        one.questions(replace(given, context=WINDOW - 1), quiet)


@needs_data
def test_wikitext_has_as_many_tokens_of_opt_as_is_known():
    """287,645 is what GPTQ's own loading prints for OPT."""
    tokenizers = pytest.importorskip("tokenizers")
    own = tokenizers.ByteLevelBPETokenizer(*(str(DATA / "tokenizer_opt" / n) for n in ("vocab.json", "merges.txt")))

    class Opt(Begun):
        def encode_plain(self, text: str) -> tuple[int, ...]:
            return tuple(own.encode(text).ids)

    given = Circumstances(Opt(), WINDOW, folder=DATA)
    assert len(Opt().encode(_text(DATA)[0])) == 287_645
    assert len(WikiText().questions(given, quiet).pairs) == 287_645 // WINDOW
