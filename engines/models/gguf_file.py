"""A GGUF file made into a folder of safetensors: once, a layer at a time, by transformers' own rules."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from engines.common.folders import QUANTIZED, build_once
from engines.models import file_digest as content
from engines.models import shards
from harness.api import HarnessError, UnsupportedError, first_line

_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_LAYER = re.compile(r"blk\.(\d+)\.")
#: Part of a folder's name: raise it when the same file is unpacked into something else.
_RECIPE = 2
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def to_folder(path: Path, dtype: str, cache: Path, on_progress: Callable[[int, int], None]) -> Path:
    """The checkpoint in a GGUF file, unpacked into `dtype`, with its configuration and tokenizer.

    `auto` is the file's own float type, and bfloat16 for a quantized file (float32 keeps its values exactly, in
    twice the bytes). At most one layer is in memory, in float32. Raises HarnessError for a file that is damaged or
    lacks tensors, UnsupportedError for what transformers does not read.
    """
    refuse_split(path)
    reader = _open(path)
    stored = _float_type(reader) if dtype == "auto" else dtype
    needed = sum(int(t.n_elements) for t in reader.tensors) * getattr(torch, stored).itemsize
    digest = content.digest(path, cache)[:12]
    folder = cache / "models" / f"{path.stem}-{stored}-{digest}-{_RECIPE}"

    def write(temporary: Path) -> None:
        with TemporaryDirectory() as alone:  # transformers would take what lies beside it, of other models too, as its
            (Path(alone) / path.name).symlink_to(path.resolve())
            _write(path, alone, reader, getattr(torch, stored), temporary, lambda done: on_progress(done, needed))

    return build_once(folder, "the weights of a GGUF file", needed, write)


def refuse_split(path: Path) -> None:
    """Raises UnsupportedError for one part of a file that was split."""
    if _SPLIT.search(path.name):
        raise UnsupportedError(f"{path} is one part of a split GGUF file: merge them (llama-gguf-split --merge)")


def _open(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise HarnessError(f"{path}: GGUF files need gguf: pip install 'offload-harness[gguf]'") from None
    try:
        reader = GGUFReader(path)
    except OSError as exc:
        raise HarnessError(f"{path} cannot be read: {exc.strerror}") from exc
    except (ValueError, IndexError, KeyError, OverflowError) as exc:
        raise HarnessError(f"{path} is not a whole GGUF file ({path.stat().st_size} bytes): {first_line(exc)}") from exc
    if not reader.tensors or "general.architecture" not in reader.fields:
        raise HarnessError(f"{path} is a GGUF file without a model")
    return reader


def _float_type(reader: Any) -> str:
    """That of most bytes; the rest is norms."""
    largest = max(reader.tensors, key=lambda t: int(t.n_bytes))
    return _FLOATS.get(largest.tensor_type.name, "bfloat16")


def _quantized_as(reader: Any) -> str:
    """The type of most bytes, or nothing for a float type."""
    sizes: Counter[str] = Counter()
    for tensor in reader.tensors:
        sizes[tensor.tensor_type.name] += int(tensor.n_bytes)
    (name, _), *_ = sizes.most_common()
    return "" if name in _FLOATS else name


def _write(
    path: Path, alone: str, reader: Any, dtype: torch.dtype, folder: Path, on_bytes: Callable[[int], None]
) -> None:
    try:
        config = AutoConfig.from_pretrained(alone, gguf_file=path.name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        unpack = _Unpacker(path, reader, model)
    except Exception as exc:  # whatever transformers meets in a file's metadata
        raise UnsupportedError(
            f"{path}: transformers builds no causal model of this GGUF file: {first_line(exc)}"
        ) from exc
    _refuse_scaled_positions(path, reader, config)
    shards.write(folder, unpack.layers(dtype), on_bytes)
    if unpack.missing:
        raise UnsupportedError(f"{path}: no tensor of this GGUF file was found for {min(unpack.missing)}")
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    setattr(config, QUANTIZED, _quantized_as(reader))
    config.save_pretrained(folder)
    try:
        AutoTokenizer.from_pretrained(alone, gguf_file=path.name).save_pretrained(folder)
    except Exception as exc:  # a tokenizer's parser raises bare ones too
        raise UnsupportedError(
            f"{path}: transformers cannot read this GGUF file's tokenizer: {first_line(exc)}"
        ) from exc


def _refuse_scaled_positions(path: Path, reader: Any, config: Any) -> None:
    """transformers passes over how a GGUF file scales rotary frequencies, and would answer wrongly without a word."""
    architecture = reader.fields["general.architecture"].contents()
    scaling = reader.fields.get(f"{architecture}.rope.scaling.type")
    scaled = scaling is not None and scaling.contents() != "none" and architecture != "gpt-oss"
    if scaled or any(tensor.name.startswith(("rope_freqs", "rope_factors")) for tensor in reader.tensors):
        raise UnsupportedError(
            f"{path} scales its rotary frequencies, which transformers does not read from GGUF files; "
            "use the model's safetensors"
        )
    base = reader.fields.get(f"{architecture}.rope.freq_base")
    known = getattr(config.get_text_config(), "rope_parameters", None) or {}
    bases = [rope.get("rope_theta") for rope in (known, *known.values()) if isinstance(rope, Mapping)]
    if base is not None and not any(b is not None and math.isclose(b, base.contents(), rel_tol=1e-6) for b in bases):
        raise UnsupportedError(f"{path}: transformers does not read its rotary base {base.contents()}")


class _Unpacker:
    """The tensors of a GGUF file as `model` has them.

    Names and orders of rows differ between the formats, for each architecture in its way: transformers knows them.
    `missing`: the shapes of the model's tensors that have not been found yet.
    """

    def __init__(self, path: Path, reader: Any, model: Any) -> None:
        from gguf import dequantize

        self._path = path
        self._dequantize = dequantize
        self._tensors = sorted(reader.tensors, key=_layer)
        architecture = str(reader.fields["general.architecture"].contents())
        self._processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
        self._names = get_gguf_hf_weights_map(model, self._processor)
        tied = set(model.all_tied_weights_keys)
        self.missing = {name: tuple(t.shape) for name, t in model.state_dict().items() if name not in tied}

    def layers(self, dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
        """Those of a layer together."""
        for _, tensors in groupby(self._tensors, key=_layer):
            found = {name: values.to(dtype) for name, values in self._layer(tensors).items() if name in self.missing}
            for name, values in found.items():
                if tuple(values.shape) != (shape := self.missing.pop(name)):
                    raise HarnessError(
                        f"{self._path}: {name} has shape {list(values.shape)}, the model needs {list(shape)}"
                    )
            if found:
                yield found

    def _layer(self, tensors: Iterable[Any]) -> dict[str, torch.Tensor]:
        layer: dict[str, torch.Tensor] = {}  # a processor that merges experts puts them here itself
        for tensor in tensors:
            try:
                done = self._processor.process(
                    weights=self._dequantize(tensor.data, tensor.tensor_type),
                    name=tensor.name,
                    tensor_key_mapping=self._names,
                    parsed_parameters={"tensors": layer},
                )
            except Exception as exc:  # types that gguf cannot unpack, tensors that transformers does not expect
                raise UnsupportedError(f"{self._path}: {tensor.name} cannot be unpacked: {first_line(exc)}") from exc
            if done.name in self._names:
                layer[self._names[done.name]] = torch.from_numpy(done.weights.copy())
        return layer


def _layer(tensor: Any) -> int:
    found = _LAYER.match(tensor.name)
    return int(found[1]) if found else -1
