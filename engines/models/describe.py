"""Describes a model by its configuration alone, for plans: no weights are read, none are downloaded."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from engines.models import checkpoints, folder_limits, hub, shapes
from engines.models.safetensors_file import json_object
from harness.api import DTYPE_BYTES, Dtype, HarnessError, ModelDescription, ModelShape, ModelSpec
from harness.common.words import nearest

#: Refuses a model by the folder of its config.json and its shape.
Refuse = Callable[[Path, ModelShape], None]

_CONFIG = "config.json"
_MAX_CONFIG_BYTES = 16 << 20
#: Kinds of layers, as `layer_types` names them, that keep the keys and values of all earlier tokens.
_ATTENDS = ("full_attention", "attention", "global_attention")
_WINDOWED = ("sliding_attention", "chunked_attention", "local_attention")


def describe(model: ModelSpec, cache: Path, refuse: Refuse | None = None) -> ModelDescription:
    """What a plan needs of `model`; downloads at most its config.json.

    A shipped name (`harness ls models`) is described without torch; anything else by the module that transformers
    builds from its configuration on the meta device. `refuse` raises UnsupportedError for one that the engine of the
    plan cannot run. Raises HarnessError for a model that is not found, and for a configuration that transformers or the
    performance model cannot take.
    """
    if not model.id:
        raise HarnessError("the model's name is empty")
    if model.id in shapes.CATALOGUE:
        made: Dtype = "bfloat16" if model.weights == "dummy" else "float16"
        return ModelDescription(model.id, shapes.CATALOGUE[model.id], _asked(model, made))
    try:
        with TemporaryDirectory() as temporary:
            return _described(model, *_configuration(model, cache, Path(temporary)), refuse)
    except OSError as exc:
        raise HarnessError(f"model {model.id} cannot be read: {exc.filename or exc}: {exc.strerror or ''}") from exc


def _asked(model: ModelSpec, otherwise: Dtype) -> Dtype:
    return otherwise if model.dtype == "auto" else model.dtype


def _configuration(model: ModelSpec, cache: Path, temporary: Path) -> tuple[Path, Dtype | None]:
    """A folder with the model's config.json, made in `temporary` where there is none; and the dtype of its weights,
    where files tell it."""
    path = hub.file_of_package(model.id) if model.id.startswith(hub.PACKAGE) else Path(model.id).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise HarnessError(f"model {model.id}: no such file; a plan reads the header of a local GGUF file")
        from engines.models import gguf_file

        gguf_file.refuse_split(path)
        return temporary, gguf_file.write_config(path, temporary)
    if path.is_dir():
        with suppress(HarnessError):  # weights may be missing or still loading: a plan does not need them
            return path, checkpoints.stored_dtype(path)
        return path, None
    file = path if path.is_file() else _from_hub(model, cache)
    if file.stat().st_size > _MAX_CONFIG_BYTES:
        raise HarnessError(f"{file} is no config.json: it has {file.stat().st_size:,} bytes")
    json_object(file)
    shutil.copyfile(file, temporary / _CONFIG)
    return temporary, None


def _from_hub(model: ModelSpec, cache: Path) -> Path:
    try:
        return hub.config(model, cache)
    except HarnessError as exc:
        hint = nearest(model.id, shapes.CATALOGUE, "`harness ls models` lists shipped names")
        raise HarnessError(f"{exc}; {hint}") from exc


def _described(model: ModelSpec, folder: Path, stored: Dtype | None, refuse: Refuse | None) -> ModelDescription:
    try:
        folder_limits.check_numbers(json_object(folder / _CONFIG), folder / _CONFIG)
        shape = checkpoints.shape_of(folder)
        if refuse is not None:
            refuse(folder, shape)
    except HarnessError as exc:
        # without the temporary folder
        raise type(exc)(f"model {model.id}: {str(exc).replace(f'{folder / _CONFIG}: ', '')}") from exc
    if shape.forward_params <= 0:
        raise HarnessError(
            f"model {model.id} ({shape.family}): the performance model has layers of attention and feed-forward, and "
            f"this one's have {shape.params_per_layer:,} parameters, {shape.attention_params:,} for its heads alone"
        )
    config = checkpoints.full_config(folder)
    named = str(config.get("dtype"))
    dtype = stored or (cast(Dtype, named) if named in DTYPE_BYTES else "float16")
    return ModelDescription(model.id, shape, _asked(model, dtype), tuple(_caveats(config, shape.num_layers)))


def _caveats(config: Mapping[str, Any], layers: int) -> Iterator[str]:
    """What the cost model, which takes equal layers with full attention, does not represent."""
    if config.get("kv_lora_rank"):
        yield (
            "its attention is multi-head latent attention: the plan counts keys and values of every head, where an "
            "engine may cache the latent vectors"
        )
    kinds = Counter(map(str, config.get("layer_types") or []))
    window = config.get("sliding_window")
    windowed = sum(kinds[kind] for kind in _WINDOWED)
    if not kinds and window and config.get("use_sliding_window", True):
        windowed = layers
    if windowed:
        tokens = f"a window of {window} tokens" if window else "a window"
        yield f"{windowed} of {layers} layers attend to {tokens}: the plan counts their KV cache as if they saw all"
    for kind in sorted(set(kinds) - {*_ATTENDS, *_WINDOWED}):
        yield f"{kinds[kind]} of {layers} layers are {kind}: the plan counts them as attention with a KV cache"
    if config.get("first_k_dense_replace") or config.get("mlp_only_layers"):
        yield "some layers are dense and others have experts: the plan takes every layer as their mean"
    if config.get("quantization_config"):
        yield "its checkpoint is quantized: the plan counts float weights, and our engine needs a float checkpoint"
