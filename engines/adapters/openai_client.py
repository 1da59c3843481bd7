"""Streams completions from an OpenAI-compatible server and notes when each piece arrives."""

import json
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

#: A server may take long for its first token; the launch's own time limit ends what never comes.
_TIMEOUT = httpx2.Timeout(None, connect=30.0)
_UNLIMITED = httpx2.Limits(max_connections=None, max_keepalive_connections=256)


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


def client(base_url: str, api_key: str, local: bool) -> httpx2.AsyncClient:
    """A client of any number of connections. A `local` server is never reached through a proxy."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx2.AsyncClient(
        base_url=base_url, headers=headers, timeout=_TIMEOUT, limits=_UNLIMITED, trust_env=not local
    )


async def complete(
    http: httpx2.AsyncClient, path: str, body: Mapping[str, Any], now: Callable[[], float]
) -> Completion:
    """Asks for one streamed completion. Raises RequestFailed."""
    pieces: list[float] = []
    usage: Mapping[str, Any] = {}
    finish = None
    last_empty = False
    try:
        async with http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                words = _message((await response.aread())[:2000])
                code = response.status_code
                raise RequestFailed(f"the server answered HTTP {code}: {words}", 400 <= code < 500)
            async for event in _events(response):
                if "error" in event:
                    raise RequestFailed(f"the server failed: {_message(json.dumps(event).encode())}")
                usage = event.get("usage") or usage
                for choice in event.get("choices") or ():
                    text = choice.get("text") or (choice.get("delta") or {}).get("content")
                    finish = choice.get("finish_reason") or finish
                    if text or not (choice.get("finish_reason") or (choice.get("delta") or {}).get("role")):
                        pieces.append(now())
                        last_empty = not text
    except httpx2.HTTPError as exc:
        dropped = f" after {len(pieces)} pieces" if pieces else ""
        raise RequestFailed(f"the connection failed{dropped}: {type(exc).__name__} {exc}".strip()) from exc
    if finish is None:
        raise RequestFailed(f"the stream ended early, after {len(pieces)} pieces")
    generated = usage.get("completion_tokens", len(pieces))
    if last_empty and len(pieces) > generated:
        pieces.pop()
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


async def _events(response: httpx2.Response) -> AsyncIterator[Mapping[str, Any]]:
    """The JSON objects of server-sent events, up to [DONE]."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue  # comments keep a connection alive
        data = line[5:].strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise RequestFailed(f"the server sent no JSON: {data[:80]!r}") from None
        if isinstance(event, dict):
            yield event


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
