"""How ranks of tensor parallelism divide a model's linear layers: by transformers' own plan for its architecture."""

import re
from collections.abc import Mapping
from typing import Any

from engines.offload.memory.tensor_shard import Role, TensorShard
from harness.api import ModelShape, UnsupportedError

#: transformers' styles that the engine follows. Embeddings are whole: a lookup reads the rows that it needs.
_ROLES: Mapping[str, Role] = {
    "colwise": "outputs",
    "rowwise": "inputs",
    "replicated_with_grad_allreduce": "whole",
    "embedding_rowwise": "whole",
}
#: Plans for architectures that transformers has none for, by `model_type`.
_OWN_PLANS: Mapping[str, Mapping[str, str]] = {
    "opt": {
        **{f"model.decoder.layers.*.self_attn.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj")},
        "model.decoder.layers.*.self_attn.out_proj": "rowwise",
        "model.decoder.layers.*.fc1": "colwise",
        "model.decoder.layers.*.fc2": "rowwise",
    }
}
#: What attention modules that count their heads call these.
_HEADS, _KV_HEADS = ("num_heads", "num_attention_heads"), ("num_kv_heads", "num_key_value_heads")


class TensorRoles:
    """The roles of transformers' `module` of type `kind`, whose mixtures are divided by whole experts and whose head by
    its vocabulary. Raises UnsupportedError for a plan that is missing or that the engine does not follow."""

    def __init__(self, module: Any, kind: str) -> None:
        plan = {**_OWN_PLANS.get(kind, {}), **(module.tp_plan or {})}
        experts = {_pattern(path) for path, part in module.named_modules() if hasattr(part, "is_transposed")}
        output = module.get_output_embeddings()
        head = next((_pattern(path) for path, part in module.named_modules() if part is output), "")
        self._roles: dict[str, Role] = {}
        for pattern, style in plan.items():
            if any(pattern == each or pattern.startswith(f"{each}.") for each in experts):
                continue
            if style not in _ROLES and pattern != head:
                raise UnsupportedError(
                    f"policy.tensor: transformers divides {kind}'s {pattern} {style}, which engine offload does not"
                )
            self._roles[pattern] = _ROLES.get(style, "whole")
        if not {"outputs", "inputs"} <= set(self._roles.values()):
            raise UnsupportedError(f"policy.tensor: there is no plan for {kind} of how to divide its matrices")
        self._roles[head] = "vocabulary"

    def of(self, path: str) -> Role:
        """The role of the linear layer at a path of the module."""
        return self._roles.get(_pattern(path), "whole")


def divide_heads(module: Any, shape: ModelShape, shard: TensorShard) -> None:
    """Lets attention modules that count their heads count those of a rank."""
    for each in module.modules():
        if not hasattr(each, "layer_idx"):
            continue
        for names, count in ((_HEADS, shape.num_heads), (_KV_HEADS, shape.num_kv_heads)):
            for name in names:
                if getattr(each, name, None) == count:
                    setattr(each, name, count // shard.ranks)


def _pattern(path: str) -> str:
    """A path of a module, as plans name it: without the numbers of layers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
