"""Suite files: what they expand to, how cells are named, and which are the same."""

import itertools
import json
import string
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.api import HardwareLimits, OffloadPolicy
from harness.suite.config import load_suite
from tests.unit.suite_files.texts import CELL, HEAD, names, within


class TestWhole:
    def test_every_key_arrives(self, load):
        suite = load(
            """
            name: demo
            description: all of it
            hardware: {requires: {host_memory: 3GiB, disk_free: 10}, limits: {host_memory: 600MiB, threads: 2}}
            model: {id: facebook/opt-125m, weights: dummy, dtype: float16, revision: main}
            workload: {kind: synthetic, prompt_len: 64, gen_len: 8, num_requests: 3}
            engine: fake
            options: {a: {b: [1, null, x]}}
            policy: {weights: [0, 0.5, 0.5], max_batch: true, gpu_batch_size: 8}
            schedule: zigzag
            compute_dtype: bfloat16
            repeats: 5
            warmup: 0
            seed: 7
            timeout: 20min
            expect: oom_host
            reference: true
            machine_probe: false
            """
        )
        (cell,) = suite.cells
        assert (suite.name, suite.description, suite.machine_probe) == ("demo", "all of it", False)
        assert (suite.requires.host_memory, suite.requires.disk_free) == (3 << 30, 10)
        assert (cell.suite, cell.name, cell.engine, cell.tune) == ("demo", "fake", "fake", "max_batch")
        assert cell.limits == HardwareLimits(host_memory=600 << 20, threads=2)
        assert (cell.model.id, cell.model.dtype, cell.model.revision) == ("facebook/opt-125m", "float16", "main")
        assert (cell.workload.prompt_len, cell.workload.gen_len, cell.workload.num_requests) == (64, 8, 3)
        assert cell.options == {"a": {"b": [1, None, "x"]}}
        assert cell.policy == OffloadPolicy(
            gpu_batch_size=8, weights=(0, 0.5, 0.5), schedule="zigzag", compute_dtype="bfloat16"
        )
        assert (cell.repeats, cell.warmup, cell.seed, cell.timeout_s) == (5, 0, 7, 1200)
        assert (cell.expect, cell.reference) == ("oom_host", True)

    def test_defaults(self, load):
        (cell,) = load(CELL).cells
        assert (cell.workload.num_requests, cell.repeats, cell.warmup, cell.tune) == ("auto", 3, 1, "none")
        assert cell.policy == OffloadPolicy()
        assert cell.limits == HardwareLimits()

    @pytest.mark.parametrize(
        "path", sorted((Path(__file__).parents[3] / "suites").glob("*.yaml")), ids=lambda p: p.stem
    )
    def test_shipped_suites_load_fast(self, path):
        load_suite(path)
        with within(0.1):
            load_suite(path)


class TestMerging:
    def test_cell_merges_mappings_and_replaces_scalars(self, load):
        (cell,) = load(
            HEAD
            + """
hardware: {limits: {host_memory: 1GiB, threads: 2}}
options: {a: 1, b: {c: 2}}
policy: {gpu_batch_size: 4, num_gpu_batches: 2}
repeats: 3
matrix:
  - engine: fake
    options: {b: {d: 3}}
    policy: {gpu_batch_size: 8}
    limits: {host_memory: 2GiB}
    model: {dtype: float16}
    workload: {gen_len: 2}
    repeats: 1
"""
        ).cells
        assert cell.options == {"a": 1, "b": {"c": 2, "d": 3}}
        assert (cell.policy.gpu_batch_size, cell.policy.num_gpu_batches) == (8, 2)
        assert cell.limits == HardwareLimits(host_memory=2 << 30, threads=2)
        assert (cell.model.id, cell.model.dtype) == ("m", "float16")
        assert (cell.workload.prompt_len, cell.workload.gen_len, cell.repeats) == (128, 2, 1)

    @pytest.mark.parametrize("none", ["none", "null", "{host_memory: none, threads: null}"])
    def test_limits_are_lifted(self, load, none):
        base = CELL + "hardware: {limits: {host_memory: 1GiB, threads: 2}}\n"
        assert load(base + f"matrix: [{{limits: {none}}}]").cells[0].limits == HardwareLimits()
        assert load(base, "limits=none").cells[0].limits == HardwareLimits()

    @pytest.mark.parametrize(
        ("base", "cell", "tune", "batch"),
        [
            ("{}", "policy: max_batch", "max_batch", 1),
            ("{gpu_batch_size: 4}", "policy: max_batch", "max_batch", 4),
            ("{}", "policy: {max_batch: true, gpu_batch_size: 8}", "max_batch", 8),
            ("max_batch", "policy: {gpu_batch_size: 8}", "max_batch", 8),
            ("max_batch", "policy: {max_batch: false}", "none", 1),
            ("max_batch", "tune: none", "none", 1),
            ("{}", "tune: max_batch", "max_batch", 1),
        ],
    )
    def test_tuning(self, load, base, cell, tune, batch):
        (spec,) = load(f"{CELL}policy: {base}\nmatrix: [{{{cell}}}]").cells
        assert (spec.tune, spec.policy.gpu_batch_size) == (tune, batch)

    def test_shorthand_of_a_cell_wins_over_the_base(self, load):
        (spec,) = load(CELL + "policy: {schedule: row}\nmatrix: [{schedule: sweep}]").cells
        assert spec.policy.schedule == "sweep"

    def test_the_same_thing_said_twice_is_refused(self, error):
        text = error(CELL + "policy: {schedule: row}\nschedule: row")
        assert text == "x.yaml:5:20: schedule is given twice in one place: here and at x.yaml:6:11"
        assert "tune is given twice" in error(CELL + "policy: max_batch\ntune: none")


class TestMatrix:
    def test_workloads_are_outermost_then_models_then_entries(self, load):
        suite = load(
            "name: s\nmodel: [{id: a/m1}, {id: a/m2}]\n"
            "workload: [{prompt_len: 8, gen_len: 2}, {prompt_len: 16, gen_len: 4}]\n"
            "matrix: [{engine: fake}, {name: acc, engine: accelerate}]\n"
        )
        assert names(suite) == [
            *("fake-p8g2-m1", "acc-p8g2-m1", "fake-p8g2-m2", "acc-p8g2-m2"),
            *("fake-p16g4-m1", "acc-p16g4-m1", "fake-p16g4-m2", "acc-p16g4-m2"),
        ]

    def test_mapping_is_a_product_first_axis_outermost(self, load):
        suite = load(HEAD + "matrix: {engine: [fake, offload], schedule: [row, zigzag], seed: 3}")
        assert names(suite) == ["fake-row", "fake-zigzag", "offload-row", "offload-zigzag"]
        assert {cell.seed for cell in suite.cells} == {3}

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.tuples(*[st.integers(1, 4)] * 4))
    def test_count_is_the_product_and_order_is_stable(self, load, sizes):
        workloads, models, batches, seeds = (list(range(1, n + 1)) for n in sizes)
        text = json.dumps(
            {
                "name": "s",
                "engine": "fake",
                "workload": [{"prompt_len": n} for n in workloads],
                "model": [{"id": f"m{n}"} for n in models],
                "matrix": {"policy": [{"gpu_batch_size": n} for n in batches], "seed": seeds},
            }
        )
        cells = load(text).cells
        got = [(c.workload.prompt_len, int(c.model.id[1:]), c.policy.gpu_batch_size, c.seed) for c in cells]
        assert got == list(itertools.product(workloads, models, batches, seeds))
        assert len({c.fingerprint() for c in cells}) == len({c.name for c in cells}) == len(cells)
        assert load(text).cells == cells

    @pytest.mark.parametrize("matrix", ["[]", "{}", "null", "3", "x"])
    def test_nothing_to_expand(self, error, matrix):
        assert error(CELL + f"matrix: {matrix}").startswith("x.yaml:5:9: matrix: expected a list of cells")

    @pytest.mark.parametrize("key", ["model", "workload"])
    def test_empty_list(self, error, key):
        text = "".join(line + "\n" for line in CELL.splitlines() if not line.startswith(key))
        assert f"{key}: the list is empty" in error(text + f"{key}: []")
        assert f"{key}: the list is empty" in error(CELL + f"matrix: {{{key}: []}}")

    def test_too_many_cells_or_launches_are_counted_not_made(self, error):
        axes = {key: list(range(57)) for key in ("repeats", "seed", "warmup", "timeout")}
        with within(0.5):
            text = error(CELL + "matrix: " + json.dumps(axes))
        assert text == "x.yaml:5:9: expands to 10,556,001 cells; at most 10,000 are allowed"
        axes = {"seed": list(range(200)), "repeats": 1000}
        assert "200 cells make 200,000 launches" in error(CELL + "matrix: " + json.dumps(axes))

    def test_many_cells_of_a_large_base_are_refused_fast(self, error):
        options = json.dumps({"a": list(range(20_000))})
        axes = json.dumps({"seed": list(range(100)), "warmup": list(range(100))})
        with within(2):
            text = error(CELL + f"options: {options}\nmatrix: {axes}")
        assert text == "x.yaml:6:9: expands to cells of more than 2,000,000 values together"

    def test_ten_thousand_cells_are_allowed(self, load):
        axes = {"seed": list(range(100)), "policy": [{"gpu_batch_size": n} for n in range(1, 101)]}
        assert len(load(CELL + "repeats: 1\nmatrix: " + json.dumps(axes)).cells) == 10_000


class TestNames:
    def test_hold_only_what_varies_within_an_engine_unless_given(self, load):
        suite = load(HEAD + "matrix: [{engine: transformers}, {engine: offload}, {engine: offload, schedule: sweep}]")
        assert names(suite) == ["transformers", "offload-row", "offload-sweep"]
        text = "matrix: [{name: short, workload: {gen_len: 1}}, {name: long, workload: {gen_len: 9}}]"
        assert names(load(CELL + text)) == ["short", "long"]

    def test_parts_in_order(self, load):
        suite = load(
            HEAD
            + """
matrix:
  - {engine: offload, compute_dtype: bfloat16}
  - {engine: offload, compute_dtype: float32, schedule: zigzag, policy: {gpu_batch_size: 2, kv_bits: 4}, seed: 1,
     workload: {prompt_len: 8, gen_len: 2}, model: {id: "org/a model"}}
"""
        )
        assert names(suite) == [
            "offload-bfloat16-row-b1x1-w16kv16-seed0-p128g16-m",
            "offload-float32-zigzag-b2x1-w16kv4-seed1-p8g2-a-model",
        ]

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ("{name: a}", "{name: a, schedule: zigzag}"),
            ("{name: a}", "{name: A}"),
            ("{}", "{options: {x: 1}}"),
            ("{name: fake-p1g1}", "{name: fake-p1g1, workload: {gen_len: 3}}"),
        ],
    )
    def test_clash_names_both(self, error, first, second):
        text = error(CELL + f"matrix:\n  - {first}\n  - {second}")
        assert text.startswith("x.yaml:7:5: cell name ")
        assert "x.yaml:6:5" in text

    def test_clash_within_axes_points_at_the_axis_that_differs(self, error):
        text = error(CELL + "matrix:\n  options: [{x: 1}, {x: 2}]\n  seed: 0")
        assert text.startswith("x.yaml:6:21: cell name 'fake' is already used by the cell from x.yaml:6:13")

    @pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "", "a b", "é", "a\n", "x" * 129, "-rf"])
    def test_unsafe_names(self, error, name):
        quoted = json.dumps(name, ensure_ascii=False)
        assert error(CELL + f"matrix: [{{name: {quoted}}}]").startswith("x.yaml:5:17: name ")
        assert error(CELL.replace("name: s", f"name: {quoted}")).startswith("x.yaml:1:7: name ")

    def test_length_limits(self, load, error):
        assert load(CELL.replace("name: s", f"name: {'s' * 64}")).name == "s" * 64
        assert "at most 64" in error(CELL.replace("name: s", f"name: {'s' * 65}"))
        assert names(load(CELL + f"matrix: [{{name: {'x' * 128}}}]")) == ["x" * 128]
        workloads = "name: s\nengine: fake\nmodel: {id: m}\nworkload: [{gen_len: 1}, {gen_len: 2}]\n"
        assert "at most 128" in error(workloads + f"matrix: [{{name: {'x' * 128}}}]")


class TestFingerprints:
    def test_labels_do_not_count(self, load):
        (cell,) = load(CELL).cells
        text = CELL.replace("name: s", "name: other") + "matrix: [{name: z, expect: timeout, reference: true}]"
        (relabelled,) = load(text, "repeats=9", "timeout=1h").cells
        assert relabelled.fingerprint() == cell.fingerprint()
        assert replace(relabelled, seed=1).fingerprint() != cell.fingerprint()

    def test_equivalent_suites_have_the_same_fingerprint(self, load):
        one = load(CELL + "schedule: sweep\nhardware: {limits: {host_memory: 1GiB}}\npolicy: max_batch")
        other = load(CELL + "policy: {schedule: sweep, max_batch: true}\nhardware: {limits: {host_memory: 1073741824}}")
        assert one.cells[0].fingerprint() == other.cells[0].fingerprint()

    @settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.lists(st.text(alphabet=string.ascii_lowercase, min_size=1), unique=True, min_size=1, max_size=6))
    def test_options_count(self, load, values):
        entries = [{"name": f"c{n}", "options": {"x": value}} for n, value in enumerate(values)]
        cells = load(CELL + "matrix: " + json.dumps(entries)).cells
        assert len({cell.fingerprint() for cell in cells}) == len(values)
