"""Reads a checkpoint's tensors, whole or in part, by the names and shapes of the model's parameters."""

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

from engines.models.safetensors_file import shard_paths
from harness.api import HarnessError, LocalModel, UnsupportedError


class CheckpointReader:
    """The tensors of a folder of safetensors.

    `aliases`: pairs of tied parameters; a checkpoint may hold either. `prefix`: the base model's, which checkpoints of
    the bare model lack. `transforms`: transformers' conversions from a checkpoint's names to the model's. Raises
    UnsupportedError for a transform other than renaming and stacking experts.
    """

    def __init__(
        self, model: LocalModel, prefix: str, aliases: Mapping[str, str], transforms: Sequence[Any] = ()
    ) -> None:
        self._folder = Path(model.path)
        self._prefix = f"{prefix}."
        self._aliases = dict(aliases) | {there: here for here, there in aliases.items()}
        self.shards = shard_paths(self._folder)
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._files: dict[str, tuple[Any, str]] = {}  # by parameter: (file, name in the file)
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
        """A lazy view of a tensor: indexing it reads that part. Raises HarnessError if it is missing or misshaped."""
        file, key = self._find(parameter, self._files)
        view = file.get_slice(key)
        self._require(key, tuple(view.get_shape()), shape)
        return view

    def whole(self, parameter: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor in its stored dtype. Raises as `view`."""
        file, key = self._find(parameter, self._files)
        tensor = torch.as_tensor(file.get_tensor(key))
        self._require(key, tuple(tensor.shape), shape)
        return tensor

    def read(
        self, parameter: str, expert: int | None, shape: tuple[int, int], rows: slice, columns: slice
    ) -> torch.Tensor:
        """A part of a matrix of `shape`, or of one expert's matrix in a stack. Raises as `view`."""
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
        """A part of the matrix of an expert that the checkpoint keeps apart, whole or as gate and up to be joined."""
        stacks = self._find(parameter, self._parts)
        if any(len(experts) <= expert for experts in stacks):
            raise HarnessError(f"{self._folder} holds no tensor for expert {expert} of {parameter}; is it complete?")
        pieces = [experts[expert] for experts in stacks]
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
        """Where the tensors are, by piece and expert; pieces in the order of the transform's patterns."""
        converter = next((c for c in converters if set(parts) <= set(c.source_patterns)), None)
        if converter is None:
            raise UnsupportedError(f"{self._folder}: {name} matches two conversions of the checkpoint")
        stack = [isinstance(op, MergeModulelist) and op.dim == 0 for op in converter.operations[:1]]
        join = [isinstance(op, Concatenate) and op.dim == 1 for op in converter.operations[1:]]
        if stack != [True] or join not in ([], [True]):
            names = ", ".join(type(op).__name__ for op in converter.operations)
            raise UnsupportedError(f"{self._folder}: {name} needs the conversion {names}, which is not supported")
        pieces = [sorted(parts[p], key=lambda part: _natural(part[1])) for p in converter.source_patterns if p in parts]
        for piece in pieces:
            numbers = zip(*(map(int, re.findall(r"\d+", key)) for _, key in piece), strict=True)
            if not any(column == tuple(range(len(piece))) for column in numbers):
                raise HarnessError(f"{self._folder} lacks an expert between others for {name}; is it complete?")
        return pieces

    def _find(self, parameter: str, where: Mapping[str, Any]) -> Any:
        for name in self._candidates(parameter):
            if name in where:
                return where[name]
        raise HarnessError(f"{self._folder} holds no tensor for {parameter}; is it a checkpoint of this model?")

    def _require(self, key: str, actual: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if actual != shape:
            raise HarnessError(f"{self._folder}: tensor {key} has shape {list(actual)}, the model needs {list(shape)}")

    def _candidates(self, parameter: str) -> list[str]:
        names = [parameter, *([self._aliases[parameter]] if parameter in self._aliases else [])]
        return [n for name in names for n in (name, name.removeprefix(self._prefix), self._prefix + name)]


def _natural(key: str) -> list[tuple[int, str]]:
    """A sort key that puts layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"\.", key)]
