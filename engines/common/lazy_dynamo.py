"""Lets modules decorate functions for torch's compiler without importing it, which takes long."""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any

_DYNAMO = "torch._dynamo"
#: Decorators that return the function itself and tell the compiler about it: those of no use before there is one.
_MARKS = ("allow_in_graph", "assume_constant_result")


@contextmanager
def lazy_dynamo() -> Iterator[None]:
    """Decorators of the compiler that are applied meanwhile, also by the names that torch.compiler has for them, take
    effect when the compiler is imported, which anything else that is asked of it does at once."""
    if _DYNAMO in sys.modules:
        yield
        return
    stand_in = sys.modules[_DYNAMO] = _StandIn(_DYNAMO)
    try:
        yield
    finally:
        stand_in.step_aside()


class _StandIn(ModuleType):
    """Stands for the compiler's module and notes which functions are marked for it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._marked: list[tuple[str, Any]] = []

    def step_aside(self) -> None:
        """Leaves the place to the module, which marks what is noted once it is imported."""
        if sys.modules.get(_DYNAMO) is self:
            del sys.modules[_DYNAMO]
            if self._marked:
                sys.meta_path.insert(0, _Marking(self._marked))

    def __getattr__(self, name: str) -> Any:
        if name in _MARKS:
            return functools.partial(self._mark, name)
        if name == "disable":
            return _disable
        if name in ("__spec__", "__file__"):  # what looks for a module's origin needs none of its code
            raise AttributeError(name)
        self.step_aside()
        return getattr(importlib.import_module(_DYNAMO), name)

    def _mark(self, name: str, function: Any) -> Any:
        self._marked.append((name, function))
        return function


def _disable(function: Any = None, recursive: bool = True, **options: Any) -> Any:
    """torch._dynamo.disable from the first call of the function on."""
    if function is None:
        return functools.partial(_disable, recursive=recursive, **options)
    disabled: list[Callable[..., Any]] = []

    def now() -> Callable[..., Any]:
        if not disabled:
            disabled.append(importlib.import_module(_DYNAMO).disable(function, recursive, **options))
        return disabled[0]

    if not isinstance(function, FunctionType):  # such as a class, which must stay one
        return now()

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return now()(*args, **kwargs)

    return called


class _Marking(MetaPathFinder):
    """Finds the compiler's module, once, and marks functions after it is imported."""

    def __init__(self, marked: list[tuple[str, Any]]) -> None:
        self._marked = marked

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _DYNAMO:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _MarkingLoader(spec.loader, self._marked)
        return spec


class _MarkingLoader(Loader):
    def __init__(self, loader: Loader, marked: list[tuple[str, Any]]) -> None:
        self._loader, self._marked = loader, marked

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for name, function in self._marked:
            getattr(module, name)(function)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # such as get_source, by which inspect reads the module
