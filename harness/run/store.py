"""The run directory: append-only records, keyed by fingerprint and repeat, that survive kill -9."""

import json
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from harness.api import FINAL_STATUSES, HarnessError, RunRecord, RunSpec, parse_record, to_json
from harness.common.files import inside, os_errors, replace_with
from harness.common.line_file import LineFile
from harness.common.locks import locked
from harness.common.planted import refuse_planted
from harness.common.regular_file import MAX_BYTES, lines_of, open_regular, parse_json
from harness.suite.shareable import shareable_text

RECORDS = "records.jsonl"


class Store:
    """Appends RunRecords to `<out>/records.jsonl`, the file `path`, and reads them."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.path = out / RECORDS
        self._file = LineFile(self.path)
        self._lock: IO[bytes] | None = None

    def open(self, fresh: bool = False) -> None:
        """Creates the directory, locks it against a second harness and mends a truncated last line.

        Raises HarnessError where the directory cannot be written or is in use, or a link in it leads out of it.
        """
        with os_errors(f"cannot write to {self.out}", "choose another folder with --out"):
            refuse_planted(self.out)
            (self.out / "logs").mkdir(parents=True, exist_ok=True)
            busy = f"{self.out} is in use by another harness; wait for it or choose another --out"
            self._lock = locked(self.out / ".lock", busy)
        with os_errors(f"cannot open {self.path}", "choose another --out"):
            if self.path.exists() and not self.path.is_file():
                raise HarnessError(f"{self.path} is not a regular file; move it away or choose another --out")
            for name in ("logs", RECORDS, "suite.yaml"):  # the folder may be somebody else's, with links
                inside(self.out, name)
            if fresh:
                self._file.set_aside()
            self._file.mend()

    def set_aside(self, cells: Collection[RunSpec]) -> None:
        """Sets the records of these cells aside, by fingerprint and by name: those under earlier settings too.

        The others stay. Raises HarnessError where a file cannot be written.
        """
        fingerprints, names = {cell.fingerprint() for cell in cells}, {cell.name for cell in cells}

        def chosen(line: bytes) -> bool:
            with suppress(ValueError, LookupError, TypeError):  # `records` says what is wrong with it
                row = parse_json(line)
                return row["fingerprint"] in fingerprints or row["spec"]["name"] in names
            return False

        with os_errors(f"cannot set records of {self.path} aside", "free space, then run the same command again"):
            self._file.set_aside(chosen)
            self._file.mend()

    def close(self) -> None:
        """Releases the directory."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def append(self, record: RunRecord) -> None:
        """Adds one record durably. Raises HarnessError when the disk is full or not writable."""
        line = _encoded(record)
        if len(line) > MAX_BYTES:  # which nobody could read again, nor the records beside it
            reason = f"its record takes {len(line) >> 20} MiB, more than {MAX_BYTES >> 20}: measure fewer requests"
            line = _encoded(replace(record, status="error", reason=reason, requests=(), served=()))
        advice = "free space or choose another --out, then run the same command again to go on"
        with os_errors(f"cannot record to {self.path}", advice):
            self._file.append(line)

    def records(self) -> Iterator[RunRecord]:
        """All complete records in order. Raises HarnessError naming the line that cannot be read."""
        if not self.path.exists():
            return
        with os_errors(f"cannot read {self.path}", "mend it or choose another --out"), open_regular(self.path) as file:
            for number, line in enumerate(lines_of(file), 1):
                if not line.endswith(b"\n"):
                    return
                if line.strip():
                    yield parse_record(line, f"{self.path}:{number}")

    def latest(self) -> dict[tuple[str, int], RunRecord]:
        """The last record of every launch, by fingerprint and repeat."""
        return {(r.fingerprint, r.repeat): r for r in self.records()}


def _encoded(record: RunRecord) -> bytes:
    return json.dumps(to_json(record), allow_nan=False, separators=(",", ":")).encode()


def is_done(record: RunRecord, cell: RunSpec) -> bool:
    """Whether `record` settles its launch of `cell`, which may have been relabelled or given more time since.

    Launches that were interrupted or failed for want of disk or by an unclassified error are tried again,
    unless the cell expects just that; so are those that ran out of less time than there is now.
    """
    if record.status == "timeout" and record.spec.timeout_s < cell.timeout_s:
        return False
    return record.status in FINAL_STATUSES or (record.status == cell.expect and record.status != "interrupted")


def write_suite_copy(source: Path, out: Path) -> None:
    """Keeps the suite as run beside its records, without secrets. Raises HarnessError where it cannot be written."""
    with os_errors(f"cannot write to {out}", "free space, or choose another folder with --out"):
        replace_with(out / "suite.yaml", shareable_text(source))
