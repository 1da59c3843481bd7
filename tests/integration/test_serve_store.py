"""`harness serve` with a store of KV blocks: a full disk under it, damaged files, a second server."""

import http.client
import json
import os
import random
import re
import subprocess
from contextlib import contextmanager

import pytest

from tests.integration.conftest import Cli, end
from tests.offload import save_with_tokenizer, with_kernels

pytestmark = pytest.mark.slow
#: Two sequences' worth of KV cache, so that what is kept for later is in the store.
SETTINGS = ("--memory", "512MiB", "--max-sequence", 128, "--set", "policy.gpu_batch_size=2",
            "--set", "policy.compute_dtype=float32", "--set", "policy.threads=1")  # fmt: skip
NUMBERS = range(8)  # prompts, of at least four full blocks each
BLOCK = 16  # tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_with_tokenizer(tmp_path_factory.mktemp("model") / "tiny")


@contextmanager
def serving(cli, model, store, *settings):
    """The port of a server with a store, and the lines that it says."""
    option = ("--set", f"options.kv_store={{disk: 64MiB, path: {store}}}")
    process = cli.start("serve", "--model", model, *SETTINGS, *option, *settings, "--port", "0",
                        "--files", cli.folder / "files")  # fmt: skip
    try:
        told = []
        for line in process.stderr:
            told.append(line)
            if found := re.search(r"served at http://127\.0\.0\.1:(\d+)/v1", line):
                break
        else:
            raise AssertionError("".join(told))
        yield int(found[1]), process
    finally:
        end(process)


def ask(port, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
    response = connection.getresponse()
    text = response.read()
    connection.close()
    assert response.status == 200, text
    return json.loads(text) if text.startswith(b"{") else text.decode()


def answers(port, numbers):
    """What the model says to long prompts, by their numbers."""
    found = {}
    for number in numbers:
        words = random.Random(number).sample(range(3, 512), 70)
        body = {"prompt": " ".join(f"w{word}" for word in words), "max_tokens": 8, "temperature": 0}
        found[number] = ask(port, "/v1/completions", body | {"ignore_eos": True})["choices"][0]["text"]
    return found


def hits(port):
    return sum(ask(port, "/status")["kv_store"]["hit_tokens"].values())


def mount(folder, size):
    """A file system of that size, where this process may mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("may not mount a small file system")


def stop(process):
    process.terminate()
    assert process.wait(60) == 0
    told = process.stderr.read()
    assert "Traceback" not in told, told
    return told


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory):
    """Answers without anything in a store."""
    cli = Cli(tmp_path_factory.mktemp("expected"))
    with_kernels(cli.folder / "cache")
    with serving(cli, model, cli.folder / "none") as (port, process):
        found = answers(port, NUMBERS)
        assert ask(port, "/status")["kv_store"]["problem"] == ""
        stop(process)
    return found


def test_a_full_disk_under_the_store_ends_storing_and_not_serving(cli, model, kernels, expected):
    """A file system of 256 KiB: room for some of the blocks."""
    store = cli.folder / "small"
    mount(store, "256k")
    try:
        with serving(cli, model, store) as (port, process):
            assert answers(port, NUMBERS) == expected
            kept = ask(port, "/status")["kv_store"]
            assert "No space left on device; nothing more is stored on disk" in kept["problem"]
            assert kept["blocks"]["disk"] > 0
            assert "harness_kv_store_failed 1.0" in ask(port, "/metrics")
            assert answers(port, NUMBERS) == expected, "what was stored is read, the rest computed"
            assert hits(port) > 0
            assert stop(process).count("nothing more is stored on disk") == 1
    finally:
        subprocess.run(["umount", store], check=True)


def test_damaged_blocks_are_not_used_and_whole_ones_are(cli, model, kernels, expected):
    store = cli.folder / "kv"
    with serving(cli, model, store) as (port, process):
        assert answers(port, NUMBERS) == expected
        end(process)  # kill -9: what was written stays
    with serving(cli, model, store) as (port, process):
        assert answers(port, NUMBERS) == expected
        whole = hits(port)
        assert whole >= 5 * 4 * BLOCK
        stop(process)
    [blocks] = store.glob("*/blocks")
    content = bytearray(blocks.read_bytes())
    rng = random.Random(0)
    for _ in range(len(content) // 4096):
        content[rng.randrange(len(content))] ^= 0xFF
    blocks.write_bytes(content)
    [journal] = store.glob("*/journal")
    journal.write_bytes(b"\x99" * 17 + journal.read_bytes()[:-9])
    with serving(cli, model, store) as (port, process):
        assert answers(port, NUMBERS) == expected
        assert hits(port) < whole
        stop(process)


def test_a_second_server_on_a_store_is_refused_in_a_line(cli, model, kernels):
    store = cli.folder / "kv"
    option = ("--set", f"options.kv_store={{disk: 64MiB, path: {store}}}")
    with serving(cli, model, store) as (port, process):
        told = cli(
            "serve", "--model", model, *SETTINGS, *option, "--port", "0", "--files", cli.folder / "other", code=2
        )
        [line] = told.stderr.strip().splitlines()
        assert f"kv_store: {store} is in use by another engine; give each its own path, or stop that one" in line
        assert ask(port, "/health") == {"status": "ok"}
        stop(process)
