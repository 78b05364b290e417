"""The servers that ours is compared with, on the same weights, the same BLAS and the same machine.

Owns: how each is started and asked. Must not know: how a child process lives, or what is measured.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.model_source import ModelSource
from serve_app.bench.errors import BenchError
from serve_app.bench.servers import ServerCommand, free_port, running
from serve_app.bench.target import EosBan, Target

OURS = "metalslots"
# The flags that keep mlx_lm.server from padding unequal prompts together: without them the comparison would be with a
# server that its own flags make several times faster.
MLX_LM_FLAGS = {
    "mlx_lm.server": (),
    "mlx_lm.server tuned": ("--prompt-concurrency", "1", "--prefill-step-size", "256"),
}
LLAMA_CPP = "llama.cpp"
_LLAMA_SERVER = "llama-server"
# What a chat template and a count that is a few tokens off may add to the longest request.
_CONTEXT_MARGIN_TOKENS = 128
# Children may be started before their model is on disk's cache, one after the other on a small machine.
OUR_START_TIMEOUT_S = 300.0
OUR_STOP_GRACE_S = 60.0


@dataclass(frozen=True, slots=True)
class Contestant:
    """A started server: its target, and the command that started it."""

    target: Target
    command: tuple[str, ...]


def export_path(source: ModelSource) -> Path:
    """Where ``source`` lies as an mlx-lm folder once exported."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "metalslots" / "exports" / f"{source.path.stem}-{source.revision}"


def mlx_lm_folder(source: ModelSource) -> Path:
    """The model as a folder that mlx-lm can load, exported on first use. Raises BenchError when that fails."""
    if source.kind == "folder":
        return source.path
    folder = export_path(source)
    if folder.exists():
        return folder
    # Written beside and renamed, so that an interrupted export is not taken for a model. In a process of its own: the
    # bench stays free of MLX.
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    command = [sys.executable, "-m", "engine.mlx_backend.export", str(source.path), str(unfinished)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise BenchError(f"The model cannot be exported for mlx-lm: {done.stderr.strip()[-500:]}", "see above")
    unfinished.rename(folder)
    return folder


def preload_environment() -> dict[str, str]:
    """The environment in which another program's MLX runs on the engine's BLAS; empty where there is none to share."""
    code = "import json; from engine.mlx_backend.blas import preload_env; print(json.dumps(preload_env()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    environment: dict[str, str] = json.loads(done.stdout)
    return environment


def our_server(model: str, num_slots: int) -> ServerCommand:
    """`metalslots serve` on a free port, without guesses: answers that may not end repeat themselves, and repeated text
    is guessed better than people's."""
    port = free_port()
    program = str(Path(sys.executable).parent / "metalslots")
    options = ("--model", model, "--slots", str(num_slots), "--speculation", "off", "--port", str(port))
    # Ctrl-C is how a person stops it, and the way that ends Ray in order.
    return ServerCommand(
        OURS,
        (program, "serve", *options),
        port,
        "/health",
        start_timeout_s=OUR_START_TIMEOUT_S,
        stop_signal=signal.SIGINT,
        grace_s=OUR_STOP_GRACE_S,
    )


def mlx_lm_server(label: str, folder: Path, environment: dict[str, str]) -> ServerCommand:
    """`mlx_lm.server` on a free port, as it comes or tuned."""
    port = free_port()
    arguments = (sys.executable, "-m", "mlx_lm.server", "--model", str(folder), "--port", str(port))
    return ServerCommand(label, (*arguments, *MLX_LM_FLAGS[label]), port, "/health", environment)


def llama_cpp_server(source: ModelSource, num_slots: int, longest_call_tokens: int) -> ServerCommand:
    """`llama-server` of the machine on a free port, with as many slots and room for the longest request in each.

    It keeps its own kernels and the file's quantised weights. Raises BenchError without the program or a GGUF file.
    """
    program = shutil.which(_LLAMA_SERVER)
    if program is None:
        raise BenchError(f"{LLAMA_CPP} is to be measured, and there is no `{_LLAMA_SERVER}`.", "brew install llama.cpp")
    if source.kind != "gguf":
        raise BenchError(f"{LLAMA_CPP} reads GGUF files, and {source.name} is a {source.kind}.", "name a .gguf file")
    port = free_port()
    context = num_slots * (longest_call_tokens + _CONTEXT_MARGIN_TOKENS)
    where = ("--host", "127.0.0.1", "--port", str(port))
    room = ("--parallel", str(num_slots), "-c", str(context))
    return ServerCommand(LLAMA_CPP, (program, "-m", str(source.path), *where, *room), port, "/health")


@contextmanager
def started(
    commands: Sequence[ServerCommand], log_folder: Path, num_slots: int, eos_token_ids: tuple[int, ...]
) -> Iterator[tuple[Contestant, ...]]:
    """Run all servers while the context is open; the ones that are not asked stay idle beside the one that is."""
    with ExitStack() as stack:
        contestants = []
        for command in commands:
            pid = stack.enter_context(running(command, log_folder))
            contestants.append(Contestant(_target(command, pid, num_slots, eos_token_ids), _shown(command)))
        yield tuple(contestants)


def _target(command: ServerCommand, pid: int, num_slots: int, eos_token_ids: tuple[int, ...]) -> Target:
    if command.label == OURS:
        return Target(OURS, command.base_url, num_slots=num_slots, process_id=pid)
    if command.label == LLAMA_CPP:
        return Target(LLAMA_CPP, command.base_url, model="served", process_id=pid)
    # It knows no `ignore_eos`, and its /v1/models lists what lies in the hub's cache, not what it serves.
    return Target(
        command.label,
        command.base_url,
        model="default_model",
        eos_ban=EosBan.LOGIT_BIAS,
        eos_token_ids=eos_token_ids,
        process_id=pid,
    )


def _shown(command: ServerCommand) -> tuple[str, ...]:
    variables = tuple(f"{key}={value}" for key, value in sorted(command.environment.items()))
    return (*variables, *command.arguments)
