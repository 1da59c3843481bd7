"""What fewer bits cost in accuracy, in words: for plans, and for the notes of launches whose bits were searched."""

from collections.abc import Mapping
from typing import Any


def accuracy_words(cost: Mapping[str, Any]) -> str:
    """One line for a cost as engines.planning.accuracy_costs has it, with the model and the data of the measurement."""
    said = []
    for part in cost["parts"]:
        if "points" not in part:
            said.append(f"{part['kind']}: not measured")
            continue
        low, high = part["interval"]
        said.append(
            f"{part['kind']}: {part['points']:+.1f} points of LAMBADA ({low:+.1f} to {high:+.1f}), "
            f"{part['perplexity']:+.1%} perplexity of WikiText-2"
        )
    return f"accuracy, on {cost['model']}: {'; '.join(said)}"
