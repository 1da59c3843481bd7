"""Wrong suites and overrides: each mistake with its position, what is wrong and what to do."""

import json

import pytest

from harness.api import HardwareLimits, HarnessError, HarnessErrors, OffloadPolicy
from harness.suite.config import load_suite
from tests.unit.suite_files.texts import CELL, HEAD


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
