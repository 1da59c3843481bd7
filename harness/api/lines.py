"""One line of records.jsonl as a RunRecord, for all who read them."""

from __future__ import annotations

import json

from harness.api.common import SCHEMA_VERSION, HarnessError
from harness.api.record import RunRecord
from harness.api.serial import from_json


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number")


def parse_record(line: bytes, where: str) -> RunRecord:
    """The record on a line. Raises HarnessError, beginning with `where`, for damage or a newer schema."""
    try:
        data = json.loads(line.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError) as exc:
        raise HarnessError(f"{where}: not JSON ({exc}); repair or remove that line") from exc
    version = data.get("schema_version") if isinstance(data, dict) else None
    if type(version) is not int or version < 1:  # JSON's true is no number
        raise HarnessError(f"{where}: not a record, as it has no schema_version; repair or remove that line")
    if version > SCHEMA_VERSION:
        raise HarnessError(
            f"{where}: schema_version {version} is newer than {SCHEMA_VERSION}, the newest known here; update it"
        )
    if version == 1 and isinstance(data.get("model"), dict):
        data["model"].pop("largest_layer_bytes", None)  # which nothing ever read
    try:
        return from_json(RunRecord, data | {"schema_version": SCHEMA_VERSION})
    except (HarnessError, OverflowError) as exc:
        raise HarnessError(f"{where}: {exc}") from exc
