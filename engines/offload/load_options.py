"""The ways to load a model that its job's plan decides between: weights plain or in twelve bits, each with its plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch

from engines.offload.backend.base import Backend, Gemms, LoadRequest
from engines.offload.memory.expert_usage import ExpertUsage
from engines.offload.memory.layout import WeightTile, model_tiles
from engines.offload.memory.plan import MemoryPlan, MemoryRequest
from engines.offload.memory.storage import Panels, WeightStorage, storages
from engines.offload.model.meta_model import MetaModel
from engines.offload.weights import convert
from engines.offload.weights.checkpoint_reader import CheckpointReader
from engines.offload.weights.gemm import GemmBackend, with_plain_panels
from engines.offload.weights.kept_choices import KeptChoices
from engines.offload.weights.kept_usage import KeptUsage
from harness.api import DTYPE_BYTES, Dtype, InfeasibleError


@dataclass(frozen=True)
class Option:
    """One way to load: what multiplies, by how the policy has weights stored, and what that needs and how it fits.

    `gemm` is that of the decoder layers' weights.
    """

    gemms: Gemms
    gemm: GemmBackend
    meta_model: MetaModel
    kept_usage: KeptUsage
    needs: MemoryRequest
    plan: MemoryPlan

    @property
    def format(self) -> str:
        """How weights are kept, as in `policy.weight_format`."""
        stored = self.gemm.stored
        return "exact12" if isinstance(stored, Panels) and stored.exact12 else "plain"


def options(request: LoadRequest, backend: Backend) -> list[Option]:
    """All ways that fit. Raises InfeasibleError, with the numbers of the last, where none does."""
    layers, outside, cached = storages(request.model.dtype, request.policy)
    model_of = cache(partial(_meta_model, request))
    found: list[Option] = []
    refusal = None
    for gemms in backend.choose_gemms(layers, outside):
        gemm = gemms[layers]
        meta_model = model_of(gemm.dtype)
        backend.require(meta_model)
        tiles = model_tiles(meta_model.matrices, gemm.stored, gemms[outside].stored, backend.tile_values)
        compute_bytes, policy, job, shape = DTYPE_BYTES[gemm.dtype], request.policy, request.job, request.shape
        attention_bytes = backend.kernels.attention_memory(
            cached, shape, job.max_sequence, gemm.dtype, policy.value_sparsity < 1
        )
        kept_usage = KeptUsage(job.cache, request.model, meta_model.experts)
        needs = MemoryRequest(
            shape=shape,
            tiles=tiles,
            cache=cached,
            compute_bytes=compute_bytes,
            cast_bytes=0,
            small_bytes=backend.bound_values(meta_model) * compute_bytes,
            attention_bytes=attention_bytes,
            max_sequence=job.max_sequence,
            mean_sequence=job.mean_sequence,
            usage=ExpertUsage.of(meta_model.matrices, shape, kept_usage.read()),
            mean_new=request.mean_new,
        )
        needs = with_tiles(needs, tiles, with_plain_panels(gemms.values()))
        try:
            plan = backend.plan(needs, gemm, partial(unwritten_bytes, request, meta_model, tiles))
            found.append(Option(gemms, gemm, meta_model, kept_usage, needs, plan))
        except InfeasibleError as exc:
            refusal = exc
    if refusal is not None and not found:
        raise refusal
    return found


def choose_option(among: Sequence[Option], request: LoadRequest) -> tuple[Option, str]:
    """The way whose plan is fastest, as it was chosen before on this machine for the same model, policy, limits and
    lengths, and why in words: nothing where nothing was to be chosen."""
    if len(among) == 1 or _holds_all(among[0], request):
        return among[0], ""
    kept, job = KeptChoices(request.job.cache), request.job
    key = ("weight format", request.model.digest or request.model.path, request.policy, request.limits,
           (job.max_sequence, job.mean_sequence, job.mean_new))  # fmt: skip
    name, _, why = (kept.get(*key) or "").partition(": ")
    for option in among:
        if option.format == name and why:
            return option, why
    best = max(among, key=lambda option: option.plan.tokens_per_s)
    if not best.plan.tokens_per_s:  # the next load may be able to measure
        return best, f"weights are kept {best.format}, since the disk could not be measured"
    rates = ", ".join(f"{option.format} {option.plan.tokens_per_s:.3g}" for option in among)
    why = f"weights are kept {best.format}, by the plans for this job (token/s: {rates})"
    kept.keep(f"{best.format}: {why}", *key)
    return best, why


def with_tiles(
    needs: MemoryRequest, tiles: Sequence[WeightTile], gemms: Mapping[WeightStorage, GemmBackend]
) -> MemoryRequest:
    """The same with other tiles, and the buffers that these are unpacked or cast into: each way to multiply keeps one
    of its largest tile."""
    cast_bytes = sum(
        max((tile.shape[0] * tile.shape[1] for tile in tiles if tile.stored == stored), default=0) * gemm.cast_bytes
        for stored, gemm in gemms.items()
    )
    return replace(needs, tiles=tiles, cast_bytes=cast_bytes)


def unwritten_bytes(request: LoadRequest, meta_model: MetaModel, tiles: Sequence[WeightTile]) -> int:
    """Bytes that the conversion of the checkpoint will write to disk."""
    return convert.unwritten_bytes(request.model, *source_and_layout(request, meta_model, tiles), request.job.cache)


def source_and_layout(
    request: LoadRequest, meta_model: MetaModel, tiles: Sequence[WeightTile]
) -> tuple[CheckpointReader, convert.CheckpointLayout]:
    """What is converted, and into what."""
    source = CheckpointReader(request.model, meta_model.prefix, meta_model.aliases, meta_model.transforms)
    return source, convert.CheckpointLayout(meta_model.matrices, tiles, meta_model.tables, meta_model.small)


def _meta_model(request: LoadRequest, dtype: Dtype) -> MetaModel:
    path, shape, compute = Path(request.model.path), request.model.shape, getattr(torch, dtype)
    whole, stage = MetaModel(path, shape, compute, tensor=request.shard), request.stage
    return whole if stage is None or stage.is_whole else MetaModel(path, shape, compute, (stage, whole.flow))


def _holds_all(option: Option, request: LoadRequest) -> bool:
    """Whether all weights are in memory beside all sequences of the policy: fewer bytes would gain nothing."""
    return len(option.plan.resident) == len(option.needs.tiles) and option.plan.sequences == request.policy.block_size
