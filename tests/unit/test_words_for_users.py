"""What errors and tables say to a user: the one command that mends, figures with their units."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import registry
from harness.api import HarnessError, OffloadPolicy
from harness.batch.job import answered_by, job_cell
from harness.builtin import ENGINES
from harness.common.packages import install, install_extra
from harness.common.units import rounded, with_unit
from harness.hardware.calibration import Rate


def test_the_command_that_installs_keeps_to_the_pins_that_there_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert install_extra("gguf") == "pip install 'offload-harness[gguf]'"
    Path("constraints.txt").touch()
    assert install("hqq") == "pip install hqq -c constraints.txt"


def test_a_job_names_the_command_and_no_launcher_which_it_lacks(monkeypatch):
    monkeypatch.setattr(type(ENGINES["llama_cpp"]), "missing", lambda self: ["xllamacpp"])
    with pytest.raises(HarnessError, match="engine llama_cpp needs xllamacpp") as refused:
        job_cell("m", "llama_cpp", "1GiB", (), lambda text: None)
    assert str(refused.value).endswith(f"pip install -r {registry.environment_pins('llamacpp')}")
    assert "launcher" not in str(refused.value)


@pytest.mark.parametrize(
    ("override", "meant"),
    [("mem=1GiB", "--memory"), ("host_memory=1GiB", "'limits.host_memory'"), ("threads=2", "'policy.threads'")],
)
def test_a_job_says_where_a_setting_belongs(override, meant):
    with pytest.raises(HarnessError, match="did you mean") as refused:
        job_cell("m", "fake", "1GiB", (override,), lambda text: None)
    assert meant in str(refused.value)


def test_ranks_of_one_host_share_the_memory_that_is_free(monkeypatch):
    """Where nobody gives a limit; those that torchrun started are on hosts of their own."""
    monkeypatch.setattr("harness.batch.job.free_memory", lambda: 10 << 30)

    def limit(memory, *overrides):
        notes = []
        cell = job_cell("m", "offload", memory, overrides, notes.append)
        assert any("limit" in note for note in notes) is (memory is None and "limits" not in "".join(overrides))
        return cell.limits.host_memory >> 20

    assert limit(None) == 8192
    assert limit(None, "policy.pipeline=2") == 4096
    assert limit("3GiB", "policy.pipeline=2") == 3072
    assert limit(None, "policy.pipeline=2", "limits.host_memory=1GiB") == 1024
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert limit(None, "policy.pipeline=2") == 8192


@given(st.floats(1e-9, 1e15))
def test_a_figure_with_a_unit_keeps_its_value_and_has_no_exponent(value):
    figure, _, unit = with_unit(value, "B/s").partition(" ")
    scale = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
    assert "e" not in figure
    assert float(figure) * scale.get(unit.removesuffix("B/s"), 1.0) == pytest.approx(value, rel=6e-3)


@pytest.mark.parametrize(
    ("shown", "text"),
    [(with_unit(1.82e10, "FLOP/s"), "18.2 GFLOP/s"), (with_unit(4.13e-5, "s"), "41.3 us"), (with_unit(0.5, ""), "0.5"),
     (with_unit(999.9e6, "B/s"), "1 GB/s"), (with_unit(0.0, "s"), "0 s"), (rounded(6.68e5), "668,000"),
     (rounded(0.02514), "0.0251"), (rounded(99.94), "99.9")],
)  # fmt: skip
def test_figures_for_people(shown, text):
    assert shown == text


def test_every_measured_rate_has_a_unit_or_is_a_fraction():
    for name in ("host.flops.256", "host.by_threads.2", "disk.read", "host.cached.4", "host.layer_call_s", "link.h2d"):
        assert Rate(name, 1.0, 1.0, 1.0).unit
    assert not Rate("host.in_passes", 1.0, 1.0, 1.0).unit


@given(st.sampled_from([4, 8, 16]), st.sampled_from([8, 16]), st.sampled_from([32, 64]), st.booleans())
def test_answers_of_other_bits_are_not_mixed_with_those_of_a_job(weight_bits, kv_bits, group_size, overlap):
    """A policy that changes speed alone may go on with them."""
    base = job_cell("m", "fake", "1GiB", (), lambda text: None)
    policy = OffloadPolicy(weight_bits=weight_bits, kv_bits=kv_bits, group_size=group_size, overlap=overlap)
    found = answered_by(replace(base, policy=policy), "digest")
    exact = weight_bits == kv_bits == 16
    assert (found == "digest") is exact
    faster = replace(policy, overlap=not overlap, schedule="sweep", gpu_batch_size=7, compute_dtype="float32")
    assert answered_by(replace(base, policy=faster), "digest") == found
    for other in ({"value_sparsity": 0.5}, {"kv_bits": 4}, {"wire_bits": 8, "pipeline": 2}):
        assert answered_by(replace(base, policy=replace(policy, **other)), "digest") != found
    assert exact or answered_by(replace(base, policy=replace(policy, group_size=128)), "digest") != found
