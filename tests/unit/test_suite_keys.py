"""Every key of a suite is described once: for `harness explain`, for the JSON Schema, and as engines really heed it."""

import json
from dataclasses import fields
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
import yaml

from harness import api, registry
from harness.schema.suites import suite_schema
from harness.suite.check import _DURATIONS
from harness.suite.config import CELL_KEYS, SUITE_KEYS, load_suite
from harness.suite.keys import find, keys

ROOT = Path(__file__).parents[2]
SUITES = sorted([*ROOT.glob("suites/*.yaml"), *ROOT.glob("examples/*.yaml")])
KEYS = [key for section in keys().values() for key in section.values()]
SCHEMA = suite_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
BASE = {"name": "x", "engine": "offload", "model": {"id": "m"}, "workload": {}}


def names(kind):
    return {_DURATIONS.get(field.name, field.name) for field in fields(kind)}


def test_no_key_lacks_a_description_and_no_description_a_key():
    told = {section: set(entries) for section, entries in keys().items()}
    assert told["cell"] == set(CELL_KEYS)
    assert told["suite"] == set(SUITE_KEYS) - set(CELL_KEYS) | {"name"}
    for section, kind in (
        ("model", api.ModelSpec),
        ("workload", api.WorkloadSpec),
        ("policy", api.OffloadPolicy),
        ("limits", api.HardwareLimits),
        ("requires", api.HardwareRequirements),
    ):
        assert told[section] == names(kind), section


@pytest.mark.parametrize("key", KEYS, ids=lambda key: f"{key.section}.{key.name}")
def test_an_example_sets_its_key_and_is_valid(key):
    given = yaml.safe_load(key.example)
    assert f"{key.name}:" in key.example or f"{key.name}]" in key.example
    of_cell = isinstance(given, list) or "limits" in given
    VALIDATOR.validate(BASE | ({"matrix": given if isinstance(given, list) else [given]} if of_cell else given))


@pytest.mark.parametrize("key", [key for key in KEYS if "task:" in key.example], ids=lambda key: key.name)
def test_an_example_of_a_task_is_of_one_that_exists(key):
    assert registry.is_task(yaml.safe_load(key.example)["workload"]["task"])


def example_policy(key):
    value = yaml.safe_load(key.example)["policy"][key.name]
    return api.OffloadPolicy(**{key.name: tuple(value) if isinstance(value, list) else value})


#: An example that is the default says nothing of who heeds its key.
TELLING = [key for key in KEYS if key.section == "policy" and example_policy(key) != api.OffloadPolicy()]


@pytest.mark.parametrize("key", TELLING, ids=lambda key: key.name)
def test_the_engines_that_heed_a_key_are_those_that_do_not_refuse_it(key):
    policy = example_policy(key)
    for name, entry in registry.engines().items():
        if not entry.refuses:
            continue
        try:
            registry.resolve(entry.refuses)(policy, api.HardwareLimits(), None)
            refused = False
        except api.UnsupportedError as exc:
            refused = f"has no policy.{key.name}" in str(exc)
        assert refused == bool(key.engines and name not in key.engines), f"{name}: policy.{key.name}"


def test_every_engine_that_is_named_exists():
    assert {name for key in KEYS for name in key.engines} <= set(registry.engines())


def test_a_name_finds_its_keys():
    assert [key.path for key in find("threads")] == ["policy.threads", "limits.threads"]
    assert [key.path for key in find("policy.threads")] == ["policy.threads"]
    assert [key.path for key in find("hardware.requires.disk_free")] == ["hardware.requires.disk_free"]
    with pytest.raises(api.HarnessError, match="did you mean 'timeout'"):
        find("timout")


def test_the_shipped_schema_is_current():
    shipped = json.loads((resources.files("harness.schema") / "suite.json").read_text())
    assert shipped == json.loads(json.dumps(SCHEMA)), "run `make schema`"
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.name)
def test_shipped_suites_name_the_schema_and_meet_it(path):
    text = path.read_text()
    modeline = text.splitlines()[0].partition("# yaml-language-server: $schema=")[2]
    assert (path.parent / modeline).resolve() == ROOT / "harness" / "schema" / "suite.json"
    VALIDATOR.validate(yaml.safe_load(text))


@pytest.mark.parametrize(
    "changes",
    [
        {"matrx": []},
        {"repeats": "three"},
        {"model": {"id": "m", "weight": "dummy"}},
        {"workload": {"kind": "synthetics"}},
        {"policy": {"schedule": "swep"}},
        {"policy": "max_batches"},
        {"matrix": [{"limits": {"host_memory": "much"}}]},
        {"matrix": [{"engine": "offload", "polic": {}}]},
        {"hardware": {"require": {}}},
        {"expect": "failure"},
    ],
)
def test_the_schema_refuses_what_a_suite_may_not_say(changes, tmp_path):
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(BASE | changes)
    (tmp_path / "x.yaml").write_text(json.dumps(BASE | changes))
    with pytest.raises(api.HarnessError):
        load_suite(tmp_path / "x.yaml")


@pytest.mark.parametrize(
    "changes",
    [
        {"matrix": [{"limits": "none"}, {"seed": 1, "limits": {"host_memory": "none", "threads": 2}}]},
        {"policy": {"max_batch": True, "gpu_batch_size": 4}},
        {"matrix": {"schedule": ["row", "sweep"], "policy": [{"gpu_batch_size": 1}, {"gpu_batch_size": 2}]}},
        {"timeout": 90, "latency": "10min", "tune": "search"},
        {"hardware": {"requires": {"host_memory": "1GiB"}, "limits": {"host_memory": 1 << 30}}},
    ],
)
def test_the_schema_accepts_every_way_to_write_a_suite(changes, tmp_path):
    VALIDATOR.validate(BASE | changes)
    (tmp_path / "x.yaml").write_text(json.dumps(BASE | changes))
    assert load_suite(tmp_path / "x.yaml").cells
