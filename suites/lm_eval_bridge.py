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
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from lm_eval import evaluator, utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from harness.api import GenerationRequest, HarnessError, SamplingParams, Score, first_line
from harness.api.task import Answers, Circumstances, Judged, Pair, Questions, Report
from suites import lm_eval_local

#: Tokens of an answer where a task names no number: as in lm-eval's own models.
_MAX_TOKENS = 256
#: Resamples for standard errors that have no formula; lm-eval's default takes minutes.
_BOOTSTRAP = 1000


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
        model = _Model(given, None)
        report(0, 1)
        found = self._evaluated(model, given)
        report(1, 1)
        examples = sum(int(counts["effective"]) for counts in found["n-samples"].values())
        return Questions(tuple(model.prompts), tuple(model.pairs), examples, 0, model.truncated, self._files)

    def judge(self, given: Circumstances, answers: Answers) -> Judged:
        """lm-eval's own figures of the answers."""
        found = self._evaluated(_Model(given, answers), given)
        figures: dict[str, float] = {}
        for task, own in found["results"].items():
            prefix = "" if len(found["results"]) == 1 else f"{task}/"
            figures |= {prefix + name: value for name, value in _figures(own)}
        samples = [sample for name in found["samples"] for sample in found["samples"][name]]
        return Judged(figures, _outcomes(samples) if len(found["samples"]) == 1 else {})

    def _evaluated(self, model: _Model, given: Circumstances) -> Mapping[str, Any]:
        try:
            with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
                found = evaluator.simple_evaluate(
                    model, tasks=[self._task], limit=given.count, bootstrap_iters=_BOOTSTRAP, random_seed=given.seed,
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
        self._files = {self._task: found[self._task]}
        return TaskManager(include_path=str(into))


class _Model(TemplateLM):  # type: ignore[misc]
    """What lm-eval takes for a model: it notes what it is asked, and gives the next of the `answers`, if there are any.

    Without answers every continuation is as likely as another, and every text is empty.
    """

    def __init__(self, given: Circumstances, answers: Answers | None) -> None:
        super().__init__()
        self._given = given
        self._scores = None if answers is None else iter(answers.scores)
        self._texts = None if answers is None else iter(answers.texts)
        self.pairs: list[Pair] = []
        self.prompts: list[GenerationRequest] = []
        self.truncated = 0

    @property
    def eot_token_id(self) -> int:
        return self._given.tokens.end

    @property
    def prefix_token_id(self) -> int:
        return self._given.tokens.begin

    @property
    def tokenizer_name(self) -> str:
        """For caches of requests, which are not used."""
        return "harness"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        tokens = self._given.tokens
        return list(tokens.encode(string) if add_special_tokens else tokens.encode_plain(string))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return [self._scored(context, continuation) for _, context, continuation in requests]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, in windows of the model's context that do not overlap, each token scored once."""
        found = []
        for (text,) in (request.args for request in requests):
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text), prefix_token=self.prefix_token_id,
                max_seq_len=self._given.context, context_len=1,
            )  # fmt: skip
            pairs = map(utils.make_disjoint_window, windows)
            found.append(math.fsum(self._scored(context, more)[0] for context, more in pairs))
        return found

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        return [self._written(*request.args) for request in requests]

    def _scored(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        whole = [*context, *continuation]
        if len(continuation) > self._given.context:
            raise HarnessError(f"a continuation of {len(continuation)} tokens exceeds the model's context of "
                               f"{self._given.context}")  # fmt: skip
        # as lm-eval's own models: the beginning goes; the last token is only predicted
        kept = whole[-(self._given.context + 1) :]
        self.truncated += len(kept) < len(whole)
        cut = len(kept) - len(continuation)
        self.pairs.append((tuple(kept[:cut]), tuple(kept[cut:])))
        score = Score(-math.log(2) * len(continuation), False) if self._scores is None else next(self._scores)
        return score.logprob, score.is_greedy

    def _written(self, context: str, how: Mapping[str, Any]) -> str:
        options = dict(how)
        until = options.pop("until", [])
        stop = tuple(one for one in ([until] if isinstance(until, str) else until) if one)
        most = int(options.pop("max_gen_toks", _MAX_TOKENS))
        sampled = bool(options.pop("do_sample", options.get("temperature", 0.0)))
        temperature = float(options.pop("temperature", 1.0) or 0.0) if sampled else 0.0
        options.pop("temperature", None)
        top_p, top_k = float(options.pop("top_p", 1.0)), int(options.pop("top_k", 0))
        if options:
            raise HarnessError(f"the task asks for generation by {', '.join(options)}, which engines do not know")
        room = self._given.context - most
        if room < 1:
            raise HarnessError(f"the task asks for {most} new tokens, more than the model's context has room for")
        ids = self._given.tokens.encode(context)
        self.truncated += len(ids) > room
        number = len(self.prompts)
        own = hashlib.sha256(f"{self._given.seed}/{number}".encode()).digest()
        sampling = SamplingParams(max_tokens=most, temperature=temperature, top_p=top_p, top_k=top_k, stop=stop,
                                  seed=int.from_bytes(own[:4], "big") >> 1)  # fmt: skip
        self.prompts.append(GenerationRequest(f"g{number:06d}", ids[-room:], sampling))
        text = "" if self._texts is None else next(self._texts)
        at = sampling.stop_at(text)
        return text if at is None else text[:at]


def _figures(results: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Figures by name, from keys such as `acc,none` and `acc_stderr,none`; those that are no numbers are left out."""
    for key, value in results.items():
        name, _, how = key.partition(",")
        if name not in ("alias", "sample_len") and isinstance(value, (int, float)) and math.isfinite(value):
            yield (name if how in ("", "none") else f"{name},{how}"), float(value)


def _outcomes(samples: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, ...]]:
    """Of each example what its figures are made of: a number, or a sum and its weight, of which the quotient counts."""
    ordered = sorted(samples, key=lambda sample: int(sample["doc_id"]))
    names = [name for name in (ordered[0].get("metrics") or ()) if name in ordered[0]]
    found = {}
    for name in names:
        values = [sample[name] for sample in ordered]
        pairs = [v[0] / v[1] if isinstance(v, (tuple, list)) and len(v) == 2 and v[1] else v for v in values]
        if all(isinstance(v, (int, float)) and math.isfinite(v) for v in pairs):
            found[name] = tuple(float(v) for v in pairs)
    return found
