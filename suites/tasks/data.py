"""Where the data of tasks come from: files under a folder, or the Hugging Face hub; what is broken is told."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.api import HarnessError, first_line


class Data:
    """Files under a folder, each with its SHA-256 once it was read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.digests: dict[str, str] = {}

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        return (self._folder / name).is_file()

    def text(self, name: str) -> str:
        """A whole file, every character as it stands. Raises HarnessError."""
        path = self._folder / name
        try:
            content = path.read_bytes()
            found = content.decode("utf-8-sig")
        except FileNotFoundError:
            raise HarnessError(f"{path} is not there: name the folder of the data by --data-dir") from None
        except UnicodeDecodeError as exc:
            raise HarnessError(f"{path} is not UTF-8 (byte {exc.start})") from None
        except OSError as exc:
            raise HarnessError(f"{path} cannot be read: {exc.strerror or exc}") from None
        self.digests[name] = hashlib.sha256(content).hexdigest()
        return found

    def rows(self, name: str, columns: Sequence[str]) -> list[dict[str, str]]:
        """The rows of a CSV file with a header; empty fields are empty texts. Raises HarnessError for what is amiss."""
        path = self._folder / name
        reader = csv.DictReader(io.StringIO(self.text(name), newline=""), strict=True)
        found = []
        try:
            known = reader.fieldnames or ()
            if missing := [column for column in columns if column not in known]:
                raise HarnessError(f"{path} has no column {', '.join(missing)} (it has {', '.join(known)})")
            for row in reader:
                if any(row[column] is None for column in columns):
                    raise HarnessError(f"{path}:{reader.line_num}: the row has too few fields")
                found.append({column: row[column] for column in columns})
        except csv.Error as exc:
            raise HarnessError(f"{path}:{reader.line_num}: {exc}") from None
        if not found:
            raise HarnessError(f"{path} has no rows")
        return found

    def bare_rows(self, name: str, fields: int) -> list[list[str]]:
        """The rows of a CSV file without a header, of so many fields each. Raises HarnessError."""
        path = self._folder / name
        reader = csv.reader(io.StringIO(self.text(name), newline=""), strict=True)
        found = []
        try:
            for row in reader:
                if len(row) != fields:
                    raise HarnessError(f"{path}:{reader.line_num}: expected {fields} fields, found {len(row)}")
                found.append(row)
        except csv.Error as exc:
            raise HarnessError(f"{path}:{reader.line_num}: {exc}") from None
        return found

    def objects(self, name: str, keys: Sequence[str]) -> list[Mapping[str, str]]:
        """The objects of a JSONL file, with a text for each of `keys`. Raises HarnessError for a line that is none."""
        path = self._folder / name
        found: list[Mapping[str, str]] = []
        for number, line in enumerate(self.text(name).split("\n"), 1):
            if line.strip():
                value = _json(line, f"{path}:{number}")
                if not isinstance(value, dict) or any(not isinstance(value.get(key), str) for key in keys):
                    raise HarnessError(f"{path}:{number}: expected an object with texts for {', '.join(keys)}")
                found.append(value)
        if not found:
            raise HarnessError(f"{path} has no lines")
        return found

    def json_object(self, name: str) -> Mapping[str, Any]:
        """A file that is one JSON object. Raises HarnessError."""
        value = _json(self.text(name), str(self._folder / name))
        if not isinstance(value, dict):
            raise HarnessError(f"{self._folder / name} is not a JSON object")
        return value


def from_hub(path: str, name: str | None, split: str) -> Iterable[Mapping[str, Any]]:
    """The rows of a data set on the Hugging Face hub. Raises HarnessError where it cannot be had."""
    try:
        import datasets
    except ImportError:
        raise HarnessError("data from the hub need datasets: pip install 'offload-harness[eval]'") from None
    try:
        rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(path, name, split=split)
    except Exception as exc:  # whatever the hub, its client or a reader raise
        hint = "reach the hub, or name a folder that has them by --data-dir"
        raise HarnessError(f"data set {path} cannot be had: {first_line(exc)}; {hint}") from exc
    return rows


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise HarnessError(f"{where}: not JSON") from None
