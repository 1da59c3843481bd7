"""Unpacks a GGUF file into a folder of safetensors: once, layer by layer, by transformers' conversion rules."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache as cache_calls
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from engines.common.folders import QUANTIZED, build_once
from engines.common.meta_device import NothingDrawn
from engines.models import file_digest, folder_limits, shards
from harness.api import Dtype, HarnessError, UnsupportedError, first_line
from harness.common.packages import install_extra

_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_LAYER = re.compile(r"blk\.(\d+)\.")
#: Part of the folder's name: raise it when the same file is unpacked differently.
_RECIPE = 2
_FLOATS: Mapping[str, Dtype] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def to_folder(path: Path, dtype: str, cache: Path, on_progress: Callable[[int, int], None]) -> Path:
    """Unpacks the checkpoint of a GGUF file to `dtype`, with its configuration and tokenizer, and returns the folder.

    `auto` is the file's float type, or bfloat16 for a quantized file (float32 would keep its values exactly, in twice
    the bytes). Holds at most one layer in memory, in float32. Raises HarnessError for a damaged or incomplete file,
    UnsupportedError for a file that transformers cannot read.
    """
    opened = cache_calls(lambda: _open(path))  # parsing a header takes seconds: not where all is known
    stored = dtype
    if dtype == "auto":
        stored = file_digest.derived(path, "float type", cache, lambda: _float_type(opened()))
        stored = stored if stored in _FLOATS.values() else _float_type(opened())
    digest = file_digest.digest(path, cache)[:12]
    folder = cache / "models" / f"{path.stem}-{stored}-{digest}-{_RECIPE}"
    if folder.is_dir():
        return folder
    reader = opened()
    needed = sum(int(t.n_elements) for t in reader.tensors) * getattr(torch, stored).itemsize

    def write(temporary: Path) -> None:
        with _isolated(path) as isolated:
            _write(path, isolated, reader, getattr(torch, stored), temporary, lambda done: on_progress(done, needed))

    return build_once(folder, "the weights of a GGUF file", needed, write)


def write_config(path: Path, folder: Path) -> Dtype:
    """Writes the configuration in a GGUF file's header to `folder`/config.json, and returns the dtype that `to_folder`
    would unpack to. Reads no weights. Raises HarnessError as `to_folder` does."""
    reader = _open(path)
    with _isolated(path) as isolated:
        try:
            config = AutoConfig.from_pretrained(isolated, gguf_file=path.name, trust_remote_code=False)
        except Exception as exc:  # transformers raises anything for metadata that it does not expect
            raise UnsupportedError(f"{path}: transformers reads no configuration from it: {first_line(exc)}") from exc
    config.save_pretrained(folder)
    return _float_type(reader)


@contextmanager
def _isolated(path: Path) -> Iterator[str]:
    """A folder with a link to the file alone: transformers also reads what lies beside a GGUF file, which may belong to
    another model."""
    with TemporaryDirectory() as folder:
        (Path(folder) / path.name).symlink_to(path.resolve())
        yield folder


def refuse_split(path: Path) -> None:
    """Raises UnsupportedError for a part of a split GGUF file."""
    if _SPLIT.search(path.name):
        raise UnsupportedError(f"{path} is a part of a split GGUF file: merge the parts (llama-gguf-split --merge)")


def _open(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise HarnessError(f"{path}: GGUF files need gguf: {install_extra('gguf')}") from None
    from engines.models import gguf_header

    gguf_header.check(path)
    try:
        reader = GGUFReader(path)
    except OSError as exc:
        raise HarnessError(f"{path} cannot be read: {exc.strerror}") from exc
    except (ValueError, IndexError, KeyError, OverflowError) as exc:
        raise HarnessError(f"{path} is not a whole GGUF file ({path.stat().st_size} bytes): {first_line(exc)}") from exc
    if not reader.tensors or "general.architecture" not in reader.fields:
        raise HarnessError(f"{path} is a GGUF file without a model")
    return reader


def _float_type(reader: Any) -> Dtype:
    """The float type of the largest tensor (the others may be norms), or bfloat16 for a quantized one."""
    largest = max(reader.tensors, key=lambda t: int(t.n_bytes))
    return _FLOATS.get(largest.tensor_type.name, "bfloat16")


def _quantized_as(reader: Any) -> str:
    """The type that holds the most bytes; empty for a float type."""
    sizes: Counter[str] = Counter()
    for tensor in reader.tensors:
        sizes[tensor.tensor_type.name] += int(tensor.n_bytes)
    (name, _), *_ = sizes.most_common()
    return "" if name in _FLOATS else name


def _write(
    path: Path, isolated: str, reader: Any, dtype: torch.dtype, folder: Path, on_bytes: Callable[[int], None]
) -> None:
    try:
        config = AutoConfig.from_pretrained(isolated, gguf_file=path.name, trust_remote_code=False)
        folder_limits.check_numbers(config.to_dict(), path)
        with torch.device("meta"), NothingDrawn():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        unpacker = _Unpacker(path, reader, model)
    except HarnessError:
        raise
    except Exception as exc:  # transformers raises anything for metadata that it does not expect
        raise UnsupportedError(
            f"{path}: transformers builds no causal model of this GGUF file: {first_line(exc)}"
        ) from exc
    _refuse_scaled_positions(path, reader, config)
    shards.write(folder, unpacker.layers(dtype), on_bytes)
    if unpacker.missing:
        raise UnsupportedError(f"{path}: this GGUF file has no tensor for {min(unpacker.missing)}")
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    setattr(config, QUANTIZED, _quantized_as(reader))
    config.save_pretrained(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(isolated, gguf_file=path.name, trust_remote_code=False)
        tokenizer.save_pretrained(folder)
    except Exception as exc:  # a tokenizer's parser raises anything, bare Exception included
        raise UnsupportedError(
            f"{path}: transformers cannot read this GGUF file's tokenizer: {first_line(exc)}"
        ) from exc


def _refuse_scaled_positions(path: Path, reader: Any, config: Any) -> None:
    """Raises UnsupportedError for rotary scaling or bases that transformers ignores in GGUF files: its output would be
    silently wrong."""
    architecture = reader.fields["general.architecture"].contents()
    scaling = reader.fields.get(f"{architecture}.rope.scaling.type")
    scaled = scaling is not None and scaling.contents() != "none" and architecture != "gpt-oss"
    if scaled or any(tensor.name.startswith(("rope_freqs", "rope_factors")) for tensor in reader.tensors):
        raise UnsupportedError(
            f"{path} scales its rotary frequencies, which transformers does not read from GGUF files; "
            "use the model's safetensors"
        )
    base = reader.fields.get(f"{architecture}.rope.freq_base")
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    bases = [rope.get("rope_theta") for rope in (parameters, *parameters.values()) if isinstance(rope, Mapping)]
    if base is not None and not any(b is not None and math.isclose(b, base.contents(), rel_tol=1e-6) for b in bases):
        raise UnsupportedError(f"{path}: transformers does not read its rotary base {base.contents()}")


class _Unpacker:
    """Converts the tensors of a GGUF file to the names and layouts of `model`.

    Names and row orders differ between the formats by architecture; transformers' tensor processors map them.
    `missing` maps the model's tensors that have not been unpacked yet to their shapes.
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
        """Yields tensors by name, layer by layer. Raises HarnessError for a shape that the model does not have."""
        for _, tensors in groupby(self._tensors, key=_layer):
            layer = {name: values.to(dtype) for name, values in self._layer(tensors).items() if name in self.missing}
            for name, values in layer.items():
                if tuple(values.shape) != (shape := self.missing.pop(name)):
                    raise HarnessError(
                        f"{self._path}: {name} has shape {list(values.shape)}, the model needs {list(shape)}"
                    )
            if layer:
                yield layer

    def _layer(self, tensors: Iterable[Any]) -> dict[str, torch.Tensor]:
        layer: dict[str, torch.Tensor] = {}  # a processor that merges experts adds them here itself
        for tensor in tensors:
            try:
                processed = self._processor.process(
                    weights=self._dequantize(tensor.data, tensor.tensor_type),
                    name=tensor.name,
                    tensor_key_mapping=self._names,
                    parsed_parameters={"tensors": layer},
                )
            except Exception as exc:  # a type that gguf cannot unpack, or a tensor that transformers does not expect
                raise UnsupportedError(f"{self._path}: {tensor.name} cannot be unpacked: {first_line(exc)}") from exc
            if processed.name in self._names:
                layer[self._names[processed.name]] = torch.from_numpy(processed.weights.copy())
        return layer


def _layer(tensor: Any) -> int:
    match = _LAYER.match(tensor.name)
    return int(match[1]) if match else -1
