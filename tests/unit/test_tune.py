"""`harness tune` as a user calls it, on a small model; and `nano_batches: auto`."""

import itertools
import json

import pytest
from click.testing import CliRunner

from harness import api, registry
from harness.cli.main import cli
from harness.common.kept_nano_batches import KeptNanoBatches
from harness.tune import choose
from tests.offload import answers, requests_of, save, tiny, with_kernels

SWEEP = {"schedule": "sweep", "gpu_batch_size": 4}
ORDER = "KQV0 KQV1 O0 UG0 D0 O1 UG1 D1 cut=0.4 attention=0.5"
SMALL = ("--prompt-len", 16, "--gen-len", 3, "--requests", 4)


def run(*arguments, code=0):
    done = CliRunner().invoke(cli, ["tune", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done


@pytest.fixture
def cache(tmp_path):
    return with_kernels(tmp_path / "cache")


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path / "model", "llama")


def test_tuning_ends_with_what_is_kept(folder, cache, monkeypatch):
    """The search is made to find a pipeline of nano-batches, so that it is tried whatever this machine measures."""
    times = []
    found = registry.nano_search().search_measured

    def cut(shape, measured):
        times.append(measured)
        good = api.LayerTimes(1.0, 1e5, 0.0, {1: 1.0}, {"memory": ((0.1, 0.9),)})
        return found(shape, good)

    monkeypatch.setattr(registry.nano_search(), "search_measured", cut)
    done = run("--model", folder, "--memory", "1GiB", "--cache-dir", cache, "--json", *SMALL)
    tuned = json.loads(done.stdout)
    [order] = (tried for tried in tuned["rates"] if tried != "1")
    assert api.NanoOrder.parse(order).nano_batches > 1
    assert "KQV0" in order and {len(rates) for rates in tuned["rates"].values()} == {3}
    assert tuned["kept"] in (1, order)
    assert "measuring attention" in done.stderr
    [measured] = times
    assert measured.weight_s > 0 and measured.attention_s > 0 and measured.cut[1] == 1.0
    assert all(0 < units < 1 and 0 < kept < 1 for points in measured.beside.values() for units, kept in points)
    shape = registry.prepare_model("offload", api.ModelSpec(str(folder)), cache).shape
    assert KeptNanoBatches(cache).get(shape, api.OffloadPolicy()) == tuned["kept"]
    assert all(0 < units < 1 and 0 < share < 1 for units, share in measured.attention)


def test_without_a_shorter_pipeline_none_is_kept(folder, cache, monkeypatch):
    def none(shape, measured):
        one = api.NanoOperation("GEMM-KQV", "compute", 0, 0, (0.0, 1.0), 0.0, 1.0, 1.0)
        return api.NanoPipeline((one,), 1.0)

    monkeypatch.setattr(registry.nano_search(), "search_measured", none)
    told = run("--model", folder, "--memory", "1GiB", "--cache-dir", cache, *SMALL).stdout
    assert "GEMM-KQV   1 of 1" in told and "nano-batches: " not in told
    assert told.splitlines()[-1].startswith("kept for this machine and model shape: none, because the search finds no")


@pytest.mark.parametrize(
    ("setting", "said"),
    [("policy.schedule=row", "nano-batches are parts of a sweep's batch"), ("policy.nano_batches=2", "leave them out"),
     ("limits.device_memory=4GiB", "beside a device set policy.nano_batches"), ("policy.pipeline=2", "one process")],
)  # fmt: skip
def test_what_cannot_be_tuned_is_one_line(setting, said, tmp_path):
    done = run("--model", "m", "--memory", "1GiB", "--cache-dir", tmp_path, "--set", setting, code=2)
    assert said in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_a_sequence_longer_than_the_context_is_one_line(folder, tmp_path):
    done = run("--model", folder, "--memory", "1GiB", "--cache-dir", tmp_path, "--prompt-len", 500, code=2)
    assert "the model's context has 128 tokens" in done.stderr


def test_auto_runs_what_was_kept_and_else_none(tmp_path, cache):
    model, requests = tiny(tmp_path / "m", "llama"), requests_of(5, 4)
    found = {}
    for kept in (None, 2, ORDER):
        if kept is not None:
            KeptNanoBatches(cache).keep(model.shape, api.OffloadPolicy(), kept)
        engine = registry.make_engine("offload", {})
        job = api.Job(tmp_path, cache, 64, 32)
        report = engine.load(model, api.OffloadPolicy(nano_batches="auto", **SWEEP), api.HardwareLimits(), job)
        assert report.policy.nano_batches == (kept or 1)
        found[kept] = answers(engine, requests)
        engine.close()
    assert found[None] == found[2] == found[ORDER]


def test_auto_is_for_a_sweep():
    with pytest.raises(api.UnsupportedError, match="nano_batches is for sweep"):
        refuse = registry.resolve(registry.engine_entry("offload").refuses)
        refuse(api.OffloadPolicy(nano_batches="auto"), api.HardwareLimits(), None)
    api.OffloadPolicy(nano_batches="auto").validate()
    with pytest.raises(api.HarnessError, match="at least 1, or auto"):
        api.OffloadPolicy(nano_batches=0).validate()


def test_nano_batches_are_kept_only_where_every_turn_is_faster():
    assert choose({1: [10.0]})[0] == 1
    assert choose({1: [10, 11, 10], ORDER: [12, 11.5, 12]})[0] == ORDER
    for slow in itertools.permutations([12, 12, 10.5]):
        assert choose({1: [10, 11, 10], ORDER: slow})[0] == 1


def test_what_is_kept_is_of_a_shape_and_its_bits(tmp_path):
    shape = api.ModelShape("opt", 2, 64, 256, 4, 4, 16, 512, 128, 50_000, 200_000)
    kept, policy = KeptNanoBatches(tmp_path), api.OffloadPolicy(schedule="sweep")
    assert kept.get(shape, policy) == 1
    kept.keep(shape, policy, 4)
    assert kept.get(shape, policy) == 4
    assert kept.get(shape, api.OffloadPolicy(weight_bits=4)) == 1
    assert kept.get(api.ModelShape("opt", 3, 64, 256, 4, 4, 16, 512, 128, 50_000, 200_000), policy) == 1
    for damaged in ("", "[]", kept.path.read_text().replace("4", "-1"), kept.path.read_text().replace("4", '"KQV0"')):
        kept.path.write_text(damaged)
        assert kept.get(shape, policy) == 1
    kept.keep(shape, policy, ORDER)
    assert kept.get(shape, policy) == ORDER
