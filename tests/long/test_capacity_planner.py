"""The planner: the smallest fleet, unstable loads named as such, and the command line around it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from engine.errors import ConfigError
from serve_app.capacity.demand import Demand, FleetLevel
from serve_app.capacity.hardware import CHIPS, ModelSpec, chip_named, estimated_kind
from serve_app.capacity.perf_model import FittedTimes, RateTimes, decode_rows_s
from serve_app.capacity.planner import MachineKind, Option, Planner, PlanSettings, one_by_one, sensitivity
from serve_app.capacity.profile import SCHEMA, MachineProfile, read_profile, write_profile
from serve_app.cli.plan import plan
from tests.long.test_capacity_simulator import office

RATES = RateTimes(3000.0, 100.0, (1.0, 1.7, 2.0, 2.25))
OFFICE_LEVEL = FleetLevel(wait_mean_s=3.0, wait_p95_s=10.0)
SETTINGS = PlanSettings(OFFICE_LEVEL, calls_per_run=40, max_runs=1)


def planner(per_hour: float = 750.0, long_share: float = 0.25, **changes: object) -> Planner:
    kind = MachineKind("by hand", RATES, decode_share=1 / 3)
    made = Planner(Demand(office(long_share), per_hour), kind, SETTINGS)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_a_call_costs_what_paper_says() -> None:
    cost = planner().cost
    assert cost.prefill_s == pytest.approx(3.5, rel=0.05)
    assert cost.decode_s == pytest.approx(7.0, rel=0.05)
    assert cost.squared_cv == pytest.approx(0.22, rel=0.2)


def test_more_work_than_capacity_is_reported_and_not_simulated() -> None:
    option = planner(1500).option(4, 1)
    assert not option.stable
    assert not option.meets_slo
    assert option.utilisation == pytest.approx(1.09, rel=0.03)
    assert option.answers is None


def test_the_smallest_fleet_meets_the_level_and_one_less_does_not() -> None:
    found = planner(settings=replace(SETTINGS, calls_per_run=100))
    best = found.smallest(1)
    assert best.meets_slo
    assert best.macs == 4
    assert not found.option(best.macs - 1, 1).meets_slo


def test_a_large_fleet_is_judged_when_it_has_filled() -> None:
    # Slots that gain nothing: whatever is decoded together, 150 machines have 90 machines' worth of work.
    kind = MachineKind("by hand", RateTimes(3000.0, 100.0, (1.0, 1.0)), decode_share=1 / 3)
    settings = PlanSettings(OFFICE_LEVEL, max_runs=1)
    fleet = planner(150 * 0.6 * 3600 / 9.0, long_share=0.0, kind=kind, settings=settings)
    assert fleet.option(150, 2).utilisation == pytest.approx(0.6, rel=0.05)


def test_a_large_office_is_searched_in_growing_steps() -> None:
    best = planner(15_000, long_share=0.0).smallest(1)
    assert best.meets_slo
    # 37.5 machines' worth of work; in a fleet this large little more than that is needed.
    assert 38 <= best.macs <= 44


def test_waiting_alone_is_never_the_only_bound() -> None:
    assert planner().level.e2e_p95_s == pytest.approx(31.5, rel=0.05)
    asked = planner(settings=replace(SETTINGS, level=FleetLevel(e2e_p95_s=20.0)))
    assert asked.level.e2e_p95_s == 20.0


def test_slots_without_gain_trade_waiting_for_slowness() -> None:
    gainless = MachineKind("by hand", RateTimes(3000.0, 100.0), decode_share=1 / 3)
    long_run = replace(SETTINGS, calls_per_run=150)
    one, four = (planner(kind=gainless, settings=long_run).option(3, slots) for slots in (1, 4))
    assert one.answers is not None
    assert one.answers.tpot_s is not None
    assert four.answers is not None
    assert four.answers.wait_s is not None
    assert one.answers.wait_s is not None
    assert four.answers.wait_s.mean < one.answers.wait_s.mean
    assert four.answers.tpot_s is not None
    assert four.answers.tpot_s.p95 > 0.02 > 0.0101 > one.answers.tpot_s.p95


@pytest.mark.parametrize(("long_share", "slots", "binds"), [(0.0, 1, "bandwidth"), (1.0, 4, "prefill")])
def test_what_binds(long_share: float, slots: int, binds: str) -> None:
    assert planner(long_share=long_share, per_hour=100).option(3, slots).binds == binds


def test_memory_binds_when_calls_wait_for_blocks() -> None:
    kind = MachineKind("small", RATES, kv_tokens=lambda _: 30_000, decode_share=1 / 3)
    assert planner(kind=kind).option(4, 4).binds == "memory"


def test_changes_of_mind_are_answered() -> None:
    found = planner()
    changes: dict[str, Option] = dict(sensitivity(found, found.option(4, 2)))
    assert set(changes) == {"prompts twice as long", "twice as many calls (agents)", "one Mac fails"}
    assert changes["one Mac fails"].macs == 3


def test_runs_are_added_until_the_mean_is_known() -> None:
    rough = replace(SETTINGS, calls_per_run=10, max_runs=12, precision=10.0)
    fine = replace(rough, precision=1e-9)
    assert len(planner(settings=rough).simulate(4, 1, 12)) == 4
    assert len(planner(settings=fine).simulate(4, 1, 12)) == 12


def test_a_bigger_chip_is_faster_and_more_memory_holds_more() -> None:
    model = ModelSpec(32e9, 32e9, 4.5, 128 * 1024)
    small, large = (estimated_kind(chip, 128, model) for chip in ("m4-max", "m3-ultra"))
    assert decode_rows_s(large.times, 1) < decode_rows_s(small.times, 1)
    roomy = estimated_kind("m4-max", 256, model)
    assert small.kv_tokens is not None
    assert roomy.kv_tokens is not None
    assert roomy.kv_tokens(4) >= small.kv_tokens(4) > 0


def test_an_unknown_chip_names_the_closest() -> None:
    with pytest.raises(ConfigError) as caught:
        chip_named("m3ultra")
    assert caught.value.fix == "write m3-ultra"
    assert all(chip.bandwidth_gb_per_s > 0 for chip in CHIPS.values())


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    times = FittedTimes(0.01, 0.001, 1e-6, 0.002, 1e-4, 1e-8)
    profile = MachineProfile(SCHEMA, "today", "a machine", "demo", times, 0.02, 0.05, {1: 1.0, 4: 3.1}, 512, 0.5)
    write_profile(profile, tmp_path / "a" / "p.json")
    assert read_profile(tmp_path / "a" / "p.json") == profile
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match=SCHEMA):
        read_profile(tmp_path / "other.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_profile(tmp_path / "missing.json")


APP = typer.Typer()
APP.command()(plan)
PAPER = [
    *("--calls-per-hour", "750", "--peak-factor", "1", "--prompts", "6000:0.75,24000:0.25", "--output-mean", "700"),
    *("--output-cv", "0.6", "--prefill-rate", "3000", "--decode-rate", "100", "--batch-gain", "1,1.7,2.0,2.25"),
    *("--decode-share", "0.3333", "--calls", "200"),
]


@pytest.fixture(autouse=True)
def _one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the command in this process and short."""
    monkeypatch.setattr("serve_app.cli.plan_options.side_by_side", one_by_one)

    def short(level: FleetLevel, calls_per_run: int | None, **settings: object) -> PlanSettings:
        return PlanSettings(level, calls_per_run=(calls_per_run or 4000) // 5, max_runs=1, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr("serve_app.cli.plan_options.PlanSettings", short)


def test_the_paper_calculation_in_json() -> None:
    result = CliRunner().invoke(APP, [*PAPER, "--macs", "4", "--slots", "1", "--json", "--what-if"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    (one,) = answer["options"]
    assert (one["macs"], one["slots"], one["stable"], one["meets_slo"]) == (4, 1, True, True)
    assert {"utilisation", "wait_s", "ttft_s", "e2e_s", "binds"} <= set(one)
    assert one["wait_s"]["mean"] <= one["wait_s"]["p95"] <= one["e2e_s"]["p95"]
    assert len(answer["what_if"]) == 3
    assert all(isinstance(note, str) for note in answer["assumptions"])


def test_an_unstable_load_has_no_numbers_in_json() -> None:
    result = CliRunner().invoke(APP, [*PAPER, "--calls-per-hour", "3000", "--macs", "4", "--slots", "1", "--json"])
    (option,) = json.loads(result.stdout)["options"]
    assert (option["stable"], option["wait_s"], option["e2e_s"]) == (False, None, None)
    assert option["utilisation"] > 1


def test_the_table_for_people() -> None:
    result = CliRunner().invoke(APP, [*PAPER, "--slots", "1", "--macs", "4"])
    assert result.exit_code == 0, result.output
    assert "| 1 | 4 + 1 spare |" in result.stdout
    assert "meets the bounds" in result.stdout
    assert "Assumptions:" in result.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--prompts", "6000"], "name:value"),
        (["--prompts", "six:1"], "'six'"),
        (["--batch-gain", "1,fast"], "'fast'"),
        (["--slots", "two"], "'two'"),
        (["--routing", "magic"], "central or router or pinned"),
        (["--estimate", "m9-ultra"], "m"),
        (["--estimate", "m3-ultra,memry=5"], "write memory"),
        (["--calls-per-hour", "0"], "0 calls an hour"),
        (["--profile", "/nowhere.json"], "bench profile"),
    ],
)
def test_refusals_name_the_cause(options: list[str], said: str) -> None:
    result = CliRunner().invoke(APP, [*options, "--macs", "1"])
    assert result.exit_code == 2
    assert said in result.output
