"""A Docker engine for tests, and a base image without a registry.

The engine that answers is used; else, as root on Debian, one is installed and started for the tests alone: no bridge,
no change to the firewall, its own folders. The base image is the host's own Python with the Debian packages that
`python:3.11-slim` and the Dockerfile's first stage would bring: their files are those that are installed here.
"""

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import docker
import requests

#: Not the official name: an engine that was there before keeps what the tests leave.
BASE_IMAGE = "offload-harness-tests/python:3.11"
_COMPILER = ("g++", "libaio-dev")
_TOOLS = ("dash", "bash", "coreutils", "grep", "sed", "tar", "gzip", "findutils", "passwd", "procps")
_LINKED = ("bin", "sbin", "lib", "lib64")  # into /usr
_SKIPPED = {"site-packages", "test", "idlelib", "tkinter", "turtledemo", "__pycache__"}
_SETTINGS = ["passwd", "group", "nsswitch.conf", "hosts", "alternatives", "ssl/certs/ca-certificates.crt"]  # in /etc


@contextlib.contextmanager
def engine() -> Iterator[str]:
    """DOCKER_HOST of an engine. Raises RuntimeError where there is none and none can be started."""
    given = os.environ.get("DOCKER_HOST")
    for address in filter(None, (given, "unix:///var/run/docker.sock")):
        if _answers(address):
            yield address
            return
    with private_engine() as (address, _):
        yield address


@contextlib.contextmanager
def private_engine() -> Iterator[tuple[str, int]]:
    """An engine for the tests alone: its address and its process. Raises RuntimeError where it cannot be started."""
    if os.getuid() != 0:
        raise RuntimeError("no Docker engine answers, and only root can start one")
    if shutil.which("dockerd") is None:
        _install("docker.io")
    with _folder() as folder, (folder / "log").open("wb") as log:
        address = f"unix://{folder}/docker.sock"
        options = ["--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid"]
        options += ["--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"]
        daemon = subprocess.Popen(["dockerd", *options, "-H", address], stdout=log, stderr=log, start_new_session=True)
        try:
            _await(address, daemon, folder / "log")
            yield address, daemon.pid
        finally:
            _stop(daemon, address, folder)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """An engine's folder, removed by a process that nobody waits for: images are a hundred thousand files, which beside
    other tests take minutes."""
    folder = Path(tempfile.mkdtemp(prefix="engine-"))
    try:
        yield folder
    finally:
        subprocess.run(["sh", "-c", 'rm -rf "$1" 2>/dev/null &', "sh", str(folder)], check=False)


def copy_image(name: str, address: str) -> None:
    """From the engine of DOCKER_HOST to another one."""
    with subprocess.Popen(["docker", "save", name], stdout=subprocess.PIPE) as saved:
        subprocess.run(["docker", "-H", address, "load"], stdin=saved.stdout, check=True, capture_output=True)


def base_image(address: str) -> str:
    """The name of a base image, made where the engine has none."""
    docker = ["docker", "-H", address]
    if subprocess.run([*docker, "image", "inspect", BASE_IMAGE], capture_output=True, check=False).returncode:
        path = "PATH=/usr/local/bin:/usr/bin:/bin"
        changes = ["-c", f"ENV {path}", "-c", "ENV LANG=C.UTF-8", "-c", 'CMD ["python3"]']
        with tempfile.TemporaryFile() as root:
            write_root(root)
            root.seek(0)
            subprocess.run([*docker, "import", *changes, "-", BASE_IMAGE], stdin=root, check=True, capture_output=True)
    return BASE_IMAGE


def write_root(target: BinaryIO) -> None:
    """A root file system as a tar file: this interpreter at /usr/local, and Debian packages from this host."""
    names: set[str] = set()
    with tarfile.open(fileobj=target, mode="w") as tar:

        def folder(name: str, mode: int = 0o755) -> None:
            if name and name not in names:
                folder(str(Path(name).parent).strip("."))
                names.add(name)
                entry = tarfile.TarInfo(name)
                entry.type, entry.mode = tarfile.DIRTYPE, mode
                tar.addfile(entry)

        def add(source: str, name: str) -> None:
            name = name.strip("/")
            if name.split("/")[0] in _LINKED:
                name = f"usr/{name}"
            if name not in names and os.path.lexists(source):
                folder(str(Path(name).parent).strip("."))
                names.add(name)
                tar.add(source, name, recursive=False)

        for name in ("usr/local/bin", "etc", "var", "proc", "sys", "dev", "root", "run"):
            folder(name)
        folder("tmp", 0o1777)
        for name in _LINKED:
            folder(f"usr/{name}")
            _link(tar, name, f"usr/{name}")
        paths = [f"/etc/{name}" for name in _SETTINGS]
        paths += map(str, sorted(Path("/etc/alternatives").glob("*")))
        links = (path for path in Path("/usr/bin").iterdir() if path.is_symlink())
        paths += [str(path) for path in links if str(path.readlink()).startswith("/etc/alternatives/")]
        for path in (*_files_of(_closure((*_COMPILER, *_TOOLS))), *paths):
            if not path.startswith(("/usr/share/doc", "/usr/share/man", "/usr/share/locale", "/proc", "/sys", "/dev")):
                add(path, path)
        _add_python(tar, add)
        libraries = io.BytesIO(b"/usr/local/lib\n/usr/lib/x86_64-linux-gnu\n/lib/x86_64-linux-gnu\n")
        entry = tarfile.TarInfo("etc/ld.so.conf")
        entry.size = len(libraries.getvalue())
        tar.addfile(entry, libraries)


def _link(tar: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    tar.addfile(entry)


def _add_python(tar: tarfile.TarFile, add: Callable[[str, str], None]) -> None:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    program = Path(os.path.realpath(Path(sys.base_prefix) / "bin" / f"python{version}"))
    add(str(program), f"usr/local/bin/python{version}")
    for name in ("python", "python3"):
        _link(tar, f"usr/local/bin/{name}", f"python{version}")
    needing = [program]
    library = Path(sysconfig.get_path("stdlib", vars={"base": sys.base_prefix, "installed_base": sys.base_prefix}))
    for folder, inner, files in os.walk(library):
        inner[:] = sorted(i for i in inner if i not in _SKIPPED and not i.startswith("config-"))
        for name in sorted(files):
            source = Path(folder) / name
            add(str(source), f"usr/local/lib/python{version}/{source.relative_to(library)}")
            needing += [source] if source.suffix == ".so" else []
    headers = Path(sysconfig.get_path("include"))
    for source in sorted(headers.rglob("*")):
        add(str(source), f"usr/local/include/python{version}/{source.relative_to(headers)}")
    for source in sorted(Path("/usr/include").glob(f"*/python{version}/pyconfig.h")):  # Debian's is of its architecture
        add(str(source), str(source))
    for path in sorted({path for binary in needing for path in _libraries(binary)}):
        add(os.path.realpath(path), f"usr/lib/x86_64-linux-gnu/{Path(path).name}")


def _libraries(binary: Path) -> list[str]:
    found = subprocess.run(["ldd", str(binary)], capture_output=True, text=True, check=False).stdout
    words = [line.split() for line in found.splitlines()]
    return [w[2] for w in words if len(w) > 2 and w[1] == "=>" and w[2].startswith("/")]


def _closure(packages: Sequence[str]) -> list[str]:
    """The packages and all that they depend on."""
    known = subprocess.run(["dpkg-query", "-W", "-f", "${Package}\n"], capture_output=True, text=True, check=True)
    missing = [p for p in packages if p not in known.stdout.split()]
    if missing:
        _install(*missing)
    no = [f"--no-{kind}" for kind in ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")]
    command = ["apt-cache", "depends", "--recurse", "--installed", *no, *packages]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sorted({line for line in found.splitlines() if line and line[0] not in " <|"})


def _files_of(packages: list[str]) -> list[str]:
    done = subprocess.run(["dpkg", "-L", *packages], capture_output=True, text=True, check=False)
    return sorted({line for line in done.stdout.splitlines() if line.startswith("/") and line != "/."})


def _install(*packages: str) -> None:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    wait = ["-o", "DPkg::Lock::Timeout=300", "-qq"]
    for command in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        done = subprocess.run(
            ["apt-get", *wait, *command], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"apt-get {command[0]} failed: {done.stderr.strip().splitlines()[-1:]}")


def _answers(address: str) -> bool:
    try:
        with contextlib.closing(docker.DockerClient(base_url=address, timeout=5)) as client:
            return bool(client.ping())
    except (docker.errors.DockerException, requests.RequestException):
        return False


def _await(address: str, daemon: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while not _answers(address):
        if daemon.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"dockerd did not start: {log.read_text(errors='replace').splitlines()[-1:]}")
        time.sleep(0.1)


def _stop(daemon: subprocess.Popen[bytes], address: str, folder: Path) -> None:
    """Its containers first: without the engine nobody would end them."""
    docker = ["docker", "-H", address]
    found = subprocess.run([*docker, "ps", "-aq"], capture_output=True, text=True, check=False).stdout.split()
    if found:
        subprocess.run([*docker, "rm", "-f", *found], capture_output=True, check=False)
    daemon.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        daemon.wait(30)
    daemon.kill()
    mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for place in reversed([place for place in mounted if Path(place).is_relative_to(folder)]):
        subprocess.run(["umount", "-l", place], capture_output=True, check=False)


if __name__ == "__main__":
    with engine() as address:
        sys.stdout.write(f"{base_image(address)} {address}\n")
