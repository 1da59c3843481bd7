"""`harness serve`: a model behind OpenAI's HTTP interface."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from harness.cli.errors import EXIT_INFEASIBLE
from harness.cli.options import cache_option, memory_option, model_option, set_option

#: What the extra `serve` installs.
_PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "python_multipart")


@click.command()
@model_option()
@click.option("--engine", default="offload", show_default=True, help="An engine that takes requests while it runs.")
@memory_option()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 for any free one.")
@click.option(
    "--api-key", envvar="HARNESS_API_KEY", help="What clients must send [default: $HARNESS_API_KEY, or none]."
)
@click.option("--max-sequence", type=click.IntRange(2),
              help="Tokens of a request at most, prompt and new [default: what model and memory allow].")  # fmt: skip
@click.option("--max-tokens", type=click.IntRange(1), default=256, show_default=True,
              help="New tokens at most, for requests that set no limit.")  # fmt: skip
@click.option("--max-pending", type=click.IntRange(1), default=1024, show_default=True,
              help="Requests queued or running; more are answered with 429.")  # fmt: skip
@click.option("--max-connections", type=click.IntRange(1), default=1024, show_default=True,
              help="Clients connected at a time; more are answered with 503.")  # fmt: skip
@click.option("--files", type=click.Path(path_type=Path),
              help="Folder of uploaded files and batches [default: served/PORT in the cache].")  # fmt: skip
@click.option("--drain", "drain_s", type=click.FloatRange(0), default=30.0, show_default=True, metavar="SECONDS",
              help="How long running requests may go on after SIGTERM.")  # fmt: skip
@set_option("options.tpot_target_s=0.2")
@cache_option("Models and converted weights")
def serve(**options: Any) -> None:
    """Serve a model to clients of OpenAI's API: completions and chats, streamed or whole.

    Requests share the passes of one engine. Beside /v1/completions, /v1/chat/completions and /v1/models there are
    /v1/files and /v1/batches, which answer a file as `harness generate` does and go on after a restart, /tokenize,
    /health, /ready, /status and /metrics (Prometheus), and a page to look at. Ctrl-C or SIGTERM lets running requests
    end.

    \b
    Examples:
      harness serve --model ./opt-6.7b --memory 4GiB
      harness serve --model ./opt-6.7b --memory 4GiB --port 9000 --api-key secret --set options.tpot_target_s=0.5
    """
    import importlib.util

    from harness.api import HarnessError, InfeasibleError
    from harness.common.packages import install_extra

    if missing := [name for name in _PACKAGES if not importlib.util.find_spec(name)]:
        raise HarnessError(f"harness serve needs {', '.join(missing)}: {install_extra('serve')}")
    from harness.batch.progress import make_job_progress
    from harness.common.locks import in_use
    from harness.serve.server import serve as run
    from harness.serve.settings import ServeSettings

    with make_job_progress() as progress, in_use(options["cache"]):
        try:
            run(ServeSettings(**options), progress)
        except InfeasibleError as exc:
            progress.note(f"harness: {exc}")
            sys.exit(EXIT_INFEASIBLE)
