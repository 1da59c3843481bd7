"""The HTTP interface: OpenAI's completions and chats, streamed or whole, beside health and metrics."""

import asyncio
import hmac
import itertools
import uuid

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from harness.api import GenerationRequest, HarnessError
from harness.batch.format import LineError, parse_object, require_unicode
from harness.serve.answers import Answer
from harness.serve.batches import Batches, add_batch_routes, add_file_routes
from harness.serve.bodies import whole_body
from harness.serve.errors import error
from harness.serve.event_relay import EventRelay
from harness.serve.metrics import Metrics
from harness.serve.openapi import ERRORS, generation, json_body
from harness.serve.origins import is_foreign, is_loopback
from harness.serve.requests import ParsedRequest, RequestError, no_model, parse, requests_for
from harness.serve.running import Running
from harness.serve.served import Served
from harness.serve.status import PAGE, add_status_routes

_TEXT = {"type": "object", "properties": {"prompt": {"type": "string"}}, "required": ["prompt"]}
#: What a client that is sent away may wait.
_RETRY_AFTER_S = "5"
#: Bytes of a body that is understood in less time than it takes another thread to begin with it.
_SMALL = 4 << 10


def make_app(served: Served, batches: Batches | None = None) -> FastAPI:
    """The application, with files and batches where it keeps any. Errors have OpenAI's form: {"error": {"message",
    "type", "code"}}."""
    app = FastAPI(title="harness serve", openapi_url="/openapi.json", docs_url=None, redoc_url=None, responses=ERRORS)
    metrics = Metrics(lambda: served.loop.stats)
    numbers = itertools.count(1)
    relay = EventRelay()
    served.loop.after_step = relay.send

    app.add_middleware(_Identified, api_key=served.settings.api_key, loopback=is_loopback(served.settings.host))
    _add_error_handlers(app, metrics)
    _add_information(app, served, metrics)
    add_status_routes(app, served, batches)
    if batches is not None:
        add_file_routes(app, batches)
        add_batch_routes(app, batches)

    @app.post("/v1/completions", **generation(chat=False))
    async def completions(request: Request) -> Response:
        return await generate(request, chat=False)

    @app.post("/v1/chat/completions", **generation(chat=True))
    async def chats(request: Request) -> Response:
        return await generate(request, chat=True)

    def understand(raw: bytes, chat: bool, number: int) -> tuple[ParsedRequest, list[GenerationRequest]]:
        settings = served.settings
        asked = parse(raw, chat, number << 16, served.name, settings.max_tokens, settings.max_pending)
        return asked, requests_for(asked, served.shape, served.text, served.longest)

    async def generate(request: Request, chat: bool) -> Response:
        raw = await whole_body(request)
        number = next(numbers)
        if chat or len(raw) > _SMALL:
            # in a thread: of a large body it takes seconds, in which others wait for their tokens, and another process
            # renders a chat
            asked, requests = await asyncio.to_thread(understand, raw, chat, number)
        else:
            asked, requests = understand(raw, chat, number)
        name = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        answer = Answer(name, asked, requests, served.name, served.text)
        running = Running(served.loop, relay, served.engine.clock, metrics, answer, served.settings.keep_alive_s)
        try:
            if not running.begin():
                metrics.ended("busy")
                busy = f"{served.settings.max_pending} requests are pending, as many as this server holds; try again"
                return error(busy, 429, "rate_limit_exceeded", {"retry-after": _RETRY_AFTER_S})
        except HarnessError as exc:
            metrics.ended("failed")
            return error(str(exc), 503, "unavailable", {"retry-after": _RETRY_AFTER_S})
        return running.streamed() if asked.stream else await running.whole(request.receive)

    return app


def _add_error_handlers(app: FastAPI, metrics: Metrics) -> None:
    @app.exception_handler(RequestError)
    async def refused(request: Request, exc: RequestError) -> JSONResponse:
        metrics.ended("refused")
        return error(str(exc), exc.http_status, exc.code)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, exc: Exception) -> Response:
        """A client that went away while it sent its body."""
        metrics.ended("cancelled")
        return Response(status_code=499)  # which nobody reads

    @app.exception_handler(Exception)
    async def broken(request: Request, exc: Exception) -> JSONResponse:
        """What nobody foresaw; its traceback goes to the log."""
        metrics.ended("failed")
        return error(f"the server failed at this request: {type(exc).__name__}", 500, "internal_error")

    @app.exception_handler(404)
    async def unknown(request: Request, exc: Exception) -> JSONResponse:
        return error(f"nothing is at {request.url.path}", 404, "not_found")

    @app.exception_handler(405)
    async def wrong_method(request: Request, exc: Exception) -> JSONResponse:
        allowed = {"allow": ", ".join(sorted(_methods(app, request)))}
        return error(f"{request.url.path} does not take {request.method}", 405, "method_not_allowed", allowed)


def _methods(app: FastAPI, request: Request) -> set[str]:
    """The methods that a request's path takes."""
    routes = [
        route for route in app.routes if isinstance(route, Route) and route.matches(request.scope)[0] != Match.NONE
    ]
    return {method for route in routes for method in route.methods or ()}


def _add_information(app: FastAPI, served: Served, metrics: Metrics) -> None:
    """What can be asked beside answers."""

    @app.get("/health")
    async def health() -> Response:
        """Whether the process is alive and its engine not broken."""
        return JSONResponse({"status": served.loop.failure or "ok"}, 503 if served.loop.failure else 200)

    @app.get("/ready")
    async def ready() -> Response:
        """Whether requests are let in."""
        return JSONResponse({"ready": served.ready}, 200 if served.ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def counts() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(served)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != served.name:
            raise RequestError(no_model(name, served.name), 404, "model_not_found")
        return JSONResponse(_model(served))

    @app.post("/tokenize", openapi_extra=json_body(_TEXT))
    async def tokenize(request: Request) -> Response:
        """Token ids of {"prompt": TEXT}, with the special tokens that the model expects."""
        try:
            settings = parse_object(await whole_body(request))
            require_unicode(settings)
            prompt = settings.get("prompt")
            if not isinstance(prompt, str):
                raise RequestError("prompt: expected a string")
            encode = served.text.encode
            ids = encode(prompt) if len(prompt) <= _SMALL else await asyncio.to_thread(encode, prompt)
        except LineError as exc:
            raise RequestError.of_line(exc) from None
        except HarnessError as exc:
            raise exc if isinstance(exc, RequestError) else RequestError(str(exc)) from None
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": served.longest})


class _Identified:
    """Checks the key, or without one that no web page of another site asks, and names each request in its answer: by
    the client's own name, where it gives one.

    A plain ASGI layer: starlette's middleware of functions hides from a handler that its client went away.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, loopback: bool) -> None:
        self._app, self._loopback = app, loopback
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        name = given if given.isascii() and given.isprintable() and 0 < len(given) <= 128 else uuid.uuid4().hex

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        await (self._refusal(scope["path"], headers) or self._app)(scope, receive, named)

    def _refusal(self, path: str, headers: Headers) -> Response | None:
        """The answer to a request that may not be: health checks, scrapers and the page's own files need no key."""
        if path in ("/health", "/ready", "/metrics", *PAGE):
            return None
        if self._expected is None:
            message = "pages of other sites may not ask: use this server's address, or start it with --api-key"
            return error(message, 403, "forbidden") if is_foreign(headers, self._loopback) else None
        given = headers.get("authorization", "").encode("latin-1", "replace")
        if hmac.compare_digest(given, self._expected):
            return None
        return error("the key is missing or wrong: send Authorization: Bearer KEY", 401, "invalid_api_key")


def _model(served: Served) -> dict[str, object]:
    return {
        "id": served.name, "object": "model", "created": served.created, "owned_by": "harness",
        "max_model_len": served.longest,
    }  # fmt: skip
