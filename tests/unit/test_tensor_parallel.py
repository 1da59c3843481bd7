"""A part of every matrix on each rank: which part, what is refused, what travels, and one process's answers."""

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from torch._C._distributed_c10d import TCPStore

from engines.models import shapes
from engines.offload.memory.layout import matrices_of, tiles_of
from engines.offload.memory.storage import Plain
from engines.offload.memory.tensor_shard import TensorShard
from engines.offload.model.meta_model import MetaModel
from engines.offload.pipeline.links import Links
from engines.offload.pipeline.stages import order_of
from engines.offload.pipeline.wire import PlainWire
from engines.offload.refusals import refuse
from engines.offload.weights.checkpoint_reader import CheckpointReader
from engines.offload.weights.convert import CheckpointLayout, convert
from engines.planning.nanoflow import Devices, operations
from engines.planning.workload import VALUE_BYTES, Lengths
from harness.api import HardwareLimits, OffloadPolicy, UnsupportedError
from tests.offload import (
    CONFIGS,
    OTHERS,
    all_greedy,
    answers,
    check_a_killed_rank_is_named,
    exact_score,
    load,
    rank_pids,
    requests_of,
    tiny,
)

SWEEP = {"schedule": "sweep", "gpu_batch_size": 4}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("mixtral"), "mixtral", **OTHERS["mixtral"])


def meta_model(model, part=None):
    return MetaModel(Path(model.path), model.shape, torch.float32, tensor=part)


def parts_of_weights(model, part, cache):
    """Of each matrix the whole one's sizes, where the rank's part begins, and the values that it converts."""
    meta = meta_model(model, part)
    source = CheckpointReader(model, meta.prefix, meta.aliases, meta.transforms)
    tiles = tiles_of(meta.matrices, [Plain("float32")] * len(meta.matrices), 16 << 10)
    found = convert(model, source, CheckpointLayout(meta.matrices, tiles, {}, {}), {}, cache, lambda done, total: None)
    values = {m.name: torch.full((m.rows, m.columns), torch.nan) for m in meta.matrices}
    for tile in found.tiles:
        data = (found.folder / tile.file).read_bytes()[tile.offset : tile.offset + tile.nbytes]
        stored = torch.frombuffer(bytearray(data), dtype=torch.float32).view(tile.shape)
        rows, columns = (slice(tile.start, tile.stop), slice(None))[:: 1 - 2 * tile.axis]
        values[tile.matrix][rows, columns] = stored
    return {m.name: (m.whole or (m.rows, m.columns), m.start, values[m.name]) for m in meta.matrices}


@pytest.mark.parametrize(("kind", "ranks"), [("opt", 4), ("llama", 2), ("mixtral", 2)])
def test_the_ranks_have_every_weight_once_between_them(kind, ranks, tmp_path):
    model = tiny(tmp_path / kind, kind, **OTHERS.get(kind, {}))
    whole = parts_of_weights(model, None, tmp_path)
    joined = {name: torch.full(sizes, torch.nan) for name, (sizes, _, _) in whole.items()}
    for rank in range(ranks):
        parts = parts_of_weights(model, TensorShard(rank, ranks), tmp_path)
        assert sum(p.numel() for *_, p in parts.values()) * ranks == sum(p.numel() for *_, p in whole.values())
        for name, (sizes, (row, column), part) in parts.items():
            assert sizes == tuple(joined[name].shape)
            place = joined[name][row : row + part.shape[0], column : column + part.shape[1]]
            assert place.isnan().all(), "no other rank has it"
            place.copy_(part)
    for name, (*_, values) in whole.items():
        assert torch.equal(joined[name], values)


@pytest.mark.parametrize("model_id", ["facebook/opt-6.7b", "meta-llama/Llama-2-70b-hf", "mistralai/Mixtral-8x7B-v0.1"])
def test_a_rank_plans_for_its_part(model_id):
    whole = shapes.shape(model_id)
    part = TensorShard(1, 2).shape(whole)
    assert 2 * part.kv_bytes_per_token(2) == whole.kv_bytes_per_token(2)
    assert (part.hidden, part.vocab, part.num_layers) == (whole.hidden, whole.vocab, whole.num_layers)
    for flops in (lambda shape: shape.flops(3, 100, 0), lambda shape: shape.flops(0, 0, 5)):
        assert 2 * flops(part) == pytest.approx(flops(whole))
    layers = [sum(m.rows * m.columns for m in matrices_of(shape) if m.in_layer) for shape in (part, whole)]
    assert 2 * layers[0] == pytest.approx(layers[1], rel=0.01)


@pytest.mark.parametrize(
    ("model_id", "policy", "limits", "words"),
    [
        ("facebook/opt-125m", {"tensor": 5}, {}, "12 attention heads are no 5 equal parts: use 2, 3, 4, 6, 12"),
        ("meta-llama/Llama-2-70b-hf", {"tensor": 16}, {}, "8 KV heads are no 16 equal parts: use 2, 4, 8"),
        ("facebook/opt-125m", {"tensor": 2, "pipeline": 2}, {}, "leave out policy.pipeline"),
        ("facebook/opt-125m", {"tensor": 2}, {"device_memory": 1 << 34}, "leave out limits.device_memory"),
        ("facebook/opt-125m", {"tensor": 2, "schedule": "sweep", "nano_batches": 2}, {}, "policy.nano_batches"),
        ("facebook/opt-125m", {"tensor": 2, "compute_dtype": "int8", "weight_bits": 8}, {}, "policy.compute_dtype"),
        ("mistralai/Mixtral-8x7B-v0.1", {"tensor": 2, "schedule": "zigzag", "num_gpu_batches": 2}, {}, "experts"),
    ],
)
def test_what_a_cell_tells_is_refused(model_id, policy, limits, words):
    model = type("Model", (), {"shape": shapes.shape(model_id)})
    with pytest.raises(UnsupportedError, match=words):
        refuse(OffloadPolicy(**policy), HardwareLimits(**limits), model)


@pytest.mark.parametrize(
    ("kind", "changes", "policy", "words"),
    [
        ("llama", {}, {"weight_bits": 4, "group_size": 32}, "80 of the 160 values of .*down_proj.* groups of 32"),
        ("gpt2", OTHERS["gpt2"], {}, "no plan for gpt2"),
        ("phi3", CONFIGS["llama"] | {"pad_token_id": 0}, {}, "phi3's .*qkv_proj colwise_gather_output"),
        ("mixtral", OTHERS["mixtral"] | {"num_local_experts": 3}, {}, "3 experts are no 2 equal parts"),
    ],
)
def test_what_a_model_tells_is_refused_before_a_rank_is_started(kind, changes, policy, words, tmp_path, monkeypatch):
    monkeypatch.setattr("engines.offload.pipeline.leader.leading", lambda *_: pytest.fail("started"))
    model = tiny(tmp_path / kind, kind, **changes)
    with pytest.raises(UnsupportedError, match=f"policy.tensor: .*{words}"):
        load(model, tmp_path / "cache", tensor=2, **policy)


def sum_up(rank, ranks, port, answers_to):
    """A rank that sends what its links found to its parent."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, ranks, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    links = Links(rank, order_of(ranks), PlainWire(torch.float32))
    found = {}
    for rows, dtype in ((5, torch.float32), (1, torch.bfloat16), (0, torch.float32)):
        sent = links.bytes_sent
        found[rows] = links.all_reduce(part_of_sum(rank, rows, dtype)), links.bytes_sent - sent
    part = TensorShard(rank, ranks).of(10)
    found["gathered"] = links.gather(torch.arange(20.0).view(2, 10)[:, part.start : part.stop], 10)
    answers_to.send({key: [t.tolist() if torch.is_tensor(t) else t for t in value] for key, value in found.items()})
    dist.barrier()
    dist.destroy_process_group()


def part_of_sum(rank, rows, dtype):
    """Values whose float32 sum depends on the order; 7 a row, which three ranks have no equal slices of."""
    torch.manual_seed(rank)
    return (torch.randn(rows, 7) * 10.0 ** torch.randint(-3, 4, (rows, 7))).to(dtype)


def test_sums_are_in_the_order_of_ranks_and_cost_what_is_counted():
    ranks, context = 3, multiprocessing.get_context("fork")
    store = TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    children = [context.Process(target=sum_up, args=(k, ranks, store.port, pipes[k][1])) for k in range(ranks)]
    for child in children:
        child.start()
    found = [receive.recv() for receive, _ in pipes]
    for child in children:
        child.join()
    for rows, dtype in ((5, torch.float32), (1, torch.bfloat16)):
        parts = [part_of_sum(rank, rows, dtype) for rank in range(ranks)]
        total = ((parts[0].float() + parts[1].float()) + parts[2].float()).to(dtype)
        assert all(each[rows][0] == total.tolist() for each in found)
        assert sum(each[rows][1] for each in found) == 2 * (ranks - 1) * total.nbytes
    assert all(each[0] == [[], 0] for each in found)
    assert found[0]["gathered"] == torch.arange(20.0).view(2, 10).tolist()


def sent_by_equation_7(shape, rows, logits, ranks, value_bytes):
    """Bytes that all ranks send for `rows` rows, `logits` of which have logits: the last layer computes only these, and
    all ranks but the first send their part of the logits, which NanoFlow leaves out."""
    devices = Devices(ranks, 1.0, 1.0, 1.0)

    def whole(rows):
        *_, communication = operations(shape, Lengths(1, 1), rows, devices)
        return communication.network_bytes / VALUE_BYTES * value_bytes

    layers = shape.num_layers
    sums = whole(rows) * (layers - 1) / layers + whole(logits) / layers
    return sums + logits * shape.vocab * value_bytes * (ranks - 1) / ranks


@pytest.mark.parametrize(
    ("model", "ranks", "policy"),
    [
        ("opt", 2, SWEEP),
        pytest.param("llama", 2, {"schedule": "zigzag", "gpu_batch_size": 2, "num_gpu_batches": 2,
                                  "weights": (0.0, 0.3, 0.7)}, marks=pytest.mark.slow),
        pytest.param("opt", 4, {"schedule": "row", "gpu_batch_size": 3, "cache": (0.0, 0.5, 0.5), "prefill_chunk": 6},
                     marks=pytest.mark.slow),
    ],
    ids=str,
    indirect=["model"],
)  # fmt: skip
def test_answers_of_the_ranks_are_those_of_one_process(model, reference, cache, ranks, policy):
    requests = requests_of(7, 6)
    pairs = [((5, 6, 7), (8, 9)), ((11,), tuple(range(12, 40)))]
    engine, report = load(model, cache, tensor=ranks, **policy)
    assert report.policy.tensor == ranks
    tokens = answers(engine, requests)
    assert all_greedy(reference, requests, tokens)
    metrics, stats = engine.trace().metrics, engine.stats()
    rows = round(metrics["passes"] * metrics["rows_per_pass"])
    sent = sum(metrics[f"rank{rank}_sent_bytes"] for rank in range(ranks))
    assert sent == sent_by_equation_7(model.shape, rows, sum(map(len, tokens.values())), ranks, 4)
    if policy.get("weights"):
        own = metrics["passes"] * stats.pass_weight_bytes
        assert metrics["rank1_weight_bytes_read"] == pytest.approx(own, rel=0.2), "rank 1 reads as much as rank 0 may"
    for found, pair in zip(engine.score(pairs), pairs, strict=True):
        assert found.logprob == pytest.approx(exact_score(reference, *pair).logprob, abs=1e-3)
    unfinished = engine.generate(requests)
    next(unfinished)
    unfinished.close()
    assert answers(engine, requests) == tokens, "again, after scores and a run that was ended"
    engine.close()


@pytest.mark.slow
def test_parts_are_quantized_as_the_whole_is(tmp_path, cache):
    model = tiny(tmp_path / "llama", "llama", intermediate_size=128)
    policy = {**SWEEP, "kv_bits": 8, "weight_bits": 4, "group_size": 32}
    requests = requests_of(7, 6)
    alone, _ = load(model, cache, **policy)
    found = answers(alone, requests)
    pairs = [(request.prompt, found[request.id]) for request in requests]
    expected = alone.score(pairs)
    alone.close()
    engine, _ = load(model, cache, tensor=2, **policy)
    scores = engine.score(pairs)
    engine.close()
    for one, other in zip(scores, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=0.02), "a value may be rounded to the next code"


@pytest.mark.parametrize("policy", [SWEEP, pytest.param({"schedule": "row", "gpu_batch_size": 2},
                                                        marks=pytest.mark.slow)], ids=str)  # fmt: skip
def test_experts_are_divided_by_rank(mixture, cache, policy):
    reference = transformers.AutoModelForCausalLM.from_pretrained(mixture.path).eval()
    engine, _ = load(mixture, cache, tensor=2, **policy)
    requests = requests_of(5, 5)
    tokens = answers(engine, requests)
    used = engine.stats().experts
    engine.close()
    assert all_greedy(reference, requests, tokens)
    assert all(len(counts.rows) == 4 and sum(counts.rows) == 2 * counts.tokens for counts in used.values())


@pytest.mark.slow
@pytest.mark.parametrize("model", ["opt"], indirect=True)
def test_a_rank_that_dies_is_named(model, cache):
    engine, _ = load(model, cache, tensor=4, **SWEEP)
    check_a_killed_rank_is_named(engine, rank_pids()[0])
