"""Odd files wherever a user, a run directory, a model folder or the cache names one."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from harness.suite.config import SUITE_KEYS
from tests.barrage import good, odd_files
from tests.barrage.case import EITHER, FAILED, REFUSED, Case

KIND = "files"
_RECORDS = good.lines(good.record())
_LINES = frozenset({1, 2})
_PREDICT = ("--policy", '{"gpu_batch_size": 1}')  # a search would take longer
_VEGA = f"vega-{metadata.version('vl-convert-python')}.js"
_ADD = ("history", "add", "rec", "--db", "sqlite:///new.db")
#: In place of a value, whatever its type is.
WRONG: Mapping[str, Any] = {
    "null": None,
    "empty": "",
    "minus-one": -1,
    "1e308": 1e308,
    "list": [],
    "object": {},
    "long": "x" * 5000,
}


@dataclass(frozen=True)
class Place:
    """A file that `arguments` read (or write, if `content` is None), with its good content.

    The codes: where it is `special` (no file at all), where it is `garbage`, and one more where it is only damaged.
    """

    name: str
    file: str
    content: bytes | None
    arguments: tuple[str, ...]
    accepted: frozenset[int] = frozenset({0})
    garbage: frozenset[int] = REFUSED
    special: frozenset[int] = REFUSED
    torch: bool = False
    environment: Mapping[str, str | None] = field(default_factory=dict)


def _model(file: str, *arguments: str, content: bytes | None = None, **codes: Any) -> Place:
    """A file of the model folder."""
    content = content or good.model_files()[file]
    return Place(file, f"model/{file}", content, arguments or good.OFFLOAD, torch=True, **codes)


_FAKE = (*good.GENERATE, *good.FAKE)
_TRANSFORMERS = (*good.GENERATE, "--model", "model", "--engine", "transformers")
PLACES = (
    Place("suite-validate", "tiny.yaml", good.SUITE, ("validate", "tiny.yaml")),
    Place("suite-run", "tiny.yaml", good.SUITE, ("run", "tiny.yaml", "--dry-run")),
    Place("records-report", "rec/records.jsonl", _RECORDS, ("report", "rec", "--out", "r.csv")),
    Place("records-compare", "rec/records.jsonl", _RECORDS, ("compare", "rec", "aa"), frozenset({0, 5})),
    Place("records-aa", "aa/records.jsonl", _RECORDS, ("compare", "rec", "rec", "--aa", "aa"), frozenset({0, 5})),
    Place("records-add", "rec/records.jsonl", _RECORDS, _ADD),
    Place("records-explain", "rec/records.jsonl", _RECORDS, ("plan", "--explain", "rec")),
    # a last line without a line feed is torn, and goes; what is written through a dangling link is a new file
    Place("records-run", "out/records.jsonl", _RECORDS, good.RUN, garbage=EITHER, special=EITHER),
    # a report lacks the description then, and says so
    Place("suite-beside", "rec/suite.yaml", good.SUITE, ("report", "rec", "--out", "r.csv"), garbage=EITHER,
          special=EITHER),
    Place("input-jsonl", "in.jsonl", good.REQUESTS, (*_FAKE, "--dry-run"), FAILED, _LINES),
    Place("input-txt", "in.txt", b"w3\nw4\n", (*_FAKE, "--dry-run", "--input", "in.txt"), FAILED, FAILED),
    Place("output", "out.jsonl", good.ANSWERS, _FAKE, special=EITHER),
    Place("profile", "hw.yaml", good.PROFILE, (*good.PLAN, *_PREDICT, "--hardware", "hw.yaml"), frozenset({0, 4})),
    Place("history", "h.db", good.history(), ("history", "show", "--db", "sqlite:///h.db")),
    Place("history-report", "h.db", good.history(), ("report", "rec", "--out", "r.csv", "--history", "sqlite:///h.db")),
    # the worker reads it: then its cell fails
    Place("trace", "trace.csv", good.TRACE, ("run", "traced.yaml", *good.RUN[2:]), garbage=_LINES, special=_LINES),
    Place("cache-max-batch", "cache/max_batch.json", b'{"x": []}', ("run", "tuned.yaml", *good.RUN[2:]),
          garbage=EITHER, special=EITHER),
    Place("cache-profile", "cache/hardware-2.yaml", good.PROFILE, (*good.PLAN, *_PREDICT, "--hardware", "local")),
    Place("cache-profile-run", "cache/hardware-2.yaml", good.PROFILE, good.RUN, garbage=EITHER, special=EITHER),
    Place("cache-vega", f"cache/{_VEGA}", b"x", ("report", "rec", "--out", "r.html"), garbage=EITHER, special=EITHER),
    Place("cache-contents", "cache/contents.json", b"{}", good.OFFLOAD, garbage=EITHER, special=EITHER, torch=True),
    # without a compiler nothing is built
    Place("cache-gemm-choices", "cache/gemm_choices.json", b"{}",
          (*good.GENERATE, "--model", "model", "--engine", "offload"),
          garbage=EITHER, special=EITHER, torch=True, environment={"PATH": "/nowhere", "CXX": None}),
    _model("config.json", accepted=FAILED),
    _model("model.safetensors"),
    # where the index is no file, the model has a single shard
    _model("model.safetensors.index.json", content=json.dumps(good.index()).encode(), special=EITHER),
    _model("tokenizer.json", accepted=FAILED),
    _model("tokenizer_config.json", accepted=FAILED, garbage=FAILED, special=FAILED),
    _model("generation_config.json", *_TRANSFORMERS, accepted=FAILED, garbage=FAILED, special=FAILED),
    Place("gguf", "m.gguf", b"GGUF\x03\0\0\0" + bytes(16), (*good.OFFLOAD, "--model", "m.gguf"), REFUSED, torch=True),
)  # fmt: skip
#: Where something is written or made, or where a folder is expected.
WRITTEN = (
    Place("lock", "out/.lock", None, good.RUN, special=EITHER),
    Place("log", "out/logs/a.log", None, good.RUN, special=FAILED),
    Place("logs", "out/logs", None, good.RUN, special=EITHER),
    Place("run-out", "out", None, good.RUN, special=EITHER),
    Place("suite-copy", "out/suite.yaml", None, good.RUN, special=EITHER),
    Place("run-report", "out/report.md", None, ("run", "tiny.yaml", "--out", "out"), special=EITHER),
    Place("search-lock", "cache/max_batch.lock", None, ("run", "tuned.yaml", *good.RUN[2:]), special=EITHER),
    Place("data-dir", "data", None, (*good.RUN, "--data-dir", "data"), special=EITHER),
    Place("wheels", "wheels", None, ("images", "build", "harness", "--wheels", "wheels")),
    Place("report-file", "r.html", None, ("report", "rec", "--out", "r.html"), special=EITHER),
    Place("report-folder", "r", None, ("report", "rec", "--out", "r"), special=EITHER),
    Place("compare-out", "c.md", None, ("compare", "rec", "aa", "--format", "md", "--out", "c.md"),
          special=frozenset({0, 2, 5})),
    Place("compare-junit", "j.xml", None, ("compare", "rec", "aa", "--format", "junit", "--out", "j.xml"),
          special=frozenset({0, 2, 5})),
    Place("plan-cache", "cache", None, (*good.PLAN, *_PREDICT, "--hardware", "local")),
)  # fmt: skip


def cases() -> Iterator[Case]:
    """A case for each place and each odd thing in it, each key of a suite, and each figure of a profile."""
    for place in (*PLACES, *WRITTEN):
        yield from _specials(place)
    for place in PLACES:
        yield from _contents(place)
    # a folder alone: what this command writes to is found out only after it has measured for minutes
    yield Case(KIND, "calibrate-out/folder", ("calibrate", "--out", "rec"))
    yield from _suite_keys()
    yield from _profile_figures()


def _case(place: Place, odd: str, codes: frozenset[int], put: Any) -> Case:
    def prepare(folder: Path) -> None:
        if place.torch:
            good.write_model(folder)
        put(folder / place.file)

    return Case(
        KIND, f"{place.name}/{odd}", place.arguments, prepare, codes, environment=place.environment, torch=place.torch
    )


def _specials(place: Place) -> Iterator[Case]:
    for odd in odd_files.SPECIAL:
        yield _case(place, odd, place.special, partial(odd_files.put_special, name=odd))


def _contents(place: Place) -> Iterator[Case]:
    assert place.content is not None
    for odd, make in odd_files.GARBAGE.items():
        zeros = odd == "nuls" and place.name == "output"  # what a power cut may leave of answers: none
        yield _case(place, odd, EITHER if zeros else place.garbage, partial(odd_files.put, content=make(place.content)))
    yield _case(place, "3-gb", place.garbage, odd_files.put_sparse)
    for odd, make in odd_files.DAMAGED.items():
        codes = place.garbage | place.accepted
        yield _case(place, odd, codes, partial(_put_damaged, make=make, content=place.content))


def _put_damaged(path: Path, make: Any, content: bytes) -> None:
    """Made when it is needed: some are 10 MB."""
    odd_files.put(path, make(content))


def _suite_keys() -> Iterator[Case]:
    """A suite with a value of a wrong type at each key that there is."""
    suite = yaml.safe_load(good.SUITE)
    for key in SUITE_KEYS:
        for wrong, value in WRONG.items():
            text = json.dumps(suite | {key: value}, indent=1).encode()
            put = partial(_put_suite, text=text)
            yield Case(KIND, f"suite-key/{key}/{wrong}", ("validate", "tiny.yaml"), put, EITHER)


def _put_suite(folder: Path, text: bytes) -> None:
    odd_files.put(folder / "tiny.yaml", text)


def _profile_figures() -> Iterator[Case]:
    """A profile with a wrong value in place of each figure."""
    profile = yaml.safe_load(good.PROFILE)
    command = (*good.PLAN, *_PREDICT, "--hardware", "hw.yaml")
    for path in leaves(profile):
        for wrong, value in WRONG.items():
            text = json.dumps(replaced(profile, path, value), indent=1).encode()
            name = f"profile-figure/{'.'.join(map(str, path))}/{wrong}"
            yield Case(KIND, name, command, partial(_put_profile, text=text), frozenset({0, 2, 4}))


def _put_profile(folder: Path, text: bytes) -> None:
    odd_files.put(folder / "hw.yaml", text)


def leaves(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths of all values below `data` that hold no others; of a list only its first item's."""
    if isinstance(data, dict) and data:
        for key, value in data.items():
            yield from leaves(value, (*path, key))
    elif isinstance(data, list) and data:
        yield from leaves(data[0], (*path, 0))
    else:
        yield path


def replaced(data: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """A copy of `data` with `value` at `path`."""
    if not path:
        return value
    copy = data.copy()
    copy[path[0]] = replaced(data[path[0]], path[1:], value)
    return copy
