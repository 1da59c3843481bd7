"""Reads task data from files under a folder or from the Hugging Face hub, and validates it."""

import csv
import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.api import HarnessError, first_line
from harness.common.packages import install_extra
from harness.common.regular_file import parse_json, read_regular

#: The most of a data file: all of a task's questions are held in memory.
_MAX_BYTES = 1 << 30


class Data:
    """Files under a folder; `digests` has the SHA-256 of each file read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.digests: dict[str, str] = {}

    def has(self, name: str) -> bool:
        """Whether the folder has the file."""
        return (self._folder / name).is_file()

    def text(self, name: str) -> str:
        """The text of a file, without newline conversion. Raises HarnessError where it cannot be read as UTF-8."""
        path = self._folder / name
        try:
            content = read_regular(path, _MAX_BYTES)
            text = content.decode("utf-8-sig")
        except FileNotFoundError:
            raise HarnessError(f"{path} does not exist: name the data folder with --data-dir") from None
        except UnicodeDecodeError as exc:
            raise HarnessError(f"{path} is not UTF-8 (byte {exc.start})") from None
        except OSError as exc:
            raise HarnessError(f"{path} cannot be read: {exc.strerror or exc}") from None
        self.digests[name] = hashlib.sha256(content).hexdigest()
        return text

    def rows(self, name: str, columns: Sequence[str]) -> list[dict[str, str]]:
        """The rows of a CSV file with a header; an empty field is "". Raises HarnessError for an invalid file."""
        path = self._folder / name
        reader = csv.DictReader(io.StringIO(self.text(name), newline=""), strict=True)
        rows = []
        try:
            header = reader.fieldnames or ()
            if missing := [column for column in columns if column not in header]:
                raise HarnessError(f"{path} has no column {', '.join(missing)} (it has {', '.join(header)})")
            for row in reader:
                if any(row[column] is None for column in columns):
                    raise HarnessError(f"{path}:{reader.line_num}: the row has too few fields")
                rows.append({column: row[column] for column in columns})
        except csv.Error as exc:
            raise HarnessError(f"{path}:{reader.line_num}: {exc}") from None
        if not rows:
            raise HarnessError(f"{path} has no rows")
        return rows

    def bare_rows(self, name: str, fields: int) -> list[list[str]]:
        """The rows of a CSV file without a header, each of `fields` fields. Raises HarnessError for an invalid file."""
        path = self._folder / name
        reader = csv.reader(io.StringIO(self.text(name), newline=""), strict=True)
        rows = []
        try:
            for row in reader:
                if len(row) != fields:
                    raise HarnessError(f"{path}:{reader.line_num}: expected {fields} fields, found {len(row)}")
                rows.append(row)
        except csv.Error as exc:
            raise HarnessError(f"{path}:{reader.line_num}: {exc}") from None
        return rows

    def objects(self, name: str, keys: Sequence[str]) -> list[Mapping[str, str]]:
        """The objects of a JSONL file, with a string for each of `keys`. Raises HarnessError for any other line."""
        path = self._folder / name
        objects: list[Mapping[str, str]] = []
        for number, line in enumerate(self.text(name).split("\n"), 1):
            if line.strip():
                value = _json(line, f"{path}:{number}")
                if not isinstance(value, dict) or any(not isinstance(value.get(key), str) for key in keys):
                    raise HarnessError(f"{path}:{number}: expected an object with strings for {', '.join(keys)}")
                objects.append(value)
        if not objects:
            raise HarnessError(f"{path} has no lines")
        return objects

    def json_object(self, name: str) -> Mapping[str, Any]:
        """The JSON object of a file. Raises HarnessError for any other content."""
        value = _json(self.text(name), str(self._folder / name))
        if not isinstance(value, dict):
            raise HarnessError(f"{self._folder / name} is not a JSON object")
        return value


def from_hub(path: str, name: str | None, split: str) -> Iterable[Mapping[str, Any]]:
    """The rows of a data set on the Hugging Face hub. Raises HarnessError where it cannot be loaded."""
    try:
        import datasets
    except ImportError:
        raise HarnessError(f"data from the hub needs the package datasets: {install_extra('eval')}") from None
    try:
        rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(path, name, split=split)
    except Exception as exc:  # the hub, its client and the readers raise anything
        hint = "connect to the hub, or name a folder that has the data with --data-dir"
        raise HarnessError(f"data set {path} cannot be loaded: {first_line(exc)}; {hint}") from exc
    return rows


def _json(text: str, location: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        raise HarnessError(f"{location}: not JSON") from None
