"""Images of the engines' environments: their names, their checks, and their build from a checkout."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import registry
from harness.api import HarnessError, RunSpec
from harness.builtin import LAUNCHERS

if TYPE_CHECKING:
    import docker

#: Labels of an image: its environment, and the digest of this project's code in it.
ENVIRONMENT, CODE = "offload-harness.environment", "offload-harness.code"
_REPOSITORY = "offload-harness"
#: Images with a build target of their own name instead of `worker`, and the environments in them.
_OWN_TARGETS = {"helm": "helm", "serve": "offload"}
#: This project's packages: with the Dockerfile, a build's context.
PACKAGES = ("harness", "engines", "suites", "reports")
_CODE_SUFFIXES = (".py", ".cpp", ".h", ".yaml", ".csv", ".json", ".txt", ".html", ".css", ".js")
#: pip's settings that a build inherits from this process.
_PIP = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CERT", "PIP_DEFAULT_TIMEOUT")


@contextlib.contextmanager
def engine_errors(doing: str) -> Iterator[None]:
    """Turns errors of the container engine, and of the connection to it, into a HarnessError beginning with `doing`."""
    import docker
    import requests

    try:
        yield
    except (docker.errors.DockerException, requests.RequestException) as exc:
        raise HarnessError(f"{doing}: the container engine says: {reason(exc)}") from exc


def reason(error: object) -> str:
    """An error's text in one line; for an API error its explanation."""
    text = getattr(error, "explanation", None) or error
    return " ".join(str(text).split())[:300]


def connect() -> docker.DockerClient:
    """A client of the container engine. Raises HarnessError with the remedy if no engine answers."""
    LAUNCHERS["docker"].require("launcher docker")
    import docker
    import requests

    try:
        client = docker.from_env()
        client.ping()
    except (docker.errors.DockerException, requests.RequestException) as exc:
        where = os.environ.get("DOCKER_HOST", "its usual socket")
        raise HarnessError(
            f"no container engine answers at {where} ({reason(exc)}); start Docker or set DOCKER_HOST, or use "
            "--launcher venv or process"
        ) from None
    return client


def name_of(environment: str) -> str:
    """The name of an environment's image."""
    return f"{_REPOSITORY}/{environment}"


def image_of(spec: RunSpec) -> str:
    """The name of the image that a cell runs in. Raises HarnessError for an engine without an image."""
    environment = registry.engine_entry(spec.engine).environment
    if not (spec.image or environment):
        raise HarnessError(f"engine {spec.engine} has no image: set `image`, or use another launcher")
    return spec.image or name_of(environment)


def remedy(spec: RunSpec) -> str:
    """The step that makes a cell's image available."""
    if spec.image:
        return "build or pull it, or leave `image` out"
    if registry.engine_entry(spec.engine).plugin:
        return "set `image` to one that holds this harness and the engine"
    return f"harness images build {registry.engine_entry(spec.engine).environment}"


def check(image: Any, name: str, spec: RunSpec) -> None:
    """Raises HarnessError for an image without this harness's worker, with another environment, or with other code."""
    labels, environment = image.labels, registry.engine_entry(spec.engine).environment
    if ENVIRONMENT not in labels:
        raise HarnessError(f"image {name} has no worker of this harness in it: {remedy(spec)}")
    if environment and labels[ENVIRONMENT] != environment:
        raise HarnessError(
            f"image {name} holds environment {labels[ENVIRONMENT]}, but engine {spec.engine} needs {environment}"
        )
    if labels.get(CODE) != code_digest():
        raise HarnessError(f"image {name} holds other code than this harness: harness images build {environment}")


def code_digest() -> str:
    """A digest of this project's code, of all file types that a launch may depend on."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for package in PACKAGES:
        for path in sorted(p for p in (root / package).rglob("*") if p.suffix in _CODE_SUFFIXES):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def names() -> list[str]:
    """What `build` builds: an image for each environment, and the others."""
    return sorted({*registry.environments(), *_OWN_TARGETS})


def build(
    name: str, arguments: Sequence[str], wheels: Path | None, host_network: bool, say: Callable[[str], None]
) -> str:
    """Builds an image, such as an environment's, and returns its id; `say` receives every line of the build.

    `arguments` are KEY=VALUE build arguments of the Dockerfile; pip's settings come from this process's environment.
    pip prefers packages in `wheels` to an index. Raises HarnessError with the last line of a failed build.
    """
    root = Path(__file__).parents[2]
    if missing := [name for name in ("Dockerfile", *PACKAGES) if not (root / name).exists()]:
        raise HarnessError(f"images are built from a checkout of this project: {root} has no {missing[0]}")
    build_arguments = dict(_argument(text) for text in arguments)
    settings = {name: os.environ[name] for name in _PIP if name in os.environ}
    known = {"ENVIRONMENT": _OWN_TARGETS.get(name, name), "CODE": code_digest()}
    client = connect()
    with tempfile.TemporaryFile() as context:
        target = name if name in _OWN_TARGETS else "worker"
        _pack(root, target, wheels, context)
        context.seek(0)
        last, image = "", ""
        with engine_errors(f"image {name} was not built"):
            lines = client.api.build(
                fileobj=context, custom_context=True, encoding="gzip", dockerfile="Dockerfile", target=target,
                tag=name_of(name), buildargs=known | settings | build_arguments, rm=True, forcerm=True,
                decode=True, network_mode="host" if host_network else None,
            )  # fmt: skip
            for line in lines:
                if "error" in line:
                    raise HarnessError(f"image {name} was not built: {reason(line['error'])}; {last}")
                if text := str(line.get("stream", "")).strip():
                    last = text.splitlines()[-1][:200]
                    say(text)
                image = line.get("aux", {}).get("ID", image)
    return image


def built() -> Iterator[dict[str, Any]]:
    """A row for each image: its environment, its state and age, and whether it holds this code."""
    client, current_code = connect(), code_digest()
    import docker

    for name in names():
        row = {"environment": _OWN_TARGETS.get(name, name), "image": name_of(name)}
        row |= {"state": "not built", "created": "", "size": "", "digest": ""}
        with engine_errors("images"), contextlib.suppress(docker.errors.ImageNotFound):
            image = client.images.get(row["image"])
            row["state"] = "ready" if image.labels.get(CODE) == current_code else "of other code"
            row["size"] = f"{image.attrs['Size'] / 2**30:.2f} GiB"
            row |= {"created": image.attrs["Created"][:19], "digest": image.short_id}
        yield row


def stages_of(dockerfile: str, target: str) -> str:
    """A Dockerfile reduced to the stages that `target` needs: without BuildKit, Docker would build every stage."""
    head, *rest = re.split(r"(?m)^(?=FROM \S+ AS (\S+))", dockerfile)
    stages = dict(zip(rest[::2], rest[1::2], strict=True))
    needed, pending = set[str](), [target]
    while pending:
        name = pending.pop()
        if name in stages and name not in needed:
            needed.add(name)
            pending += re.findall(r"(?m)^(?:FROM |COPY --from=)(\S+)", stages[name])
    return head + "".join(text for name, text in stages.items() if name in needed)


def _argument(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise HarnessError(f"--build-arg {text}: expected KEY=VALUE")
    return key, value


def _pack(root: Path, stage: str, wheels: Path | None, target: Any) -> None:
    """Writes the build context to `target`. It has no times or owners, so that equal files give equal layers."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if "__pycache__" in entry.name or entry.name.endswith((".pyc", ".egg-info")):
            return None
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mtime = 0
        entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644  # whatever the checkout's umask was
        return entry

    with tarfile.open(fileobj=target, mode="w:gz", compresslevel=1) as tar:
        text = stages_of((root / "Dockerfile").read_text(), stage).encode()
        entry = tarfile.TarInfo("Dockerfile")
        entry.size = len(text)
        tar.addfile(entry, io.BytesIO(text))
        for name in PACKAGES:
            tar.add(root / name, name, filter=plain)
        for wheel in sorted(wheels.glob("*.whl")) if wheels else ():
            tar.add(wheel.resolve(), f".wheels/{wheel.name}", filter=plain)
