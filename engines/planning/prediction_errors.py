"""How far a prediction may be off: the spread of what was measured, or published, beside such predictions."""

from pathlib import Path
from typing import Any

import yaml

from harness.api import HardwareProfile, OffloadPolicy

FILE = Path(__file__).with_name("errors.yaml")
#: Whose published figures stand in for our engine on a device, where no run has been compared: the same rates.
_STAND_IN = "flexgen_ref"


def prediction_error(throughput: float, engine: str, profile: HardwareProfile, policy: OffloadPolicy) -> dict[str, Any]:
    """The range in which eight of ten such throughputs lay, in token/s, and on what that stands.

    `low_tok_s` and `high_tok_s` are missing where nothing was measured or published. `count` is the number of launches
    or published figures, and `stands_on` says which, in words.
    """
    content = yaml.safe_load(FILE.read_text())
    if profile.device is None and policy.pipeline > 1:
        return {"count": 0, "stands_on": "no run on several ranks has been compared with its prediction"}
    if profile.device is None:
        found = content["measured"]["schedules"][policy.schedule]
        words = f"launches in {policy.schedule} order on hosts of two cores, with rates measured beside each"
    else:
        engines = content["published"].get(profile.name, {})
        found = engines.get(engine) or (engines.get(_STAND_IN) if engine == "offload" else None)
        words = f"published figures of {engine} on this hardware"
        if found is not None and engine not in engines:
            words = "published figures of FlexGen on this hardware; no run of our engine on a device has been compared"
    if found is None:
        return {"count": 0, "stands_on": f"nothing was measured or published to compare with on {profile.name}"}
    low, _, high = (ratio * throughput for ratio in found["ratio"])
    return {"low_tok_s": low, "high_tok_s": high, "count": found["count"], "stands_on": words}
