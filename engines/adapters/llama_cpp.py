"""llama.cpp's server (the prebuilt package `xllamacpp`), with parallel sequences in one batch.

llama.cpp reads GGUF files, so the checkpoint is written as one, once, in the dtype that it is stored in; its values are
the same. Weights are mapped from disk: under a memory limit the kernel drops pages and reads them again, which is
llama.cpp's own way to run what does not fit. Without the mapping everything is read into memory.

The harness speaks in token ids, so the file's vocabulary is a stand-in whose every token is a word of its own: the
server streams a token only when its text is complete, and so each one has its own time. It runs in this process and is
asked over the loopback interface, as any user's client asks it.
"""

from __future__ import annotations

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

import numpy as np
import numpy.typing as npt
import xllamacpp
from gguf import GGMLQuantizationType, GGUFWriter, TokenType

from engines.common import requests as checks
from engines.common.folders import build_once
from engines.models import raw_tensors
from engines.models.checkpoints import content_digest, evict
from harness.api import (
    DTYPE_BYTES,
    Capabilities,
    EngineTrace,
    GenerationRequest,
    GenerationResult,
    HardwareLimits,
    HarnessError,
    InfeasibleError,
    Job,
    LoadReport,
    LocalModel,
    OffloadPolicy,
    Score,
    UnsupportedError,
)

_TYPES = {"F32": GGMLQuantizationType.F32, "F16": GGMLQuantizationType.F16, "BF16": GGMLQuantizationType.BF16}
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
#: Of an answer's first token: loading pages in may take long under a tight limit.
_PATIENCE_S = 7200.0
_SLACK_BYTES = 64 << 20
_RECIPE = 2


class LlamaCppEngine:
    """Honours policy.gpu_batch_size (the server's parallel sequences) and policy.kv_bits (16 or 8).

    `mmap` maps the weights from disk (llama.cpp's default) or reads them into memory; `gpu_layers` is its -ngl, the
    user's choice of how many fit limits.device_memory. LLaMA and Qwen 2 only. Raises UnsupportedError for scores, stop
    strings, min_tokens and logprobs.
    """

    name = "llama_cpp"
    _server: Any = None

    def __init__(self, *, mmap: bool = True, gpu_layers: int = 0) -> None:
        self._mmap, self._gpu_layers = mmap, gpu_layers

    def capabilities(self) -> Capabilities:
        return Capabilities(phased=False, device=True, packages=("xllamacpp", "gguf", "numpy"))

    def load(self, model: LocalModel, policy: OffloadPolicy, limits: HardwareLimits, job: Job) -> LoadReport:
        policy.require_defaults_except(self.name, "gpu_batch_size", "kv_bits")
        if policy.kv_bits not in (16, 8):
            raise UnsupportedError(f"policy.kv_bits: llama.cpp keeps them in 16 or 8 bits here, not {policy.kv_bits}")
        if limits.disk_bandwidth is not None:
            raise UnsupportedError("llama_cpp reads as fast as the disk does: it has no limits.disk_bandwidth")
        _check_device(self._gpu_layers, limits)
        shape, batch = model.shape, policy.gpu_batch_size
        context = batch * (job.max_sequence + 16)  # the server keeps a few positions free in each sequence
        cache = context * shape.kv_bytes_per_token(2) * policy.kv_bits // 16
        held = cache + _SLACK_BYTES + (0 if self._mmap else model.weight_bytes)
        if limits.host_memory is not None and held > limits.host_memory:
            what = "cache" if self._mmap else "weights and cache"
            raise InfeasibleError(
                f"llama_cpp needs at least {held / 2**20:.1f} MiB for its {what}; the budget is "
                f"{limits.host_memory / 2**20:.1f} MiB"
            )
        file = _as_gguf(model, job)
        threads = limits.threads or len(os.sched_getaffinity(0))
        self._server = xllamacpp.Server(self._settings(file, batch, context, policy.kv_bits, threads))
        self._address = urlsplit(self._server.listening_address)
        self._model, self._batch = model, batch
        stored, given = model.weight_bytes, min(self._gpu_layers, shape.num_layers)
        device = given * shape.params_per_layer * DTYPE_BYTES[model.dtype]
        return LoadReport(
            vocab=shape.vocab,
            max_context=shape.max_context,
            block_size=batch,
            policy=policy,
            compute_dtype=model.dtype,
            weights_by_tier=(device, 0, stored - device) if self._mmap else (device, stored - device, 0),
            notes=(
                f"{'mapped' if self._mmap else 'read'} GGUF in {model.dtype}, {batch} parallel sequences, "
                f"context {context}, {threads} threads",
            ),
        )

    def _settings(self, file: Path, batch: int, context: int, kv_bits: int, threads: int) -> Any:
        settings = xllamacpp.CommonParams()
        settings.model.path = str(file)
        settings.n_parallel = batch
        settings.n_ctx = context
        settings.n_batch, settings.n_ubatch = 2048, 512  # llama.cpp's own
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
        settings.n_gpu_layers = self._gpu_layers
        settings.warmup = False
        settings.cache_prompt = False  # a prompt that was seen before is computed again, as by every other engine
        settings.cache_ram_mib = 0
        settings.port = 0  # any that is free, on the loopback interface
        settings.fit_params = False  # what is set here is what runs
        settings.verbosity = 0
        modes = xllamacpp.llama_load_mode
        settings.load_mode = modes.LLAMA_LOAD_MODE_MMAP if self._mmap else modes.LLAMA_LOAD_MODE_NONE
        if kv_bits == 8:
            settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_Q8_0
        return settings

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        """As many at once as the server has sequences. Raises before any work for what it cannot run."""
        for request in requests:
            checks.validate(request, self._model.shape)
            sampling = request.sampling
            if sampling.stop or sampling.min_tokens or sampling.logprobs is not None:
                raise UnsupportedError(
                    f"request {request.id}: llama.cpp is asked in tokens here: no stop strings, min_tokens or logprobs"
                )
        return self._answers(sorted(requests, key=lambda r: r.arrival_s), time.perf_counter())

    def _answers(self, requests: list[GenerationRequest], began: float) -> Iterator[GenerationResult]:
        waiting: queue.SimpleQueue[GenerationRequest | None] = queue.SimpleQueue()
        answers: queue.SimpleQueue[GenerationResult | Exception] = queue.SimpleQueue()
        for request in [*requests, *[None] * self._batch]:
            waiting.put(request)

        def ask() -> None:
            while (request := waiting.get()) is not None:
                try:
                    time.sleep(max(0.0, request.arrival_s - (time.perf_counter() - began)))
                    answers.put(self._ask(request, began))
                except Exception as exc:  # told to who waits for the answer
                    answers.put(exc)
                    return

        for _ in range(self._batch):
            threading.Thread(target=ask, daemon=True).start()
        for _ in requests:
            answer = answers.get()
            if isinstance(answer, Exception):
                raise answer
            yield answer

    def _ask(self, request: GenerationRequest, began: float) -> GenerationResult:
        """One request, streamed."""
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
        connection = http.client.HTTPConnection(str(self._address.hostname), self._address.port, timeout=_PATIENCE_S)
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise HarnessError(f"llama.cpp's server: {response.read(500).decode(errors='replace').strip()}")
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                piece = json.loads(line[6:])
                if "error" in piece:
                    raise HarnessError(f"llama.cpp's server: {piece['error']}")
                if found := piece.get("tokens", ()):
                    tokens += found
                    times += [time.perf_counter() - began] * len(found)
                if piece.get("stop"):
                    stopped = piece.get("stop_type") == "eos"
        finally:
            connection.close()
        return GenerationResult(
            id=request.id,
            tokens=tuple(tokens),
            start_s=start,
            token_times_s=tuple(times),
            prompt_tokens=len(request.prompt),
            finish_reason="stop" if stopped else "length",
        )

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        raise UnsupportedError("llama.cpp's server gives no log-likelihoods of a given continuation: it cannot score")

    def trace(self) -> EngineTrace:
        return EngineTrace()

    def close(self) -> None:
        self._server = None


# --------------------------------------------------------------------------- the checkpoint as a GGUF file


def _check_device(gpu_layers: int, limits: HardwareLimits) -> None:
    """Raises UnsupportedError where layers are to lie on a device and there is none, or the other way round."""
    if bool(gpu_layers) != (limits.device_memory is not None):
        raise UnsupportedError("llama_cpp: gpu_layers and limits.device_memory go together")
    kinds = {device["type"] for device in xllamacpp.get_device_info()} - {xllamacpp.ggml_backend_dev_type(0)}
    if gpu_layers and not kinds:
        raise UnsupportedError("llama_cpp: this build of it, or this machine, has no GPU for gpu_layers")


def _as_gguf(model: LocalModel, job: Job) -> Path:
    """The checkpoint as a GGUF file in its stored dtype, written once, a tensor at a time. Out of the page cache: what
    an earlier launch has mapped would be free memory for this one."""
    config = json.loads((Path(model.path) / "config.json").read_text())
    family, rope = _checked(model, config)
    folder = job.cache / "gguf" / f"{content_digest(model, job.cache, job.on_progress)}-{_RECIPE}"

    def write(temporary: Path) -> None:
        writer = GGUFWriter(temporary / "model.gguf", family)
        _describe(writer, model, config, rope)
        tensors = [t for t in raw_tensors.read(Path(model.path)) if _gguf_name(t.name)]
        if config.get("tie_word_embeddings"):
            tensors = [t for t in tensors if t.name != "lm_head.weight"]
        for tensor in tensors:
            kind = GGMLQuantizationType.F32 if len(tensor.shape) == 1 else _TYPES[tensor.dtype]
            width = 4 if len(tensor.shape) == 1 else DTYPE_BYTES[model.dtype]
            size = int(np.prod(tensor.shape)) * width
            writer.add_tensor_info(_gguf_name(tensor.name), tensor.shape, np.dtype(np.float32), size, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(_converted(tensor, model, family))
        writer.close()

    build_once(folder, "the weights as a GGUF file", model.weight_bytes, write)
    evict(folder)
    return folder / "model.gguf"


def _checked(model: LocalModel, config: dict[str, Any]) -> tuple[str, float]:
    """GGUF's name of the architecture and the base of its rotary positions. Raises UnsupportedError."""
    family = model.shape.family
    if family not in ("llama", "qwen2"):
        raise UnsupportedError(f"engine llama_cpp writes GGUF files of llama and qwen2, not {family}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UnsupportedError(f"engine llama_cpp writes no GGUF files of scaled rotary positions ({rope})")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise UnsupportedError("engine llama_cpp writes no GGUF files of llama with biases")
    return family, float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))


def _describe(writer: GGUFWriter, model: LocalModel, config: dict[str, Any], rope: float) -> None:
    """Sizes and the stand-in vocabulary."""
    shape = model.shape
    writer.add_context_length(shape.max_context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_freq_base(rope)
    writer.add_layer_norm_rms_eps(float(config.get("rms_norm_eps", 1e-6)))
    writer.add_vocab_size(shape.vocab)
    ends = checks.special_tokens(checks.generation_settings(model.path), shape.vocab)[0]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{i} " for i in range(shape.vocab)])
    writer.add_token_scores([0.0] * shape.vocab)
    writer.add_token_types([TokenType.CONTROL if i in ends else TokenType.NORMAL for i in range(shape.vocab)])
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    if ends:
        writer.add_eos_token_id(ends[0])


def _gguf_name(name: str) -> str:
    """GGUF's name of a tensor; nothing for what it does not hold."""
    stem, _, kind = name.rpartition(".")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{kind}"
    if not stem.startswith("model.layers."):
        return ""
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_NAMES[part]}.{kind}" if part in _NAMES else ""


def _converted(tensor: raw_tensors.RawTensor, model: LocalModel, family: str) -> npt.NDArray[Any]:
    """A tensor's values as GGUF holds them: vectors in float32, and LLaMA's queries and keys with the two halves of
    each head interleaved, for its rotary positions turn neighbours."""
    bits = tensor.bits()
    if len(tensor.shape) == 1:
        return raw_tensors.values(bits, tensor.dtype).astype(np.float32)
    heads = {"q_proj": model.shape.num_heads, "k_proj": model.shape.num_kv_heads}
    part = tensor.name.rsplit(".", 2)[-2]
    if family == "llama" and part in heads:
        rows, columns = tensor.shape
        halves = bits.reshape(heads[part], 2, rows // heads[part] // 2, columns)
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))
    return bits
