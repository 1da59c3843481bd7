"""Predictions and searches against published figures."""

import itertools
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from scipy.stats import spearmanr

from engines.models.shapes import shape
from engines.planning import fit, published
from engines.planning.closed_form_planner import ClosedFormPlanner
from engines.planning.engine_cost_models import FILE, engine_cost_model
from engines.planning.planned_job import PlannedJob
from engines.planning.planners import planner_for
from engines.planning.search import SearchSpace, search
from tests.planning import PROFILES, best

MODEL_PAGE = (Path(__file__).parents[2] / "docs" / "model.md").read_text()
PERCENT = r" ([\d.]+) % \|"
#: Of the page's table of errors: hardware, paper, its table, cells, cells of other tables, and four errors.
HELD_OUT = re.findall(
    rf"^\| (\w+) \| ([A-Z][A-Za-z-]+) (\d+)[^|]*\| (\d+) \| (\d+) \|{PERCENT * 4}$", MODEL_PAGE, re.MULTILINE
)
#: Of its table by engine: hardware, engine, cells with their median and largest error, fitted cells with their median.
BY_ENGINE = re.findall(
    rf"^\| (\w+) \| ([A-Z][\w-]+)[^|]*\| (\d+) \|{PERCENT * 2} (\d+), ([\d.]+) %", MODEL_PAGE, re.MULTILINE
)
#: ZeRO's passes took 1.3 times as long there as with the other prompts of the same models, for reasons unknown.
ZERO_AT_256 = "14-16 deepspeed 6.7b 256+32 32x1 w0/100 c100/0"


@pytest.fixture(scope="module")
def outcomes() -> list[published.Outcome]:
    return published.evaluate(published.cells(), PROFILES)


def unseen(outcomes: list[published.Outcome], machine: str, *engines: str) -> list[published.Outcome]:
    """What no constant was fitted on."""
    return [
        o for o in outcomes
        if o.cell.hardware == machine and o.cell.engine in engines and o.cell.unseen and o.error is not None
    ]  # fmt: skip


def median(outcomes: list[published.Outcome]) -> float:
    return statistics.median(abs(o.error or 0.0) for o in outcomes)


def percent(error: float) -> str:
    """As the page about the model writes it."""
    return f"{100 * error:.1f}"


def test_errors_on_cells_that_nothing_was_fitted_on(outcomes: list[published.Outcome]) -> None:
    for engine, limit in (("flexgen_ref", 0.15), ("accelerate", 0.30), ("deepspeed_zero", 0.30)):
        assert median(unseen(outcomes, "t4_gcp", engine)) <= limit
    for engine in ("flexgen_ref", "deepspeed_zero", "lm_offload"):
        assert median(unseen(outcomes, "a100_40g", engine)) <= 0.20


def test_errors_on_tables_that_were_left_out_of_the_fit() -> None:
    rows = {(row["hardware"], row["table"]): row for row in fit.held_out(PROFILES)}
    assert {"14", "15", "16", "4", "21", "3", "24"} == {table for machine, table in rows if machine == "t4_gcp"}
    for (machine, table), row in rows.items():
        assert row["median error"] <= (0.20 if table in ("3", "24", "15") or machine == "a100_40g" else 0.08), table
    for machine in ("t4_gcp", "a100_40g"):
        assert len(fit.fitted_constants(machine)) <= len(fit.fitted_cells(machine))
    quoted = {
        (machine, table if paper == "FlexGen" else f"{paper} {table}"): found
        for machine, paper, table, *found in HELD_OUT
    }
    assert quoted.keys() == rows.keys()
    for key, (cells, others, median_error, _, largest, shipped) in quoted.items():
        row = rows[key]
        assert (int(cells), int(others)) == (row["cells"], row["fitted on others"])
        exact = (row["median error"], row["largest"], row["median with all"])
        assert [median_error, largest, shipped] == list(map(percent, exact)), key


def test_errors_by_engine_are_those_that_the_page_has(outcomes: list[published.Outcome]) -> None:
    names = {
        "FlexGen": "flexgen_ref",
        "Accelerate": "accelerate",
        "DeepSpeed": "deepspeed_zero",
        "LM-Offload": "lm_offload",
    }
    assert len(BY_ENGINE) == 6
    for machine, engine, cells, median_error, largest, fitted, median_fitted in BY_ENGINE:
        errors: dict[bool, list[float]] = {True: [], False: []}
        for o in outcomes:
            if (
                (o.cell.hardware, o.cell.engine) == (machine, names[engine])
                and o.error is not None
                and not o.cell.repeated
            ):
                errors[o.cell.fitted].append(abs(o.error))
        assert (len(errors[False]), len(errors[True])) == (int(cells), int(fitted)), (machine, engine)
        exact = (statistics.median(errors[False]), max(errors[False]), statistics.median(errors[True]))
        assert [median_error, largest, median_fitted] == list(map(percent, exact)), (machine, engine)


def test_at_most_a_third_of_the_cells_is_fitted(outcomes: list[published.Outcome]) -> None:
    for machine in ("t4_gcp", "a100_40g"):
        cells = [o.cell for o in outcomes if o.cell.hardware == machine and o.error is not None]
        assert 0 < sum(cell.fitted for cell in cells) <= len(cells) / 3
    labels = {cell.label for cell in published.cells()}
    assert labels >= published.FITTED
    assert len(labels) == len(published.cells())


def test_every_fitted_constant_names_its_cells() -> None:
    constants_of = {engine: entry["constants"] for engine, entry in yaml.safe_load(FILE.read_text()).items()}
    for machine in ("t4_gcp", "a100_40g"):
        cells = fit.fitted_cells(machine)
        labels = {cell.label for cell in cells}
        fitted = {path: set(cells) for path, cells in PROFILES[machine].fitted.items()}
        assert all(cells == labels for cells in fitted.values())
        paths = [constant.path for constant in fit.fitted_constants(machine)]
        of_engines = {f"{engine}.{name}" for engine, constants in constants_of.items()
                      for name, constant in constants.items() if constant.get("fitted_on") == machine}  # fmt: skip
        for path in paths:
            assert path in of_engines or any(path.startswith(key) for key in fitted), path
    for constants in constants_of.values():
        assert all(constant["source"] for constant in constants.values())


def test_a_fit_without_cells_stays_at_its_start_and_with_them_it_moves_towards_the_figures() -> None:
    profile = PROFILES["a100_40g"]
    starts = {constant.path: constant.start for constant in fit.fitted_constants("a100_40g")}
    assert fit.fit(profile, []).values == pytest.approx(starts)
    cell = fit.fitted_cells("a100_40g")[1]
    before, after = (fit.fit(profile, cells).outcomes([cell])[0].error or 0.0 for cells in ([], [cell]))
    assert abs(after) < abs(before)


def test_predictions_rank_as_the_figures_do(outcomes: list[published.Outcome]) -> None:
    t4 = unseen(outcomes, "t4_gcp", "flexgen_ref", "accelerate", "deepspeed_zero")
    assert len(t4) >= 45
    assert spearmanr([o.predicted for o in t4], [float(o.cell.figure or 0) for o in t4]).statistic >= 0.97


def test_what_ran_fits_and_what_ran_out_of_memory_does_not(outcomes: list[published.Outcome]) -> None:
    t4 = [o for o in outcomes if o.cell.hardware == "t4_gcp"]
    assert [o.cell.label for o in t4 if o.cell.figure and not o.fits] == []
    tables = [o for o in t4 if o.cell.table in ("4", "21") and o.cell.figure is None]
    assert len(tables) == 6
    assert not any(o.fits for o in tables)


def test_what_quantization_and_the_hosts_attention_change_has_the_right_sign(
    outcomes: list[published.Outcome],
) -> None:
    compared = {o.cell.name: o for o in outcomes if o.cell.table == "LM-Offload 1"}
    assert len(compared) == 5
    for one, other in itertools.combinations(compared.values(), 2):
        assert (one.predicted > other.predicted) == (float(one.cell.figure or 0) > float(other.cell.figure or 0))


def test_four_machines_are_within_a_fifth_of_flexgen_s_table_3_but_for_opt_175b(
    outcomes: list[published.Outcome],
) -> None:
    """With the policies of FlexGen's own scripts. OPT-175B's weights are unpinned there, too many for pinned memory:
    its figures lie between those of the rate at which pageable memory is copied and of pinned memory's."""

    def named(name: str) -> dict[str, published.Outcome]:
        return {o.cell.name + o.cell.model.rpartition("-")[2]: o for o in outcomes if o.cell.name.startswith(name)}

    four, one = named("flexgen on four"), named("flexgen on one")
    assert len(four) == 6
    errors = {name: o.error or 0.0 for name, o in four.items()}
    assert all(abs(error) <= 0.2 for name, error in errors.items() if "175b" not in name)
    for size in ("6.7b", "30b"):  # decoding scales by more than the machines, generation by less than decoding
        together, alone = (found[f"flexgen on {count}, decoding{size}"].predicted
                           for found, count in ((four, "four machines"), (one, "one machine")))  # fmt: skip
        assert together > 4 * alone
    pinned = replace(PROFILES["t4_gcp"], host=replace(PROFILES["t4_gcp"].host, memory=400e9))
    unpinned = [o for name, o in four.items() if "175b" in name]
    for slow, fast in zip(unpinned, published.evaluate([o.cell for o in unpinned], {"t4_gcp": pinned}), strict=True):
        assert slow.predicted < float(slow.cell.figure or 0) < fast.predicted < 1.5 * float(slow.cell.figure or 0)


def test_a_figure_is_an_interval_of_half_its_last_digit() -> None:
    assert published.error_of(0.0149, "0.01") == 0
    assert published.error_of(0.0165, "0.01") == pytest.approx(0.1)
    assert published.error_of(0.45, "1") == pytest.approx(-0.1)


@pytest.mark.parametrize("engine", ["offload", "flexgen_ref"])
def test_the_searched_policy_is_at_least_as_good_as_the_published_one(engine: str) -> None:
    """By the model's own word: what the paper's search found is within the space."""
    for cell in published.cells():
        if cell.table == "14-16" and cell.name == "flexgen" and cell.lengths.prompt == 512:
            job = PlannedJob(shape(cell.model), [cell.lengths])
            plans = ClosedFormPlanner(job, PROFILES["t4_gcp"], engine_cost_model(engine))
            ours = best(plans, SearchSpace(schedules=("row", "zigzag"))).prediction.throughput_tok_s
            assert ours >= 0.97 * plans.predict(cell.policy).throughput_tok_s


def test_a_search_finds_the_batches_and_throughputs_that_the_baselines_reached() -> None:
    """The paper tried batches of its own: for OPT-30B and 256 tokens it has 12 of ZeRO where doubling stops at 8."""
    for cell in published.cells():
        if cell.table != "14-16" or cell.engine not in ("accelerate", "deepspeed_zero"):
            continue
        plans = planner_for(PlannedJob(shape(cell.model), [cell.lengths]), PROFILES["t4_gcp"],
                            engine_cost_model(cell.engine), 1)  # fmt: skip
        found = search(plans, SearchSpace(["row"], cpu_attention=(False,))).best
        if cell.figure is None:
            assert found is None, cell.label
            continue
        assert found is not None, cell.label
        policy, asked = found.policy, cell.policy
        assert policy.gpu_batch_size == (8 if asked.gpu_batch_size == 12 else asked.gpu_batch_size), cell.label
        assert (policy.weights, policy.cache) == (asked.weights, asked.cache), cell.label
        error = published.error_of(found.prediction.throughput_tok_s, cell.figure)
        assert abs(error) < (0.42 if cell.label == ZERO_AT_256 else 0.3), cell.label


def test_flexgens_search_finds_block_sizes_and_throughputs_like_the_published() -> None:
    for cell in published.cells():
        if (cell.table, cell.name) == ("14-16", "flexgen") and "6.7b" not in cell.model:
            plans = planner_for(PlannedJob(shape(cell.model), [cell.lengths]), PROFILES["t4_gcp"],
                                engine_cost_model("flexgen_ref"), 1)  # fmt: skip
            found = best(plans, SearchSpace(("zigzag",)))
            assert 0.5 < found.policy.block_size / cell.policy.block_size < 2, cell.label
            assert abs(published.error_of(found.prediction.throughput_tok_s, cell.figure or "")) < 0.3, cell.label
