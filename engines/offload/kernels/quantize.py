"""Group-wise asymmetric quantization: what codes mean, how packed rows lie in memory, and the reference in torch.

A row is cut into groups of `group` values; the last may be shorter. Each group has a scale and a minimum in float16. A
value x becomes the code q = round((x - minimum) / scale), 0 to 2^bits - 1, which stands for minimum + q * scale in
float32. Here, and so in KV caches, codes reach from the group's least value to its largest; least_squares.py chooses
the scales and minima of weights. The scale is 0 where a group's values are equal to float16's precision. A group that
holds NaN or infinity becomes NaN as a whole.

A packed row is its codes (eight values in `bits` bytes, the first in the lowest bits), then the scales of its groups,
then their minima. The kernels (csrc/packed_rows.h, numba_quantizer.py, triton_quantizer.py) read and write the same
bytes and are tested against this module.

Source: FlexGen (Sheng et al. 2023), section 5: 4 bits, groups of 64, asymmetric. With two float16 per group that is 4.5
bits a value.
"""

import torch

from engines.offload.memory.storage import CODES_PER_WORD, Grouped

_HALF_MAX = 65504.0


def pack(x: torch.Tensor, stored: Grouped) -> torch.Tensor:
    """Quantizes float rows [..., columns] to packed rows uint8 [..., row_bytes]."""
    return pack_with(x, *scales_and_minima(x, stored), stored)


def pack_with(x: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, stored: Grouped) -> torch.Tensor:
    """As `pack`, by the scales and minima, float16 [..., groups], that are given."""
    columns = x.shape[-1]
    wide_scale, wide_minimum = (
        part.double().repeat_interleave(stored.group, -1)[..., :columns] for part in (scale, minimum)
    )
    codes = ((x.double() - wide_minimum) / wide_scale).round().clamp(0, (1 << stored.bits) - 1)
    codes = codes.masked_fill((wide_scale == 0) | wide_scale.isnan(), 0).to(torch.int64)
    codes = torch.nn.functional.pad(codes, (0, -columns % CODES_PER_WORD))
    return torch.cat([_bytes_of(codes, stored.bits), raw(scale), raw(minimum)], -1)


def scales_and_minima(x: torch.Tensor, stored: Grouped) -> tuple[torch.Tensor, torch.Tensor]:
    """Each group's scale and minimum, float16 [..., groups], for float rows [..., columns]."""
    missing = -x.shape[-1] % stored.group
    least, most = (
        torch.nn.functional.pad(x.double(), (0, missing), value=end).reshape(*x.shape[:-1], -1, stored.group)
        for end in (torch.inf, -torch.inf)
    )
    least, most = least.amin(-1), most.amax(-1)
    broken = ~(least.isfinite() & most.isfinite())  # amin and amax propagate NaN
    # rounded to float32 first, as the kernels do
    scale = ((most - least) / ((1 << stored.bits) - 1)).float().clamp(max=_HALF_MAX).half()
    minimum = (least.float() + 0.0).clamp(-_HALF_MAX, _HALF_MAX).half()  # + 0.0 turns -0 into 0
    return scale.masked_fill(broken, torch.nan), minimum.masked_fill(broken, torch.nan)


def split(packed: torch.Tensor, columns: int, stored: Grouped) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The codes uint8 [..., code_bytes] of packed rows, and their scales and minima float32 [..., groups]."""
    halves = 2 * stored.groups(columns)
    codes, scale, minimum = torch.split(packed, [stored.code_bytes(columns), halves, halves], -1)
    return codes, _halves(scale).float(), _halves(minimum).float()


def parts(packed: torch.Tensor, columns: int, stored: Grouped) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The codes [..., columns], one a value, of packed rows, and their scales and minima float16 [..., groups]."""
    codes, scale, minimum = split(packed, columns, stored)
    return _codes_of(codes, stored.bits)[..., :columns], scale.half(), minimum.half()


def unpack(packed: torch.Tensor, columns: int, stored: Grouped) -> torch.Tensor:
    """Dequantizes packed rows uint8 [..., row_bytes] to float32 [..., columns]."""
    codes, *parts = split(packed, columns, stored)
    scale, minimum = (part.repeat_interleave(stored.group, -1)[..., :columns] for part in parts)
    return minimum + _codes_of(codes, stored.bits)[..., :columns].float() * scale


def raw(x: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, uint8 [..., width * item size]."""
    return x.contiguous().view(torch.uint8)


def _halves(x: torch.Tensor) -> torch.Tensor:
    """Bytes [..., 2 n] as float16 [..., n]; copied, because in a packed row they may start at an odd address."""
    return x.clone(memory_format=torch.contiguous_format).view(torch.float16)


def _bytes_of(codes: torch.Tensor, bits: int) -> torch.Tensor:
    words = (codes.reshape(*codes.shape[:-1], -1, CODES_PER_WORD) << _shifts(CODES_PER_WORD, bits, codes)).sum(-1)
    return (words[..., None] >> _shifts(bits, 8, codes) & 255).flatten(-2).to(torch.uint8)


def _codes_of(packed: torch.Tensor, bits: int) -> torch.Tensor:
    words = (packed.reshape(*packed.shape[:-1], -1, bits).long() << _shifts(bits, 8, packed)).sum(-1)
    return (words[..., None] >> _shifts(CODES_PER_WORD, bits, packed) & ((1 << bits) - 1)).flatten(-2)


def _shifts(count: int, step: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(0, count * step, step, device=like.device)
