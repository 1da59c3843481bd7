"""Which of a model's small tensors have a dtype of their own, as `from_pretrained` gives it to them."""

import math
import re
from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel


class TensorDtypes:
    """Dtypes of the tensors of `module`, which computes in `dtype`.

    float32 where the model's class says that a tensor must not lose digits, as those that choose experts; else what
    its module made of it, which may be float32 or integers.
    """

    def __init__(self, module: PreTrainedModel, dtype: torch.dtype) -> None:
        self._dtype = dtype
        kept = [re.escape(name).replace(re.escape("*"), ".*") for name in module._get_dtype_plan(dtype)]
        self._kept = re.compile("|".join(kept)) if kept else None
        self._own: dict[str, torch.dtype] = {}

    def learn(self, name: str, declared: torch.dtype) -> None:
        """Takes what its module made of a tensor."""
        self._own[name] = torch.float32 if self._kept is not None and self._kept.search(name) else declared

    def of(self, name: str) -> torch.dtype:
        """The dtype of a tensor in memory."""
        return self._own.get(name, self._dtype)

    def values(self, shapes: Mapping[str, Sequence[int]]) -> int:
        """The memory of tensors of these shapes, by name, in values of the compute dtype."""
        nbytes = sum(math.prod(shape) * self.of(name).itemsize for name, shape in shapes.items())
        return -(-nbytes // self._dtype.itemsize)
