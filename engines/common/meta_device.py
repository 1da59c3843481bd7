"""Building models on the meta device, where parameters have shapes and no values."""

from typing import Any

from torch.overrides import TorchFunctionMode

_DRAWS = frozenset({"normal_", "uniform_", "kaiming_uniform_"})


class NothingDrawn(TorchFunctionMode):
    """Draws no values for tensors that hold none: torch imports its compiler to draw normal ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _DRAWS:
            drawn = args[0] if args else kwargs["tensor"]
            if drawn.is_meta:
                return drawn
        return func(*args, **kwargs)
