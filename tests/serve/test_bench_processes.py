"""The bench's processes, pictures and clock: children that start and end, files drawn, a client that keeps time."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from engine.model_source import ModelSource
from serve_app.bench.document import RunDocument, read_document, to_json
from serve_app.bench.errors import BenchError
from serve_app.bench.peers import MLX_LM_FLAGS, llama_cpp_server, mlx_lm_server, our_server
from serve_app.bench.plots import draw_all
from serve_app.bench.self_check import check_client
from serve_app.bench.servers import ServerCommand, free_port, running
from serve_app.capacity.chart import draw_options
from serve_app.capacity.demand import Demand, FleetLevel
from serve_app.capacity.perf_model import RateTimes
from serve_app.capacity.planner import MachineKind, Planner, PlanSettings
from serve_app.cli.bench import app
from tests.long.test_bench_verdict import document, run
from tests.long.test_capacity_simulator import office

SERVER = """
import http.server, signal, subprocess, sys
{prelude}
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
class Ok(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", {port}), Ok).serve_forever()
"""


def command(prelude: str = "", **changes: object) -> ServerCommand:
    port = free_port()
    script = SERVER.format(port=port, prelude=prelude)
    made = ServerCommand("a server, tuned", (sys.executable, "-c", script), port, "/", start_timeout_s=30.0)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_a_server_and_what_it_started_are_gone_afterwards(tmp_path: Path) -> None:
    with running(command(), tmp_path) as pid:
        family = [psutil.Process(pid), *psutil.Process(pid).children()]
        assert len(family) == 2
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)


def test_a_server_that_ignores_the_signal_is_killed(tmp_path: Path) -> None:
    deaf = command("signal.signal(signal.SIGTERM, signal.SIG_IGN)", grace_s=0.1)
    with running(deaf, tmp_path) as pid:
        process = psutil.Process(pid)
    assert not process.is_running()


def test_an_error_inside_the_context_still_stops_the_server(tmp_path: Path) -> None:
    processes: list[psutil.Process] = []

    def fail() -> None:
        with running(command(), tmp_path) as pid:
            processes.append(psutil.Process(pid))
            raise ConnectionError

    with pytest.raises(ConnectionError):
        fail()
    assert not processes[0].is_running()


def test_a_server_that_ends_at_once_shows_its_last_words(tmp_path: Path) -> None:
    dead = replace(command(), arguments=(sys.executable, "-c", "raise SystemExit('no such model')"))
    with pytest.raises(BenchError, match="code 1 before it answered:\nno such model"), running(dead, tmp_path):
        pass


def test_a_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    waits = (sys.executable, "-c", "import threading; threading.Event().wait()")
    mute = replace(command(), arguments=waits, start_timeout_s=0.1)
    with pytest.raises(BenchError, match="did not answer within"), running(mute, tmp_path):
        pass


def test_ours_is_ended_as_a_person_would() -> None:
    assert our_server("demo", 4).stop_signal is signal.SIGINT
    assert our_server("demo", 4).arguments[1:6] == ("serve", "--model", "demo", "--slots", "4")


@pytest.mark.parametrize("label", MLX_LM_FLAGS)
def test_peers_run_on_loopback_with_their_flags(label: str) -> None:
    started = mlx_lm_server(label, Path("/models/x"), {"LD_PRELOAD": "blas.so"})
    assert started.base_url.startswith("http://127.0.0.1:")
    assert started.environment == {"LD_PRELOAD": "blas.so"}
    assert started.arguments[-len(MLX_LM_FLAGS[label]) :] == MLX_LM_FLAGS[label] or not MLX_LM_FLAGS[label]
    assert "--host" not in started.arguments


def test_llama_cpp_gets_the_slots_and_a_context_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = ModelSource("m", "gguf", tmp_path / "m.gguf", "r0")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BenchError, match="no `llama-server`"):
        llama_cpp_server(gguf, 4, 1000)
    program = tmp_path / "llama-server"
    program.touch(0o755)
    started = llama_cpp_server(gguf, 4, 1000)
    assert started.arguments[:3] == (str(program), "-m", str(gguf.path))
    assert started.arguments[-4:] == ("--parallel", "4", "-c", str(4 * 1128))
    with pytest.raises(BenchError, match="reads GGUF files"):
        llama_cpp_server(replace(gguf, kind="folder"), 4, 1000)


def test_every_picture_is_drawn_in_both_formats(tmp_path: Path) -> None:
    paths = draw_all([document("ours"), document("theirs", run(slots=()))], tmp_path, "x")
    assert [path.name for path in paths] == [
        f"x-{name}.{suffix}" for name in ("levels", "distributions", "slots") for suffix in ("png", "svg")
    ]
    assert all(path.stat().st_size > 1000 for path in paths)


def test_what_was_not_measured_is_not_drawn(tmp_path: Path) -> None:
    failed = tuple(replace(call, timing=None, error="x") for call in run().result.calls)
    nothing: RunDocument = document("ours", run(slots=(), calls=failed))
    assert {path.name for path in draw_all([nothing], tmp_path, "x")} == {"x-levels.png", "x-levels.svg"}


def test_a_plan_is_drawn_with_and_without_times(tmp_path: Path) -> None:
    settings = PlanSettings(FleetLevel(wait_mean_s=3.0), calls_per_run=100, max_runs=1)
    kind = MachineKind("by hand", RateTimes(3000.0, 100.0))
    stable, unstable = (Planner(Demand(office(), rate), kind, settings).option(4, 1) for rate in (500.0, 5000.0))
    draw_options([stable, unstable], tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").stat().st_size > 1000


async def test_the_client_stamps_every_event_after_it_was_written() -> None:
    check = await check_client(events_per_s=200.0, duration_s=0.25)
    assert (check.num_streams, check.num_events) == (5, 50)
    assert check.delays_s.min >= 0
    assert check.gaps_stamped_s.num == check.gaps_written_s.num == 45


def test_a_run_against_a_server_with_known_timing(tmp_path: Path) -> None:
    port = free_port()
    arguments = (sys.executable, "-m", "serve_app.bench.reference_server", "--port", str(port), "--slots", "4")
    server = ServerCommand("reference", arguments, port, "/health")
    options = ["--concurrency", "2", "--per-client", "1", "--scale", "0.1", "--slots", "4", "--plots", "--json"]
    with running(server, tmp_path):
        result = CliRunner().invoke(
            app, ["--url", server.base_url, "--out", str(tmp_path), "--label", "a b/c", *options]
        )
    assert result.exit_code == 0, result.output
    (written,) = tmp_path.glob("*.json")
    assert written.name.endswith("-a-b-c.json")
    (shown,) = json.loads(result.stdout)
    document = read_document(written)
    assert to_json(document) == shown
    (level,) = document.runs
    assert level.result.summary.num_failed == 0
    assert level.result.num_wrong_length == 0
    assert {sample.num_slots for sample in level.slots} == {4}
    assert document.answers is not None
    assert document.answers.num_equal == 2
    assert any("too short" in reason for reason in document.verdict.reasons)
    assert len(list(tmp_path.glob("*.png"))) == len(list(tmp_path.glob("*.svg"))) == 3
