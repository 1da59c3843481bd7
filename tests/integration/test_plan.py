"""`harness plan`, `calibrate` and `check-model` as a user calls them: the documented object and exit codes."""

import json
import shlex
import subprocess
import sys

import pytest
import yaml

from engines.models.shapes import config_kwargs
from engines.planning.planned_job import SYSTEM_BYTES
from harness import hardware
from harness.api import OffloadPolicy, to_json
from harness.suite.config import load_suite

JOB = ("--prompt-len", "512", "--gen-len", "32")
T4 = (*JOB, "--hardware", "t4_gcp")
OPT_30B = ("facebook/opt-30b", *T4)
CPU = (*JOB, "--hardware", "laptop_cpu")
FRACTIONS = ("wg", "wc", "wd", "cg", "cc", "cd", "hg", "hc", "hd")


def test_a_plan_has_what_the_contract_names_and_can_be_given_back(cli):
    plan = json.loads(cli("plan", *OPT_30B, "--json").stdout)
    assert {"policy", "predicted", "rejected", "hardware", "model"} <= set(plan)
    assert {"gpu_batch_size", "num_gpu_batches", "schedule", *FRACTIONS, "weight_bits", "kv_bits", "cpu_attention",
            "prefill_chunk", "threads"} <= set(plan["policy"])  # fmt: skip
    assert {"throughput_tok_s", "prefill_s", "decode_s", "block_latency_s", "bottleneck", "fraction_of_roofline",
            "peak_bytes"} <= set(plan["predicted"])  # fmt: skip
    assert set(plan["predicted"]["peak_bytes"]) == {"device", "host", "disk"}
    for kind in "wch":
        assert sum(plan["policy"][kind + place] for place in "gcd") == pytest.approx(1)
    assert all(other["reason"] for other in plan["rejected"])

    again = cli("plan", *OPT_30B, "--policy", json.dumps(plan["policy"]), "--json")
    assert json.loads(again.stdout)["predicted"] == plan["predicted"]


TINY = ("tiny/llama", "--prompt-len", "16", "--gen-len", "8", "--hardware", "laptop_cpu", "--policy",
        '{"gpu_batch_size": 4, "schedule": "sweep"}', "--memory", "1GiB")  # fmt: skip


def test_a_plan_prints_the_suite_that_runs_it(cli):
    """The suite validates, and its cell is the plan's: predicted again, it is as fast."""
    path = cli.folder / "plan.yaml"
    path.write_text(cli("plan", *TINY, "--yaml").stdout)
    cli("validate", str(path))
    plan = json.loads(cli("plan", *TINY, "--json").stdout)
    assert yaml.safe_load(path.read_text()) == plan["suite"]
    (cell,) = load_suite(path).cells
    assert (cell.engine, cell.model.weights, cell.limits.host_memory) == ("offload", "dummy", 1 << 30)
    cli.run(path, "--simulate", "--hardware", "laptop_cpu", "--no-report")
    (record,) = cli.records()
    rate = record.metrics["generation_throughput_tok_s"]
    assert rate == pytest.approx(plan["predicted"]["throughput_tok_s"], rel=0.02)


def test_a_searched_plan_leaves_to_our_engine_what_it_measures(cli):
    plan = json.loads(cli("plan", *OPT_30B, "--schedule", "sweep", "--device-memory", "12GiB", "--json").stdout)
    (cell,) = plan["suite"]["matrix"]
    assert "weights" not in cell["policy"]
    assert sum(plan["policy"][letter] for letter in ("wg", "wc", "wd")) == pytest.approx(1)
    assert plan["suite"]["hardware"]["limits"] == {"device_memory": 12 << 30}
    assert plan["predicted"]["peak_bytes"]["device"] <= 12 << 30


def test_a_configuration_alone_is_planned_and_has_nothing_to_run(cli):
    path = cli.folder / "config.json"
    path.write_text(json.dumps(config_kwargs("tiny/llama")))
    job = ("plan", str(path), *TINY[1:])
    assert "a configuration has no weights" in cli(*job).stdout
    suite = cli.folder / "plan.yaml"
    suite.write_text(cli(*job, "--yaml").stdout)
    assert suite.read_text().startswith("# a configuration has no weights")
    cli.run(suite, "--simulate", "--hardware", "laptop_cpu", "--no-report")
    assert [record.status for record in cli.records()] == ["ok"]


def test_a_plan_ends_with_commands_that_run_as_they_stand(cli):
    lines = [shlex.split(line) for line in cli("plan", *TINY).stdout.splitlines() if line.startswith("  harness ")]
    assert lines[0][:2] == ["harness", "plan"]
    assert sorted(lines[0][2:]) == sorted([*TINY, "--yaml", ">", "plan.yaml"])
    assert lines[1] == ["harness", "run", "plan.yaml"]
    source = cli.folder / "prompts.jsonl"
    source.write_text('{"prompt": "a"}\n')
    words = [str(source) if word == source.name else word for word in lines[2][1:]]
    settings = {words[i + 1] for i, word in enumerate(words) if word == "--set"}
    assert settings == {"policy.schedule=sweep", "policy.gpu_batch_size=4", "policy.num_gpu_batches=1"}
    # a shipped shape has no weights, which is said after all settings are taken
    assert "tiny/llama" in cli(*words, "--dry-run", code=2).stderr


def test_a_plan_of_several_hosts_says_which_takes_longest_and_can_be_run(cli):
    job = ("facebook/opt-1.3b", "--prompt-len", "64", "--gen-len", "8", "--hardware", "laptop_cpu", "--stages", "2")
    job = (*job, "--policy", '{"schedule": "row", "gpu_batch_size": 8}')
    told = cli("plan", *job).stdout
    assert "in 2 stages, a host each" in told
    assert "takes longest, limited by products; groups under way: 2; decoding alone " in told
    assert "harness run plan.yaml" in told
    made = json.loads(cli("plan", *job, "--json").stdout)
    assert made["suite"]["matrix"][0]["policy"]["pipeline"] == 2
    assert [stage["stage"] for stage in made["pipeline"]["stages"]] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("facebook/opt-30b", *JOB, "--hardware", "v100x4", "--stages", "4", "--yaml"), "nothing here runs this plan"),
        ((*TINY, "--yaml", "--json"), "leave out --json"),
        ((*TINY[:-1], "16GiB"), "larger machine, give its profile"),
        ((*TINY[:-1], "many"), "--memory: expected a size"),
        ((*TINY, "--device-memory", "1GiB"), "laptop_cpu has no device"),
        ((*TINY, "--disk", "0B"), "--disk 0B"),
    ],
)
def test_options_of_a_plan_that_contradict_it(cli, arguments, words):
    assert words in cli("plan", *arguments, code=2).stderr


def test_less_memory_puts_weights_on_the_disk_and_less_disk_leaves_no_place(cli):
    job = ("facebook/opt-1.3b", "--prompt-len", "64", "--gen-len", "8", "--hardware", "laptop_cpu", "--schedule", "row")
    whole, part = (json.loads(cli("plan", *job, *more, "--json").stdout) for more in ((), ("--memory", "2GiB")))
    assert whole["predicted"]["peak_bytes"]["disk"] == 0 < part["predicted"]["peak_bytes"]["disk"]
    assert part["predicted"]["peak_bytes"]["host"] <= 2 << 30
    cli("plan", *job, "--memory", "2GiB", "--disk", "100MiB", code=4)


def test_a_prediction_says_how_far_it_may_be_off_and_on_what_that_stands(cli):
    plan = json.loads(cli("plan", *TINY, "--json").stdout)
    error, rate = plan["error"], plan["predicted"]["throughput_tok_s"]
    assert error["low_tok_s"] < rate < error["high_tok_s"]
    assert "launches" in error["stands_on"]
    unknown = json.loads(cli("plan", "facebook/opt-30b", *JOB, "--hardware", "rtx4090", "--json").stdout)["error"]
    assert (unknown["count"], "low_tok_s" in unknown) == (0, False)


def test_a_plan_for_people_says_what_limits_it(cli):
    done = cli("plan", "facebook/opt-175b", *T4, "--quantize", "4")
    assert "limited by the device" in done.stdout
    assert "token/s" in done.stdout
    assert "rejected:" in done.stdout


HOST_ATTENTION = {
    "gpu_batch_size": 64, "num_gpu_batches": 28, "schedule": "zigzag", "weights": [0.55, 0.45, 0], "cache": [0, 1, 0],
    "activations": [0, 1, 0], "cpu_attention": True,
}  # fmt: skip


def test_a_plan_divides_the_hosts_threads_and_says_what_that_wins(cli):
    """As LM-Offload does on its machine, against the default that FlexGen's code runs with."""
    job = ("facebook/opt-30b", "--prompt-len", "64", "--gen-len", "8", "--hardware", "a100_40g",
           "--engine", "flexgen_ref", "--policy", json.dumps(HOST_ATTENTION))  # fmt: skip
    plan = json.loads(cli("plan", *job, "--json").stdout)
    threads = plan["threads"]
    assert (threads["inter_op"], threads["intra_op"]) == (12, 16)
    assert threads["default"] == {"inter_op": 112, "intra_op": 56}
    assert threads["default_throughput_tok_s"] == plan["predicted"]["throughput_tok_s"] < threads["throughput_tok_s"]
    assert plan["workload"]["bound_by"] == "host"
    said = cli("plan", *job).stdout
    assert "7 x 16 attend (inter-op 12, intra-op 16)" in said
    assert "host attention-bound" in said


def test_a_plan_without_host_attention_gives_its_threads_to_copies(cli):
    said = cli("plan", *OPT_30B, "--schedule", "sweep").stdout
    assert "host threads:" in said
    assert "for copies" in said
    assert json.loads(cli("plan", "facebook/opt-1.3b", *CPU, "--json").stdout)["threads"] is None


def test_no_torch_is_loaded_for_a_plan():
    code = (
        "import sys\nfrom harness.cli.main import cli\n"
        "for machine in ('t4_gcp', 'laptop_cpu'):\n"
        "    cli.main(['plan', 'facebook/opt-125m', '--prompt-len', '32', '--gen-len', '8', '--hardware', machine,\n"
        "              '--schedule', 'row'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_infeasible_plan_names_the_bytes_and_a_remedy_that_can_be_run(cli):
    whole = dict.fromkeys(FRACTIONS, 0) | {"wg": 1, "cg": 1, "hg": 1, "gpu_batch_size": 8}
    done = cli("plan", *OPT_30B, "--json", "--policy", json.dumps(whole), code=4)
    found = json.loads(done.stdout)
    assert found["infeasible"]["device"] > 40e9
    remedy = found["reason"].split("--policy '")[1].rstrip("'")
    cli("plan", *OPT_30B, "--json", "--policy", remedy)


def test_a_cpu_has_no_device_to_speak_of(cli):
    assert "device" not in cli("plan", "facebook/opt-1.3b", *CPU).stdout


def test_hardware_is_not_ignored_in_a_real_run(cli):
    assert "--simulate" in cli("run", "quickstart", "--hardware", "t4_gcp", code=2).stderr


RESIDENT = '{"gpu_batch_size": 8, "weights": [1, 0, 0], "cache": [1, 0, 0], "activations": [1, 0, 0]}'


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([*OPT_30B, "--policy", RESIDENT], 4, "device memory lacks"),
        ([*OPT_30B, "--latency", "0.01"], 4, "no policy ends a block within 0.01 s"),
        (["facebook/opt-175b", *JOB, "--hardware", "rtx3090"], 0, ""),
        (["facebook/opt-30", *T4], 2, "did you mean 'facebook/opt-30b'?"),
        (["facebook/opt-30b", "--prompt-len", "2040", "--gen-len", "32", "--hardware", "t4_gcp"], 2, "2048"),
        (["facebook/opt-30b", *JOB, "--hardware", "t4"], 2, "did you mean 't4_gcp'?"),
        (["facebook/opt-30b", *JOB, "--hardware", "here.yaml"], 2, "no such file"),
        (["facebook/opt-30b", *JOB], 2, "run `harness calibrate`"),
        ([*OPT_30B, "--quantize", "5"], 2, "--quantize 5"),
        ([*OPT_30B, "--engine", "vllm"], 2, "no plans are made for engine 'vllm'"),
        ([*OPT_30B, "--engine", "accelerate", "--schedule", "sweep"], 2, "it has row"),
        ([*OPT_30B, "--policy", "[1]"], 2, "expected a JSON object"),
        ([*OPT_30B, "--policy", '{"wg": 1}'], 2, "wg without wc, wd"),
        ([*OPT_30B, "--policy", '{"gpu_batch": 1}'], 2, "unknown key 'gpu_batch'"),
        ([*OPT_30B, "--policy", '{"wg": 0.5, "wc": 0.2, "wd": 0.2}'], 2, "sum to 1"),
        ([*OPT_30B, "--policy", '{"gpu_batch_size": 0}'], 2, "at least 1"),
        ([*OPT_30B, "--policy", '{"num_gpu_batches": 2}'], 2, "schedule row has one batch at a time"),
        ([*OPT_30B, "--policy", '{"value_sparsity": 0.1}'], 2, "no performance model"),
        ([*OPT_30B, "--stages", "2", "--policy", '{"schedule": "sweep"}'], 2, "take schedule row"),
        (["facebook/opt-30b", *JOB, "--hardware", "v100x4", "--stages", "8"], 2, "too few for 8 stages"),
        ([*OPT_30B, "--latency", "nan"], 2, "--latency is not a number"),
        ([*OPT_30B, "--policy", '{"weights": [0, 0, 1], "wg": 0, "wc": 0, "wd": 1}'], 2, "both weights and"),
        ([*OPT_30B, "--policy", '{"weights": [0, 1e-5, 0.99999]}'], 0, ""),
        (["facebook/opt-1.3b", *CPU, "--policy", '{"compute_dtype": "bfloat16"}'], 2, "has rates in float32"),
        (["facebook/opt-175b", *JOB, "--hardware", "rtx4090", "--latency", "1"], 4, "s is the least"),
    ],
)
def test_plans_that_cannot_be_made_get_one_line(cli, arguments, code, words):
    done = cli("plan", *arguments, code=code)
    assert words in done.stderr
    told = [line for line in done.stderr.splitlines() if not line.startswith("searching policies")]  # where it is slow
    assert len(told) <= 1


@pytest.mark.slow
def test_the_table_of_errors(cli):
    """As text; tests/golden/frozen.json has it as JSON."""
    table = cli("check-model").stdout
    assert "cells not fitted" in table and all(machine in table for machine in ("t4_gcp", "a100_40g"))


@pytest.mark.parametrize(
    ("suite", "machine"), [("opt30b_t4", "t4_gcp"), pytest.param("lm_offload_a100", "a100_40g", marks=pytest.mark.slow)]
)
def test_a_suite_is_predicted_for_a_machine_that_is_not_here(cli, suite, machine):
    cli.run(suite, "--simulate", "--hardware", machine, "--shard", "1/6")
    records = cli.records()
    assert all(record.simulated for record in records)
    assert {record.status for record in records} == {"ok"}
    rates = {(r.spec.name, r.fingerprint): r.metrics["generation_throughput_tok_s"] for r in records}
    assert len(rates) == len(records)
    assert all(rate > 0 for rate in rates.values())
    assert "simulated" in (cli.out / "report.html").read_text()
    assert "predicted for" in json.dumps(to_json(records[0]))


def test_cells_without_a_performance_model_are_skipped_with_the_reason(cli):
    done = cli.run(cli.suite(), "--simulate", "--hardware", "t4_gcp")
    assert "skipped: a: no plans are made for engine 'fake'" in done.stderr


@pytest.mark.slow
def test_a_calibrated_machine_is_planned_for(cli):
    done = cli("calibrate", "--quick")
    assert "disk.read" in done.stdout
    path = cli.folder / "cache" / "hardware-2.yaml"
    found = yaml.safe_load(path.read_text())
    assert all(low <= high for low, high in found["spread"].values())
    assert found["host"]["attention_by_threads"].keys() == found["host"]["by_threads"].keys()

    plan = cli("plan", "facebook/opt-1.3b", "--prompt-len", "32", "--gen-len", "16", "--json")
    assert json.loads(plan.stdout)["hardware"] == "local"

    path.write_text(path.read_text().replace(found["host_id"], "f" * 16))
    elsewhere = cli("plan", "facebook/opt-1.3b", "--prompt-len", "32", "--gen-len", "16", code=2)
    assert "measured on another machine" in elsewhere.stderr


def test_a_profile_that_cannot_be_written_is_refused_before_anything_is_measured(cli):
    done = cli("calibrate", "--quick", "--out", str(cli.folder), code=2)
    assert "cannot be written" in done.stderr
    assert "measuring" not in done.stderr


@pytest.mark.parametrize(
    ("engine", "honoured"),
    [("accelerate", ()), ("deepspeed_zero", ("weight_bits", "group_size")), ("flexgen_ref", ("weights", "cache"))],
)
def test_a_plan_for_a_rival_is_one_that_it_runs(cli, engine, honoured):
    """What holds all weights in one tier is told no fractions, which it would refuse."""
    plan = json.loads(cli("plan", *OPT_30B, "--engine", engine, "--json").stdout)
    (cell,) = plan["suite"]["matrix"]
    if engine == "flexgen_ref":
        assert {"weights", "cache"} <= set(cell["policy"])
    else:
        OffloadPolicy(**cell["policy"]).require_defaults_except(engine, "gpu_batch_size", "compute_dtype", *honoured)


def test_a_plan_for_a_host_runs_within_the_memory_that_it_was_made_for(cli):
    """Without a limit the engine would hold all weights, in another dtype."""
    plan = json.loads(cli("plan", "facebook/opt-1.3b", *CPU, "--json").stdout)
    budget = int(hardware.load("laptop_cpu").host.memory - SYSTEM_BYTES)
    assert plan["suite"]["hardware"]["limits"]["host_memory"] == budget
    assert plan["suite"]["model"] == {"id": "facebook/opt-1.3b", "weights": "dummy", "dtype": "float16"}


def test_a_pipeline_of_machines_costs_as_many(cli):
    one, four = (
        json.loads(cli("plan", *OPT_30B, "--schedule", "zigzag", "--stages", str(n), "--json").stdout)["predicted"]
        for n in (1, 4)
    )
    per_dollar = four["tokens_per_dollar"] / one["tokens_per_dollar"]
    assert per_dollar == pytest.approx(four["throughput_tok_s"] / one["throughput_tok_s"] / 4)


def test_three_bits_can_be_planned(cli):
    plan = json.loads(cli("plan", "facebook/opt-1.3b", *CPU, "--quantize", "3", "--json").stdout)
    assert (plan["policy"]["weight_bits"], plan["policy"]["kv_bits"]) == (3, 3)
