"""crfm-helm's own run specs: what it asks becomes requests, its metrics figures; by a stand-in for its interpreter."""

import stat
import sys
from pathlib import Path

import pytest

from harness.api import HarnessError
from harness.api.task import Answers, Circumstances
from suites.tasks import known, task
from tests.records import Letters, quiet

ENTRY = "helm_run:mmlu:subject=anatomy"
STAND_IN = """#!{python}
import json, os, pathlib, sys
if "metadata" in sys.argv[2]:
    print("0.5.16"); sys.exit()
words = dict(zip(sys.argv[3::2], sys.argv[4::2]))
assert words["--run-entries"] == "mmlu:subject=anatomy,model=harness/model", words
assert [key for key in sorted(os.environ) if key.startswith("PYTHON")] == ["PYTHONHASHSEED", "PYTHONPATH"]
assert os.environ["PYTHONHASHSEED"] == "0"
if words["-m"] == "13":
    sys.exit("Traceback\\nConnectionError: no route to the data")
job = json.loads(pathlib.Path(os.environ["HARNESS_HELM_JOB"]).read_text())
request = dict(prompt="ab", max_tokens=4, temperature=0.5, num_completions=2, stop_sequences=["#"], top_p=1,
               random=None)
pathlib.Path(job["recording"]).write_text(json.dumps(request) + "\\n")
right = float(bool(job["answers"]) and job["answers"] == ["x", "y"])
def instance(split, value, perturbation=None):
    stats = [dict(name=dict(name="exact_match", split=split), mean=value),
             dict(name=dict(name="num_references", split=split), mean=4.0)]
    return dict(instance_id="id1", train_trial_index=0, perturbation=perturbation, stats=stats)
found = [instance("valid", 0.25), instance("test", right), instance("test", 0.5, dict(name="typos"))]
run = pathlib.Path(words["-o"]) / "runs" / "harness" / "mmlu"
run.mkdir(parents=True)
(run / "per_instance_stats.json").write_text(json.dumps(found))
"""


def given(folder: Path, context: int = 16, count: int | None = None) -> Circumstances:
    return Circumstances(Letters(), context, count, model=folder, cache=folder)


@pytest.fixture
def helm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "python"
    path.write_text(STAND_IN.replace("{python}", sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("HARNESS_HELM_PYTHON", str(path))
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    return tmp_path


def test_what_helm_asks_becomes_requests_and_its_metrics_figures(helm):
    assert known(ENTRY)
    one = task(ENTRY)
    questions = one.questions(given(helm), quiet)
    assert (questions.examples, questions.truncated) == (1, 0)
    first, second = questions.prompts
    assert first.prompt == second.prompt == (97, 98)
    assert (first.sampling.max_tokens, first.sampling.temperature, first.sampling.stop) == (4, 0.5, ("#",))
    assert first.sampling.seed != second.sampling.seed
    right = one.judge(given(helm), Answers(texts=["x", "y"]))
    assert right.examples == 1
    assert right.figures == {"exact_match": 1.0, "exact_match_stderr": 0.0}
    assert one.judge(given(helm), Answers(texts=["x", "z"])).outcomes == {"exact_match": (0.0,)}
    with pytest.raises(HarnessError, match="sent different requests"):
        one.judge(given(helm), Answers(texts=["x"]))
    assert "0.5.16" in one.protocol
    assert (helm / "helm" / "scenarios").is_dir()


def test_prompts_too_long_lose_their_beginning_and_are_counted(helm):
    questions = task(ENTRY).questions(given(helm, context=5), quiet)
    assert questions.truncated == 1
    assert questions.prompts[0].prompt == (98,)
    with pytest.raises(HarnessError, match="needs 4 new tokens, which leave no room for a prompt"):
        task(ENTRY).questions(given(helm, context=4), quiet)


def test_failures_of_helm_are_reported_with_its_last_line(helm, monkeypatch):
    one = task(ENTRY)
    with pytest.raises(HarnessError, match="crfm-helm failed: ConnectionError: no route to the data"):
        one.questions(given(helm, count=13), quiet)
    monkeypatch.setenv("HARNESS_HELM_PYTHON", "/nowhere/python")
    with pytest.raises(HarnessError, match=r"/nowhere/python does not run.*accuracy.md"):
        one.questions(given(helm), quiet)
    monkeypatch.delenv("HARNESS_HELM_PYTHON")
    with pytest.raises(HarnessError, match=r"crfm-helm is not installed here.*HARNESS_HELM_PYTHON"):
        one.questions(given(helm), quiet)
