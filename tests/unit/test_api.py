"""The contracts: JSON round trips, strictness, fingerprints, policy validation."""

import dataclasses
import json
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import api
from harness.schema import run_record_schema
from tests.records import FAKE as SPEC

GOLDEN = Path(__file__).parent.parent / "golden"


fractions = st.tuples(st.floats(0, 1), st.floats(0, 1)).map(lambda ab: (min(ab), max(ab) - min(ab), 1 - max(ab)))


@given(
    batch=st.integers(1, 512),
    weights=st.none() | fractions,
    options=st.dictionaries(st.text(max_size=5), st.integers() | st.booleans() | st.text(max_size=5)),
    memory=st.none() | st.integers(0, 2**50),
    count=st.just("auto") | st.integers(1, 9),
)
def test_specs_survive_json(batch, weights, options, memory, count):
    spec = dataclasses.replace(
        SPEC,
        policy=api.OffloadPolicy(gpu_batch_size=batch, weights=weights),
        options=options,
        limits=api.HardwareLimits(host_memory=memory),
        workload=api.WorkloadSpec(num_requests=count),
    )
    again = api.from_json(api.RunSpec, json.loads(json.dumps(api.to_json(spec))))
    assert again == spec
    assert again.fingerprint() == spec.fingerprint()


#: Resuming an old run directory depends on this very value.
FINGERPRINT = "09509b172a5db794"
LABELS = {"suite": "s", "name": "n", "expect": "error", "reference": True, "repeats": 9, "timeout_s": 5.0}
TRACED = api.WorkloadSpec("trace", trace="a.csv")
SETTINGS = {"engine": "x", "seed": 1, "options": {"a": 1}, "warmup": 0, "tune": "max_batch"}
PARTS = {
    "model": api.ModelSpec("y"),
    "workload": api.WorkloadSpec(gen_len=1),
    "policy": api.OffloadPolicy(schedule="sweep"),
    "limits": api.HardwareLimits(threads=1),
    "launcher": "venv",
}


@pytest.mark.parametrize(("field", "value"), LABELS.items())
def test_labels_leave_the_fingerprint_alone(field, value):
    assert dataclasses.replace(SPEC, **{field: value}).fingerprint() == SPEC.fingerprint() == FINGERPRINT


@pytest.mark.parametrize(("field", "value"), [*SETTINGS.items(), *PARTS.items(), ("workload", TRACED)])
def test_what_is_measured_changes_the_fingerprint(field, value):
    assert dataclasses.replace(SPEC, **{field: value}).fingerprint() != FINGERPRINT


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine": 3}, "RunSpec.engine"),
        ({"repeats": True}, "RunSpec.repeats"),
        ({"repeats": 1.5}, "RunSpec.repeats"),
        ({"expect": "fine"}, "RunSpec.expect"),
        ({"colour": 1}, "unknown field 'colour'"),
        ({"policy": []}, "RunSpec.policy"),
        ({"workload": {"num_requests": "some"}}, "RunSpec.workload.num_requests"),
        ({"policy": {"weights": [0.5, 0.5]}}, "expected 3 values|fits none"),
    ],
)
def test_misfits_are_named(change, message):
    with pytest.raises(api.HarnessError, match=message):
        api.from_json(api.RunSpec, api.to_json(SPEC) | change)


def test_absent_required_field_is_an_error():
    with pytest.raises(api.HarnessError, match="engine"):
        api.from_json(api.RunSpec, {"model": {"id": "x"}, "workload": {}})


NUMBERS = {"gpu_batch_size": 0, "num_gpu_batches": -1, "prefill_chunk": 0, "value_sparsity": 0.0}
FRACTIONS = {"weights": (0.5, 0.5, 0.5), "cache": (1.5, -0.5, 0.0)}


@pytest.mark.parametrize(("field", "value"), [*NUMBERS.items(), *FRACTIONS.items()])
def test_policies_out_of_range_are_refused(field, value):
    with pytest.raises(api.HarnessError, match=f"policy.{field}"):
        api.OffloadPolicy(**{field: value}).validate()


def test_an_engine_refuses_policy_fields_it_cannot_honour():
    policy = api.OffloadPolicy(gpu_batch_size=4, weight_bits=4)
    policy.require_defaults_except("x", "gpu_batch_size", "weight_bits")
    with pytest.raises(api.UnsupportedError, match=r"policy\.weight_bits"):
        policy.require_defaults_except("x", "gpu_batch_size")


def test_nano_batches_cannot_overlap_less_than_two():
    with pytest.raises(api.HarnessError, match="set nano_batches to 2 or more"):
        api.OffloadPolicy(nano_overlap=False).validate()
    api.OffloadPolicy(nano_batches=2, nano_overlap=False).validate()


def test_eight_bits_on_the_wire_need_a_wire():
    with pytest.raises(api.HarnessError, match=r"policy\.wire_bits is 8 and pipeline is 1"):
        api.OffloadPolicy(wire_bits=8).validate()
    api.OffloadPolicy(wire_bits=8, pipeline=2).validate()


def test_flops_of_a_dense_layer_are_two_per_weight_and_token():
    shape = api.ModelShape("x", 3, 8, 32, 2, 2, 4, 100, 64, params_per_layer=768, params_total=3 * 768 + 8 * 100)
    assert shape.flops(5, 0, 0) == 2 * 5 * 768 * 3
    assert shape.flops(1, 10, 1) - shape.flops(1, 0, 0) == 4 * 10 * 8 * 3 + 2 * 8 * 100
    assert shape.kv_bytes_per_token(2) == 2 * 3 * 8 * 2


@pytest.mark.parametrize("version", range(1, api.SCHEMA_VERSION + 1))
def test_records_of_every_version_still_load(version):
    path = GOLDEN / f"record_v{version}.jsonl"
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        record = api.parse_record(line, f"{path.name}:{number}")
        assert isinstance(record, api.RunRecord)
        assert record.requests or record.served


def test_the_shipped_schema_is_the_contracts():
    shipped = json.loads((resources.files("harness.schema") / "run_record.json").read_text())
    assert shipped == run_record_schema(), "run `make schema`"
