"""`harness generate`: every line of the input gets one line of output, whatever happens on the way."""

import json
import os
import random
import resource
import signal
import time
from dataclasses import replace
from unittest.mock import Mock

import pytest

from harness.api import InfeasibleError
from harness.batch.generate import run
from harness.batch.job import BatchJob
from harness.builtin import ENGINES
from tests.integration.conftest import RANDOM_SEEDS, end, wait_for

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


class Files:
    """An input, an output and the command between them."""

    def __init__(self, cli):
        self.cli = cli
        self.source, self.output = cli.folder / "in.jsonl", cli.folder / "deep" / "out.jsonl"

    def write(self, *lines):
        """Objects as JSON, texts as they are."""
        self.source.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))

    def command(self, *more):
        model = ("--model", "fake", "--engine", "fake")
        return ["generate", *model, "--input", self.source, "--output", self.output, *more]

    def __call__(self, *more, **options):
        return self.cli(*self.command(*more), **options)

    def start(self, *more):
        """In the background, until there is an answer."""
        process = self.cli.start(*self.command(*more))
        wait_for(lambda: self.output.exists() and self.output.stat().st_size)
        return process

    def refused(self, *more):
        """What a refusal says."""
        told = self(*more, code=2).stderr
        assert told.count("harness: ") == 1
        return told

    def answers(self):
        rows = [json.loads(line) for line in self.output.read_text().splitlines()]
        assert len({row["line"] for row in rows}) == len(rows), "a line is answered once"
        return {row["line"]: row for row in rows}


@pytest.fixture
def files(cli):
    return Files(cli)


def batch(id_, url=PLAIN, **body):
    return {"custom_id": id_, "method": "POST", "url": url, "body": body}


def text(row):
    (choice,) = row["response"]["body"]["choices"]
    return choice["text"]


def test_the_formats_it_reads(files):
    files.write(
        batch("a", prompt="hello", max_tokens=5, temperature=0),
        batch("b", CHAT, messages=[{"role": "user", "content": "hi"}], max_completion_tokens=4, n=2),
        {"prompt": "hello", "max_tokens": 5},
        "",
        {"custom_id": "d", "prompt": [104, 101, 108, 108, 111], "max_tokens": 5, "seed": 3},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
    )
    done = files("--max-tokens", 7)
    assert "5 lines; 5 answered" in done.stdout
    rows = files.answers()
    assert {n: r["custom_id"] for n, r in rows.items()} == {1: "a", 2: "b", 3: None, 5: "d", 6: None}
    assert rows[1]["response"]["body"]["usage"] == {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}
    chat = rows[2]["response"]["body"]
    assert chat["object"] == "chat.completion"
    assert [c["index"] for c in chat["choices"]] == [0, 1]
    assert chat["choices"][0]["message"]["content"] != chat["choices"][1]["message"]["content"]
    assert rows[6]["response"]["body"]["usage"]["completion_tokens"] == 7
    assert all(row["error"] is None for row in rows.values())


def test_each_line_of_a_text_file_is_a_prompt(files):
    files.source = files.source.with_suffix(".txt")
    files.source.write_bytes(b'\xef\xbb\xbfsay "hi"\n\nand\tthis\n\xff\n')
    files("--max-tokens", 3, code=1)
    assert sorted(files.answers()) == [1, 3, 4]
    assert files.answers()[1]["response"]["body"]["usage"]["prompt_tokens"] == len('say "hi"')
    assert files.answers()[4]["error"]["message"] == "is not UTF-8 text (byte 1)"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("not json", "is not JSON"),
        ("[1]", "expected a JSON object, got list"),
        ("[" * 100_000, "nested too deeply"),
        ({"prmpt": "x"}, "prmpt is not a known setting; did you mean 'prompt'"),
        ({"max_tokens": 3}, "prompt is missing"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": ["a", "b"]}, "prompt: expected a string or a list of token ids"),
        ({"prompt": [5, 5000]}, "token id 5000 is outside the vocabulary of 1000"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens is 0"),
        ({"prompt": "x", "max_tokens": 5000}, "exceed the model's context of 4096"),
        ({"prompt": "x", "temperature": -1}, "temperature is -1"),
        ({"prompt": "x", "temperature": "hot"}, "temperature: input should be a valid number"),
        ('{"prompt": "x", "temperature": NaN}', "temperature is nan"),
        ({"prompt": "x", "stop": ["a", ""]}, "stop: an empty string"),
        ({"prompt": "x", "stop": [3]}, "stop: expected a string or a list of strings"),
        ({"prompt": "x", "n": 0}, "n: input should be greater than or equal to 1"),
        ({"prompt": "x", "stream": True}, "stream: input should be False"),
        ({"prompt": "x", "frequency_penalty": 0.5}, "frequency_penalty: input should be 0"),
        ({"custom_id": 5, "prompt": "x"}, "custom_id: expected a string"),
        ({"custom_id": "good", "prompt": "x"}, "custom_id 'good' was used on line 1"),
        (batch("\ud800", prompt="x"), "custom_id: input should be a valid string"),
        ({"prompt": "x\ud800"}, r"is not Unicode text: \ud800 is half of a surrogate pair"),
        ({"prompt": "x", "stop": ["a", "\udc00"]}, r"\udc00 is half of a surrogate pair"),
        ({"prompt": "x", "\ud800": 1}, r"\ud800 is half of a surrogate pair"),
        (batch("c", CHAT, messages=[{"role": "user", "content": "\ud83d"}]), r"\ud83d is half of a surrogate pair"),
        (batch("c", "/v1/embeddings", input="x"), "url: input should be '/v1/completions'"),
        (batch("c", CHAT, messages=[]), "body.messages: list should have at least 1 item"),
        (batch("c", CHAT, messages=[{"role": "robot", "content": "x"}]), "body.messages.0.role: input should be"),
        (batch("c", CHAT, messages=[{"role": "user", "content": "x"}], top_logprobs=2), "needs logprobs: true"),
    ],
)
def test_a_line_that_cannot_be_run_is_answered_with_the_reason(files, line, words):
    files.write({"custom_id": "good", "prompt": "x", "max_tokens": 2}, line, {"prompt": "y", "max_tokens": 2})
    done = files(code=1)
    assert any("in.jsonl:2: " in told and words in told for told in done.stderr.splitlines())
    rows = files.answers()
    assert words in rows[2]["error"]["message"]
    assert rows[2]["response"] is None
    assert rows[1]["error"] is rows[3]["error"] is None
    files(code=1)
    assert len(files.answers()) == 3


def test_a_dry_run_writes_nothing(files):
    files.write({"prompt": "hello"}, "nonsense")
    done = files("--dry-run", code=1)
    assert done.stdout.startswith("2 lines; 1 to run (5 prompt tokens and at most 256 new ones, 261 in the longest)")
    assert not files.output.parent.exists()


@pytest.mark.parametrize("seed", RANDOM_SEEDS)
def test_kill_minus_nine_at_random_loses_and_repeats_no_line(files, seed):
    rng = random.Random(seed)
    files.write(*({"custom_id": f"r{i}", "prompt": f"prompt {i}", "max_tokens": 2} for i in range(120)), "broken")
    slow = ("--set", "options.sleep_s=0.02", "--set", "policy.gpu_batch_size=2")
    kept = []
    for _ in range(4):
        process = files.cli.start(*files.command(*slow))
        time.sleep(rng.uniform(0.3, 1.5))
        end(process)
        lines = files.output.read_text().split("\n")[:-1] if files.output.exists() else []
        assert lines[: len(kept)] == kept, "an answer that was written stays"
        kept = lines
    files(*slow, code=1)
    assert files.output.read_text().split("\n")[: len(kept)] == kept
    assert sorted(files.answers()) == list(range(1, 122))


def test_an_interruption_is_one_line_and_goes_on(files):
    files.write(*({"prompt": f"{i}", "max_tokens": 4} for i in range(200)))
    process = files.start("--set", "options.sleep_s=0.05")
    process.send_signal(signal.SIGTERM)
    told = process.communicate(timeout=20)[1]
    assert process.returncode == 143
    assert "run the same command again to resume" in told
    assert "Traceback" not in told
    files()
    assert len(files.answers()) == 200


def test_a_torn_last_line_is_answered_again(files):
    files.write({"prompt": "a", "max_tokens": 2}, {"prompt": "b", "max_tokens": 2})
    files()
    whole = files.output.read_bytes()
    files.output.write_bytes(whole[:-20])
    files()
    assert files.output.read_bytes() == whole


@pytest.mark.parametrize("left", [0, 20])
def test_what_a_power_cut_leaves_of_a_last_line_is_answered_again(files, left):
    files.write({"prompt": "a", "max_tokens": 2}, {"prompt": "b", "max_tokens": 2})
    files()
    whole = files.output.read_bytes()
    first = whole.index(b"\n") + 1
    files.output.write_bytes(whole[: first + left].ljust(len(whole), b"\0"))
    files()
    assert files.output.read_bytes() == whole


def test_answers_to_another_input_or_of_another_model_are_not_touched(files):
    files.write({"custom_id": "a", "prompt": "a", "max_tokens": 2}, {"prompt": "b", "max_tokens": 2})
    files()
    before = files.output.read_bytes()
    files.write({"custom_id": "a", "prompt": "z", "max_tokens": 2}, {"prompt": "b", "max_tokens": 2})
    assert "they differ in line 1" in files.refused()
    files.write({"custom_id": "a", "prompt": "a", "max_tokens": 2})
    assert "they differ in line 2" in files.refused()
    files.write({"custom_id": "a", "prompt": "a", "max_tokens": 2}, {"prompt": "b", "max_tokens": 2})
    assert "or the same one under another --max-tokens or --seed" in files.refused("--seed", 1)
    files.output.write_bytes(before.replace(b"fake-0000", b"fake-1111"))
    assert "answers of another model" in files.refused()
    for mine in (b"something of mine\n", b"something of mine", b'{"a": 1}', b"\x00\x01\n\xff"):
        files.output.write_bytes(mine)
        assert "out.jsonl:1 is not an answer of a batch job" in files.refused()
        assert files.output.read_bytes() == mine
    files("--fresh")
    assert (files.output.parent / "out.1.jsonl").read_bytes() == mine
    assert sorted(files.answers()) == [1, 2]


def test_files_that_cannot_be_read_or_written_are_one_line(files):
    assert "in.jsonl cannot be read: No such file" in files.refused()
    files.write({"prompt": "a"})
    files.output = files.source
    assert "both --input and --output" in files(code=2).stderr
    files.output = files.source / "out.jsonl"
    assert "choose another --output" in files.refused()
    files.output = files.cli.folder
    assert "is not a regular file" in files.refused()


def test_a_full_disk_stops_with_one_line_and_the_rest_follows(files):
    files.write(*({"prompt": f"{i}", "max_tokens": 2} for i in range(20)))
    assert "free space, then run the same command again" in files.cli.on_full_disk(2000, *files.command())
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    assert files.output.read_bytes().endswith(b"\n")
    files()
    assert len(files.answers()) == 20


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--engine", "fakke"], 2, "did you mean 'fake'"),
        (["--memory", "much"], 2, "expected a size"),
        (["--set", "policy.nonsense=1"], 2, "unknown key 'nonsense' in policy"),
        (["--set", "repeats=3"], 2, "a job has no 'repeats'"),
        (["--set", "policy.schedule=sweep", "--dry-run"], 2, "engine fake has no policy.schedule"),
        (["--set", "options.crash=infeasible"], 4, "fake"),
        (["--set", "options.crash=unsupported"], 2, "fake"),
        (["--set", "options.crash=memory_error"], 2, "engine fake failed (oom_host): MemoryError"),
        (["--set", "options.crash=enospc"], 2, "engine fake failed (disk_full): OSError"),
        (["--set", "options.crash=exception"], 2, "engine fake failed (error): RuntimeError"),
        (["--set", "options.longest=5"], 4, "holds 5 tokens of a sequence, not 257"),
        (["--set", "policy=max_batch"], 2, "no search for the largest batch"),
        (["--set", "limits.device_memory=1GiB"], 2, "limit host_memory"),
        (["--max-tokens", "0"], 2, "--max-tokens"),
    ],
)
def test_options_that_cannot_be(files, more, code, words):
    files.write({"prompt": "a"})
    done = files(*more, code=code)
    assert words in done.stderr


def test_one_job_at_a_time_writes_an_output_and_ends_where_it_is_moved(files):
    files.write(*({"prompt": f"{i}", "max_tokens": 4} for i in range(100)))
    process = files.start("--set", "options.sleep_s=1")
    for more in ((), ("--fresh",)):
        assert "is being written by another harness" in files.refused(*more)
    files.output.rename(files.output.with_name("moved.jsonl"))
    assert "was moved or removed while the job was running" in process.communicate(timeout=20)[1]
    assert process.returncode == 2
    files()
    assert sorted(files.answers()) == list(range(1, 101))


def test_a_line_that_was_refused_can_be_mended_in_place(files):
    good = {"prompt": "x", "max_tokens": 2}
    files.write(good, "broken", {"custom_id": "c", "prompt": "", "max_tokens": 2}, "broken too")
    files(code=1)
    before = files.output.read_text().splitlines()
    files.write(good, good, {"custom_id": "c", "prompt": "y", "max_tokens": 2}, "broken too")
    assert "2 from an earlier run, 1 of them refused; 2 to run" in files("--dry-run", code=1).stdout
    assert files.output.read_text().splitlines() == before
    assert "2 from an earlier run, 1 of them refused; 2 answered" in files(code=1).stdout
    rows = files.answers()
    assert [rows[n]["error"] is None for n in (1, 2, 3, 4)] == [True, True, True, False]
    assert not [p for p in files.output.parent.iterdir() if p != files.output], "nothing is left beside it"


def test_lines_too_long_for_the_memory_are_refused_and_the_others_run(files):
    files.write(*({"prompt": "x" * n, "max_tokens": 10} for n in (50, 5, 300, 90, 91, 7, 200)))
    dry = files("--set", "options.longest=100", "--dry-run", code=1)
    assert "7 lines; 4 to run" in dry.stdout and "3 refused" in dry.stdout
    assert "in.jsonl:3: 310 tokens (prompt and new) are too long for the memory" in dry.stderr
    done = files("--set", "options.longest=100", code=1)
    assert "7 lines; 4 answered" in done.stdout
    rows = files.answers()
    assert [n for n, row in rows.items() if row["error"]] == [3, 5, 7]
    allowed = "310 tokens (prompt and new) are too long for the memory limit, which allows 100"
    assert allowed in rows[3]["error"]["message"]
    done = files("--set", "options.longest=500")
    assert "4 from an earlier run, 0 of them refused; 3 answered" in done.stdout


@pytest.fixture
def run_without_planner(files, monkeypatch):
    """Runs a job on an engine that has memory for so many tokens of a sequence, and cannot tell before it is loaded."""
    monkeypatch.setitem(ENGINES, "fake", replace(ENGINES["fake"], longest=""))

    def go(limit, progress):
        longest, cache = f"options.longest={limit}", files.cli.folder / "cache"
        job = BatchJob("fake", "fake", "1GiB", (longest,), files.source, files.output, cache, max_tokens=10)
        return run(job, progress, print)

    return go


@pytest.mark.parametrize(
    ("prompts", "limit", "loads"),
    [
        ((5, 50, 300, 7), 100, [310, 60]),  # one line is too long
        ((5, 50, 90, 7), 100, [100]),  # none is
        ((300, 5, 301, 7, 302, 303), 100, [313, 312, 310, 15, 17]),  # all but two
        (tuple(range(1, 65)), 31, [74, 73, 71, 67, 59, 43, 11, 27, 35, 31, 33, 32, 31]),  # most, of many lengths
    ],
)
def test_an_engine_without_a_planner_refuses_only_the_lines_it_has_no_memory_for(
    files, run_without_planner, prompts, limit, loads
):
    files.write(*({"prompt": "x" * n, "max_tokens": 10} for n in prompts))
    progress = Mock()
    lines = run_without_planner(limit, progress)
    said = [call.args[0] for call in progress.note.call_args_list]
    too_long = {number: n + 10 for number, n in enumerate(prompts, 1) if n + 10 > limit}
    assert {n: row["error"]["message"] for n, row in files.answers().items() if row["error"]} == {
        number: f"{tokens} tokens (prompt and new) are too long for the memory limit: engine fake holds {limit} tokens "
        f"of a sequence, not {min(too_long.values())}"
        for number, tokens in too_long.items()
    }
    assert sorted(files.answers()) == list(range(1, len(prompts) + 1))
    assert (len(lines.ready), len(lines.refused)) == (len(prompts) - len(too_long), len(too_long))
    loading = [f"loading fake in fake for sequences of up to {tokens} tokens" for tokens in loads]
    assert [text for text in said if "loading" in text] == loading
    assert len([text for text in said if "too long" in text]) == min(20, len(too_long))
    assert list((files.cli.folder / "cache").rglob("*")) == [files.cli.folder / "cache" / "work"], "no load leaves more"


def test_an_engine_without_a_planner_that_has_no_memory_for_any_line_ends_the_job(files, run_without_planner):
    files.write({"prompt": "xx", "max_tokens": 2}, {"prompt": "x", "max_tokens": 2})
    with pytest.raises(InfeasibleError, match="cannot run 2 lines of up to 4 tokens: engine fake holds 2 tokens"):
        run_without_planner(2, Mock())
    assert files.output.read_bytes() == b""


def test_an_engine_that_refuses_to_load_is_one_line(files):
    files.write({"prompt": "xx", "max_tokens": 2}, {"prompt": "x", "max_tokens": 2})
    done = files("--set", "options.crash=infeasible", code=4)
    assert files.output.read_bytes() == b""
    assert "harness: cannot run 2 lines of up to 4 tokens: engine fake needs at least 2 bytes" in done.stderr
    longest = files("--set", "options.longest=2", code=4)
    assert longest.stderr.count("holds 2 tokens of a sequence, not 3") == 1


def test_an_output_that_is_also_stdout_is_refused(files):
    files.write({"prompt": "a", "max_tokens": 2})
    files.output = files.cli.folder / "stdout.jsonl"
    with files.output.open("w") as stdout:
        assert "choose another --output" in files(code=2, stdout=stdout).stderr
    assert not files.output.read_text()


def test_any_text_is_an_id_and_neutral_settings_are_accepted(files):
    files.write(
        '{"custom_id": "\\ud800", "prompt": "x", "max_tokens": 2}',
        {"prompt": "x", "max_tokens": 2, "frequency_penalty": 0.0, "presence_penalty": 0, "stream": False},
    )
    files()
    assert files.answers()[1]["custom_id"] == "\ud800"
    files()


def test_a_line_without_end_is_refused_and_the_next_is_answered(files):
    files.write({"prompt": "a", "max_tokens": 2})
    with files.source.open("ab") as file:
        file.truncate(file.tell() + (100 << 20))
        file.seek(0, 2)
        file.write(b'\n{"prompt": "b", "max_tokens": 2}\n')
    files(code=1)
    assert sorted(files.answers()) == [1, 2, 3]
    assert "has more than 16 MiB" in files.answers()[2]["error"]["message"]


@pytest.mark.parametrize("which", ["source", "output"])
def test_a_pipe_holds_nobody_up(files, which):
    files.write({"prompt": "a"})
    getattr(files, which).unlink(missing_ok=True)
    getattr(files, which).parent.mkdir(exist_ok=True)
    os.mkfifo(getattr(files, which))
    assert "is not a regular file" in files(code=2, timeout=20).stderr


def prompt(cli, *more, **options):
    """`harness generate --prompt` on the fake engine."""
    return cli("generate", "--model", "fake", "--engine", "fake", "--max-tokens", 6, "--prompt", *more, **options)


def test_one_prompt_is_answered_on_the_terminal(cli, files):
    done = prompt(cli, "hi")
    files.write({"prompt": "hi", "max_tokens": 6, "seed": 1})
    files("--output", "-")
    text = json.loads(files("--output", "-").stdout)["response"]["body"]["choices"][0]["text"]
    assert done.stdout == f"{text}\n"
    assert done.stderr.startswith("6 tokens in ") and done.stderr.endswith("cut off by --max-tokens\n")
    assert prompt(cli, "hi", "--chat").stdout not in ("", done.stdout)


@pytest.mark.parametrize(
    ("more", "code", "told"),
    [
        (["hi", "--output", "-"], 2, "--output goes with a file of requests"),
        (["hi", "--dry-run"], 2, "--dry-run goes with a file of requests"),
        ([""], 2, "the prompt is empty"),
        (["x" * 5000], 2, "exceed the model's context of 4096"),
        (["x" * 90, "--set", "options.longest=60"], 4, "engine fake holds 60 tokens"),
        (["hi", "--set", "options.crash=exception"], 2, "engine fake failed (error): RuntimeError"),
    ],
)
def test_a_prompt_that_cannot_be_answered_is_one_line(cli, more, code, told):
    done = prompt(cli, *more, code=code)
    assert told in done.stderr.splitlines()[-1]
    assert done.stdout in ("", done.stdout.rstrip("\n") + "\n"), "what came before the failure ends its line"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "give --prompt TEXT, or --input FILE and --output FILE"),
        (["--input", "-"], "give --prompt TEXT, or --input FILE and --output FILE"),
        (["--input", "-", "--output", "-", "--chat"], "--chat goes with --prompt"),
        (["--input", "-", "--output", "-", "--fresh"], "--fresh goes with a file of answers"),
    ],
)
def test_a_job_needs_an_input_and_an_output(cli, arguments, told):
    assert told in cli("generate", "--model", "fake", "--engine", "fake", *arguments, code=2).stderr


def test_a_job_in_a_pipe(cli, files):
    """Its answers alone are on stdout; with a file of answers it resumes as with a file of requests."""
    lines = '{"prompt": "a", "max_tokens": 2}\n\nnonsense\n{"prompt": "b", "max_tokens": 2}\n'
    start = ("generate", "--model", "fake", "--engine", "fake", "--input", "-", "--output")
    done = cli(*start, "-", code=1, input=lines)
    rows = {row["line"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert sorted(rows) == [1, 3, 4] and "is not JSON" in rows[3]["error"]["message"]
    assert "3 lines; 2 answered" in done.stderr and "stdin:3: is not JSON" in done.stderr
    cli(*start, files.output, code=1, input=lines)
    assert files.answers() == rows
    assert (
        "3 from an earlier run, 1 of them refused; 0 answered" in cli(*start, files.output, code=1, input=lines).stdout
    )
    assert "answers another input than stdin" in cli(*start, files.output, code=2, input=lines[::-1]).stderr
