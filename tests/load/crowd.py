"""Clients of whom a third goes away at a random moment: nobody's answer is lost, and none is another's."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from tests.load.bench import Bench, say
from tests.load.client import Connection, events
from tests.load.questions import Answers, Question, questions, streamed_answers, whole_answers
from tests.load.server import Server, serving

#: After how long an answer counts as lost.
_LONGEST_S = 300.0
#: How long a server may take to notice that its clients have gone.
_SETTLES_S = 30.0
#: When a client leaves: amid its own request, once it is sent, some time later, or amid the answer.
_MOMENTS = ("asking", "asked", "waiting", "reading")


@dataclass
class Tally:
    """What clients saw. `left`: how many went away, by the moment; `wrong`: what was lost or mixed up, in words."""

    answered: int = 0
    left: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    processor_s: float = 0.0


def crowd(bench: Bench) -> None:
    """Raises AssertionError for an answer that is lost or another's, for what the server still holds after everybody
    has gone, and for memory beyond the limit."""
    asked = questions(bench.requests, bench.seed)
    expected = bench.directly(asked)
    with serving(bench.settings) as server:
        tally = ask_all(server.port, asked, expected.answers, bench, bench.cancelled)
        _settle(server)
        outcomes, peak = server.outcomes(), server.peak_bytes
        assert server.stop() == 0, "".join(server.said)
    say(f"{len(asked)} requests of {bench.clients} clients in {tally.seconds:.1f} s: {tally.answered} answered right")
    say(f"{tally.left.total()} left ({_words(tally.left)}), {len(tally.wrong)} lost or mixed up")
    say(f"the server counted: {_words(outcomes)}")
    budget = bench.memory_bytes
    say(f"memory: {peak >> 20} MiB at most, {expected.idle_bytes >> 20} MiB idle + {budget >> 20} MiB allowed")
    assert not tally.wrong, "\n".join(tally.wrong[:20])
    assert tally.answered + tally.left.total() == len(asked)
    assert outcomes.keys() <= {"ok", "cancelled"} and outcomes["ok"] >= tally.answered, outcomes
    assert sum(outcomes.values()) <= len(asked), outcomes
    assert peak <= expected.idle_bytes + budget, "more memory than it may have"
    assert not any("Traceback" in line for line in server.said), "".join(server.said)


def ask_all(
    port: int, asked: Sequence[Question], expected: dict[int, Answers], bench: Bench, cancelled: float = 0.0
) -> Tally:
    """Asks all, each client one after the other, of which a share of `cancelled` leaves."""
    tally, waiting = Tally(), list(reversed(asked))

    async def client() -> None:
        connection = Connection(port)
        while waiting:
            question = waiting.pop()
            rng = random.Random(f"{bench.seed}/leaves/{question.number}")
            moment = rng.choice(_MOMENTS) if rng.random() < cancelled else ""
            try:
                async with asyncio.timeout(_LONGEST_S):
                    if moment:
                        await _leave(connection, question, moment, rng)
                        tally.left[moment] += 1
                    elif problem := await _answer(connection, question, expected[question.number]):
                        tally.wrong.append(f"request {question.number}: {problem}")
                    else:
                        tally.answered += 1
            except (OSError, EOFError, TimeoutError, AssertionError, ValueError, KeyError) as exc:
                tally.wrong.append(f"request {question.number} is lost: {type(exc).__name__} {exc}")
                connection.leave()
        connection.leave()

    async def everybody() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(bench.clients):
                group.create_task(client())

    began, processor = time.monotonic(), time.process_time()
    asyncio.run(everybody())
    tally.seconds, tally.processor_s = time.monotonic() - began, time.process_time() - processor
    return tally


async def _answer(connection: Connection, question: Question, expected: Answers) -> str:
    """What is wrong with the answer to a question; empty where nothing is."""
    name = f"load-{question.number}"
    await connection.ask(question.path, question.body, name)
    reply = await connection.reply()
    body = b"".join([piece async for piece in connection.pieces(reply)])
    if reply.status != 200:
        return f"{reply.status} {body[:300]!r}"
    if reply.headers["x-request-id"] != name:
        return f"the answer is that of {reply.headers['x-request-id']}"
    found = streamed_answers(events(body)) if question.stream else whole_answers(json.loads(body)["choices"])
    return "" if found == expected else f"{found} instead of {expected}"


async def _leave(connection: Connection, question: Question, moment: str, rng: random.Random) -> None:
    """Asks a question and hangs up."""
    await connection.ask(question.path, question.body, f"load-{question.number}", 0.5 if moment == "asking" else 1.0)
    if moment == "waiting":
        await asyncio.sleep(rng.expovariate(10.0))
    elif moment == "reading":
        async with aclosing(connection.pieces(await connection.reply())) as pieces:
            for _ in range(rng.randint(1, 6)):
                await anext(pieces, None)
    connection.leave()


def _settle(server: Server) -> None:
    """Waits until the server holds nothing of those who left. Raises AssertionError where it keeps something."""
    deadline, left = time.monotonic() + _SETTLES_S, {}
    while time.monotonic() < deadline:
        status = server.get("/status")
        used = sum(tier["used"] for tier in status["kv_blocks"].values())
        left = {name: status[name] for name in ("pending", "waiting", "running")} | {"KV blocks": used}
        if not any(left.values()):
            return
        time.sleep(0.1)
    raise AssertionError(f"still held after everybody has gone: {left}")


def _words(counts: "Counter[str] | dict[str, int]") -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
