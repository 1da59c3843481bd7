"""KV blocks outlive their sequences, in memory and on disk: what is read back is what was stored, or nothing is."""

import errno
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.offload.engine import OffloadEngine
from engines.offload.kv_store import disk_tier
from engines.offload.kv_store.disk_tier import DiskTier
from engines.offload.kv_store.options import kv_store_options
from engines.offload.kv_store.store import KVStore
from engines.offload.pass_model import PassModel
from harness import api
from tests.offload import answers, prepare, tiny, with_kernels

SIZE = 64
NO_LIMITS = api.HardwareLimits()
RECORD = disk_tier._RECORD_BYTES


def name(number):
    return number.to_bytes(16, "big")


def content(number):
    return bytearray(number.to_bytes(2, "big") * (SIZE // 2))


def read(store, number):
    got = []
    return bytes(got[0]) if store.get(name(number), lambda block: got.append(bytes(block))) else None


def opened(path, host=2, disk=3, row_s=None, key="k"):
    tier = DiskTier(path, key, SIZE, disk * SIZE) if disk else None
    return KVStore(SIZE, host * SIZE, tier, lambda: row_s)


OPERATIONS = st.lists(st.tuples(st.sampled_from(["put", "get", "reopen"]), st.integers(0, 9)), max_size=40)


@settings(deadline=None, max_examples=60)
@given(OPERATIONS, st.integers(0, 3), st.integers(0, 4))
def test_a_store_gives_back_what_was_put_and_keeps_to_its_budgets(operations, host, disk):
    with tempfile.TemporaryDirectory() as folder:
        store, recent = opened(Path(folder), host, disk), []  # those that memory must have, the latest first
        for operation, number in operations:
            if operation == "reopen":
                store.close()
                store = opened(Path(folder), host, disk)
                assert all(store.touch(name(n)) for n in recent[:disk]), "on the way to disk none is lost"
                recent = []
            elif operation == "get" and (found := read(store, number)) is not None:
                assert found == content(number)
                recent = [number, *(n for n in recent if n != number)][:host]
            elif operation == "put" and not store.touch(name(number)):
                store.put(name(number), content(number))
                recent = [number, *recent][:host]
            elif operation == "put" and number in recent:
                recent = [number, *(n for n in recent if n != number)]
            blocks = store.stats().blocks
            assert blocks["host"] <= host and blocks.get("disk", 0) <= disk
            assert all(store.touch(name(n)) for n in reversed(recent))
            file = Path(folder) / "k" / "blocks"
            assert not file.exists() or file.stat().st_size <= disk * SIZE
        store.close()


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_no_damage_to_the_files_gives_a_wrong_block(data):
    with tempfile.TemporaryDirectory() as folder:
        store = opened(Path(folder), host=0, disk=4)
        for number in range(7):
            store.put(name(number), content(number))
        store.close()
        file = Path(folder) / "k" / data.draw(st.sampled_from(["journal", "blocks"]))
        there = bytearray(file.read_bytes())
        at = data.draw(st.integers(0, len(there) - 1))
        if data.draw(st.booleans()):
            there[at] ^= 1 << data.draw(st.integers(0, 7))
        else:
            del there[at:]
        file.write_bytes(there)
        store = opened(Path(folder), host=0, disk=4)
        assert {read(store, number) for number in range(7)} <= {None, *(bytes(content(n)) for n in range(7))}
        for number in range(7):
            assert read(store, number) in (None, content(number))
        for number in (8, 9):
            store.put(name(number), content(number))
        store.close()
        store = opened(Path(folder), host=0, disk=4)
        assert [read(store, number) for number in (8, 9)] == [content(8), content(9)]
        store.close()


def test_a_process_that_is_killed_leaves_only_whole_blocks(tmp_path):
    script = (
        "import sys; from pathlib import Path; from engines.offload.kv_store.disk_tier import DiskTier\n"
        f"tier = DiskTier(Path({str(tmp_path)!r}), 'k', {SIZE}, {50 * SIZE})\n"
        "for n in range(1 << 16):\n"
        f"    tier.put(n.to_bytes(16, 'big'), bytearray(n.to_bytes(2, 'big') * {SIZE // 2}))\n"
        "    print(n, flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    last = [int(line) for line in itertools.islice(child.stdout, 200)][-1]
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    store = opened(tmp_path, host=0, disk=50)
    there = [number for number in range(1 << 12) if read(store, number) == content(number)]
    assert len(there) >= 49 and there[-1] >= last
    assert there == list(range(there[0], there[-1] + 1)), "the last ones"
    store.close()


def test_the_journal_is_rewritten_when_most_of_it_is_stale(tmp_path):
    store = opened(tmp_path, host=0, disk=2)
    for number in range(1100):
        store.put(name(number), content(number))
    store.close()
    store = opened(tmp_path, host=0, disk=2)
    assert (tmp_path / "k" / "journal").stat().st_size == 2 * RECORD
    assert [read(store, number) for number in (1097, 1098, 1099)] == [None, content(1098), content(1099)]
    assert store.stats().evictions == {"host": 0, "disk": 0}
    store.close()


def test_one_store_has_one_owner_and_one_key_leaves_the_other_alone(tmp_path):
    store = opened(tmp_path, host=0)
    store.put(name(1), content(1))
    with pytest.raises(api.HarnessError, match=r"in use by another engine; give each its own path") as refused:
        opened(tmp_path, key="other")
    assert "\n" not in str(refused.value)
    store.close()
    other = opened(tmp_path, host=0, key="other")
    assert read(other, 1) is None
    other.close()
    assert read(opened(tmp_path), 1) == content(1)


def test_a_full_disk_ends_storing_says_so_and_what_is_there_is_still_read(tmp_path, monkeypatch, caplog):
    store = opened(tmp_path, host=1)
    store.put(name(1), content(1))
    store.put(name(2), content(2))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_tier.os, "pwrite", full)
    for number in (3, 4, 5):
        store.put(name(number), content(number))
    assert store.stats().problem == f"kv_store: {tmp_path}: No space left on device; nothing more is stored on disk"
    assert [record.getMessage() for record in caplog.records] == [store.stats().problem], "once"
    assert [read(store, number) for number in (1, 2, 5)] == [content(1), None, None]
    assert store.stats().evictions["host"] == 4
    store.close()


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(api.HarnessError, match=r"kv_store: cannot use .*file.*: Not a directory"):
        opened(tmp_path / "file")


def test_what_is_faster_to_compute_is_not_read(tmp_path):
    store = opened(tmp_path, row_s=1e-15)
    for number in range(2):
        store.put(name(number), content(number))
    names = [name(number) for number in (0, 1, 7)]
    assert store.worth_reading(names) == 2, "before anything was read nothing says it is slow"
    assert read(store, 0) == content(0)
    assert store.worth_reading(names) == 0
    assert store.stats().recomputed_tokens == 16
    slow = opened(tmp_path / "other", row_s=1e3)
    for number in range(2):
        slow.put(name(number), content(number))
    assert read(slow, 0) == content(0)
    assert slow.worth_reading(names) == 2
    assert slow.stats().hit_tokens == {"host": 8, "disk": 0}
    store.close()
    slow.close()


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("2GiB", "must be a mapping"),
        ({"ram": 1}, "host, disk and path, not ram"),
        ({"host": "much"}, "kv_store.host"),
        ({"host": True}, "kv_store.host must be a size"),
        ({"host": -1}, "negative"),
        ({"disk": "1GiB"}, "go together"),
        ({"host": 1, "path": "x"}, "go together"),
        ({}, "needs host or disk"),
        ({"disk": 1, "path": 3}, "kv_store.path"),
    ],
)
def test_options_that_do_not_fit_are_named(option, words):
    with pytest.raises(TypeError, match=words):
        kv_store_options(option)


def loaded(model, cache, limits=NO_LIMITS, policy=(), **options):
    engine = OffloadEngine(**options)
    job = api.Job(cache, with_kernels(cache), 64, 64, reproducible=True)
    policy = {"schedule": "sweep", "gpu_batch_size": 2} | dict(policy)
    engine.load(model, api.OffloadPolicy(**policy), limits, job)
    return engine


def ask(engine, prompt):
    [tokens] = answers(engine, [api.GenerationRequest("r", prompt, api.SamplingParams(6, ignore_eos=True))]).values()
    return tokens


def conversations(engine):
    """Everybody has said something and heard an answer; then everybody goes on, and sends all of it again."""
    first = [ask(engine, (speaker,) * 12) for speaker in range(5, 12)]
    return first, [ask(engine, (*(5 + i,) * 12, *said, 30, i)) for i, said in enumerate(first)]


@pytest.mark.parametrize(("bits", "option"), [(8, {"host": 1 << 20}), (16, {"host": 3 << 13, "disk": 1 << 20})])
@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_conversations_are_continued_from_the_store_with_the_same_answers(model, cache, bits, option, monkeypatch):
    monkeypatch.setattr(PassModel, "row_s", lambda _: None)  # so that no clock decides what is read
    with tempfile.TemporaryDirectory() as path:
        option = option | ({"path": path} if "disk" in option else {})
        policy = {"kv_bits": bits}
        plain = loaded(model, cache, policy=policy)
        expected = conversations(plain)
        assert plain.stats().kv_store is None
        plain.close()
        engine = loaded(model, cache, policy=policy, kv_store=option)
        for _ in range(2):
            assert conversations(engine) == expected
        stats = engine.stats()
        assert sum(stats.kv_store.hit_tokens.values()) >= 7 * 16, "the cache of two sequences does not hold seven"
        assert "disk" in option or stats.kv_store.bytes_read["host"] > 0
        engine.close()
        if "disk" in option:
            engine = loaded(model, cache, policy=policy, kv_store=option)
            first, then = expected
            assert [ask(engine, (*(5 + i,) * 12, *said, 30, i)) for i, said in enumerate(first)] == then
            stats = engine.stats()
            assert (
                stats.kv_store.hit_tokens == {"host": 0, "disk": 7 * 16} == {"host": 0, "disk": stats.prefix_hit_tokens}
            )
            engine.close()


def test_another_training_step_finds_nothing_of_the_one_before(tmp_path):
    """Of the same shape, name and sizes: what the first computed would answer for the second."""
    model = tiny(tmp_path / "m", "llama")
    option = {"host": 1 << 16, "disk": 1 << 20, "path": str(tmp_path / "kv")}
    engine = loaded(model, tmp_path / "cache", kv_store=option)
    ask(engine, (7,) * 24)
    engine.close()
    weights = Path(model.path) / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 0x80  # the sign of a value
    weights.write_bytes(data)
    engine = loaded(prepare(Path(model.path)), tmp_path / "cache", kv_store=option)
    ask(engine, (7,) * 24)
    assert engine.stats().kv_store.hit_tokens == {"host": 0, "disk": 0}
    engine.close()


@pytest.mark.parametrize(
    ("limits", "policy", "kind", "words"),
    [
        ({"host_memory": 1 << 20}, {}, api.InfeasibleError, "make it smaller"),
        ({"disk_bandwidth": 1e9}, {}, api.UnsupportedError, "disk_bandwidth"),
        ({}, {"cache": (0.0, 0.5, 0.5)}, api.UnsupportedError, "one tier"),
    ],
)
@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_what_a_store_cannot_go_with_is_refused(model, cache, tmp_path, limits, policy, kind, words):
    option = {"host": 1 << 20, "disk": 1 << 20, "path": str(tmp_path)}
    with pytest.raises(kind, match=words):
        loaded(model, cache, api.HardwareLimits(**limits), policy, kv_store=option)


@pytest.mark.parametrize("name", ["lock", "k/journal", "k/blocks"])
@pytest.mark.parametrize("put", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_regular_file_is_refused_and_neither_waited_for_nor_read_to_no_end(tmp_path, name, put):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    put(path)
    with pytest.raises(api.HarnessError, match=rf"kv_store: cannot use .*{name}: (is not a regular file|Is a dir)"):
        DiskTier(tmp_path, "k", SIZE, 10 * SIZE)


def test_what_others_asked_is_not_readable(tmp_path):
    tier = DiskTier(tmp_path, "k", SIZE, 10 * SIZE)
    tier.close()
    assert {(tmp_path / "k" / name).stat().st_mode & 0o077 for name in ("journal", "blocks")} == {0}
