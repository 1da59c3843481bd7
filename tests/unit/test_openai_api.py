"""Engine openai_api against a small server: streams, counts, faults in one line, servers started, awaited and ended."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.adapters.fake import MODEL
from engines.adapters.openai_api import OpenAiApiEngine
from engines.adapters.openai_client import spread
from engines.adapters.server_process import Launch
from harness import api
from harness.launchers.process import ProcessSandbox
from harness.run import worker
from harness.run.load_plan import LoadPlan
from harness.run.load_test import LoadTest
from harness.run.online import notes_of
from tests.fake_openai import Server, serve
from tests.unit.test_load_test import conversation

ROOT = Path(__file__).parents[2]
_SCRIPT = f"import sys; sys.path.insert(0, '{ROOT}'); from tests.fake_openai import main; main()"
COMMAND = f'{sys.executable} -P -c "{_SCRIPT}" --port {{port}}'


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = serve()
    yield running
    running.shutdown()
    running.server_close()


def seen(server: Server) -> list[dict[str, Any]]:
    bodies: list[dict[str, Any]] = server.RequestHandlerClass.seen
    return bodies


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def load(engine: OpenAiApiEngine, folder: Path, **policy: Any) -> api.LoadReport:
    return engine.load(MODEL, api.OffloadPolicy(**policy), api.HardwareLimits(), api.Job(folder, folder, 64, 32))


def asked(name: str, *prompt: int, count: int = 4) -> api.GenerationRequest:
    return api.GenerationRequest(name, prompt, api.SamplingParams(max_tokens=count, ignore_eos=True))


@pytest.fixture
def engine(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAiApiEngine]:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # this host is not reached through a proxy
    made = OpenAiApiEngine(base_url=url(server) + "/v1/")
    load(made, tmp_path)
    yield made
    made.close()


def events_of(engine: OpenAiApiEngine, *requests: api.GenerationRequest) -> dict[str, api.Event]:
    for request in requests:
        engine.submit(request)
    found: dict[str, api.Event] = {}
    while engine.pending():
        for event in engine.step():
            found[event.result.id if isinstance(event, api.FinishedEvent) else event.id] = event
    assert engine.step() == []
    return found


def test_the_served_name_may_be_the_checkpoints_folder(server: Server, tmp_path: Path) -> None:
    """As `transformers serve` wants it, which lists only models of the hub's cache."""
    engine = OpenAiApiEngine(base_url=url(server), model="{model}")
    model = replace(MODEL, path=str(tmp_path))
    report = engine.load(model, api.OffloadPolicy(), api.HardwareLimits(), api.Job(tmp_path, tmp_path, 64, 32))
    events_of(engine, asked("a", 7))
    engine.close()
    assert seen(server)[-1]["model"] == str(tmp_path)
    assert report.notes == (f"server: version 1.2.3, model {tmp_path.name}, completions from ids",)


@pytest.mark.parametrize(("place", "kind"), [("{gguf}", "BF16"), ("{gguf_f16}", "F16")])
def test_a_server_gets_the_weights_as_a_gguf_file_of_their_dtype_or_in_float16(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str, kind: str
) -> None:
    words: list[str] = []

    def started(launch: Launch, command: list[str], files: object, log: Path) -> None:
        words.extend(command)
        raise api.UnsupportedError("not started")

    monkeypatch.setattr("engines.models.gguf_writer.to_gguf", lambda model, job, kind: tmp_path / kind)
    monkeypatch.setattr("engines.adapters.openai_api.ServerProcess", started)
    engine = OpenAiApiEngine(command=f"server --model {place}")
    with pytest.raises(api.UnsupportedError, match="not started"):
        engine.load(
            replace(MODEL, dtype="bfloat16"), api.OffloadPolicy(), api.HardwareLimits(),
            api.Job(tmp_path, tmp_path, 64, 32),
        )  # fmt: skip
    assert words == ["server", "--model", str((tmp_path / kind).absolute())]


def test_a_server_of_an_environment_without_the_package_gguf_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def started(launch: Launch, command: list[str], files: object, log: Path) -> None:
        raise api.UnsupportedError("not started")

    monkeypatch.setitem(sys.modules, "engines.models.gguf_writer", None)  # its import fails
    monkeypatch.setattr("engines.adapters.openai_api.ServerProcess", started)
    with pytest.raises(api.UnsupportedError, match="not started"):
        load(OpenAiApiEngine(command="server --model {model}"), tmp_path)


def test_answers_have_the_servers_counts_and_a_time_for_each_token(engine: OpenAiApiEngine, server: Server) -> None:
    before = engine.clock()
    (event,) = events_of(engine, asked("a", 7, 8, 9)).values()
    assert isinstance(event, api.FinishedEvent)
    result = event.result
    assert (result.prompt_tokens, result.tokens, result.finish_reason) == (3, (-1,) * 4, "length")
    assert result.cached_tokens == 2
    times = [before, result.start_s, *result.token_times_s, engine.clock()]
    assert times == sorted(times)
    assert len(result.token_times_s) == 4
    body = seen(server)[-1]
    assert body["prompt"] == [7, 8, 9]
    assert (body["model"], body["max_tokens"], body["stream"], body["ignore_eos"]) == ("fake-model", 4, True, True)
    assert body["stream_options"] == {"include_usage": True}
    assert "seed" not in body
    assert engine.trace().metrics == {"answers_in_other_pieces": 0.0}


@pytest.mark.parametrize(
    ("fault", "words", "kind"),
    [
        (501, "the server answered HTTP 503: the queue is full", "infeasible"),
        (400, "the server answered HTTP 400: too long", "invalid"),
        (502, "the connection failed after 1 pieces: the answer was cut off", "infeasible"),
        (503, "the server failed: out of blocks", "infeasible"),
        (508, "the server sent no JSON: '{nothing'", "infeasible"),
        (509, "the server sent an event of more than 2 MiB", "infeasible"),
    ],
)
def test_a_request_that_fails_is_told_in_one_line_and_others_go_on(
    engine: OpenAiApiEngine, fault: int, words: str, kind: str
) -> None:
    found = events_of(engine, asked("bad", fault), asked("good", 9))
    bad = found["bad"]
    assert isinstance(bad, api.RefusedEvent)
    assert bad.reason.startswith(words)
    assert "\n" not in bad.reason
    assert bad.kind == kind
    assert isinstance(found["good"], api.FinishedEvent)
    with pytest.raises(api.HarnessError, match=words.partition(":")[0]):
        list(engine.generate([asked("bad", fault)]))


def test_several_tokens_in_a_piece_are_counted_and_told(engine: OpenAiApiEngine) -> None:
    (event,) = events_of(engine, asked("a", 504, count=5)).values()
    assert isinstance(event, api.FinishedEvent)
    assert len(event.result.token_times_s) == len(event.result.tokens) == 5
    assert len(set(event.result.token_times_s)) <= 3
    assert engine.trace().metrics == {"answers_in_other_pieces": 1.0}


@pytest.mark.parametrize("count", [1, 3])
def test_a_last_token_without_text_is_there_when_the_answer_ends(engine: OpenAiApiEngine, count: int) -> None:
    (event,) = events_of(engine, asked("a", 510, count=count)).values()
    assert isinstance(event, api.FinishedEvent)
    times = event.result.token_times_s
    assert len(times) == len(event.result.tokens) == count
    assert len(set(times)) == count and list(times) == sorted(times)


def test_a_pending_request_can_be_cancelled_at_any_time(engine: OpenAiApiEngine) -> None:
    engine.submit(asked("late", 506))
    engine.submit(asked("at-once", 506))
    engine.cancel("at-once")
    engine.cancel("unknown")
    engine.cancel("late")
    found = events_of(engine)
    results = [event.result for event in found.values() if isinstance(event, api.FinishedEvent)]
    assert {(r.id, r.finish_reason) for r in results} == {("late", "cancelled"), ("at-once", "cancelled")}


def test_the_load_generator_drives_it(engine: OpenAiApiEngine) -> None:
    source = [conversation(f"c{i}", 0.002 * i, (3, 4, 0.0), (2, 3, 0.001)) for i in range(5)]
    plan = LoadPlan(iter([*source, conversation("short", 0.0, (1, 4, 0.0))]))
    served = LoadTest(engine, engine.capabilities(), plan, 1000, 30.0, api.ignore_events, "", 1).run()
    assert {r.outcome for r in served} == {"ok"}
    assert len(served) == 11
    assert {r.prompt_tokens for r in served if r.round == 1} == {3 + 4 + 2}
    assert all(r.due_s <= r.sent_s <= r.token_times_s[0] for r in served)
    assert {r.cached_tokens for r in served if r.round == 1} == {3 + 4 + 2 - 1}
    assert engine.pending() == 0


def test_a_server_may_not_tell_of_its_cache(engine: OpenAiApiEngine) -> None:
    (event,) = events_of(engine, asked("a", 507)).values()
    assert isinstance(event, api.FinishedEvent)
    assert event.result.cached_tokens is None


def test_answers_that_the_server_ends_early_are_noted(engine: OpenAiApiEngine) -> None:
    plan = LoadPlan(iter([api.Conversation("c", 0.0, (api.Turn((505,), 4),))]))
    (served,) = LoadTest(engine, engine.capabilities(), plan, 1000, 30.0, api.ignore_events, "", 1).run()
    assert (len(served.token_times_s), served.asked_tokens) == (1, 4)
    notes = notes_of([api.ServedRate(1.0, 1.0, (served,))])
    assert notes[-1] == "1 of 1 answers are shorter than asked: the server does not ignore_eos"


def test_chat_sends_text_and_body_changes_keys(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "engines.adapters.openai_api.Text", lambda model: type("T", (), {"decode": lambda s, t: "hi"})()
    )
    monkeypatch.setenv("SOME_KEY", "k1")
    engine = OpenAiApiEngine(
        base_url=url(server), endpoint="chat", prompt="text", model="other", api_key_env="SOME_KEY",
        body={"ignore_eos": None, "stream_options": None, "min_tokens": 4},
    )  # fmt: skip
    load(engine, tmp_path)
    try:
        assert len(list(engine.generate([asked("a", 7)]))) == 1
    finally:
        engine.close()
    body = seen(server)[-1]
    assert body["path"] == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert (body["model"], body["min_tokens"], body["key"]) == ("other", 4, "Bearer k1")
    assert not {"ignore_eos", "stream_options"} & body.keys()


def test_a_server_is_started_awaited_named_and_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    engine = OpenAiApiEngine(command=COMMAND)
    report = load(engine, tmp_path, gpu_batch_size=3)
    assert report.notes == ("server: version 1.2.3, model fake-model, completions from ids",)
    assert len(list(engine.generate([asked("a", 7), asked("b", 8)]))) == 2
    group = engine._server._process.pid
    engine.close()
    engine.close()
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)
    assert "listening" in capfd.readouterr().err


def test_a_server_that_ends_is_told_with_its_last_line(tmp_path: Path) -> None:
    engine = OpenAiApiEngine(command=f"{COMMAND} --fail")
    with pytest.raises(api.HarnessError, match="the server ended with 7: CUDA error: no device"):
        load(engine, tmp_path)
    engine.close()


def test_a_server_that_is_never_ready_is_told(tmp_path: Path) -> None:
    engine = OpenAiApiEngine(command=f"{COMMAND} --never-ready", start_timeout=0.5)
    with pytest.raises(api.HarnessError, match=r"not ready after 0.5 s \(options.start_timeout\)"):
        load(engine, tmp_path)
    engine.close()


def test_a_server_that_dies_while_it_serves_ends_the_launch(tmp_path: Path) -> None:
    engine = OpenAiApiEngine(command=COMMAND)
    load(engine, tmp_path)
    try:
        engine.submit(asked("a", 506))
        os.killpg(engine._server._process.pid, signal.SIGKILL)
        with pytest.raises(api.HarnessError, match="the server ended with"):
            while engine.pending():
                engine.step()
    finally:
        engine.close()


def test_a_container_is_started_by_docker_and_stopped_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n[ $1 = stop ] || sleep 60\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    engine = OpenAiApiEngine(image="vllm/vllm-openai", command="--model {model} --port {port}", start_timeout=0.3)
    with pytest.raises(api.HarnessError, match="not ready"):
        load(engine, tmp_path)
    engine.close()
    run, stop = (tmp_path / "calls").read_text().splitlines()
    assert run.startswith("run --rm --name offload-harness-")
    assert "--network host" in run
    assert "vllm/vllm-openai --model" in run
    assert stop.split()[-1] == run.split()[3]


def test_a_container_sees_what_its_command_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of the hub are links into another folder; of a missing one there is nothing to see."""
    blobs, model, gguf = tmp_path / "a, b" / "blobs", tmp_path / "a, b" / "snapshots" / "1", tmp_path / "m.gguf"
    blobs.mkdir(parents=True)
    model.mkdir(parents=True)
    gguf.touch()
    (blobs / "x").touch()
    (model / "model.safetensors").symlink_to("../../blobs/x")
    (model / "gone").symlink_to("nowhere")
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {tmp_path}/calls\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    monkeypatch.setattr("engines.models.gguf_writer.to_gguf", lambda model, job, kind: gguf)
    engine = OpenAiApiEngine(image="i", command="--model {model} --gguf {gguf}")
    limits, job = api.HardwareLimits(device_memory=1 << 30), api.Job(tmp_path, tmp_path, 64, 32)
    with pytest.raises(api.HarnessError, match="the server ended with 0"):
        engine.load(replace(MODEL, path=str(model)), api.OffloadPolicy(), limits, job)
    engine.close()
    calls = (tmp_path / "calls").read_text().splitlines()

    def bind(source: Path, inside: Path) -> str:
        return f'"type=bind","source={source}","target={inside}","readonly"'

    mounted = [calls[i + 1] for i, word in enumerate(calls) if word == "--mount"]
    assert mounted == [bind(blobs / "x", model / "model.safetensors"), bind(gguf, gguf)]
    assert calls[calls.index("--gpus") + 1] == '"device=0,2"'
    assert calls[calls.index("--pull") + 1] == "never"


def test_a_container_is_removed_with_its_worker_whatever_ended_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker and guard are killed, as at a memory limit: only the harness is left."""
    docker = tmp_path / "docker"
    docker.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n[ "$1" = run ] || exit 0\n'
        "kill -9 $PPID $(cut -d' ' -f4 /proc/$PPID/stat)\nexec sleep 60\n"
    )
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    workload = api.WorkloadSpec("arrivals", 8, 4, rate=1.0, num_requests=1)
    spec = api.RunSpec("openai_api", api.ModelSpec("fake"), workload, options={"image": "i", "command": "c"})
    work = api.RunCell(spec, MODEL, tmp_path / "cache", time.monotonic())
    outcome = ProcessSandbox().run(api.WorkerRequest(work, api.Exchange(tmp_path / "x", tmp_path / "log"), 60.0))
    assert outcome.exit_code == -9
    run, removed = (tmp_path / "calls").read_text().splitlines()
    assert removed == f"rm --force {run.split()[3]}"


def test_requests_that_are_all_there_are_not_for_a_server(tmp_path: Path) -> None:
    """Its tokens have no ids that could be checked."""
    spec = api.RunSpec("openai_api", api.ModelSpec("fake"), api.WorkloadSpec(), options={"command": "no-such-program"})
    work = api.RunCell(spec, MODEL, tmp_path / "cache", time.monotonic())
    outcome = ProcessSandbox().run(api.WorkerRequest(work, api.Exchange(tmp_path / "x", tmp_path / "log"), 60.0))
    assert outcome.result is not None and outcome.result.status == "unsupported"
    assert "tells no token ids: give it a workload of kind arrivals" in outcome.result.reason


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "give base_url, or command"),
        ({"base_url": "http://x", "command": "y"}, "give base_url, or command"),
        ({"base_url": "localhost:8000"}, "must begin with http"),
        ({"base_url": "http://x", "endpoint": "chat"}, "chat needs prompt: text"),
        ({"base_url": "http://x", "endpoint": "responses"}, "endpoint is completions or chat"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        OpenAiApiEngine(**options)


@pytest.mark.parametrize(
    ("command", "words"),
    [("no-such-program-here", "there is no program 'no-such-program-here'"), ("a 'b", "options.command: No closing"),
     ("a {prot}", "unknown placeholder {prot}; known: {python}")],
)  # fmt: skip
def test_a_command_that_cannot_be_run_is_told(command: str, words: str, tmp_path: Path) -> None:
    engine = OpenAiApiEngine(command=command)
    with pytest.raises(api.HarnessError, match=words.replace("{", r"\{")):
        load(engine, tmp_path)
    engine.close()


def test_nothing_at_the_address_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 1000, 2))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    engine = OpenAiApiEngine(base_url="http://127.0.0.1:9")
    monkeypatch.setattr("engines.adapters.openai_api.time.monotonic", lambda: float(next(ticks)))
    with pytest.raises(api.HarnessError, match=r"no server answers at options.base_url"):
        load(engine, tmp_path)
    engine.close()


def test_the_idle_footprint_starts_no_server(tmp_path: Path) -> None:
    spec = api.RunSpec("openai_api", api.ModelSpec("fake"), api.WorkloadSpec(), options={"command": "no-such-program"})
    assert worker._idle(tmp_path, api.MeasureIdle(spec, MODEL, tmp_path)) > 0


def test_placeholders_fill_words_and_never_split_them() -> None:
    launch = Launch("serve --at '{port} x' {model}")
    assert launch.words({"port": lambda: 5, "model": lambda: "/a b/c"}) == ["serve", "--at", "5 x", "/a b/c"]


@given(st.integers(1, 40), st.integers(1, 40))
def test_tokens_are_spread_over_pieces_in_order_from_the_first_to_the_last(pieces: int, tokens: int) -> None:
    times = spread(list(range(pieces)), tokens)
    assert len(times) == tokens
    assert list(times) == sorted(times)
    assert times[0] == 0
    assert tokens == 1 or times[-1] == pieces - 1
    assert tokens != pieces or list(times) == list(range(pieces))
