"""Virtual environments: an engine's own pins without a container, built when first needed and kept by their hash."""

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from harness import registry
from harness.api import Exchange, HarnessError, RunSpec
from harness.common.compiler import compiler_command
from harness.common.host_cpu import cpu_flags, instruction_sets
from harness.common.locks import waiting
from harness.common.regular_file import open_regular
from harness.launchers.images import PACKAGES
from harness.launchers.process import ProcessSandbox

#: Part of an environment's hash: raise it when the same pins are installed in another way.
_RECIPE = "2"
#: The file that makes an environment complete.
READY = ".ready"
_INSTALL_TIMEOUT_S = 3600.0


class VirtualEnvironments:
    """The launcher `venv`: an environment under `cache` for each list of pins."""

    def __init__(self, cache: Path) -> None:
        self._folder = cache.resolve() / "environments"

    def sandbox(self, spec: RunSpec, exchange: Exchange) -> ProcessSandbox:
        name = spec.environment or registry.engine_entry(spec.engine).environment
        if not name:
            raise HarnessError(f"engine {spec.engine} has no environment of its own: use --launcher process")
        identity = self.identity(name)
        home = self._folder / identity
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with waiting(home.with_suffix(".lock"), f"environment {name} to be built") as lock:
                if not (home / READY).exists():
                    self._build(name, home, exchange, lock.fileno())
            return ProcessSandbox(str(home / "bin" / "python"), self._code(), identity)
        except (OSError, subprocess.CalledProcessError) as exc:
            why = exc.strerror if isinstance(exc, OSError) else "python -m venv failed: is python3-venv installed?"
            raise HarnessError(f"cannot build environment {name} in {home}: {why}") from exc

    @staticmethod
    def identity(name: str) -> str:
        """An environment's name and a hash of its pins, interpreter and platform, and CPU where it builds for one."""
        pins = registry.environment_pins(name).read_bytes()
        parts = [_RECIPE.encode(), pins, sys.version.encode(), sysconfig.get_platform().encode()]
        if script := registry.environment_build(name):  # what it builds is for this CPU, and needs a compiler
            parts += [
                script.read_bytes(),
                " ".join(instruction_sets(cpu_flags())).encode(),
                str(compiler_command()).encode(),
            ]
        return f"{name}-{hashlib.sha256(b' '.join(parts)).hexdigest()[:12]}"

    def built(self, name: str) -> bool:
        """Whether an environment of these pins is there."""
        return (self._folder / self.identity(name) / READY).exists()

    def _build(self, name: str, home: Path, exchange: Exchange, lock: int) -> None:
        """Installs the pins into a new environment; an unfinished one is removed first.

        pip inherits `lock`: it goes on when the harness is killed, and no second build may begin beside it.
        """
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, symlinks=True, with_pip=True)
        script = registry.environment_build(name)
        steps = [["-m", "pip", "install", "--quiet", *step] for step in install_steps(registry.environment_pins(name))]
        steps += [[str(script)]] if script else []
        for done, step in enumerate(steps):
            exchange.on_event(f"building environment {name}", done, len(steps))
            command = [str(home / "bin" / "python"), "-I", *step]
            with open_regular(exchange.log, "ab", follow=False) as sink:
                sink.write(f"=== {' '.join(step)}\n".encode())
                sink.flush()
                try:
                    status = subprocess.run(
                        command, stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False,
                        timeout=_INSTALL_TIMEOUT_S, pass_fds=(lock,), env=pip_environment(),
                    ).returncode  # fmt: skip
                except subprocess.TimeoutExpired:
                    status = 1
            if status:
                raise HarnessError(f"environment {name} could not be built, see {exchange.log.name}")
        (home / READY).write_text(f"Python {platform.python_version()}\n")

    def _code(self) -> Path:
        """A folder of links to this code's packages and to nothing else that is installed beside them."""
        roots = [Path(__file__).parents[2] / name for name in PACKAGES]
        folder = self._folder / f"code-{hashlib.sha256(os.fsencode(roots[0])).hexdigest()[:12]}"
        folder.mkdir(parents=True, exist_ok=True)
        for root in roots:
            link = folder / root.name
            if not link.is_symlink():
                with contextlib.suppress(FileExistsError):  # another harness was faster
                    link.symlink_to(root)
        return folder


def pip_environment() -> dict[str, str]:
    """This process's environment without variables that make pip find or install packages elsewhere."""
    elsewhere = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_USER", "PIP_PREFIX", "PIP_ROOT")
    return {name: value for name, value in os.environ.items() if name not in elsewhere}


def install_steps(pins: Path) -> list[list[str]]:
    """Arguments of the calls of `pip install`, in order: packages that are built need torch and the build tools first.

    torch is installed with its requirements: none of CUDA's libraries for a CPU build, all of them for a CUDA build.
    """
    first = [line for line in pins.read_text().splitlines() if line.startswith(("torch==", "setuptools==", "wheel=="))]
    rest = ["--no-build-isolation", "--no-deps", "-r", str(pins)]
    return [["-c", str(pins), *first], rest] if first else [rest]
