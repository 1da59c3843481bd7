"""A layer's operations as NanoFlow schedules them: what each needs, what it waits for, into how many parts it is cut.

Source: NanoFlow (Zhu et al. 2025), section 4 and table 2. A layer's weights may come from disk, which is ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from engines.models.shapes import shape
from engines.planning.interference import Interference
from harness.api import LayerTimes, ModelShape
from harness.common.published import published_rows

#: By operation the resource that bounds it, what of the same rows it waits for, and the most nano-batches: NanoFlow
#: cuts KQV and attention into four, the rest into two. Weights are read for all rows. Predecessors stand first.
_LAYER: Mapping[str, tuple[str, tuple[str, ...], int]] = {
    "ReadWeights": ("disk", (), 1),
    "GEMM-KQV": ("compute", ("ReadWeights",), 4),
    "DecodeAttention": ("memory", ("GEMM-KQV",), 4),
    "PrefillAttention": ("compute", ("GEMM-KQV",), 4),
    "GEMM-O": ("compute", ("DecodeAttention", "PrefillAttention"), 2),
    "AllReduce-O": ("network", ("GEMM-O",), 2),
    "GEMM-UG": ("compute", ("AllReduce-O",), 2),
    "GEMM-D": ("compute", ("GEMM-UG",), 2),
    "AllReduce-D": ("network", ("GEMM-D",), 2),
}
#: Streaming multiprocessors of an A100, and those that give network kernels 92 % of their peak. Source: NanoFlow.
_MULTIPROCESSORS, _NETWORK, _NETWORK_PERFORMANCE = 108, 35, 0.92
#: Rows of a pass of its table 2.
NANOFLOW_ROWS = 2048
#: Nano-batches without overlap lengthen a pass by so much. Source: NanoFlow's ablation (figure 13).
PUBLISHED_CUT = 1.132


@dataclass(frozen=True)
class LayerOperation:
    """An operation of one layer: `seconds` of the whole batch with all units to itself.

    `after` are operations of the same layer, `after_layer` of the layer before, that it waits for, of the same rows.
    `cut`: by what factor it takes longer in so many parts, all together; 1 if missing.
    """

    name: str
    kind: str
    seconds: float
    after: tuple[str, ...]
    after_layer: tuple[str, ...]
    most_parts: int
    cut: Mapping[int, float] = field(default_factory=dict)


def layer_operations(
    seconds: Mapping[str, float], cut: Mapping[str, Mapping[int, float]] | None = None
) -> list[LayerOperation]:
    """The operations that take any of these `seconds`, by name, in an order in which they can run. `cut`: by kind."""
    there = [name for name in _LAYER if seconds.get(name)]

    def waits_for(name: str) -> tuple[str, ...]:
        """What an operation waits for where some are missing: what these would wait for."""
        found = [(before,) if before in there else waits_for(before) for before in _LAYER[name][1]]
        return tuple(dict.fromkeys(before for names in found for before in names))

    last = [name for name in there if _LAYER[name][0] != "disk"][-1]
    return [
        LayerOperation(
            name,
            _LAYER[name][0],
            seconds[name],
            waits_for(name),
            (last,) if name == "GEMM-KQV" else (),
            _LAYER[name][2],
            (cut or {}).get(_LAYER[name][0], {}),
        )
        for name in there
    ]


def published_layer(cut: float = 1.0) -> list[LayerOperation]:
    """A layer of NanoFlow's table 2, by its measured times: Llama-2-70B on 8 A100 80 GB, 2048 rows a pass.

    An all-reduce follows O and another D, each with half of the table's communication. `cut`: by what factor an
    operation takes longer in nano-batches.
    """
    layers = shape("meta-llama/Llama-2-70b-hf").num_layers
    seconds = {row["op"]: float(row["measured_ms"]) / 1e3 / layers for row in published_rows("nanoflow_a100")}
    sent = seconds.pop("Communication")
    seconds |= {"AllReduce-O": sent / 2, "AllReduce-D": sent / 2}
    return layer_operations(seconds, {kind: {2: cut, 4: cut} for kind in ("compute", "memory", "network")})


def published_interference(memory: Mapping[float, float] | None = None) -> Interference:
    """What our record of NanoFlow has of interference: the network's kernels by multiprocessors. `memory`: points of
    decode attention, of which it has none; without them attention gains nothing beside products."""
    return Interference({"network": network_points(), "memory": tuple((memory or {}).items())})


def network_points() -> tuple[tuple[float, float], ...]:
    """The performance of the network's kernels by units, as published."""
    return ((_NETWORK / _MULTIPROCESSORS, _NETWORK_PERFORMANCE),)


def measured_layer(shape: ModelShape, times: LayerTimes) -> list[LayerOperation]:
    """A layer of a model by times that were measured. Up and gate count as one operation. Experts are multiplied for
    all nano-batches at once, as it takes all of them to know which are needed."""
    queries = shape.hidden * shape.num_heads * shape.head_dim
    gated = round(shape.forward_stored / (shape.hidden * shape.ffn)) % 3 == 0
    down = shape.forward_params // (3 if gated else 2)
    weights = {
        "GEMM-KQV": shape.attention_params - queries,
        "GEMM-O": queries,
        "GEMM-UG": shape.forward_params - down,
        "GEMM-D": down,
    }
    seconds = {name: count * times.weight_s for name, count in weights.items()}
    seconds |= {"DecodeAttention": times.attention_s, "ReadWeights": times.read_s}
    operations = layer_operations(seconds, {"compute": times.cut})
    whole = ("GEMM-UG", "GEMM-D") if shape.params_idle else ()
    return [replace(one, most_parts=1) if one.name in whole else one for one in operations]
