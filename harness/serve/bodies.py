"""Bodies of requests, up to a size and no slower than a pace."""

import asyncio
import time

from fastapi import Request
from starlette.types import Message

from harness.serve.requests import RequestError
from harness.serve.settings import MAX_BODY

#: How much of a body that is too large is read and dropped, so that a client that is still sending hears why.
_DROPPED = 512 << 20
#: Seconds that any body may take, and bytes a second that one must have beyond them.
_GRACE_S, _PACE = 30.0, 1 << 10


def limited(request: Request, most: int) -> Request:
    """The request with a body that raises RequestError where it has more than `most` bytes, or comes too slowly."""
    received, began = 0, time.monotonic()

    async def receive() -> Message:
        nonlocal received
        left = _GRACE_S + received / _PACE - (time.monotonic() - began)
        try:
            async with asyncio.timeout(left):
                message = await request.receive()
        except TimeoutError:
            raise RequestError(f"the body comes too slowly: {received} bytes so far", 408, "too_slow") from None
        received += len(message.get("body", b""))
        if received > most:
            while message.get("more_body") and received < most + _DROPPED and time.monotonic() < began + _GRACE_S:
                message = await request.receive()
                received += len(message.get("body", b""))
            raise RequestError(f"the body has more than {most >> 20} MiB", 413, "too_large")
        return message

    return Request(request.scope, receive)


async def whole_body(request: Request, most: int = MAX_BODY) -> bytes:
    """Raises RequestError for a body that is too large."""
    return await limited(request, most).body()
