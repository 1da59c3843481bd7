"""The parsers that read what others wrote, each as a function of bytes that returns, or raises HarnessError."""

import json
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engines.models import gguf_header, safetensors_file
from engines.models.folder_limits import check_numbers
from harness.api import parse_record
from harness.api.record import HarnessError
from harness.batch.format import LineError, parse_line
from harness.common.line_file import LineFile
from harness.suite.config import load_suite
from harness.suite.yaml_source import parse
from reports.records import read_runs

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Parser:
    """`read` takes bytes; `seeds` are valid inputs, and `words` what a mutation may insert."""

    read: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    words: tuple[bytes, ...]


@contextmanager
def _file(content: bytes, name: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        yield path


def _suite(content: bytes) -> None:
    with _file(content, "x.yaml") as path:
        load_suite(path)


def _override(content: bytes) -> None:
    parse(content.decode(errors="replace"), "--set", positions=False)


def _safetensors(content: bytes) -> None:
    with _file(content, "model.safetensors") as path:
        safetensors_file.read_shards(path.parent)


def _index(content: bytes) -> None:
    with _file(content, "model.safetensors.index.json") as path:
        safetensors_file.shard_paths(path.parent)


def _config(content: bytes) -> None:
    with _file(content, "config.json") as path:
        check_numbers(safetensors_file.json_object(path), path)


def _gguf(content: bytes) -> None:
    with _file(content, "model.gguf") as path:
        gguf_header.check(path)


def _batch_line(content: bytes) -> None:
    try:
        parse_line(content, 1, 16, 0)
    except LineError:
        return


def _records(content: bytes) -> None:
    with _file(content, "records.jsonl") as path:
        read_runs([path.parent])


def _torn(content: bytes) -> None:
    """What `mend` leaves is a beginning of the file, or the file and a line feed, and ends in one."""
    with _file(content, "x.jsonl") as path:
        LineFile(path).mend()
        left = path.read_bytes()
        assert not left or left.endswith(b"\n")
        assert content.startswith(left) or left == content + b"\n"


def _record(content: bytes) -> None:
    parse_record(content, "x:1")


_HEADER = json.dumps(
    {"a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}, "__metadata__": {"k": "v"}}
).encode()
_GGUF = b"".join((
    b"GGUF", struct.pack("<IQQ", 3, 1, 2),
    struct.pack("<Q", 17), b"general.alignment", struct.pack("<II", 4, 32),
    struct.pack("<Q", 1), b"t", struct.pack("<IIQ", 9, 8, 2), struct.pack("<Q", 1), b"a", struct.pack("<Q", 2), b"bc",
    struct.pack("<Q", 1), b"w", struct.pack("<IQIQ", 1, 32, 0, 0),
))  # fmt: skip
_NUMBERS = (b"-1", b"0", b"1e999", b"NaN", b"9223372036854775808", b"2147483648", b"1" * 5000, b"0.5", b"true", b"null")
_JSON = (b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\ud800", b"\\u0000", b"\xff", b'""', b"[" * 2000, *_NUMBERS)
_YAML = (b"&a ", b"*a", b"<<: ", b"!!python/object:os.system ", b"? ", b"- ", b"|", b"\t", b"---\n", b"...", *_JSON)
_RECORDS = (ROOT / "tests" / "golden" / "record_v3.jsonl").read_bytes()
_LINES = (
    b'{"prompt": "a", "max_tokens": 3, "stop": ["x"], "n": 2, "logprobs": 1, "seed": 5}',
    b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "logprobs": true}',
    b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": [5, 6], "temperature": 0.5}}',
)

PARSERS = {
    "suite": Parser(
        _suite,
        tuple((ROOT / "suites" / f"{name}.yaml").read_bytes() for name in ("quickstart", "ci_smoke", "cpu_mixture")),
        (*_YAML, b"matrix:", b"policy: ", b"candidates: ", b"limits: none", b"16GiB", b"2min"),
    ),
    "override": Parser(_override, (b"[1, 2]", b"{a: 1GiB}", b"0.5"), _YAML),
    "safetensors": Parser(
        _safetensors,
        (struct.pack("<Q", len(_HEADER)) + _HEADER + bytes(8),),
        (*_JSON, struct.pack("<Q", 1 << 62), b"BF16", b'"data_offsets"', b'"__metadata__"'),
    ),
    "index": Parser(_index, (b'{"weight_map": {"a": "model-00001.safetensors"}}',), (*_JSON, b"../", b"/etc/passwd")),
    "config": Parser(
        _config,
        (b'{"model_type": "opt", "num_hidden_layers": 2, "text_config": {"num_experts": 8}, "vocab_size": 500}',),
        (*_JSON, b'"num_labels": ', b'"n_layer": '),
    ),
    "gguf": Parser(
        _gguf,
        (_GGUF.ljust(-(-len(_GGUF) // 32) * 32, b"\0") + bytes(128),),
        tuple(struct.pack("<Q", n) for n in (0, 1, 9, 1 << 31, 1 << 62, 1 << 63, (1 << 64) - 1))
        + tuple(struct.pack("<I", n) for n in (0, 4, 8, 9, 12, 13, 1 << 31)),
    ),
    "batch line": Parser(_batch_line, _LINES, (*_JSON, b'"prompt"', b'"body": ', b'"url": ', b'"temperature": ')),
    "record": Parser(_record, (_RECORDS.splitlines()[0],), (*_JSON, b'"schema_version": ')),
    "records": Parser(_records, (_RECORDS,), (*_JSON, b"\n", b"\r\n")),
    "torn lines": Parser(_torn, (b'{"a": 1}\n{"b": [2]}\n', b'{"a": 1}\n{"b"'), (*_JSON, b"\n")),
}


def read(parser: Parser, content: bytes) -> bool:
    """Whether the parser takes these bytes. Whatever it raises beside HarnessError is a fault."""
    try:
        parser.read(content)
    except HarnessError as exc:
        errors = str(exc).splitlines()
        assert len({error.partition(":")[0] for error in errors}) == 1, errors  # a suite may have several in its places
        assert all(len(error) < 2000 for error in errors), errors
        return False
    return True
