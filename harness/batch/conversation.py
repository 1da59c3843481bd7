"""A conversation with a loaded model: messages in turn, each answer streamed, the oldest forgotten when it grows too
long."""

import json
from collections.abc import Generator
from dataclasses import dataclass, field

from harness.api import HarnessError
from harness.batch.format import parse_line
from harness.batch.job import Lengths, engine_errors
from harness.batch.session import ModelSession
from harness.batch.stream import Streamed
from harness.common.surrogates import lone_surrogate

#: Tokens of a usual conversation, which memory is planned for.
_USUAL = 1024


@dataclass
class Conversation:
    """Messages of a chat with a `session`'s model, which holds `longest` tokens of one.

    `max_tokens` and `temperature` are every answer's; its seed comes from `seed` and its turn. `forgotten`: how many
    messages the last answer no longer saw.
    """

    session: ModelSession
    longest: int
    system: str | None
    max_tokens: int
    temperature: float
    seed: int
    forgotten: int = 0
    messages: list[dict[str, str]] = field(default_factory=list)

    def load(self) -> None:
        """Loads the engine. Raises InfeasibleError where the memory holds no conversation so long, and HarnessError for
        system text that is no Unicode."""
        _require_unicode("--system", self.system or "")
        usual = min(self.longest, _USUAL)
        with engine_errors(self.session.cell.engine):
            self.session.engine(Lengths(self.longest, usual, usual // 4), 1)

    def ask(self, text: str) -> Generator[str, None, Streamed]:
        """The pieces of the answer to `text`; returns what it took. However it ends, the answer so far is remembered.

        Raises HarnessError, and forgets `text`, for one that is too long or that the model cannot take.
        """
        _require_unicode("the message", text)
        asked = [*self.messages, {"role": "user", "content": text}]
        streamed, first = self._ready(asked)
        answered = ""
        try:
            for piece in streamed.pieces():
                answered += piece
                yield piece
        finally:
            if answered:
                self.messages = [*asked, {"role": "assistant", "content": answered}]
                self.forgotten = first
        return streamed

    def reset(self) -> None:
        """Forgets all messages but the system's."""
        self.messages, self.forgotten = [], 0

    def _ready(self, asked: list[dict[str, str]]) -> tuple[Streamed, int]:
        """The request for the newest messages that fit, whole turns, and how many older ones that leaves out."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        for first in range(0, len(asked), 2):
            messages = system + asked[first:]
            prompt = self.session.text.encode_chat(messages)
            if len(prompt) + self.max_tokens <= self.longest:
                settings = {"messages": messages, "max_tokens": self.max_tokens, "temperature": self.temperature}
                line = parse_line(json.dumps(settings).encode(), len(asked), self.max_tokens, self.seed)
                engine = self.session.engine(Lengths(self.longest, 1, 1), 1)  # as `load` has loaded it
                return Streamed(self.session, line, engine, self.session.request(line)), first
        raise HarnessError(
            f"{len(prompt)} prompt + {self.max_tokens} new tokens are more than the {self.longest} that fit"
        )


def _require_unicode(what: str, text: str) -> None:
    """Refuses what no tokenizer reads: bytes of a pipe or an argument that are no UTF-8 are half surrogate pairs."""
    if lone_surrogate(text):
        raise HarnessError(f"{what} is not UTF-8 text")
