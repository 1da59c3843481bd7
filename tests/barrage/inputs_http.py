"""Requests to `harness serve` that are no requests, or hardly, and folders of files and batches that somebody wrote."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.barrage import good
from tests.barrage.ask import ASKS, form, request
from tests.barrage.case import EITHER, Case, nothing
from tests.barrage.odd_files import SPECIAL, put, put_special

KIND = "serve"
_ASK = f'exec {good.PYTHON} -m tests.barrage.ask "$@"'
_COMMAND = ("serve", *good.FAKE, "--memory", "1GiB", "--port", "0", "--files", "served", "--drain", "5")
_LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "w3", "max_tokens": 2}}\n'
_WAIT = b""
_LIST = request("GET", "/v1/files")


def _completion(body: bytes) -> bytes:
    return request("POST", "/v1/completions", body)


def _chat(**settings: Any) -> bytes:
    body = {"messages": [{"role": "user", "content": "w3"}], "max_tokens": 2} | settings
    return request("POST", "/v1/chat/completions", json.dumps(body).encode())


def _batch(**settings: Any) -> bytes:
    body = {"input_file_id": "FILE", "endpoint": "/v1/completions", "completion_window": "24h"} | settings
    return request("POST", "/v1/batches", json.dumps(body).encode())


def _settings(**settings: Any) -> bytes:
    return _completion(json.dumps({"prompt": "w3", "max_tokens": 2} | settings).encode())


def _answered(content: bytes) -> tuple[bytes, ...]:
    """A batch of a file, awaited, and what was answered."""
    return form(content), _batch(), _WAIT, _LIST, request("GET", "/v1/files/FILE/content")


_FORM = "Content-Type: multipart/form-data; boundary"
_DIGITS = "0" * 8 + "1" + "0" * 5000
_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
#: One after the other, to a server each.
_ASKS: Mapping[str, Sequence[bytes]] = {
    # what is no HTTP
    "http/noise": (bytes(range(256)) * 8,),
    "http/tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),),
    "http/version-2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",),
    "http/no-host": (b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n",),
    "http/head-of-100-kib": (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (100 << 10),),
    "http/ten-thousand-heads": (request("GET", "/v1/models", b"", *(f"X{i}: {i}" for i in range(10_000))),),
    "http/length-negative": (_completion(b"{}").replace(b"LENGTH", b"-1"),),
    "http/length-of-5000-digits": (_completion(b"{}").replace(b"LENGTH", b"9" * 5000),),
    "http/two-lengths": (_completion(b"{}").replace(b"LENGTH", b"2\r\nContent-Length: 7"),),
    "http/chunks-of-nonsense": (
        _completion(b"zz\r\n{}\r\n").replace(b"Content-Length: LENGTH", b"Transfer-Encoding: chunked"),
    ),
    "http/method": tuple(request(method, "/v1/completions") for method in ("DELETE", "HEAD", "NONSENSE", "OPTIONS")),
    "http/paths": tuple(
        request("GET", path) for path in (
            "/%00", "/..%2f..%2fetc/passwd", "//", "/v1/models/%ff%fe", "/v1/models/%1b[31m", "/v1/files/%00",
            "/v1/files/..%2f..%2fx/content", "/v1/batches/%ed%a0%80", "/page.css/..", "/%",
        )
    ),
    "http/headers": tuple(
        request("GET", "/v1/models", b"", header) for header in (
            "Authorization: \xff\xfe", "X-Request-Id: \x1b[31m", f"X-Request-Id: {'x' * 5000}", "Origin: null",
            "Origin: http://[", "Accept-Encoding: \x00", "Range: bytes=-9-9", "Cookie: " + "a=b; " * 5000,
        )
    ),
    "http/hosts": tuple(
        request("GET", "/v1/models").replace(b"Host: localhost", b"Host: " + host)
        for host in (b"[", b"[::1", b"\xff", b"localhost:99999999", b"a" * 5000, b"")
    ),
    # bodies
    "body/empty": (_completion(b""),),
    "body/nested": (_completion(b"[" * 100_000),),
    "body/nested-objects": (_completion(b'{"prompt": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001),),
    "body/not-utf-8": (_completion(b'{"prompt": "\xff\xfe"}'),),
    "body/surrogates": tuple(
        request("POST", path, body)
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/batches")
        for body in (b'{"prompt": "\\ud800"}', b'{"\\ud800": 1}', b'{"model": "\\ud800", "prompt": "w3"}')
    ),
    "body/numbers": tuple(
        _completion(b'{"prompt": "w3", "%s": %s}' % (key, number))
        for key in (b"max_tokens", b"temperature", b"seed", b"n", b"logprobs", b"top_k", b"stream", b"stop")
        for number in (b"NaN", b"-1", b"1e999", b"9" * 5000, b"true", b"[]", b"{}", b"null")
    ),
    "body/17-mib": (_completion(b'{"prompt": "%s"}' % (b"w" * (17 << 20))),),
    "body/million-keys": (_completion(b"{%s}" % b", ".join(b'"k%d": 1' % i for i in range(1_000_000))),),
    "body/million-ids-that-are-none": (_completion(b'{"prompt": [%s 1]}' % (b'"w", ' * 3_000_000)),),
    "body/million-keys-of-a-message": (_chat(messages=[{f"k{i}": 1 for i in range(1_000_000)}]),),
    "body/prompts-by-the-hundred-thousand": (_settings(prompt=["w3"] * 100_000),),
    "body/prompts-that-are-none": tuple(_settings(prompt=prompt) for prompt in ([[]], [[1], "w3"], [1, "w"], [[[1]]])),
    "body/prompt-too-long": (_settings(prompt="w3 " * 100_000),),
    "body/ids": tuple(_settings(prompt=ids) for ids in ([-1], [2**63], [1.5], [True], [10**9])),
    "body/streams": tuple(
        _settings(stream=stream, stream_options=options)
        for stream in (True, 1, 1.0, "yes")
        for options in (None, [], {"a": 1}, {"include_usage": "yes"}, {"include_usage": True})
    ),
    "body/stream-of-echo": (_settings(stream=True, echo=True, logprobs=2), _settings(echo=True, logprobs=20, n=3)),
    "body/models": tuple(_settings(model=model) for model in (5, [], "", "x" * 100_000, "\x1b[31m", "a\nb")),
    "body/tokenize": tuple(
        request("POST", "/tokenize", body)
        for body in (b"", b"[]", b"{}", b'{"prompt": 5}', b'{"prompt": ""}', b"[" * 9999)
    ),
    "body/forms": tuple(
        _chat(response_format=wanted) for wanted in (
            5, {}, {"type": "json_schema"}, {"type": "nonsense"}, _SCHEMA, {"type": "text", "json_schema": 5},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": 5}},
        )
    ),
    "body/chats": tuple(
        _chat(messages=messages) for messages in (
            [], [5], [{}], "w3", [{"role": "robot", "content": "w"}], [{"role": "user", "content": None}],
            [{"role": "user", "content": [{"type": "text", "text": "\0"}]}], [{"role": "user", "content": ""}] * 10_000,
        )
    ),
    # files
    "file/no-form": (request("POST", "/v1/files", b"x"), request("POST", "/v1/files", b"", f"{_FORM}=")),
    "file/edges": tuple(
        request("POST", "/v1/files", b"--x\r\n\r\n", f"{_FORM}={edge}")
        for edge in ("", "x", '"', "\xff", "x" * 5000)
    ),
    "file/parts": tuple(
        request("POST", "/v1/files", b"--x\r\n%s\r\n--x--\r\n" % part, f"{_FORM}=x")
        for part in (
            b"\r\n", b"Content-Disposition: form-data\r\n\r\n", b"Content-Disposition: x; name=\xff\r\n\r\nx",
            b'Content-Disposition: form-data; name="file"; filename=""\r\n\r\nx',
            b"X: " + b"x" * 100_000 + b"\r\n\r\nx",
            b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch',
            b'Content-Disposition: form-data; name="\x1b[31m"\r\n\r\nx',
        )
    ),
    "file/names": (
        *(
            form(_LINE, name)
            for name in ("../../x", "/dev/full", "a\0b", "\x1b[31m", "\u202egnp.exe", "x" * 20_000, "")
        ),
        _LIST,
    ),
    "file/purposes": tuple(form(_LINE, purpose=purpose) for purpose in ("", "fine-tune", "x" * 5000, "\x1b[31m")),
    "file/pages": tuple(
        request("GET", f"/v1/{what}?{query}")
        for what in ("files", "batches")
        for query in (
            f"limit={_DIGITS}", "limit=-1", "limit=1e3", "limit=%D9%A3", "limit=", "after=%00", "after=x", "order=up",
            "purpose=%ff", "limit=1&limit=x",
        )
    ),
    "file/unknown": tuple(
        request(method, f"/v1/{path}") for method, path in (
            ("GET", "files/x"), ("DELETE", "files/x"), ("GET", "files/file-x/content"), ("GET", "batches/x"),
            ("POST", "batches/x/cancel"), ("DELETE", "files/" + "x" * 5000),
        )
    ),
    "file/removed-while-used": (
        form(_LINE), _batch(), request("DELETE", "/v1/files/FILE"), request("POST", "/v1/batches/BATCH/cancel"),
        _WAIT, request("POST", "/v1/batches/BATCH/cancel"), request("DELETE", "/v1/files/FILE"), _batch(),
    ),
    # batches
    "batch/settings": tuple(
        _batch(**settings) for settings in (
            {"input_file_id": ""}, {"input_file_id": "../../x"}, {"input_file_id": "\0"}, {"input_file_id": 5},
            {"endpoint": "/v1/embeddings"}, {"completion_window": "1h"}, {"metadata": {str(i): "x" for i in range(17)}},
            {"metadata": {"a": 5}}, {"metadata": []}, {"colour": "red"}, {"metadata": {"a": "\ud800"}},
            {"metadata": {"\ud800": "a"}}, {"input_file_id": "\ud800"},
        )
    ),
    "batch/metadata-kept": (
        form(_LINE), _batch(metadata={"a": "\x1b[31m\u202e" * 100}), _WAIT, request("GET", "/v1/batches"),
    ),
    "batch/metadata-surrogate": (form(_LINE), _batch(metadata={"a": "\ud800"}), request("GET", "/v1/batches")),
    "batch/of-nothing": _answered(b""),
    "batch/of-blanks": _answered(b"\n\r\n \t\n" * 1000),
    "batch/of-nuls": _answered(bytes(4096) + b"\n"),
    "batch/of-noise": _answered(bytes(range(256)) * 16 + b"\n"),
    "batch/of-a-long-line": _answered(b"x" * (17 << 20) + b"\n"),
    "batch/of-nested-lines": _answered(b"[" * 100_000 + b"\n" + b'{"a":' * 100_000 + b"\n" + _LINE),
    "batch/of-same-ids": _answered(_LINE * 3),
    "batch/of-surrogates": _answered(_LINE.replace(b'"a"', b'"\\ud800"') + _LINE.replace(b"w3", b"\\udfff")),
    "batch/of-another-model": _answered(_LINE.replace(b'"prompt"', b'"model": "x", "prompt"')),
    "batch/of-chats": _answered(_LINE.replace(b"/v1/completions", b"/v1/chat/completions")),
    "batch/of-its-own-answers": (*_answered(_LINE), request("GET", "/v1/files"), _batch(), _WAIT),
}  # fmt: skip
_FILE_ID, _BATCH_ID = "file-" + "a" * 24, "batch_" + "a" * 24
_FILE = {"id": _FILE_ID, "filename": "in.jsonl", "purpose": "batch", "bytes": len(_LINE), "created_at": 1}
_BATCH = {
    "id": _BATCH_ID, "endpoint": "/v1/completions", "input_file_id": _FILE_ID, "completion_window": "24h",
    "model": "fake", "max_tokens": 4, "created_at": 1, "status": "completed",
}  # fmt: skip
_LISTS = (_LIST, request("GET", "/v1/batches"), request("GET", f"/v1/files/{_FILE_ID}/content"))
#: Names of files in the folder that a server keeps them in.
_KEPT = {
    "file": f"files/{_FILE_ID}.json", "content": f"files/{_FILE_ID}.jsonl", "batch": f"batches/{_BATCH_ID}.json",
    "answers": f"batches/{_BATCH_ID}.answers.jsonl", "lock": "lock", "files": "files", "batches": "batches",
}  # fmt: skip
#: Descriptions that differ from good ones.
_DESCRIBED: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "another-id": ({"id": "file-" + "b" * 24}, {"id": "batch_" + "b" * 24}),
    "id-upwards": ({"id": "../../kept"}, {"id": "../../kept"}),
    "id-nul": ({"id": "a\0b"}, {"id": "a\0b"}),
    "id-escapes": ({"id": "\x1b[31m"}, {"id": "\x1b[31m"}),
    "id-surrogate": ({"id": "\ud800"}, {"id": "\ud800"}),
    "id-long": ({"id": "x" * 5000}, {"id": "x" * 5000}),
    "name-surrogate": ({"filename": "\ud800"}, {"metadata": {"a": "\ud800"}}),
    "times-of-10-to-400": ({"created_at": 10**400, "bytes": 10**400}, {"created_at": 10**400, "max_tokens": 10**400}),
    "times-negative": ({"created_at": -1, "bytes": -1}, {"created_at": -1, "max_tokens": -1, "status": "validating"}),
    "input-upwards": ({}, {"input_file_id": "../../kept", "status": "in_progress"}),
    "input-nul": ({}, {"input_file_id": "\0", "status": "validating"}),
    "input-unknown": ({}, {"input_file_id": "file-" + "c" * 24, "status": "validating"}),
    "goes-on": ({}, {"status": "in_progress"}),
    "finalizing": ({}, {"status": "finalizing"}),
    "cancelling": ({}, {"status": "cancelling"}),
    "counts": ({}, {"counts": {"total": 10**30, "completed": -1, "failed": 0}, "times": {"completed": 10**30}}),
}  # fmt: skip


def cases() -> Iterator[Case]:
    """Requests, and what is in the server's folder when it starts."""
    for name, asks in _ASKS.items():
        yield _case(f"ask/{name}", asks, frozenset({0}))
    for name, (file, batch) in _DESCRIBED.items():
        yield _case(f"kept/{name}", _LISTS, frozenset({0}), partial(_keep, _FILE | file, _BATCH | batch))
    for kept, path in _KEPT.items():
        for special in SPECIAL:
            prepare = partial(_keep_special, path, special)
            yield _case(f"kept-{kept}/{special}", _LISTS, EITHER, prepare)
    for name, content in {"nested": b"[" * 100_000, "nuls": bytes(4096), "list": b"[]", "empty": b""}.items():
        yield _case(f"kept-file/{name}", _LISTS, frozenset({0}), partial(_keep_content, _KEPT["file"], content))
        yield _case(f"kept-batch/{name}", _LISTS, frozenset({0}), partial(_keep_content, _KEPT["batch"], content))


def _case(name: str, asks: Sequence[bytes], codes: frozenset[int], prepare: Callable[[Path], object] = nothing) -> Case:
    def write(folder: Path) -> None:
        prepare(folder)
        put(folder / ASKS, json.dumps([ask.decode("latin-1") for ask in asks]).encode())

    return Case(KIND, name, _COMMAND, write, codes, shell=_ASK)


def _keep(file: Mapping[str, Any], batch: Mapping[str, Any], folder: Path) -> None:
    served = folder / "served"
    put(served / _KEPT["file"], json.dumps(file).encode())
    put(served / _KEPT["content"], _LINE)
    put(served / _KEPT["batch"], json.dumps(batch).encode())


def _keep_content(path: str, content: bytes, folder: Path) -> None:
    _keep(_FILE, _BATCH, folder)
    put(folder / "served" / path, content)


def _keep_special(path: str, special: str, folder: Path) -> None:
    _keep(_FILE, _BATCH | {"status": "in_progress"}, folder)
    put_special(folder / "served" / path, special)
