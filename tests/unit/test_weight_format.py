"""`weight_format: auto`: the plan of the job decides, once on a machine; and the rates that plans are made with."""

import dataclasses
import json
import math

import pytest
import torch

from engines.offload.backend import host
from engines.offload.backend.base import LoadRequest
from engines.offload.device.host import HostDevice
from engines.offload.engine import OffloadEngine
from engines.offload.kernels import HostKernels
from engines.offload.load_options import choose_option, options
from engines.offload.memory.pass_time import PassRates
from engines.offload.memory.storage import Panels, Plain
from engines.offload.weights import gemm, pass_rates
from engines.offload.weights.kept_choices import KeptChoices
from harness import api
from tests.offload import tiny, with_kernels

MIB = 1 << 20
TIMED = gemm._seconds_per_flop
UNLIMITED = api.HardwareLimits()
ON_DISK = api.OffloadPolicy(4, weights=(0.0, 0.0, 1.0))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("format") / "m", "llama", torch.bfloat16)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Nothing is timed, and weights are kept in panels."""
    monkeypatch.setattr(gemm, "_CLEARLY_FASTER", 1e-9)
    monkeypatch.setattr(gemm, "_seconds_per_flop", lambda trials: [1e-12] * len(trials))
    found = with_kernels(tmp_path / "cache")
    KeptChoices(found).clear()
    yield found
    KeptChoices(found).clear()


@pytest.fixture
def slower(monkeypatch):
    """What products in twelve bits cost, in times of plain ones; and the disk's rate in bytes/s."""
    given = {"products": 1.0, "disk": 1e6}

    def rates(way, hidden, kernels, scratch, limit):
        factor = given["products"] if way.stored == Panels(exact12=True) else 1.0
        return PassRates(given["disk"], 4 * MIB, lambda rows: factor * 1e-9 * rows, 1e10)

    monkeypatch.setattr(host, "pass_rates", rates)
    return given


def decided(model, cache, policy=ON_DISK, limits=UNLIMITED, longest=64, new=8):
    """How weights are to be kept, and why in words."""
    request = LoadRequest(model, policy, limits, api.Job(cache, cache, longest, longest - new // 2, mean_new=new))
    kernels = HostKernels(cache, threads=1)
    try:
        option, why = choose_option(options(request, host.HostBackend(request, kernels, HostDevice())), request)
    finally:
        kernels.close()
    assert {tile.stored.exact12 for tile in option.needs.tiles if isinstance(tile.stored, Panels)} == {
        option.format == "exact12"
    }
    return option.format, why


def test_the_report_says_why(model, cache, slower):
    engine = OffloadEngine()
    report = engine.load(model, ON_DISK, api.HardwareLimits(), api.Job(cache, cache, 64, 60, mean_new=8))
    stored = {tile.stored for tile in engine.loaded.tiles}
    engine.close()
    found, why = decided(model, cache)
    assert found == "exact12" and Panels(exact12=True) in stored and why in report.notes


def test_twelve_bits_where_the_disk_limits_and_plain_where_products_do(model, cache, slower):
    slower["products"] = 3.0
    found, why = decided(model, cache)
    assert found == "exact12" and why.startswith("weights are kept exact12, by the plans for this job (token/s: plain ")
    slower["disk"] = 1e12
    found, why = decided(model, cache, dataclasses.replace(ON_DISK, gpu_batch_size=8))
    assert found == "plain" and "kept plain" in why


def test_two_launches_agree_however_the_machine_is_at_the_second(model, cache, slower):
    first = decided(model, cache)
    slower |= {"products": 50.0, "disk": 1e12}
    assert decided(model, cache) == first
    for changed in (
        {"policy": dataclasses.replace(ON_DISK, gpu_batch_size=3)},
        {"limits": api.HardwareLimits(host_memory=512 * MIB)},
        {"longest": 48},
        {"new": 16},
    ):
        assert decided(model, cache, **changed)[0] == "plain", changed
    assert decided(model, cache) == first
    KeptChoices(cache).clear()
    assert decided(model, cache)[0] == "plain"


def test_what_is_decided_without_rates_is_not_kept(model, cache, slower, monkeypatch):
    with monkeypatch.context() as without:
        without.setattr(host, "pass_rates", lambda *_: None)
        assert decided(model, cache) == ("plain", "weights are kept plain, since the disk could not be measured")
    assert decided(model, cache)[0] == "exact12"


@pytest.mark.parametrize("kept", ["octal: weights are kept octal", "exact12", "plain:", ""])
def test_a_kept_format_that_is_none_is_decided_again(model, cache, slower, kept):
    expected = decided(model, cache)
    path = cache / "gemm_choices.json"
    choices = json.loads(path.read_text())
    [key] = [key for key in choices if key.startswith("weight format")]
    path.write_text(json.dumps(choices | {key: kept}))
    assert decided(model, cache) == expected
    assert json.loads(path.read_text())[key].startswith("exact12: weights")


@pytest.mark.parametrize(
    ("policy", "limits"),
    [
        (api.OffloadPolicy(4), api.HardwareLimits(host_memory=2048 * MIB)),
        (dataclasses.replace(ON_DISK, weight_format="plain"), api.HardwareLimits()),
        (dataclasses.replace(ON_DISK, weight_bits=4), api.HardwareLimits()),
    ],
    ids=["all weights fit", "plain by the policy", "quantized"],
)
def test_where_nothing_is_to_be_decided_nothing_is_said(model, cache, slower, policy, limits):
    assert decided(model, cache, policy, limits) == ("plain", "")


class TestRates:
    @pytest.fixture
    def way(self, cache):
        kernels = HostKernels(cache, threads=1)
        yield gemm.choose_gemm(Plain("bfloat16"), 64, ["bfloat16", "float32"], kernels), kernels
        kernels.close()

    @pytest.fixture
    def measured(self, monkeypatch):
        reads, products = {1 << 20: 1e9, 4 << 20: 2e9, 16 << 20: 2.05e9}, {1: 1e-10, 16: 2e-10, 128: 9e-10, 1024: 7e-9}
        monkeypatch.setattr(pass_rates, "_disk_rates", lambda folder: (dict(reads), {16 << 20: 8e8}))
        monkeypatch.setattr(pass_rates, "seconds_per_value", lambda *arguments: dict(products))
        return reads, products

    def test_the_smallest_reads_that_are_nearly_the_fastest(self, way, measured, tmp_path):
        rates = pass_rates.pass_rates(way[0], 64, way[1], tmp_path, None)
        assert (rates.disk, rates.read_bytes, rates.write) == (2.05e9, 4 << 20, 8e8)
        assert rates.memory == pytest.approx(2 / 1e-10)
        limited = pass_rates.pass_rates(way[0], 64, way[1], tmp_path, 3e8)
        assert limited.disk == limited.write == 3e8

    def test_seconds_between_and_beyond_the_rows_that_were_measured(self, way, measured, tmp_path):
        at = pass_rates.pass_rates(way[0], 64, way[1], tmp_path, None).value_s
        assert at(1) == at(0.5) == 1e-10
        assert at(72) == pytest.approx((2e-10 + 9e-10) / 2)
        assert at(1920) == pytest.approx(7e-9 + (7e-9 - 9e-10))

    def test_rates_are_kept_until_the_machine_is_calibrated(self, way, measured, tmp_path):
        reads, products = measured
        first = pass_rates.pass_rates(way[0], 64, way[1], tmp_path, None)
        reads[16 << 20], products[1024] = 9e9, 1.0
        again = pass_rates.pass_rates(way[0], 64, way[1], tmp_path, None)
        assert (again.disk, again.value_s(1024)) == (first.disk, first.value_s(1024))
        KeptChoices(way[1].cache).clear()
        assert pass_rates.pass_rates(way[0], 64, way[1], tmp_path, None).disk == 9e9

    @pytest.mark.parametrize("kept", ["{", "[1]", '{"a": 1}', '{"4": "x"}', '{"4": 0}', '{"4": null}', "{}"])
    def test_kept_rates_that_are_none_are_measured_again(self, way, measured, tmp_path, kept):
        first = pass_rates.pass_rates(way[0], 64, way[1], tmp_path, None)
        path = way[1].cache / "gemm_choices.json"
        choices = json.loads(path.read_text())
        damaged = {key: kept for key in choices if key.startswith(("read rates", "write rates", "seconds a value"))}
        assert len(damaged) == 3
        path.write_text(json.dumps(choices | damaged))
        assert pass_rates.pass_rates(way[0], 64, way[1], tmp_path, None).disk == first.disk
        assert json.loads(path.read_text()) == choices

    def test_the_machine_itself(self, way, tmp_path, monkeypatch):
        monkeypatch.setattr(gemm, "_seconds_per_flop", TIMED)
        monkeypatch.setattr(pass_rates, "_FILE", 16 << 20)
        rates = pass_rates.pass_rates(way[0], 64, way[1], tmp_path, None)
        assert rates.disk > 0 and rates.read_bytes in pass_rates._READ_BYTES and 0 < rates.write < math.inf
        assert 0 < rates.value_s(1) < rates.value_s(1024)
        assert not list(tmp_path.glob("*.bin")), "no file is left"

    def test_a_disk_that_takes_no_file_gives_no_rates(self, way, tmp_path):
        assert pass_rates.pass_rates(way[0], 64, way[1], tmp_path / "absent", None) is None
