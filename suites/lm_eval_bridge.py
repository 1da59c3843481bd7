"""Tasks of lm-eval as questions for any engine: lm-eval makes them and judges the answers.

lm-eval calls a model while it evaluates. Here it is run twice on the same task: once with a model that only notes what
it is asked, and again with one that gives the answers an engine gave to that.
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

from lm_eval import evaluator, utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from harness.api import GenerationRequest, HarnessError, SamplingParams, Score, first_line
from harness.api.task import Answers, Circumstances, Judged, Pair, Questions, Report, Tokens
from suites import lm_eval_local
from suites.seeds import own_seed

#: Tokens of an answer where a task names no number: as in lm-eval's own models.
_MAX_TOKENS = 256
#: Resamples for standard errors that have no formula; lm-eval's default takes minutes.
_BOOTSTRAP = 1000
#: After a figure's name, its standard error's.
_ERROR = "_stderr"


class LmEvalTask:
    """One task of lm-eval by its name there."""

    def __init__(self, name: str) -> None:
        self._task = name
        self._files: dict[str, str] = {}

    @property
    def name(self) -> str:
        """As in suites."""
        return f"lm_eval:{self._task}"

    @property
    def protocol(self) -> str:
        """Which lm-eval, and what of it decides figures."""
        return f"lm-eval {metadata.version('lm-eval')}, {self._task}, no worked examples unless the task has its own"

    def questions(self, given: Circumstances, report: Report) -> Questions:
        """What lm-eval asks for the task. Raises HarnessError for a task it does not have, and for broken data."""
        model = _Noting(given.tokens, given.context, given.seed)
        report(0, 1)
        found = self._evaluated(model, given, 0)
        report(1, 1)
        examples = sum(int(counts["effective"]) for counts in found["n-samples"].values())
        return Questions(tuple(model.prompts), tuple(model.pairs), examples, 0, model.truncated, self._files)

    def judge(self, given: Circumstances, answers: Answers) -> Judged:
        """lm-eval's own figures of the answers."""
        found = self._evaluated(_Told(given.tokens, given.context, given.seed, answers), given, _BOOTSTRAP)
        figures: dict[str, float] = {}
        for task, own in found["results"].items():
            prefix = "" if len(found["results"]) == 1 else f"{task}/"
            figures |= {prefix + name: value for name, value in _figures(own)}
        samples = [sample for name in found["samples"] for sample in found["samples"][name]]
        outcomes, weights = _outcomes(samples) if len(found["samples"]) == 1 else ({}, {})
        return Judged(figures, outcomes, weights, version=_version(found, samples))

    def _evaluated(self, model: TokenModel, given: Circumstances, resamples: int) -> Mapping[str, Any]:
        try:
            with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
                found = evaluator.simple_evaluate(
                    model, tasks=[self._task], limit=given.count, bootstrap_iters=resamples, random_seed=given.seed,
                    log_samples=True, task_manager=self._manager(given.folder, Path(folder)),
                )  # fmt: skip
        except HarnessError:
            raise
        except Exception as exc:  # lm-eval, its tasks' code and the hub raise whatever they like
            raise HarnessError(f"lm-eval cannot evaluate {self._task}: {first_line(exc)}") from exc
        if found is None:
            raise HarnessError(f"lm-eval cannot evaluate {self._task}: it gave no results")
        return dict(found)

    def _manager(self, data: Path | None, into: Path) -> TaskManager:
        """lm-eval's tasks; this one with a folder's data, where one is named. Raises HarnessError where it has none."""
        if data is None:
            return TaskManager()
        found = lm_eval_local.write(data, into)
        if self._task not in found:
            raise HarnessError(f"{data} has no data of lm-eval's {self._task} (of {', '.join(found)} it has): "
                               "leave out --data-dir to ask the hub")  # fmt: skip
        self._files = {lm_eval_local.FILES[self._task][1]: found[self._task]}
        return TaskManager(include_path=str(into))


def _version(found: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> str:
    """The task's own versions, and a digest of the very examples: data from the hub may change under their name."""
    versions = ", ".join(f"{task} {version}" for task, version in sorted(found["versions"].items()))
    digest = hashlib.sha256("".join(f"{s['doc_hash']}{s['target_hash']}" for s in samples).encode())
    return f"version {versions}; examples {digest.hexdigest()[:16]}"


class TokenModel(TemplateLM):
    """What lm-eval takes for a model: it turns what it is asked into tokens that fit the model's context.

    `truncated` counts what lost its beginning.
    """

    def __init__(self, tokens: Tokens, context: int, seed: int) -> None:
        super().__init__()
        self._tokens = tokens
        self._context = context
        self._seed = seed
        self.truncated = self._asked = 0

    @abstractmethod
    def scores(self, pairs: Sequence[Pair]) -> Sequence[Score]:
        """Of each continuation after its context."""

    @abstractmethod
    def texts(self, prompts: Sequence[GenerationRequest]) -> Sequence[str]:
        """What goes on from each prompt."""

    @property
    def eot_token_id(self) -> int:
        return self._tokens.end

    @property
    def prefix_token_id(self) -> int:
        return self._tokens.begin

    @property
    def tokenizer_name(self) -> str:
        """For caches of requests, which are not used."""
        return "harness"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """As lm-eval's own model: with what the tokenizer adds by itself, unless the text begins with it already."""
        plain = self._tokens.encode_plain(string)
        added = plain[:1] != (self._tokens.begin,) if add_special_tokens is None else add_special_tokens
        return list(self._tokens.encode(string) if added else plain)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        found = self.scores([self._pair(context, continuation) for _, context, continuation in requests])
        return [(score.logprob, score.is_greedy) for score in found]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, in windows of the model's context that do not overlap, each token scored once."""
        windows = [self._windows(*request.args) for request in requests]
        scores = iter(self.scores([pair for pairs in windows for pair in pairs]))
        return [math.fsum(next(scores).logprob for _ in pairs) for pairs in windows]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        prompts = [self._prompt(*request.args) for request in requests]
        found = []
        for prompt, text in zip(prompts, self.texts(prompts), strict=True):
            at = prompt.sampling.stop_at(text)  # engines give the tokens that complete a stop string
            found.append(text if at is None else text[:at])
        return found

    def _windows(self, text: str) -> list[Pair]:
        windows = utils.get_rolling_token_windows(
            token_list=self.tok_encode(text), prefix_token=self.prefix_token_id, max_seq_len=self._context,
            context_len=1,
        )  # fmt: skip
        return [self._pair(*pair) for pair in map(utils.make_disjoint_window, windows)]

    def _pair(self, context: list[int], continuation: list[int]) -> Pair:
        whole = [*context, *continuation]
        if len(continuation) > self._context:
            raise HarnessError(f"a continuation of {len(continuation)} tokens exceeds the model's context of "
                               f"{self._context}")  # fmt: skip
        # as lm-eval's own models: the beginning goes; the last token is only predicted
        kept = whole[-(self._context + 1) :]
        self.truncated += len(kept) < len(whole)
        cut = len(kept) - len(continuation)
        return tuple(kept[:cut]), tuple(kept[cut:])

    def _prompt(self, context: str, how: Mapping[str, Any]) -> GenerationRequest:
        options = dict(how)
        until = options.pop("until", [])
        stop = tuple(one for one in ([until] if isinstance(until, str) else until) if one)
        most = int(options.pop("max_new_tokens", _MAX_TOKENS))
        most = int(options.pop("max_gen_toks", most))
        temperature = float(options.pop("temperature", 0.0))
        temperature = temperature if options.pop("do_sample", temperature > 0) else 0.0
        top_p, top_k = float(options.pop("top_p", 1.0)), int(options.pop("top_k", 0))
        if options:
            raise HarnessError(f"the task asks for generation by {', '.join(options)}, which engines do not know")
        if (room := self._context - most) < 1:
            raise HarnessError(f"the task asks for {most} new tokens, more than the model's context has room for")
        ids = tuple(self.tok_encode(context))
        self.truncated += len(ids) > room
        sampling = SamplingParams(max_tokens=most, temperature=temperature, top_p=top_p, top_k=top_k, stop=stop,
                                  seed=own_seed(self._seed, self._asked))  # fmt: skip
        self._asked += 1
        return GenerationRequest(f"g{self._asked:06d}", ids[-room:], sampling)


class _Noting(TokenModel):
    """Notes what it is asked. Every token is as likely as not, and every text is empty."""

    def __init__(self, tokens: Tokens, context: int, seed: int) -> None:
        super().__init__(tokens, context, seed)
        self.pairs: list[Pair] = []
        self.prompts: list[GenerationRequest] = []

    def scores(self, pairs: Sequence[Pair]) -> Sequence[Score]:
        self.pairs += pairs
        return [Score(-math.log(2) * len(continuation), False) for _, continuation in pairs]

    def texts(self, prompts: Sequence[GenerationRequest]) -> Sequence[str]:
        self.prompts += prompts
        return [""] * len(prompts)


class _Told(TokenModel):
    """Gives answers that others have given to the same questions, in their order."""

    def __init__(self, tokens: Tokens, context: int, seed: int, answers: Answers) -> None:
        super().__init__(tokens, context, seed)
        self._scores, self._texts = iter(answers.scores), iter(answers.texts)

    def scores(self, pairs: Sequence[Pair]) -> Sequence[Score]:
        return [next(self._scores) for _ in pairs]

    def texts(self, prompts: Sequence[GenerationRequest]) -> Sequence[str]:
        return [next(self._texts) for _ in prompts]


def _figures(results: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Figures by name, from keys such as `acc,none` and `acc_stderr,none`; those that are no numbers are left out."""
    for key, value in results.items():
        name, _, how = key.partition(",")
        if name not in ("alias", "sample_len") and isinstance(value, (int, float)) and math.isfinite(value):
            yield _named(name, how), float(value)


def _named(metric: str, how: str) -> str:
    """A figure by its metric and the filter that answers went through; its standard error has an ending more."""
    bare = metric.removesuffix(_ERROR)
    return (bare if how in ("", "none") else f"{bare},{how}") + (_ERROR if metric != bare else "")


def _outcomes(
    samples: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, tuple[float, ...]], dict[str, tuple[float, ...]]]:
    """Of each example what its figures are means of, and their weights: of a perplexity lm-eval gives a sum and its
    weight. Answers that went through several filters are as many samples."""
    outcomes, weights = {}, {}
    for how in dict.fromkeys(str(sample.get("filter", "")) for sample in samples):
        own = sorted((s for s in samples if str(s.get("filter", "")) == how), key=lambda s: int(s["doc_id"]))
        for metric in own[0].get("metrics") or ():
            values: list[Any] = [sample.get(metric) for sample in own]
            name = _named(metric, how)
            if all(isinstance(v, (int, float)) and math.isfinite(v) for v in values):
                outcomes[name] = tuple(float(v) for v in values)
            elif metric.endswith("perplexity") and all(weight for _, weight in values):
                outcomes[name] = tuple(float(total / weight) for total, weight in values)
                weights[name] = tuple(float(weight) for _, weight in values)
    return outcomes, weights
