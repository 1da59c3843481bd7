"""crfm-helm's own run specs as questions for any engine: HELM makes them and judges the answers.

HELM asks a model while it runs, and needs an environment of its own. Here it is run twice there on the same entry: once
with a client that only notes what it is asked (helm_plugin.py), and again with one that gives an engine's answers.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.api import GenerationRequest, HarnessError, SamplingParams
from harness.api.task import Answers, Circumstances, Judged, Questions, Report
from suites.seeds import own_seed
from suites.tasks.measures import judged

#: The interpreter of an environment with crfm-helm.
PYTHON = "HARNESS_HELM_PYTHON"
_HINT = f"`make helm` makes its environment; name the interpreter in it by {PYTHON} (docs/guides/accuracy.md)"
_PLUGIN = "harness_helm_plugin"
#: HELM wants to be told how many instances at most.
_ALL = 10**9
#: What HELM says of each instance that is no worth of an answer.
_BOOKKEEPING = ("num_", "training_", "inference_", "finish_reason_", "batch_size", "prompt_truncated", "max_prob",
                "logprob")  # fmt: skip


@dataclass(frozen=True)
class HelmRun:
    """One entry as HELM's command line takes it, without its model: `mmlu:subject=abstract_algebra`."""

    entry: str

    @property
    def name(self) -> str:
        """As in suites."""
        return f"helm_run:{self.entry}"

    @property
    def protocol(self) -> str:
        """Which HELM; it decides the rest."""
        return f"crfm-helm {_version()}, its own run spec {self.entry}"

    def questions(self, given: Circumstances, report: Report) -> Questions:
        """What HELM asks. Raises HarnessError where it is not installed, and for what it cannot run."""
        report(0, 1)
        with tempfile.TemporaryDirectory() as folder:
            asked = _run(self.entry, given, Path(folder), None)[0]
        report(1, 1)
        prompts, truncated = [], 0
        for i, one in enumerate(asked):
            room = given.context - int(one["max_tokens"])
            if room < 1:
                raise HarnessError(f"{self.name} asks for {one['max_tokens']} new tokens, more than the model's "
                                   "context has room for")  # fmt: skip
            ids = given.tokens.encode(str(one["prompt"]))
            truncated += len(ids) > room
            prompts += [_request(one, given.seed, i, k, ids[-room:]) for k in range(int(one["num_completions"]))]
        return Questions(tuple(prompts), examples=len(asked), truncated=truncated)

    def judge(self, given: Circumstances, answers: Answers) -> Judged:
        """HELM's own metrics of the answers, over the instances that it reports on."""
        with tempfile.TemporaryDirectory() as folder:
            asked, run = _run(self.entry, given, Path(folder), answers.texts)
            if sum(int(one["num_completions"]) for one in asked) != len(answers.texts):
                raise HarnessError(f"HELM asked other questions for {self.entry!r} when it was run again")
            values = _worth(json.loads((run / "per_instance_stats.json").read_text(encoding="utf-8")))
            return replace(judged(values), examples=max(map(len, values.values())))


def _request(asked: Mapping[str, Any], seed: int, i: int, k: int, ids: tuple[int, ...]) -> GenerationRequest:
    sampling = SamplingParams(
        max_tokens=int(asked["max_tokens"]),
        temperature=float(asked["temperature"]),
        top_p=float(asked["top_p"]),
        stop=tuple(asked["stop_sequences"]),
        seed=own_seed(seed, i, k),
    )
    return GenerationRequest(f"h{i:06d}.{k}", ids, sampling)


def _worth(instances: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Each metric's value of each instance that was not perturbed, of the split that HELM's tables are of."""
    found = list(_stats(instances))
    split = "test" if any(one[0] == "test" for one in found) else "valid"
    values: dict[str, list[float]] = {}
    for own, name, value in found:
        if own == split and not name.startswith(_BOOKKEEPING):
            values.setdefault(name, []).append(value)
    if not values:
        raise HarnessError("HELM gave no metric of these answers")
    return values


def _stats(instances: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, float]]:
    for instance in sorted(instances, key=lambda one: (one["train_trial_index"], str(one["instance_id"]))):
        if not instance.get("perturbation"):
            for stat in instance["stats"]:
                if stat.get("mean") is not None:
                    yield str(stat["name"].get("split")), str(stat["name"]["name"]), float(stat["mean"])


def _run(
    entry: str, given: Circumstances, folder: Path, answers: Sequence[str] | None
) -> tuple[list[Mapping[str, Any]], Path]:
    """What HELM asked for an entry, in its order, and the folder with its results. Raises HarnessError."""
    if given.model is None or given.cache is None:
        raise HarnessError("HELM needs a model with a tokenizer of its own")
    asked = folder / "asked.jsonl"
    asked.touch()
    job = {"tokenizer": str(given.model), "context": given.context, "asked": str(asked), "answers": answers}
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    (folder / f"{_PLUGIN}.py").write_text((Path(__file__).parent / "helm_plugin.py").read_text(encoding="utf-8"))
    out, kept = folder / "out", given.cache / "helm"
    (kept / "scenarios").mkdir(parents=True, exist_ok=True)  # what HELM downloads is kept
    out.mkdir()
    (out / "scenarios").symlink_to((kept / "scenarios").resolve())
    words = ["--run-entries", f"{entry}{',' if ':' in entry else ':'}model=harness/model", "--suite", "harness",
             "-m", str(given.count or _ALL), "-n", "1", "--plugins", _PLUGIN, "--local-path", str(folder / "local"),
             "-o", str(out), "--disable-cache", "--exit-on-error"]  # fmt: skip
    _python(["-c", "from helm.benchmark.run import main; main()", *words], folder)
    runs = [path.parent for path in (out / "runs").glob("*/*/per_instance_stats.json")]
    if len(runs) != 1:
        raise HarnessError(f"HELM makes {len(runs)} runs of the entry {entry!r}; name one that is one")
    return [json.loads(line) for line in asked.read_text(encoding="utf-8").splitlines()], runs[0]


def _version() -> str:
    return _python(["-c", "from importlib import metadata; print(metadata.version('crfm-helm'))"], None).strip()


def _python(words: Sequence[str], folder: Path | None) -> str:
    """What HELM's interpreter prints, asked in `folder`. Raises HarnessError with its last line where it fails."""
    python = os.environ.get(PYTHON)
    if not python:
        raise HarnessError(f"crfm-helm is not here: {_HINT}")
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    if folder is not None:
        own |= {"HARNESS_HELM_JOB": str(folder / "job.json"), "PYTHONPATH": str(folder)}
        own |= {"PYTHONHASHSEED": "0"}  # some scenarios go through sets: both runs must ask the same
    try:
        done = subprocess.run([python, *words], cwd=folder, env=own, capture_output=True, text=True, check=False)
    except OSError as exc:
        raise HarnessError(f"{PYTHON}={python} does not run: {exc.strerror}; {_HINT}") from None
    if done.returncode:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "it says nothing")
        raise HarnessError(f"crfm-helm failed: {last.strip()}")
    return done.stdout
