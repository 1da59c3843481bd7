"""What every engine on a transformers model shares: requests to batches, `generate` with timestamps, scoring."""

from __future__ import annotations

import dataclasses
import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from engines.common import requests as checks
from engines.common import sampling
from harness.api import (
    Capabilities,
    Dtype,
    EngineTrace,
    GenerationRequest,
    GenerationResult,
    HardwareLimits,
    HarnessError,
    Job,
    LoadReport,
    LocalModel,
    OffloadPolicy,
    Score,
    UnsupportedError,
)


@dataclass(frozen=True)
class Placement:
    """A model made ready by an engine: the module, weight bytes by tier (device, host, disk), what was set, and the
    device that it takes its input on."""

    module: Any
    weights_by_tier: tuple[int, int, int]
    notes: tuple[str, ...] = ()
    device: str = "cpu"


def from_checkpoint(model: LocalModel, dtype: Dtype, **placement: Any) -> Any:
    """transformers' module of a checkpoint. Raises HarnessError for one that lacks tensors, which would be random."""
    module, found = AutoModelForCausalLM.from_pretrained(
        model.path,
        dtype=getattr(torch, dtype),
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
        **placement,
    )
    if missing := found["missing_keys"]:
        raise HarnessError(f"{model.path} lacks {min(missing)}, which the model's configuration asks for")
    return module


def _project_rows(module: Any) -> None:
    """Hands the vocabulary projection rows that lie together.

    After prefill transformers projects each sequence's last position: a strided view, for which torch 2.13 multiplies
    sequence by sequence in 16 bits on a CPU and copies the matrix for each of them (OPT-1.3b, 8 sequences: 1.6 GB and
    seconds, where rows in one piece take 0 bytes and 20 ms).
    """
    head = getattr(module, "get_output_embeddings", lambda: None)()
    if isinstance(head, torch.nn.Module):
        head.register_forward_pre_hook(lambda _, args: tuple(a.contiguous() for a in args))


class CausalLMEngine(ABC):
    """The Engine protocol on a transformers causal model; a subclass says only where the weights live.

    Static batching: requests of equal prompt length, in order of arrival, at most `policy.gpu_batch_size` together, so
    no prompt is padded unless a subclass takes others together (`_take`): then on the left. A row that ends before its
    batch does is computed on as padding (both are `GenerationResult.padding_tokens`). Rows that ignore the end of
    sequence never choose it. A stop string ends a row with the token that completes it, and needs the model folder's
    tokenizer.
    """

    name: ClassVar[str]
    #: Fields of the policy that have an effect.
    honours: ClassVar[tuple[str, ...]] = ("gpu_batch_size", "compute_dtype")
    _module: Any = None
    _device: str
    _model: LocalModel
    _block_size: int

    @abstractmethod
    def capabilities(self) -> Capabilities: ...

    @abstractmethod
    def _place(
        self, model: LocalModel, dtype: Dtype, policy: OffloadPolicy, limits: HardwareLimits, job: Job
    ) -> Placement:
        """Loads `model` with its weights computed in `dtype`. Raises InfeasibleError when the budget is too small."""

    def load(self, model: LocalModel, policy: OffloadPolicy, limits: HardwareLimits, job: Job) -> LoadReport:
        policy.require_defaults_except(self.name, *self.honours)
        if limits.disk_bandwidth is not None:
            raise UnsupportedError(
                f"engine {self.name} reads as fast as the disk does: it has no limits.disk_bandwidth"
            )
        if limits.threads is not None:
            torch.set_num_threads(limits.threads)
        dtype = model.dtype if policy.compute_dtype == "auto" else policy.compute_dtype
        placed = self._place(model, dtype, policy, limits, job)
        self._module, self._device = placed.module.eval(), placed.device
        _project_rows(self._module)
        old = self._module.generation_config
        # a checkpoint's own sampling settings or penalties must not change what a request asks for
        self._module.generation_config = GenerationConfig(
            bos_token_id=old.bos_token_id, eos_token_id=old.eos_token_id, pad_token_id=old.pad_token_id
        )
        self._model = model
        self._block_size = policy.gpu_batch_size
        total = sum(placed.weights_by_tier)
        device, host, disk = (n / total for n in placed.weights_by_tier)
        works_in = (0.0, 1.0, 0.0) if self._device == "cpu" else (1.0, 0.0, 0.0)
        return LoadReport(
            vocab=model.shape.vocab,
            max_context=model.shape.max_context,
            block_size=self._block_size,
            policy=dataclasses.replace(
                policy,
                compute_dtype=dtype,
                weights=(device, host, disk),
                cache=works_in,
                activations=works_in,
            ),
            compute_dtype=dtype,
            weights_by_tier=placed.weights_by_tier,
            notes=placed.notes,
        )

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        """Checks all requests before any work; raises HarnessError naming the first that cannot be run."""
        for request in requests:
            checks.validate(request, self._model.shape)
        decode = checks.decoder(self._model.path) if any(r.sampling.stop for r in requests) else None
        return self._batches(requests, decode, time.perf_counter())

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        """Scores in float32 from the logits of the continuation's positions only.

        An empty context becomes the beginning-of-sequence token, or else the end-of-sequence token (as lm-eval
        does). Sequences of equal length share a batch. Raises HarnessError for a pair that cannot be scored.
        """
        shape, begin = self._model.shape, self._begin()
        sequences = [
            checks.full_sequence(i, c, continuation, shape, begin) for i, (c, continuation) in enumerate(pairs)
        ]
        scores: dict[int, Score] = {}
        by_length: dict[int, list[int]] = {}
        for i, sequence in enumerate(sequences):
            by_length.setdefault(len(sequence), []).append(i)
        for members in by_length.values():
            for first in range(0, len(members), self._block_size):
                batch = members[first : first + self._block_size]
                lengths = [len(pairs[i][1]) for i in batch]
                scores |= zip(batch, self._score_batch([sequences[i] for i in batch], lengths), strict=True)
        return [scores[i] for i in range(len(pairs))]

    def trace(self) -> EngineTrace:
        return EngineTrace()

    def close(self) -> None:
        self._module = None

    # ----------------------------------------------------------------------- generation

    def _batches(
        self, pending: Sequence[GenerationRequest], decode: Callable[[Sequence[int]], str] | None, began: float
    ) -> Iterator[GenerationResult]:
        for batch in checks.in_turn(pending, self._take, began):
            yield from self._run_batch(batch, decode, began)

    def _take(self, pending: Sequence[GenerationRequest], now_s: float) -> list[GenerationRequest]:
        """The requests of the next batch, of those that have arrived."""
        return checks.next_batch(pending, now_s, self._block_size)

    @torch.inference_mode()
    def _run_batch(
        self, batch: list[GenerationRequest], decode: Callable[[Sequence[int]], str] | None, began: float
    ) -> list[GenerationResult]:
        rows = [r.sampling for r in batch]
        eos = self._eos()
        prompt_len = max(len(r.prompt) for r in batch)
        padding = [prompt_len - len(r.prompt) for r in batch]
        on = self._device
        ids = torch.tensor([[*[0] * pad, *r.prompt] for pad, r in zip(padding, batch, strict=True)], device=on)
        real = torch.tensor([[*[0] * pad, *[1] * (prompt_len - pad)] for pad in padding], device=on)
        clock = sampling.RowClock(rows, prompt_len, eos, decode)
        sampler = sampling.RowSampler(rows, eos)
        start = time.perf_counter() - began
        output = self._module.generate(
            ids,
            attention_mask=real,
            do_sample=False,  # RowSampler adds the noise that makes a greedy choice a sample
            max_new_tokens=max(s.max_tokens for s in rows),
            logits_processor=LogitsProcessorList([sampler]),
            stopping_criteria=StoppingCriteriaList([clock]),
            **self._generate_options(),
        )
        tokens = output[:, prompt_len:].tolist()
        times = [t - began for t in clock.times]
        return [
            GenerationResult(
                id=request.id,
                tokens=tuple(tokens[row][:length]),
                start_s=start,
                token_times_s=tuple(times[:length]),
                prompt_tokens=len(request.prompt),
                padding_tokens=padding[row] + len(times) - length,
                finish_reason=clock.reasons[row] or "length",
                logprobs=tuple(sampler.logprobs[row][:length]),
            )
            for row, (request, length) in enumerate(zip(batch, clock.lengths, strict=True))
        ]

    def _generate_options(self) -> dict[str, Any]:
        """What else `generate` is called with."""
        return {}

    def _eos(self) -> tuple[int, ...]:
        return checks.special_tokens(self._module.generation_config, self._model.shape.vocab)[0]

    def _begin(self) -> int | None:
        """The token that an empty context becomes."""
        return checks.special_tokens(self._module.generation_config, self._model.shape.vocab)[1]

    # ----------------------------------------------------------------------- scoring

    @torch.inference_mode()
    def _score_batch(self, sequences: list[list[int]], lengths: list[int]) -> list[Score]:
        ids = torch.tensor(sequences, device=self._device)
        keep = max(lengths)
        partial = "logits_to_keep" in inspect.signature(type(self._module).forward).parameters
        extra = {"logits_to_keep": keep} if partial else {}
        logits = self._module(ids[:, :-1], use_cache=False, **extra).logits[:, -keep:]
        scores = []
        for row, length in enumerate(lengths):
            target = ids[row, -length:]
            # one row at a time: a float32 copy of all logits would double the largest tensor of this pass
            log_probs = torch.log_softmax(logits[row, -length:].float(), dim=-1)
            picked = log_probs.gather(1, target[:, None]).double().sum().item()
            scores.append(Score(picked, bool((log_probs.argmax(dim=-1) == target).all())))
        return scores
