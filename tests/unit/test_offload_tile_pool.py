"""Products with weights in panels, on a pool of threads: right for any shape, alike on any number of threads, and none
waits for a thread that has lost its CPU."""

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.offload.kernels import build, panels, quantize
from engines.offload.kernels.quantizer import exact12_pack, stored_view
from engines.offload.kernels.tile_pool import CODED, PanelTiles, TilePool
from engines.offload.memory.storage import BITS, CHUNK, GROUPS, PANEL, Grouped, Panels
from tests.offload import KERNELS

PLAIN, EXACT12 = Panels(), Panels(exact12=True)
QUANTIZED = [Panels(Grouped(bits, group)) for bits in BITS for group in GROUPS]
WHOLE = [stored for stored in QUANTIZED if stored.name in CODED]


@pytest.fixture(scope="module")
def pools(cache):
    """Pools by their number of threads: more than there are CPUs, too."""
    found = {threads: TilePool(cache, threads) for threads in (1, 2, 5)}
    yield found
    for pool in found.values():
        pool.close()


def pack(stored, weight):
    """Panels of a weight [rows, columns], and the values that they stand for."""
    if stored.exact12:
        return exact12_pack(KERNELS.parent)(weight.bfloat16()), weight.bfloat16()
    if stored.grouped is None:
        return panels.pack(weight.bfloat16()), weight.bfloat16()
    rows = quantize.pack(weight, stored.grouped)
    return panels.pack_groups(rows, weight.shape[1], stored), quantize.unpack(rows, weight.shape[1], stored.grouped)


def weights(stored, rows, columns):
    """Random ones that can be `stored` so: in twelve bits, exponents must be near each other."""
    drawn = torch.randn(rows, columns)
    return torch.where(drawn.abs() < 2.0**-9, 2.0**-9, drawn) if stored.exact12 else drawn


def one(stored, packed, weight, int8=False):
    """A single tile, ready to be added."""
    return PanelTiles([stored], [packed], [len(weight)], weight.shape[1], int8)


def multiply(pool, x, tiles, biases=None, stored=PLAIN, int8=False, together=1):
    """x times the transpose of the tiles, whose rows follow each other, added so many together."""
    out = torch.full((len(x), sum(len(tile) for tile in tiles) + 3), float("nan"), dtype=x.dtype)  # rows apart
    packed = [pack(stored, tile)[0] for tile in tiles]
    product, start = pool.product(x), 0
    for i in range(0, len(tiles), together):
        run = tiles[i : i + together]
        ready = PanelTiles([stored] * len(run), packed[i : i + together], [*map(len, run)], x.shape[1], int8)
        bias = None if biases is None else torch.cat(biases[i : i + together])
        product.add(ready, bias, out[:, start : start + ready.rows])
        start += ready.rows
    product.wait()
    assert all(product.is_done(i) for i in range(len(tiles)))
    product.close()
    pool.settle()
    assert out[:, start:].isnan().all(), "it wrote past its columns"
    return out[:, :start]


def values(pool, *size):
    return torch.randn(*size).to(getattr(torch, pool.dtype))


def test_a_late_thread_may_read_another_tile_and_writes_nowhere_else(pools):
    """Its slot has other bytes by then; what it makes of them is thrown away."""
    rows, columns = 64, 2 * CHUNK // PANEL
    x = torch.zeros(300, columns, dtype=pools[5].torch_dtype)
    for _ in range(4):
        other = torch.randint(256, (EXACT12.matrix_bytes(rows, columns),), dtype=torch.uint8)
        out = torch.full((len(x) + 2, rows), 7, dtype=x.dtype)
        product = pools[5].product(x)
        product.add(PanelTiles([EXACT12], [other], [rows], columns, False), None, out[1:-1])
        product.close()
        pools[5].settle()
        assert (out[[0, -1]] == 7).all()


@given(
    st.sampled_from([1, 2, 5]),
    st.integers(0, 40) | st.sampled_from([256, 257, 300]),
    st.lists(st.integers(1, 100), min_size=1, max_size=4),
    st.integers(1, 70) | st.sampled_from([2047, 2048, 2050, 4100]),
    st.booleans(),
    st.sampled_from([PLAIN, EXACT12, *QUANTIZED]),
    st.integers(1, 3),
    st.integers(0, 2**31),
)
def test_a_product_is_the_exact_one_rounded(pools, threads, rows, heights, columns, biased, stored, together, seed):
    torch.manual_seed(seed)
    pool = pools[threads]
    x, tiles = values(pool, rows, columns), [weights(stored, height, columns) for height in heights]
    biases = [values(pool, height) for height in heights] if biased else None
    found = multiply(pool, x, tiles, biases, stored, together=together).double()
    weight = torch.cat([pack(stored, tile)[1] for tile in tiles]).double()
    bias = torch.cat(biases).double() if biased else 0.0
    exact, sizes = x.double() @ weight.T + bias, x.double().abs() @ weight.abs().T
    if stored.grouped is not None:  # codes and minima are multiplied apart: each part is larger than their sum
        sizes = sizes + (2 << stored.grouped.bits) * x.double().abs().sum(1, keepdim=True) * weight.abs().max()
    # the rounding of the result, and of `columns` additions in float32
    step = 2.0**-8 if pool.dtype == "bfloat16" else 2.0**-24
    assert ((found - exact).abs() <= step * exact.abs() + columns * 2.0**-24 * sizes + 1e-30).all()


def in_eight_bits(x, group):
    """x as products in whole numbers take it, in float64."""
    groups = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % group)).unflatten(1, (-1, group))
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest < 2.0**-100, 0, torch.full_like(largest, 127) / largest)  # one division, as there
    codes = (groups * inverse).round().double()
    return (codes * (largest / 127).double()).flatten(1)[:, : x.shape[1]]


@given(
    st.sampled_from([1, 2, 5]),
    st.integers(0, 40) | st.sampled_from([256, 257, 300]),
    st.lists(st.integers(1, 100), min_size=1, max_size=3),
    st.integers(1, 300) | st.sampled_from([2047, 2048, 2050]),
    st.booleans(),
    st.sampled_from(WHOLE),
    st.integers(0, 2**31),
)
def test_a_product_in_int8_is_that_of_the_rounded_activations(
    pools, threads, rows, heights, columns, biased, stored, seed
):
    torch.manual_seed(seed)
    pool = pools[threads]
    x, tiles = values(pool, rows, columns), [torch.randn(height, columns) for height in heights]
    x[:1] = 0  # a row without any
    x[1:2] *= 1e-37
    biases = [values(pool, height) for height in heights] if biased else None
    found = multiply(pool, x, tiles, biases, stored, int8=True).double()
    weight = torch.cat([pack(stored, tile)[1] for tile in tiles]).double()
    rounded, bias = in_eight_bits(x, stored.grouped.group), torch.cat(biases).double() if biased else 0.0
    exact = rounded @ weight.T + bias
    # codes and minima are multiplied apart: each part is larger than their sum
    sizes = 4 * rounded.abs().sum(1, keepdim=True) * weight.abs().max() + abs(bias)
    step = 2.0**-8 if pool.dtype == "bfloat16" else 2.0**-24
    additions = 4 * stored.grouped.groups(columns)
    assert ((found - exact).abs() <= step * exact.abs() + additions * 2.0**-24 * sizes + 1e-30).all()
    assert ((rounded - x.double()).abs() <= x.double().abs().amax(1, keepdim=True) / 254 * 1.001 + 2.0**-100).all()


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_stay_in_their_row_in_int8(pools, special):
    x, weight = values(pools[2], 20, 134), torch.randn(40, 134)
    x[3, 65] = special
    found = multiply(pools[2], x, [weight], stored=WHOLE[0], int8=True)
    assert found.isnan().all(1).nonzero().flatten().tolist() == [3]
    assert found.isnan().sum() == 40


@given(
    st.integers(1, 300),
    st.integers(1, 60),
    st.integers(1, 300),
    st.sampled_from([*((stored, False) for stored in (PLAIN, EXACT12, *QUANTIZED)), *((how, True) for how in WHOLE)]),
    st.data(),
)
def test_a_row_depends_neither_on_other_rows_nor_on_threads(pools, rows, outputs, columns, kind, data):
    stored, int8 = kind
    x, weight = values(pools[1], rows, columns), torch.randn(outputs, columns)
    some = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=9))
    whole = multiply(pools[2], x, [weight], stored=stored, int8=int8)
    assert torch.equal(multiply(pools[1], x[some], [weight], stored=stored, int8=int8), whole[some])
    assert torch.equal(multiply(pools[5], x, [weight], stored=stored, int8=int8), whole)


@given(st.integers(1, 50), st.integers(1, 50))
def test_panels_give_back_their_rows(rows, columns):
    weight = torch.randn(rows, columns).bfloat16()
    packed = panels.pack(weight)
    assert packed.nbytes == PLAIN.matrix_bytes(rows, columns)
    assert torch.equal(stored_view(packed.view(torch.uint8).flatten(), PLAIN, rows, columns), packed)
    assert torch.equal(panels.unpack(packed, rows, columns), weight)


#: bfloat16's bit patterns, many of them near 1 and few far from it.
_PATTERNS = st.integers(0x3C00, 0x3FFF) | st.sampled_from([0, 0x8000, 1, 0x807F, 0xBF80])


@given(
    st.integers(1, 40),
    st.integers(1, 200),
    st.lists(_PATTERNS, min_size=1, max_size=60),
    st.lists(st.tuples(st.integers(0, 7999), st.integers(0, 0xFFFF)), max_size=4),
)
def test_twelve_bits_give_back_every_bit_or_refuse(pools, rows, columns, patterns, others):
    bits = torch.tensor([patterns[i % len(patterns)] for i in range(rows * columns)], dtype=torch.int32)
    for at, pattern in others:
        bits[at % len(bits)] = pattern
    weight = bits.to(torch.uint16).view(torch.bfloat16).view(rows, columns)
    packed = exact12_pack(KERNELS.parent)(weight)
    exponents = bits >> 7 & 255
    outside = ((exponents > 0) & ((exponents < 113) | (exponents > 127))).sum()  # of the patterns' range at most
    assert packed is not None or outside > 3
    if packed is None:
        return
    assert packed.nbytes == EXACT12.matrix_bytes(rows, columns)
    assert torch.equal(stored_view(packed.flatten(), EXACT12, rows, columns), packed)
    found = panels.unpack12(packed, rows, columns)
    assert torch.equal(found.contiguous().view(torch.int16), weight.view(torch.int16))


def test_equal_weights_are_equal_bytes_whatever_the_memory_held_before():
    weight = weights(EXACT12, 48, 512)
    first = pack(EXACT12, weight)[0]
    torch.full((first.nbytes,), 255, dtype=torch.uint8)  # freed at once: what is packed next often takes its place
    assert torch.equal(pack(EXACT12, weight)[0], first)


def test_every_bit_pattern_is_packed_among_ones(pools):
    """NaNs, infinities and denormals too; but not all of them together."""
    pack12 = exact12_pack(KERNELS.parent)
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    for some in every.split(4096):
        weight = torch.ones(PANEL, len(some) * CHUNK, dtype=torch.bfloat16)
        weight[5, 7::CHUNK] = some
        found = panels.unpack12(pack12(weight), *weight.shape)
        assert torch.equal(found.contiguous().view(torch.int16), weight.view(torch.int16))
    assert pack12(every.view(256, 256)) is None


@given(st.integers(1, 40), st.integers(1, 60), st.integers(1, 300), st.integers(0, 2**31))
def test_products_in_twelve_bits_are_those_in_sixteen_bit_for_bit(pools, rows, outputs, columns, seed):
    torch.manual_seed(seed)
    x, weight = values(pools[2], rows, columns), weights(EXACT12, outputs, columns)
    weight[0, 0] = 1e-30  # an exception
    assert torch.equal(multiply(pools[2], x, [weight], stored=EXACT12), multiply(pools[2], x, [weight]))


@pytest.mark.parametrize("stored", QUANTIZED, ids=str)
@given(rows=st.integers(1, 50), columns=st.integers(1, 300))
def test_quantized_panels_stand_for_the_values_of_the_rows_they_are_made_of(stored, rows, columns):
    packed, expected = pack(stored, torch.randn(rows, columns))
    assert packed.nbytes == stored.matrix_bytes(rows, columns)
    assert torch.equal(stored_view(packed.flatten(), stored, rows, columns), packed)
    assert torch.equal(panels.unpack_groups(packed, rows, columns, stored), expected)


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_stay_in_their_row_and_column(pools, special):
    pool = pools[2]
    x, weight = values(pool, 20, 34), torch.randn(40, 34)
    x[3, 5] = special
    found = multiply(pool, x, [weight])
    assert (~found.isfinite()).any(1).nonzero().flatten().tolist() == [3]
    weight[PANEL + 1, 33] = special
    found = multiply(pool, x[4:], [weight])
    assert (~found.isfinite()).any(0).nonzero().flatten().tolist() == [PANEL + 1]


def test_an_operand_may_change_once_a_tile_was_added(pools):
    pool = pools[2]
    x, weight = values(pool, 30, 64), torch.randn(48, 64)
    expected, out, packed = multiply(pool, x, [weight]), torch.empty(30, 48, dtype=x.dtype), pack(PLAIN, weight)[0]
    product = pool.product(x)
    product.add(one(PLAIN, packed, weight), None, out)
    x.zero_()
    product.wait()
    assert product.is_done(0)
    product.close()
    product.close()  # idempotent
    pool.settle()
    assert torch.equal(out, expected)


def test_rows_may_be_any_stride_apart(pools):
    pool = pools[2]
    x, weight = values(pool, 9, 100), torch.randn(20, 30).bfloat16()
    for view in (x[:, 7:37], x[::2, :30], values(pool, 30, 9).T):
        assert torch.equal(multiply(pool, view, [weight]), multiply(pool, view.contiguous(), [weight]))


def test_many_small_products_on_more_threads_than_cpus(pools):
    pool = pools[5]
    weights = [torch.randn(height, 48).bfloat16() for height in (1, 16, 50, 130)]
    x = values(pool, 7, 48)
    expected = multiply(pools[1], x, weights)
    for _ in range(300):
        assert torch.equal(multiply(pool, x, weights), expected)


@pytest.mark.parametrize("int8", [False, True])
def test_what_late_threads_read_is_kept_until_they_have_left(pools, int8):
    """Operands so large that all threads copy them."""
    pool, stored = pools[5], WHOLE[0]
    x, weight = values(pool, 300, 2048), torch.randn(32, 2048)
    expected = multiply(pools[1], x, [weight], stored=stored, int8=int8)
    packed, out = pack(stored, weight)[0], torch.empty(300, 32, dtype=x.dtype)
    for _ in range(40):
        mine = x.clone()
        product = pool.product(mine)
        product.add(one(stored, packed, weight, int8), None, out)
        mine.zero_()
        del mine
        product.close()
        assert torch.equal(out, expected)
    pool.settle()
    multiply(pool, x[:1], [weight], stored=stored, int8=int8)
    assert not pool._late


def counts_of(name, program, folder, cache):
    """The three counts that a function of a C++ program on the pool gives."""
    source = folder / f"{name}.cpp"
    source.write_text(f'#include "{build.CSRC / "tile_pool.h"}"\n{program}')
    counts = (ctypes.c_int * 3)()
    build.function(source, name, [ctypes.POINTER(ctypes.c_int)], cache)(counts)
    return counts


def test_nobody_waits_for_a_thread_that_sleeps_in_a_part(tmp_path, cache):
    """As one does that another process has pushed off its CPU. What it computes when it wakes up is dropped."""
    was_asleep, most_writes, least_writes = counts_of("sleeper", _SLEEPER, tmp_path, cache)
    assert (was_asleep, most_writes, least_writes) == (1, 1, 1)


_SLEEPER = """
#include <algorithm>

static std::atomic<bool> asleep{false}, woken{false};
static std::atomic<int> writes[8];

struct Sleeper : Task {
  std::thread::id caller = std::this_thread::get_id();
  Sleeper() : Task(8) {}

 protected:
  void compute(int, Aligned&) const override {
    if (std::this_thread::get_id() != caller) {
      if (asleep.exchange(true)) return;
      while (!woken) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    } else {
      while (!asleep) std::this_thread::yield();  // the other thread has begun a part
    }
  }
  void write(int part, Aligned&) const override { ++writes[part]; }
};

extern "C" void sleeper(int* counts) {
  {
    TilePool pool(2);
    auto task = std::make_shared<Sleeper>();
    pool.add(task);
    pool.wait(task);
    counts[0] = asleep && !woken;
    woken = true;
  }
  counts[1] = *std::max_element(writes, writes + 8), counts[2] = *std::min_element(writes, writes + 8);
}
"""


def test_a_thread_without_memory_leaves_its_part_to_others_and_a_caller_without_it_is_told(tmp_path, cache):
    """Under a limit of the address space or of a cgroup: the process does not end by an exception in a thread."""
    refused, tried, written = counts_of("hungry", _HUNGRY, tmp_path, cache)
    assert (refused, written) == (1, 8)
    assert tried >= 1


_HUNGRY = """
static std::atomic<int> tried{0}, writes{0};

struct Hungry : Task {
  std::thread::id caller = std::this_thread::get_id();
  size_t needed;
  explicit Hungry(size_t bytes) : Task(8), needed(bytes) {}
  size_t scratch_bytes() const override { return needed; }

 protected:
  void compute(int, Aligned& scratch) const override {
    if (std::this_thread::get_id() != caller) {
      ++tried;
      scratch.at_least(size_t{1} << 62);
    }
    while (!tried) std::this_thread::yield();  // until another thread has found no memory
  }
  void write(int, Aligned&) const override { ++writes; }
};

extern "C" void hungry(int* counts) {
  TilePool pool(2);
  try {
    pool.add(std::make_shared<Hungry>(size_t{1} << 62));
  } catch (const std::bad_alloc&) {
    counts[0] = 1;
  }
  auto task = std::make_shared<Hungry>(64);
  pool.add(task);
  pool.wait(task);
  counts[1] = tried, counts[2] = writes;
}
"""
