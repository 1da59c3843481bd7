"""Files and batches over HTTP: upload a file of requests, ask for a batch of it, poll, fetch the answers."""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from harness.api import HarnessError
from harness.batch.format import LineError, checked, parse_object, require_unicode
from harness.common.files import os_errors
from harness.common.locks import locked
from harness.serve.batch_runner import BatchRunner, Identity
from harness.serve.batch_store import Batch, BatchStore, Endpoint
from harness.serve.bodies import limited, whole_body
from harness.serve.file_store import FileStore, StoredFile
from harness.serve.openapi import content_of, form_body, json_body
from harness.serve.requests import RequestError
from harness.serve.served import Served
from harness.serve.settings import MAX_UPLOAD

#: The most files and batches of a page, and how many it has where the client does not say.
_MOST_LISTED, _LISTED = 10_000, 100
_UPLOAD = {
    "type": "object",
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}},
    "required": ["file", "purpose"],
}
#: The most bytes of what asks for a batch.
_MAX_BATCH = 1 << 20
#: How much of an upload is copied at once.
_PIECE = 1 << 20


class _Identified(Protocol):
    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=_Identified)


class _NewBatch(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None


@dataclass(frozen=True)
class Batches:
    """The files and batches of a server of the model `name`, and what runs them; `max_tokens` as in ServeSettings."""

    files: FileStore
    store: BatchStore
    runner: BatchRunner
    name: str
    max_tokens: int


@contextmanager
def batches_of(
    served: Served, folder: Path, window: int, identity: Identity, note: Callable[[str], None]
) -> Iterator[Batches]:
    """The files and batches in `folder`; those that an earlier server left go on. `window` and `identity` as in
    BatchRunner; `note` is told how batches end.

    Raises HarnessError for a folder that another server uses or that cannot be written.
    """
    with ExitStack() as opened:
        with os_errors(f"cannot use {folder}", "choose another --files"):
            folder.mkdir(parents=True, exist_ok=True)
            opened.callback(_remove_empty, folder)
            busy = f"{folder} holds the files of another server that runs; give each its own --files"
            opened.enter_context(locked(folder / "lock", busy))
        files = opened.enter_context(closing(FileStore(folder / "files", note)))
        store = opened.enter_context(closing(BatchStore(folder / "batches", note)))
        runner = opened.enter_context(closing(BatchRunner(store, files, served, window, identity, note)))
        runner.start()
        yield Batches(files, store, runner, served.name, served.settings.max_tokens)


def add_file_routes(app: FastAPI, batches: Batches) -> None:
    """/v1/files of OpenAI's API, for batches only."""

    @app.post("/v1/files", openapi_extra=form_body(_UPLOAD))
    async def upload(request: Request) -> Response:
        try:
            async with limited(request, MAX_UPLOAD).form(max_files=1, max_fields=4) as form:
                given = dict(form)
                file, purpose = given.pop("file", None), given.pop("purpose", None)
                if not isinstance(file, UploadFile):
                    raise RequestError("file: expected a file, as multipart/form-data")
                if purpose != "batch":
                    raise RequestError("purpose: this server takes files for batches only: batch")
                if given:
                    raise RequestError(f"{min(given)}: this server does not know it")
                filename = file.filename or "upload.jsonl"
                pieces = iter(lambda: file.file.read(_PIECE), b"")
                stored = await _kept(batches.files.add, filename, "batch", pieces)
        except HTTPException as exc:
            raise RequestError(f"the request is not a form with a file: {exc.detail}") from None
        except OSError as exc:
            raise RequestError(f"the upload cannot be kept: {exc.strerror or exc}", 507, "disk_full") from None
        return JSONResponse(_described(stored))

    @app.get("/v1/files")
    async def listed(request: Request) -> Response:
        purpose = request.query_params.get("purpose")
        files = [file for file in batches.files.all() if purpose in (None, file.purpose)]
        return JSONResponse(_page(request, files, _described))

    @app.get("/v1/files/{id_}")
    async def retrieve(id_: str) -> Response:
        return JSONResponse(_described(_file(batches, id_)))

    @app.get("/v1/files/{id_}/content", response_class=FileResponse, responses=content_of("application/jsonl"))
    async def content(id_: str) -> Response:
        path = batches.files.content(_file(batches, id_).id)
        if not path.is_file():
            raise RequestError(f"the content of {id_} is gone", 404, "not_found")
        return FileResponse(path, media_type="application/jsonl")

    @app.delete("/v1/files/{id_}")
    async def delete(id_: str) -> Response:
        file = _file(batches, id_)
        if used := next((b for b in batches.store.all() if b.input_file_id == id_ and not b.ended), None):
            raise RequestError(
                f"{id_} is the input of {used.id}, which has not ended; cancel that first", 409, "in_use"
            )
        await _kept(batches.files.remove, file.id)
        return JSONResponse({"id": id_, "object": "file", "deleted": True})


def add_batch_routes(app: FastAPI, batches: Batches) -> None:
    """/v1/batches of OpenAI's API."""

    @app.post("/v1/batches", openapi_extra=json_body(_NewBatch.model_json_schema()))
    async def create(request: Request) -> Response:
        try:
            settings = parse_object(await whole_body(request, _MAX_BATCH))
            require_unicode(settings)
            asked = checked(_NewBatch, settings, "")
        except LineError as exc:
            raise RequestError.of_line(exc) from None
        file = _file(batches, asked.input_file_id)
        if file.purpose != "batch":
            raise RequestError(f"input_file_id: {file.id} was not uploaded for a batch")
        batch = Batch(
            f"batch_{secrets.token_hex(12)}", asked.endpoint, file.id, asked.completion_window, batches.name,
            batches.max_tokens, int(time.time()), asked.metadata,
        )  # fmt: skip
        await _kept(batches.store.put, batch)
        batches.runner.submit(batch)
        return JSONResponse(batch.described())

    @app.get("/v1/batches")
    async def listed(request: Request) -> Response:
        return JSONResponse(_page(request, batches.store.all(), Batch.described))

    @app.get("/v1/batches/{id_}")
    async def retrieve(id_: str) -> Response:
        return JSONResponse(_batch(batches, id_).described())

    @app.post("/v1/batches/{id_}/cancel")
    async def cancel(id_: str) -> Response:
        batch = _batch(batches, id_)
        if batch.ended:
            raise RequestError(f"{id_} is {batch.status} already", 409, "already_ended")
        await _kept(batches.store.change, id_, "cancelling", int(time.time()))
        await _kept(batches.runner.cancel, id_)
        return JSONResponse(_batch(batches, id_).described())


def _remove_empty(folder: Path) -> None:
    """Removes a folder in which only the lock is left; another server makes it anew."""
    with suppress(OSError):
        if [path.name for path in folder.iterdir()] == ["lock"]:
            (folder / "lock").unlink()
            folder.rmdir()


async def _kept(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function that writes returns; raises RequestError where the disk is full or cannot be written."""
    try:
        return await asyncio.to_thread(function, *arguments)
    except HarnessError as exc:
        raise RequestError(str(exc), 507, "disk_full") from None


def _file(batches: Batches, id_: str) -> StoredFile:
    file = batches.files.get(id_)
    if file is None:
        raise RequestError(f"no file {id_!r} here", 404, "not_found")
    return file


def _batch(batches: Batches, id_: str) -> Batch:
    batch = batches.store.get(id_)
    if batch is None:
        raise RequestError(f"no batch {id_!r} here", 404, "not_found")
    return batch


def _described(file: StoredFile) -> dict[str, Any]:
    return {**asdict(file), "object": "file", "status": "processed", "expires_at": None}


def _page(request: Request, items: Sequence[T], described: Callable[[T], dict[str, Any]]) -> dict[str, Any]:
    """A page of a list, the newest first or by `order`: at most `limit` items that come after the one of id `after`."""
    query = request.query_params
    order, limit, after = query.get("order", "desc"), query.get("limit", str(_LISTED)), query.get("after")
    if order not in ("asc", "desc"):
        raise RequestError("order: expected asc or desc")
    most = int(limit) if limit.isascii() and limit.isdigit() and len(limit) < 10 else 0
    if not 1 <= most <= _MOST_LISTED:
        raise RequestError(f"limit: expected a number from 1 to {_MOST_LISTED}")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        place = next((i for i, item in enumerate(ordered) if item.id == after), None)
        if place is None:
            raise RequestError(f"after: nothing of id {after!r} is listed here")
        ordered = ordered[place + 1 :]
    data = [described(item) for item in ordered[:most]]
    ids = [item["id"] for item in data] or [None]
    return {
        "object": "list", "data": data, "first_id": ids[0], "last_id": ids[-1], "has_more": len(ordered) > len(data),
    }  # fmt: skip
