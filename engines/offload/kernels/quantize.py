"""Group-wise quantization: what a packed value means, and how packed rows lie in memory.

A row is cut into groups. Of each group the step and the least value are kept in float16, and of each value x the code
q = round((x - least) / step), from 0 to 2^bits - 1, which stands for least + q * step in float32. A group whose values
are all the same, to what float16 can tell apart, has step 0. One that holds NaN or infinity is NaN as a whole. The last
group of a row may lack values.

A packed row is its codes, eight values in `bits` bytes, the first in the lowest bits; then the steps; then the least
values. The kernels (kernels/packed.h) read and write the same, bit for bit; this is what they are tested against.

Source: FlexGen (Sheng et al. 2023), section 5 (4 bits, groups of 64, asymmetric); 4.5 bits a value with the two of
float16.
"""

from __future__ import annotations

import torch

from engines.offload.memory.storage import EIGHT, Grouped

_HALF_MAX = 65504.0


def pack(x: torch.Tensor, how: Grouped) -> torch.Tensor:
    """Float rows [..., columns] as uint8 [..., row_bytes]."""
    columns = x.shape[-1]
    step, low = pairs(x, how)
    wide_step, wide_low = (part.double().repeat_interleave(how.group, -1)[..., :columns] for part in (step, low))
    codes = ((x.double() - wide_low) / wide_step).round().clamp(0, (1 << how.bits) - 1)
    codes = codes.masked_fill((wide_step == 0) | wide_step.isnan(), 0).to(torch.int64)
    codes = torch.nn.functional.pad(codes, (0, -columns % EIGHT))
    return torch.cat([_bytes_of(codes, how.bits), raw(step), raw(low)], -1)


def pairs(x: torch.Tensor, how: Grouped) -> tuple[torch.Tensor, torch.Tensor]:
    """The step and the least value, float16 [..., groups], of each group of float rows [..., columns]."""
    missing = -x.shape[-1] % how.group
    least, most = (
        torch.nn.functional.pad(x.double(), (0, missing), value=end).reshape(*x.shape[:-1], -1, how.group)
        for end in (torch.inf, -torch.inf)
    )
    least, most = least.amin(-1), most.amax(-1)
    broken = ~(least.isfinite() & most.isfinite())  # NaN is its group's least value
    # rounded to float32 first, as the kernels do it; plus zero because there is a negative one
    step = ((most - least) / ((1 << how.bits) - 1)).float().clamp(max=_HALF_MAX).half()
    low = (least.float() + 0.0).clamp(-_HALF_MAX, _HALF_MAX).half()
    return step.masked_fill(broken, torch.nan), low.masked_fill(broken, torch.nan)


def unpack(packed: torch.Tensor, columns: int, how: Grouped) -> torch.Tensor:
    """The float32 rows [..., columns] that uint8 [..., row_bytes] stand for."""
    pairs = 2 * how.groups(columns)
    codes, step, low = torch.split(packed, [how.code_bytes(columns), pairs, pairs], -1)
    values = _codes_of(codes, how.bits)[..., :columns].float()
    step, low = (halves(part).float().repeat_interleave(how.group, -1)[..., :columns] for part in (step, low))
    return low + values * step


def raw(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, uint8 [..., width times item size]."""
    return x.contiguous().view(torch.uint8)


def halves(x: torch.Tensor) -> torch.Tensor:
    """The float16 values that bytes [..., 2 n] are; in a row they may begin at an odd one."""
    return x.clone(memory_format=torch.contiguous_format).view(torch.float16)


def _bytes_of(codes: torch.Tensor, bits: int) -> torch.Tensor:
    words = (codes.reshape(*codes.shape[:-1], -1, EIGHT) << _shifts(EIGHT, bits, codes)).sum(-1)
    return (words[..., None] >> _shifts(bits, 8, codes) & 255).flatten(-2).to(torch.uint8)


def _codes_of(packed: torch.Tensor, bits: int) -> torch.Tensor:
    words = (packed.reshape(*packed.shape[:-1], -1, bits).long() << _shifts(bits, 8, packed)).sum(-1)
    return (words[..., None] >> _shifts(EIGHT, bits, packed) & ((1 << bits) - 1)).flatten(-2)


def _shifts(count: int, step: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(0, count * step, step, device=like.device)
