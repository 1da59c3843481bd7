"""Runs lm-eval's tasks on any engine: lm-eval makes the prompts and computes the metrics.

lm-eval calls a model while it evaluates. We run it twice on the same task: first with a model that records all
requests, then, after an engine has answered them, with a model that replays the answers.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import tempfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import lm_eval
import yaml
from lm_eval import evaluator, utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from harness.api import GenerationRequest, HarnessError, SamplingParams, Score, first_line
from harness.api.task import Answers, Circumstances, Judged, Pair, Questions, Report
from suites.tasks.data import Data
from suites.tasks.prompts import request_seed, room_beside

#: Maximum tokens of an answer where the task sets none, as in lm-eval's models.
_MAX_TOKENS = 256
#: Bootstrap resamples for standard errors without a formula; lm-eval's default takes minutes.
_BOOTSTRAP = 1000
#: By task: lm-eval's task file, the data file in a folder, and the field of each of its lines.
_LOCAL: Mapping[str, tuple[str, str, str]] = {
    "lambada_openai": ("lambada/lambada_openai.yaml", "lambada_openai/lambada_test.jsonl", "text"),
    "wikitext": ("wikitext/wikitext.yaml", "wikitext2_raw/wiki.test.pages.jsonl", "page"),
}
#: Values by figure, one an example.
Outcomes = dict[str, tuple[float, ...]]


class LmEvalTask:
    """A task of lm-eval, by its name in lm-eval."""

    def __init__(self, name: str) -> None:
        self._task = name
        self._files: dict[str, str] = {}

    @property
    def name(self) -> str:
        """The task's name in suites."""
        return f"lm_eval:{self._task}"

    @property
    def protocol(self) -> str:
        """lm-eval's version and the settings that decide the figures."""
        return f"lm-eval {metadata.version('lm-eval')}, {self._task}, zero-shot unless the task sets its own shots"

    def questions(self, given: Circumstances, report: Report) -> Questions:
        """Records lm-eval's requests for the task. Raises HarnessError for an unknown task and for damaged data."""
        model = _RecordingModel(given)
        report(0, 1)
        evaluation = self._evaluate(model, given, 0)
        report(1, 1)
        examples = sum(int(counts["effective"]) for counts in evaluation["n-samples"].values())
        return Questions(tuple(model.prompts), tuple(model.pairs), examples, 0, model.truncated, self._files)

    def judge(self, given: Circumstances, answers: Answers) -> Judged:
        """lm-eval's metrics of the answers."""
        model = _ReplayingModel(given, answers)
        evaluation = self._evaluate(model, given, _BOOTSTRAP)
        results, by_task = evaluation["results"], evaluation["samples"]
        figures = {
            name if len(results) == 1 else f"{task}/{name}": value
            for task, metrics in results.items()
            for name, value in _figures(metrics)
        }
        samples = [sample for task_samples in by_task.values() for sample in task_samples]
        outcomes, weights = _outcomes(samples) if len(by_task) == 1 else ({}, {})
        return Judged(figures, outcomes, weights, version=_version(evaluation, samples))

    def _evaluate(self, model: TokenModel, given: Circumstances, resamples: int) -> Mapping[str, Any]:
        try:
            with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
                evaluation = evaluator.simple_evaluate(
                    model, tasks=[self._task], limit=given.count, bootstrap_iters=resamples, random_seed=given.seed,
                    log_samples=True, task_manager=self._manager(given.folder, Path(folder)),
                )  # fmt: skip
        except HarnessError:
            raise
        except Exception as exc:  # lm-eval, its tasks' code and the hub client raise anything
            raise HarnessError(f"lm-eval cannot evaluate {self._task}: {first_line(exc)}") from exc
        return dict(evaluation)

    def _manager(self, data: Path | None, into: Path) -> TaskManager:
        """lm-eval's tasks, this one with data from the folder `data` if given. Raises HarnessError without its data."""
        if data is None:
            return TaskManager()
        digests = write_local(data, into)
        if self._task not in digests:
            raise HarnessError(f"{data} has no data for lm-eval's {self._task} (only for {', '.join(digests)}): "
                               "leave out --data-dir to use the hub")  # fmt: skip
        self._files = {_LOCAL[self._task][1]: digests[self._task]}
        return TaskManager(include_path=str(into))


def write_local(data: Path, into: Path) -> dict[str, str]:
    """Writes task files for `TaskManager(include_path=...)`, for each task whose data is in the folder `data`.

    Returns the SHA-256 of the data by task. Raises HarnessError for damaged data, and where the folder has none.
    """
    digests, files = {}, Data(data)
    for task, (task_file, file, field) in _LOCAL.items():
        if not files.has(file):
            continue
        files.objects(file, (field,))
        digests[task] = files.digests[file]
        test = str((data / file).resolve())
        content = {
            "include": str(Path(lm_eval.__file__).parent / "tasks" / task_file),
            "task": task,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {"test": test}, "cache_dir": str(into / "cache")},
            "training_split": None,
            "validation_split": None,
        }
        (into / f"{task}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    if not digests:
        names = ", ".join(file for _, file, _ in _LOCAL.values())
        raise HarnessError(f"{data} has none of {names}: name a folder that has one, or leave out --data-dir")
    return digests


def _version(evaluation: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> str:
    """The tasks' versions and a digest of the examples, since data on the hub may change under the same name."""
    versions = ", ".join(f"{task} {version}" for task, version in sorted(evaluation["versions"].items()))
    digest = hashlib.sha256("".join(f"{s['doc_hash']}{s['target_hash']}" for s in samples).encode())
    return f"version {versions}; examples {digest.hexdigest()[:16]}"


class TokenModel(TemplateLM):
    """A model for lm-eval that turns its requests into token ids that fit the context; subclasses answer them.

    `truncated` counts the requests that lost their beginning.
    """

    def __init__(self, given: Circumstances) -> None:
        super().__init__()
        self._tokens, self._context, self._seed = given.tokens, given.context, given.seed
        self.truncated = self._num_prompts = 0

    @abstractmethod
    def scores(self, pairs: Sequence[Pair]) -> Sequence[Score]:
        """The score of each continuation after its context."""

    @abstractmethod
    def texts(self, prompts: Sequence[GenerationRequest]) -> Sequence[str]:
        """The generated text for each prompt."""

    @property
    def eot_token_id(self) -> int:
        return self._tokens.end

    @property
    def prefix_token_id(self) -> int:
        return self._tokens.begin

    @property
    def tokenizer_name(self) -> str:
        """The key of lm-eval's request caches, which we do not use."""
        return "harness"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids as in lm-eval's `hf`: adds special tokens, unless the text already begins with one."""
        plain = self._tokens.encode_plain(string)
        add = plain[:1] != (self._tokens.begin,) if add_special_tokens is None else add_special_tokens
        return list(self._tokens.encode(string) if add else plain)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        scores = self.scores([self._pair(context, continuation) for _, context, continuation in requests])
        return [(score.logprob, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in disjoint windows of the model's context that score each token once."""
        windows = [self._windows(*request.args) for request in requests]
        scores = iter(self.scores([pair for pairs in windows for pair in pairs]))
        return [math.fsum(next(scores).logprob for _ in pairs) for pairs in windows]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        prompts = [self._prompt(*request.args) for request in requests]
        # engines return the tokens that complete a stop string
        return [text[: p.sampling.stop_at(text)] for p, text in zip(prompts, self.texts(prompts), strict=True)]

    def _windows(self, text: str) -> list[Pair]:
        windows = utils.get_rolling_token_windows(
            self.tok_encode(text), self.prefix_token_id, max_seq_len=self._context, context_len=1
        )
        return [self._pair(*pair) for pair in map(utils.make_disjoint_window, windows)]

    def _pair(self, context: list[int], continuation: list[int]) -> Pair:
        whole = [*context, *continuation]
        if len(continuation) > self._context:
            raise HarnessError(f"a continuation of {len(continuation)} tokens exceeds the model's context of "
                               f"{self._context}")  # fmt: skip
        # as in lm-eval's models, the beginning is dropped; the last token is only predicted and needs no position
        kept = whole[-(self._context + 1) :]
        self.truncated += len(kept) < len(whole)
        split = len(kept) - len(continuation)
        return tuple(kept[:split]), tuple(kept[split:])

    def _prompt(self, context: str, generation_options: Mapping[str, Any]) -> GenerationRequest:
        options = dict(generation_options)
        until = options.pop("until", [])
        stop = tuple(text for text in ([until] if isinstance(until, str) else until) if text)
        max_tokens = int(options.pop("max_gen_toks", options.pop("max_new_tokens", _MAX_TOKENS)))
        temperature = float(options.pop("temperature", 0.0))
        temperature = temperature if options.pop("do_sample", temperature > 0) else 0.0
        top_p, top_k = float(options.pop("top_p", 1.0)), int(options.pop("top_k", 0))
        if options:
            raise HarnessError(f"the task sets the generation options {', '.join(options)}, which engines do not have")
        room = room_beside(max_tokens, self._context, "the task")
        ids = tuple(self.tok_encode(context))
        self.truncated += len(ids) > room
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, stop=stop,
                                  seed=request_seed(self._seed, self._num_prompts))  # fmt: skip
        self._num_prompts += 1
        return GenerationRequest(f"g{self._num_prompts:06d}", ids[-room:], sampling)


class _RecordingModel(TokenModel):
    """Records all requests. Scores every token with probability 1/2, and generates empty texts."""

    def __init__(self, given: Circumstances) -> None:
        super().__init__(given)
        self.pairs: list[Pair] = []
        self.prompts: list[GenerationRequest] = []

    def scores(self, pairs: Sequence[Pair]) -> Sequence[Score]:
        self.pairs += pairs
        return [Score(-math.log(2) * len(continuation), False) for _, continuation in pairs]

    def texts(self, prompts: Sequence[GenerationRequest]) -> Sequence[str]:
        self.prompts += prompts
        return [""] * len(prompts)


class _ReplayingModel(TokenModel):
    """Returns an engine's answers to the recorded requests, in order."""

    def __init__(self, given: Circumstances, answers: Answers) -> None:
        super().__init__(given)
        self._scores, self._texts = iter(answers.scores), iter(answers.texts)

    def scores(self, pairs: Sequence[Pair]) -> Sequence[Score]:
        return [next(self._scores) for _ in pairs]

    def texts(self, prompts: Sequence[GenerationRequest]) -> Sequence[str]:
        return [next(self._texts) for _ in prompts]


def _figures(results: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Finite figures by name, from lm-eval's keys such as `acc,none` and `acc_stderr,none`."""
    for key, value in results.items():
        name, _, answer_filter = key.partition(",")
        if name not in ("alias", "sample_len") and isinstance(value, (int, float)) and math.isfinite(value):
            yield _figure_name(name, answer_filter), float(value)


def _figure_name(metric: str, answer_filter: str) -> str:
    """`metric`, `metric,filter`, or either with the suffix of a standard error."""
    bare = metric.removesuffix("_stderr")
    name = bare if answer_filter in ("", "none") else f"{bare},{answer_filter}"
    return name if metric == bare else f"{name}_stderr"


def _outcomes(samples: Sequence[Mapping[str, Any]]) -> tuple[Outcomes, Outcomes]:
    """The outcomes and their weights.

    For a perplexity lm-eval gives a sum and its weight. lm-eval repeats the samples for each answer filter.
    """
    outcomes, weights = Outcomes(), Outcomes()
    for answer_filter in dict.fromkeys(str(sample.get("filter", "")) for sample in samples):
        filtered = [s for s in samples if str(s.get("filter", "")) == answer_filter]
        filtered.sort(key=lambda s: int(s["doc_id"]))
        for metric in filtered[0].get("metrics") or ():
            values: list[Any] = [sample.get(metric) for sample in filtered]
            name = _figure_name(metric, answer_filter)
            if all(isinstance(v, (int, float)) and math.isfinite(v) for v in values):
                outcomes[name] = tuple(float(v) for v in values)
            elif metric.endswith("perplexity") and all(weight for _, weight in values):
                outcomes[name] = tuple(float(total / weight) for total, weight in values)
                weights[name] = tuple(float(weight) for _, weight in values)
    return outcomes, weights
