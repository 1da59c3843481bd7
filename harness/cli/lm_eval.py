"""`harness lm-eval`: lm-eval's own command line, with our engines among its models and a folder for its data."""

import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import click

from harness.cli.errors import say
from harness.cli.options import cache_option


@click.command("lm-eval", context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.option("--data-dir", type=click.Path(path_type=Path), help="Data of its tasks [default: the hub].")
@cache_option("Models and known scores")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def lm_eval(data_dir: Path | None, cache: Path, arguments: tuple[str, ...]) -> None:
    """Run lm-eval's command line with our engines among its models; --data-dir is for hosts without the hub.

    \b
    Example:
      harness lm-eval run --model offload --model_args pretrained=./opt-6.7b,memory=4GiB --tasks lambada_openai
    """
    from harness import registry
    from harness.api import HarnessError
    from harness.batch.lm_eval import EngineModel
    from harness.batch.progress import make_job_progress
    from harness.common.locks import in_use

    if any(word.startswith("--trust") or "trust_remote_code" in word for word in arguments):  # argparse takes the short
        raise HarnessError("trust_remote_code would run code that a model or a data set brings; leave it out")
    command = registry.lm_eval()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        opened.enter_context(in_use(cache))
        words = list(arguments)
        if words and data_dir is not None:
            if any(word.startswith("--include_path") for word in words):
                raise HarnessError("--include_path and --data-dir are both folders of tasks: give one of them")
            command.write_local(data_dir, Path(folder))
            words += ["--include_path", folder]

        def load(engine: str, settings: Mapping[str, Any]) -> EngineModel:
            with make_job_progress() as progress:
                model = EngineModel(engine, settings, cache, progress, partial(say, err=True))
            return opened.enter_context(closing(model))

        for name, entry in registry.engines().items():
            if not (entry.missing() or entry.builtin_model):
                command.register(name, partial(load, name), cache / "scores")
        sys.exit(int(command.run(words)))
