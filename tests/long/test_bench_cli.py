"""The bench's command line: plans, refusals and exit codes, without an endpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.errors import ConfigError
from serve_app.bench.document import write_document
from serve_app.bench.plan import Level
from serve_app.cli.bench import app
from serve_app.cli.bench_options import parse_levels, parse_slo
from serve_app.latency import ServiceLevel
from tests.long.test_bench_verdict import document

EXIT_FAILED, EXIT_USAGE = 1, 2


@pytest.mark.parametrize("command", [[], ["run"], ["peers"]])
def test_a_dry_run_sends_nothing_and_shows_every_load(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--dry-run", "--concurrency", "2,4", "--repeats", "2"])
    assert result.exit_code == 0
    assert [line.split("|")[1].strip() for line in result.stdout.splitlines()[2:]] == ["2 clients", "4 clients"] * 2


def test_a_dry_run_of_an_open_loop_in_json() -> None:
    options = ["--dry-run", "--json", "--rate", "0.5", "--sessions", "9", "--workload", "demo-agents"]
    result = CliRunner().invoke(app, options)
    plan = json.loads(result.stdout)
    assert plan["workload"]["name"] == "demo-agents"
    (load,) = plan["loads"]
    assert (load["level"], load["num_sessions"]) == ("0.5/s", 9)
    assert load["num_calls"] > 9


def test_help_names_every_command() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for name in ("run", "peers", "compare", "plot", "check-client"):
        assert name in result.stdout


@pytest.mark.parametrize(
    ("options", "exit_code", "said"),
    [
        (["--concurrency", "1,x"], EXIT_USAGE, "'x'"),
        (["--concurrency", "0"], EXIT_USAGE, "'0'"),
        (["--rate", "-1"], EXIT_USAGE, "'-1'"),
        (["--slo", "tft:3"], EXIT_USAGE, "'tft'"),
        (["--slo", "ttft:soon"], EXIT_USAGE, "'soon'"),
        (["--workload", "no-such"], EXIT_FAILED, "no-such"),
        (["--url", "http://192.0.2.1"], EXIT_FAILED, "--allow-remote"),
        (["--url", "http://127.0.0.1:9"], EXIT_FAILED, "No endpoint answers"),
        (["--no-such-option"], EXIT_USAGE, "no-such-option"),
        (["compare", "a.json", "b.json"], EXIT_FAILED, "cannot be read"),
        (["peers", "--peers", "vllm", "--dry-run"], EXIT_USAGE, "vllm"),
    ],
)
def test_refusals_name_the_cause(options: list[str], exit_code: int, said: str) -> None:
    result = CliRunner().invoke(app, options)
    assert result.exit_code == exit_code
    assert said in result.output
    assert "Traceback" not in result.output


def test_two_files_are_compared(tmp_path: Path) -> None:
    paths = [tmp_path / f"{label}.json" for label in ("a", "b")]
    for path in paths:
        write_document(document(path.stem), path)
    text = CliRunner().invoke(app, ["compare", *map(str, paths)])
    assert "b / a" in text.stdout
    values = json.loads(CliRunner().invoke(app, ["compare", "--json", *map(str, paths)]).stdout)
    assert values["levels"][0]["ttft"]["p50"] == 1.0


def test_levels_and_bounds() -> None:
    assert parse_levels("1,4", "") == (Level(num_clients=1), Level(num_clients=4))
    assert parse_levels("1,4", "0.5") == (Level(rate_per_s=0.5),)
    assert parse_slo("") == ServiceLevel()
    assert parse_slo("ttft:2000,tpot:50") == ServiceLevel(ttft_s=2.0, tpot_s=0.05)
    with pytest.raises(ConfigError, match="concurrency"):
        parse_levels("", "")
