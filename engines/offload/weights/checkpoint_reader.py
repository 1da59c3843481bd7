"""A checkpoint's tensors under the names and in the shapes that the model's parameters have, read a part at a time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from engines.models.checkpoints import shard_names
from harness.api import HarnessError, LocalModel, UnsupportedError


class CheckpointReader:
    """The tensors of a folder of safetensors.

    `aliases` are pairs of tied parameters, of which a checkpoint may hold either; `prefix` is the base model's,
    which checkpoints of the bare model lack; `transforms` are transformers' own from a checkpoint's names to the
    model's. Raises UnsupportedError for a transform that is more than a new name or a stack of experts.
    """

    def __init__(
        self, model: LocalModel, prefix: str, aliases: Mapping[str, str], transforms: Sequence[Any] = ()
    ) -> None:
        self._folder = Path(model.path)
        self._prefix = f"{prefix}."
        self._aliases = dict(aliases) | {there: here for here, there in aliases.items()}
        self.shards = [self._folder / name for name in shard_names(self._folder)]
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._files: dict[str, tuple[Any, str]] = {}  # by parameter: file and the name in it
        self._stacks: dict[str, dict[str, list[tuple[Any, str]]]] = defaultdict(lambda: defaultdict(list))
        for shard in self.shards:
            file = safe_open(shard, framework="pt")
            for key in file.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118 - no mapping
                name, pattern = rename_source_key(key, renamings, converters)
                if pattern is None:
                    self._files[name] = (file, key)
                else:
                    self._stacks[name][pattern].append((file, key))
        self._parts = {name: self._ordered(name, parts, converters) for name, parts in self._stacks.items()}

    def view(self, parameter: str, shape: tuple[int, ...]) -> Any:
        """A lazy view of a tensor: indexing reads that part only. Raises HarnessError where it does not fit."""
        file, key = self._find(parameter, self._files)
        view = file.get_slice(key)
        self._require(key, tuple(view.get_shape()), shape)
        return view

    def whole(self, parameter: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor, in the dtype it is stored in. Raises as `view`."""
        file, key = self._find(parameter, self._files)
        tensor = torch.as_tensor(file.get_tensor(key))
        self._require(key, tuple(tensor.shape), shape)
        return tensor

    def read(
        self, parameter: str, expert: int | None, shape: tuple[int, int], rows: slice, columns: slice
    ) -> torch.Tensor:
        """A part of a matrix of `shape`, or of one expert's in a stack of them. Raises as `view`."""
        if expert is None:
            view = self.view(parameter, shape)
            return torch.as_tensor(view[rows, columns])
        if any(name in self._parts for name in self._candidates(parameter)):
            return self._from_parts(parameter, expert, shape, rows, columns)
        file, key = self._find(parameter, self._files)
        view = file.get_slice(key)
        self._require(key, tuple(view.get_shape())[1:], shape)
        return torch.as_tensor(view[expert, rows, columns])

    def _from_parts(
        self, parameter: str, expert: int, shape: tuple[int, int], rows: slice, columns: slice
    ) -> torch.Tensor:
        """From an expert that the checkpoint keeps by itself, in one piece or as gate above up."""
        found = self._find(parameter, self._parts)
        if any(len(experts) <= expert for experts in found):
            raise HarnessError(f"{self._folder} holds no tensor for expert {expert} of {parameter}; is it whole?")
        pieces = [experts[expert] for experts in found]
        views = [file.get_slice(key) for file, key in pieces]
        heights = [view.get_shape()[0] for view in views]
        self._require(pieces[0][1], (sum(heights), views[0].get_shape()[1]), shape)
        read, top = [], 0
        for view, height in zip(views, heights, strict=True):
            first, last = max(rows.start - top, 0), min(rows.stop - top, height)
            if first < last:
                read.append(torch.as_tensor(view[first:last, columns]))
            top += height
        return torch.cat(read)

    def _ordered(
        self, name: str, parts: Mapping[str, list[tuple[Any, str]]], converters: Sequence[WeightConverter]
    ) -> list[list[tuple[Any, str]]]:
        """By piece and expert where the tensors are; the pieces in the order of the transform's patterns."""
        converter = next((c for c in converters if set(parts) <= set(c.source_patterns)), None)
        if converter is None:
            raise UnsupportedError(f"{self._folder}: {name} is made from the checkpoint in two ways at once")
        stack = [isinstance(op, MergeModulelist) and op.dim == 0 for op in converter.operations[:1]]
        join = [isinstance(op, Concatenate) and op.dim == 1 for op in converter.operations[1:]]
        if stack != [True] or join not in ([], [True]):
            words = ", ".join(type(op).__name__ for op in converter.operations)
            raise UnsupportedError(
                f"{self._folder}: {name} is made from the checkpoint by {words}, which is not done here"
            )
        pieces = [sorted(parts[p], key=lambda part: _natural(part[1])) for p in converter.source_patterns if p in parts]
        for piece in pieces:
            numbers = zip(*(map(int, re.findall(r"\d+", key)) for _, key in piece), strict=True)
            if not any(column == tuple(range(len(piece))) for column in numbers):
                raise HarnessError(f"{self._folder} lacks an expert between others for {name}; is it whole?")
        return pieces

    def _find(self, parameter: str, where: Mapping[str, Any]) -> Any:
        found = next((where[name] for name in self._candidates(parameter) if name in where), None)
        if found is None:
            raise HarnessError(f"{self._folder} holds no tensor for {parameter}; is it a checkpoint of this model?")
        return found

    def _require(self, key: str, got: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if got != shape:
            raise HarnessError(f"{self._folder}: tensor {key} has shape {list(got)}, the model needs {list(shape)}")

    def _candidates(self, parameter: str) -> list[str]:
        names = [parameter, *([self._aliases[parameter]] if parameter in self._aliases else [])]
        return [n for name in names for n in (name, name.removeprefix(self._prefix), self._prefix + name)]


def _natural(key: str) -> list[tuple[int, str]]:
    """Sorts layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"\.", key)]
