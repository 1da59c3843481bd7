"""Real engines through the real command line on a small random model: same tokens, real limits, real damage."""

import json
import shutil

import pytest
import torch
import transformers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernels")]
GEN = {"workload": "{kind: synthetic, prompt_len: 12, gen_len: 5, num_requests: 4}", "timeout": "2min"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """An OPT with a 12 MiB embedding: small, but larger than the smallest budgets below."""
    folder = tmp_path_factory.mktemp("models") / "small-opt"
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=12_288, hidden_size=256, word_embed_proj_dim=256, ffn_dim=512, num_hidden_layers=3,
        num_attention_heads=4, max_position_embeddings=128, init_std=0.3,
    )  # fmt: skip
    transformers.OPTForCausalLM(config).save_pretrained(folder, max_shard_size="6MB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def run(cli, model, matrix, *more, **options):
    return cli.run(cli.suite(matrix, model=f"{{id: {json.dumps(str(model))}}}", repeats=1, **GEN), *more, **options)


def test_resident_and_offloaded_engines_give_the_same_tokens(cli, model):
    run(cli, model, """
  - {name: resident, engine: transformers, policy: {gpu_batch_size: 3}, reference: true}
  - name: disk
    engine: accelerate
    policy: {gpu_batch_size: 2}
    options: {disk_only: true}
    limits: {host_memory: 64MiB}
  - {name: auto, engine: accelerate, policy: {gpu_batch_size: 4}, limits: {host_memory: 96MiB}}
""")  # fmt: skip
    found = cli.by_name()
    digests = {name: [t.digest for t in record.requests] for name, record in found.items()}
    assert digests["disk"] == digests["auto"] == digests["resident"]
    assert len(set(digests["resident"])) == 4, "requests differ, so equal digests mean something"
    assert found["disk"].load.weights_by_tier[1] == 0
    assert found["disk"].memory.peak_bytes <= found["disk"].memory.limit_bytes
    reads = [m.samples[0] for m in found["disk"].measurements if (m.name, m.phase) == ("read_bytes", "generate")]
    if found["disk"].memory.counts_page_cache:
        assert reads[0] > 0
    assert "4 of 4" in (cli.out / "report.md").read_text()


def test_the_offload_engine_gives_the_same_tokens_on_every_schedule_within_its_limit(cli, model):
    run(cli, model, """
  - {name: resident, engine: transformers, policy: {gpu_batch_size: 4}, reference: true}
  - {name: row, engine: offload, schedule: row, policy: {gpu_batch_size: 2}, limits: {host_memory: 104MiB}}
  - name: zigzag
    engine: offload
    schedule: zigzag
    policy: {gpu_batch_size: 1, num_gpu_batches: 4}
    limits: {host_memory: 104MiB}
  - {name: sweep, engine: offload, schedule: sweep, policy: {gpu_batch_size: 3}, limits: {host_memory: 104MiB}}
  - {name: no-limit, engine: offload, schedule: sweep, policy: {gpu_batch_size: 4}}
  - {name: too-small, engine: offload, schedule: sweep, limits: {host_memory: 60MiB}, expect: infeasible}
""")  # fmt: skip
    found = cli.by_name()
    digests = {name: [t.digest for t in record.requests] for name, record in found.items() if record.status == "ok"}
    assert len(digests) == 5
    assert all(d == digests["resident"] for d in digests.values())
    for name in ("row", "zigzag", "sweep"):
        record = found[name]
        assert record.memory.peak_bytes <= record.memory.limit_bytes
        assert record.load.policy.schedule == name
        assert record.metrics["passes"] > 0
        assert {e.cat for e in record.trace} >= {"compute"}
    assert "the budget is 60 MiB" in found["too-small"].reason
    assert "Utilisation by resource over one pass" in (cli.out / "report.html").read_text()


def test_a_budget_below_one_layer_is_infeasible_with_the_numbers(cli, model):
    run(cli, model, """
  - {name: offload, engine: accelerate, limits: {host_memory: 10MiB}, expect: infeasible}
  - {name: resident, engine: transformers, limits: {host_memory: 10MiB}, expect: infeasible}
""")  # fmt: skip
    for record in cli.records():
        assert "MiB" in record.reason
        assert "the budget is 10.0 MiB" in record.reason


@pytest.mark.parametrize("damage", ["truncated", "missing", "no config", "pickle"])
def test_a_damaged_checkpoint_is_one_line_that_names_the_file(cli, model, damage):
    broken = cli.folder / "broken"
    shutil.copytree(model, broken)
    shard = sorted(broken.glob("*.safetensors"))[1]
    named = shard.name
    if damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-1000])
    elif damage == "missing":
        shard.unlink()
    elif damage == "no config":
        (broken / "config.json").unlink()
        named = "config.json"
    else:
        for file in broken.glob("*.safetensors*"):
            file.unlink()
        (broken / "pytorch_model.bin").write_bytes(b"x")
        named = "pickle"
    run(cli, broken, "  - {name: a, engine: transformers}", code=1)
    record = cli.records()[0]
    assert record.status == "error"
    assert named in record.reason
    assert "\n" not in record.reason


def test_unknown_models_are_one_line(cli):
    suite = cli.suite("  - {engine: transformers}", model="{id: no-such-folder/of/a/model}", repeats=1)
    cli.run(suite, code=1)
    assert "no-such-folder" in cli.records()[0].reason


def test_a_context_beyond_the_models_is_refused(cli, model):
    run(cli, model, "  - {name: a, engine: transformers, workload: {prompt_len: 1000}}", code=1)
    assert "context of 128" in cli.records()[0].reason


def test_a_prediction_stands_beside_each_measurement_and_is_explained(cli, model):
    run(cli, model, """
  - {name: row, engine: offload, schedule: row, policy: {gpu_batch_size: 2}}
  - {name: resident, engine: transformers, policy: {gpu_batch_size: 4}}
""", "--set", "warmup=0")  # fmt: skip
    assert cli.by_name()["row"].predicted is None  # the suite measures no machine

    path = cli.folder / "tiny.yaml"
    path.write_text(path.read_text().replace("machine_probe: false", "machine_probe: true"))
    cli.run(path, "--fresh")
    found = cli.by_name()
    assert found["resident"].predicted is None
    predicted = found["row"].predicted
    assert predicted.hardware == "local"
    assert predicted.metrics["passes"] == found["row"].metrics["passes"]
    assert "Predicted against measured" in (cli.out / "report.html").read_text()

    told = cli("plan", "--explain", cli.out)
    assert "row #0" in told.stdout
    assert "median error" in told.stdout


@pytest.mark.usefixtures("link_programs")
def test_ranks_over_a_slow_link_answer_as_one_process(cli, model):
    """Each token takes the way from rank 0 to rank 1 and back."""
    run(cli, model, """
  - {name: alone, engine: offload, reference: true}
  - name: linked
    engine: offload
    policy: {pipeline: 2}
    limits: {link_rate: 100Mbit, link_delay: 30ms}
""")  # fmt: skip
    found = cli.by_name()
    assert [t.digest for t in found["linked"].requests] == [t.digest for t in found["alone"].requests]
    delay, rate = (m for m in found["linked"].measurements if m.name.startswith("link_"))
    assert min(delay.samples) >= 0.03 and 0 < rate.samples[0] < 110e6
    assert found["linked"].metrics["tpot_p50_s"] >= 0.06
    assert "link_delay_s" not in {m.name for m in found["alone"].measurements}
    assert "### Slow links" in (cli.out / "report.md").read_text()
