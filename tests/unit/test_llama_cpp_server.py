"""How llama.cpp's server is started, watched and ended, with a stand-in for its program."""

import json
import platform
import shutil
import subprocess
import sys

import pytest

from engines.adapters import llama_cpp_server
from engines.adapters.llama_cpp_server import NativeServer, Settings, native_build, run_native
from engines.environments.llamacpp import AMX_MEND
from harness.api import HarnessError, UnsupportedError
from harness.common.host_cpu import cpu_flags, instruction_sets

#: Says at first that it is loading, as the real one does, and keeps what it was started with.
SERVER = """
import http.server, json, pathlib, sys
pathlib.Path(__file__).with_suffix(".args").write_text(json.dumps(sys.argv[1:]))
asked = []
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        asked.append(self.path)
        self.send_response(503 if len(asked) < 3 else 200)
        self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Health).serve_forever()
"""
SETTINGS = Settings("m.gguf", 3, 96, 2048, 2, mmap=True, kv_bits=8, flash_attention=False, gpu_layers=0)


@pytest.fixture
def build(tmp_path, monkeypatch):
    """A folder of programs; gives what puts one there."""
    monkeypatch.setattr(llama_cpp_server, "BUILD", tmp_path)
    native_build.cache_clear()
    yield lambda name, code: _write(tmp_path / name, f"#!{sys.executable}\n{code}")
    native_build.cache_clear()


def _write(path, text):
    path.write_text(text)
    path.chmod(0o755)


def test_it_is_ready_once_it_says_so_and_ends_with_its_engine(build, tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # it is on this host
    build("llama-server", SERVER)
    server = NativeServer(SETTINGS, tmp_path / "log")
    arguments = json.loads((tmp_path / "llama-server.args").read_text())
    expected = {
        "--parallel": "3", "--ubatch-size": "2048", "--flash-attn": "off", "--cache-type-k": "q8_0",
        "--load-mode": "mmap", "--threads": "2",
    }  # fmt: skip
    assert {name: arguments[arguments.index(name) + 1] for name in expected} == expected
    assert "--no-cache-prompt" in arguments
    server.require_alive()
    server.close()
    with pytest.raises(HarnessError, match="llama-server ended with -9"):
        server.require_alive()


def test_one_that_dies_says_why(build, tmp_path):
    build("llama-server", "print('loading'); print('error: no such tensor'); raise SystemExit(3)")
    with pytest.raises(HarnessError, match="llama-server ended with 3: error: no such tensor"):
        NativeServer(SETTINGS, tmp_path / "log")


def test_a_program_that_fails_says_why(build):
    build("llama-quantize", "print('bad type'); raise SystemExit(1)")
    with pytest.raises(HarnessError, match="llama-quantize failed: bad type"):
        run_native("llama-quantize", "a", "b")


def test_a_build_for_another_cpu_is_refused(build, tmp_path):
    assert native_build() is None
    native_build.cache_clear()
    record = {"cpu_flags": [*cpu_flags(), "avx10_9", "not_an_instruction_set"]}
    (tmp_path / "build.json").write_text(json.dumps(record))
    with pytest.raises(UnsupportedError, match="a CPU with avx10_9, which this one lacks"):
        native_build()
    (tmp_path / "build.json").write_text(json.dumps({"cpu_flags": cpu_flags()}))
    assert native_build() == {"cpu_flags": cpu_flags()}


def test_instruction_sets_leave_out_what_no_compiler_uses():
    assert instruction_sets(["fpu", "avx2", "ibrs", "amx_bf16", "avx2", "sse4_2"]) == ["amx_bf16", "avx2", "sse4_2"]


@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("g++"), reason="GCC's code for AMX")
def test_the_shapes_of_amx_tiles_are_not_dropped_by_the_compiler():
    """As llama.cpp writes them. GCC 12.2 leaves out the store of 123 without the mend."""
    code = """
    #include <immintrin.h>
    void configure() {
      alignas(64) struct {
        unsigned char palette, start, zero[14];
        unsigned short bytes[16];
        unsigned char rows[16];
      } t = {};
      t.palette = 1;
      t.rows[0] = 123;
      _tile_loadconfig(&t);
    }
    """
    command = ["g++", "-O3", "-march=sapphirerapids", "-x", "c++", "-S", "-o", "-", "-"]
    done = subprocess.run(command, input=AMX_MEND + code, text=True, capture_output=True, check=True)
    assert "$123" in done.stdout
