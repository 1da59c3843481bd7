"""Records of one kind as JSON files in a folder that outlives the server."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from pydantic import TypeAdapter, ValidationError

from harness.common.files import os_errors
from harness.common.regular_file import read_regular


class _Identified(Protocol):
    @property
    def id(self) -> str: ...


Record = TypeVar("Record", bound=_Identified)


def open_records(
    folder: Path, pattern: str, kind: TypeAdapter[Record], what: str, note: Callable[[str], None]
) -> list[Record]:
    """The records in the files of `folder`, which is made where there is none, by a glob `pattern`. A file that is
    none, or is of another name than its record's id, is left alone; `note` hears that it does not describe `what`.
    Raises HarnessError where the folder cannot be used.
    """
    records = []
    with os_errors(f"cannot use {folder}", "choose another --files"):
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(pattern):
            try:
                record = kind.validate_json(read_regular(path))
            except (OSError, ValidationError):
                record = None
            if record is not None and record.id == path.stem:
                records.append(record)
            else:
                note(f"{path} does not describe {what}; it is left alone")
    return records
