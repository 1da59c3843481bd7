"""Asks a server what a case wants: `python -m tests.barrage.ask COMMAND...`, with the requests in the file `asks.json`.

Starts the command, waits until it serves, sends the requests one after the other and prints what it is answered, then
ends the server by SIGTERM. Exits with the server's code; with 70 where a request was answered by a server error or not
at all, or where the server no longer answers a good one.
"""

import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

ASKS = "asks.json"
_FAILED = 70
_SERVED = re.compile(rb"is served at http://127\.0\.0\.1:(\d+)/")
_PATIENCE_S = 15.0
_LENGTH = b"LENGTH"


def request(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
    """A request over HTTP/1.1, on a connection of its own, which gets its body's length where it is sent."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", "Content-Length: LENGTH"]
    return "\r\n".join([*lines, *headers, "", ""]).encode("latin-1") + body


def form(content: bytes, filename: str = "in.jsonl", purpose: str = "batch") -> bytes:
    """The upload of a file."""
    parts = (
        f'--edge\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
        f'--edge\r\nContent-Disposition: form-data; name="file"; filename="{filename}"\r\n\r\n'
    )
    body = parts.encode() + content + b"\r\n--edge--\r\n"
    return request("POST", "/v1/files", body, "Content-Type: multipart/form-data; boundary=edge")


def main(command: Sequence[str]) -> int:
    """The exit code."""
    good = request("POST", "/v1/completions", b'{"prompt": "w3", "max_tokens": 2}')
    asks = [text.encode("latin-1") for text in json.loads(Path(ASKS).read_text())]
    with tempfile.TemporaryFile() as said:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=said)
        try:
            port = _port(server, said)
            wrong = port is not None and not all(map(_good, _answers(port, (*asks, good))))
            server.send_signal(signal.SIGTERM)
            code = server.wait(_PATIENCE_S)
        finally:
            server.kill()
            server.wait()
        said.seek(0)
        sys.stderr.write(said.read().decode(errors="replace"))
    return _FAILED if wrong else code


def _port(server: subprocess.Popen[bytes], said: IO[bytes]) -> int | None:
    """Where it serves; None where it ends instead."""
    while server.poll() is None:
        said.seek(0)
        if served := _SERVED.search(said.read()):
            return int(served[1])
        time.sleep(0.02)
    return None


def _answers(port: int, asks: Sequence[bytes]) -> list[bytes]:
    """What each request is answered; `FILE` and `BATCH` stand for the last ids, and an empty one waits for a batch to
    end."""
    answers, ids = [], {b"FILE": b"file-x", b"BATCH": b"batch_x"}
    for ask in asks:
        named = ask.replace(b"FILE", ids[b"FILE"]).replace(b"BATCH", ids[b"BATCH"])
        answer = _answer(port, named) if named else _ended(port, ids[b"BATCH"])
        head, _, body = answer.decode("latin-1").partition("\r\n\r\n")
        told = body if re.search(r"application/json\b", head) else ""  # not of uploads
        status = head.partition("\r\n")[0]
        told = told.replace("\r\n", "\n")  # a second answer may follow on the same connection
        sys.stdout.write(f"{status}\n{told}\n")
        for name, pattern in ((b"FILE", rb'"id":"(file-[^"]*)"'), (b"BATCH", rb'"id":"(batch_[^"]*)"')):
            if found := re.search(pattern, answer):
                ids[name] = found[1]
        answers.append(answer)
    return answers


def _ended(port: int, batch: bytes) -> bytes:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        answer = _answer(port, request("GET", f"/v1/batches/{batch.decode()}"))
        if re.search(rb'"status":"(completed|failed|cancelled)"', answer):
            return answer
        time.sleep(0.1)
    return b""


def _answer(port: int, ask: bytes) -> bytes:
    ask = ask.replace(_LENGTH, str(len(ask.partition(b"\r\n\r\n")[2])).encode(), 1)
    with socket.create_connection(("127.0.0.1", port), _PATIENCE_S) as connection:
        try:
            connection.sendall(ask)
            return b"".join(iter(lambda: connection.recv(1 << 16), b""))
        except (TimeoutError, ConnectionError) as exc:
            return str(exc).encode()


def _good(answer: bytes) -> bool:
    """Whether an answer is of HTTP and no error of the server's own."""
    return re.match(rb"HTTP/1\.1 [1-4]\d\d ", answer) is not None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
