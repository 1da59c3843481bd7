"""A small server with OpenAI's API for tests: `python -m tests.fake_openai --port N`, or in a thread.

Faults by the first token id of a prompt: 501 answers HTTP 503, 400 answers HTTP 400, 502 drops the connection after a
piece, 503 sends an error in the stream, 504 sends two tokens a piece, 505 answers one token whatever is asked, 506
never ends, 507 tells of no cache, 508 sends what is no JSON, 509 sends an event of 3 MiB, 510 sends the last token
without text.
"""

import argparse
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """`seen`: the bodies of all requests."""

    protocol_version = "HTTP/1.1"
    seen: list[dict[str, Any]]
    ready = True

    def log_message(self, format: str, *args: object) -> None: ...

    def do_GET(self) -> None:
        known: dict[str, object] = {
            "/health": {}, "/version": {"version": "1.2.3"}, "/v1/models": {"data": [{"id": "fake-model"}]}
        }  # fmt: skip
        if self.path not in known or not self.ready:
            self._reply(404 if self.ready else 503, {"error": {"message": f"no {self.path}"}})
            return
        self._reply(200, known[self.path])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(body | {"path": self.path, "key": self.headers.get("Authorization")})
        prompt = body.get("prompt") or body["messages"][0]["content"]
        fault = prompt[0]
        if fault == 501:
            self._reply(503, {"error": {"message": "the queue\nis full"}})
        elif fault == 400:
            self._reply(400, {"error": {"message": "too long", "type": "invalid_request_error"}})
        else:
            self._stream(body, prompt, fault)

    def _stream(self, body: dict[str, Any], prompt: Any, fault: object) -> None:
        tokens = 1 if fault == 505 else body["max_tokens"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        pieces = (tokens + 1) // 2 if fault == 504 else tokens
        for i in range(pieces - (fault == 510)):
            self._event({"choices": [self._choice(body, "x ", None)]})
            if fault == 502:
                self.close_connection = True
                self.connection.close()
                return
            if fault == 503:
                self._event({"error": {"message": "out of blocks"}})
                return
            if fault == 508:
                self._write(b"data: {nothing\n\n")
            if fault == 509:
                self._event({"choices": [self._choice(body, "x" * (3 << 20), None)]})
            while fault == 506 and i == 0:
                time.sleep(0.02)
                self._event({"choices": []})
        self._event({"choices": [self._choice(body, "", "length")]})
        usage = {"prompt_tokens": len(prompt), "completion_tokens": tokens}
        if fault != 507:  # servers tell of their cache or do not
            usage["prompt_tokens_details"] = {"cached_tokens": len(prompt) - 1}
        self._event({"choices": [], "usage": usage})
        self._write(b"data: [DONE]\n\n")
        self._write(b"")

    @staticmethod
    def _choice(body: dict[str, Any], text: str, finish: str | None) -> dict[str, object]:
        said = {"text": text} if "prompt" in body else {"delta": {"content": text}}
        return {**said, "finish_reason": finish}

    def _event(self, event: object) -> None:
        self._write(f": comment\n\ndata: {json.dumps(event)}\n\n".encode())

    def _write(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _reply(self, status: int, answer: object) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        for part in (data[:20], data[20:]):  # as networks deliver it
            self.wfile.write(part)
            self.wfile.flush()
            time.sleep(0.01)


class Server(ThreadingHTTPServer):
    """Quiet about clients that go away."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None: ...


def serve(port: int = 0) -> Server:
    """A server on the loopback interface, in threads of this process."""
    handler = type("Recording", (Handler,), {"seen": []})
    server = Server(("127.0.0.1", port), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--model", default="")
    options = parser.parse_args()
    if options.fail:
        sys.stderr.write("loading\nCUDA error: no device\n")
        sys.exit(7)
    Handler.ready = not options.never_ready
    Handler.seen = []
    sys.stderr.write("listening\n")
    Server(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
