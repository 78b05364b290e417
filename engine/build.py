"""Joins core and MLX: the one place that turns a configuration into a running engine, and the engine process's command.

Owns: the order of start-up (files, weights, memory plan, pools, scheduler) and its progress. Must not know: Ray, HTTP.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import time
from typing import NoReturn

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.gains import read_gains
from engine.core.memory_readers import read_machine, system_reader
from engine.core.messages import OnProgress, Progress
from engine.core.model_files import expect_model
from engine.core.pooling import is_made_for_embeddings
from engine.core.process_main import run_engine_process
from engine.errors import StartupError, UnsupportedModelError
from engine.interfaces import ModelRunner
from engine.memory.guard import GuardConfig, GuardEvent, MemoryGuard
from engine.memory.guard_driver import GuardDriver, GuardHooks
from engine.memory.ledger import MemoryPlan, plan_memory
from engine.memory.plan_inputs import PlanInputs
from engine.memory.preflight import deviations
from engine.memory.window_blocks import WindowConfig
from engine.mlx_backend.device import choose_backend
from engine.mlx_backend.embeddings import find_embedding_size
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.loader import load_model
from engine.mlx_backend.memory import DeviceMemory, measure_model_bytes, with_device_limits
from engine.mlx_backend.model_runner import resolve_kv_dtype
from engine.mlx_backend.quantised_pool import check_kv_bits
from engine.mlx_backend.runners import make_runner
from engine.mlx_backend.step_model import StepForm
from engine.model_source import ModelSource, resolve_model
from engine.scheduler.scheduler import Scheduler, SchedulerConfig
from engine.scheduler.speculation import MAX_DRAFT_TOKENS
from engine.text.structured import GrammarCompiler
from engine.text.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


def build_core(config: EngineConfig, on_progress: OnProgress) -> EngineCore:
    """Load the model and make everything around it, on the thread that will run it.

    Raises StartupError: ModelNotFoundError, UnsupportedModelError, ConfigError or MemoryPlanError.
    """
    source = resolve_model(config.model, config.adapter)
    expected = expect_model(config, source, choose_backend(config.backend))
    on_progress(Progress("loading weights"))
    loaded = load_model(source, backend=config.backend, max_model_len=config.max_model_len, parity=config.parity)
    loaded = _with_embeddings(_with_grammars(loaded, source), config, source)
    config = _for_form(config, loaded)
    for sentence in loaded.facts.disclosures:
        logger.info("%s", sentence)
    on_progress(Progress("measuring memory"))
    inputs = _plan_inputs(config, loaded)
    plan = plan_memory(inputs)
    for deviation in deviations(expected, inputs.model) if expected else ():
        logger.warning("%s", deviation)
    logger.info("%s on %s", source.name, loaded.facts.device)
    logger.info("slots %s, %d KV blocks; %s", plan.slots_asked, plan.num_blocks, "; ".join(map(str, plan.ledger.terms)))
    for warning in plan.warnings:
        logger.warning("%s", warning)
    on_progress(Progress("making the KV pool"))
    return _join(config, source, _disclosing(loaded, plan.warnings), inputs, plan)


def _for_form(config: EngineConfig, loaded: LoadedModel) -> EngineConfig:
    """One slot for a model that is served one sequence at a time. Raises UnsupportedModelError when more are asked."""
    if loaded.form is not StepForm.SINGLE:
        return config
    if config.slots not in ("auto", 1):
        raise UnsupportedModelError(
            f"This model can be served to one person at a time only. {loaded.form_reason}", "write `slots: 1`"
        )
    return config.model_copy(update={"slots": 1, "prefix_cache": "off"})


def _with_grammars(loaded: LoadedModel, source: ModelSource) -> LoadedModel:
    try:
        tokenizer = load_tokenizer(source)
    except StartupError as error:
        # Tokens can be computed without one. Whoever turns text into tokens will need it, and will say so.
        logger.warning("no grammars: %s", error)
        return loaded
    grammars = GrammarCompiler(tokenizer, vocab_size=max(tokenizer.vocab_size, loaded.facts.vocab_size))
    return dataclasses.replace(loaded, grammars=grammars)


def _with_embeddings(loaded: LoadedModel, config: EngineConfig, source: ModelSource) -> LoadedModel:
    """``loaded`` with what it can be asked for. Raises UnsupportedModelError where embeddings are wanted in vain."""
    if config.embeddings == "off":
        return loaded
    is_made_for_them = is_made_for_embeddings(source)
    if not is_made_for_them and config.embeddings == "auto":
        return loaded
    size = find_embedding_size(loaded.model) if loaded.form is StepForm.PACKED else None
    if size is None:
        raise UnsupportedModelError(
            f"The hidden states of this {loaded.facts.architecture} model cannot be had.", "set `embeddings: off`"
        )
    facts = dataclasses.replace(loaded.facts, embedding_size=size, writes_text=not is_made_for_them)
    return dataclasses.replace(loaded, facts=facts)


def _plan_inputs(config: EngineConfig, loaded: LoadedModel) -> PlanInputs:
    check_kv_bits(() if loaded.form is StepForm.SINGLE else loaded.layers, config.kv_bits)
    machine = with_device_limits(read_machine(), loaded)
    dtype = resolve_kv_dtype(loaded, config.kv_dtype)
    model = measure_model_bytes(
        loaded, dtype, config.prefill.max_chunk_tokens, machine.own_bytes, kv_bits=config.kv_bits
    )
    gains = {} if config.profile is None else read_gains(config.profile, config.model)
    max_draft_tokens = MAX_DRAFT_TOKENS if config.speculation == "auto" else 0
    return PlanInputs.of(config, machine, model, loaded.facts.max_model_len, gains, max_draft_tokens)


def _disclosing(loaded: LoadedModel, warnings: tuple[str, ...]) -> LoadedModel:
    facts = dataclasses.replace(loaded.facts, disclosures=loaded.facts.disclosures + warnings)
    return dataclasses.replace(loaded, facts=facts)


def _join(
    config: EngineConfig, source: ModelSource, loaded: LoadedModel, inputs: PlanInputs, plan: MemoryPlan
) -> EngineCore:
    device = DeviceMemory(loaded.backend, plan)
    runner = make_runner(
        loaded,
        num_blocks=plan.num_blocks,
        block_size=config.block_size,
        slots=plan.slots,
        max_chunk_tokens=config.prefill.max_chunk_tokens,
        kv_dtype=config.kv_dtype,
        kv_bits=config.kv_bits,
        num_state_snapshots=plan.num_state_snapshots,
        num_window_blocks=plan.num_window_blocks or None,
    )
    scheduler = Scheduler(_scheduler_config(config, source, runner, plan, loaded.window_tokens))
    guard = MemoryGuard(GuardConfig.of(inputs))
    hooks = GuardHooks(reusable_bytes=device.reusable_bytes, set_tight=device.set_tight, on_event=_log_guard_event)
    return EngineCore(
        scheduler,
        runner,
        time.monotonic,
        slots_asked=plan.slots_asked,
        memory=lambda: {**plan.status(), **_pool_use(plan, scheduler), **guard.status()},
        upkeep=GuardDriver(guard, system_reader(), scheduler, hooks).tick,
        after_close=device.restore,
    )


def _scheduler_config(
    config: EngineConfig, source: ModelSource, runner: ModelRunner, plan: MemoryPlan, window_tokens: int
) -> SchedulerConfig:
    return SchedulerConfig(
        slots=plan.slots,
        num_blocks=plan.num_blocks,
        block_size=config.block_size,
        max_model_len=runner.facts.max_model_len,
        eos_token_ids=runner.facts.eos_token_ids,
        max_waiting_requests=config.max_waiting_requests,
        max_waiting_tokens=config.max_waiting_tokens,
        admission_watermark_tokens=config.admission_watermark_tokens,
        target_stall_s=config.prefill.target_stall_ms / 1000,
        max_chunk_tokens=config.prefill.max_chunk_tokens,
        prefix_cache=config.prefix_cache,
        revision=source.revision,
        max_steps_in_flight=runner.max_steps_in_flight,
        num_state_snapshots=plan.num_state_snapshots if _keeps_state(runner) else None,
        window=WindowConfig(window_tokens, plan.num_window_blocks) if plan.num_window_blocks else None,
        max_draft_tokens=MAX_DRAFT_TOKENS if config.speculation == "auto" and runner.facts.verifies_drafts else 0,
    )


def _keeps_state(runner: ModelRunner) -> bool:
    """Whether blocks alone do not hold a sequence's past."""
    return runner.facts.state_bytes_per_slot > 0 or runner.facts.is_alone


def _pool_use(plan: MemoryPlan, scheduler: Scheduler) -> dict[str, int]:
    stats = scheduler.stats(time.monotonic())
    return plan.pool_use(
        stats.num_blocks_free,
        stats.num_blocks_cached,
        stats.num_window_blocks_free,
        stats.num_window_blocks_cached,
    )


def _log_guard_event(event: GuardEvent) -> None:
    logger.warning("memory guard: %s (%s)", event.action, event.reason)


def main() -> NoReturn:
    """The engine process. Its parent, ``AsyncEngine.in_process``, passes one end of a socket pair."""
    parser = argparse.ArgumentParser(description="One engine on an inherited socket; started by its parent only.")
    parser.add_argument("--fd", type=int, required=True, help="number of the inherited socket")
    run_engine_process(parser.parse_args().fd, build_core)


if __name__ == "__main__":
    main()
