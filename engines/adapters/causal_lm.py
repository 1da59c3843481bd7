"""The base of engines that run a transformers model: batching, `generate` with timestamps, scoring."""

import dataclasses
import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.utils.logging import disable_progress_bar

from engines.adapters.refusals import BATCH_AND_DTYPE
from engines.common import sampling
from engines.common.cuda_device import device_budget
from engines.common.requests import batches, decoder, full_sequence, next_batch, special_tokens
from engines.common.work_memory import refuse_disk_limit, working_bytes
from harness import api


@dataclass(frozen=True)
class PlacementRequest:
    """What to place: `model`, computed in `dtype`, under a policy, within limits, for a job.

    `device_budget` is in bytes, beside the CUDA context; None where the cell has no device.
    """

    model: api.LocalModel
    dtype: api.Dtype
    policy: api.OffloadPolicy
    limits: api.HardwareLimits
    job: api.Job
    device_budget: int | None

    @property
    def device(self) -> str:
        """Where inputs go."""
        return "cpu" if self.device_budget is None else "cuda"

    @property
    def dtype_bytes(self) -> int:
        """Bytes of a value in the compute dtype."""
        return api.DTYPE_BYTES[self.dtype]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in the compute dtype."""
        return self.model.shape.params_total * self.dtype_bytes

    @property
    def working_bytes(self) -> tuple[int, int]:
        """Peak bytes of (KV cache, activations) for a batch of the job's longest sequences."""
        return working_bytes(self.model.shape, self.policy.gpu_batch_size, self.job.max_sequence, self.dtype_bytes)


@dataclass(frozen=True)
class PlacedModule:
    """A loaded module, its weight bytes by tier (device, host, disk), and notes for the record."""

    module: Any
    weights_by_tier: tuple[int, int, int]
    notes: tuple[str, ...] = ()


def from_checkpoint(request: PlacementRequest, **placement: Any) -> Any:
    """Loads the checkpoint as a transformers module; `placement` goes to `from_pretrained`.

    Raises HarnessError for a checkpoint that lacks tensors, which transformers would initialise at random.
    """
    module, loading_info = AutoModelForCausalLM.from_pretrained(
        request.model.path,
        dtype=getattr(torch, request.dtype),
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
        **placement,
    )
    if missing := loading_info["missing_keys"]:
        raise api.HarnessError(f"{request.model.path} lacks {min(missing)}, which the model's configuration requires")
    return module


def _make_projection_inputs_contiguous(module: Any) -> None:
    """Makes the input of the vocabulary projection contiguous.

    After prefill transformers projects the last position of each sequence, a strided view. For that view torch 2.13 on
    a CPU multiplies 16-bit weights sequence by sequence and copies the matrix each time: 1.6 GB and seconds for
    OPT-1.3b with 8 sequences, against 0 bytes and 20 ms for contiguous rows.
    """
    head = getattr(module, "get_output_embeddings", lambda: None)()
    if isinstance(head, torch.nn.Module):
        head.register_forward_pre_hook(lambda _, args: tuple(a.contiguous() for a in args))


class CausalLMEngine(api.Engine, ABC):
    """The Engine protocol on a transformers causal model; a subclass only places the weights (`_place`).

    Batching is static: requests of equal prompt length, in order of arrival, at most `policy.gpu_batch_size` in a
    batch. A subclass that batches unequal lengths (`_next_batch`) gets left-padded prompts. A row that ends before its
    batch is computed to the end as padding; `GenerationResult.padding_tokens` counts both kinds. A row with
    `ignore_eos` never selects the end-of-sequence token. A stop string ends a row with the token that completes it, and
    needs the model folder's tokenizer.
    """

    name: ClassVar[str]
    #: The policy fields that this engine honours; it refuses any other that is set.
    honours: ClassVar[tuple[str, ...]] = BATCH_AND_DTYPE
    #: Further keywords for transformers' `generate`.
    _generate_options: Mapping[str, Any] = {}
    _module: Any = None
    _device: str
    _model: api.LocalModel
    _block_size: int

    @abstractmethod
    def capabilities(self) -> api.Capabilities: ...

    @abstractmethod
    def _place(self, request: PlacementRequest) -> PlacedModule:
        """Loads the weights. Raises InfeasibleError when a budget is too small."""

    def load(
        self, model: api.LocalModel, policy: api.OffloadPolicy, limits: api.HardwareLimits, job: api.Job
    ) -> api.LoadReport:
        policy.require_defaults_except(self.name, *self.honours)
        refuse_disk_limit(self.name, limits)
        disable_progress_bar()  # it overwrites its line, which is for a terminal of its own
        if limits.threads is not None:
            torch.set_num_threads(limits.threads)
        dtype = policy.float_dtype(self.name, model.dtype)
        request = PlacementRequest(model, dtype, policy, limits, job, device_budget(limits))
        placement = self._place(request)
        self._module, self._device = placement.module.eval(), request.device
        _make_projection_inputs_contiguous(self._module)
        stored = self._module.generation_config
        # the checkpoint's sampling settings and penalties must not change what a request specifies
        self._module.generation_config = GenerationConfig(
            bos_token_id=stored.bos_token_id, eos_token_id=stored.eos_token_id, pad_token_id=stored.pad_token_id
        )
        self._model = model
        self._block_size = policy.gpu_batch_size
        total = sum(placement.weights_by_tier)
        device, host, disk = (n / total for n in placement.weights_by_tier)
        compute_tier = (0.0, 1.0, 0.0) if self._device == "cpu" else (1.0, 0.0, 0.0)
        return api.LoadReport(
            vocab=model.shape.vocab,
            max_context=model.shape.max_context,
            block_size=self._block_size,
            policy=dataclasses.replace(
                policy,
                compute_dtype=dtype,
                weights=(device, host, disk),
                cache=compute_tier,
                activations=compute_tier,
            ),
            compute_dtype=dtype,
            weights_by_tier=placement.weights_by_tier,
            notes=placement.notes,
        )

    def generate(self, requests: Sequence[api.GenerationRequest]) -> Iterator[api.GenerationResult]:
        """Validates all requests first; raises HarnessError naming the first that cannot run."""
        for request in requests:
            request.require_valid(self._model.shape)
            request.refuse_settings(self.name, "prompt_logprobs", "json_schema")
        decode = decoder(self._model.path, requests)
        began = time.perf_counter()
        formed = batches(requests, self._next_batch, began)
        return (result for batch in formed for result in self._run_batch(batch, decode, began))

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[api.Score]:
        """Scores in float32, from the logits of the continuation's positions only.

        An empty context becomes the beginning-of-sequence token, or else the end-of-sequence token, as in lm-eval.
        Sequences of equal length share a batch. Raises HarnessError for a pair that cannot be scored.
        """
        sequences = self._sequences(pairs)
        scores: dict[int, api.Score] = {}
        by_length: dict[int, list[int]] = {}
        for i, sequence in enumerate(sequences):
            by_length.setdefault(len(sequence), []).append(i)
        for members in by_length.values():
            for first in range(0, len(members), self._block_size):
                batch = members[first : first + self._block_size]
                lengths = [len(pairs[i][1]) for i in batch]
                scores |= zip(batch, self._score_batch([sequences[i] for i in batch], lengths), strict=True)
        return [scores[i] for i in range(len(pairs))]

    def close(self) -> None:
        self._module = None

    def _next_batch(self, pending: Sequence[api.GenerationRequest], now_s: float) -> list[api.GenerationRequest]:
        """Selects the next batch from the `pending` requests that have arrived by `now_s`."""
        return next_batch(pending, now_s, self._block_size)

    @torch.inference_mode()
    def _run_batch(
        self, batch: list[api.GenerationRequest], decode: Callable[[Sequence[int]], str] | None, began: float
    ) -> list[api.GenerationResult]:
        rows = [r.sampling for r in batch]
        eos = self._eos()
        prompt_len = max(len(r.prompt) for r in batch)
        padding = [prompt_len - len(r.prompt) for r in batch]
        device = self._device
        ids = torch.tensor([[*[0] * pad, *r.prompt] for pad, r in zip(padding, batch, strict=True)], device=device)
        mask = torch.tensor([[*[0] * pad, *[1] * (prompt_len - pad)] for pad in padding], device=device)
        clock = sampling.RowClock(rows, prompt_len, eos, decode)
        sampler = sampling.RowSampler(rows, eos)
        start = time.perf_counter() - began
        output = self._module.generate(
            inputs=ids,
            attention_mask=mask,
            do_sample=False,  # RowSampler adds the noise that makes a greedy choice a sample
            max_new_tokens=max(s.max_tokens for s in rows),
            logits_processor=LogitsProcessorList([sampler]),
            stopping_criteria=StoppingCriteriaList([clock]),
            **self._generate_options,
        )
        tokens = output[:, prompt_len:].tolist()
        times = [t - began for t in clock.times]
        return [
            api.GenerationResult(
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

    def _eos(self) -> tuple[int, ...]:
        return special_tokens(self._module.generation_config, self._model.shape.vocab)[0]

    def _sequences(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[int]]:
        """Context and continuation of each pair joined. Raises HarnessError for a pair that cannot be scored."""
        shape = self._model.shape
        begin = special_tokens(self._module.generation_config, shape.vocab)[1]
        return [full_sequence(i, *pair, shape, begin) for i, pair in enumerate(pairs)]

    @torch.inference_mode()
    def _score_batch(self, sequences: list[list[int]], lengths: list[int]) -> list[api.Score]:
        ids = torch.tensor(sequences, device=self._device)
        positions = max(lengths)
        truncates = "logits_to_keep" in inspect.signature(type(self._module).forward).parameters
        options = {"logits_to_keep": positions} if truncates else {}
        logits = self._module(ids[:, :-1], use_cache=False, **options).logits[:, -positions:]
        scores = []
        for row, length in enumerate(lengths):
            target = ids[row, -length:]
            # row by row: a float32 copy of all logits would double the largest tensor of this pass
            log_probs = torch.log_softmax(logits[row, -length:].float(), dim=-1)
            logprob = log_probs.gather(1, target[:, None]).double().sum().item()
            scores.append(api.Score(logprob, bool((log_probs.argmax(dim=-1) == target).all())))
        return scores
