"""Prepares a checkpoint from any source on this machine, and verifies that it is complete."""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from engines.common.folders import QUANTIZED, build_once
from engines.models import dummy_weights, file_digest, folder_limits, hub, shapes
from engines.models.safetensors_file import Shard, json_object, read_shards, shard_paths
from harness.api import Dtype, HarnessError, LocalModel, ModelShape, ModelSpec, UnsupportedError, from_json, to_json
from harness.common.system import drop_from_page_cache

_LAYER = re.compile(r"(.*?\.\d+)\.")
_UNLIMITED_CONTEXT = 1 << 20  # tokens, for a model without a maximum position, such as one with ALiBi
#: Raise it when `shape_of` tells the same configuration differently.
_SHAPE_RECIPE = 1
_DTYPES: Mapping[str, Dtype] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def prepare(model: ModelSpec, cache: Path, on_progress: Callable[[int, int], None] | None = None) -> LocalModel:
    """Downloads, converts or generates `model` as needed and describes it. Writes only under `cache`.

    `on_progress` gets (bytes written, total bytes) while weights are generated or converted. Raises HarnessError for an
    unknown id, a damaged checkpoint, pickled weights without `weights: pickle`, no network or a full disk;
    UnsupportedError for quantized safetensors.
    """
    try:
        return _prepare(model, cache, on_progress or (lambda done, total: None))
    except OSError as exc:  # reading the model's files; writers to the cache raise their own HarnessError
        raise HarnessError(f"model {model.id} cannot be read: {exc.filename or exc}: {exc.strerror or ''}") from exc


def _prepare(model: ModelSpec, cache: Path, on_progress: Callable[[int, int], None]) -> LocalModel:
    if model.revision is not None and (model.weights == "dummy" or Path(model.id).expanduser().exists()):
        raise HarnessError(f"model {model.id}: only a hub id has revisions; leave model.revision out")
    folder = _folder(model, cache, on_progress)
    local = _describe(folder, shapes.shape(model.id) if model.weights == "dummy" else None, cache)
    if model.dtype not in ("auto", local.dtype):
        raise HarnessError(
            f"model {model.id} stores {local.dtype}, not {model.dtype}; "
            "leave model.dtype out, or set policy.compute_dtype"
        )
    return local


def check(folder: Path) -> None:
    """Raises HarnessError for a checkpoint whose files are missing, damaged or not as long as their headers say."""
    json_object(folder / "config.json")
    read_shards(folder)


def require_same(model: LocalModel) -> None:
    """Raises HarnessError where `model`, as another host describes it, is not here: no checkpoint at its path, or one
    whose configuration or files differ, by their headers."""
    folder = Path(model.path)
    if not (folder / "config.json").is_file():
        raise HarnessError(f"there is no checkpoint in {folder}: put the same files there on every host")
    if _digest(json_object(folder / "config.json"), read_shards(folder)) != model.digest:
        raise HarnessError(
            f"{folder} has another checkpoint than rank 0's host: put the same files there on every host"
        )


def evict(path: str | Path) -> None:
    """Drops a folder's files from the page cache, for a cold start under a memory limit."""
    for file in Path(path).rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            try:
                with suppress(OSError):  # a read-only file system has nothing to sync
                    os.fsync(fd)
                drop_from_page_cache(fd)
            finally:
                os.close(fd)


def content_digest(model: LocalModel, cache: Path, on_progress: Callable[[int, int], None]) -> str:
    """A digest of everything that determines a model's output: weights, configuration, tokenizer and templates.

    Reads each file once and keeps its digest in `cache`. `on_progress` gets (bytes read, total bytes).
    """
    folder = Path(model.path)
    metadata = {path for pattern in hub.METADATA for path in folder.glob(pattern) if path.exists()}
    files = sorted(metadata.union(shard_paths(folder)))
    total, done = sum(file.stat().st_size for file in files), 0

    def read(count: int) -> None:
        nonlocal done
        done += count
        on_progress(done, total)

    digests = [f"{file.name}:{file_digest.digest(file, cache, read)}" for file in files]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:16]


def largest_tensor_bytes(path: str | Path) -> int:
    """Bytes of the largest tensor of a model folder, as stored. Raises HarnessError for a damaged checkpoint."""
    return max(tensor.nbytes for shard in read_shards(Path(path)) for tensor in shard.tensors)


def stored_dtype(folder: Path) -> Dtype | None:
    """The dtype that most of a checkpoint's bytes are stored in; None for a quantized one.

    Raises HarnessError for a checkpoint whose files are missing, damaged or not as long as their headers say.
    """
    stored = _bytes_by_dtype(read_shards(folder)).most_common(1)
    return _DTYPES.get(stored[0][0]) if stored else None


def _bytes_by_dtype(shards: list[Shard]) -> Counter[str]:
    dtypes: Counter[str] = Counter()
    for shard in shards:
        for tensor in shard.tensors:
            dtypes[tensor.dtype] += tensor.nbytes
    return dtypes


def _describe(folder: Path, shape: ModelShape | None, cache: Path) -> LocalModel:
    """Verifies and describes a checkpoint from its headers; with `shape` None the shape comes from its config."""
    folder_limits.check_files(folder)
    config = json_object(folder / "config.json")
    folder_limits.check_numbers(config, folder / "config.json")
    shards = read_shards(folder)
    dtypes = _bytes_by_dtype(shards)
    if not dtypes:
        raise HarnessError(f"{folder} holds no tensors")
    stored = max(dtypes, key=lambda d: dtypes[d])
    if stored not in _DTYPES or "quantization_config" in config:
        raise UnsupportedError(f"model {folder} is quantized (its weights are {stored}); use a float checkpoint")
    return LocalModel(
        path=str(folder.resolve()),
        shape=shape or _kept_shape(folder, cache),
        weight_bytes=dtypes.total(),
        dtype=_DTYPES[stored],
        digest=_digest(config, shards),
        quantized_as=str(config.get(QUANTIZED, "")),
    )


def _digest(config: Mapping[str, Any], shards: list[Shard]) -> str:
    """A cheap content hash: the configuration and each shard's name, size and header, without the tensors."""
    fields = {key: value for key, value in config.items() if key not in ("transformers_version", "_name_or_path")}
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    for shard in shards:
        digest.update(f"{shard.path.name}:{shard.size}:".encode() + shard.header)
    return digest.hexdigest()[:16]


def _kept_shape(folder: Path, cache: Path) -> ModelShape:
    """As `shape_of`, which builds the model: once for a configuration and a transformers."""
    name = f"shape {_SHAPE_RECIPE} by transformers {metadata.version('transformers')}"
    kept = file_digest.derived(folder / "config.json", name, cache, lambda: json.dumps(to_json(shape_of(folder))))
    with suppress(HarnessError, ValueError):  # a damaged cache
        return from_json(ModelShape, json.loads(kept))
    return shape_of(folder)


def shape_of(folder: Path) -> ModelShape:
    """The shape of a model folder by its configuration, for any attention architecture that transformers supports.

    Raises HarnessError for any other architecture.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from engines.common.meta_device import NothingDrawn

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"), NothingDrawn():
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        return _shape(config, model)
    except Exception as exc:  # configuration classes run code and raise anything
        raise HarnessError(
            f"{folder / 'config.json'}: transformers builds no causal model with attention layers from it: "
            f"{type(exc).__name__}: {' '.join(str(exc).split())[:300]}"
        ) from exc


def full_config(folder: Path) -> dict[str, Any]:
    """A model folder's configuration with its architecture's defaults; of one with several parts, the text model's.

    Raises whatever transformers does for a configuration that `shape_of` refuses.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    text: dict[str, Any] = config.get_text_config().to_dict()
    return {"dtype": config.dtype, "quantization_config": getattr(config, "quantization_config", None)} | text


def _shape(config: Any, model: Any) -> ModelShape:
    text = config.get_text_config()
    layers = text.num_hidden_layers
    active_experts = getattr(text, "num_experts_per_tok", None) or 1
    layered = [p for name, p in model.named_parameters() if _LAYER.match(name)]
    # a parameter of three dimensions stacks the experts' matrices
    idle = sum(p.numel() - p.numel() // len(p) * active_experts for p in layered if p.ndim == 3)
    matrices = sum(p.numel() for p in layered if p.ndim in (2, 3)) - idle
    ffn = next((v for k in ("intermediate_size", "ffn_dim", "n_inter", "n_inner") if (v := getattr(text, k, None))), 0)
    return ModelShape(
        family=str(config.model_type),
        num_layers=layers,
        hidden=text.hidden_size,
        ffn=ffn or 4 * text.hidden_size,
        num_heads=text.num_attention_heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        vocab=text.vocab_size,
        max_context=getattr(text, "max_position_embeddings", None) or _UNLIMITED_CONTEXT,
        params_per_layer=matrices // layers,
        params_total=sum(p.numel() for p in model.parameters()),
        params_idle=idle,
    )


def _folder(model: ModelSpec, cache: Path, on_progress: Callable[[int, int], None]) -> Path:
    """A folder with the model's safetensors: the user's folder, or one in `cache`."""
    if model.weights == "dummy":
        return _dummy(model, cache, on_progress)
    path = hub.file_of_package(model.id) if model.id.startswith(hub.PACKAGE) else Path(model.id).expanduser()
    if path.suffix == ".gguf":
        from engines.models import gguf_file

        gguf_file.refuse_split(path)
        file = path if path.is_file() else hub.file(model, cache)
        return gguf_file.to_folder(file, model.dtype, cache, on_progress)
    if model.weights == "pickle":
        from engines.models import pickled

        folder = path if path.is_dir() else hub.snapshot(model, cache, "*.bin")
        return pickled.to_folder(folder, cache, on_progress)
    return path if path.is_dir() else hub.snapshot(model, cache, "*.safetensors")


def _dummy(model: ModelSpec, cache: Path, on_progress: Callable[[int, int], None]) -> Path:
    """The folder of a seeded random checkpoint, built once even by concurrent processes."""
    config = shapes.config_kwargs(model.id)
    dtype = "bfloat16" if model.dtype == "auto" else model.dtype
    recipe = json.dumps([config, dummy_weights.SEED, dummy_weights.RECIPE], sort_keys=True)
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:8]
    folder = cache / "models" / f"{model.id.replace('/', '--')}-{dtype}-{digest}"
    if folder.is_dir():
        return folder
    plan = dummy_weights.plan(config, dtype)
    return build_once(folder, "dummy weights", plan.total_bytes, partial(dummy_weights.write, plan, on_progress))
