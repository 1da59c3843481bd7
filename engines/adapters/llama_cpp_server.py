"""Starts llama.cpp's server: the one built for this CPU, in a process of its own, or the prebuilt package's."""

import http.client
import json
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from engines.common.tied_process import ending_with_this_thread
from harness.api import HarnessError, UnsupportedError
from harness.common.host_cpu import cpu_flags, instruction_sets

#: Where engines/environments/llamacpp.py puts what it builds.
BUILD = Path(sys.prefix, "llama.cpp")
#: llama.cpp's own: tokens of all sequences that are submitted at once; `ubatch` of them are computed at once.
_BATCH = 2048


@dataclass(frozen=True)
class Settings:
    """What the server is started with. `context`: tokens of all sequences together. `flash_attention`: None leaves the
    choice to llama.cpp."""

    file: Path
    parallel: int
    context: int
    ubatch: int
    threads: int
    mmap: bool
    kv_bits: int
    flash_attention: bool | None
    gpu_layers: int


@cache
def native_build() -> dict[str, Any] | None:
    """The record of the build for this machine; None where there is none. Raises UnsupportedError for one that this CPU
    cannot run, such as in an image that was built elsewhere."""
    if not (BUILD / "build.json").exists():
        return None
    record: dict[str, Any] = json.loads((BUILD / "build.json").read_text())
    if missing := instruction_sets(set(record["cpu_flags"]) - set(cpu_flags())):
        raise UnsupportedError(
            f"llama.cpp was built for a CPU with {', '.join(missing[:8])}, which this one lacks: build it here"
        )
    return record


def run_native(program: str, *arguments: object) -> None:
    """Runs a program of the build, such as llama-quantize. Raises HarnessError with its last line if it fails."""
    command = [str(BUILD / program), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise HarnessError(f"{program} failed: {(done.stdout.strip().splitlines() or ['no output'])[-1]}")


class NativeServer:
    """llama-server as a child of this process, which is charged to the same memory limit and ended with it."""

    def __init__(self, settings: Settings, log: Path) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            self.port = unused.getsockname()[1]
        attention = {None: "auto", True: "on", False: "off"}[settings.flash_attention]
        cache_type = "q8_0" if settings.kv_bits == 8 else "f16"
        arguments: dict[str, object] = {
            "--model": settings.file, "--parallel": settings.parallel, "--ctx-size": settings.context,
            "--batch-size": _BATCH, "--ubatch-size": settings.ubatch,
            "--threads": settings.threads, "--threads-batch": settings.threads,
            "--load-mode": "mmap" if settings.mmap else "none", "--flash-attn": attention,
            "--cache-type-k": cache_type, "--cache-type-v": cache_type,
            "--cache-ram": 0, "--fit": "off", "--host": "127.0.0.1", "--port": self.port,
        }  # fmt: skip
        flags = ["--no-warmup", "--no-cache-prompt", "--no-ui", "--offline"]
        command = [str(BUILD / "llama-server"), *flags, *(str(a) for pair in arguments.items() for a in pair)]
        self._log = log
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                ending_with_this_thread(command), stdin=subprocess.DEVNULL, stdout=sink, stderr=sink
            )
        while not self._healthy():
            self.require_alive()
            time.sleep(0.05)

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)  # never through a proxy
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):  # not listening yet
            return False
        finally:
            connection.close()

    def require_alive(self) -> None:
        """Raises HarnessError with the log's last line where the server has ended."""
        if (code := self._process.poll()) is not None:
            lines = self._log.read_text(errors="replace").strip().splitlines() or ["no output"]
            raise HarnessError(f"llama-server ended with {code}: {lines[-1][:300]}")

    def close(self) -> None:
        """Ends the server and waits for it, so that its CPU time and bytes count as this process's."""
        self._process.kill()
        self._process.wait()


class PrebuiltServer:
    """The server of the package `xllamacpp`, in this process: a build for any CPU with AVX2, or one for a GPU."""

    def __init__(self, settings: Settings) -> None:
        import xllamacpp

        _require_gpu(settings.gpu_layers, xllamacpp)
        params = xllamacpp.CommonParams()
        params.model.path = str(settings.file)
        params.n_parallel, params.n_ctx = settings.parallel, settings.context
        params.n_batch, params.n_ubatch = _BATCH, settings.ubatch
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings.threads
        params.n_gpu_layers = settings.gpu_layers
        params.warmup = params.fit_params = params.cache_prompt = False
        params.cache_ram_mib = params.verbosity = 0
        params.port = 0  # any free port of the loopback interface
        modes, attention = xllamacpp.llama_load_mode, xllamacpp.llama_flash_attn_type
        params.load_mode = modes.LLAMA_LOAD_MODE_MMAP if settings.mmap else modes.LLAMA_LOAD_MODE_NONE
        if settings.flash_attention is not None:
            params.flash_attn_type = getattr(
                attention, f"LLAMA_FLASH_ATTN_TYPE_{'EN' if settings.flash_attention else 'DIS'}ABLED"
            )
        if settings.kv_bits == 8:
            params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_Q8_0
        self._server: Any = xllamacpp.Server(params)
        self.port = int(self._server.listening_address.rpartition(":")[2].strip("/"))

    def require_alive(self) -> None:
        """Does nothing: the server lives as long as this process."""

    def close(self) -> None:
        """Ends the server."""
        self._server = None


def _require_gpu(gpu_layers: int, xllamacpp: Any) -> None:
    accelerators = {device["type"] for device in xllamacpp.get_device_info()} - {xllamacpp.ggml_backend_dev_type(0)}
    if gpu_layers and not accelerators:
        raise UnsupportedError("llama_cpp: gpu_layers needs a GPU, and a build of xllamacpp that supports it")
