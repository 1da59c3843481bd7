"""Servers of the fake engine in a thread, and clients of them."""

import asyncio
import contextlib
import http.client
import json
import threading
import time
from pathlib import Path

import uvicorn

from engines.adapters.fake import MODEL, SHAPE, FakeEngine, FakeText
from harness.api import GenerationRequest, HardwareLimits, Job, OffloadPolicy, SamplingParams
from harness.serve.app import make_app
from harness.serve.batches import batches_of
from harness.serve.connections import connection_class
from harness.serve.engine_loop import EngineLoop
from harness.serve.served import Served
from harness.serve.server import _listen
from harness.serve.settings import ServeSettings

#: What servers said.
NOTES: list[str] = []
SETTINGS = ServeSettings("fake", "fake", None, (), Path(), keep_alive_s=0.05)


def loaded(**options):
    engine = FakeEngine(**options)
    policy, longest = OffloadPolicy(gpu_batch_size=4), options.get("longest", SHAPE.max_context)
    engine.load(MODEL, policy, HardwareLimits(host_memory=1 << 30), Job(Path(), Path(), longest, 8))
    return engine


@contextlib.contextmanager
def serving(settings=SETTINGS, folder=None, digest="digest", **options):
    """The port and the loop of a server in a thread; with a `folder`, it has files and batches of model `digest`."""
    engine = loaded(**options)
    loop = EngineLoop(engine, settings.max_pending)
    served = Served(engine, loop, "fake", SHAPE, FakeText(MODEL), SHAPE.max_context, settings)
    with contextlib.ExitStack() as opened:
        batches = folder and opened.enter_context(batches_of(served, folder, 4, lambda advance: digest, NOTES.append))
        port = opened.enter_context(_listening(make_app(served, batches), settings))
        opened.callback(loop.close, timeout_s=10)
        yield port, loop


@contextlib.contextmanager
def _listening(app, settings):
    """The port of an application in a thread, with connections as `settings` say."""
    listener = _listen("127.0.0.1", 0)
    http = connection_class(settings.max_connections, settings.patience_s)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", http=http))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
        listener.close()


def alone(prompt, max_tokens, **sampling):
    """What the engine answers when it is asked directly."""
    request = GenerationRequest("0", tuple(prompt), SamplingParams(max_tokens, temperature=1.0, **sampling))
    [result] = loaded().generate([request])
    return FakeText(MODEL).decode(result.tokens)


def ask(port, path="/v1/completions", body=None, method="POST", **headers):
    """Status and body of a raw request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, body if isinstance(body, bytes | None) else json.dumps(body), headers)
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response, json.loads(text) if text.startswith(b"{") else text


def until(condition):
    """Waits for what another thread brings about."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
