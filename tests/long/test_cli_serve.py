"""What `metalslots` says before anything is started: settings, checks, errors and exit codes."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.errors import ConfigError
from serve_app.cli.console import CommandFailedError
from serve_app.cli.main import app
from serve_app.cli.serve_checks import check_disk, check_port
from serve_app.cli.serve_settings import ServeOptions, app_settings

runner = CliRunner()


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def test_without_a_file_the_demo_model_is_served_in_four_slots() -> None:
    settings = app_settings(ServeOptions())
    assert [(model.name, model.engine.slots) for model in settings.models] == [("demo", 4)]
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)


def test_options_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "app.yaml"
    file.write_text("port: 9000\nmodels:\n  - name: office\n    engine: {model: demo, slots: 2, block_size: 32}\n")
    settings = app_settings(ServeOptions(config=file, slots="auto", speculation="off", port=9001))
    (model,) = settings.models
    assert (model.name, model.engine.slots, model.engine.block_size, settings.port) == ("office", "auto", 32, 9001)
    assert model.engine.speculation == "off"


def test_another_model_on_the_command_line_drops_the_names_of_the_one_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "app.yaml"
    file.write_text("models:\n  - name: office\n    aliases: [chat]\n    engine: {model: demo}\n")
    (model,) = app_settings(ServeOptions(config=file, model="org/other")).models
    assert (model.name, model.aliases, model.engine.model) == ("org/other", (), "org/other")


def test_engine_options_are_refused_for_a_file_with_two_models(tmp_path: Path) -> None:
    file = tmp_path / "app.yaml"
    file.write_text("models:\n  - {name: a, engine: {model: demo}}\n  - {name: b, engine: {model: demo}}\n")
    with pytest.raises(ConfigError, match="has several"):
        app_settings(ServeOptions(config=file, slots="2"))


@pytest.mark.parametrize(
    ("arguments", "exit_code", "expected"),
    [
        (["serv"], 2, "Did you mean 'serve'"),
        (["serve", "--prot", "1"], 2, "--port"),
        (["serve", "--slots", "Auto"], 2, 'write "auto" or a whole number'),
        (["serve", "--slots", "0"], 2, "`slots` is 0"),
        (["serve", "--config", "/nowhere.yaml"], 2, "/nowhere.yaml cannot be read"),
        (["serve", "--model", "no-such-model"], 1, "There is no model at 'no-such-model'"),
        (["serve", "--port", "0"], 2, "--port"),
        (["status", "--url", "http://127.0.0.1:1"], 1, "No endpoint answers at http://127.0.0.1:1"),
    ],
)
def test_mistakes_end_with_their_cause_and_code(arguments: list[str], exit_code: int, expected: str) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == exit_code
    assert expected in result.output
    assert "Traceback" not in result.output


def test_a_taken_port_is_named_with_a_way_out(taken_port: int) -> None:
    result = runner.invoke(app, ["serve", "--port", str(taken_port)])
    assert result.exit_code == 1
    assert f"Port {taken_port} on 127.0.0.1 is taken" in result.output
    assert f"--port {taken_port + 1}" in result.output


def test_a_foreign_address_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.250 is no address"):
        check_port("192.0.2.250", 8000)


def test_a_full_disk_stops_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = type("Usage", (), {"free": 3 * 2**20})
    monkeypatch.setattr("serve_app.cli.serve_checks.shutil.disk_usage", lambda _folder: usage)
    with pytest.raises(CommandFailedError, match="has 3 MiB free"):
        check_disk(tmp_path)


def test_every_command_has_help() -> None:
    for command in app.registered_commands:
        result = runner.invoke(app, [str(command.name), "--help"])
        assert result.exit_code == 0
        assert "Usage" in result.output


def test_doctor_reports_the_engine_checks_of_the_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # A stand-in for the engine's checks, which need MLX: the real ones have their own tests.
    (tmp_path / "engine_checks.py").write_text(
        "import json, sys\n"
        "print(json.dumps({'name': 'kernel x', 'state': 'fail', 'detail': 'differs by 3', 'fix': 'none yet'}))\n"
        "sys.exit(1)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("serve_app.cli.doctor.ENGINE_CHECKS", "engine_checks")
    result = runner.invoke(app, ["doctor", "--json"])
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["passed"] is False
    assert {"name": "kernel x", "state": "fail", "detail": "differs by 3", "fix": "none yet"} in report["checks"]


def test_doctor_fails_when_the_engine_checks_die(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "engine_checks.py").write_text("import os\nos.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("serve_app.cli.doctor.ENGINE_CHECKS", "engine_checks")
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "ended with code -6" in result.output
