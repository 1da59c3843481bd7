"""llama.cpp's server, with parallel sequences in one batch.

Where the environment has a build for this machine's CPU (engines/environments/llamacpp.py), that runs; else the
prebuilt package `xllamacpp`, which uses AVX2 at most, and the record says so. llama.cpp reads GGUF files, so
`engines.models.gguf_writer` writes the checkpoint as one, once. llama.cpp maps the weights from disk: under a memory
limit the kernel evicts pages and reads them again, which is how llama.cpp runs a model that does not fit. Without mmap
it reads all weights into memory.

The harness works on token ids, so the file has a stand-in vocabulary in which every token is a word: the server streams
a token only when its text is complete, and this gives each token its own time. We send requests over the loopback
interface, as any client does.
"""

import http.client
import json
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.adapters import refusals
from engines.adapters.llama_cpp_server import NativeServer, PrebuiltServer, Settings, native_build, run_native
from engines.common.folders import build_once
from engines.common.work_memory import require_memory
from engines.models.checkpoints import evict
from engines.models.gguf_writer import FLOAT_TYPES, to_gguf
from harness import api
from harness.common.system import usable_cpus

#: Timeout of a response, in seconds: under a tight memory limit the first token may wait long for pages.
_TIMEOUT_S = 7200.0
_SLACK_BYTES = 64 << 20
#: llama.cpp's types of floats, by dtype.
_FLOATS: Mapping[api.Dtype, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
#: llama.cpp's types of quantized weights, whose blocks have 32 values, by policy.weight_bits.
_QUANTIZED = {8: "Q8_0", 4: "Q4_0"}


class LlamaCppEngine(api.Engine):
    """Honours policy.gpu_batch_size (the server's parallel sequences), policy.kv_bits (16 or 8) and policy.weight_bits:
    16, or 8 (Q8_0) and 4 (Q4_0) in groups of 32, quantized by llama.cpp's own program. For LLaMA, Qwen 2, OLMoE and
    Qwen 3 MoE.

    `mmap`: maps the weights from disk (llama.cpp's default), or reads them into memory. `gguf`: the file's type for
    weights of 16 bits, `F16`, `BF16` or `F32`; `auto` is the stored dtype. `ubatch`: tokens computed at once.
    `flash_attention`: true or false; None leaves it to llama.cpp. `threads`: by default as many as there are cores.
    `gpu_layers`: llama.cpp's -ngl; the user chooses how many layers fit limits.device_memory. Raises UnsupportedError
    for scores, stop strings, min_tokens and logprobs.
    """

    name = "llama_cpp"
    _server: NativeServer | PrebuiltServer | None = None

    def __init__(
        self, *, mmap: bool = True, gguf: str = "auto", ubatch: int = 512, flash_attention: bool | None = None,
        threads: int | None = None, gpu_layers: int = 0,
    ) -> None:  # fmt: skip
        if gguf not in ("auto", *FLOAT_TYPES):
            raise TypeError(f"gguf must be auto or one of {', '.join(FLOAT_TYPES)}")
        self._mmap, self._gguf, self._ubatch, self._gpu_layers = mmap, gguf, ubatch, gpu_layers
        self._flash_attention, self._threads = flash_attention, threads

    def capabilities(self) -> api.Capabilities:
        return api.Capabilities(phased=False, device=True, packages=("xllamacpp", "gguf", "numpy"))

    def load(
        self, model: api.LocalModel, policy: api.OffloadPolicy, limits: api.HardwareLimits, job: api.Job
    ) -> api.LoadReport:
        refusals.llama_cpp(policy, limits, model)
        if bool(self._gpu_layers) != (limits.device_memory is not None):
            raise api.UnsupportedError("llama_cpp: set gpu_layers and limits.device_memory together")
        build = None if self._gpu_layers else native_build()
        kind, file = self._file(model, policy, job, build is not None)
        shape, batch, stored = model.shape, policy.gpu_batch_size, file.stat().st_size
        context = batch * (job.max_sequence + 16)  # the server keeps a few positions free in each sequence
        cache = context * shape.kv_bytes_per_token(2) * policy.kv_bits // 16
        needed = cache + _SLACK_BYTES + (0 if self._mmap else stored)
        purpose = "its KV cache" if self._mmap else "its weights and KV cache"
        require_memory(self.name, needed, limits.host_memory, purpose)
        threads = self._threads or limits.threads or usable_cpus()
        settings = Settings(
            file, batch, context, self._ubatch, threads, self._mmap, policy.kv_bits, self._flash_attention,
            self._gpu_layers,
        )  # fmt: skip
        self._server = NativeServer(settings, job.scratch / "server.log") if build else PrebuiltServer(settings)
        self._model, self._batch = model, batch
        device = min(self._gpu_layers, shape.num_layers) * shape.params_per_layer * api.DTYPE_BYTES[model.dtype]
        attention = {None: "as llama.cpp chooses", True: "on", False: "off"}[self._flash_attention]
        return api.LoadReport(
            vocab=shape.vocab,
            max_context=shape.max_context,
            block_size=batch,
            policy=policy,
            compute_dtype=next((dtype for dtype, name in _FLOATS.items() if name == kind), model.dtype),
            weights_by_tier=(device, 0, stored - device) if self._mmap else (device, stored - device, 0),
            notes=(
                _build_note(build, bool(self._gpu_layers)),
                f"GGUF in {kind}, {'mapped' if self._mmap else 'read into memory'}, {batch} parallel sequences, "
                f"context {context}, {threads} threads, ubatch {self._ubatch}, flash attention {attention}",
            ),
        )

    def _file(self, model: api.LocalModel, policy: api.OffloadPolicy, job: api.Job, native: bool) -> tuple[str, Path]:
        """The type and the path of the GGUF file that the cell asks for, written once. Raises UnsupportedError for bits
        that llama.cpp has no type for here."""
        bits = policy.weight_bits
        if bits == 16:
            kind = self._gguf if self._gguf != "auto" else _FLOATS[model.dtype]
            return kind, to_gguf(model, job, kind)
        if self._gguf != "auto":
            raise api.UnsupportedError(
                "llama_cpp: gguf chooses the type of 16-bit weights; leave it out with weight_bits"
            )
        if not native:
            raise api.UnsupportedError(
                "llama-quantize is built with the environment: use launcher venv, with a compiler"
            )
        kind, plain = _QUANTIZED[bits], to_gguf(model, job, "BF16" if model.dtype == "bfloat16" else "F32")
        folder = plain.parent.with_name(f"{plain.parent.name}-{kind}")

        def write(temporary: Path) -> None:
            run_native("llama-quantize", plain, temporary / "model.gguf", kind)

        build_once(folder, f"the weights in {kind}", model.weight_bytes, write)
        evict(folder)
        return kind, folder / "model.gguf"

    def generate(self, requests: Sequence[api.GenerationRequest]) -> Iterator[api.GenerationResult]:
        """Checks all requests before any work, then runs as many at once as the server has sequences."""
        for request in requests:
            request.require_valid(self._model.shape)
            request.refuse_settings(self.name, "stop", "min_tokens", "logprobs", "json_schema")
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
                assert self._server is not None
                self._server.require_alive()
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
        assert self._server is not None
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=_TIMEOUT_S)
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
        if self._server is not None:
            self._server.close()
        self._server = None


def _build_note(build: Mapping[str, Any] | None, gpu: bool) -> str:
    """Which build runs, for the record."""
    if build:
        flags = ", ".join([*build["enabled"], *build["cmake"]])
        return f"llama.cpp of {build['source']} built for this CPU ({flags})"
    if gpu:
        return "the installed build of xllamacpp"
    return (
        "PREBUILT FOR AVX2 ONLY: not built for this CPU, whose other instructions stay unused; do not quote its speed"
    )
