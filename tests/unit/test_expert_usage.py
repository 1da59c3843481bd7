"""Experts are counted as they are used, the counts are kept, and the hottest are held in memory: answers stay."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engines.models import shapes
from engines.offload.memory.expert_usage import ExpertUsage, MixtureCounts
from engines.offload.memory.layout import Matrix, tiles_of
from engines.offload.memory.plan import evenly, hottest
from engines.offload.memory.rows import io_compute_balance_rows
from engines.offload.memory.storage import Plain
from engines.offload.weights.kept_usage import KeptUsage, kept_for
from engines.planning.host_planner import HostPlanner, place_model
from engines.planning.machine import Machine
from engines.planning.planned_job import PlannedJob
from engines.planning.workload import Lengths
from harness import hardware
from harness.api import GenerationRequest, LocalModel, OffloadPolicy, SamplingParams
from harness.cli.main import cli
from tests.offload import all_greedy, answers, prepare, requests_of, save
from tests.unit.test_offload_architectures import MODELS

MIXTURES = ("mixtral", "qwen3-moe", "olmoe")
PLAIN = Plain("float32")


def folder_of(tmp_path, name, **changes):
    kind, config = MODELS[name]
    return save(tmp_path / name, kind, **config | changes)


def route_by(folder, router):
    """Gives every mixture of a model this router's weights, by expert, times ones."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("gate.weight"):
            tensors[name] = torch.tensor(router)[:, None].expand_as(tensor).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def kept_files(cache):
    return sorted(cache.glob("expert_usage-*.json"))


@pytest.fixture
def fresh(cache):
    """The cache, without counts."""
    for file in kept_files(cache):
        file.unlink()
    return cache


counts_of = st.integers(1, 12).flatmap(
    lambda size: st.builds(
        lambda passes: sum(passes[1:], passes[0]),
        st.lists(
            st.lists(st.integers(0, 30), min_size=size, max_size=size).map(
                lambda rows: MixtureCounts.of_pass(sum(rows), rows)
            ),
            min_size=1,
            max_size=8,
        ),
    )
)


@given(counts_of, st.floats(0.01, 1.0), st.integers(1, 500))
def test_what_is_used_more_is_read_more_probably_and_so_is_it_by_more_rows(counts, share, rows):
    experts = range(len(counts.rows))
    found = [counts.read_probability(e, rows, share) for e in experts]
    assert all(0 < p <= 1 for p in found)
    for a in experts:
        for b in experts:
            if counts.rows[a] <= counts.rows[b] and counts.used[a] <= counts.used[b]:
                assert found[a] <= found[b]
    assert all(counts.read_probability(e, rows + 1, share) >= found[e] for e in experts)


def test_passes_whose_rows_are_alike_read_fewer_experts_than_chance_says():
    """Ten passes of 100 rows, each of which sends all its rows to one expert."""
    passes = [MixtureCounts.of_pass(100, [100 * (e == i) for e in range(10)]) for i in range(10)]
    counts = sum(passes[1:], passes[0])
    assert counts == MixtureCounts(1000, 10, (100,) * 10, (1,) * 10)
    assert counts.read_probability(0, 100, 0.1) == pytest.approx(2 / 11), "1 - 0.9 ** 100 by chance"
    assert counts.read_probability(0, 1, 0.1) == pytest.approx(0.1, rel=1e-3)
    assert counts.read_probability(0, 10_000, 0.1) > 0.99, "nobody has counted passes of so many rows"


def tiles_and_usage(rows_of, size):
    """Two layers of a dense matrix and a mixture each."""
    matrices = []
    for layer in ("a", "b"):
        matrices.append(Matrix(f"{layer}.q", 64, 64, layer))
        matrices += [Matrix(f"{layer}.mix.up", 64, 64 + 8 * e, layer, expert=e) for e in range(size)]
    experts = {m.name: (m.mixture, m.expert) for m in matrices if m.expert is not None}
    counted = {f"{layer}.mix": MixtureCounts.of_pass(max(sum(rows_of), 1), rows_of) for layer in ("a", "b")}
    return tiles_of(matrices, [PLAIN] * len(matrices)), ExpertUsage(experts, 1 / size, counted)


@example([3, 5], 8, 1.0)  # room for all, to the byte
@given(st.lists(st.integers(0, 200), min_size=1, max_size=10), st.integers(1, 64), st.floats(0, 1.1))
def test_residents_save_at_least_what_an_even_choice_saves(rows_of, rows, part):
    tiles, usage = tiles_and_usage(rows_of, len(rows_of))
    room = int(part * sum(tile.nbytes for tile in tiles))
    probabilities = usage.read_probabilities(tiles, rows)
    chosen = hottest(tiles, range(len(tiles)), room, probabilities)
    assert sum(tiles[i].nbytes for i in chosen) <= room
    largest = max(tile.nbytes for tile in tiles)

    def saved(residents):
        return sum(tiles[i].nbytes * probabilities[i] for i in residents)

    assert saved(chosen) >= saved(evenly(tiles, range(len(tiles)), room)) * (1 - 1 / 16) - 2 * largest
    if part >= 1:
        assert len(chosen) == len(tiles)
    flat = [1.0] * len(tiles)
    assert hottest(tiles, range(len(tiles)), room, flat) == evenly(tiles, range(len(tiles)), room)


def test_what_every_pass_reads_is_held_before_any_expert_and_hot_ones_before_cold():
    tiles, usage = tiles_and_usage([0, 90, 0, 10], 4)
    probabilities = usage.read_probabilities(tiles, 1)
    names = {tile.index: tile.matrix for tile in tiles}

    def held(nbytes):
        return {names[i] for i in hottest(tiles, range(len(tiles)), nbytes, probabilities)}

    dense = {"a.q", "b.q"}
    both = sum(tile.nbytes for tile in tiles if tile.matrix in dense)
    hot = [f"{layer}.mix.up[1]" for layer in ("a", "b")]
    assert held(both) == dense
    assert held(both + sum(tile.nbytes for tile in tiles if tile.matrix in hot)) == {*dense, *hot}


@pytest.mark.parametrize("name", MIXTURES)
def test_counts_make_hot_experts_resident_and_leave_answers_as_they_are(name, tmp_path, fresh, load):
    folder = folder_of(tmp_path, name)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    model, requests = prepare(folder), requests_of(3, 4)
    policy = {"schedule": "row", "gpu_batch_size": 1}
    streamed, report = load(model, fresh, **policy, weights=(0.0, 0.0, 1.0))
    assert any("taken to be uniform" in note for note in report.notes)
    first = answers(streamed, requests)
    stats = streamed.stats()
    config = transformers.AutoConfig.from_pretrained(folder)
    assert len(stats.experts) == config.num_hidden_layers
    for counts in stats.experts.values():
        assert sum(counts.rows) == config.num_experts_per_tok * counts.tokens
        assert stats.passes <= counts.passes + len(requests), "the last layer routes only rows with logits"
    streamed.close()

    held, report = load(model, fresh, **policy, weights=(0.0, 0.6, 0.4))
    assert any(f"as counted in {max(c.passes for c in stats.experts.values())} passes" in n for n in report.notes)
    assert answers(held, requests) == first
    assert all_greedy(reference, requests, first)
    resident = {held.loaded.tiles[i].matrix for i in held.loaded.plan.resident}
    for mixture, counts in stats.experts.items():
        hottest_expert = max(range(len(counts.rows)), key=lambda e: counts.rows[e])
        coldest = min(range(len(counts.rows)), key=lambda e: counts.rows[e])
        parts = [
            {name for name in resident if name.startswith(mixture) and name.endswith(f"[{e}]")}
            for e in (hottest_expert, coldest)
        ]
        assert len(parts[0]) >= len(parts[1])
    held.close()


def test_a_router_that_sends_all_to_one_keeps_that_one_and_nobody_reads_the_others(tmp_path, fresh, load):
    """The norm's output is positive on average for some tokens and negative for others: only equal routers tie."""
    folder = route_by(folder_of(tmp_path, "mixtral", num_experts_per_tok=1), [0.0] * 4)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    model, requests = prepare(folder), requests_of(4, 4)
    engine, _ = load(model, fresh, gpu_batch_size=4, weights=(0.0, 0.0, 1.0))
    first = answers(engine, requests)
    counted = engine.stats().experts
    engine.close()
    for counts in counted.values():
        [chosen] = [e for e, rows in enumerate(counts.rows) if rows]
        assert counts.rows[chosen] == counts.tokens
        assert counts.used[chosen] == counts.passes
    engine, _ = load(model, fresh, gpu_batch_size=4, weights=(0.0, 0.5, 0.5))
    resident = {engine.loaded.tiles[i].matrix for i in engine.loaded.plan.resident}
    used = {m.name for m in engine.loaded.meta_model.matrices if m.expert in (None, chosen)}
    assert resident <= used or used <= resident
    before = engine.stats().weight_bytes_read
    assert answers(engine, requests) == first
    assert all_greedy(reference, requests, first)
    passes = engine.stats().passes
    assert engine.stats().weight_bytes_read - before <= passes * engine.stats().pass_weight_bytes
    engine.close()


def test_one_expert_is_a_dense_layer(tmp_path, fresh, load):
    folder = folder_of(tmp_path, "mixtral", num_local_experts=1, num_experts_per_tok=1)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    requests = requests_of(5, 3)
    for weights in ((0.0, 0.0, 1.0), (0.0, 0.5, 0.5)):
        engine, _ = load(prepare(folder), fresh, gpu_batch_size=3, weights=weights)
        assert all_greedy(reference, requests, answers(engine, requests))
        assert all(c.rows == (c.tokens,) and c.used == (c.passes,) for c in engine.stats().experts.values())
        engine.close()


def test_counts_add_up_over_loads_and_a_dense_model_keeps_none(tmp_path, fresh, load):
    model = prepare(folder_of(tmp_path, "mixtral"))
    request = [GenerationRequest("a", (7, 8, 9), SamplingParams(4, ignore_eos=True))]
    passes = []
    for _ in range(2):
        engine, _ = load(model, fresh)
        answers(engine, request)
        answers(engine, request)
        engine.close()
        [file] = kept_files(fresh)
        passes.append({m: c["passes"] for m, c in json.loads(file.read_text())["mixtures"].items()})
    assert {m: 2 * n for m, n in passes[0].items()} == passes[1]
    engine, _ = load(prepare(save(tmp_path / "dense", "llama")), fresh)
    answers(engine, request)
    assert engine.stats().experts == {}
    assert len(kept_files(fresh)) == 1


MATRICES = [Matrix("l.mix.up", 8, 8, "l", expert=e) for e in range(3)]
COUNTED = MixtureCounts(10, 2, (10, 5, 0), (2, 1, 0))


def kept(cache, digest="d", matrices=MATRICES):
    return KeptUsage(cache, LocalModel("folder", None, 0, "float32", digest), matrices)


@pytest.fixture
def file(tmp_path):
    one = kept(tmp_path)
    one.add("l.mix", COUNTED)
    one.keep()
    assert kept(tmp_path).read() == {"l.mix": COUNTED}
    [path] = kept_files(tmp_path)
    return path


def changed(**changes):
    return lambda text: json.dumps(
        json.loads(text) | {"mixtures": {"l.mix": json.loads(text)["mixtures"]["l.mix"] | changes}}
    )


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[1]",
        lambda text: "\x00" * 100,
        lambda text: "[" * 100_000,
        lambda text: text.replace('"d"', '"e"'),
        lambda text: json.dumps(json.loads(text) | {"mixtures": 3}),
        changed(rows=[10, 5]),
        changed(rows=[11, 5, 0]),
        changed(rows=[-1, 5, 0]),
        changed(rows=["10", 5, 0]),
        changed(used=[3, 1, 0]),
        changed(tokens=None),
        changed(passes=1e400),
    ],
)  # fmt: skip
def test_a_file_that_is_damaged_or_another_models_counts_nothing_and_is_replaced(file, damage):
    file.write_text(damage(file.read_text()))
    one = kept(file.parent)
    assert one.read() == {}
    assert file.name in one.note
    assert "anew" in one.note
    one.add("l.mix", COUNTED)
    one.keep()
    assert kept(file.parent).read() == {"l.mix": COUNTED}


def test_another_model_has_counts_of_its_own(file):
    assert kept(file.parent, "another").read() == {}
    shutil.copy(file, kept(file.parent, "another").path)
    other = kept(file.parent, "another")
    assert other.read() == {}
    assert "another model's" in other.note


def test_a_cache_that_cannot_be_written_only_forgets(tmp_path):
    one = kept(tmp_path)
    one.path.mkdir()
    one.add("l.mix", COUNTED)
    one.keep()
    assert one.counts == {"l.mix": COUNTED}
    assert kept(tmp_path).read() == {}


def test_old_counts_give_way(tmp_path):
    """A model that is asked other things has other experts hot, however many tokens it has counted before."""
    one = kept(tmp_path)
    one.add("l.mix", MixtureCounts(1 << 21, 100, (1 << 21, 0, 0), (100, 0, 0)))
    one.keep()
    for _ in range(6):
        one.add("l.mix", MixtureCounts(1 << 20, 50, (0, 1 << 20, 0), (0, 50, 0)))
        one.keep()
    counts = kept(tmp_path).read()["l.mix"]
    assert counts.rows[1] > 20 * counts.rows[0]
    assert replace(counts, tokens=sum(counts.rows)) == counts


@given(st.integers(0, 400), st.integers(1, 16), st.floats(0.2, 50.0), st.floats(0.01, 0.99))
def test_at_the_balance_a_pass_computes_as_long_as_it_reads_and_below_it_does_not(fixed, size, ratio, share):
    """`ratio`: FLOP for each byte of the disk; some bytes are read in every pass, those of experts as needed."""
    shape = shapes.shape("twin/quarter-of-olmoe")
    usage = ExpertUsage(share=share)

    def nbytes(rows):
        return 1e6 * (fixed + size * (1 - (1 - usage.share) ** rows))

    flops = ratio * shape.flops(1, 0, 0)
    rows = io_compute_balance_rows(nbytes, 1e6, flops, shape)

    def computes(count):
        return count * shape.flops(1, 0, 0) / flops

    assert rows == 1 or computes(rows - 1) < nbytes(rows - 1) / 1e6
    assert computes(rows) >= nbytes(rows) / 1e6 * (1 - 1e-9)
    assert io_compute_balance_rows(lambda rows: 0, 1e6, flops, shape) == 1
    waiting = io_compute_balance_rows(nbytes, 1e6, flops, shape, wait_s := computes(rows + 7.5))
    assert waiting == rows + 8 and computes(waiting) >= wait_s, "prompts fill the time in which links are waited for"


def planned(schedule="sweep", batch=128, model="twin/quarter-of-olmoe", lengths=(128, 16), counts=(), **policy):
    """The plan on the shipped laptop with a disk of 1 GB/s, within 1.2 GiB in bfloat16."""
    job = PlannedJob(shapes.shape(model), [Lengths(*lengths)], dtype="bfloat16", budget=1.2 * 2**30, counts=counts)
    laptop = hardware.load("laptop_cpu")
    host, disk = replace(laptop.host, dtype="bfloat16"), replace(laptop.disk, read=1e9)
    machine = replace(laptop, host=host, disk=disk)
    asked = OffloadPolicy(batch, schedule=schedule, **policy)
    placed = place_model(job, asked, int(job.budget), host.cores, Machine(machine))
    planner = HostPlanner(job, machine)
    return placed, planner.predict(asked)


def test_a_sweep_takes_the_prompts_that_keep_a_mixtures_batch_running():
    """Of 128 + 16 tokens a pass of n sequences takes 8 n prompt tokens, of which an expert gets an eighth."""
    chunks = {n: planned(batch=n)[0].plan.chunk for n in (8, 128, 256)}
    assert chunks == {8: 512, 128: 1024, 256: 2048}
    assert planned(batch=1024, lengths=(512, 8))[0].plan.chunk <= 512 * 8
    assert planned("row", 64)[0].plan.chunk == 512
    assert planned(prefill_chunk=300)[0].plan.chunk == 300
    assert planned(model="facebook/opt-1.3b")[0].plan.chunk == 512


def test_larger_prefills_make_a_mixture_faster_where_the_disk_limits():
    more, fewer = planned()[1], planned(prefill_chunk=512)[1]
    assert more.throughput_tok_s > 1.15 * fewer.throughput_tok_s


def test_a_simulated_pass_reads_the_experts_that_its_rows_need():
    placed, prediction = planned(batch=1, lengths=(1, 9))
    per_pass = placed.pass_bytes(1)
    assert per_pass < 0.25 * placed.streamed_bytes
    passes = 9 * prediction.requests
    assert prediction.used["disk"] * 1e9 == pytest.approx(passes * per_pass, rel=0.1)
    assert prediction.fraction_of_roofline <= 1


def test_hot_experts_in_memory_make_a_plan_faster():
    hot = MixtureCounts(1000, 1000, (990, 4, 2, 2, 1, 1, 0, 0), (990, 4, 2, 2, 1, 1, 0, 0))
    uniform, measured = (planned(batch=1, lengths=(1, 30), counts=counts)[1] for counts in ((), [hot] * 4))
    assert measured.throughput_tok_s > 1.5 * uniform.throughput_tok_s


def test_a_plan_says_whose_use_of_experts_it_assumes(tmp_path):
    def made(*options):
        run = CliRunner().invoke(
            cli,
            ["plan", "twin/quarter-of-olmoe", "--prompt-len", "1", "--gen-len", "4", "--hardware", "laptop_cpu",
             "--cache-dir", str(tmp_path), "--policy", '{"schedule": "row", "gpu_batch_size": 2}', *options],
        )  # fmt: skip
        assert run.exit_code == 0, run.output
        return run.output

    assert "experts: use taken to be uniform, as none is counted yet; a pass needs 23% of their bytes" in made()
    matrices = [Matrix(f"model.layers.{n}.mlp.up", 8, 8, "l", expert=e) for n in range(4) for e in range(64)]
    path = tmp_path / "models" / "twin--quarter-of-olmoe-bfloat16-01234567"
    one = KeptUsage(tmp_path, LocalModel(str(path), None, 0, "bfloat16", "d"), matrices)
    rows = [100 if e < 8 else 0 for e in range(64)]
    for layer in range(4):
        for _ in range(7):
            one.add(f"model.layers.{layer}.mlp", MixtureCounts.of_pass(100, rows))
    one.keep()
    found = json.loads(made("--json"))["experts"]
    assert found == {"usage": "measured", "passes": 7, "of": path.name, "read": pytest.approx(1 / 8, abs=0.01)}
    assert f"use as counted in 7 passes of {path.name}; a pass needs 13% of their bytes" in made()
    every = made("--engine", "accelerate", "--hardware", "t4_gcp")
    assert "experts: every pass is taken to need all of them" in every
    [file] = kept_files(tmp_path)
    file.write_text(file.read_text().replace("7", "x", 1))
    assert "taken to be uniform" in made()


def test_real_weights_count_before_dummy_ones_and_layers_stay_in_order(tmp_path):
    matrices = [Matrix(f"layers.{n}.mlp.up", 8, 8, "l", expert=0) for n in range(12)]
    for folder, passes in (("models--o--m/snapshots/1234", 1), ("models/o--m-bfloat16-01234567", 9), ("o--mx", 20)):
        one = KeptUsage(tmp_path, LocalModel(str(tmp_path / folder), None, 0, "float32", folder), matrices)
        for n in range(12):
            for _ in range(passes):
                one.add(f"layers.{n}.mlp", MixtureCounts.of_pass(n + 1, [n + 1]))
        one.keep()
    name, counts = kept_for("o/m", tmp_path)
    assert name == "o--m"
    assert [c.tokens for c in counts] == list(range(1, 13))
    assert kept_for("o/other", tmp_path) is None
