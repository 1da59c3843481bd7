"""llama.cpp's server (the prebuilt package `xllamacpp`), with parallel sequences in one batch.

llama.cpp reads GGUF files, so `engines.models.gguf_writer` writes the checkpoint as one, once, with the same values in
the stored dtype. llama.cpp maps the weights from disk: under a memory limit the kernel evicts pages and reads them
again, which is how llama.cpp runs a model that does not fit. Without mmap it reads all weights into memory.

The harness works on token ids, so the file has a stand-in vocabulary in which every token is a word: the server streams
a token only when its text is complete, and this gives each token its own time. The server runs in this process; we send
requests over the loopback interface, as any client does.
"""

import http.client
import json
import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import xllamacpp

from engines.common.work_memory import refuse_disk_limit, require_memory
from engines.models.gguf_writer import to_gguf
from harness import api

#: Timeout of a response, in seconds: under a tight memory limit the first token may wait long for pages.
_TIMEOUT_S = 7200.0
_SLACK_BYTES = 64 << 20


class LlamaCppEngine(api.Engine):
    """Honours policy.gpu_batch_size (the server's parallel sequences) and policy.kv_bits (16 or 8). LLaMA and Qwen 2.

    `mmap`: maps the weights from disk (llama.cpp's default), or reads them into memory. `gpu_layers`: llama.cpp's -ngl;
    the user chooses how many layers fit limits.device_memory. Raises UnsupportedError for scores, stop strings,
    min_tokens and logprobs.
    """

    name = "llama_cpp"
    _server: Any = None

    def __init__(self, *, mmap: bool = True, gpu_layers: int = 0) -> None:
        self._mmap, self._gpu_layers = mmap, gpu_layers

    def capabilities(self) -> api.Capabilities:
        return api.Capabilities(phased=False, device=True, packages=("xllamacpp", "gguf", "numpy"))

    def load(
        self, model: api.LocalModel, policy: api.OffloadPolicy, limits: api.HardwareLimits, job: api.Job
    ) -> api.LoadReport:
        policy.require_defaults_except(self.name, "gpu_batch_size", "kv_bits")
        if policy.kv_bits not in (16, 8):
            raise api.UnsupportedError(f"policy.kv_bits: engine llama_cpp stores 16 or 8 bits, not {policy.kv_bits}")
        refuse_disk_limit(self.name, limits)
        _check_device(self._gpu_layers, limits)
        shape, batch = model.shape, policy.gpu_batch_size
        context = batch * (job.max_sequence + 16)  # the server keeps a few positions free in each sequence
        cache = context * shape.kv_bytes_per_token(2) * policy.kv_bits // 16
        needed = cache + _SLACK_BYTES + (0 if self._mmap else model.weight_bytes)
        purpose = "its KV cache" if self._mmap else "its weights and KV cache"
        require_memory(self.name, needed, limits.host_memory, purpose)
        file = to_gguf(model, job)
        threads = limits.threads or len(os.sched_getaffinity(0))
        self._server = xllamacpp.Server(self._settings(file, batch, context, policy.kv_bits, threads))
        self._address = urlsplit(self._server.listening_address)
        self._model, self._batch = model, batch
        stored, device_layers = model.weight_bytes, min(self._gpu_layers, shape.num_layers)
        device = device_layers * shape.params_per_layer * api.DTYPE_BYTES[model.dtype]
        return api.LoadReport(
            vocab=shape.vocab,
            max_context=shape.max_context,
            block_size=batch,
            policy=policy,
            compute_dtype=model.dtype,
            weights_by_tier=(device, 0, stored - device) if self._mmap else (device, stored - device, 0),
            notes=(
                f"GGUF in {model.dtype}, {'mapped' if self._mmap else 'read into memory'}, {batch} parallel sequences, "
                f"context {context}, {threads} threads",
            ),
        )

    def _settings(self, file: Path, batch: int, context: int, kv_bits: int, threads: int) -> Any:
        settings = xllamacpp.CommonParams()
        settings.model.path = str(file)
        settings.n_parallel = batch
        settings.n_ctx = context
        settings.n_batch, settings.n_ubatch = 2048, 512  # llama.cpp's defaults
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
        settings.n_gpu_layers = self._gpu_layers
        settings.warmup = False
        settings.cache_prompt = False  # computes a repeated prompt again, as every other engine does
        settings.cache_ram_mib = 0
        settings.port = 0  # any free port of the loopback interface
        settings.fit_params = False  # llama.cpp must not change these settings
        settings.verbosity = 0
        modes = xllamacpp.llama_load_mode
        settings.load_mode = modes.LLAMA_LOAD_MODE_MMAP if self._mmap else modes.LLAMA_LOAD_MODE_NONE
        if kv_bits == 8:
            settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_Q8_0
        return settings

    def generate(self, requests: Sequence[api.GenerationRequest]) -> Iterator[api.GenerationResult]:
        """Checks all requests before any work, then runs as many at once as the server has sequences."""
        for request in requests:
            request.require_valid(self._model.shape)
            request.refuse_settings(self.name, "stop", "min_tokens", "logprobs")
        return self._results(sorted(requests, key=lambda r: r.arrival_s), time.perf_counter())

    def _results(self, requests: list[api.GenerationRequest], began: float) -> Iterator[api.GenerationResult]:
        pending: queue.SimpleQueue[api.GenerationRequest | None] = queue.SimpleQueue()
        results: queue.SimpleQueue[api.GenerationResult | Exception] = queue.SimpleQueue()
        for request in [*requests, *[None] * self._batch]:
            pending.put(request)

        def client() -> None:
            while (request := pending.get()) is not None:
                try:
                    time.sleep(max(0.0, request.arrival_s - (time.perf_counter() - began)))
                    results.put(self._complete(request, began))
                except Exception as exc:  # raised again in the consumer's thread
                    results.put(exc)
                    return

        for _ in range(self._batch):
            threading.Thread(target=client, daemon=True).start()
        for _ in requests:
            result = results.get()
            if isinstance(result, Exception):
                raise result
            yield result

    def _complete(self, request: api.GenerationRequest, began: float) -> api.GenerationResult:
        """Sends one request and reads its streamed completion."""
        sampling = request.sampling
        body = {
            "prompt": list(request.prompt),
            "n_predict": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "seed": -1 if sampling.seed is None else sampling.seed & 0x7FFFFFFF,
            "ignore_eos": sampling.ignore_eos,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": True,
        }
        start = time.perf_counter() - began
        tokens: list[int] = []
        times: list[float] = []
        stopped = False
        connection = http.client.HTTPConnection(str(self._address.hostname), self._address.port, timeout=_TIMEOUT_S)
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise api.HarnessError(f"llama.cpp's server: {response.read(500).decode(errors='replace').strip()}")
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise api.HarnessError(f"llama.cpp's server: {event['error']}")
                if new_tokens := event.get("tokens", ()):
                    tokens += new_tokens
                    times += [time.perf_counter() - began] * len(new_tokens)
                if event.get("stop"):
                    stopped = event.get("stop_type") == "eos"
        finally:
            connection.close()
        return api.GenerationResult(
            id=request.id,
            tokens=tuple(tokens),
            start_s=start,
            token_times_s=tuple(times),
            prompt_tokens=len(request.prompt),
            finish_reason="stop" if stopped else "length",
        )

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[api.Score]:
        raise api.UnsupportedError(
            "llama.cpp's server returns no log-likelihoods of a given continuation: it cannot score"
        )

    def close(self) -> None:
        self._server = None


def _check_device(gpu_layers: int, limits: api.HardwareLimits) -> None:
    """Raises UnsupportedError where only one of gpu_layers and limits.device_memory is set, or there is no GPU."""
    if bool(gpu_layers) != (limits.device_memory is not None):
        raise api.UnsupportedError("llama_cpp: set gpu_layers and limits.device_memory together")
    accelerators = {device["type"] for device in xllamacpp.get_device_info()} - {xllamacpp.ggml_backend_dev_type(0)}
    if gpu_layers and not accelerators:
        raise api.UnsupportedError("llama_cpp: gpu_layers needs a GPU, and a build of xllamacpp that supports it")
