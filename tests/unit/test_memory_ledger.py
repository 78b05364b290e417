"""Memory plans: terms add up, the pool is bounded, refusals name every term, and each fix works when followed."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import load_engine_config
from engine.errors import MemoryPlanError
from engine.memory.ledger import UNMEASURED_SLOTS, MemoryPlan, format_bytes, plan_memory
from engine.memory.plan_inputs import GIB, MIB, MachineMemory, ModelBytes, PlanInputs
from engine.memory.slots import balance_slots

KIB = 2**10
TERMS = (
    "weights",
    "runtime",
    "activations",
    "mlx_cache_limit",
    "state",
    "sampler",
    "kv_window",
    "kv_pool",
    "headroom",
    "foreign",
)

DEMO = ModelBytes(
    weights_bytes=538 * 10**6,
    kv_bytes_per_token=45 * KIB,
    vocab_size=49_152,
    activation_bytes=300 * MIB,
    runtime_bytes=400 * MIB,
)
LINUX = MachineMemory(total_bytes=24 * GIB, available_bytes=22 * GIB, own_bytes=1 * GIB)


def demo(machine: MachineMemory = LINUX, model: ModelBytes = DEMO, **config: Any) -> PlanInputs:
    values = load_engine_config({"slots": 4, **config})
    return PlanInputs.of(values, machine, model, values.max_model_len or 8192)


def apply_fix(inputs: PlanInputs, fix: str) -> PlanInputs:
    """Do what the fix says, as a person would: a key of the configuration, or another machine."""
    if found := re.search(r"a machine with (\d+) GiB", fix):
        total_bytes = int(found[1]) * GIB
        machine = inputs.machine
        grown = dataclasses.replace(
            machine,
            total_bytes=total_bytes,
            available_bytes=(machine.available_bytes or 0) + total_bytes - machine.total_bytes,
            working_set_bytes=machine.working_set_bytes and total_bytes * 3 // 4,
            max_buffer_bytes=None,
        )
        return dataclasses.replace(inputs, machine=grown, budget_bytes=None, headroom_bytes=None)
    found = re.fullmatch(r"set `(memory\.)?(\w+): ([^`]+)`", fix)
    assert found, fix
    section, key, value = found.groups()
    written = int(value) if value.isdigit() else value
    config = load_engine_config({"memory": {key: written}} if section else {key: written})
    changed = PlanInputs.of(config, inputs.machine, inputs.model, config.max_model_len or inputs.max_model_len)
    field = {"budget": "budget_bytes", "headroom": "headroom_bytes", "slots": "slots_asked"}.get(key, key)
    return dataclasses.replace(inputs, **{field: getattr(changed, field)})


def check(inputs: PlanInputs, plan: MemoryPlan) -> None:
    ledger = plan.ledger
    assert tuple(term.name for term in ledger.terms) == TERMS
    assert ledger["kv_pool"].num_bytes == (plan.num_blocks + 1) * inputs.block_bytes
    assert ledger.engine_bytes <= inputs.limit_bytes
    assert plan.full_length_sequences >= 1
    assert plan.num_blocks // inputs.num_blocks_per_sequence == plan.full_length_sequences
    if inputs.slots_asked == "auto" or inputs.overcommit == "refuse":
        assert plan.full_length_sequences >= plan.slots
    if inputs.slots_asked != "auto":
        assert plan.slots == inputs.slots_asked
    assert inputs.budget_bytes is not None or ledger.unassigned_bytes >= 0


def test_the_demo_fits_with_room_to_spare() -> None:
    inputs = demo()
    plan = plan_memory(inputs)
    check(inputs, plan)
    assert (plan.slots, plan.slots_asked, plan.warnings) == (4, "4", ())
    # Four full lengths and half as much again for cached prefixes, not the 17 GiB that are free.
    assert plan.num_blocks == 4 * 513 * 3 // 2
    assert plan.ledger.unassigned_bytes > 12 * GIB


def test_terms_are_told_apart() -> None:
    ledger = plan_memory(demo()).ledger
    assert ledger["foreign"].num_bytes == 1 * GIB
    assert ledger["headroom"].num_bytes == 3 * GIB
    assert ledger["sampler"].num_bytes == 4 * 8 * 4 * 49_152
    assert ledger.sum_bytes("permanent") == 538 * 10**6 + 700 * MIB
    assert ledger.engine_bytes == ledger.sum_bytes("permanent") + ledger.sum_bytes("per_request")
    assert ledger.unassigned_bytes == 24 * GIB - 4 * GIB - ledger.engine_bytes


def test_status_is_flat_and_unknown_is_null() -> None:
    status = plan_memory(demo(MachineMemory(total_bytes=24 * GIB))).status()
    assert status["foreign_bytes"] is None
    assert status["foreign_source"] == "unknown"
    assert status["weights_bytes"] == 538 * 10**6
    assert status["slots_asked"] == "4"
    assert {f"{name}_bytes" for name in TERMS} <= status.keys()


def test_pool_use_in_bytes() -> None:
    plan = plan_memory(demo())
    assert plan.pool_use(plan.num_blocks - 10, 4) == {
        "kv_held_bytes": 6 * 16 * 45 * KIB,
        "kv_window_held_bytes": 0,
        "cached_prefix_bytes": 4 * 16 * 45 * KIB,
    }


def test_auto_without_a_measured_gain_takes_no_more_than_is_known_to_help() -> None:
    plan = plan_memory(demo(slots="auto"))
    assert plan.slots == UNMEASURED_SLOTS
    assert plan.slots_asked == f"auto:{UNMEASURED_SLOTS}"
    assert "until this machine's gain is measured" in plan.warnings[0]


def test_auto_is_capped_at_the_measured_knee() -> None:
    inputs = dataclasses.replace(demo(slots="auto"), gains={1: 1.0, 4: 3.3, 16: 6.6, 32: 6.7})
    plan = plan_memory(inputs)
    assert plan.slots == 16
    assert "flattens at 16" in plan.warnings[0]
    all_pay = dataclasses.replace(inputs, gains={1: 1.0, 4: 3.3, 16: 6.6, 64: 20.0})
    assert plan_memory(all_pay).slots > 16


def test_auto_under_pressure_is_the_balanced_count() -> None:
    inputs = demo(slots="auto", memory={"budget": "3GiB"})
    plan = plan_memory(inputs)
    check(inputs, plan)
    balance = balance_slots(128, inputs.num_blocks_that_fit, inputs.num_blocks_per_sequence)
    assert plan.slots == balance.slots == 5


@pytest.mark.parametrize(("prefix_cache", "num_states"), [("shared", 4 + 8), ("off", 4)])
def test_state_is_paid_per_slot_and_for_saved_copies(prefix_cache: str, num_states: int) -> None:
    model = dataclasses.replace(DEMO, state_bytes_per_slot=100 * MIB)
    plan = plan_memory(demo(model=model, prefix_cache=prefix_cache))
    assert plan.ledger["state"].num_bytes == num_states * 100 * MIB
    assert plan.num_state_snapshots == num_states - 4


@pytest.mark.parametrize(
    ("config", "limit_bytes"),
    [
        ({}, (24 - 1 - 3) * GIB),
        ({"memory": {"headroom": "8GiB"}}, (24 - 1 - 8) * GIB),
        ({"memory": {"budget": "6GiB"}}, 6 * GIB),
        ({"memory": {"budget": "22GiB"}}, 22 * GIB),
        ({"memory": {"budget": "20GiB", "headroom": "6GiB"}}, 17 * GIB),
    ],
)
def test_each_knob_changes_the_limit(config: dict[str, Any], limit_bytes: int) -> None:
    assert plan_memory(demo(**config)).limit_bytes == limit_bytes


def test_a_budget_beyond_the_machine_is_cut_with_a_warning_or_refused() -> None:
    plan = plan_memory(demo(memory={"budget": "30GiB"}))
    assert plan.limit_bytes == 23 * GIB
    assert "30.00 GiB" in plan.warnings[0]
    assert "23.00 GiB" in plan.warnings[0]
    inputs = demo(memory={"budget": "30GiB"}, overcommit="refuse")
    with pytest.raises(MemoryPlanError, match=r"30\.00 GiB") as caught:
        plan_memory(inputs)
    assert caught.value.fix == "set `memory.budget: 23552MiB`"
    changed = apply_fix(inputs, caught.value.fix)
    check(changed, plan_memory(changed))


def test_metal_limits() -> None:
    mac = MachineMemory(
        total_bytes=64 * GIB,
        available_bytes=50 * GIB,
        own_bytes=2 * GIB,
        working_set_bytes=4 * GIB,
        max_buffer_bytes=16 * MIB,
    )
    model = dataclasses.replace(DEMO, buffer_bytes_per_token=3 * 64 * 4)
    plan = plan_memory(demo(mac, model))
    assert plan.limit_bytes == 4 * GIB + DEMO.runtime_bytes
    assert plan.num_blocks == 16 * MIB // (3 * 64 * 4 * 16) - 1  # the null block
    assert plan.wired_limit_bytes is not None
    assert plan.wired_limit_bytes == plan.ledger.engine_bytes - DEMO.runtime_bytes <= 4 * GIB
    assert "2 sequences of 8192 tokens fit at once" in plan.warnings[0]


def test_more_slots_than_fit_warn_and_name_the_number_or_are_refused() -> None:
    plan = plan_memory(demo(slots=12, memory={"budget": "3GiB"}))
    assert (plan.slots, plan.full_length_sequences) == (12, 5)
    assert "12 slots were asked for and 5 sequences of 8192 tokens fit" in plan.warnings[0]
    inputs = demo(slots=12, memory={"budget": "3GiB"}, overcommit="refuse")
    with pytest.raises(MemoryPlanError, match="12 slots were asked for") as caught:
        plan_memory(inputs)
    assert caught.value.fix == "set `slots: 5`"
    changed = apply_fix(inputs, caught.value.fix)
    check(changed, plan_memory(changed))


BIG = ModelBytes(weights_bytes=40 * GIB, kv_bytes_per_token=320 * KIB, vocab_size=128_256, runtime_bytes=GIB)


@pytest.mark.parametrize(
    ("inputs", "fix"),
    [
        pytest.param(demo(memory={"budget": "1400MiB"}), r"set `max_model_len: \d+`", id="a shorter context"),
        pytest.param(demo(memory={"budget": "1GiB"}), r"set `memory.budget: \d+MiB`", id="a larger budget"),
        pytest.param(demo(memory={"headroom": "21.9GiB"}), r"set `memory.headroom: \d+MiB`", id="less headroom"),
        pytest.param(demo(model=BIG), "use a smaller model, or a machine with 64 GiB", id="another machine"),
        pytest.param(
            demo(model=dataclasses.replace(DEMO, state_bytes_per_slot=GIB), slots=128), "set `slots: 6`", id="slots"
        ),
    ],
)
def test_a_refusal_names_every_term_and_its_fix_works(inputs: PlanInputs, fix: str) -> None:
    with pytest.raises(MemoryPlanError) as caught:
        plan_memory(inputs)
    for name in TERMS:
        assert f"{name} " in caught.value.message
    assert re.fullmatch(fix, caught.value.fix), caught.value.fix
    changed = apply_fix(inputs, caught.value.fix)
    check(changed, plan_memory(changed))


machines = st.builds(
    lambda total, held, own, working_set: MachineMemory(
        total * GIB, int(total * GIB * (1 - held)), int(total * GIB * held * own), working_set and total * GIB * 3 // 4
    ),
    st.sampled_from([8, 16, 24, 64, 128, 512]),
    st.floats(0.05, 0.95),
    st.floats(0, 1),
    st.booleans(),
)
models = st.builds(
    ModelBytes,
    weights_bytes=st.integers(100 * MIB, 200 * GIB),
    kv_bytes_per_token=st.integers(1 * KIB, 1 * MIB),
    vocab_size=st.integers(1_000, 260_000),
    state_bytes_per_slot=st.sampled_from([0, 20 * MIB, 150 * MIB]),
    activation_bytes=st.integers(0, 2 * GIB),
    runtime_bytes=st.integers(0, 1 * GIB),
)
sizes = st.none() | st.integers(100, 600_000).map(lambda mib: f"{mib}MiB")


@given(
    machine=machines,
    model=models,
    slots=st.sampled_from(["auto", 1, 4, 32, 128]),
    max_model_len=st.sampled_from([512, 8192, 131_072]),
    budget=sizes,
    headroom=sizes,
    overcommit=st.sampled_from(["warn", "refuse"]),
)
def test_any_plan_adds_up_and_any_fix_works(
    machine: MachineMemory,
    model: ModelBytes,
    slots: object,
    max_model_len: int,
    budget: str | None,
    headroom: str | None,
    overcommit: str,
) -> None:
    memory = {key: value for key, value in (("budget", budget), ("headroom", headroom)) if value}
    inputs = demo(machine, model, slots=slots, max_model_len=max_model_len, memory=memory, overcommit=overcommit)
    try:
        check(inputs, plan_memory(inputs))
    except MemoryPlanError as error:
        if "no machine" not in error.fix:
            changed = apply_fix(inputs, error.fix)
            check(changed, plan_memory(changed))


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(None, "unknown"), (0, "0 MiB"), (512 * MIB, "512 MiB"), (1536 * MIB, "1.50 GiB"), (-GIB, "-1.00 GiB")],
)
def test_bytes_for_a_person(num_bytes: int | None, text: str) -> None:
    assert format_bytes(num_bytes) == text
