"""Ours beside its peers in one run: the figures of the README.

Owns: starting all of them, measuring them in turn, stopping them. Must not know: the command line.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from engine.model_source import resolve_model
from serve_app.bench.document import RunDocument
from serve_app.bench.peers import (
    LLAMA_CPP,
    MLX_LM_FLAGS,
    OURS,
    llama_cpp_server,
    mlx_lm_folder,
    mlx_lm_server,
    our_server,
    preload_environment,
    started,
)
from serve_app.bench.plan import BenchPlan, forecast
from serve_app.bench.runner import Report
from serve_app.bench.servers import ServerCommand
from serve_app.bench.session import measure, token_counter
from serve_app.bench.target import Target


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """``our_url``: a running endpoint of ours; None starts one of ``num_slots``. ``peers``: labels.

    ``trust``: whom to believe over HTTPS.
    """

    model: str
    num_slots: int
    our_url: str | None
    peers: tuple[str, ...]
    log_folder: Path
    trust: ssl.SSLContext | None = None


def measure_peers(options: PeerOptions, plan: BenchPlan, report: Report) -> tuple[RunDocument, ...]:
    """Start, measure and stop. The first document is ours. Raises BenchError when one cannot be started or asked."""
    report("preparing the model", None)
    count_tokens, eos_token_ids = token_counter(options.model)
    commands = _commands(options, plan)
    report(f"starting {', '.join(command.label for command in commands)}", None)
    with started(commands, options.log_folder, options.num_slots, eos_token_ids) as contestants:
        targets = [each.target for each in contestants]
        if options.our_url is not None:
            targets.insert(0, Target(OURS, options.our_url, num_slots=options.num_slots, trust=options.trust))
        return measure(
            targets,
            plan,
            count_tokens=count_tokens,
            report=report,
            commands={each.target.label: each.command for each in contestants},
        )


def _commands(options: PeerOptions, plan: BenchPlan) -> list[ServerCommand]:
    commands = [] if options.our_url is not None else [our_server(options.model, options.num_slots)]
    if LLAMA_CPP in options.peers:
        longest = max(load.longest_call_tokens for load in forecast(plan))
        commands.append(llama_cpp_server(resolve_model(options.model), options.num_slots, longest))
    if labels := [label for label in options.peers if label in MLX_LM_FLAGS]:
        folder = mlx_lm_folder(resolve_model(options.model))
        environment = preload_environment()
        commands += [mlx_lm_server(label, folder, environment) for label in labels]
    return commands
