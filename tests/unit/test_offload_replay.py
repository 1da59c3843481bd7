"""Passes that are captured and replayed: to the last bit what the model computes, in memory that nobody else uses."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.offload.kernels.launch import capture
from engines.offload.loaded_model import LoadedModel
from engines.offload.model import pass_replay
from engines.offload.model.layer_products import PackedBatch
from engines.offload.model.pass_capture import Buffer, PassCapture, Step
from engines.offload.model.pass_replay import Arena, PassReplay
from harness.api import GenerationRequest, SamplingParams
from tests.offload import load, prepare, save
from tests.unit.test_offload_architectures import MODELS

WITHOUT_EXPERTS = [name for name, (_, config) in MODELS.items() if not {"num_experts", "num_local_experts"} & {*config}]
SAMPLING = SamplingParams(max_tokens=9, ignore_eos=True, logprobs=2)


def requests(count, prompt=5):
    return [GenerationRequest(f"r{i}", tuple(range(7 + i, 7 + prompt + 2 * i)), SAMPLING) for i in range(count)]


def results(model, cache, jobs, /, **policy):
    """What an engine generates, one job after the other, and how many sizes of passes it has captured."""
    engine, _ = load(model, cache, reproducible=True, **policy)
    found = [{r.id: (r.tokens, r.logprobs) for r in engine.generate(job)} for job in jobs]
    replay = engine._loaded_runner()._executor._replay
    captured = 0 if replay is None else len(replay._captured)
    if replay is not None:
        assert not replay.problem
    engine.close()
    return found, captured


@pytest.mark.parametrize("policy", [
    {"schedule": "sweep", "gpu_batch_size": 4},
    {"schedule": "row", "gpu_batch_size": 4, "weights": (0.0, 0.4, 0.6), "prefill_chunk": 3},
    {"schedule": "sweep", "gpu_batch_size": 4, "weight_bits": 4, "kv_bits": 4},
    {"schedule": "zigzag", "gpu_batch_size": 2, "num_gpu_batches": 2},
    {"schedule": "sweep", "gpu_batch_size": 4, "nano_batches": 2, "cache": (0.0, 0.3, 0.7)},
], ids=["resident", "streamed", "quantized", "several batches", "cache on disk"])  # fmt: skip
@pytest.mark.parametrize("name", WITHOUT_EXPERTS)
def test_replayed_passes_give_what_the_model_gives_to_the_last_bit(name, policy, tmp_path, monkeypatch):
    """Alone, in company that comes and goes, and alone again."""
    kind, config = MODELS[name]
    model, jobs = (
        prepare(save(tmp_path / "m", kind, torch.bfloat16, **config)),
        [requests(1), requests(6), requests(1, prompt=11)],
    )
    replayed, captured = results(model, tmp_path / "cache", jobs, **policy)
    assert captured or "num_gpu_batches" in policy
    monkeypatch.setattr(LoadedModel, "can_replay", False)
    plain, none = results(model, tmp_path / "cache", jobs, **policy)
    assert replayed == plain and not none


@pytest.mark.parametrize("name", sorted({*MODELS} - {*WITHOUT_EXPERTS}))
def test_mixtures_choose_experts_by_values_and_are_not_captured(name, tmp_path):
    kind, config = MODELS[name]
    model = prepare(save(tmp_path / "m", kind, torch.bfloat16, **config))
    _, captured = results(model, tmp_path / "cache", [requests(2)], schedule="sweep", gpu_batch_size=2)
    assert captured == 0


class Passes:
    """A model of torch's operations, and how often its code has run."""

    def __init__(self, code):
        self.code, self.runs = code, 0

    def __call__(self, batch):
        self.runs += 1
        return self.code(batch)


WEIGHT = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def several_operations(batch):
    """Views, copies, operations into and in place, of several results and without variants that write."""
    x = torch.nn.functional.embedding(batch.ids, WEIGHT)
    x = torch.nn.functional.layer_norm(x, (8,)) + batch.positions[:, None]
    x.mul_(torch.arange(8).to(x.dtype))
    halves = x.double().view(-1, 2, 4).transpose(0, 1)
    low, high = halves.chunk(2)
    values, order = torch.sort(torch.cat([high, low.clone()], -1)[0], -1)
    mask = torch.where(order > 3, values, values.tanh())
    return (mask.float() @ WEIGHT.t())[batch.logits_indices]


def batch_of(ids, positions=None, logits=None):
    ids = torch.tensor(ids)
    positions = torch.arange(len(ids)) if positions is None else torch.tensor(positions)
    return PackedBatch(ids, positions, torch.tensor([len(ids) - 1] if logits is None else logits), attention=None)


@pytest.fixture
def inference():
    with torch.inference_mode():
        yield


@pytest.mark.usefixtures("inference")
def test_a_replay_computes_with_the_values_of_its_own_pass():
    model = Passes(several_operations)
    replay = PassReplay(model)
    passes = [
        ([1, 2, 3], None, [0, 2]),
        ([4, 5, 6], None, [1, 2]),
        ([9, 3, 15], [7, 5, 4], [2, 0]),
        ([0, 8, 1], [3, 0, 2], [0, 1]),
        ([4, 5, 6], [9, 9, 1], [1, 1]),
    ]
    for ids, positions, logits in passes:
        batch = batch_of(ids, positions, logits)
        assert torch.equal(replay(batch), several_operations(batch))
    assert model.runs == 3 and not replay.problem


@pytest.mark.usefixtures("inference")
def test_a_size_is_captured_when_it_is_likely_to_come_again():
    """Not where sizes alternate: a capture takes as long as several passes."""
    replay = PassReplay(several_operations)
    for rows in (2, 3, 2, 3, 2, 2, 3, 3, 2, 2):
        replay(batch_of([1] * rows))
        assert not replay._captured
    replay(batch_of([5, 6]))
    assert list(replay._captured) == [(2, 1)]
    for rows in (3, 3, 2, 3):  # a replayed pass counts among those that follow each other too
        replay(batch_of([1] * rows))
    assert list(replay._captured) == [(2, 1)]


@pytest.mark.usefixtures("inference")
def test_logits_stay_when_the_next_pass_runs():
    replay = PassReplay(several_operations)
    kept = [replay(batch_of([i, i + 1])) for i in range(4)]
    assert all(torch.equal(logits, several_operations(batch_of([i, i + 1]))) for i, logits in enumerate(kept))


@pytest.mark.usefixtures("inference")
def test_sizes_differ_by_rows_and_by_rows_of_logits():
    model = Passes(several_operations)
    replay = PassReplay(model)
    for batch in (batch_of([1, 2]), batch_of([1, 2, 3]), batch_of([1, 2], logits=[0, 1])):
        assert torch.equal(replay(batch), several_operations(batch))
    assert model.runs == 3
    for batch in (batch_of([5, 2]), batch_of([7, 2, 3]), batch_of([1, 9], logits=[0, 1])):
        for _ in range(5):
            assert torch.equal(replay(batch), several_operations(batch))
    assert model.runs == 3 + 9


@pytest.mark.usefixtures("inference")
def test_memory_of_replays_is_given_back_before_any_other_pass():
    replay = PassReplay(several_operations)
    for _ in range(4):
        replay(batch_of([1, 2]))
    assert replay._arena.bytes.any()
    replay(batch_of([1, 2, 3]))
    assert not replay._arena.bytes.any()
    assert torch.equal(replay(batch_of([3, 4])), several_operations(batch_of([3, 4])))


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize("code", [
    lambda batch: WEIGHT[batch.ids] * (2.0 if batch.ids[0].item() > 3 else 3.0),
    lambda batch: WEIGHT[batch.ids] * (2.0 if (batch.ids > 3).any() else 3.0),
    lambda batch: torch.cat([WEIGHT[batch.ids], WEIGHT[batch.ids.nonzero()[:, 0]]]),
    lambda batch: WEIGHT[: len(batch.ids)][batch.ids > 3],
    lambda batch: torch.nn.functional.dropout(WEIGHT[batch.ids], 0.5) * 0 + WEIGHT[batch.ids],
    lambda batch: COUNTER.add_(1) * 0 + WEIGHT[batch.ids],
], ids=["item", "bool", "nonzero", "mask", "random", "state"])  # fmt: skip
def test_a_model_whose_code_depends_on_values_is_left_to_itself(code):
    model = Passes(code)
    replay = PassReplay(model)
    for ids in ([1, 2], [4, 0], [5, 6], [0, 9], [2, 2], [3, 4]):
        assert torch.equal(replay(batch_of(ids)), code(batch_of(ids)))
    assert model.runs == 6 and replay.problem and not replay._captured


COUNTER = torch.zeros(1)


@pytest.mark.usefixtures("inference")
def test_large_passes_are_left_to_the_model():
    model = Passes(several_operations)
    replay = PassReplay(model)
    for _ in range(4):
        replay(batch_of([1] * (pass_replay._MOST_ROWS + 1)))
    assert model.runs == 4 and not replay._captured


@pytest.mark.usefixtures("inference")
@pytest.mark.parametrize(("bound", "problem"), [("_ARENA_BYTES", ""), ("_MOST_STEPS", "steps cannot be kept")])
def test_what_does_not_fit_is_captured_once(bound, problem, monkeypatch):
    captures = []
    monkeypatch.setattr(pass_replay, "PassCapture", lambda: captures.append(1) or PassCapture())
    monkeypatch.setattr(pass_replay, bound, 5)
    replay = PassReplay(several_operations)
    for _ in range(6):
        assert torch.equal(replay(batch_of([1, 2])), several_operations(batch_of([1, 2])))
    assert (
        captures == [1] and not replay._captured and problem in replay.problem and bool(problem) == bool(replay.problem)
    )


@pytest.mark.usefixtures("inference")
def test_of_many_sizes_those_that_come_are_kept(monkeypatch):
    model = Passes(several_operations)
    replay = PassReplay(model)
    for _ in range(3):
        replay(batch_of([1, 2]))
    steps = len(replay._captured[2, 1])
    monkeypatch.setattr(pass_replay, "_MOST_STEPS", 3 * steps)
    for rows in (3, 4, 5):
        for _ in range(3):
            replay(batch_of([1] * rows))
        replay(batch_of([1, 2]))
    assert list(replay._captured) == [(4, 1), (5, 1), (2, 1)]
    runs = model.runs
    replay(batch_of([3] * 5))
    assert model.runs == runs
    replay(batch_of([3] * 3))
    assert model.runs == runs + 1


@pytest.mark.usefixtures("inference")
def test_an_error_of_a_captured_pass_leaves_nothing_behind():
    def fails(batch):
        several_operations(batch)
        raise ValueError("amid a pass")

    replay = PassReplay(several_operations)
    for _ in range(2):
        replay(batch_of([1, 2]))
    replay._model = fails
    with pytest.raises(ValueError, match="amid a pass"):
        replay(batch_of([1, 2]))
    assert capture.get() is None and not replay._captured
    replay._model = several_operations
    assert torch.equal(replay(batch_of([3, 4])), several_operations(batch_of([3, 4])))


@pytest.mark.usefixtures("inference")
def test_what_runs_in_a_pause_is_not_taken_down():
    taken = PassCapture()
    with taken:
        a = torch.ones(3) + 1
        before = len(taken.steps)
        with taken.paused():
            b = a * 2
        assert len(taken.steps) == before
        assert isinstance(taken.where(a), Buffer) and taken.where(b) is b
        a.add_(1)
    assert len(taken.steps) == before + 1


@pytest.mark.usefixtures("inference")
def test_memory_of_a_tensor_that_has_gone_is_not_taken_for_its_own():
    """An allocator gives its address to the next one, which may be none of the pass."""
    memory = bytearray(64)
    taken = PassCapture()
    with taken, taken.paused():
        own = torch.frombuffer(memory, dtype=torch.uint8)
        taken.launched(lambda *tensors: lambda: None, own, created=1)
        assert isinstance(taken.where(own), Buffer)
        del own
        other = torch.frombuffer(memory, dtype=torch.uint8)
        assert taken.where(other) is other


@pytest.mark.usefixtures("inference")
def test_a_pass_takes_no_more_of_the_arena_than_it_needs(monkeypatch):
    needs = []
    places = pass_replay._places
    monkeypatch.setattr(pass_replay, "_places", lambda *given: needs.append(places(*given)) or needs[-1])
    for _ in range(2):
        replay = PassReplay(several_operations)
        for i in range(5):
            batch = batch_of([i, 2, 3], logits=[0, 2])
            assert torch.equal(replay(batch), several_operations(batch))
        assert replay._captured
        monkeypatch.setattr(pass_replay, "_ARENA_BYTES", needs[-1][1])  # where more would be outside


@st.composite
def lifetimes(draw):
    """Steps that use storages from one to another, their sizes, and the one with the result."""
    count = draw(st.integers(1, 12))
    spans = [sorted(draw(st.tuples(st.integers(0, 9), st.integers(0, 9)))) for _ in range(count)]
    sizes = draw(st.lists(st.integers(1, 300), min_size=count, max_size=count))
    used = [[i for i, (first, last) in enumerate(spans) if step in (first, last)] for step in range(10)]
    buffer = Buffer(0, torch.uint8, torch.Size([1]), (1,), 0)
    steps = [Step(lambda: lambda: None, [buffer._replace(storage=i) for i in each]) for each in used]
    return spans, sizes, steps, draw(st.integers(0, count - 1))


@given(lifetimes())
def test_no_two_storages_in_use_share_memory(given):
    spans, sizes, steps, result = given
    places, needed = pass_replay._places(steps, sizes, result)
    spans[result] = spans[result][0], len(steps)
    for i, (first, last) in enumerate(spans):
        assert places[i] % 64 == 0 and places[i] + sizes[i] <= needed
        for k, (other, end) in enumerate(spans[:i]):
            if first <= end and other <= last:
                assert places[i] + sizes[i] <= places[k] or places[k] + sizes[k] <= places[i]
    most = max(sum(-(-sizes[i] // 64) * 64 for i, (f, e) in enumerate(spans) if f <= step <= e) for step in range(11))
    assert needed >= most
    assert needed <= sum(-(-size // 64) * 64 for size in sizes)


def test_an_arena_takes_memory_as_it_is_written():
    arena = Arena(1 << 20)
    arena.bytes[5] = 7
    assert arena.bytes.sum() == 7
    arena.release()
    assert arena.bytes.sum() == 0 and len(arena.bytes) == 1 << 20


def test_inputs_of_a_captured_pass_are_its_own():
    """A caller may change or free its tensors."""
    batch = batch_of([1, 2])
    inputs = pass_replay.Inputs(batch)
    captured = inputs.batch(PassCapture())
    assert captured.ids is not batch.ids and torch.equal(captured.ids, batch.ids)
    inputs.set(replace(batch_of([5, 6]), attention="another"))
    assert captured.ids.tolist() == [5, 6] and batch.ids.tolist() == [1, 2] and inputs.attention == "another"


def test_a_capture_does_not_import_torch_s_compiler():
    """It would take seconds, amid a generation."""
    code = (
        "import sys, torch\n"
        "from engines.offload.model.pass_capture import PassCapture\n"
        "with PassCapture() as taken:\n"
        "    torch.ones(3).add_(1)\n"
        "assert taken.steps and 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
