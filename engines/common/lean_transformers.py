"""Imports transformers without what only torch's compiler and detectors' losses need.

Each deferral is of an import that transformers makes for code that no causal model runs here. It keeps what that code
means, and does nothing where the import is made already, or where a later transformers no longer makes it.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

from engines.common.lazy_dynamo import lazy_dynamo

_SCANNER = "transformers.utils.import_utils"
#: Modules of transformers, and the one that each imports something of which it only calls.
_CALLS = {
    "transformers.loss.loss_utils": "scipy.optimize",
    "transformers.masking_utils": "torch._dynamo._trace_wrapped_higher_order_op",
}


def import_transformers() -> None:
    """Imports transformers' model code, which must not have been imported before for this to save time."""
    if "transformers.modeling_utils" in sys.modules:
        return
    with _one_scan(), lazy_dynamo():
        importlib.import_module("transformers")
        for name, called in _CALLS.items():
            if importlib.util.find_spec(name) is not None:
                with _functions_on_call(called):
                    importlib.import_module(name)
        importlib.import_module("transformers.modeling_utils")


@contextmanager
def _one_scan() -> Iterator[None]:
    """Lets transformers read the source of all its models once. It does so twice: what it caches of the first time are
    128 folders, a quarter of them."""
    finder = _ScannerFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _ScannerFinder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _SCANNER:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _ScannerLoader(spec.loader.name, spec.loader.path)
        return spec


class _ScannerLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        scan: Any = getattr(module, "create_import_structure_from_path", None)
        if hasattr(scan, "cache_parameters"):
            setattr(module, scan.__name__, functools.cache(scan.__wrapped__))


@contextmanager
def _functions_on_call(name: str) -> Iterator[None]:
    """What is imported of the module `name` meanwhile are functions that import it when they are called."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = _FunctionsOnCall(name)
    try:
        yield
    finally:
        del sys.modules[name]


class _FunctionsOnCall(ModuleType):
    def __getattr__(self, function: str) -> Any:
        if function.startswith("__"):
            raise AttributeError(function)

        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(importlib.import_module(self.__name__), function)(*args, **kwargs)

        return call
