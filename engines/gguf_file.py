"""A GGUF file made into a folder of safetensors: once, a layer at a time, by transformers' own rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from engines import content, shards
from engines.folders import build_once
from harness.api import HarnessError, UnsupportedError

_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_LAYER = re.compile(r"blk\.(\d+)\.")
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def to_folder(path: Path, dtype: str, cache: Path, on_progress: Callable[[int, int], None]) -> Path:
    """The checkpoint in a GGUF file, unpacked into `dtype`, with its configuration and tokenizer.

    `auto` is the file's own float type, and bfloat16 for a quantized file (float32 keeps its values exactly, in
    twice the bytes). At most one layer is in memory, in float32. Raises HarnessError for a file that is damaged or
    lacks tensors, UnsupportedError for what transformers does not read.
    """
    if _SPLIT.search(path.name):
        raise UnsupportedError(f"{path} is one part of a split GGUF file: merge them (llama-gguf-split --merge)")
    reader = _open(path)
    stored = _float_type(reader) if dtype == "auto" else dtype
    needed = sum(int(t.n_elements) for t in reader.tensors) * getattr(torch, stored).itemsize
    digest = content.digest(path, cache / "models" / "contents.json")[:12]
    folder = cache / "models" / f"{path.stem}-{stored}-{digest}"

    def write(temporary: Path) -> None:
        _write(path, reader, getattr(torch, stored), temporary, lambda done: on_progress(done, needed))

    return build_once(folder, "the weights of a GGUF file", needed, write)


def _open(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise HarnessError(f"{path}: GGUF files need gguf: pip install 'offload-harness[gguf]'") from None
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as exc:
        line = str(exc).partition("\n")[0]
        raise HarnessError(f"{path} is not a whole GGUF file ({path.stat().st_size} bytes): {line}") from exc


def _float_type(reader: Any) -> str:
    """That of most bytes; the rest is norms."""
    largest = max(reader.tensors, key=lambda t: int(t.n_bytes))
    return _FLOATS.get(largest.tensor_type.name, "bfloat16")


def _write(path: Path, reader: Any, dtype: torch.dtype, folder: Path, on_bytes: Callable[[int], None]) -> None:
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (ValueError, KeyError, TypeError, OSError, NotImplementedError) as exc:
        line = str(exc).partition("\n")[0]
        raise UnsupportedError(f"{path}: transformers builds no causal model of this GGUF file: {line}") from exc
    tied = set(model.all_tied_weights_keys)
    missing = {name: tuple(p.shape) for name, p in model.named_parameters() if name not in tied}
    shards.write(folder, _layers(path, reader, model, dtype, missing), on_bytes)
    if missing:
        raise UnsupportedError(f"{path}: no tensor of this GGUF file was found for {min(missing)}")
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    config.save_pretrained(folder)
    try:
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    except Exception as exc:  # a tokenizer's parser raises bare ones too
        raise UnsupportedError(f"{path}: transformers cannot read this GGUF file's tokenizer: {exc}") from exc


def _layers(
    path: Path, reader: Any, model: Any, dtype: torch.dtype, missing: dict[str, tuple[int, ...]]
) -> Iterator[dict[str, torch.Tensor]]:
    """The model's tensors, those of a layer together; takes them out of `missing`.

    Names and orders of rows differ between the formats, for each architecture in its way: transformers knows them.
    """
    from gguf import dequantize
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    architecture = str(reader.fields["general.architecture"].contents())
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    names = get_gguf_hf_weights_map(model, processor)
    for _, tensors in groupby(sorted(reader.tensors, key=_layer), key=_layer):
        layer: dict[str, torch.Tensor] = {}  # a processor that merges experts puts them here itself
        for tensor in tensors:
            done = processor.process(
                weights=dequantize(tensor.data, tensor.tensor_type),
                name=tensor.name,
                tensor_key_mapping=names,
                parsed_parameters={"tensors": layer},
            )
            if done.name in names:
                layer[names[done.name]] = torch.from_numpy(done.weights.copy())
        wanted = {name: values.to(dtype) for name, values in layer.items() if name in missing}
        for name, values in wanted.items():
            if tuple(values.shape) != (shape := missing.pop(name)):
                raise HarnessError(f"{path}: {name} has shape {list(values.shape)}, the model needs {list(shape)}")
        if wanted:
            yield wanted


def _layer(tensor: Any) -> int:
    found = _LAYER.match(tensor.name)
    return int(found[1]) if found else -1
