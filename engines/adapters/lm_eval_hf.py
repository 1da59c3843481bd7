"""lm-eval's transformers model (`hf`): batches of unequal lengths, each padded to its longest sequence."""

from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from engines.adapters.accelerate import AccelerateEngine
from engines.adapters.causal_lm import PlacedModule, PlacementRequest
from engines.adapters.transformers import resident
from harness.api import Capabilities, EngineTrace, GenerationRequest, Score


class LmEvalHfEngine(AccelerateEngine):
    """Scores with lm-eval's code, and generates in batches padded as lm-eval pads them.

    Weights stay in RAM where they fit the host memory limit beside the working memory, or where there is no limit;
    otherwise Accelerate places them (the options of engines/adapters/accelerate.py). Honours policy.gpu_batch_size and
    policy.compute_dtype.
    """

    name = "lm_eval_hf"
    _hf: Any = None

    def capabilities(self) -> Capabilities:
        return Capabilities(packages=("torch", "transformers", "safetensors", "accelerate", "lm-eval"))

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        """Scores with lm-eval's `hf`, which computes the logits of all positions, and shares one pass among pairs with
        the same context and a continuation of one token. An empty context becomes the beginning-of-sequence token, or
        else the end-of-sequence token. Raises HarnessError for a pair that cannot be scored."""
        split = [
            (("", ""), full[: -len(continuation)], full[-len(continuation) :])
            for full, (_, continuation) in zip(self._sequences(pairs), pairs, strict=True)
        ]
        return [Score(*score) for score in self._hf._loglikelihood_tokens(split, disable_tqdm=True)]

    def trace(self) -> EngineTrace:
        return EngineTrace({"scored_padding_tokens": float(self._hf.padding)} if self._hf.computed else {})

    def close(self) -> None:
        super().close()
        self._hf = None

    def _place(self, request: PlacementRequest) -> PlacedModule:
        budget = request.limits.host_memory
        fits = budget is None or request.weight_bytes + sum(self._working_bytes(request)) <= budget
        placement = resident(request) if fits else super()._place(request)
        # a tokenizer that the constructor requires; we pass token ids, so it encodes nothing
        empty = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"": 0})), pad_token="")
        self._hf = _PaddingCounter(placement.module, tokenizer=empty, batch_size=request.policy.gpu_batch_size)
        return placement

    def _working_bytes(self, request: PlacementRequest) -> tuple[int, int]:
        """Adds the logits of all positions and their log_softmax to the activations."""
        kv, activations = super()._working_bytes(request)
        positions = request.policy.gpu_batch_size * request.job.max_sequence
        return kv, activations + 2 * positions * request.model.shape.vocab * request.dtype_bytes

    def _next_batch(self, pending: Sequence[GenerationRequest], now_s: float) -> list[GenerationRequest]:
        """Longest prompts first, as lm-eval sorts them."""
        arrived = [r for r in pending if r.arrival_s <= now_s]
        return sorted(arrived, key=lambda r: -len(r.prompt))[: self._block_size]


class _PaddingCounter(HFLM):
    """Counts the positions that were `computed`, and how many of them were `padding` (trailing zeros in lm-eval)."""

    computed = padding = 0

    @property
    def device(self) -> torch.device:
        """The device of inputs; a model whose first weights are on disk would report `meta`."""
        return torch.device("cpu")

    def _model_call(self, inps: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.computed += inps.numel()
        self.padding += int((inps.flip(1).cumsum(1) == 0).sum())
        logits: torch.Tensor = super()._model_call(inps, *args, **kwargs)
        return logits
