"""Secrets of the environment: in no record, no listing, no error and no hash."""

from dataclasses import replace

import pytest

from harness.api import (
    Exchange,
    HarnessError,
    LaunchRequest,
    LaunchResult,
    is_secret,
    is_secret_option,
    to_json,
    without_logins,
)
from harness.common.printable import printable
from harness.hardware import provenance
from harness.launchers.launcher import CellLauncher
from harness.run.records import RecordBuilder
from harness.suite.config import load_cell, load_suite, without_secret
from harness.suite.shareable import shareable_text
from tests.records import FAKE

ENV = {"VLLM_API_KEY": "hunter2", "OMP_NUM_THREADS": "2"}


@pytest.mark.parametrize(
    "name",
    ["VLLM_API_KEY", "DS_TOKEN", "TORCH_SECRET_X", "MKL_PASSWORD", "VLLM_PASSPHRASE", "DB_PWD", "GGML_CREDENTIALS",
     "VLLM_AUTH", "sslpassword", "api_key"],
)  # fmt: skip
def test_names_of_secrets(name):
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["OMP_NUM_THREADS", "OMP_WAIT_POLICY", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES", "sslmode"]
)
def test_names_of_settings(name):
    assert not is_secret(name)


def test_settings_of_records_hold_no_secret(monkeypatch):
    for name, value in {**ENV, "TORCH_HUB_TOKEN": "hunter2", "OTHER": "hunter2"}.items():
        monkeypatch.setenv(name, value)
    found = provenance.settings()
    assert found["OMP_NUM_THREADS"] == "2" and "hunter2" not in str(found)


def test_a_record_hides_a_cells_secret_and_keeps_its_fingerprint():
    cell = replace(FAKE, name="a", env=ENV)
    shared = RecordBuilder("harness run x", {}).shareable(cell)
    assert shared.env == {"VLLM_API_KEY": "***", "OMP_NUM_THREADS": "2"}
    assert shared.fingerprint() == cell.fingerprint()
    assert cell.fingerprint() == replace(cell, env={**ENV, "VLLM_API_KEY": "other"}).fingerprint()
    assert len({replace(cell, env=env).fingerprint() for env in (ENV, {}, {"OMP_NUM_THREADS": "2"})}) == 3
    assert "hunter2" not in str(to_json(cell.without_secrets()))


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("env.VLLM_API_KEY=hunter2", "env.VLLM_API_KEY=***"),
        ("env={VLLM_API_KEY: hunter2}", "env=***"),
        ("candidates={env.DS_TOKEN: [hunter2]}", "candidates=***"),
        ("env.OMP_WAIT_POLICY=PASSIVE", "env.OMP_WAIT_POLICY=PASSIVE"),
        ("options.tokens=3", "options.tokens=3"),
        ("options.api_key=hunter2", "options.api_key=***"),
        ("options.client.password=12345678", "options.client.password=***"),
        ("options={client: {hfToken: hunter2}}", "options=***"),
        ("options.max_num_batched_tokens=many", "options.max_num_batched_tokens=many"),
        ("options.pad_token=<pad>", "options.pad_token=<pad>"),
        ("model.id=https://me:hunter2@host/x", "model.id=https://me:***@host/x"),
        ("env.VLLM_API_KEY", "env.VLLM_API_KEY"),
    ],
)
def test_an_override_as_it_is_told(override, told):
    assert without_secret(override) == told


@pytest.mark.parametrize(
    "override",
    [
        "options.api_key={a: hunter2",
        "options=[{password: hunter2}]",
        "nothing.token=https://hunter2@host/",
        "env.VLLM_API_KEY=[hunter2]",
        "env.VLLM_API_KEY=12345678",
        "env.AWS_KEY=hunter2",
        "env.DS_TOKEN={a: hunter2",
    ],
)
def test_mistakes_with_a_secret_do_not_show_it(override):
    with pytest.raises(HarnessError) as caught:
        load_cell({"engine": "fake", "model": {"id": "fake"}, "workload": {}}, [override])
    assert "hunter2" not in str(caught.value) and "12345678" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("api_key", "x", True), ("apiKey", "x", True), ("HF_TOKEN", "x", True), ("Authorization", "x", True),
        ("password", 1234, True), ("token", 1234, False), ("api_key", True, False), ("key", None, False),
        ("max_tokens", "x", False), ("eos_token", "x", False), ("kv_keys", "x", False), ("bypass", "x", False),
    ],
)  # fmt: skip
def test_options_that_hold_secrets(name, value, secret):
    assert is_secret_option(name, value) is secret


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("see https://me:hunter2@host/x.", "see https://me:***@host/x."),
        ("git+https://hunter2@host/x", "git+https://***@host/x"),
        ("https://hunter2@host/x", "https://***@host/x"),
        ("(1https://me:hunter2@host/x?a?token=hunter2)", "(1https://me:***@host/x?a?token=***"),
        ("postgresql://me:hun@ter2@host/db", "postgresql://me:***@host/db"),
        ("postgresql://me@host/db", "postgresql://me@host/db"),
        ("s3://b/k?a=1&access_token=hunter2#c", "s3://b/k?a=1&access_token=***#c"),
        ("s3://b/k?X-Amz-Signature=hunter2", "s3://b/k?X-Amz-Signature=***"),
        ('{"url": "https://h/?key=hunter2", "n": 1}', '{"url": "https://h/?key=***", "n": 1}'),
        ("https:/me:hunter2@host/x: no such folder", "https:/me:***@host/x: no such folder"),
        ("me:hunter2@host and http://host/@x", "me:hunter2@host and http://host/@x"),
    ],
)
def test_urls_are_told_without_logins(text, told):
    assert printable(text) == told
    assert without_logins(told) == told


def test_a_record_hides_secrets_in_options_however_deep():
    options = {"client": {"api_key": "hunter2", "urls": ["https://me:hunter2@h/"]}, "auth": {"pin": [1, "hunter2"]}}
    cell = replace(FAKE, name="a", options=options)
    shared = RecordBuilder("harness run x", {}).shareable(cell)
    expected = {"client": {"api_key": "***", "urls": ["https://me:***@h/"]}, "auth": {"pin": [1, "***"]}}
    assert shared.options == expected and shared.fingerprint() == cell.fingerprint()
    assert cell.secrets() == {"hunter2"}
    urls = replace(FAKE.workload, trace="https://token@h/?key=hunter3"), "postgresql://me:pass4@h/x,https://h/y"
    assert replace(FAKE, workload=urls[0], image=urls[1]).secrets() == {"token", "hunter3", "pass4"}
    assert replace(FAKE, options={"password": "abc", "key": 3}).secrets() == frozenset(), "too short to look for"


def test_what_an_engine_prints_of_a_secret_is_in_neither_log_nor_reason(tmp_path, monkeypatch):
    log = tmp_path / "a.log"
    log.write_bytes(b"calls with hunter2 and hunter22\n\xff")
    exchange = Exchange(tmp_path / "x", log, lambda *event: None)
    request = LaunchRequest(
        replace(FAKE, name="a", options={"api_key": "hunter2", "token": "hunter22"}), 0, None, exchange
    )
    ended = LaunchResult("error", "401 for hunter22", "now")
    monkeypatch.setattr(CellLauncher, "_launch", lambda self, request: ended)
    assert CellLauncher(tmp_path, {}).launch(request).reason == "401 for ***"
    assert log.read_bytes() == b"calls with *** and ***\n\xff"


def test_a_secret_is_nothing_to_try():
    settings = {"engine": "fake", "model": {"id": "fake"}, "workload": {}, "candidates": {"env.DS_TOKEN": ["hunter2"]}}
    with pytest.raises(HarnessError, match="may hold a secret") as caught:
        load_cell(settings)
    assert "hunter2" not in str(caught.value)


SUITE = """\
name: s
model: {id: fake}
workload: {prompt_len: 4, gen_len: 2}
env: {VLLM_API_KEY: hunter2, OMP_NUM_THREADS: "2"}
matrix:
  - {name: a, engine: fake, env: {DS_TOKEN: 'it''s "hunter3"', DS_KEY: "2"}}
  - {name: b, engine: fake, env: {DS_TOKEN: "hunter4\\n\\"hunter5\\""}}
  - name: c
    engine: fake
    env:
      DS_TOKEN: &t hunter6
      DS_KEY: *t
      DS_X: not hidden
"""


def test_the_kept_suite_has_no_secret(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(SUITE)
    kept = shareable_text(path)
    assert "hunter" not in kept and kept.count("***") == 5
    assert 'OMP_NUM_THREADS: "2"' in kept and "DS_X: not hidden" in kept and "prompt_len: 4, gen_len: 2}" in kept
    (tmp_path / "kept.yaml").write_text(kept)
    before, after = (load_suite(tmp_path / name).cells for name in ("s.yaml", "kept.yaml"))
    assert [cell.fingerprint() for cell in before] == [cell.fingerprint() for cell in after]


def test_the_kept_suite_has_no_secret_of_options_and_urls(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(
        "# from https://me:hunter2@host/x\n"
        "options: {api_key: hunter2, client: {password: 12345678}, max_tokens: 4, pad_token: '<pad>'}\n"
        "matrix:\n  - {options: {auth: [hunter2, 3]}}\n"
    )
    assert shareable_text(path) == (
        "# from https://me:***@host/x\n"
        "options: {api_key: '***', client: {password: '***'}, max_tokens: 4, pad_token: '<pad>'}\n"
        "matrix:\n  - {options: {auth: ['***', 3]}}\n"
    )


def test_a_suite_without_secrets_is_kept_as_it_is(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text("name: s  # a comment\nmodel: {id: fake, key: x}\nenv: {OMP_NUM_THREADS: '2'}\n")
    assert shareable_text(path) == path.read_text()


def test_a_secret_that_cannot_be_hidden_is_refused(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text("env:\n  DS_TOKEN: >\n    hunter2\n    hunter3\n")
    with pytest.raises(HarnessError, match=r"s\.yaml:2:13: .* in quotes") as caught:
        shareable_text(path)
    assert "hunter" not in str(caught.value)
