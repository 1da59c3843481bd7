"""Suite files: what they expand to, and that everything else is refused with its position."""

import itertools
import json
import os
import string
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.api import HardwareLimits, HarnessError, HarnessErrors, OffloadPolicy, SuiteSpec
from harness.suite.config import CELL_KEYS, SUITE_KEYS, load_suite, parse_duration, parse_size

HEAD = "name: s\nmodel: {id: m}\nworkload: {}\n"
CELL = HEAD + "engine: fake\n"


@pytest.fixture
def load(tmp_path):
    """Loads a suite from its text; the file is always called x.yaml."""

    def load(text: str | bytes, *overrides: str) -> SuiteSpec:
        path = tmp_path / "x.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        try:
            return load_suite(path, overrides)
        except HarnessError as exc:
            raise HarnessError(str(exc).replace(f"{tmp_path}/", "")) from None

    return load


@pytest.fixture
def error(load):
    """The text of the error a suite gives."""

    def error(text: str | bytes, *overrides: str) -> str:
        with pytest.raises(HarnessError) as caught:
            load(text, *overrides)
        return str(caught.value)

    return error


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Of CPU time of its own: a busy machine takes none away."""
    start = time.process_time()
    yield
    assert time.process_time() - start < seconds


def names(suite: SuiteSpec) -> list[str]:
    return [cell.name for cell in suite.cells]


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
        "path", sorted((Path(__file__).parents[2] / "suites").glob("*.yaml")), ids=lambda p: p.stem
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


class TestMistakes:
    """Each wrong suite, and the start of a line of its message."""

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("promt_len: 3", "1: unknown key 'promt_len' in suite; known: name, description"),
            ("repeat: 3", "1: unknown key 'repeat' in suite; did you mean 'repeats'?"),
            ("hardware: {limit: {}}", "12: unknown key 'limit' in hardware; did you mean 'limits'?"),
            ("hardware: 3", "11: hardware: expected a mapping, got 3"),
            ("hardware: {requires: {host: 1}}", "23: unknown key 'host' in requires"),
            ("hardware: {requires: {host_memory: -1}}", "36: requires.host_memory is -1; it must lie"),
            ("hardware: {requires: [1]}", "22: requires: expected a mapping, got a list"),
            ("hardware: {limits: [1]}", "20: limits: expected a mapping, got a list"),
            ("hardware: {limits: {host_memory: 16G}}", "34: expected a size such as 16GiB"),
            ("hardware: {limits: {host_memory: -1GiB}}", "34: expected a size such as 16GiB"),
            ("hardware: {limits: {host_memory: 0}}", "34: limits.host_memory is 0; it must lie"),
            ("hardware: {limits: {host_memory: 9000TiB}}", "34: '9000TiB' is more than 1 PiB"),
            ("hardware: {limits: {host_memory: true}}", "34: limits.host_memory: expected an integer, got true"),
            ("hardware: {limits: {threads: 2GiB}}", "30: limits.threads: expected an integer, got '2GiB'"),
            ("hardware: {limits: {threads: 0}}", "30: limits.threads is 0"),
            ('repeats: "3"', "10: repeats: expected an integer, got '3'"),
            ("repeats: 1.5", "10: repeats: expected an integer, got 1.5"),
            ("repeats: true", "10: repeats: expected an integer, got true"),
            ("repeats: 0", "10: repeats is 0; it must lie between 1 and 1,000"),
            ("repeats: 1001", "10: repeats is 1001"),
            ("warmup: 101", "9: warmup is 101"),
            ("seed: -1", "7: seed is -1"),
            ("timeout: soon", "10: expected a duration such as 90s"),
            ("timeout: -3", "10: timeout is -3"),
            ("timeout: 1:30", "10: '1:30' is not a plain number"),
            ("latency: soon", "10: expected a duration such as 90s"),
            ("latency: 90s", "10: latency goes with `policy: search`"),
            ("matrix: [{workload: {kind: trace}}]", "21: workload.trace goes with `kind: trace`"),
            ("matrix: [{workload: {trace: a.csv}}]", "29: workload.trace goes with `kind: trace`"),
            ("timeout: [1]", "10: timeout: expected a number, got a list"),
            ("description: [a]", "14: description: expected text, got a list"),
            ("machine_probe: 1", "16: machine_probe: expected true or false, got 1"),
            ("reference: maybe", "12: reference: expected true or false, got 'maybe'"),
            ("expect: fine", "9: expect: expected 'ok', 'oom_device'"),
            ("options: [1]", "10: options: expected a mapping, got a list"),
            ("policy: best", "9: unknown policy 'best'; expected max_batch, search, search_bits or a mapping"),
            ("policy: 3", "9: policy: expected a mapping, got 3"),
            ("policy: null", "9: policy: expected a mapping, got null"),
            ("policy: {max_batch: 3}", "21: policy.max_batch: expected true or false, got 3"),
            ("policy: {gpu_batch: 3}", "10: unknown key 'gpu_batch' in policy; did you mean 'gpu_batch_size'?"),
            ("policy: {gpu_batch_size: 0}", "26: policy.gpu_batch_size is 0; it must be at least 1"),
            ("policy: {weights: [1, 0]}", "19: policy.weights: expected three fractions (device, host, disk)"),
            ("policy: {weights: [1, 0, 0, 0]}", "19: policy.weights: expected three fractions"),
            ("policy: {weights: [1, x, 0]}", "23: policy.weights.1: expected a number, got 'x'"),
            ("policy: {weights: [1, 1, 0]}", "19: policy.weights is [1.0, 1.0, 0.0]"),
            ("policy: {weight_bits: 5}", "23: policy.weight_bits: expected 3, 4, 8 or 16, got 5"),
            ("schedule: diagonal", "11: policy.schedule: expected 'row', 'zigzag' or 'sweep', got 'diagonal'"),
            ("tune: fully", "7: tune: expected 'none', 'max_batch', 'search' or 'search_bits', got 'fully'"),
            ("candidates: {policy.x: [1]}", "13: candidates.policy.x: no such setting to try; known: gpu_batch_size"),
            (
                "candidates: {policy.gpu_batch_size: [1]}\ntune: max_batch",
                "13: candidates.policy.gpu_batch_size: no such setting to try",
            ),
            ("candidates: {ubatch: [1]}", "13: candidates.ubatch: expected options.NAME, policy.FIELD or env.NAME"),
            ("candidates: {env.PATH: [a]}", "13: candidates.env.PATH: a cell can set variables that begin with OMP_"),
            ("candidates: {env.OMP_X: [1]}", "13: candidates.env.OMP_X: values of environment variables are texts"),
            ("env: {PYTHONPATH: a}", "19: env.PYTHONPATH: a cell can set variables that begin with OMP_"),
            ("env: {OMP_A=B: a}", "16: env.OMP_A=B: a cell can set variables that begin with OMP_"),
            (
                "candidates: {env.OMP_\u00e9: [a]}",
                "13: candidates.env.OMP_\u00e9: a cell can set variables that begin with",
            ),
            ("env: {OMP_NUM_THREADS: 1}", "24: env.OMP_NUM_THREADS: expected text, got 1"),
            ("candidates: {policy.kv_bits: [5]}", "13: candidates.policy.kv_bits: 5 is no value of it"),
            ("candidates: {policy.threads: [0]}", "13: candidates.policy.threads: policy.threads is 0"),
            ("candidates: {options.a: []}", "13: candidates.options.a: the list is empty"),
            ("candidates: {options.a: 1}", "25: candidates.options.a: expected a list, got 1"),
            ("candidates: {options.a: [1]}\npolicy: search", "13: candidates.options.a: `policy: search` chooses"),
            ("matrix: [3]", "10: expected a mapping of cell keys, got 3"),
            ("matrix: [{sede: 3}]", "11: unknown key 'sede' in cell; did you mean 'seed'?"),
            ("matrix: {sede: [3]}", "10: unknown key 'sede' in cell; did you mean 'seed'?"),
            ("matrix: [{timeout_s: 3}]", "11: unknown key 'timeout_s' in cell; did you mean 'timeout'?"),
            ("matrix: [{engine: acelerate}]", "19: unknown engine 'acelerate'; did you mean 'accelerate'?"),
            ("matrix: [{engine: [fake]}]", "19: engine: expected text, got a list"),
            ("matrix: [{workload: {promt_len: 3}}]", "22: unknown key 'promt_len' in workload; did you mean"),
            ("matrix: [{workload: {num_requests: 0}}]", "36: workload.num_requests is 0"),
            ("matrix: [{workload: {num_requests: many}}]", "36: workload.num_requests: expected an integer or"),
            ("matrix: [{workload: [{}]}]", "21: workload: expected a mapping, got a list"),
            ("matrix: [{model: {id: ''}}]", "23: model.id is empty"),
            ("matrix: [{model: null}]", "18: model: expected a mapping, got null"),
            ("reproduces: nothing", "13: reproduces: expected 'flexgen_throughput_t4', 'lm_offload_a100' or"),
            ("repeats: x\nmatrix: {seed: [1, 2, 3]}", "10: repeats: expected an integer, got 'x'"),  # once
        ],
    )
    def test_position_what_and_remedy(self, error, text, expected):
        got = error(CELL + text)
        assert got.startswith(f"x.yaml:5:{expected}")
        assert len(got.splitlines()) == 1

    def test_missing_keys(self, error):
        assert error("name: s").splitlines() == [
            "x.yaml:1:1: missing key 'engine' in cell",
            "x.yaml:1:1: missing key 'model' in cell",
            "x.yaml:1:1: missing key 'workload' in cell",
        ]
        assert error("engine: fake\nmodel: {id: fake}\nworkload: {}") == "x.yaml:1:1: missing key 'name' in suite"
        assert error(HEAD + "matrix:\n- {engine: fake}\n- {seed: 1}") == "x.yaml:6:3: missing key 'engine' in cell"
        assert error(HEAD + "matrix: {seed: 1}") == "x.yaml:4:9: missing key 'engine' in cell"
        assert error("name: s\nengine: fake\nworkload: {}\nmodel: {dtype: auto}") == (
            "x.yaml:4:8: missing key 'id' in model"
        )

    def test_problems_of_several_cells_come_together(self, error):
        text = error(CELL + "matrix:\n- {repeats: x}\n- {seed: y, warmup: z}\n- {engine: none}")
        positions = {line.split(": ")[0] for line in text.splitlines()}
        assert positions == {"x.yaml:6:13", "x.yaml:7:10", "x.yaml:7:21", "x.yaml:8:12"}

    def test_contradictions_in_one_cell_come_together(self, error):
        image, latency = error(CELL + "image: mine\nlatency: 3s").splitlines()
        assert image.startswith("x.yaml:5:8: image goes with") and latency.startswith("x.yaml:6:10: latency goes with")

    def test_a_shape_that_dummy_weights_do_not_have_is_refused_with_the_nearest(self, error, load):
        text = "name: s\nworkload: {}\nengine: offload\nmodel: {id: facebook/opt-1.3, weights: dummy}\n"
        assert error(text).startswith("x.yaml:4:13: model.id: ") and "did you mean 'facebook/opt-1.3b'?" in error(text)
        assert "harness ls models" in error(text.replace("facebook/opt-1.3", "foo/bar"))
        load(text.replace("opt-1.3", "opt-1.3b"))
        load(text.replace("weights: dummy", "weights: auto"))
        load(text.replace("engine: offload", "engine: fake"))  # which has a model of its own

    def test_endless_problems_are_cut(self, error):
        lines = error(CELL + "matrix: " + json.dumps({"seed": [-n for n in range(1, 1000)]})).splitlines()
        assert len(lines) == 21
        assert lines[-1] == "... and 979 more"


class TestOverrides:
    def test_apply_to_every_cell(self, load):
        suite = load(
            CELL + "hardware: {limits: {threads: 2}}\nmatrix: [{name: a, repeats: 5}, {name: b}]",
            *("repeats=1", "policy.schedule=row", "limits.host_memory=2GiB", "workload.gen_len=4", "timeout=2min"),
            *("options.x.y=[1, a]", "compute_dtype=float32", "model.weights=dummy"),
        )
        for cell in suite.cells:
            assert (cell.repeats, cell.policy.schedule, cell.workload.gen_len, cell.timeout_s) == (1, "row", 4, 120)
            assert cell.limits == HardwareLimits(host_memory=2 << 30, threads=2)
            assert (cell.options, cell.policy.compute_dtype) == ({"x": {"y": [1, "a"]}}, "float32")
            assert (cell.model.id, cell.model.weights) == ("m", "dummy")

    def test_twins_are_refused_in_the_file_but_may_come_from_overrides(self, load):
        with pytest.raises(HarnessError, match="'a' and 'b' measure the same"):
            load(CELL + "matrix: [{name: a, repeats: 5}, {name: b}]")
        assert len(load(CELL + "matrix: [{name: a, seed: 1}, {name: b}]", "seed=2").cells) == 2

    @pytest.mark.parametrize(
        ("override", "tune", "policy"),
        [
            ("policy.gpu_batch_size=4", "max_batch", OffloadPolicy(gpu_batch_size=4, schedule="sweep")),
            ("tune=none", "none", OffloadPolicy(gpu_batch_size=2, schedule="sweep")),
            ("policy={gpu_batch_size: 4}", "none", OffloadPolicy(gpu_batch_size=4)),
            ("policy=max_batch", "max_batch", OffloadPolicy()),
            ("policy.max_batch=false", "none", OffloadPolicy(gpu_batch_size=2, schedule="sweep")),
            ("schedule=row", "max_batch", OffloadPolicy(gpu_batch_size=2)),
        ],
    )
    def test_policy(self, load, override, tune, policy):
        text = CELL + "policy: {max_batch: true, gpu_batch_size: 2, schedule: sweep}"
        (cell,) = load(text, override).cells
        assert (cell.tune, cell.policy) == (tune, policy)

    def test_the_later_wins_and_replaces_a_whole_section(self, load):
        assert load(CELL, "seed=1", "seed=2").cells[0].seed == 2
        assert load(CELL + "options: {a: 1}", "options={b: 2}").cells[0].options == {"b": 2}

    @pytest.mark.parametrize(
        ("override", "expected"),
        [
            ("repeat=1", "--set repeat=1: unknown key 'repeat' in cell; did you mean 'repeats'?"),
            (
                "policy.schedul=row",
                "--set policy.schedul=row: unknown key 'schedul' in policy; did you mean 'schedule'?",
            ),
            ("repeats=x", "--set repeats=x: repeats: expected an integer, got 'x'"),
            ("repeats.x=1", "--set repeats.x=1: repeats: expected an integer, got a mapping"),
            ("limits.host_memory=2G", "--set limits.host_memory=2G: expected a size"),
            ("engine=fak", "--set engine=fak: unknown engine 'fak'; did you mean 'fake'?"),
            ("seed=-1", "--set seed=-1: seed is -1"),
            ("policy=best", "--set policy=best: unknown policy 'best'"),
            ("repeats", "--set repeats: expected key=value"),
            ("=1", "--set =1: expected key=value"),
            ("policy..x=1", "--set policy..x=1: expected key=value"),
            ("repeats=", "--set repeats=: is empty"),
            ("seed=!!python/name:os.system x", "--set seed=!!python/name:os.system x: tag "),
            ("options=&a [*a]", "--set options=&a [*a]: *a contains itself"),
            ("options={a: [}", "--set options={a: [}: invalid YAML"),
            ("seed=2024-01-01", "--set seed=2024-01-01: '2024-01-01' reads as a timestamp"),
            ("options.a=\udc80", "--set 'options.a=\\udc80': control character"),
            ("options.a=\x1b[31m", "--set 'options.a=\\x1b[31m': control character"),
            (f"{'a.' * 500}b=1", "--set 'a.a.a"),
            (f"{'x' * 5000}=1", "--set 'xxx"),
        ],
    )
    def test_mistakes_name_the_option(self, error, override, expected):
        text = error(CELL, override)
        assert text.startswith(expected)
        assert len(text.splitlines()) == 1
        assert len(text) < 1000

    def test_missing_key_is_blamed_on_the_file(self, error):
        assert error(HEAD, "repeats=1") == "x.yaml:1:1: missing key 'engine' in cell"


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


class TestUnits:
    @given(st.integers(0, 1023), st.sampled_from(["B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]))
    def test_sizes_round_trip(self, number, unit):
        base = 1024 if "i" in unit else 1000
        size = number * base ** ("BKMGT".index(unit[0].upper()) if unit != "B" else 0)
        assert parse_size(f"{number}{unit}") == parse_size(f"{number} {unit.lower()}") == size
        assert parse_size(f"{size}B") == size

    def test_fractions_are_exact_up_to_the_largest_size(self):
        assert parse_size("1.5GiB") == 3 << 29
        assert parse_size("1.1GB") == 1_100_000_000
        assert parse_size("1024TiB") == 1 << 50
        with pytest.raises(HarnessError, match="more than 1 PiB"):
            parse_size("1024.1TiB")

    @pytest.mark.parametrize(
        "text",
        ["", "16", "16G", "-1GiB", "1e3GB", "GiB", "1 GiB ", "1GiB\n", "\u0661GiB", "0x1B", "1PiB", "inf B", "9" * 99],
    )
    def test_wrong_sizes(self, text):
        with pytest.raises(HarnessError, match="expected a size such as"):
            parse_size(text)

    @pytest.mark.parametrize(
        ("text", "seconds"),
        [("90s", 90), ("20min", 1200), ("1h", 3600), ("1.5 h", 5400), ("250ms", 0.25), ("2d", 172800)],
    )
    def test_durations(self, text, seconds):
        assert parse_duration(text) == seconds

    @pytest.mark.parametrize("text", ["", "90", "1m", "-1s", "1h30min", "soon", "1:30"])
    def test_wrong_durations(self, text):
        with pytest.raises(HarnessError, match="expected a duration such as"):
            parse_duration(text)


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


FIVE = """
name: five
descripton: x
model: {id: facebook/opt-125m, weights: dummy}
workload: {prompt_len: many, gen_len: 0}
hardware: {limits: {host_memory: 4GBB, device_memory: 3XB}}
matrix:
  - {engine: offlod, schedule: row}
  - {engine: offload, policy: {gpu_batch_sise: 4, weight_bits: 5}}
  - {enginee: offload, timeout: 5 parsecs}
"""


def test_all_mistakes_of_a_file_are_reported_at_once_in_the_order_of_the_file(tmp_path):
    """Of every stage: keys of the suite, units, types, ranges, names; and no key is missing that is misspelt."""
    path = tmp_path / "five.yaml"
    path.write_text(FIVE)
    with pytest.raises(HarnessErrors) as refused:
        load_suite(path)
    lines = [line.removeprefix(f"{path}:") for line in str(refused.value).splitlines()]
    expected = ["3:1: unknown key 'descripton'", "5:24: workload.prompt_len: expected", "5:39: workload.gen_len is 0",
                "6:34: expected a size", "6:55: expected a size", "8:14: unknown engine 'offlod'",
                "9:32: unknown key 'gpu_batch_sise'", "9:64: policy.weight_bits", "10:6: unknown key 'enginee'",
                "10:33: expected a duration"]  # fmt: skip
    assert [line[: len(words)] for line, words in zip(lines, expected, strict=True)] == expected


@pytest.mark.parametrize(
    ("key", "where", "follows"),
    [
        ("kind: taks, task: wikitext2", "workload.kind", "workload.task"),
        ("prompt_len: x", "workload.prompt_len", "gen_len"),
    ],
)
def test_a_value_that_is_left_out_makes_no_second_mistake(tmp_path, key, where, follows):
    path = tmp_path / "one.yaml"
    path.write_text(f"name: one\nmodel: {{id: fake}}\nworkload: {{{key}}}\nmatrix:\n  - {{engine: fake}}\n")
    with pytest.raises(HarnessErrors, match=where) as refused:
        load_suite(path)
    assert len(str(refused.value).splitlines()) == 1
    assert follows not in str(refused.value)


@pytest.mark.parametrize(
    ("key", "meant"),
    [("mem", "limits.host_memory"), ("memory", "limits.host_memory"), ("batch_size", "policy.gpu_batch_size"),
     ("prompt_len", "workload.prompt_len"), ("weight", "policy.weights"), ("repeat", "repeats")],
)  # fmt: skip
def test_a_key_that_stands_in_a_section_is_found_there(load, key, meant):
    with pytest.raises(HarnessError, match=rf"did you mean '{meant}'\?"):
        load(CELL, f"{key}=1")


def test_a_key_that_stands_nowhere_gets_the_list(load):
    with pytest.raises(HarnessError, match="known: name, limits"):
        load(CELL, "zzz=1")
