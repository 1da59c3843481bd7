"""Records that somebody wrote by hand: hostile texts, other schemas, and a wrong value at every field."""

import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.barrage import good
from tests.barrage.case import Case
from tests.barrage.inputs_files import WRONG, leaves, replaced
from tests.barrage.odd_files import put

KIND = "records"
_FORMULA = '=HYPERLINK("http://x","y")'
HOSTILE: Mapping[str, str] = {
    "html": "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "markdown": "| a | [l](javascript:1) ![i](//x) `c`\n# t",
    "escapes": "\x1b]0;title\x07\x1b[2J\x1b[31mred\x9b31m\r",
    "formula": _FORMULA,
    "formula-after-a-tab": "\t" + _FORMULA,
    "upwards": "../../x",
    "absolute": "/dev/full",
    "nul": "a\0b",
    "two-lines": "one\ntwo\u2028three",
    "backwards": "\u202egnp.exe",
    "lone-surrogate": "\ud800",
    "template": "{{ 7 * 7 }}{% for i in range(9**9) %}{% endfor %}",
    "5000-letters": "x" * 5000,
    "300000-letters": "x" * 300_000,  # hours for a pattern that takes the square of a text's length
    "100000-slashes": "://" * 100_000,
    "empty": "",
}
#: Fields that reports show or make names of files from.
_NAMES = (
    *(("spec", name) for name in ("name", "suite", "engine", "image", "launcher")),
    ("spec", "model", "id"),
    ("spec", "model", "revision"),
    ("spec", "workload", "trace"),
    ("reason",), ("log",), ("command",), ("started_at",), ("fingerprint",),
    ("load", "compute_dtype"),
    ("memory", "method"),
    ("model", "path"), ("model", "digest"), ("model", "shape", "family"),
    ("requests", 0, "id"), ("requests", 0, "digest"),
    ("measurements", 0, "name"), ("measurements", 0, "note"),
    ("provenance", "machine", "cpu"), ("provenance", "git", "commit"), ("provenance", "python"),
)  # fmt: skip
_VERSIONS: Mapping[str, Any] = {
    "zero": 0,
    "minus-one": -1,
    "99": 99,
    "text": "3",
    "null": None,
    "true": True,
    "half": 2.5,
    "2-to-70": 2**70,
    "list": [3],
}
_REPORT = ("report", "rec")
#: Commands that read records, and the codes of those that they take.
COMMANDS: Mapping[str, tuple[tuple[str, ...], frozenset[int]]] = {
    "report": (_REPORT, frozenset({0})),
    "compare": (("compare", "rec", "aa", "--format", "md", "--out", "c.md"), frozenset({0, 1, 5})),
    "against": (("compare", "rec", "--against", "fake", "--format", "json"), frozenset({0, 5})),
    "add": (("history", "add", "rec", "--db", "sqlite:///new.db"), frozenset({0})),
    "explain": (("plan", "--explain", "rec", "--hardware", "laptop_cpu"), frozenset({0})),
}


def cases() -> Iterator[Case]:
    """Mutations of a good record."""
    record = good.record()
    for command, (words, codes) in COMMANDS.items():
        for name, version in _VERSIONS.items():
            row = record | {"schema_version": version}
            yield _case(f"version/{name}/{command}", words, row, frozenset({2}))
        bare = {key: value for key, value in record.items() if key != "schema_version"}
        yield _case(f"version/none/{command}", words, bare, frozenset({2}))
        for name, changes in _whole(record).items():
            yield _case(f"whole/{name}/{command}", words, changes, codes | {2})
    for path in _NAMES:
        for name, text in HOSTILE.items():
            row = replaced(record, path, text)
            yield _case(f"hostile/{'.'.join(map(str, path))}/{name}", _REPORT, row, frozenset({0, 2}))
    for path in leaves(record):
        for wrong, value in WRONG.items():
            name = f"field/{'.'.join(map(str, path))}/{wrong}"
            # one command for each: over all fields every command meets every kind of value
            command = sorted(COMMANDS)[zlib.crc32(name.encode()) % len(COMMANDS)]
            words, codes = COMMANDS[command]
            yield _case(f"{name}/{command}", words, replaced(record, path, value), codes | {2})


def _whole(record: dict[str, Any]) -> Mapping[str, Any]:
    """Records that are wrong as a whole."""
    times = [1e308, -1e308, 0.0]
    requests = [record["requests"][0] | {"token_times_s": times}] * 3
    return {
        "list": [record],
        "text": "record",
        "nothing": {},
        "only-a-version": {"schema_version": record["schema_version"]},
        "unknown-field": record | {"colour": "red"},
        "no-requests": record | {"requests": []},
        "impossible-times": record | {"requests": requests},
        "figures-of-1e308": record | {"metrics": dict.fromkeys(record["metrics"], 1e308)},
        "figures-of-minus-one": record | {"metrics": dict.fromkeys(record["metrics"], -1.0)},
        "figures-of-zero": record | {"metrics": dict.fromkeys(record["metrics"], 0.0)},
        "no-figures": record | {"metrics": {}},
        "ten-thousand-measurements": record | {"measurements": record["measurements"] * 1000},
        "failed": record | {"status": "error", "reason": "x" * 100_000},
    }


def _case(name: str, words: tuple[str, ...], row: Any, codes: frozenset[int]) -> Case:
    return Case(KIND, name, words, partial(_put, row=row), codes)


def _put(folder: Path, row: Any) -> None:
    put(folder / "rec" / "records.jsonl", good.lines(row))
