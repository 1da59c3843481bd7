"""Hardware profiles: shipped ones, a user's files, and the profile measured on this host."""

import difflib
import os
from collections.abc import Callable
from pathlib import Path

from harness.api import HardwareProfile, HarnessError, Prices, to_json
from harness.common.files import nearest_existing, os_errors, replace_with
from harness.hardware import provenance

_FOLDER = Path(__file__).parent


def names() -> list[str]:
    """Names of the shipped profiles."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load(name: str, cache: Path | None = None) -> HardwareProfile:
    """A profile by the name of a shipped profile, by its file, or `local` for what `harness calibrate` left in `cache`.

    Raises HarnessError for an unknown name or missing file, for figures that are missing, implausible or unknown, and
    for a local profile that was measured on another machine.
    """
    path = Path(name)
    if name == "local" and cache is not None:
        path = local_path(cache)
        if not path.exists():
            raise HarnessError("no profile of this host yet: run `harness calibrate`, or choose one of "
                               f"{', '.join(names())} by --hardware")  # fmt: skip
    elif not path.suffix and len(path.parts) == 1:
        path = _FOLDER / f"{name}.yaml"
        if name not in names():
            matches = difflib.get_close_matches(name, names(), 1, 0.4)
            hint = f"; did you mean {matches[0]!r}?" if matches else ""
            raise HarnessError(f"no hardware profile {name!r}{hint} (shipped: {', '.join(names())}; or give a file)")
    profile = _read(path)
    profile.validate()
    if name == "local" and profile.host_id != provenance.machine_key():
        raise HarnessError(f"{path} was measured on another machine: run `harness calibrate` again")
    return profile


def _read(path: Path) -> HardwareProfile:
    # imported here because each worker imports this package, and reads no profile
    from harness.suite import check, yaml_source

    return check.hardware(yaml_source.read(path))


class LocalProfile:
    """This host's profile for a run: the one in `cache`, or one that the run measures, at most once."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._profile: HardwareProfile | HarnessError | None = None

    def get(self, measure: Callable[[], None]) -> HardwareProfile:
        """The profile; `measure` must leave one in the cache. A HarnessError is raised again at every later call."""
        if self._profile is None:
            try:
                if _is_unknown(local_path(self._cache)):
                    measure()
                self._profile = load("local", self._cache)
            except HarnessError as exc:
                self._profile = exc
        if isinstance(self._profile, HarnessError):
            raise self._profile
        return self._profile

    def prices(self) -> Prices:
        """What this machine costs, as far as its profile says."""
        return Prices() if _is_unknown(local_path(self._cache)) else load("local", self._cache).prices


def _is_unknown(path: Path) -> bool:
    """Whether the local profile is missing, or another machine's."""
    return not path.exists() or _read(path).host_id != provenance.machine_key()


def local_path(cache: Path) -> Path:
    """The file of this host's profile. Its name changes when rates are measured in another way: 2 since products by
    oneDNN's layout count."""
    return cache / "hardware-2.yaml"


def require_writable(path: Path) -> None:
    """Raises HarnessError if `save` could not write `path`; called before a measurement that takes minutes."""
    existing = nearest_existing(path.absolute().parent)
    if path.is_dir() or not existing.is_dir() or not os.access(existing, os.W_OK):
        raise HarnessError(f"{path} cannot be written: give another file by --out")


def save(profile: HardwareProfile, path: Path) -> None:
    """Writes a profile, replacing an existing file atomically."""
    import yaml

    text = yaml.safe_dump(to_json(profile), sort_keys=False, allow_unicode=True)
    with os_errors(f"{path} cannot be written"):
        replace_with(path, text)
