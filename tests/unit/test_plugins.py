"""Plug-ins of distributions that are damaged, half installed or there twice."""

import pytest

from harness.api import Engine, HarnessError
from harness.common import plugins

DECLARED = "[offload_harness.engines]\ngood = evil:E\n"


def put(site, name, entries=DECLARED, about=None):
    folder = site / f"{name}-1.dist-info"
    folder.mkdir(parents=True)
    (folder / "entry_points.txt").write_bytes(entries if isinstance(entries, bytes) else entries.encode())
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n".encode() if about is None else about
    (folder / "METADATA").write_bytes(about)


@pytest.fixture
def found(monkeypatch):
    """The plug-ins that are found with these folders on the path, by name."""
    monkeypatch.setattr(plugins, "plugins", plugins.plugins.__wrapped__)  # without what it remembers

    def in_folders(*sites):
        for site in reversed(sites):
            monkeypatch.syspath_prepend(site)
        return plugins.plugins(plugins.ENGINES)

    return in_folders


def test_a_damaged_distribution_hides_no_other(found, tmp_path):
    put(tmp_path, "a-good")
    put(tmp_path, "b-no-value", "[offload_harness.engines]\nb\n")
    put(tmp_path, "c-no-text", b"\xff\xfe[x")
    put(tmp_path, "d-no-metadata", "[offload_harness.engines]\nd = d:D\n", b"")
    put(tmp_path, "e-no-text", "[offload_harness.engines]\ne = e:E\n", b"\xff\0")
    assert {(p.name, p.distribution, p.rivals) for p in found(tmp_path).values() if p.target == "evil:E"} == {
        ("good", "a-good 1", ())
    }
    assert not {"b", "d", "e"} & set(found())


def test_of_a_distribution_that_is_there_twice_the_first_counts_and_others_are_rivals(found, tmp_path):
    put(tmp_path / "one", "same")
    put(tmp_path / "two", "same", "[offload_harness.engines]\ngood = older:E\n")
    put(tmp_path / "two", "other")
    plugin = found(tmp_path / "one", tmp_path / "two")["good"]
    assert {plugin.distribution, *plugin.rivals} == {"same 1", "other 1"} and plugin.target == "evil:E"


@pytest.mark.parametrize("end", ["raise SystemExit(0)", "raise RuntimeError('no\\nmore')", "E = 5", "class E: pass"])
def test_a_plug_in_that_is_no_engine_is_refused_in_a_line(end, tmp_path, monkeypatch):
    (tmp_path / "evil_module.py").write_text(end)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(plugins.importlib.sys.modules, "evil_module", raising=False)
    with pytest.raises(HarnessError, match=r"^plug-in 'evil' of evil 1[^\n]*\Z"):
        plugins.build(plugins.Plugin("evil", "evil_module:E", "evil 1", ""), Engine)
