"""lm-eval's own model of transformers (`hf`): batches of whatever lengths, padded to the longest of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from engines.adapters.accelerate import AccelerateEngine
from engines.adapters.causal_lm import Placement
from engines.adapters.transformers import resident
from engines.common import requests as checks
from engines.common.work_memory import working_bytes
from harness.api import (
    DTYPE_BYTES,
    Capabilities,
    Dtype,
    EngineTrace,
    GenerationRequest,
    HardwareLimits,
    Job,
    LoadReport,
    LocalModel,
    ModelShape,
    OffloadPolicy,
    Score,
)


class LmEvalHfEngine(AccelerateEngine):
    """Scores by lm-eval's own code, and generates in batches that are padded as its are.

    Weights stay in RAM where there is no limit of host memory or where they fit it beside the work, and else lie where
    Accelerate puts them (see engines/adapters/accelerate.py; the same options). Honours policy.gpu_batch_size and
    policy.compute_dtype.
    """

    name = "lm_eval_hf"
    _hf: Any = None

    def capabilities(self) -> Capabilities:
        return Capabilities(packages=("torch", "transformers", "safetensors", "accelerate", "lm-eval"))

    def load(self, model: LocalModel, policy: OffloadPolicy, limits: HardwareLimits, job: Job) -> LoadReport:
        report = super().load(model, policy, limits, job)
        self._hf = _Counting(self._module, tokenizer=_no_tokenizer(), batch_size=policy.gpu_batch_size)
        return report

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        """By lm-eval's `hf`: logits of all positions, and all contexts once where pairs differ in one last token. An
        empty context becomes the token that begins a sequence, or else the one that ends it. Raises HarnessError for a
        pair that cannot be scored."""
        shape, begin, asked = self._model.shape, self._begin(), []
        for i, (context, continuation) in enumerate(pairs):
            full = checks.full_sequence(i, context, continuation, shape, begin)
            asked.append((("", ""), full[: -len(continuation)], full[-len(continuation) :]))
        return [Score(*found) for found in self._hf._loglikelihood_tokens(asked, disable_tqdm=True)]

    def trace(self) -> EngineTrace:
        return EngineTrace({"scored_padding_tokens": float(self._hf.padding)} if self._hf.computed else {})

    def close(self) -> None:
        super().close()
        self._hf = None

    def _place(
        self, model: LocalModel, dtype: Dtype, policy: OffloadPolicy, limits: HardwareLimits, job: Job
    ) -> Placement:
        weights = model.shape.params_total * DTYPE_BYTES[dtype]
        work = sum(self._working(model.shape, policy.gpu_batch_size, job.max_sequence, DTYPE_BYTES[dtype]))
        if limits.host_memory is None or weights + work <= limits.host_memory:
            return resident(model, dtype)
        return super()._place(model, dtype, policy, limits, job)

    def _working(self, shape: ModelShape, batch: int, tokens: int, dtype_bytes: int) -> tuple[int, int]:
        """With the logits of all positions, and what log_softmax makes of them."""
        kv, activations = working_bytes(shape, batch, tokens, dtype_bytes)
        return kv, activations + 2 * batch * tokens * shape.vocab * dtype_bytes

    def _take(self, pending: Sequence[GenerationRequest], now_s: float) -> list[GenerationRequest]:
        """The longest first, as lm-eval sorts them."""
        arrived = [r for r in pending if r.arrival_s <= now_s]
        return sorted(arrived, key=lambda r: -len(r.prompt))[: self._block_size]


def _no_tokenizer() -> Any:
    """lm-eval wants one, but is only asked in tokens."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"": 0})), pad_token="")


class _Counting(HFLM):
    """`padding`: how many of the positions it has `computed` were padding, which lm-eval puts on the right as zeros."""

    computed = padding = 0

    @property
    def device(self) -> torch.device:
        """Of inputs: a model whose first weights are on disk would name none."""
        return torch.device("cpu")

    def _model_call(self, inps: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.computed += inps.numel()
        self.padding += int((inps.flip(1).cumsum(1) == 0).sum())
        logits: torch.Tensor = super()._model_call(inps, *args, **kwargs)
        return logits
