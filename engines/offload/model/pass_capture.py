"""Takes down what a pass of a model computes: torch's operations, and the calls of kernels between them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from engines.offload.kernels.launch import Bind

_ATEN = torch.ops.aten
#: Operations whose result is what they are given, elsewhere or in another dtype.
_COPIES = frozenset({_ATEN._to_copy.default, _ATEN.clone.default})
#: Operations that give memory without values.
_EMPTY = frozenset({
    _ATEN.empty.memory_format, _ATEN.empty_like.default, _ATEN.empty_strided.default, _ATEN.new_empty.default,
    _ATEN.new_empty_strided.default,
})  # fmt: skip
#: Operations that differ from pass to pass by more than their operands' values.
_REFUSED = frozenset(
    {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
)
#: Stands for a tensor among an operation's arguments.
_TENSOR = object()


class Buffer(NamedTuple):
    """Where a tensor of a captured pass lies: in its storage of this number."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Step(NamedTuple):
    """A call, and its tensors: those of the pass by where they lie, others, such as weights, as they are."""

    bind: Bind
    tensors: Sequence[Buffer | torch.Tensor]


class PassCapture(TorchDispatchMode):
    """While it is entered, takes down operations as `steps`, and the bytes of each storage that they fill.

    `problem`: an operation after which the steps are no use, because what follows may depend on values; else empty.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.storages: list[int] = []
        self.problem = ""
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}  # by address, storages of the pass and their numbers

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would import its compiler to keep it away from here, which takes seconds."""
        return False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """See Capture."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def launched(self, bind: Bind, *tensors: torch.Tensor, created: int = 0) -> None:
        """See Capture."""
        for tensor in tensors[len(tensors) - created :]:
            self._own(tensor)
        self.steps.append(Step(bind, [self.where(tensor) for tensor in tensors]))

    def where(self, tensor: torch.Tensor) -> Buffer | torch.Tensor:
        """Where a tensor of the pass lies; another tensor itself."""
        known, number = self._alive.get(tensor.untyped_storage().data_ptr(), (None, 0))
        if known is None or known.expired():
            return tensor
        return Buffer(number, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _own(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._alive[storage.data_ptr()] = StorageWeakRef(storage), len(self.storages)
        self.storages.append(storage.nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.problem:
            self._take_down(func, args, kwargs, result)
        return result

    def _take_down(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        tensors: list[torch.Tensor] = []
        arguments, named = (_mapped(each, partial(_noted, tensors)) for each in (args, kwargs))
        outputs = [result] if isinstance(result, torch.Tensor) else result
        if not isinstance(outputs, tuple | list) or not all(isinstance(output, torch.Tensor) for output in outputs):
            self.problem = f"{func} tells the model values"
        elif func._schema.is_mutable:
            if any(isinstance(self.where(tensor), torch.Tensor) for tensor in _written(func, args, kwargs)):
                self.problem = f"{func} changes what is no part of the pass"
            self.steps.append(Step(partial(_bind, func, arguments, named, 0), [self.where(t) for t in tensors]))
        elif new := _in_other_memory(outputs, tensors):  # the rest are views
            if _depends_on_values(func, args):
                self.problem = f"{func} gives what depends on values"
            for output in new:
                self._own(output)
            if func not in _EMPTY:
                bind = partial(_bind, func, arguments, named, len(outputs))
                self.steps.append(Step(bind, [self.where(tensor) for tensor in (*tensors, *outputs)]))


def _bind(func: Any, arguments: Any, named: Any, count: int, *tensors: torch.Tensor) -> Callable[[], object]:
    """What computes an operation on all of `tensors` but the last `count`, and has those become its results."""
    inputs, outputs = iter(tensors[: len(tensors) - count]), tensors[len(tensors) - count :]
    args, kwargs = (
        _mapped(given, lambda leaf: next(inputs) if leaf is _TENSOR else leaf) for given in (arguments, named)
    )
    if not count:
        return partial(func, *args, **kwargs)
    if func in _COPIES:
        return partial(outputs[0].copy_, args[0])
    if count == 1 and (variant := _into(func)) is not None:
        return partial(variant, *args, **kwargs, out=outputs[0])

    def compute() -> None:
        results = func(*args, **kwargs)
        for output, each in zip(outputs, [results] if count == 1 else results, strict=True):
            output.copy_(each)

    return compute


@cache
def _into(func: Any) -> Any:
    """The variant of an operation that writes its result into the tensor `out`; None where there is none."""
    wanted = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        variant = getattr(func.overloadpacket, name)
        into = [argument.name for argument in variant._schema.arguments if argument.is_out]
        others = [(a.name, str(a.type)) for a in variant._schema.arguments if not a.is_out]
        if into == ["out"] and others == wanted:
            return variant
    return None


def _in_other_memory(tensors: Sequence[torch.Tensor], than: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    given = {tensor.untyped_storage().data_ptr() for tensor in than}
    return [tensor for tensor in tensors if tensor.untyped_storage().data_ptr() not in given]


def _depends_on_values(func: Any, args: Any) -> bool:
    """Whether how much an operation gives depends on its operands' values, or what it gives on more than these."""
    if func is _ATEN.index.Tensor:  # of masks it does
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return bool(_REFUSED & set(func.tags))


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operation changes."""
    changed = [argument.name for argument in func._schema.arguments if argument.is_write]
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    return [given[name] for name in changed]


def _mapped(value: Any, of: Callable[[Any], Any]) -> Any:
    """The value with `of` applied to whatever is in its lists, tuples and dictionaries."""
    if isinstance(value, dict):
        return {key: _mapped(each, of) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(each, of) for each in value]
    return of(value)


def _noted(tensors: list[torch.Tensor], leaf: Any) -> Any:
    """The leaf, or what stands for a tensor, which is added to `tensors`."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    tensors.append(leaf)
    return _TENSOR
