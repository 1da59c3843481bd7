"""The YAML of suites: what is refused with its position, bombs, and junk of any kind."""

import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.api import HarnessError
from harness.suite.config import CELL_KEYS, SUITE_KEYS, load_suite
from tests.unit.suite_files.texts import CELL, HEAD, within


class TestYaml:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", "x.yaml: is empty"),
            ("# nothing\n", "x.yaml: is empty"),
            ("- a", "x.yaml:1:1: a suite is a mapping of keys, got a list"),
            ("null", "x.yaml:1:1: a suite is a mapping of keys, got null"),
            ("a: 1\n---\nb: 2", "x.yaml:2:1: a second document starts here"),
            ("a: [1]]", "x.yaml:1:7: invalid YAML: "),
            ("a: b: c", "x.yaml:1:5: invalid YAML: mapping values are not allowed"),
            ("a: 1\na: 2", "x.yaml:2:1: duplicate key 'a'"),
            ("b: {a: 1, 'a': 2}", "x.yaml:1:11: duplicate key 'a'"),
            ("1: a", "x.yaml:1:1: a key must be text, got 1"),
            ("on: a", "x.yaml:1:1: a key must be text, got true"),
            ("[a]: b", "x.yaml:1:1: a key must be plain text"),
            ("k" * 129 + ": a", "x.yaml:1:1: key 'kkk"),
            ("a: 2024-01-01", "x.yaml:1:4: '2024-01-01' reads as a timestamp; quote it"),
            ("a: !!timestamp 2024-01-01", "x.yaml:1:4: tag 'tag:yaml.org,2002:timestamp' is not allowed"),
            ("a: !!set {b}", "x.yaml:1:4: tag 'tag:yaml.org,2002:set' is not allowed"),
            ("a: !!omap [b: 1]", "x.yaml:1:4: tag 'tag:yaml.org,2002:omap' is not allowed"),
            ("a: !!binary aGk=", "x.yaml:1:4: tag 'tag:yaml.org,2002:binary' is not allowed"),
            ("a: !!python/object/apply:os.system [ls]", "x.yaml:1:4: tag 'tag:yaml.org,2002:python/object/apply:os"),
            ("a: !!python/tuple [ls]", "x.yaml:1:4: tag 'tag:yaml.org,2002:python/tuple' is not allowed"),
            ("a: !mine x", "x.yaml:1:4: tag '!mine' is not allowed"),
            ("a: !!int x", "x.yaml:1:4: 'x' is not a valid int"),
            ("a: !!bool x", "x.yaml:1:4: 'x' is not a valid bool"),
            ("a: !!int ''", "x.yaml:1:4: '' is not a valid int"),
            ("a: .inf", "x.yaml:1:4: '.inf' is not a finite number"),
            ("a: .nan", "x.yaml:1:4: '.nan' is not a finite number"),
            ("a: 1.0e+999", "x.yaml:1:4: '1.0e+999' is not a finite number"),
            ("a: 9223372036854775808", "x.yaml:1:4: '9223372036854775808' does not fit in 64 bits"),
            ("a: " + "9" * 5000, "x.yaml:1:4: '999"),
            ("a: =", "x.yaml:1:4: '=' reads as a value"),
            ('a: "\\0"', "x.yaml:1:4: control character '\\x00' is not allowed"),
            ('a: "\\e[31m"', "x.yaml:1:4: control character '\\x1b' is not allowed"),
            ("b: 1\na: \x00", "x.yaml:2:4: control character '\\x00' is not allowed"),
            ("a: *b", "x.yaml:1:4: alias *b has no anchor before it"),
            ("a: &b [*b]", "x.yaml:1:8: *b contains itself"),
            ("a: &b {c: {d: *b}}", "x.yaml:1:15: *b contains itself"),
            ("a: &b {<<: *b}", "x.yaml:1:12: *b contains itself"),
            ("a: {<<: 3}", "x.yaml:1:9: << merges a mapping or a list of mappings, got 3"),
            ("a: {<<: [3]}", "x.yaml:1:10: << merges a mapping or a list of mappings, got 3"),
            ("a: {<<: {}, <<: {}}", "x.yaml:1:13: duplicate key '<<'"),
            ("a: <<", "x.yaml:1:4: '<<' reads as a merge"),
            ("a: " + "[" * 70 + "]" * 70, "x.yaml:1:68: nested more than 64 levels deep"),
            (b"name: \xff\xfe", "x.yaml:1: is not UTF-8 text (byte 0xff)"),
            (b"a: 1\nname: caf\xe9", "x.yaml:2: is not UTF-8 text (byte 0xe9)"),
            ("a: 1".encode("utf-16"), "x.yaml:1: is not UTF-8 text"),
            (b"#" * ((1 << 20) + 1), "x.yaml: is larger than 1 MiB"),
        ],
    )
    def test_refused_with_position(self, error, text, expected):
        with within(1):
            got = error(text)
        assert got.startswith(expected)
        assert len(got.splitlines()) == 1
        assert len(got) < 1000

    def test_merge_keys_and_aliases(self, load):
        suite = load(
            HEAD
            + """
options: &o {a: 1, b: 2}
matrix:
  - &first {name: one, engine: fake, seed: 4}
  - {<<: *first, name: two, options: {<<: [{a: 5}, *o], c: 3}}
"""
        )
        one, two = suite.cells
        assert (two.engine, two.seed) == ("fake", 4)
        assert (one.options, two.options) == ({"a": 1, "b": 2}, {"a": 5, "b": 2, "c": 3})

    def test_yaml_that_is_allowed(self, load):
        options = "options: {a: !!str 3, b: !!float 2, d: 0x10, e: '2024-01-01', f: é}"
        (cell,) = load(f"\ufeff%YAML 1.1\n---\n{CELL}{options}\n...\n").cells
        assert cell.options == {"a": "3", "b": 2.0, "d": 16, "e": "2024-01-01", "f": "é"}

    @pytest.mark.parametrize(
        "bomb",
        [
            "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 40)),
            "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{p: *a{n - 1}, q: *a{n - 1}}}\n" for n in range(1, 60)),
            "a: &a {" + ", ".join(f"k{n}: 1" for n in range(9000)) + "}\nb:\n" + "- {<<: *a}\n" * 9000,
            "a: &a " + "x" * 500_000 + "\nb: [" + "*a, " * 90_000 + "]",
            "a: [" + "1, " * 200_000 + "]",
            "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 20_000)),
            "[" * 500_000,
            "- " * 400_000,
            "{a: " * 200_000,
            "? " * 400_000,
            "&a " * 300_000,
            "a: 'x" + "\n" * 900_000,
        ],
        ids=lambda text: text[:12],
    )
    def test_bombs_are_refused_fast(self, error, bomb):
        with within(2):
            assert len(error(bomb)) < 1000

    def test_thousands_of_merged_mappings_are_read_fast(self, load):
        """The earliest wins; a copy of all so far for each would take half a minute."""
        with within(5):
            merged = ", ".join(f"{{k{n}: {n}, first: {n}}}" for n in range(12_000))
            (cell,) = load(f"{CELL}options: {{<<: [{merged}]}}").cells
        assert (len(cell.options), cell.options["first"], cell.options["k11999"]) == (12_001, 0, 11_999)

    def test_files_that_cannot_be_read(self, tmp_path, monkeypatch):
        os.mkfifo(tmp_path / "pipe")
        for path, reason in [
            (tmp_path, "is a folder"),
            (tmp_path / "none.yaml", "no such file"),
            (tmp_path / "pipe", "is not a regular file"),
            (tmp_path / "pipe" / "x", "cannot be read"),
            (tmp_path / ("x" * 5000), "cannot be read"),
            (Path("a\0b"), "cannot be read"),
        ]:
            with pytest.raises(HarnessError, match=reason) as caught:
                load_suite(path)
            assert len(str(caught.value).splitlines()) == 1
        (tmp_path / "x.yaml").touch()
        refused = Mock(side_effect=PermissionError(13, "Permission denied"))
        monkeypatch.setattr("harness.suite.yaml_source.open_regular", refused)
        with pytest.raises(HarnessError, match="cannot be read: Permission denied"):
            load_suite(tmp_path / "x.yaml")


# Junk that often gets past the first check: real keys with values of any kind.
_KEYS = st.sampled_from(
    [*CELL_KEYS, *SUITE_KEYS, "requires", "id", "gen_len", "num_requests", "max_batch", "weights", "host_memory", "x"]
)

_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)

_SCALARS |= st.sampled_from(["fake", "max_batch", "none", "1GiB", "2min", "row", "auto", "m", "<<", "2024-01-01"])

_JUNK = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS | st.text(max_size=4), inner, max_size=5),
)

_SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


class TestJunk:
    @pytest.fixture
    def only_harness_errors(self, load):
        def loaded(text: str | bytes, *overrides: str) -> None:
            try:
                load(text, *overrides)
            except HarnessError as exc:
                assert 1 <= len(str(exc).splitlines()) <= 21

        return loaded

    @_SETTINGS
    @given(junk=_JUNK)
    def test_any_document(self, only_harness_errors, junk):
        only_harness_errors(yaml.safe_dump(junk, allow_unicode=True).encode("utf-8", "replace"))

    @_SETTINGS
    @given(junk=st.dictionaries(_KEYS, _JUNK, max_size=4))
    def test_any_value_in_a_good_suite(self, only_harness_errors, junk):
        suite = {"name": "s", "engine": "fake", "model": {"id": "m"}, "workload": {}} | junk
        only_harness_errors(yaml.safe_dump(suite).encode("utf-8", "replace"))

    @_SETTINGS
    @given(text=st.text(alphabet="ab:,-?[]{}&*!<|>'\"%@`#~ \n\t0123.", max_size=60))
    def test_any_text(self, only_harness_errors, text):
        only_harness_errors(text)
        only_harness_errors(CELL + "options: " + text)

    @_SETTINGS
    @given(data=st.binary(max_size=60))
    def test_any_bytes(self, only_harness_errors, data):
        only_harness_errors(data)

    @_SETTINGS
    @given(key=_KEYS, sub=_KEYS, value=st.text(max_size=20), dotted=st.booleans())
    def test_any_override(self, only_harness_errors, key, sub, value, dotted):
        only_harness_errors(CELL, f"{key}.{sub}={value}" if dotted else f"{key}={value}", value)
