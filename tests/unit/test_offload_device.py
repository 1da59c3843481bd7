"""The engine on a device that does everything as late as it may: the right answers, and no waiting inside a pass."""

import threading
from dataclasses import asdict, replace

import pytest
import torch
import transformers
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engines.common.work_memory import CONTEXT_BYTES
from engines.offload.calibrate import device as calibrate_device
from engines.offload.engine import OffloadEngine
from engines.offload.kernels import DeviceKernels
from engines.offload.memory.kv_blocks import blocks_for
from engines.planning.simulated import search_policy
from harness import api, hardware
from tests import pretend
from tests.offload import OTHERS, all_greedy, answers, load_and_answer, prepare, requests_of, save, tiny, with_kernels

MIB = 1 << 20


def load(model, cache, /, device=96 * MIB, host=96 * MIB, stage_share=1 / 16, **policy):
    """On a fresh device of so many bytes beside CUDA's own, with torch's kernels. With a `stage_share` of 0 stages hold
    one sequence's KV blocks, and larger batches go through them in parts."""
    there = pretend.fresh()
    engine = OffloadEngine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engines.offload.backend.choice.opened", lambda limits, units: there)
        patch.setattr("engines.offload.backend.cuda.DeviceKernels", lambda: DeviceKernels(triton=False))
        patch.setattr("engines.offload.memory.device._STAGE_SHARE", stage_share)
        limits = api.HardwareLimits(device_memory=CONTEXT_BYTES + device, host_memory=host)
        report = engine.load(model, api.OffloadPolicy(**policy), limits, api.Job(cache, cache, 64, 64))
    return engine, report, there


@st.composite
def policies(draw):
    """Weights and keys and values anywhere, in every schedule."""
    weights = draw(st.sampled_from([None, (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.3, 0.3, 0.4)]))
    places = [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.5, 0.5, 0.0), (0.0, 0.0, 1.0), (0.3, 0.3, 0.4), (0.0, 0.5, 0.5)]
    cache = draw(st.sampled_from([None, *places]))
    schedule = draw(st.sampled_from(["row", "zigzag", "sweep"]))
    policy = {"weights": weights, "cache": cache, "schedule": schedule, "overlap": draw(st.booleans())}
    policy["activations"] = draw(st.sampled_from([None, *places]))
    policy["gpu_batch_size"] = draw(st.integers(1, 6))
    policy["cpu_attention"] = draw(st.booleans())
    if schedule == "zigzag":
        policy["num_gpu_batches"] = draw(st.integers(1, 3))
    if schedule == "sweep":
        policy["nano_batches"] = draw(st.sampled_from([1, 2, 3, "KQV0 O1 UG1 D1 KQV1 O0 UG0 D0"]))
    if draw(st.booleans()):
        policy["prefill_chunk"] = draw(st.integers(1, 20))
    return policy


@settings(max_examples=6, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(seed=st.integers(0, 1000), count=st.integers(1, 6), policy=policies(), share=st.sampled_from([0.0, 1 / 16]))
@example(1, 6, {"schedule": "sweep", "gpu_batch_size": 6, "cache": (0.0, 0.3, 0.7)}, 0.0)
@example(2, 6, {"schedule": "sweep", "gpu_batch_size": 6, "cache": (0.3, 0.3, 0.4), "cpu_attention": True}, 0.0)
@example(3, 6, {"schedule": "zigzag", "gpu_batch_size": 3, "num_gpu_batches": 2, "cache": (0.0, 0.0, 1.0),
                "cpu_attention": True, "overlap": False}, 0.0)  # fmt: skip
def test_greedy_output_is_transformers_own(model, reference, cache, seed, count, policy, share):
    engine, report, device = load(model, cache, stage_share=share, **policy)
    held = engine.stats().num_kv_blocks
    requests = [r for r in requests_of(seed, count) if blocks_for(len(r.prompt) + r.sampling.max_tokens) <= held]
    tiles = engine.stats().tile_bytes
    assert requests
    device.syncs.clear()
    tokens = answers(engine, requests)
    engine.close()
    assert device.syncs == [], "the host waited for the device inside a pass"
    if policy.get("weights"):
        assert policy["weights"] == pytest.approx(report.policy.weights, abs=2 * max(tiles) / sum(tiles))
    if policy.get("cache"):
        assert policy["cache"] == pytest.approx(report.policy.cache, abs=1 / held)
    if policy.get("activations"):
        assert policy["activations"] == report.policy.activations
    assert all_greedy(reference, requests, tokens)


@pytest.mark.parametrize(
    "policy",
    [
        {"weight_bits": 4},
        {"weight_bits": 8, "weight_groups": "output", "weights": (0.0, 0.5, 0.5)},
        pytest.param({"kv_bits": 4, "cache": (0.0, 1.0, 0.0)}, marks=pytest.mark.slow),
        {"weight_bits": 4, "kv_bits": 4, "nano_batches": 2, "cache": (0.5, 0.5, 0.0), "weights": (0.0, 0.0, 1.0)},
        {"kv_bits": 4, "cache": (0.4, 0.3, 0.3), "cpu_attention": True, "nano_batches": 2, "weights": (0.0, 0.5, 0.5)},
        pytest.param({"weight_bits": 3, "kv_bits": 8}, marks=pytest.mark.slow),
        pytest.param({"kv_bits": 3, "cache": (0.5, 0.5, 0.0), "cpu_attention": True}, marks=pytest.mark.slow),
        {"value_sparsity": 0.5},
    ],
    ids="-".join,
)
@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_quantized_output_on_a_device_is_the_hosts(model, cache, policy):
    """What is quantized and unpacked on the device is what the host would have made of it."""
    requests = requests_of(7, 3, eos=False)
    engine, _, device = load(model, cache, schedule="sweep", gpu_batch_size=4, **policy)
    device.syncs.clear()
    found = answers(engine, requests)
    engine.close()
    assert device.syncs == []
    here = {key: value for key, value in policy.items() if key not in ("cache", "weights", "cpu_attention")}
    assert load_and_answer(model, cache, requests, schedule="sweep", gpu_batch_size=4, **here)[0] == found
    assert device.besides > 0 or policy.get("nano_batches", 1) == 1


@pytest.mark.parametrize("kind", OTHERS)
def test_other_architectures_compute_there_too(kind, tmp_path, cache):
    """Transposed matrices, scaled embeddings, caps and windows, experts (whose routing the host has to know)."""
    model = tiny(tmp_path / kind, kind, **OTHERS[kind] | {"bos_token_id": 1, "eos_token_id": 2})
    reference = transformers.AutoModelForCausalLM.from_pretrained(model.path).eval()
    engine, _, device = load(model, cache, schedule="sweep", gpu_batch_size=3, weights=(0.3, 0.3, 0.4))
    device.syncs.clear()
    requests = requests_of(11, 4)
    tokens = answers(engine, requests)
    engine.close()
    assert device.syncs == [] or kind == "mixtral"
    assert all_greedy(reference, requests, tokens)


def test_a_device_is_measured_for_plans(monkeypatch):
    """Every rate that a plan for a device needs, each with its samples; on this one they say nothing."""
    device = pretend.fresh()
    for name, small in (("_HEIGHT", 64), ("_WIDTH", 64), ("_COPIED", 1 << 16), ("_SEQUENCES", 2), ("_HEADS", 2)):
        monkeypatch.setattr(calibrate_device, name, small)
    processor, link, samples = calibrate_device.measure(
        device, "pretended", 1 << 30, DeviceKernels(False), 2, "float32"
    )
    profile = api.HardwareProfile(
        "local", "", api.Processor("host", 1e9, 1e9, {"1": 1e9}), api.Disk(1e9, 1e9, 1e9), processor, link, devices=1,
        spread={path: (min(found), max(found)) for path, found in samples.items()},
    )  # fmt: skip
    profile.validate()
    assert all(len(found) == 2 and min(found) > 0 for found in samples.values())
    assert sorted(processor.flops, key=int) == ["1", "4", "16", "64", "256", "1024", "4096"]
    assert {*processor.attention} == {"16", "4"}


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"cpu_attention": True, "value_sparsity": 0.5}, r"policy.cpu_attention: .* leave out value_sparsity"),
    ],
)
def test_what_is_not_there_with_a_device_is_refused(model, cache, policy, words):
    with pytest.raises(api.UnsupportedError, match=words):
        load(model, cache, **policy)


@pytest.mark.parametrize(("schedule", "device", "host"), [("row", 88, 72), ("zigzag", 90, 90), ("sweep", 88, 96)])
def test_a_searched_policy_can_be_run(model, cache, schedule, device, host):
    limits = api.HardwareLimits(device_memory=CONTEXT_BYTES + device * MIB, host_memory=host * MIB)
    spec = api.RunSpec("offload", api.ModelSpec(model.path), api.WorkloadSpec("synthetic", 60, 4, 24),
                   api.OffloadPolicy(1, schedule=schedule), tune="search", limits=limits)  # fmt: skip
    found = search_policy(spec, model, hardware.load("t4_gcp"), [])
    engine, report, _ = load(model, cache, device * MIB, host * MIB, **asdict(found.policy))
    requests = [
        replace(r, sampling=replace(r.sampling, max_tokens=min(r.sampling.max_tokens, spec.workload.gen_len)))
        for r in requests_of(3, found.policy.block_size, eos=False)
    ]
    done = list(engine.generate(requests))
    engine.close()
    assert found.tune == "none"
    assert report.policy.gpu_batch_size == found.policy.gpu_batch_size
    assert len(done) == len(requests)


def test_a_search_leaves_attention_to_windows_on_the_device(tmp_path):
    model = tiny(tmp_path / "m", "gemma2", **OTHERS["gemma2"])
    # a device so slow at attention that the host's would always be the better
    profile = hardware.load("t4_gcp")
    device = replace(profile.device, bandwidth=1e6)
    limits = api.HardwareLimits(device_memory=CONTEXT_BYTES + 120 * MIB, host_memory=96 * MIB)
    spec = api.RunSpec("offload", api.ModelSpec(model.path), api.WorkloadSpec("synthetic", 60, 4, 24),
                   api.OffloadPolicy(1, schedule="zigzag"), tune="search", limits=limits)  # fmt: skip
    plain = replace(model, path="")
    answers = [search_policy(spec, one, replace(profile, device=device), []).policy for one in (model, plain)]
    assert [policy.cpu_attention for policy in answers] == [False, True]


def test_attention_by_the_host_is_refused_where_a_layer_has_a_window(tmp_path, cache):
    model = tiny(tmp_path / "m", "gemma2", **OTHERS["gemma2"])
    with pytest.raises(api.UnsupportedError, match="window attend on the device: leave it out"):
        load(model, cache, cpu_attention=True)


def test_host_attention_that_has_nothing_to_do_is_said(model, cache):
    engine, report, _ = load(model, cache, cpu_attention=True, cache=(1.0, 0.0, 0.0))
    engine.close()
    assert not report.policy.cpu_attention
    assert any("nothing to do" in note for note in report.notes)


def test_a_device_is_given_back_also_when_loading_fails(model, cache):
    engine, _, device = load(model, cache)
    engine.close()
    assert device.closed
    with pytest.raises(api.InfeasibleError):
        load(model, cache, device=1)
    assert pretend.pretend.device.closed


def test_the_trace_tells_only_what_a_device_times(model, cache):
    """How long its loads took says nothing there: they wait for their slots."""
    engine, _, _ = load(model, cache, schedule="sweep", gpu_batch_size=4, weights=(0.0, 0.0, 1.0))
    list(engine.generate(requests_of(1, 3)))
    metrics = engine.trace().metrics
    engine.close()
    assert metrics["task_products_s"] > 0
    assert metrics["pinned_bytes"] > 0
    assert not any(name.startswith("disk_") or "load" in name for name in metrics)


@pytest.mark.parametrize(("weights", "readers"), [((0.3, 0.7, 0.0), 0), ((0.3, 0.3, 0.4), 2)])
def test_the_host_runs_ahead_of_copies_from_pinned_memory(model, cache, weights, readers):
    """No thread of its own waits for them; the trace has when the device made them."""
    before = {thread for thread in threading.enumerate() if thread.name.startswith("reader-")}
    engine, _, _ = load(model, cache, schedule="sweep", gpu_batch_size=4, weights=weights)
    started = {thread for thread in threading.enumerate() if thread.name.startswith("reader-")} - before
    list(engine.generate(requests_of(1, 3)))
    streamed = {tile.matrix for tile in engine.loaded.stream.tiles}
    spans = [span for span in engine.loaded.timeline.kept if span.lane == "load"]
    engine.close()
    assert len(started) == readers
    assert all(span.end_s >= span.start_s for span in spans)
    if not readers:  # those of readers are in the pass in which they read
        assert {span.name for span in spans} == streamed


@pytest.mark.parametrize("weights", [(0.0, 1.0, 0.0), (0.3, 0.3, 0.4)])
def test_twelve_bits_cross_the_link_and_answers_stay(tmp_path, monkeypatch, weights):
    """A tile that they cannot hold is plain, beside others of its matrix."""
    monkeypatch.setattr("engines.offload.backend.cuda.tile_values", lambda shape: 64 * 64)
    folder = save(tmp_path / "m", "opt", torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.1.fc1.weight"))
    tensors[name][:40] *= torch.exp2(-torch.randint(0, 100, tensors[name][:40].shape).float()).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model, cache, found = prepare(folder), with_kernels(tmp_path / "cache"), {}
    for form in ("plain", "exact12"):
        engine, report, _ = load(model, cache, weights=weights, gpu_batch_size=4, weight_format=form)
        kinds = {tile.stored.name for tile in engine.loaded.tiles if tile.matrix == name}
        assert kinds == ({"panels12", "panels"} if form == "exact12" else {"bfloat16"})
        assert any("12 exact bits" in note for note in report.notes) == (form == "exact12")
        scores = engine.score([((5, 6, 7), (8, 9)), ((11,), tuple(range(12, 40)))])
        found[form] = [score.logprob for score in scores]
        engine.close()
    assert found["exact12"] == pytest.approx(found["plain"], rel=0.02)


def test_twelve_bits_on_a_device_are_for_bfloat16(tmp_path):
    with pytest.raises(api.UnsupportedError, match="exact12 is for weights in bfloat16"):
        load(tiny(tmp_path / "m", "opt"), tmp_path, weight_format="exact12")
