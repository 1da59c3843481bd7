"""What a policy's bits cost in accuracy, as far as committed runs have measured it."""

from pathlib import Path
from typing import Any

import yaml

from harness.api import OffloadPolicy

FILE = Path(__file__).with_name("accuracy_costs.yaml")


def accuracy_cost(policy: OffloadPolicy) -> dict[str, Any] | None:
    """What was measured with these bits, or with weights and cache apart where not together; None for exact answers.

    `parts` holds a `kind` with, where it was measured, `points` of LAMBADA accuracy, their `interval` and the relative
    growth of WikiText-2's `perplexity`. `model` names the model of the measurements: another one may lose less or more.
    """
    bits = policy.weight_bits, policy.kv_bits
    if bits == (16, 16):
        return None
    content = yaml.safe_load(FILE.read_text())
    measured = {(cost["weight_bits"], cost["kv_bits"]): cost for cost in content["costs"]}
    apart = [pair for pair in ((bits[0], 16), (16, bits[1])) if pair != (16, 16)]
    parts = []
    for weight_bits, kv_bits in [bits] if bits in measured else apart:
        cost = measured.get((weight_bits, kv_bits), {})
        names = [f"{what} in {n} bits" for what, n in (("weights", weight_bits), ("cache", kv_bits)) if n < 16]
        figures = {name: cost[name] for name in ("points", "interval", "perplexity") if cost}
        parts.append({"kind": " and ".join(names), **figures})
    return {"model": content["model"], "parts": parts}
