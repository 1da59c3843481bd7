"""What commands print: foreign strings command neither the terminal nor the CI server that reads the log."""

import ast
import json
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cli.errors import one_line_errors, say, say_json
from harness.cli.tables import print_rows
from harness.common.printable import GrowingPrintable, clean, printable
from harness.run.progress import LiveProgress, PlainProgress
from harness.run.steps import Step
from tests.records import FAKE

ROOT = Path(__file__).parents[2]
#: An escape sequence, a link, an overwriting carriage return, reversed writing, an old control character.
ATTACK = "\x1b[31mred \x1b]8;;http://e\x07link\x1b]8;;\x07 good\rbad \u202edel\u2066 \x9b2J\x7f \u2028::error::x"


@pytest.mark.parametrize("character", [*"\x00\x07\x08\x0b\x0c\x0d\x1b\x7f\x9b\u061c\u200e\u2028\u202e\u2069\ud800"])
def test_every_character_that_a_terminal_obeys_is_shown(character):
    assert clean(f"a{character}b") == "a\ufffdb"


def test_what_people_write_stays():
    text = "1\t2\n\u00fc \u4e2d \u0645 \U0001f600 a::b #1 ## heading #[x] http://x::y"
    assert printable(text) == text
    assert clean("two\r\nlines") == "two\nlines"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("::error::x", ": :error::x"),
        ("ok\n  ::set-output name=a::b", "ok\n  : :set-output name=a::b"),
        ("\t::add-mask::x", "\t: :add-mask::x"),
        ("a ##[error]b", "a # #[error]b"),
        ("##vso[task.complete]", "# #vso[task.complete]"),
        ("##teamcity[x]", "# #teamcity[x]"),
        ("###[group]", "## #[group]"),
        ("a\r::error::x", "a\ufffd::error::x"),  # no line begins after what is replaced
    ],
)
def test_commands_of_a_ci_log_are_broken(text, shown):
    assert printable(text) == shown
    assert printable(shown) == shown


def test_commands_say_it_printable(capsys):
    say(f"::warning::{ATTACK}")
    say(ATTACK, err=True)
    print_rows([{"a": ATTACK, "b": "two\nlines"}])
    out, err = capsys.readouterr()
    assert not set("\x1b\r\x07\u202e\u2066\u2028\x9b\x7f") & set(out + err)
    assert out.startswith(": :warning::") and len(out.splitlines()) == 3


def test_json_is_exact_and_yet_printable(capsys):
    value = {"name": f"##[error]{ATTACK}", "more": ["####", "::error::"]}
    say_json(value)
    out = capsys.readouterr().out
    assert json.loads(out) == value
    assert out.isascii() and "##" not in out and not set("\x1b\x7f\r") & set(out)


@pytest.mark.parametrize("error", [click.UsageError, click.BadParameter, click.ClickException])
def test_errors_of_usage_are_printable(error, capsys):
    with pytest.raises(SystemExit), one_line_errors():
        raise error(f"no such option {ATTACK}")
    told = capsys.readouterr().err
    assert "no such option" in told and not set("\x1b\r\u202e") & set(told)


def test_progress_in_a_log_is_printable(capsys):
    PlainProgress().note(f"::error::{ATTACK}")
    told = capsys.readouterr().err
    assert told.startswith(": :error::") and not set("\x1b\r\u202e") & set(told)


def test_progress_on_a_terminal_takes_no_markup(capsys, monkeypatch):
    """A model's name is no markup of rich's: an unknown closing tag would be an error."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    with LiveProgress() as progress:
        progress.started(Step(FAKE, 0), "preparing [/x] \x1b]8;;http://e\x07")
        progress.event("load \x1b]8;;http://e\x07", 0, 1)
        progress.note("[/y] \x1b]8;;http://e\x07")
    told = capsys.readouterr().err
    assert "[/y]" in told and "\x1b]8" not in told


def test_commands_print_by_these_functions_only():
    own = ROOT / "harness" / "cli" / "errors.py"
    for path in (ROOT / "harness" / "cli").glob("*.py"):
        used = {ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert path == own or not used & {"click.echo", "click.secho", "sys.stdout.write", "sys.stderr.write"}, (
            path.name
        )


@given(st.lists(st.text("#:[]a \r\n\x1bé@/", max_size=4), max_size=8))
def test_pieces_are_as_safe_as_their_text(pieces):
    growing = GrowingPrintable()
    shown = [growing.add(piece) for piece in pieces]
    assert "".join([*shown, growing.end()]) == printable("".join(pieces))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("unit", ["a", "#", "a.", "://", "a://", "?", "a:/?a#", "#a", " :", "::", "@", ":/@"])
def test_no_text_takes_long(unit):
    """Some patterns take the square of a text's length, which for these would be hours."""
    text = f"see a://{unit * 60_000} {unit * 60_000} it"
    assert printable(text).startswith("see a://")
    growing = GrowingPrintable()
    assert growing.add(text) + growing.end() == printable(text)


@pytest.mark.timeout(20)
def test_a_long_answer_is_printed_line_by_line():
    growing = GrowingPrintable()
    for _ in range(30_000):
        assert growing.add("one more line\n") == "one more line\n"
