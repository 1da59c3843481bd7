"""What a loaded engine holds and has moved, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from engines.offload.loaded_model import LoadedModel


@dataclass(frozen=True)
class EngineStats:
    """Counts and bytes since the load, but for `passes`: those of the last run.

    `num_kv_blocks` are all blocks of the cache, `offloaded_kv_blocks` those in host memory or on disk beside it.
    `pass_weight_bytes`: what one pass streams. `kv_bytes_read` and `kv_bytes_written`: of offloaded KV blocks.
    `activation_rows`, and of them `activation_rows_on_disk`: rows that passed between layers.
    """

    passes: int
    tile_bytes: tuple[int, ...]
    resident_tiles: int
    ring_slots: int
    pass_weight_bytes: int
    weight_bytes_read: int
    num_kv_blocks: int
    free_kv_blocks: int
    offloaded_kv_blocks: int
    kv_bytes_read: int
    kv_bytes_written: int
    activation_rows: int
    activation_rows_on_disk: int


def stats_of(loaded: LoadedModel) -> EngineStats:
    """The statistics of a loaded model."""
    offloaded, activations = loaded.cache.offloaded, loaded.activation_offload
    return EngineStats(
        passes=loaded.timeline.passes,
        tile_bytes=tuple(tile.nbytes for tile in loaded.tiles),
        resident_tiles=len(loaded.resident),
        ring_slots=loaded.stream.slots,
        pass_weight_bytes=sum(tile.span for tile in loaded.streamed),
        weight_bytes_read=loaded.stream.bytes_read,
        num_kv_blocks=loaded.cache.num_blocks,
        free_kv_blocks=loaded.cache.num_free_blocks,
        offloaded_kv_blocks=0 if offloaded is None else offloaded.num_blocks,
        kv_bytes_read=0 if offloaded is None else offloaded.bytes_read,
        kv_bytes_written=0 if offloaded is None else offloaded.bytes_written,
        activation_rows=0 if activations is None else activations.rows,
        activation_rows_on_disk=0 if activations is None else activations.rows_on_disk,
    )
