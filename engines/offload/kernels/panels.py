"""Weights in panels (storage.Panels), to and from rows: the reference of what csrc/panel_weights.h reads."""

import torch

from engines.offload.kernels import quantize
from engines.offload.memory.storage import CHUNK, PANEL, Panels

#: Columns of a pair, whose codes are in the halves of a word, and bits of a half.
_PAIR, _HALF = 2, 16


def pack(weight: torch.Tensor) -> torch.Tensor:
    """bfloat16 rows [rows, columns] to panels [panels, pairs, PANEL, 2]."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, columns % _PAIR, 0, -rows % PANEL))
    return padded.view(-1, PANEL, padded.shape[1] // _PAIR, _PAIR).transpose(1, 2).contiguous()


def unpack(panels: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """What `pack` was given, as [rows, columns]."""
    return panels.transpose(1, 2).reshape(len(panels) * PANEL, -1)[:rows, :columns]


def unpack12(chunks: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """bfloat16 [rows, columns] of chunks in twelve bits, uint8 [panels, chunks, CHUNK_BYTES]: the reference of
    csrc/exact12.h."""
    header, exponents, rest = torch.split(chunks, [16, PANEL * CHUNK // 2, PANEL * CHUNK], -1)
    both = exponents.view(*exponents.shape[:2], -1, 1, _PAIR * PANEL).int()  # a byte has codes of two pairs of columns
    codes = torch.cat([both & 15, both >> 4], -2).flatten(-3)
    base = header[..., :2].contiguous().view(torch.int16).int()
    bits = (rest.int() & 0x7F) | torch.where(codes > 0, codes + base, 0) << 7 | (rest.int() & 0x80) << 8
    listed = header[..., 4:].contiguous().view(torch.uint16).int().view(*header.shape[:2], -1, 2)
    for k, (place, value) in enumerate(torch.split(pair, 1, -1) for pair in listed.unbind(2)):
        at = place.long() % bits.shape[-1]  # an entry that is not used may say anything
        bits.scatter_(-1, at, torch.where(header[..., 2:3] > k, value, bits.gather(-1, at)))
    values = bits.to(torch.uint16).view(torch.bfloat16).view(len(chunks), -1, PANEL, _PAIR)
    return unpack(values, rows, columns)


def pack_groups(packed: torch.Tensor, columns: int, stored: Panels) -> torch.Tensor:
    """Packed rows of quantize.py, uint8 [rows, row_bytes], to panels uint8 [panels, groups, group_bytes]."""
    assert stored.grouped is not None
    bits, group = stored.grouped.bits, stored.grouped.group
    codes, scale, minimum = quantize.parts(packed, columns, stored.grouped)
    missing = -len(packed) % PANEL
    padded = torch.nn.functional.pad(codes, (0, -columns % group, 0, missing))
    by_panel = padded.view(-1, PANEL, stored.grouped.groups(columns), group).transpose(1, 2)
    planes = [by_panel & 3, by_panel >> 2] if bits == 3 else [by_panel]
    widths = (2, 1) if bits == 3 else (bits,)
    words = [_words(plane, width) for plane, width in zip(planes, widths, strict=True)]
    halves = [
        quantize.raw(torch.nn.functional.pad(part, (0, 0, 0, missing)).view(-1, PANEL, part.shape[1]).transpose(1, 2))
        for part in (scale, minimum)
    ]
    return torch.cat([*halves, *words], -1)


def unpack_groups(panels: torch.Tensor, rows: int, columns: int, stored: Panels) -> torch.Tensor:
    """Dequantizes panels to float32 [rows, columns]."""
    assert stored.grouped is not None
    bits, group = stored.grouped.bits, stored.grouped.group
    halves, words = panels[..., : 4 * PANEL], panels[..., 4 * PANEL :]
    scale, minimum = halves.contiguous().view(torch.float16).float().view(*panels.shape[:2], 2, PANEL, 1).unbind(2)
    if bits == 3:
        low = PANEL * group * 2 // 8
        codes = _codes(words[..., :low], 2) | _codes(words[..., low:], 1) << 2
    else:
        codes = _codes(words, bits)
    values = minimum + codes.float() * scale  # [panels, groups, PANEL, group]
    return values.transpose(1, 2).reshape(len(panels) * PANEL, -1)[:rows, :columns]


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [..., PANEL, group] as bytes: word by word of all rows; see csrc/panel_weights.h."""
    pairs = _HALF // bits
    halves = codes.reshape(*codes.shape[:-1], -1, pairs, _PAIR).transpose(-1, -2).long()  # [..., word, half, pair]
    shifts = torch.arange(0, _HALF, bits)
    return quantize.raw((halves << shifts).sum(-1).transpose(-3, -2).to(torch.uint16)).flatten(-3)


def _codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse: codes [..., PANEL, group]."""
    halves = words.contiguous().view(torch.uint16).view(*words.shape[:-1], -1, PANEL, _PAIR).transpose(-3, -2).long()
    codes = halves[..., None] >> torch.arange(0, _HALF, bits) & ((1 << bits) - 1)  # [..., word, half, pair]
    return codes.transpose(-1, -2).flatten(-3)
