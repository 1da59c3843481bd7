"""`harness chat`: messages from a pipe, commands, and a conversation that outgrows the context."""

import json

import pytest

from engines.adapters.fake import MODEL, SHAPE, FakeText
from harness.api import HarnessError
from harness.batch.conversation import Conversation
from harness.batch.job import job_cell
from harness.batch.session import ModelSession, longest_request
from offload_harness import Engine

FAKE = ("chat", "--model", "fake", "--engine", "fake", "--memory", "1GiB", "--max-tokens", "4")


class Silent:
    def note(self, text): ...
    def advance(self, phase, done, total, tokens=0): ...


@pytest.fixture
def session(tmp_path):
    cell = job_cell("fake", "fake", "1GiB", (), Silent().note)
    opened = ModelSession(cell, tmp_path, Silent())
    yield opened
    opened.close()


def talk(conversation, text):
    return "".join(conversation.ask(text))


def test_an_answer_sees_what_was_said_before(session, tmp_path):
    conversation = Conversation(session, 4096, "Be brief.", max_tokens=5, temperature=0.0, seed=0)
    conversation.load()
    first = talk(conversation, "hello")
    second = talk(conversation, "again")
    said = [("system", "Be brief."), ("user", "hello"), ("assistant", first), ("user", "again")]
    with Engine("fake", "1GiB", engine="fake", cache_dir=tmp_path) as engine:
        [alone] = engine.generate([{"role": role, "content": text} for role, text in said], max_tokens=5, seed=3)
    assert second == alone.text
    conversation.reset()
    assert talk(conversation, "hello") == first


def test_the_oldest_turns_are_left_out_where_they_no_longer_fit(session):
    conversation = Conversation(session, 100, None, max_tokens=4, temperature=0.0, seed=0)
    conversation.load()
    for turn in range(4):
        talk(conversation, f"message {turn} " + "x" * 5)
    assert conversation.forgotten == 4 and len(conversation.messages) == 8
    length = len(FakeText(MODEL).encode_chat(conversation.messages[4:7]))
    assert length + 4 <= 100 < length + 4 + len(FakeText(MODEL).encode_chat(conversation.messages[2:4]))
    before = list(conversation.messages)
    with pytest.raises(HarnessError, match="more than the 100 that fit"):
        talk(conversation, "y" * 200)
    assert conversation.messages == before
    with pytest.raises(HarnessError, match="the message is not UTF-8 text"):
        talk(conversation, "caf\udce9")
    assert conversation.messages == before
    with pytest.raises(HarnessError, match="--system is not UTF-8 text"):
        Conversation(session, 100, "caf\udce9", max_tokens=4, temperature=0.0, seed=0).load()


def test_an_answer_that_is_broken_off_is_remembered_as_far_as_it_came(session):
    conversation = Conversation(session, 4096, None, max_tokens=50, temperature=0.0, seed=0)
    conversation.load()
    answer = conversation.ask("hello")
    begun = next(answer) + next(answer)
    answer.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": begun}
    assert talk(conversation, "again")


def test_a_length_that_nobody_names_is_what_model_and_memory_allow(session):
    assert longest_request(None, session.cell, session.model) == SHAPE.max_context
    assert longest_request(70, session.cell, session.model) == 70
    with pytest.raises(HarnessError, match="context has 4096 tokens"):
        longest_request(4097, session.cell, session.model)


def test_messages_and_commands_from_a_pipe(cli):
    done = cli(*FAKE, input="hello\n\n/stats\n/what\n/reset\nhello\n/quit\nnever read\n")
    answers = done.stdout.splitlines()
    assert len(answers) == 2 and answers[0] == answers[1]
    assert "4 tokens in " in done.stderr and "2 messages" in done.stderr and "/reset: forget" in done.stderr
    told = cli(*FAKE, input=json.dumps("z" * 5000) + "\nhello\n")
    assert "more than the 4096 that fit" in told.stderr and len(told.stdout.splitlines()) == 2


@pytest.mark.parametrize(
    ("pipe", "code", "answers", "told"),
    [
        ("printf '\\377\\nhello\\n' | env PYTHONIOENCODING=utf-8:strict", 0, 2, "the message is not UTF-8 text"),
        ("<&-", 2, 0, "chat reads messages from stdin, which is closed"),
        ("</dev/zero", 2, 0, "a message on stdin has more than 16777216 characters"),
    ],
)
def test_what_is_no_text_is_refused_in_a_line(cli, pipe, code, answers, told):
    before, after = (pipe, "") if "|" in pipe else ("", pipe)
    done = cli.execute(["sh", "-c", f'{before} "$@" {after}', "sh", *cli.command(*FAKE)], code)
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("harness: "))
    assert told in line and len(done.stdout.splitlines()) == answers
