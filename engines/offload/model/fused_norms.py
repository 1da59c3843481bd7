"""Has the norms of transformers' module computed by one kernel each, those that compute what it does."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from engines.offload.kernels.rms_norm import DTYPES, RMSNorm, rms_norm

#: What modules call the number that keeps the root from zero.
_EPSILONS = ("variance_epsilon", "eps", "epsilon")
#: Rows of random values on which a module and the definition are compared.
_ROWS = 4


def fuse_rms_norms(module: nn.Module, norm: RMSNorm) -> int:
    """Replaces the forward methods of RMS norms by `norm`; returns of how many.

    Norms differ between architectures in ways that their names do not tell, such as in what is rounded when. So a norm
    is replaced if, with its own weights, it gives `rms_norm`'s values to the last bit.
    """
    fused = 0
    for each in module.modules():
        weight, epsilon = each._parameters.get("weight"), _epsilon(each)
        if weight is None or epsilon is None or not _is_candidate(each, weight):
            continue
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(_ROWS, len(weight), generator=generator).to(weight.dtype)
        with torch.inference_mode():
            same = torch.equal(each(rows), rms_norm(rows, weight, epsilon))
        if same:
            each.forward = _forward(norm, weight, epsilon, each.forward)
            fused += 1
    return fused


def _epsilon(module: nn.Module) -> float | None:
    values = (getattr(module, name, None) for name in _EPSILONS)
    return next((value for value in values if isinstance(value, float)), None)


def _is_candidate(module: nn.Module, weight: torch.Tensor) -> bool:
    """Whether a module has nothing but a `weight` [columns] and takes nothing but rows."""
    parameters = inspect.signature(type(module).forward).parameters
    alone = len(module._parameters) == 1 and not module._buffers and not module._modules
    return alone and weight.dim() == 1 and weight.dtype in DTYPES and len(parameters) == 2


def _forward(
    norm: RMSNorm, weight: torch.Tensor, epsilon: float, own: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    def forward(*rows: Any, **named: Any) -> torch.Tensor:
        [x] = (*rows, *named.values())
        return norm(x, weight, epsilon) if x.dtype == weight.dtype else own(x)

    return forward
