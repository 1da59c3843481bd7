"""Streams completions from an OpenAI-compatible server and notes when each piece arrives."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp.http_exceptions import LineTooLong

#: A server may take long for its first token; the launch's own time limit ends what never comes.
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=30.0)
#: Bytes of an event at most are twice as many.
_BUFFER = 1 << 20


class RequestFailed(Exception):
    """A request that the server did not answer, in one line. `refused`: by a status of 400 to 499."""

    def __init__(self, reason: str, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


@dataclass(frozen=True)
class Completion:
    """Counts as the server tells them (`generated` by pieces where it does not), and when each token was there."""

    prompt_tokens: int | None
    generated: int
    times_s: tuple[float, ...]
    stopped: bool
    pieces: int
    cached_tokens: int | None


def client(api_key: str, local: bool) -> aiohttp.ClientSession:
    """A client of any number of connections, made in the event loop that uses it. A `local` server is never reached
    through a proxy. Of the well-kept clients it takes least of the processor for a token: it may share the server's.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    unlimited = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(
        headers=headers, timeout=_TIMEOUT, connector=unlimited, trust_env=not local, read_bufsize=_BUFFER
    )


async def complete(
    http: aiohttp.ClientSession, url: str, body: Mapping[str, Any], now: Callable[[], float]
) -> Completion:
    """Asks for one streamed completion. Raises RequestFailed."""
    pieces: list[float] = []
    usage: Mapping[str, Any] = {}
    finish = ended = None
    last_empty = False
    try:
        async with http.post(url, json=body) as response:
            if (code := response.status) != 200:
                words = _message(await _beginning(response.content))
                raise RequestFailed(f"the server answered HTTP {code}: {words}", 400 <= code < 500)
            async for event in _events(response):
                if "error" in event:
                    raise RequestFailed(f"the server failed: {_message(json.dumps(event).encode())}")
                usage = event.get("usage") or usage
                for choice in event.get("choices") or ():
                    text = choice.get("text") or (choice.get("delta") or {}).get("content")
                    if choice.get("finish_reason"):
                        finish, ended = choice["finish_reason"], None if text else now()
                    if text or not (choice.get("finish_reason") or (choice.get("delta") or {}).get("role")):
                        pieces.append(now())
                        last_empty = not text
    except (aiohttp.ClientError, OSError) as exc:
        dropped = f" after {len(pieces)} pieces" if pieces else ""
        cut = isinstance(exc, aiohttp.ClientPayloadError)
        why = "the answer was cut off" if cut else f"{type(exc).__name__} {exc}".strip()
        raise RequestFailed(f"the connection failed{dropped}: {why}") from exc
    if finish is None:
        raise RequestFailed(f"the stream ended early, after {len(pieces)} pieces")
    generated = usage.get("completion_tokens", len(pieces))
    if last_empty and len(pieces) > generated:
        pieces.pop()
    if ended is not None and generated and len(pieces) == generated - 1:  # the last token has no text of its own
        pieces.append(ended)
    if not pieces or not generated:
        raise RequestFailed("the server answered without a token")
    times = spread(pieces, generated)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return Completion(usage.get("prompt_tokens"), generated, times, finish == "stop", len(pieces), cached)


def spread(pieces: Sequence[float], tokens: int) -> tuple[float, ...]:
    """When each of `tokens` tokens was there, of a stream of `pieces`: one each where the counts agree; else tokens are
    spread evenly over pieces, the first with the first and the last with the last."""
    if tokens == 1:
        return (pieces[0],)
    last = len(pieces) - 1
    return tuple(pieces[math.floor(i * last / (tokens - 1) + 0.5)] for i in range(tokens))


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Mapping[str, Any]]:
    """The JSON objects of server-sent events, up to [DONE]."""
    while line := await _line(response.content):
        if not line.startswith(b"data:"):
            continue  # comments keep a connection alive
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise RequestFailed(f"the server sent no JSON: {data[:80].decode(errors='replace')!r}") from None
        if isinstance(event, dict):
            yield event


async def _line(content: aiohttp.StreamReader) -> bytes:
    """The next line; empty at the end."""
    try:
        return await content.readline()
    except (ValueError, LineTooLong):  # as older versions of aiohttp say it, and newer
        raise RequestFailed(f"the server sent an event of more than {2 * _BUFFER >> 20} MiB") from None


async def _beginning(content: aiohttp.StreamReader) -> bytes:
    """Up to 2,000 bytes of an answer."""
    try:
        return await content.readexactly(2000)
    except asyncio.IncompleteReadError as exc:
        return exc.partial


def _message(body: bytes) -> str:
    """What an error says, in one line: its message in OpenAI's format, else the text."""
    text = body.decode(errors="replace")
    try:
        error = json.loads(text)
        error = error.get("error", error) if isinstance(error, dict) else error
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except ValueError:
        pass
    return " ".join(text.split())[:300] or "no reason"
