"""Cache blocks on disk: what comes back is what was written, in whatever order, and errors reach the caller."""

import itertools
import os
import random
import shutil
import threading
import time
from contextlib import suppress

import pytest

from engines.offload.backend import host
from engines.offload.disk import direct_file as disk_file
from engines.offload.disk.throttle import Throttle
from engines.offload.kv_cache.block_manager import BlockManager
from engines.offload.kv_cache.disk_blocks import DiskBlocks
from engines.offload.kv_cache.record_file import RecordFile
from engines.offload.memory.pass_time import PassRates
from engines.offload.timeline import Timeline
from harness.api import DiskFullError, HarnessError, InfeasibleError
from tests.offload import answers, requests_of, tiny

RECORD = 4096


@pytest.fixture
def file(tmp_path):
    """Makes a file of blocks on disk, which is closed in the end."""
    made = []

    def make(count=20, layers=5, throttle=None):
        made.append(RecordFile(tmp_path, layers, count, RECORD, Timeline(), throttle or Throttle(None)))
        return made[-1]

    yield make
    for one in made:
        one.close()
        one.close()


@pytest.fixture
def blocks(file):
    """Makes blocks on disk, whose stages hold all of them."""
    return lambda count=20, layers=5, throttle=None, ahead=True: DiskBlocks(
        file(count, layers, throttle), layers, count, RECORD, count, ahead
    )


def run_random_passes(store, rng, layers, record_of, passes=60):
    """Each block and layer keeps a number that is checked where a batch reads it, and changed where one writes it; the
    second of two batches may read what the first one writes."""
    expected = {}
    for _ in range(passes):
        batches = []
        for _ in range(rng.randint(1, 3)):
            written = set(rng.sample(range(20), rng.randint(0, 8)))
            seen = {b for b, _ in expected} | set().union(*(w for _, w in batches))
            batches.append(({b for b in rng.sample(range(20), rng.randint(0, 20 - 8)) if b in seen}, written))
        slots = store.start(batches)
        for layer in range(layers):
            for number, (known, written) in enumerate(batches):
                staged = store.staged(layer, number)
                for block in known | written:
                    record = record_of(staged, slots[number][block])
                    if block in known:
                        assert (record == expected[block, layer]).all()
                    if block in written:
                        value = rng.randrange(256)
                        record.fill_(value)
                        expected[block, layer] = value
                store.done(layer, number)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_what_was_written_comes_back(blocks, layers, ahead):
    disk = blocks(layers=layers, ahead=ahead)
    run_random_passes(disk, random.Random(0), layers, lambda staged, slot: staged.view(-1, RECORD)[slot])
    assert disk.bytes_read
    assert disk.bytes_written


def test_a_pass_that_is_broken_off_does_not_disturb_the_next(blocks):
    disk = blocks()
    disk.start([([], [3])])
    for layer in range(5):
        disk.staged(layer, 0).view(20, RECORD)[0].fill_(layer + 1)
        disk.done(layer, 0)
    disk.start([([3], [3])])
    disk.staged(0, 0)
    [slots] = disk.start([([3], [])])
    for layer in range(5):
        assert (disk.staged(layer, 0).view(20, RECORD)[slots[3]] == layer + 1).all()
        disk.done(layer, 0)


def test_nothing_is_left_of_it(file, tmp_path):
    disk = DiskBlocks(there := file(), 5, 20, RECORD, 20)
    assert not list(tmp_path.iterdir())
    disk.start([([0], [])])
    disk.staged(0, 0)
    before = threading.active_count()
    there.close()
    assert threading.active_count() < before


def test_an_error_of_the_disk_is_raised_where_it_is_waited_for(blocks, monkeypatch):
    def fail(*args):
        raise OSError(5, "Input/output error")

    disk = blocks()
    monkeypatch.setattr(disk_file.os, "preadv", fail)
    disk.start([([0], [])])
    with pytest.raises(HarnessError, match=r"cache on disk: .*Input/output error"):
        disk.staged(0, 0)


def test_a_disk_without_room_is_said_before_any_work(file, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(disk_file.os, "posix_fallocate", full)
    with pytest.raises(DiskFullError, match="no room for 409600 bytes of cache on disk"):
        file()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_not_called_full(file, tmp_path, monkeypatch):
    (tmp_path / "cache.probe").write_text("of a process that was killed")
    file()

    def refused(*args):
        raise OSError(13, os.strerror(13))

    monkeypatch.setattr(disk_file.os, "posix_fallocate", refused)
    with pytest.raises(HarnessError, match="cannot keep cache on disk: Permission denied") as told:
        file()
    assert not isinstance(told.value, DiskFullError)


def test_a_throttled_disk_takes_its_time(blocks):
    disk = blocks(throttle=Throttle(20 * 5 * RECORD / 0.2))
    disk.start([(range(20), [])])
    began = time.perf_counter()
    for layer in range(5):
        disk.staged(layer, 0)
        disk.done(layer, 0)
    assert time.perf_counter() - began >= 0.19


def test_only_a_batch_s_blocks_need_room_in_a_stage(file):
    """Twenty blocks, of which no batch has more than five."""
    disk, rng = DiskBlocks(file(), 5, 20, RECORD, slots=5), random.Random(1)
    for _ in range(3):
        order = rng.sample(range(20), 20)
        batches = [([], order[i : i + 5]) for i in range(0, 20, 5)]
        slots = disk.start(batches)
        for layer in range(5):
            for number, (_, written) in enumerate(batches):
                records = disk.staged(layer, number).view(5, RECORD)
                for block in written:
                    records[slots[number][block]].fill_(block + layer)
                disk.done(layer, number)
        reads = [(sorted(blocks, reverse=True), []) for _, blocks in batches]
        slots = disk.start(reads)
        for layer in range(5):
            for number, (known, _) in enumerate(reads):
                records = disk.staged(layer, number).view(5, RECORD)
                assert all((records[slots[number][block]] == block + layer).all() for block in known)
                disk.done(layer, number)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.75, 1.0])
def test_blocks_are_allocated_in_the_proportion_that_was_asked_for(share):
    rng, on_disk = random.Random(1), round(200 * share)
    pool, held = BlockManager(200, on_disk), []
    for _ in range(150):
        held += pool.allocate(1)
        assert abs(sum(block >= 200 - on_disk for block in held) - share * len(held)) <= 1
    assert sum(pool.num_used[1:]) == sum(block >= 200 - on_disk for block in held)
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


def test_what_fits_nowhere_is_refused_before_rates_are_measured_which_takes_more(model, cache, load, monkeypatch):
    monkeypatch.setattr(host, "pass_rates", lambda *_: pytest.fail("measures rates within 40 MiB"))
    with pytest.raises(InfeasibleError, match="the budget is 40 MiB"):
        load(model, cache, 40 << 20, schedule="row", gpu_batch_size=2)


def test_plans_leave_the_disk_room_for_weights_that_are_still_to_be_converted(tmp_path, load, monkeypatch):
    """The first load, which converts them, and the second find the same place for the cache, or both none."""
    model = tiny(tmp_path / "deep", "opt", num_hidden_layers=12)
    policy = {"schedule": "row", "gpu_batch_size": 64, "weights": (0.0, 0.0, 1.0)}
    monkeypatch.setattr(host, "pass_rates", lambda *_: PassRates(1e9, 4 << 20, lambda rows: 1e-9 * rows, 1e10))
    with pytest.raises(InfeasibleError) as refused:
        load(model, tmp_path / "first", 64 << 20, cache=(0.0, 1.0, 0.0), **policy)
    budget = (64 << 20) + int(refused.value.lacking["host"]) - (8 << 20)
    disk = {"bytes": 1 << 40, "cache": tmp_path / "first"}

    def usage(_):
        written = sum(file.stat().st_size for file in (disk["cache"] / "offload").rglob("*") if file.is_file())
        return shutil._ntuple_diskusage(disk["bytes"], written, disk["bytes"] - written)

    def blocks_on_disk():
        try:
            return load(model, disk["cache"], budget, **policy)[0].loaded.plan.disk_kv_blocks
        except InfeasibleError:
            return None

    monkeypatch.setattr(shutil, "disk_usage", usage)
    needed, written = blocks_on_disk(), usage(None).used
    assert needed > 0
    block = 12 * RECORD
    for spare in (-block // 2, block // 2):
        disk["bytes"] = written + needed * block + spare
        disk["cache"] = tmp_path / f"fresh{spare}"
        first = blocks_on_disk()
        disk["cache"] = tmp_path / "first"
        assert first == blocks_on_disk() == (needed if spare > 0 else None)
