"""Cache blocks on disk: what comes back is what was written, in whatever order, and errors reach the caller."""

import itertools
import os
import random
import threading
import time
from contextlib import suppress

import pytest

from engines.offload.disk import direct_file as disk_file
from engines.offload.disk.throttle import Throttle
from engines.offload.kv_cache.block_manager import BlockManager
from engines.offload.kv_cache.disk_blocks import DiskBlocks
from engines.offload.timeline import Timeline
from harness.api import DiskFullError, HarnessError, InfeasibleError
from tests.offload import answers, requests_of, tiny

RECORD = 4096


def blocks(folder, count=20, layers=5, throttle=None):
    return DiskBlocks(folder, layers, count, RECORD, Timeline(), throttle or Throttle(None))


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_what_was_written_comes_back(tmp_path, layers):
    """Random passes: each block and layer keeps a counter that is checked and raised."""
    disk, rng = blocks(tmp_path, layers=layers), random.Random(0)
    expected = {}
    for _ in range(60):
        touched = set(rng.sample(range(20), rng.randint(0, 12)))
        known = {block for block in rng.sample(range(20), rng.randint(0, 20)) if (block, 0) in expected}
        slots = disk.start(known, touched)
        for layer in range(layers):
            records = disk.staged(layer).view(20, RECORD)
            for block in known | touched:
                record = records[slots[block]]
                if block in known:
                    assert (record == expected[block, layer]).all()
                if block in touched:
                    value = rng.randrange(256)
                    record.fill_(value)
                    expected[block, layer] = value
            disk.done(layer)
    assert disk.bytes_read
    assert disk.bytes_written
    disk.close()
    disk.close()


def test_a_pass_that_is_broken_off_does_not_disturb_the_next(tmp_path):
    disk = blocks(tmp_path)
    disk.start([], [3])
    for layer in range(5):
        disk.staged(layer).view(20, RECORD)[0].fill_(layer + 1)
        disk.done(layer)
    disk.start([3], [3])
    disk.staged(0)
    slots = disk.start([3], [])
    for layer in range(5):
        assert (disk.staged(layer).view(20, RECORD)[slots[3]] == layer + 1).all()
        disk.done(layer)
    disk.close()


def test_nothing_is_left_of_it(tmp_path):
    disk = blocks(tmp_path)
    assert not list(tmp_path.iterdir())
    disk.start([0], [])
    disk.staged(0)
    before = threading.active_count()
    disk.close()
    assert threading.active_count() < before


def test_an_error_of_the_disk_is_raised_where_it_is_waited_for(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(5, "Input/output error")

    disk = blocks(tmp_path)
    monkeypatch.setattr(disk_file.os, "preadv", fail)
    disk.start([0], [])
    with pytest.raises(HarnessError, match=r"cache on disk: .*Input/output error"):
        disk.staged(0)
    disk.close()


def test_a_disk_without_room_is_said_before_any_work(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(disk_file.os, "posix_fallocate", full)
    with pytest.raises(DiskFullError, match="no room for 409600 bytes of cache on disk"):
        blocks(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_throttled_disk_takes_its_time(tmp_path):
    disk = blocks(tmp_path, throttle=Throttle(20 * 5 * RECORD / 0.2))
    disk.start(range(20), [])
    began = time.perf_counter()
    for layer in range(5):
        disk.staged(layer)
        disk.done(layer)
    assert time.perf_counter() - began >= 0.19
    disk.close()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.75, 1.0])
def test_blocks_are_allocated_in_the_proportion_that_was_asked_for(share):
    rng, on_disk = random.Random(1), round(200 * share)
    pool, held = BlockManager(200, on_disk), []
    for _ in range(150):
        held += pool.allocate(1)
        assert abs(sum(block >= 200 - on_disk for block in held) - share * len(held)) <= 1
    assert pool.num_used_offloaded == sum(block >= 200 - on_disk for block in held)
    for _ in range(200):
        rng.shuffle(held)
        pool.free([held.pop() for _ in range(rng.randint(0, len(held)))])
        held += pool.allocate(rng.randint(0, pool.num_free_blocks))
        assert len(set(held)) == len(held)


@pytest.mark.parametrize(("share", "policy"), [(0.4, {}), (1.0, {"kv_bits": 4})], ids=str)
@pytest.mark.parametrize("schedule", ["row", "zigzag", "sweep"])
def test_where_the_cache_lies_changes_nothing(model, cache, load, schedule, policy, share):
    policy = policy | {"schedule": schedule, "gpu_batch_size": 2, "prefill_chunk": 7}
    policy["num_gpu_batches"] = 2 if schedule == "zigzag" else 1
    requests = requests_of(3, 5)
    found = []
    for places in ((0.0, 1.0, 0.0), (0.0, 1 - share, share)):
        engine, report = load(model, cache, cache=places, **policy)
        assert report.policy.cache[2] == pytest.approx(places[2], abs=0.05)
        found.append(answers(engine, requests))
        if places[2]:  # blocks that were given back are written anew
            found.append(answers(engine, requests))
    assert found[0] == found[1] == found[2]


def test_a_cache_on_disk_lets_more_sequences_in(tmp_path, load):
    """Of twelve layers two are in memory."""
    model = tiny(tmp_path / "deep", "opt", num_hidden_layers=12)
    fits = {}
    for share in (0.0, 1.0):
        policy = {"schedule": "row", "cache": (0.0, 1 - share, share), "weights": (0.0, 0.0, 1.0)}
        fits[share] = 1
        with suppress(InfeasibleError):
            while True:
                load(model, tmp_path, 90 << 20, gpu_batch_size=2 * fits[share], **policy)[0].close()
                fits[share] *= 2
    assert fits[1.0] >= 2 * fits[0.0]


def test_an_answer_after_an_error_of_the_disk_is_not_given(model, cache, load, monkeypatch):
    engine, _ = load(model, cache, schedule="sweep", gpu_batch_size=2, cache=(0.0, 0.0, 1.0))
    requests = requests_of(3, 3)
    real, calls = os.pwritev, itertools.count()

    def fail(*args):
        if next(calls) >= 5:
            raise OSError(5, "Input/output error")
        return real(*args)

    monkeypatch.setattr(disk_file.os, "pwritev", fail)
    with pytest.raises(HarnessError, match="cache on disk"):
        list(engine.generate(requests))
