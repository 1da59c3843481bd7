"""What a server does now: a page for a person at /, and the figures on it as JSON at /status."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

from harness.serve.batches import Batches
from harness.serve.served import Served

#: The paths of the page itself, which tells nothing and needs no key: names of files in `page`, and their types.
PAGE = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
#: The page loads nothing from elsewhere, and is in no other page's frame.
_POLICY = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; base-uri 'none'; " \
          "form-action 'none'; frame-ancestors 'none'"  # fmt: skip
#: The most requests and batches that are listed, those that came first.
_LISTED = 100


def add_status_routes(app: FastAPI, served: Served, batches: Batches | None) -> None:
    """/, what it loads, and /status."""
    for path, (name, kind) in PAGE.items():
        app.add_api_route(path, _file(name, kind), include_in_schema=False)

    @app.get("/status")
    async def status() -> Response:
        return JSONResponse(status_of(served, batches), headers={"cache-control": "no-store"})


def status_of(served: Served, batches: Batches | None) -> dict[str, Any]:
    """Counts since the start, and what is pending now; `time_s` is when, so that rates are differences."""
    loop, stats = served.loop, served.loop.stats
    open_batches = [] if batches is None else [batch for batch in batches.store.all() if not batch.ended]
    return {
        "model": served.name,
        "state": "failed" if loop.failure else "draining" if loop.closed else "serving",
        "reason": loop.failure,
        "time_s": time.monotonic(),
        "uptime_s": time.time() - served.created,
        "max_model_len": served.longest,
        "max_pending": served.settings.max_pending,
        "waiting": stats.waiting,
        "running": stats.running,
        "pending": loop.pending,
        "generated_tokens": loop.generated_tokens,
        "passes": stats.passes,
        "rows": stats.rows,
        "pass_s": stats.pass_s,
        "between_passes_s": stats.between_passes_s,
        "task_s": stats.task_s,
        "kv_blocks": {
            tier: {"used": stats.kv_blocks_used[tier], "total": total} for tier, total in stats.kv_blocks_total.items()
        },
        "kv_store": None if stats.kv_store is None else asdict(stats.kv_store),
        "prefix_hit_tokens": stats.prefix_hit_tokens,
        "preemptions": stats.preemptions,
        "requests": [asdict(request) for request in loop.pending_requests(_LISTED)],
        "batches": [{"id": b.id, "status": b.status, **asdict(b.counts)} for b in open_batches[:_LISTED]],
    }


def _file(name: str, kind: str) -> Any:
    content = (Path(__file__).parent / "page" / name).read_bytes()

    async def file() -> Response:
        headers = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff", "cache-control": "no-cache"}
        return Response(content, media_type=kind, headers=headers)

    return file
