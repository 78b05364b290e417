"""`metalslots bench profile`: measures what steps cost, for the planner. Must not know how that is fitted."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from serve_app.bench.profile import Fit, ProfilePlan
from serve_app.bench.profile_run import profile_endpoint
from serve_app.bench.session import token_counter
from serve_app.bench.target import EosBan, Target
from serve_app.capacity.profile import MachineProfile, write_profile
from serve_app.cli import bench_options as option
from serve_app.cli.bench_output import DEFAULT_FOLDER, DEFAULT_URL, results_folder
from serve_app.cli.console import endpoint_of, out, print_json, progress, reports_errors
from serve_app.cli.trust import Authority, office_trust

Lengths = Annotated[str, typer.Option(help="Prompt lengths in tokens, read alone.")]
Rows = Annotated[str, typer.Option(help="Answers at once; those beyond the slots are left out.")]
Contexts = Annotated[str, typer.Option(help="Prompt lengths behind which these answers decode.")]


@reports_errors
def profile(
    url: option.Url = DEFAULT_URL,
    lengths: Lengths = "64,256,512,1024,2048",
    rows: Rows = "1,2,4,8,16",
    contexts: Contexts = "32,1024",
    max_chunk_tokens: Annotated[int, typer.Option(min=16, help="The engine's prefill.max_chunk_tokens.")] = 512,
    target_stall_ms: Annotated[float, typer.Option(min=1, help="The engine's prefill.target_stall_ms.")] = 500.0,
    model: Annotated[str, typer.Option(help="Model to ask for; by default the only one offered.")] = "",
    tokenizer: option.Tokenizer = None,
    ban_eos: Annotated[EosBan, typer.Option(help="How the server is kept from short answers.")] = EosBan.IGNORE_EOS,
    out_folder: option.OutFolder = DEFAULT_FOLDER,
    key: option.ApiKey = None,
    authority: Authority = None,
    allow_remote: option.AllowRemote = False,
    as_json: option.AsJson = False,
) -> None:
    """Fit the cost of prompts and of decoding together, and save it for `metalslots plan --profile`."""
    prompt_lengths, row_counts, context_lengths = map(option.whole_numbers, (lengths, rows, contexts))
    plan = ProfilePlan(prompt_lengths, row_counts, context_lengths, max_chunk_tokens=max_chunk_tokens)
    path = results_folder(out_folder) / "profile.json"
    count_tokens, eos_token_ids = token_counter(tokenizer)
    target = Target("profile", endpoint_of(url), model, ban_eos, eos_token_ids, key, trust=office_trust(authority))
    with progress("connecting") as report:
        made, fit = profile_endpoint(
            target,
            plan,
            target_stall_s=target_stall_ms / 1000,
            count_tokens=count_tokens,
            report=report,
            allow_remote=allow_remote,
        )
    write_profile(made, path)
    if as_json:
        print_json(asdict(made))
    else:
        out.print(_text(made, fit, path), soft_wrap=True, markup=False)


def _text(made: MachineProfile, fit: Fit, path: Path) -> str:
    times = made.times
    gains = ", ".join(f"{rows}: {gain:.2f}" for rows, gain in made.gains.items())
    return "\n".join(
        (
            f"a step: {times.fixed_s * 1e3:.2f} ms, each row {times.row_s * 1e3:.3f} ms, "
            f"each 1,000 context tokens {times.context_token_s * 1e6:.3f} ms",
            f"a prompt chunk: {times.chunk_fixed_s * 1e3:.2f} ms, each token {times.chunk_token_s * 1e3:.3f} ms, "
            f"each million attention pairs {times.chunk_pair_s * 1e9:.2f} ms",
            f"a request besides its steps: {made.overhead_s * 1e3:.1f} ms",
            f"gain by answers at once: {gains or 'not measured'}",
            f"median error of the fit: {made.residual:.1%} over {len(fit.prompts) + len(fit.decodes)} points",
            f"written to {path}",
        )
    )
