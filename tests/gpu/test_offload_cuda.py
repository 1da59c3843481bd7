"""The engine on a real CUDA device, where one is at hand: the right answers within its limits, and no hidden waits.

What it asks of a device is held on every machine by tests/unit/test_offload_device.py; this is about CUDA itself.
"""

import functools
import warnings
from dataclasses import replace

import pytest
import torch

from engines.common.cuda_device import context_bytes
from engines.offload.device.cuda import Cuda
from engines.offload.engine import OffloadEngine
from harness.api import UnsupportedError
from tests.offload import all_greedy, answers, load_and_answer, requests_of, tiny

pytestmark = pytest.mark.gpu
MIB = 1 << 20

POLICIES = [
    {"schedule": "row", "gpu_batch_size": 2},
    {"schedule": "zigzag", "gpu_batch_size": 3, "num_gpu_batches": 2, "weights": (0.3, 0.3, 0.4)},
    {"schedule": "sweep", "gpu_batch_size": 6, "nano_batches": 2, "weights": (0.0, 0.0, 1.0)},
    {"schedule": "sweep", "gpu_batch_size": 6, "cache": (0.5, 0.5, 0.0), "weights": (0.0, 1.0, 0.0)},
    {"schedule": "sweep", "gpu_batch_size": 6, "nano_batches": 2, "cache": (0.5, 0.5, 0.0), "cpu_attention": True,
     "weights": (0.0, 1.0, 0.0)},
]  # fmt: skip


@pytest.fixture(autouse=True)
def exact():
    """Products in float32 as they are written down."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.fixture
def load_on_device(load):
    return functools.partial(load, device=context_bytes() + 256 * MIB, budget=96 * MIB)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: "-".join(map(str, p)))
def test_greedy_output_is_transformers_own(model, reference, cache, policy, load_on_device):
    engine, report = load_on_device(model, cache, **policy)
    requests = requests_of(3, 8)
    tokens = answers(engine, requests)
    metrics = engine.trace().metrics
    assert all_greedy(reference, requests, tokens)
    assert metrics["device_reserved_bytes"] <= 256 * MIB
    assert not any("install triton" in note for note in report.notes)


@pytest.mark.parametrize("policy", POLICIES[1:], ids=lambda p: "-".join(map(str, p)))
def test_no_pass_waits_for_the_whole_device(model, cache, policy, monkeypatch, load_on_device):
    """By CUDA's own word: neither by name nor by an operation that waits without saying so."""
    engine, _ = load_on_device(model, cache, **policy)
    list(engine.generate(requests_of(1, 2)))  # kernels are compiled, which may wait
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: calls.append(args))
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            list(engine.generate(requests_of(2, 6)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
        engine.close()
    assert calls == []
    assert [str(w.message) for w in said if "synchronizing" in str(w.message)] == []


@pytest.mark.parametrize("bits", [{"weight_bits": 4}, {"kv_bits": 4}, {"weight_bits": 8, "kv_bits": 3}])
def test_quantized_output_on_a_device_is_the_hosts(model, cache, bits, load_on_device):
    requests = requests_of(7, 5, eos=False)
    engine, _ = load_on_device(model, cache, schedule="sweep", gpu_batch_size=4, weights=(0.0, 0.5, 0.5), **bits)
    found = answers(engine, requests)
    expected, _ = load_and_answer(model, cache, requests, schedule="sweep", gpu_batch_size=4, **bits)
    same = sum(found[r.id] == expected[r.id] for r in requests)
    assert same >= len(requests) - 1, "sums in another order part in near ties only"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_run_in_sixteen_bits(tmp_path, cache, dtype, load_on_device):
    model = tiny(tmp_path / "m", "llama", dtype)
    engine, report = load_on_device(model, cache, schedule="sweep", gpu_batch_size=4, weights=(0.0, 1.0, 0.0))
    requests = [replace(r, sampling=replace(r.sampling, ignore_eos=True)) for r in requests_of(4, 6)]
    tokens = answers(engine, requests)
    assert report.compute_dtype == str(dtype).removeprefix("torch.")
    assert all(len(tokens[r.id]) == r.sampling.max_tokens for r in requests)


def test_copies_take_their_own_streams_and_events_order_them():
    device = Cuda()
    below = device.pinned(1 << 20)
    below.fill_(7)
    there = torch.zeros(1 << 20, dtype=torch.uint8, device=device.where)
    copied = device.copy([(there, below)], (device.mark(),))
    device.wait_event(copied)
    doubled = there * 2
    back = device.pinned(1 << 20)
    device.copy([(back, doubled)], (device.mark(),)).synchronize()
    assert (back == 14).all()
    assert device.memory()["pinned_bytes"] == 2 << 20
    more = []
    device.wait_event(device.run_async(lambda: more.append(doubled + 1)))
    assert (device.download(device.record_stream(more[0])) == 15).all()


def has_green_contexts():
    try:
        from torch.cuda.green_contexts import GreenContext

        GreenContext.create(num_sms=16, device_id=torch.cuda.current_device())
    except (ImportError, RuntimeError):
        return False
    return True


def test_attention_may_be_held_to_a_part_of_the_device(model, reference, cache, load_on_device):
    """Where torch and the driver have green contexts; else the option is refused, and told why."""
    held = OffloadEngine(attention_units=16)
    if not has_green_contexts():
        with pytest.raises(UnsupportedError, match=r"options\.attention_units: no green context of 16"):
            load_on_device(model, cache, engine=held, **POLICIES[2])
        return
    engine, report = load_on_device(model, cache, engine=held, **POLICIES[2])
    requests = requests_of(3, 4)
    tokens = answers(engine, requests)
    assert all_greedy(reference, requests, tokens)
    assert any("16 multiprocessors" in note for note in report.notes)
