"""Releases: what a wheel holds, what is refused, and that what was built works where there is no checkout."""

import fnmatch
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from ci.release_checks import Contract, contract, problems

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
#: Documents beside the code, which nothing reads at run time.
NOT_SHIPPED = ("*.md", "*.py")
KEYS, NAMES = frozenset({"cell.engine", "policy.bits"}), frozenset({"harness.api.A"})
CONTRACT = Contract((1, 2, 0), 4, {"fields": 1}, KEYS, NAMES)
RUN = ROOT / "docs" / "results" / "quickstart-2026-11-25-2"


def here(path: str) -> str:
    return (ROOT / path).read_text()


def test_every_data_file_of_the_packages_is_declared():
    """What is not in the wheel fails only where there is no checkout."""
    tracked = subprocess.run(
        ["git", "ls-files", "engines", "harness", "offload_harness", "reports", "suites"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    declared = PROJECT["tool"]["setuptools"]["package-data"]
    patterns = [f"{package.replace('.', '/')}/{glob}" for package, globs in declared.items() for glob in globs]
    data = [name for name in tracked if not any(fnmatch.fnmatch(name, out) for out in NOT_SHIPPED)]
    assert len(data) > 80
    templates = "reports/templates/"
    missing = [n for n in data if not any(fnmatch.fnmatch(n, p) for p in patterns)]
    assert not missing
    assert f"{templates}*" in patterns, "some of which are Markdown"
    packages = {Path(name).parent for name in tracked if name.endswith(".py")}
    assert all((ROOT / package / "__init__.py").exists() for package in packages), "setuptools finds packages by it"


def test_the_version_is_in_one_place():
    version = PROJECT["project"]["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    for name in ("harness", "offload_harness", "engines", "reports", "suites"):
        for path in (ROOT / name).rglob("*.py"):
            assert "__version__ =" not in path.read_text(), path


def test_this_tree_has_a_contract():
    found = contract(here)
    assert found.version == tuple(map(int, PROJECT["project"]["version"].split(".")))
    assert {"cell.engine", "policy.schedule", "workload.prompt_len", "suite.matrix"} <= found.keys
    assert {"offload_harness.Engine", "harness.api.RunRecord"} <= found.names
    assert "description" not in found.record["$defs"]["Accuracy"]


def test_the_same_contract_in_a_later_version_is_fine():
    assert problems(CONTRACT, replace(CONTRACT, version=(1, 2, 1))) == []
    assert problems(CONTRACT, replace(CONTRACT, version=(1, 3, 0), keys=CONTRACT.keys | {"cell.new"})) == []


@pytest.mark.parametrize("version", [(1, 2, 0), (1, 1, 9)])
def test_a_version_that_was_released_is_refused(version):
    (line,) = problems(CONTRACT, replace(CONTRACT, version=version))
    assert "raise it in pyproject.toml" in line


@pytest.mark.parametrize(("number", "refused"), [(3, True), (4, True), (5, False)])
def test_other_fields_of_records_take_a_higher_schema_version(number, refused):
    now = replace(CONTRACT, version=(2, 0, 0), record={"fields": 2}, record_version=number)
    assert bool(problems(CONTRACT, now)) is refused


@pytest.mark.parametrize(
    ("before", "now", "refused"),
    [((1, 2, 0), (1, 3, 0), True), ((1, 2, 0), (2, 0, 0), False), ((0, 2, 0), (0, 2, 1), True),
     ((0, 2, 0), (0, 3, 0), False), ((0, 9, 0), (1, 0, 0), False)],
)  # fmt: skip
@pytest.mark.parametrize("lost", ["keys", "names"])
def test_what_was_promised_goes_only_with_a_major_version(before, now, refused, lost):
    changed = replace(CONTRACT, version=now, **{lost: frozenset()})
    lines = problems(replace(CONTRACT, version=before), changed)
    assert len(lines) == (len(getattr(CONTRACT, lost)) if refused else 0)
    assert all("is gone" in line for line in lines)


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.invalid", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with what the checks read, released once as v0.1.0, and what ci/release.sh calls."""
    folder = tmp_path / "checkout"
    for name in ("pyproject.toml", "harness/schema/run_record.json", "harness/schema/suite.json",
                 "harness/api/__init__.py", "offload_harness/__init__.py", "ci/release.sh",
                 "ci/release_checks.py"):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    (folder / "ci" / "release.sh").chmod(0o755)
    version = PROJECT["project"]["version"]
    (folder / "CHANGELOG.md").write_text(
        f"# Changelog\n\n## [{version}] - 2026-01-02\n\n- New.\n\n## [0.0.1]\n\n- Old.\n"
    )
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "m")
    git(folder, "tag", f"v{version}")
    return folder


def release(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """ci/release.sh with a Python that cannot build and says "building" instead."""
    python = folder.parent / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -m ] && {{ echo building; exit 1; }}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GITHUB_")}
    return subprocess.run(
        ["ci/release.sh", *arguments], cwd=folder, env=environment | {"PYTHON": str(python)}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip


def test_a_tagged_commit_with_its_section_of_the_changelog_is_a_release(checkout):
    done = release(checkout, "--")
    assert "building" in done.stderr and "not a release" not in done.stderr


def spoil_tag(folder: Path) -> None:
    git(folder, "commit", "-qm", "later", "--allow-empty")


def spoil_changelog(folder: Path) -> None:
    git(folder, "tag", "-d", f"v{PROJECT['project']['version']}")
    (folder / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n")
    git(folder, "commit", "-qam", "m")
    git(folder, "tag", f"v{PROJECT['project']['version']}")


def spoil_files(folder: Path) -> None:
    (folder / "new").touch()


def spoil_contract(folder: Path) -> None:
    """The released version, again, with a name less."""
    path = folder / "offload_harness" / "__init__.py"
    path.write_text(path.read_text().replace('"Plan", ', ""))
    git(folder, "commit", "-qam", "m")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [(spoil_tag, "the tag is 'none', not v"), (spoil_changelog, "CHANGELOG.md has no heading"),
     (spoil_files, "files are not committed"), (spoil_contract, "offload_harness.Plan was promised and is gone")],
)  # fmt: skip
def test_what_is_no_release_is_refused_before_anything_is_built_and_a_dry_run_goes_on(checkout, spoil, words):
    spoil(checkout)
    done = release(checkout)
    assert done.returncode == 1 and "building" not in done.stderr
    assert words in done.stderr and "not a release: " in done.stderr
    tried = release(checkout, "--dry-run")
    assert words in tried.stderr and "building" in tried.stderr


def test_an_unknown_option_is_no_folder(checkout):
    done = release(checkout, "--fast")
    assert done.returncode == 2 and "ci/release.sh [--dry-run] [FOLDER]" in done.stderr
    assert not (checkout / "--fast").exists()


def test_only_tags_are_published_and_only_what_was_tried():
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    writing = {name for name, job in jobs.items() if "write" in job.get("permissions", {}).values()}
    assert writing == {"publish", "image"}
    for name in writing:
        assert jobs[name]["if"].startswith("github.ref_type == 'tag'")
        assert "try" in jobs[name]["needs"]
        assert jobs[name]["environment"] == "release"
    assert jobs["try"]["needs"] == "build"
    assert "secrets" not in json.dumps(jobs["publish"]), "the index trusts this workflow: there is no token to steal"
    (script,) = (step["run"] for step in jobs["build"]["steps"] if step.get("name") == "Build, check and try")
    assert "ci/release.sh" in script
    pythons = jobs["try"]["strategy"]["matrix"]["python"]
    assert pythons == ["3.11", "3.12", "3.13", "3.14"]


@pytest.mark.slow
@pytest.mark.release
def test_a_dry_run_makes_a_wheel_that_works_outside_the_checkout(tmp_path):
    """All of ci/release.sh: build, checks, bills of materials, the wheel where its requirements are."""
    tools = ROOT / ".venv-release" / "bin" / "python"
    if not tools.exists():
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no release tools: make .venv-release/.installed")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"PACKAGES": sysconfig.get_path("purelib"), "RUN": str(RUN)}
    done = subprocess.run(
        ["ci/release.sh", "--dry-run", str(tmp_path / "dist")], cwd=ROOT, env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    made = {path.name for path in (tmp_path / "dist").rglob("*") if path.is_file()}
    version = PROJECT["project"]["version"]
    assert {f"offload_harness-{version}.tar.gz", f"offload_harness-{version}-py3-none-any.whl", "notes.md",
            "SHA256SUMS", "offload-harness.cdx.json"} <= made  # fmt: skip
    parts = json.loads((tmp_path / "dist" / "sbom" / "offload-harness.cdx.json").read_text())["components"]
    assert {"torch", "numpy"} <= {part["name"] for part in parts}
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path / "dist", check=True)
    names = zipfile.ZipFile(next((tmp_path / "dist").glob("*.whl"))).namelist()
    assert "engines/offload/kernels/csrc/gemm.cpp" in names
    assert not any(name.startswith(("tests/", "docs/", "ci/")) for name in names)
