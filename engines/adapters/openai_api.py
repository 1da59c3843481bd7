"""Any server with OpenAI's API as an engine: started or given by its address, asked by streamed completions."""

import asyncio
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp

from engines.adapters.openai_client import Completion, RequestFailed, client, complete
from engines.adapters.server_process import PLACES, Launch, ServerProcess, free_port
from engines.common.text import Text
from harness import api
from harness.common.system import usable_cpus

#: Where servers tell their version, and under which key.
_VERSIONS = (("/version", "version"), ("/props", "build_info"), ("/get_server_info", "version"), ("/info", "version"))
#: Seconds that `step` waits for an event.
_WAIT_S = 0.05
#: How long after a connection was lost its server's process may take to end.
_ENDS_S = 0.2
#: Names of this host, which no proxy knows.
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
#: Positions that llama.cpp's server keeps free in each sequence.
_SPARE = 16
_GGUF_KINDS: Mapping[api.Dtype, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class OpenAiApiEngine(api.OnlineEngine):
    """Honours policy.gpu_batch_size, as {batch} in the command; all else is the server's own.

    One of `base_url` (a server that runs, such as http://gpu-host:8000) and `command`, with `image` for a container:
    there `command` is what follows the image's entry point. Placeholders: {port}, {model} (the checkpoint's folder),
    {gguf} (the checkpoint as a GGUF file of its dtype) and {gguf_f16} (in float16), {context} (tokens of the longest
    sequence), {batch}, {contexts} (of a batch of them), {threads}, {memory} (limits.host_memory in bytes), {python} and
    {prefix} (of the environment).

    `model`: the served name, in which {model} is the checkpoint's folder; by default the first of /v1/models.
    `endpoint`: completions, or chat. `prompt`: token ids, or text, which the server tokenizes by itself. `health`: the
    path that answers 200 when the server is ready. `body`: keys of every request beside the standard ones and
    ignore_eos; None takes one away. `api_key_env`: the environment variable that holds the key. Raises UnsupportedError
    for scores.
    """

    name = "openai_api"
    _server: ServerProcess | None = None
    _loop: asyncio.AbstractEventLoop | None = None

    def __init__(
        self, *, base_url: str = "", command: str | Sequence[str] = "", image: str = "", model: str = "",
        endpoint: Literal["completions", "chat"] = "completions", prompt: Literal["ids", "text"] = "ids",
        health: str = "/health", start_timeout: float = 600.0, body: Mapping[str, Any] | None = None,
        api_key_env: str = "",
    ) -> None:  # fmt: skip
        if bool(base_url) == bool(command or image):
            raise TypeError("give base_url, or command and image")
        if endpoint not in ("completions", "chat") or prompt not in ("ids", "text"):
            raise TypeError("endpoint is completions or chat, prompt is ids or text")
        if endpoint == "chat" and prompt == "ids":
            raise TypeError("endpoint chat needs prompt: text")
        if base_url and not base_url.startswith(("http://", "https://")):
            raise TypeError(f"base_url {base_url!r} must begin with http:// or https://")
        self._base_url, self._launch = base_url.rstrip("/").removesuffix("/v1"), Launch(command, image)
        self._served, self._endpoint, self._prompt = model, endpoint, prompt
        self._health = f"/{health.lstrip('/')}"
        self._start_timeout, self._api_key_env = start_timeout, api_key_env
        self._body: dict[str, Any] = {"ignore_eos": True} | dict(body or {})
        self._pieces_differ = 0

    def capabilities(self) -> api.Capabilities:
        return api.Capabilities(phased=False, remote=True, device=True, packages=("aiohttp",))

    def load(
        self, model: api.LocalModel, policy: api.OffloadPolicy, limits: api.HardwareLimits, job: api.Job
    ) -> api.LoadReport:
        policy.require_defaults_except(self.name, "gpu_batch_size")
        self._model = model
        self._text = Text(model) if self._prompt == "text" else None
        key = os.environ.get(self._api_key_env, "") if self._api_key_env else ""
        if self._api_key_env and not key:
            raise api.HarnessError(f"options.api_key_env: {self._api_key_env} is not set; export it")
        url = self._base_url or self._start(model, policy, limits, job)
        self._began = time.monotonic()
        self._events: queue.SimpleQueue[api.Event] = queue.SimpleQueue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._pending: set[str] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="openai client", daemon=True)
        self._thread.start()
        self._url = url
        self._http = self._call(self._open(key))
        healthy = self._server.wait if self._server else _wait_for_given
        healthy(lambda: self._call(self._answers()), self._start_timeout if self._server else 5.0)
        self._served = self._served.replace("{model}", model.path) or self._call(self._first_model())
        named = Path(self._served).name if self._served.startswith("/") else self._served  # records name no folders
        return api.LoadReport(
            vocab=model.shape.vocab,
            max_context=model.shape.max_context,
            block_size=policy.block_size,
            policy=policy,
            compute_dtype=model.dtype,
            weights_by_tier=(0, 0, 0),
            notes=(f"server: {self._call(self._version())}, model {named}, {self._endpoint} from {self._prompt}",),
        )

    def _start(
        self, model: api.LocalModel, policy: api.OffloadPolicy, limits: api.HardwareLimits, job: api.Job
    ) -> str:  # fmt: skip
        """Starts the server; returns its address."""
        port = free_port()
        threads = limits.threads or usable_cpus()
        # each by itself: the files of a hub's folder are links to elsewhere
        folder = sorted(Path(model.path).iterdir()) if self._launch.image and model.path else []
        files = {str(file): file.resolve() for file in folder if file.exists()}

        def gguf(kind: str) -> Path:
            from engines.models.gguf_writer import to_gguf  # environments of other servers lack its package

            path = to_gguf(model, job, kind).absolute()
            files[str(path)] = path.resolve()
            return path

        values: dict[str, Callable[[], object]] = {
            **PLACES,
            "port": lambda: port,
            "model": lambda: model.path,
            "gguf": lambda: gguf(_GGUF_KINDS[model.dtype]),
            "gguf_f16": lambda: gguf("F16"),
            "context": lambda: job.max_sequence,
            "contexts": lambda: (job.max_sequence + _SPARE) * policy.block_size,
            "batch": lambda: policy.block_size,
            "threads": lambda: threads,
            "memory": lambda: limits.host_memory or 0,
        }
        launch = Launch(self._launch.command, self._launch.image, limits.gpu)
        words = launch.words(values)  # first: it may make the GGUF file
        self._server = ServerProcess(launch, words, files, job.scratch / "server.log")
        return f"http://127.0.0.1:{port}"

    def submit(self, request: api.GenerationRequest) -> None:
        """Sends a request at once, from any thread."""
        assert self._loop is not None
        self._pending.add(request.id)
        self._loop.call_soon_threadsafe(self._begin, request)

    def cancel(self, request_id: str) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._cancel, request_id)

    def step(self) -> list[api.Event]:
        """What has arrived since the last step; waits a moment where nothing has."""
        events: list[api.Event] = []
        try:
            if self._pending:
                events.append(self._events.get(timeout=_WAIT_S))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            pass
        lost = False
        for event in events:
            if isinstance(event, api.FinishedEvent):
                self._pending.discard(event.result.id)
            elif isinstance(event, api.RefusedEvent):
                self._pending.discard(event.id)
                lost = lost or event.kind == "infeasible"
        if lost and self._server:
            self._server.require_alive(_ENDS_S)
        return events

    def pending(self) -> int:
        return len(self._pending)

    def clock(self) -> float:
        return time.monotonic() - self._began

    def stats(self) -> api.OnlineStats:
        """Only what a client knows: requests on their way count as running."""
        return api.OnlineStats(0, len(self._pending), {}, {}, 0, 0, 0, 0.0)

    def generate(self, requests: Sequence[api.GenerationRequest]) -> Iterator[api.GenerationResult]:
        for request in requests:
            request.refuse_settings(self.name, "stop", "min_tokens", "logprobs", "top_k", "min_p", "json_schema")
            self.submit(request)
        while self._pending:
            for event in self.step():
                if isinstance(event, api.FinishedEvent):
                    yield event.result
                elif isinstance(event, api.RefusedEvent):
                    raise api.HarnessError(event.reason)

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[api.Score]:
        raise api.UnsupportedError("openai_api: servers do not score given continuations alike; use another engine")

    def trace(self) -> api.EngineTrace:
        """How many answers came in other pieces than one a token: their times between tokens are estimates."""
        return api.EngineTrace({"answers_in_other_pieces": float(self._pieces_differ)})

    def close(self) -> None:
        if self._loop is not None:
            for request_id in list(self._pending):
                self.cancel(request_id)
            self._call(self._http.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = None
        if self._server is not None:
            self._server.close()
            sys.stderr.write(f"{self._server.output()}\n")  # into the launch's log
            self._server = None

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs `work` in the client's thread."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _open(self, key: str) -> aiohttp.ClientSession:
        return client(key, local=urlsplit(self._url).hostname in _LOOPBACK)

    async def _answers(self) -> bool:
        try:
            async with self._http.get(f"{self._url}{self._health}", timeout=aiohttp.ClientTimeout(10.0)) as response:
                return bool(response.status == 200)
        except (aiohttp.ClientError, OSError):  # not listening yet
            return False

    async def _get(self, path: str) -> Any:
        """The JSON at a path; None where there is none."""
        try:
            async with self._http.get(f"{self._url}{path}", timeout=aiohttp.ClientTimeout(30.0)) as response:
                return await response.json(content_type=None) if response.status == 200 else None
        except (aiohttp.ClientError, OSError, ValueError):
            return None

    async def _first_model(self) -> str:
        listed = await self._get("/v1/models")
        models = listed.get("data") if isinstance(listed, dict) else None
        if not models:
            raise api.HarnessError("the server lists no model at /v1/models; set options.model")
        return str(models[0]["id"])

    async def _version(self) -> str:
        for path, key in _VERSIONS:
            found = await self._get(path)
            if isinstance(found, dict) and key in found:
                return f"version {str(found[key])[:80]}"
        return "no version told"

    def _begin(self, request: api.GenerationRequest) -> None:
        assert self._loop is not None
        self._tasks[request.id] = self._loop.create_task(self._serve(request))

    def _cancel(self, request_id: str) -> None:
        assert self._loop is not None
        if task := self._tasks.get(request_id):
            self._loop.call_soon(task.cancel)  # a task that has not begun would end without an event

    async def _serve(self, request: api.GenerationRequest) -> None:
        """One request from its sending to its last event."""
        sent = self.clock()
        try:
            path = "/v1/completions" if self._endpoint == "completions" else "/v1/chat/completions"
            done = await complete(self._http, f"{self._url}{path}", self._request_body(request), self.clock)
            self._pieces_differ += done.pieces != done.generated
            self._events.put(api.FinishedEvent(_result(request, sent, done)))
        except asyncio.CancelledError:
            cancelled = api.GenerationResult(request.id, (), sent, (), len(request.prompt), finish_reason="cancelled")
            self._events.put(api.FinishedEvent(cancelled))
        except RequestFailed as exc:
            self._events.put(api.RefusedEvent(request.id, str(exc), "invalid" if exc.refused else "infeasible"))
        except Exception as exc:  # whatever a server sends must not stop the client
            reason = " ".join(f"{type(exc).__name__}: {exc}".split())[:300]
            self._events.put(api.RefusedEvent(request.id, reason, "infeasible"))
        finally:
            self._tasks.pop(request.id, None)

    def _request_body(self, request: api.GenerationRequest) -> dict[str, Any]:
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self._served,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        prompt = list(request.prompt) if self._text is None else self._text.decode(request.prompt)
        body |= {"prompt": prompt} if self._endpoint == "completions" else {
            "messages": [{"role": "user", "content": prompt}]
        }  # fmt: skip
        return {name: value for name, value in (body | self._body).items() if value is not None}


def _result(request: api.GenerationRequest, sent: float, done: Completion) -> api.GenerationResult:
    prompt = len(request.prompt) if done.prompt_tokens is None else done.prompt_tokens
    reason: Literal["stop", "length"] = "stop" if done.stopped else "length"
    return api.GenerationResult(
        request.id, (-1,) * done.generated, sent, done.times_s, prompt, finish_reason=reason,
        cached_tokens=done.cached_tokens,
    )  # fmt: skip


def _wait_for_given(healthy: Callable[[], bool], timeout_s: float) -> None:
    """A given server must be there already; some have no health endpoint of this name, but answer."""
    until = time.monotonic() + timeout_s
    while not healthy():
        if time.monotonic() > until:
            raise api.HarnessError("no server answers at options.base_url with 200 on its health path; start it, or "
                                   "set options.health (such as /v1/models)")  # fmt: skip
        time.sleep(0.1)
