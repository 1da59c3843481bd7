"""Lines of requests that cannot be run, or hardly: each is to be answered, with a reason."""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.barrage import good
from tests.barrage.case import Case
from tests.barrage.inputs_files import WRONG
from tests.barrage.odd_files import put

KIND = "prompts"
_PLAIN = {"prompt": "w3"}
_CHAT = {"messages": [{"role": "user", "content": "w3"}]}
_BATCH = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "w3"}}
_NEUTRAL = ("model", "user", "stream", "frequency_penalty", "presence_penalty")
_SAMPLING = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "ignore_eos")
_KEYS: Mapping[str, tuple[Mapping[str, Any], tuple[str, ...]]] = {
    "plain": (_PLAIN, ("prompt", "custom_id", "logprobs", "echo", *_NEUTRAL, *_SAMPLING)),
    "chat": (_CHAT, ("messages", "max_completion_tokens", "logprobs", "top_logprobs")),
    "batch": (_BATCH, ("custom_id", "method", "url", "body")),
}
#: Of a number: what no request can have, or no memory hold.
_NUMBERS: Mapping[str, Any] = {"2-to-31": 2**31, "2-to-63": 2**63, "2-to-200": 2**200, "half": 0.5, "true": True}
_HUGE = 10_000_000
_LINES: Mapping[str, Callable[[], bytes]] = {
    "lone-surrogate": lambda: b'{"prompt": "\\ud800"}',
    "lone-surrogate-as-bytes": lambda: b'{"prompt": "\xed\xa0\x80"}',
    "lone-surrogate-in-a-chat": lambda: b'{"messages": [{"role": "user", "content": "\\udfff"}]}',
    "lone-surrogate-as-stop": lambda: b'{"prompt": "w3", "stop": "\\ud800"}',
    "nul": lambda: b'{"prompt": "\\u0000"}',
    "escapes-as-id": lambda: b'{"custom_id": "\\u001b[31m\\u0007\\n", "prompt": ""}',
    "escapes-as-key": lambda: b'{"\\u001b[31m\\n": 1, "prompt": "w3"}',
    "no-prompt": lambda: b"{}",
    "empty-prompt": lambda: b'{"prompt": ""}',
    "no-ids": lambda: b'{"prompt": []}',
    "huge-prompt": lambda: json.dumps({"prompt": "w" * _HUGE}).encode(),
    "huge-id": lambda: json.dumps({"custom_id": "w" * _HUGE, "prompt": ""}).encode(),
    "huge-chat": lambda: json.dumps({"messages": [{"role": "user", "content": "w"}] * 100_000}).encode(),
    "huge-stop": lambda: json.dumps({"prompt": "w3", "stop": ["w" * 100_000] * 100}).encode(),
    "many-stops": lambda: json.dumps({"prompt": "w3", "stop": [str(i) for i in range(100_000)]}).encode(),
    "many-keys": lambda: json.dumps({"prompt": "w3"} | {f"k{i}": i for i in range(100_000)}).encode(),
    "many-ids-that-are-none": lambda: b'{"prompt": [' + b'"w", ' * 3_000_000 + b"1]}",
    "many-messages-that-are-none": lambda: b'{"messages": [' + b"{}, " * 3_000_000 + b"1]}",
    "many-keys-of-a-message": lambda: json.dumps({"messages": [{f"k{i}": 1 for i in range(1_000_000)}]}).encode(),
    "list": lambda: b"[1]",
    "text": lambda: b'"w3"',
    "number": lambda: b"5",
    "null": lambda: b"null",
    "nan": lambda: b'{"prompt": "w3", "temperature": NaN}',
    "infinity": lambda: b'{"prompt": "w3", "temperature": Infinity}',
    "1e999": lambda: b'{"prompt": "w3", "temperature": 1e999}',
    "digits": lambda: b'{"prompt": "w3", "max_tokens": ' + b"9" * 5000 + b"}",
    "twice": lambda: b'{"prompt": "w3", "prompt": ""}',
    "nested-lists": lambda: b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nested-objects": lambda: b'{"prompt": ' + b'{"a":' * 100_000,
    "ids-negative": lambda: b'{"prompt": [-1]}',
    "ids-out-of-range": lambda: b'{"prompt": [1000]}',
    "ids-of-2-to-63": lambda: json.dumps({"prompt": [2**63, 2**200]}).encode(),
    "ids-of-floats": lambda: b'{"prompt": [1.0, 2.5]}',
    "ids-of-bools": lambda: b'{"prompt": [true, false]}',
    "ids-by-the-million": lambda: json.dumps({"prompt": [5] * 1_000_000}).encode(),
    "ids-of-lists": lambda: b'{"prompt": [[1], [2]]}',
    "same-id": lambda: b'{"custom_id": "a", "prompt": "w3"}\n' * 2,
    "same-id-300-times": lambda: b'{"custom_id": "a", "prompt": "w3", "max_tokens": 1}\n' * 300,
    "blank-lines": lambda: b"\n" * 100_000,
    "blank-lines-then-one": lambda: b" \t\r\n" * 100_000 + b'{"prompt": "w3"}',
    "bad-lines": lambda: b"nonsense\n" * 300,
    "carriage-returns": lambda: b'{"prompt": "w3"}\r{"prompt": "w4"}\r',
    "line-separators": '{"prompt": "a\u2028b\u2029c\x85d"}'.encode,
    "bom-on-each-line": lambda: b'\xef\xbb\xbf{"prompt": "w3"}\n' * 2,
    "no-line-feed": lambda: b'{"prompt": "w3"}',
    "both-kinds": lambda: b'{"prompt": "w3", "messages": [{"role": "user", "content": "w3"}]}',
    "body-and-prompt": lambda: b'{"body": {"prompt": "w3"}, "prompt": "w3"}',
    "body-of-another-url": lambda: json.dumps(_BATCH | {"url": "/v1/chat/completions"}).encode(),
    "samples": lambda: b'{"prompt": "w3", "n": 128, "max_tokens": 100}',
    "alternatives": lambda: b'{"prompt": "w3", "logprobs": 20, "max_tokens": 5}',
    "role": lambda: b'{"messages": [{"role": "robot", "content": "w3"}]}',
    "picture": lambda: b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}',
}


def cases() -> Iterator[Case]:
    """Lines of all sorts, wrong values of each key, and the same lines as text."""
    for name, line in _LINES.items():
        yield _case(f"line/{name}", line)
        yield Case(
            KIND, f"text/{name}", (*good.GENERATE, *good.FAKE, "--input", "in.txt"), partial(_put, "in.txt", line),
            frozenset({0, 1}),
        )  # fmt: skip
    for form, (request, keys) in _KEYS.items():
        for key in keys:
            numbers = _NUMBERS if key in _SAMPLING or "logprobs" in key or "tokens" in key else {}
            for name, value in (WRONG | numbers).items():
                text = json.dumps({**request, key: value}).encode()
                yield _case(f"{form}/{key}/{name}", partial(bytes, text))


def _case(name: str, line: Callable[[], bytes]) -> Case:
    return Case(KIND, name, (*good.GENERATE, *good.FAKE), partial(_put, "in.jsonl", line), frozenset({0, 1}))


def _put(file: str, line: Callable[[], bytes], folder: Path) -> None:
    """The line between two good ones."""
    put(folder / file, b'{"prompt": "w3", "max_tokens": 1}\n' + line() + b'\n{"prompt": "w4", "max_tokens": 1}\n')
