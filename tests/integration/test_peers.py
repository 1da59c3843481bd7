"""The engines we are compared with, each in an environment of its own, beside transformers on the same tiny models."""

import shutil

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from harness.common.host_cpu import cpu_flags

pytestmark = [pytest.mark.slow, pytest.mark.peers]

EXACT = "  - {name: exact, engine: transformers, launcher: process, policy: {gpu_batch_size: 3}}"
SHORT = "{kind: synthetic, prompt_len: 12, gen_len: 6, num_requests: 5}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("environments")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def environments(folder, request):
    """Built once for all tests of an engine; those of the engine before are removed, for they are gigabytes."""
    own = folder / request.node.name.split("_")[1]
    for other in folder.iterdir():
        if other != own:
            shutil.rmtree(other)
    own.mkdir(exist_ok=True)
    return own


def answers(cli, environments, model: str, matrix: str, workload: str = SHORT, dtype: str = "float32"):
    """How many tokens each request got and a digest of them, by cell; and the records."""
    (cli.folder / "cache").mkdir(exist_ok=True)
    (cli.folder / "cache" / "environments").symlink_to(environments)
    model = f'{{id: "{model}", weights: dummy, dtype: {dtype}}}'
    suite = cli.suite(EXACT + matrix, model=model, workload=workload, repeats=1, warmup=1, timeout="900s",
                      launcher="venv", seed=3)  # fmt: skip
    cli.run(suite)
    found = cli.by_name()
    assert {n: (r.status, r.reason) for n, r in found.items() if r.status != r.spec.expect} == {}
    return {n: [(q.id, q.generated_tokens, q.digest) for q in sorted(r.requests, key=lambda q: q.id)]
            for n, r in found.items()}, found  # fmt: skip


def test_deepspeed_reads_parameters_from_disk_and_answers_as_transformers_does(cli, environments):
    found, records = answers(cli, environments, "tiny/opt", """
  - {name: disk, engine: deepspeed_zero, options: {parameters: disk}, policy: {gpu_batch_size: 3}}
  - name: many
    engine: deepspeed_zero
    options: {parameters: disk, buffers: 5, io_threads: 2, queue_depth: 32}
    policy: {gpu_batch_size: 3}
  - {name: host, engine: deepspeed_zero, options: {parameters: host}, policy: {gpu_batch_size: 3}}
  - {name: llama, engine: deepspeed_zero, model: {id: tiny/llama}, policy: {gpu_batch_size: 3}}
  - {name: half, engine: deepspeed_zero, policy: {compute_dtype: float16}, expect: unsupported}
  - {name: of-float32, engine: deepspeed_zero, policy: {weight_bits: 4}, expect: unsupported}
  - {name: small, engine: deepspeed_zero, options: {parameters: disk}, limits: {host_memory: 2MiB}, expect: infeasible}
""")  # fmt: skip
    assert found["disk"] == found["exact"] == found["host"] == found["many"]
    assert "through 5 buffers" in records["many"].load.notes[0]
    assert "intra_op_parallelism 2" in records["many"].load.notes[0]
    assert records["disk"].load.weights_by_tier[2] > 0
    assert records["host"].load.weights_by_tier[1] > 0
    assert records["disk"].provenance["packages"]["deepspeed"] == "0.19.8"
    assert records["disk"].provenance["environment"].startswith("deepspeed-")


def test_flexgen_s_own_code_runs_the_checkpoint_s_weights_through_the_shim(cli, environments):
    found, records = answers(cli, environments, "tiny/opt", """
  - {name: ram, engine: flexgen_ref, policy: {gpu_batch_size: 3, weights: [0, 1, 0]}}
  - name: disk
    engine: flexgen_ref
    policy: {schedule: zigzag, gpu_batch_size: 2, num_gpu_batches: 2, weights: [0, 0, 1]}
  - {name: halves, engine: flexgen_ref, policy: {gpu_batch_size: 3, weights: [0, 0.5, 0.5]}}
  - {name: four-bits, engine: flexgen_ref, policy: {weight_bits: 4}, expect: unsupported}
  - {name: fitted, engine: flexgen_ref, policy: {max_batch: true}, limits: {host_memory: 96MiB}}
  - {name: sweep, engine: flexgen_ref, policy: {schedule: sweep}, expect: unsupported}
  - {name: llama, engine: flexgen_ref, model: {id: tiny/llama}, expect: unsupported}
""")  # fmt: skip
    assert found["ram"] == found["disk"]
    # float16 against float32 on random weights: near ties may fall otherwise, but not most of them
    agreeing = sum(a == b for a, b in zip(found["ram"], found["exact"], strict=True))
    assert agreeing >= 3, found
    assert "shim" in records["ram"].load.notes[0]
    assert records["disk"].load.weights_by_tier[2] > 0
    assert found["halves"] == found["ram"]
    assert min(records["halves"].load.weights_by_tier[1:]) > 0
    assert len({t.gpu_batch_size for t in records["fitted"].tuning}) > 1


def test_llama_cpp_answers_as_transformers_does_with_the_file_that_is_written_for_it(cli, environments):
    found, records = answers(cli, environments, "tiny/llama", """
  - {name: mapped, engine: llama_cpp, policy: {gpu_batch_size: 3}}
  - {name: read, engine: llama_cpp, options: {mmap: false}, policy: {gpu_batch_size: 1}}
  - name: tried
    engine: llama_cpp
    policy: {gpu_batch_size: 3}
    candidates: {options.ubatch: [2048], options.flash_attention: [false], options.threads: [1]}
  - {name: brain, engine: llama_cpp, options: {gguf: BF16}, policy: {gpu_batch_size: 3}}
  - {name: eight-bits, engine: llama_cpp, policy: {gpu_batch_size: 3, kv_bits: 8}}
  - {name: q8, engine: llama_cpp, policy: {gpu_batch_size: 3, weight_bits: 8, group_size: 32}}
  - {name: q4, engine: llama_cpp, policy: {gpu_batch_size: 3, weight_bits: 4, group_size: 32}}
  - {name: group, engine: llama_cpp, policy: {weight_bits: 4}, expect: unsupported}
  - {name: opt, engine: llama_cpp, model: {id: tiny/opt}, expect: unsupported}
  - {name: gpu, engine: llama_cpp, options: {gpu_layers: 1}, expect: unsupported}
""")  # fmt: skip
    assert found["mapped"] == found["exact"] == found["read"] == found["tried"]
    assert {t.status for t in records["tried"].tuning} == {"ok"}
    assert len(records["tried"].tuning) == 4
    built = records["mapped"].load.notes[0]
    assert "built for this CPU" in built
    assert ("AVX512_BF16" in built) == ("avx512_bf16" in cpu_flags())
    sizes = [records[name].load.weights_by_tier[2] for name in ("mapped", "brain", "q8", "q4")]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4
    assert sum(a == b for a, b in zip(found["eight-bits"], found["exact"], strict=True)) >= 3
    times = records["mapped"].requests[0].token_times_s
    assert len(set(times)) == len(times), "every token has its own time"


def test_llama_cpp_answers_as_transformers_does_for_a_mixture(cli, environments):
    found, _ = answers(cli, environments, "tiny/olmoe", """
  - {name: mapped, engine: llama_cpp, policy: {gpu_batch_size: 3}}
""")  # fmt: skip
    assert found["mapped"] == found["exact"]


def test_airllm_answers_as_transformers_does_a_layer_at_a_time(cli, environments):
    found, _ = answers(cli, environments, "tiny/llama", """
  - {name: layers, engine: airllm, policy: {gpu_batch_size: 3}}
  - {name: opt, engine: airllm, model: {id: tiny/opt}, expect: unsupported}
""")  # fmt: skip
    assert found["layers"] == found["exact"]


def scaled_rotary_checkpoint(folder):
    """A LLaMA in one file whose rotary positions are neither scaled nor based as transformers 4 defaults to."""
    torch.manual_seed(0)
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8}  # fmt: skip
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        **sizes, vocab_size=512, max_position_embeddings=64, initializer_range=0.2, rope_parameters=rope
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_ollm_answers_as_transformers_does_one_sequence_at_a_time(cli, environments):
    folder = scaled_rotary_checkpoint(cli.folder / "scaled")
    found, records = answers(cli, environments, "tiny/llama", f"""
  - &scaled
    name: scaled-alone
    engine: transformers
    launcher: process
    model: {{id: "{folder}", weights: auto}}
    policy: {{gpu_batch_size: 1}}
  - {{<<: *scaled, name: scaled, engine: ollm, launcher: venv}}
""" + """
  - {name: alone, engine: transformers, launcher: process, policy: {gpu_batch_size: 1}}
  - {name: layers, engine: ollm, policy: {gpu_batch_size: 1}}
  - {name: held, engine: ollm, options: {resident_layers: 1}, policy: {gpu_batch_size: 1}}
  - {name: fitted, engine: ollm, limits: {host_memory: 128MiB}, policy: {gpu_batch_size: 1}}
  - {name: disk, engine: ollm, options: {disk_cache: true}, policy: {gpu_batch_size: 1}}
  - {name: batch, engine: ollm, policy: {gpu_batch_size: 3}, expect: unsupported}
  - {name: single, engine: ollm, policy: {gpu_batch_size: 1, compute_dtype: float32}, expect: unsupported}
  - {name: opt, engine: ollm, model: {id: tiny/opt}, policy: {gpu_batch_size: 1}, expect: unsupported}
  - {name: small, engine: ollm, policy: {gpu_batch_size: 1}, limits: {host_memory: 64KiB}, expect: infeasible}
  - name: held-small
    engine: ollm
    options: {resident_layers: 1000}
    policy: {gpu_batch_size: 1}
    limits: {host_memory: 64MiB}
    expect: infeasible
""", dtype="bfloat16")  # fmt: skip
    assert found["scaled"] == found["scaled-alone"]
    assert found["layers"] == found["alone"] == found["held"] == found["fitted"] == found["disk"]
    in_ram = [records[name].load.weights_by_tier[1] for name in ("layers", "held", "fitted")]
    assert in_ram == sorted(in_ram)
    assert len(set(in_ram)) == 3, "no layer, one, and all of them"
    assert records["fitted"].load.weights_by_tier[2] == 0
    assert records["disk"].load.policy.cache == (0, 0, 1)


#: A limit takes a second process, for the idle footprint, and knows no family.
ONCE = {
    "opt": "",
    "llama": "  - {{name: limited, engine: {engine}, limits: {{host_memory: {limit}}}, expect: infeasible}}\n",
}


@pytest.mark.parametrize("family", ONCE)
def test_vllm_on_a_cpu_answers_as_transformers_does(cli, environments, family):
    found, records = answers(cli, environments, f"tiny/{family}", """
  - {name: vllm, engine: vllm_cpu, policy: {gpu_batch_size: 3}}
  - {name: passes, engine: vllm_cpu, options: {batch_tokens: 32}, policy: {gpu_batch_size: 2}}
""" + ONCE[family].format(engine="vllm_cpu", limit="64MiB"))  # fmt: skip
    assert found["vllm"] == found["exact"] == found["passes"]
    assert records["vllm"].load.weights_by_tier[1] > 0
    assert "1 GiB for the KV cache" in records["vllm"].load.notes[0]


@pytest.mark.parametrize("family", ONCE)
def test_openvino_answers_as_transformers_does(cli, environments, family):
    found, records = answers(cli, environments, f"tiny/{family}", """
  - {name: whole, engine: openvino, policy: {gpu_batch_size: 3}}
  - {name: passes, engine: openvino, options: {batch_tokens: 16}, policy: {gpu_batch_size: 2}}
  - {name: eight, engine: openvino, policy: {gpu_batch_size: 3, weight_bits: 8, kv_bits: 8}}
  - {name: four, engine: openvino, policy: {weight_bits: 4}, expect: unsupported}
""" + ONCE[family].format(engine="openvino", limit="32MiB"))  # fmt: skip
    assert found["whole"] == found["exact"] == found["passes"]
    assert sum(a == b for a, b in zip(found["eight"], found["exact"], strict=True)) >= 3
    assert 3 * records["eight"].load.weights_by_tier[1] < records["whole"].load.weights_by_tier[1]


def test_transformers_quantizes_its_cache(cli, environments):
    found, records = answers(cli, environments, "tiny/llama", """
  - {name: eight, engine: transformers, policy: {gpu_batch_size: 3, kv_bits: 8}}
  - {name: four, engine: transformers, policy: {gpu_batch_size: 3, kv_bits: 4}}
  - {name: three, engine: transformers, policy: {kv_bits: 3}, expect: unsupported}
  - {name: moved, engine: transformers, options: {offload_cache: true}, expect: unsupported}
""", "{kind: synthetic, prompt_len: 100, gen_len: 40, num_requests: 12}")  # fmt: skip
    alike = {n: sum(a == b for a, b in zip(found[n], found["exact"], strict=True)) for n in ("eight", "four")}
    assert alike["eight"] > alike["four"] > 3, "each bit less tells"
    assert records["eight"].load.policy.kv_bits == 8
