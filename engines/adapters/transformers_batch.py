"""transformers' own continuous batching, which its `generate_batch` runs: sequences join and leave every pass.

The manager behind `generate_batch` is started at load and kept, because stopping its thread takes a second. All weights
are resident, as with engine transformers; without a device its attention is torch's, over a mask of all sequences of a
pass, so that `batch_tokens` is worth a search. Its own sharing of equal prompts' blocks is off, as in every engine.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig

from engines.adapters.causal_lm import PlacedModule, PlacementRequest
from engines.adapters.transformers import TransformersEngine
from harness import api

#: Tokens of a block of the KV cache; its default of 256 would leave most of a short sequence's block empty.
_PAGE = 64
#: How long to wait for a result before asking whether the thread still runs, in seconds.
_POLL_S = 5.0


class TransformersBatchEngine(TransformersEngine):
    """Honours policy.gpu_batch_size (the most sequences of a pass) and policy.compute_dtype. Greedy only. With
    `ignore_eos` a sequence goes on behind an end-of-sequence token, which the other engines on transformers never
    choose.

    `batch_tokens`: the most tokens of a pass.
    """

    name = "transformers_batch"
    _manager: Any = None

    def __init__(self, *, batch_tokens: int = 256) -> None:
        super().__init__()
        self._batch_tokens = batch_tokens

    def _place(self, request: PlacementRequest) -> PlacedModule:
        request.policy.require_defaults_except(self.name, "gpu_batch_size", "compute_dtype")
        placed, batch = super()._place(request), request.policy.gpu_batch_size
        self._config = ContinuousBatchingConfig(
            page_size=_PAGE,
            num_blocks=batch * -(-request.job.max_sequence // _PAGE),
            max_batch_tokens=max(batch, self._batch_tokens),
            max_requests_per_batch=batch,
            allow_block_sharing=False,
        )
        return placed

    def generate(self, requests: Sequence[api.GenerationRequest]) -> Iterator[api.GenerationResult]:
        """Checks all requests before any work, then queues them as they arrive."""
        for request in requests:
            request.require_valid(self._model.shape)
            request.refuse_settings(self.name, "temperature", "stop", "min_tokens", "logprobs", "json_schema")
        return self._results(sorted(requests, key=lambda r: r.arrival_s), time.perf_counter())

    def _results(self, pending: list[api.GenerationRequest], began: float) -> Iterator[api.GenerationResult]:
        manager, eos = self._started(), list(self._eos()) or -1
        by_id: dict[str, api.GenerationRequest] = {}
        for request in pending:  # `pending` is in order of arrival, and its first results wait in the manager
            time.sleep(max(0.0, request.arrival_s - (time.perf_counter() - began)))
            by_id[request.id] = request
            manager.add_request(
                list(request.prompt),
                request_id=request.id,
                max_new_tokens=request.sampling.max_tokens,
                record_timestamps=True,
                eos_token_id=-1 if request.sampling.ignore_eos else eos,
            )
        while by_id:
            output = manager.get_result(timeout=_POLL_S)
            if output is None:
                if not manager.is_running():
                    raise api.HarnessError("transformers' continuous batching ended before all requests were answered")
                continue
            if output.error:
                raise api.HarnessError(f"request {output.request_id}: {output.error}")
            request = by_id.pop(output.request_id)
            tokens = tuple(output.generated_tokens)
            yield api.GenerationResult(
                id=request.id,
                tokens=tokens,
                start_s=output.lifespan[0] - began,
                token_times_s=tuple(t - began for t in output.timestamps),
                prompt_tokens=len(request.prompt),
                finish_reason="length" if len(tokens) == request.sampling.max_tokens else "stop",
            )

    def _started(self) -> Any:
        if self._manager is None:
            greedy = GenerationConfig(do_sample=False, eos_token_id=-1)
            self._manager = self._module.init_continuous_batching(greedy, self._config)
            self._manager.start()
        return self._manager

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[api.Score]:
        raise api.UnsupportedError("continuous batching changes the model's attention: score with engine transformers")

    def close(self) -> None:
        if self._manager is not None:
            self._manager.stop(block=True, timeout=10)
        self._manager = None
        super().close()
