"""Events on their way from the engine's thread to asyncio's: all of a step together, which wakes that thread once.

A wake-up for each token would have both threads take the interpreter from each other as often.
"""

import asyncio
import contextlib
from typing import Protocol

from harness.api import Event
from harness.serve.engine_loop import EngineFailure


class Receiver(Protocol):
    """Who gets the events of a request, in asyncio's thread. What it raises would keep others from theirs."""

    def take(self, event: Event | EngineFailure) -> None:
        """An event; perhaps more of the same step follow."""

    def flush(self) -> None:
        """No more of the step follow."""


class EventRelay:
    """Carries events to the asyncio loop in which it is first used."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: list[tuple[Receiver, Event | EngineFailure]] = []

    def open(self) -> None:
        """Called in asyncio's thread, before a request is let in."""
        self._loop = asyncio.get_running_loop()

    def put(self, receiver: Receiver, event: Event | EngineFailure) -> None:
        """Keeps an event for `send`; called in the engine's thread, as `send` is."""
        self._events.append((receiver, event))

    def send(self) -> None:
        """Sends all that was put since the last time."""
        events, self._events = self._events, []
        if events and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the server's loop has ended
                self._loop.call_soon_threadsafe(_hand_over, events)


def _hand_over(events: list[tuple[Receiver, Event | EngineFailure]]) -> None:
    for receiver, event in events:
        receiver.take(event)
    for receiver in dict.fromkeys(receiver for receiver, _ in events):
        receiver.flush()
