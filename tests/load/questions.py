"""What clients ask under load, and what they are told: every question of a seed has an answer of its own."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

#: Text and reason of the end of each choice.
Answers = tuple[tuple[str, str], ...]
_WORDS = 509


@dataclass(frozen=True)
class Question:
    """A completion or a chat, number `number` of a load, whole or as a stream."""

    number: int
    chat: bool
    stream: bool
    settings: Mapping[str, Any]

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    @property
    def body(self) -> bytes:
        return json.dumps({**self.settings, "stream": self.stream}).encode()

    def encoded(self) -> str:
        """As a line of JSON."""
        return json.dumps(asdict(self))


def questions(count: int, seed: int, streamed: float = 0.5) -> list[Question]:
    """Completions and chats of words `w3` to `w511`, greedy or drawn with a seed, with up to two choices, of which so
    many are streamed."""
    return [_question(i, random.Random(f"{seed}/{i}"), streamed) for i in range(count)]


def _question(number: int, rng: random.Random, streamed: float) -> Question:
    own = [number % _WORDS, number // _WORDS % _WORDS]  # no two begin alike
    words = [*own, *(rng.randrange(_WORDS) for _ in range(rng.randint(1, 16)))]
    text = " ".join(f"w{3 + word}" for word in words)
    chat = rng.random() < 0.3
    settings: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    settings |= {"max_tokens": rng.randint(2, 24), "ignore_eos": True, "n": 2 if rng.random() < 0.1 else 1}
    settings |= {"temperature": rng.choice((0.0, 0.9)), "seed": number}
    return Question(number, chat, rng.random() < streamed, settings)


def whole_answers(choices: Sequence[Mapping[str, Any]]) -> Answers:
    """Of the choices of an answer in one piece."""
    return tuple((c["message"]["content"] if "message" in c else c["text"], c["finish_reason"]) for c in choices)


def streamed_answers(chunks: Sequence[Mapping[str, Any]]) -> Answers:
    """Of the chunks of a stream."""
    texts, ends = dict[int, str](), dict[int, str]()
    for chunk in chunks:
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
            if choice["finish_reason"]:
                ends[choice["index"]] = choice["finish_reason"]
    return tuple((texts[i], ends.get(i, "")) for i in sorted(texts))
