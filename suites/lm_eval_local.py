"""Task files that read a folder's data instead of the hub's: lm-eval's own tasks, with another place to read from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import lm_eval
import yaml

from harness.api import HarnessError
from suites.tasks.data import Data

#: By task, lm-eval's own file, a folder's file with its data, and the field that each line has.
FILES: Mapping[str, tuple[str, str, str]] = {
    "lambada_openai": ("lambada/lambada_openai.yaml", "lambada_openai/lambada_test.jsonl", "text"),
    "wikitext": ("wikitext/wikitext.yaml", "wikitext2_raw/wiki.test.pages.jsonl", "page"),
}


def write(folder: Path, into: Path) -> dict[str, str]:
    """Writes task files into a folder for `TaskManager(include_path=...)`; returns the SHA-256 of their data, by task.

    Of those tasks whose data are there. Raises HarnessError for broken data, and where there are none.
    """
    found = {}
    for task, (own, file, field) in FILES.items():
        data = Data(folder)
        if not data.has(file):
            continue
        data.objects(file, (field,))
        found[task] = data.digests[file]
        content = {
            "include": str(_own(own)),
            "task": task,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {
                "data_files": {"test": str((folder / file).resolve())},
                "cache_dir": str(into / "cache"),
            },
            "training_split": None,
            "validation_split": None,
        }
        (into / f"{task}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    if not found:
        names = ", ".join(file for _, file, _ in FILES.values())
        raise HarnessError(f"{folder} has none of {names}: name a folder that has, or leave out --data-dir")
    return found


def _own(name: str) -> Path:
    """A task file of lm-eval's."""
    return Path(lm_eval.__file__).parent / "tasks" / name
