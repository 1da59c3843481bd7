"""Foresees the scratch memory of the compiled attention kernel, as csrc/attention.cpp counts and takes it."""

from engines.offload.memory.kv_blocks import BLOCK_SIZE
from engines.offload.memory.layout import aligned
from engines.offload.memory.storage import Grouped, Plain, Storage
from harness.api import Dtype, ModelShape

_FLOAT, _HALF = 4, 2
#: simd.h: kLanes; gemm_panels.h: kWidth; decode_attention.h: kUnit.
_LANES, _WIDTH, _UNIT = 8, 16, 16
#: attention.cpp: kManyHeads; decode_token.h: kTokenRows, kScores.
_MANY_HEADS, _TOKEN_ROWS, _SCORES = 16, 48, 1 << 17
#: panel_attention.h: kScoreRows.
_SCORE_ROWS = 48
#: prompt_attention.h: kKeys, kQueries, kScoresLd, kWholeSteps; attention_items.h: kMostRows.
_KEYS, _QUERIES, _SCORES_LD, _WHOLE_STEPS, _MOST_ROWS = 256, 32, 272, 32, 1 << 13


def may_be_in_bfloat16(stored: Storage, dtype: Dtype) -> bool:
    """Whether prompts with queries in `dtype` attend in bfloat16 to what is `stored` so, where the CPU has units for
    it: as a machine is taken to have whose products are fastest in bfloat16."""
    return dtype == "bfloat16" and stored not in (Plain("float32"), Plain("float16"))


def attention_memory(
    shape: ModelShape, stored: Storage, longest: int, threads: int, in_bfloat16: bool, sparse: bool
) -> tuple[int, int]:
    """Bytes that attention to keys and values `stored` so takes at most beside its operands, for sequences of up to
    `longest` tokens: fixed, and per prompt row.

    `in_bfloat16`: by the CPU's units for it, whose memory does not grow with the sequences. `sparse`: not all values
    are taken. Every thread takes what the larger of its tasks needs, decoding or prompts.
    """
    group = shape.num_heads // shape.num_kv_heads
    positions = _up(longest, _WIDTH)
    needs = []
    if sparse or group < _MANY_HEADS:
        needs.append(_decoding(shape, group, stored, positions, sparse))
    if not sparse:
        needs.append(_in_bfloat16(shape.head_dim, group) if in_bfloat16 else _in_panels(shape.head_dim, positions))
    return threads * aligned(max(needs)), 0


def _decoding(shape: ModelShape, group: int, stored: Storage, positions: int, sparse: bool) -> int:
    """Scores of some heads' rows, and per row its query, sums and weights of a block; for sparse values a choice."""
    units = -(-shape.head_dim // _UNIT)
    groups = stored.groups(shape.head_dim) if isinstance(stored, Grouped) else 1
    of_row = 2 * units * _UNIT + groups * (_LANES + BLOCK_SIZE) + _up(units, _LANES)
    rows = min(_TOKEN_ROWS, shape.num_heads)
    scores = max(group * positions, min(_SCORES, rows * positions))
    choice = [positions * _FLOAT] * 3 if sparse else []
    return _lines(scores * _FLOAT, max(group, rows) * of_row * _FLOAT, *choice)


def _in_panels(dim: int, positions: int) -> int:
    """Keys and values in float32, and scores."""
    return _lines(*(positions * columns * _FLOAT for columns in (dim, _up(dim, _WIDTH), _SCORE_ROWS)))


def _in_bfloat16(dim: int, group: int) -> int:
    """A block of keys and values, some rows' queries, scores and products, and each row's maximum and sum."""
    columns = _up(dim, _WHOLE_STEPS)
    halves = [rows * columns * _HALF for rows in (_KEYS, _KEYS, _QUERIES, _WIDTH)]
    of_row = max(_MOST_ROWS, group) * _FLOAT
    return _lines(*halves, _QUERIES * _SCORES_LD * _FLOAT, _QUERIES * columns * _FLOAT, of_row, of_row)


def _lines(*arrays: int) -> int:
    """Bytes of arrays that begin at lines of the caches."""
    return sum(_up(nbytes, 64) for nbytes in arrays)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
