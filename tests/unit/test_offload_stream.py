"""The stream of weight tiles from disk: every tile in order, no further than it may, and errors are heard."""

import contextlib
import os
import random
import threading
import time

import pytest

from engines.offload.disk.throttle import Throttle
from engines.offload.memory.layout import Matrix, tiles_of
from engines.offload.memory.storage import Plain
from engines.offload.timeline import Timeline
from engines.offload.weights.ring import HostRing
from engines.offload.weights.stream import WeightStream
from engines.offload.weights.tile_reader import TileReader, page_aligned
from harness.api import HarnessError


@pytest.fixture(params=["neighbours", "scattered"])
def files(tmp_path, request):
    """Ten tiles with known bytes in two files: those of one after the other, or alternating."""
    group = {"neighbours": lambda i: i // 5, "scattered": lambda i: i % 2}[request.param]
    matrices = [Matrix(f"m{i}", 50, 30 + i, f"group{group(i)}") for i in range(10)]
    tiles = tiles_of(matrices, [Plain("float32")] * 10)
    for i, tile in enumerate(tiles):
        with (tmp_path / tile.file).open("r+b" if (tmp_path / tile.file).exists() else "wb") as file:
            file.seek(tile.offset)
            file.write(bytes([i + 1]) * tile.span)
    return tmp_path, tiles


@pytest.fixture
def stream_of(files):
    """Makes streams of the tiles, or of some of them, and closes them (which may be done more than once)."""
    with contextlib.ExitStack() as opened:

        def make(slots=3, ahead=True, tiles=files[1], likely=None):
            ring = HostRing(tiles, slots, TileReader(files[0], tiles, Throttle(None)))
            stream = WeightStream(tiles, ring, Timeline(), ahead, likely)
            opened.callback(stream.close)
            return stream

        yield make


def passed(stream, tile):
    """The tile's first value, for which the stream is waited and which is released."""
    data = stream.next(tile.index)
    first = data[0].item()
    assert data.shape == (tile.nbytes,)
    assert (data == first).all()
    stream.release()
    return first


def test_a_stream_gives_every_block_in_order_pass_after_pass(stream_of, files):
    stream = stream_of()
    for i, tile in enumerate(files[1] * 5):
        assert passed(stream, tile) == i % 10 + 1
    stream.close()


@pytest.mark.parametrize("slots", range(1, 12))
def test_a_stream_of_any_depth_goes_on(stream_of, files, slots):
    stream = stream_of(slots)
    assert stream.measure() > 0
    for i, tile in enumerate(files[1] * 3):
        assert passed(stream, tile) == i % 10 + 1


def test_a_stream_reads_no_further_than_its_slots(stream_of, files):
    stream = stream_of(slots=4)
    stream.measure()
    assert stream.bytes_read == sum(b.span for b in files[1][:4])
    first = stream.next(files[1][0].index)
    stream.next(files[1][1].index)
    time.sleep(0.1)  # for a reader that goes too far to do so
    assert (first == 1).all(), "a tile stays until it is released"
    assert stream.bytes_read == sum(b.span for b in files[1][:4])
    stream.release()
    stream.next(files[1][2].index)


def test_what_is_skipped_is_not_waited_for_and_never_mistaken(stream_of, files):
    """Some of it announced, some not; over many passes, so that slots are used for other tiles again."""
    rng = random.Random(0)
    stream = stream_of()
    for _ in range(30):
        needed = {i for i in range(len(files[1])) if rng.random() < 0.4}
        stream.decide([i for i in range(len(files[1])) if i not in needed and rng.random() < 0.7])
        for i, tile in enumerate(files[1]):
            if i not in needed:
                stream.skip()
                continue
            assert passed(stream, tile) == i + 1


def test_what_is_left_out_is_not_read(stream_of, files):
    stream = stream_of()
    stream.measure()
    count = len(files[1])
    for _ in range(50):
        stream.decide(list(range(1, count)))
        passed(stream, files[1][0])
        for _ in range(1, count):
            stream.skip()
    assert stream.bytes_read < 50 * sum(b.span for b in files[1]) / 2


def test_what_is_unlikely_is_read_only_when_it_is_known_to_be_needed(stream_of, files):
    """But for what fills the ring at load; whatever is skipped, announced or both."""
    rng = random.Random(1)
    tiles = files[1]
    likely = [0, 3, 4, 8]
    stream = stream_of(slots=4, likely=likely)
    stream.measure()
    at_load, needed_bytes = stream.bytes_read, 0
    for _ in range(40):
        needed = {i for i in range(len(tiles)) if i in likely or rng.random() < 0.3}
        for i, tile in enumerate(tiles):
            if i % 3 == 0:  # known late, and of some not at all
                part = range(i, min(i + 3, len(tiles)))
                unneeded = [j for j in part if j not in needed and rng.random() < 0.8]
                stream.decide(unneeded, [j for j in part if j in needed and rng.random() < 0.8])
            if i in needed:
                assert passed(stream, tile) == i + 1
                needed_bytes += tile.span
            else:
                stream.skip()
    ahead = sum(tiles[i].span for i in likely)
    assert needed_bytes - at_load <= stream.bytes_read - at_load <= needed_bytes + ahead


def test_what_is_unlikely_is_read_when_it_is_asked_for(stream_of, files):
    stream = stream_of(likely=[])
    for i, tile in enumerate(files[1] * 2):
        assert passed(stream, tile) == i % 10 + 1


def test_a_cut_file_reaches_the_caller_with_file_and_offset(stream_of, files):
    folder, tiles = files
    last = max((b for b in tiles if b.file == "group0.bin"), key=lambda b: b.offset)
    os.truncate(folder / last.file, last.offset + 100)
    stream = stream_of()
    with pytest.raises(HarnessError, match=rf"group0.bin ends at byte {last.offset + 100}, {last.matrix} reaches"):
        for tile in tiles:
            passed(stream, tile)


def test_a_pass_that_was_broken_off_does_not_shift_the_next(stream_of, files):
    stream = stream_of()
    for tile in files[1][:7]:
        passed(stream, tile)
    stream.next(files[1][7].index)
    with pytest.raises(HarnessError, match="the stream has"):
        stream.next(files[1][0].index)
    stream.align()
    assert (stream.next(files[1][0].index) == 1).all()


def test_a_reader_that_fails_in_any_way_is_heard(stream_of, files, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("engines.offload.weights.tile_reader.os.preadv", broken)
    stream = stream_of()
    with pytest.raises(HarnessError, match=r"reading group[01].bin at byte \d+ \(m\d\): Input/output error"):
        stream.next(files[1][0].index)


def test_closing_wakes_whoever_waits(stream_of, files, monkeypatch):
    gate = threading.Event()
    real = HostRing.fetch
    monkeypatch.setattr(HostRing, "fetch", lambda self, *a: (gate.wait(5), real(self, *a)))
    stream = stream_of()
    threading.Timer(0.1, lambda: (gate.set(), stream.close())).start()
    with pytest.raises(HarnessError, match="closed"):
        for tile in files[1] * 100:
            passed(stream, tile)


@pytest.mark.parametrize("slots", range(1, 12))
def test_a_stream_that_does_not_run_ahead_reads_what_is_asked_for_and_no_more(stream_of, files, slots):
    stream, tiles = stream_of(slots, ahead=False), files[1]
    stream.measure()
    for i, tile in enumerate(tiles * 2):
        stream.next(tile.index)
        with stream._lock:
            assert stream.bytes_read == sum(b.span for b in (tiles * 2)[: stream._next])
            assert stream._next <= max(i + 1, stream.slots)
        stream.release()


@pytest.mark.parametrize("slots", range(2, 12))
def test_all_slots_may_be_held_but_one(stream_of, files, slots):
    """A read of several neighbours waits for slots, but not where somebody waits for its first tile."""
    stream, tiles = stream_of(slots), files[1]
    for rounds in range(3):
        for first in range(0, len(tiles), slots):
            held = tiles[first : first + slots]
            for tile in held:
                assert stream.next(tile.index)[0] == tiles.index(tile) + 1, rounds
            for _ in held:
                stream.release()


def test_a_tile_is_loaded_by_the_reader_that_streams(files):
    """Into new memory or into the caller's, not at the throttle's rate; and a reader closes its files once."""
    folder, tiles = files
    reader = TileReader(folder, tiles, Throttle(1))
    buffer = page_aligned(max(tile.span for tile in tiles))
    for i, tile in enumerate(tiles):
        assert (reader.load(tile) == i + 1).all()
        assert (reader.load(tile, buffer) == i + 1).all()
        assert reader.load(tile, buffer).shape == (tile.nbytes,)
    reader.close()
    reader.close()


def test_tiles_are_named_by_their_index_in_the_model_not_in_the_stream(stream_of, files):
    """Some of the model's tiles are resident; the stream has the others, by the same numbers."""
    streamed = [tile for tile in files[1] if tile.index % 3]
    stream = stream_of(tiles=streamed)
    stream.decide([streamed[1].index])
    for tile in streamed:
        if tile is streamed[1]:
            stream.skip()
            continue
        assert passed(stream, tile) == tile.index + 1
