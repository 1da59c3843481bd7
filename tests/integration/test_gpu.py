"""Engines on a CUDA device, beside themselves on the CPU."""

import pytest

pytestmark = pytest.mark.gpu
WORKLOAD = "{kind: synthetic, prompt_len: 12, gen_len: 6, num_requests: 5}"
SHORT = {"repeats": 1, "timeout": "300s", "workload": WORKLOAD}


def test_transformers_on_a_device_answers_as_on_the_cpu_with_its_cache_moved_or_not(cli):
    suite = cli.suite("""
  - {name: cpu, engine: transformers, policy: {gpu_batch_size: 3}}
  - {name: gpu, engine: transformers, policy: {gpu_batch_size: 3}, limits: {device_memory: 1GiB}}
  - name: moved
    engine: transformers
    options: {offload_cache: true}
    policy: {gpu_batch_size: 3}
    limits: {device_memory: 1GiB}
""", model="{id: tiny/llama, weights: dummy, dtype: float32}", **SHORT)  # fmt: skip
    cli.run(suite)
    found = {r.spec.name: sorted((q.id, q.digest) for q in r.requests) for r in cli.records()}
    assert found["cpu"] == found["gpu"] == found["moved"]


@pytest.mark.parametrize(
    ("engine", "model", "options"),
    [
        ("deepspeed_zero", "tiny/opt", "{parameters: host}"),
        ("flexgen_ref", "tiny/opt", "{}"),
        ("airllm", "tiny/llama", "{}"),
        ("ollm", "tiny/llama", "{}"),
        ("vllm", "tiny/llama", "{}"),
    ],
)
def test_a_peer_runs_on_a_device(cli, engine, model, options):
    pytest.importorskip({"deepspeed_zero": "deepspeed", "flexgen_ref": "flexgen"}.get(engine, engine))
    dtype, batch = ("bfloat16", 1) if engine == "ollm" else ("float16", 3)
    limits, policy = "{device_memory: 2GiB}", f"{{gpu_batch_size: {batch}}}"
    suite = cli.suite(
        f"  - {{engine: {engine}, options: {options}, limits: {limits}, policy: {policy}}}",
        model=f"{{id: {model}, weights: dummy, dtype: {dtype}}}",
        **SHORT,
    )
    cli.run(suite)
    (record,) = cli.records()
    assert record.load.weights_by_tier[0] > 0 or engine in ("deepspeed_zero", "airllm")
