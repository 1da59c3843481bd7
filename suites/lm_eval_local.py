"""Writes lm-eval task files that read data from a folder instead of the hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import lm_eval
import yaml

from harness.api import HarnessError
from suites.tasks.data import Data

#: By task: lm-eval's task file, the data file in a folder, and the field of each of its lines.
FILES: Mapping[str, tuple[str, str, str]] = {
    "lambada_openai": ("lambada/lambada_openai.yaml", "lambada_openai/lambada_test.jsonl", "text"),
    "wikitext": ("wikitext/wikitext.yaml", "wikitext2_raw/wiki.test.pages.jsonl", "page"),
}


def write(folder: Path, into: Path) -> dict[str, str]:
    """Writes task files for `TaskManager(include_path=...)`, for each task whose data is in `folder`.

    Returns the SHA-256 of the data by task. Raises HarnessError for damaged data, and where the folder has none.
    """
    digests = {}
    for task, (task_file, file, field) in FILES.items():
        data = Data(folder)
        if not data.has(file):
            continue
        data.objects(file, (field,))
        digests[task] = data.digests[file]
        content = {
            "include": str(Path(lm_eval.__file__).parent / "tasks" / task_file),
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
    if not digests:
        names = ", ".join(file for _, file, _ in FILES.values())
        raise HarnessError(f"{folder} has none of {names}: name a folder that has one, or leave out --data-dir")
    return digests
