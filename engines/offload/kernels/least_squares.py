"""The quantizer of weights: each group's scale and minimum of least squared error; the reference in torch.

What is stored is as quantize.py says, and so are the codes: the nearest to a group's values. But the scale and the
minimum that reach from the least value to the largest are not those of least squared error. The search for better ones
alternates two steps: for a scale and a minimum the nearest codes, and for the codes the scale and the minimum of least
squared error, a regression in closed form. Alternation ends in a local minimum, so it starts from STARTS ranges: both
ends of the group's, moved inwards by 0, 3/4, 3/2 and 9/4 steps. Each takes REFITS regressions, and the best is kept. At
3 bits regressions clip outliers that models need, so there the best of CLIPS * CLIPS ranges is taken, each end cut by
up to a tenth of the group's range.

A group keeps the nearest's scale and minimum unless the search found a smaller error after rounding to float16; so a
group whose values lie on such a grid comes back as it was.

Why squared error: docs/results/quantizers-2026-11-24 compares it with other objectives by a real model's perplexity.

Source: the alternation is Lloyd's (1957) with equidistant levels; llama.cpp's make_qkx2_quants does so for weights.
"""

import itertools

import torch

from engines.offload.kernels import quantize
from engines.offload.memory.storage import Grouped

#: As in csrc/least_squares.h.
STARTS, MOVE, REFITS = 4, 0.75, 4
CLIPS, CLIP = 5, 0.05
#: Groups at a time: bounds the memory of the search.
_CHUNK = 1 << 14
_HALF_MAX = 65504.0
#: By group a squared error, a scale and a minimum.
_Fit = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def pack(x: torch.Tensor, stored: Grouped) -> torch.Tensor:
    """Quantizes float rows [..., columns] to packed rows uint8 [..., row_bytes]."""
    return quantize.pack_with(x, *scales_and_minima(x, stored), stored)


def scales_and_minima(x: torch.Tensor, stored: Grouped) -> tuple[torch.Tensor, torch.Tensor]:
    """Each group's scale and minimum, float16 [..., groups], for float rows [..., columns].

    csrc/least_squares.h sums in float32, this in float64: the two may choose differently among nearly equal errors.
    """
    nearest = quantize.scales_and_minima(x, stored)
    missing = -x.shape[-1] % stored.group
    groups, inside = (
        torch.nn.functional.pad(part.double(), (0, missing)).reshape(-1, stored.group)
        for part in (x, torch.ones_like(x))
    )
    scale, minimum = (part.flatten().clone() for part in nearest)
    for first in range(0, len(groups), _CHUNK):
        part = slice(first, first + _CHUNK)
        scale[part], minimum[part] = _search(groups[part], inside[part], scale[part], minimum[part], stored.bits)
    return scale.view(nearest[0].shape), minimum.view(nearest[1].shape)


def _search(
    x: torch.Tensor, inside: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales and minima, float16 [groups], of x [groups, group] where `inside` is 1; those given are nearest's."""
    top = (1 << bits) - 1
    count = inside.sum(-1)
    mean = (x * inside).sum(-1) / count
    x = (x - mean[:, None]) * inside  # values far from zero would leave the sums few digits; padding is 0, their mean
    least = x.amin(-1)
    step = (x.amax(-1) - least) / top

    def codes(scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
        return ((x - minimum[:, None]) / scale[:, None]).round().clamp(0, top) * inside

    def refit(scale: torch.Tensor, minimum: torch.Tensor) -> _Fit:
        """The regression on the nearest codes: its squared error is infinite where no line rises through them."""
        code = codes(scale, minimum)
        total, product = code.sum(-1), (code * x).sum(-1)
        variance = (code * code).sum(-1) - total * total / count
        scale = product / variance
        error = (x * x).sum(-1) - scale * product
        return error.where((variance > 0) & (product > 0), torch.inf), scale, -scale * total / count

    def error(scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
        off = (x - minimum[:, None] - codes(scale, minimum) * scale[:, None]) * inside
        return (off * off).sum(-1)

    def clipped(low: int, high: int) -> _Fit:
        cut = CLIP * (x.amax(-1) - least) / 2
        line = step - (low + high) * cut / top, least + low * cut
        return error(*line), *line

    best: _Fit = (torch.full_like(mean, torch.inf), step, least)
    if bits == 3:
        for low, high in itertools.product(range(CLIPS), repeat=2):
            best = _better(best, clipped(low, high))
    else:
        for start in range(STARTS):
            line = step * (1 - 2 * start * MOVE / top), least + start * MOVE * step
            for _ in range(REFITS):
                fit = refit(*line)
                best, line = _better(best, fit), fit[1:]
    fitted = (best[1].float().clamp(max=_HALF_MAX).half(), (best[2] + mean).float().clamp(-_HALF_MAX, _HALF_MAX).half())
    ours, theirs = (error(s.double(), m.double() - mean) for s, m in (fitted, (scale, minimum)))
    better = (fitted[0] > 0) & (scale > 0) & (ours < theirs)  # false where a group holds NaN or infinity
    return fitted[0].where(better, scale), fitted[1].where(better, minimum)


def _better(one: _Fit, other: _Fit) -> _Fit:
    """By group the fit of smaller error; `one` where they are equal."""
    error, scale, minimum = (new.where(other[0] < one[0], old) for old, new in zip(one, other, strict=True))
    return error, scale, minimum
