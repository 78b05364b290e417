"""What people get wrong at the command line ends at once, with its cause and a way out, never as a defect of ours."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serve_app.cli.main import app

EXIT_FAILED, EXIT_USAGE = 1, 2


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands run: with files of all wrong kinds."""
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "a-file").touch()
    (tmp_path / "headroom.yaml").write_text("models: [{engine: {memory: {headroom: lots}}}]")
    (tmp_path / "budget.yaml").write_text("models: [{engine: {memory: {budget: -1}}}]")
    (tmp_path / "no-tls.yaml").write_text("https: {certificate: missing.crt, key: missing.key}")
    (tmp_path / "bad-tls.yaml").write_text("https: {certificate: a-file, key: a-file}")
    (tmp_path / "no-logs.yaml").write_text("logs: {folder: a-file/logs}")
    monkeypatch.chdir(tmp_path)
    # pytest's folders are longer than a socket's path leaves room for.
    monkeypatch.setattr("serve_app.node.settings.MAX_PREFIX_BYTES", 1000)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "exit_code", "said"),
    [
        ("serve --config binary.yaml", EXIT_USAGE, "binary.yaml is no text"),
        ("keys list --file binary.yaml", EXIT_USAGE, "binary.yaml is no text"),
        ("serve --config headroom.yaml", EXIT_USAGE, "a size such as 8GiB"),
        ("serve --config budget.yaml", EXIT_USAGE, "`memory.budget` is -1"),
        ("serve --config no-tls.yaml --port 18127", EXIT_USAGE, "missing.crt and missing.key: No such file"),
        ("serve --config bad-tls.yaml --port 18127", EXIT_USAGE, "no certificate and its key"),
        ("serve --config no-logs.yaml --port 18127", EXIT_FAILED, "a-file/logs: Not a directory"),
        ("keys add anna --file a-file/keys.yaml", EXIT_FAILED, "a-file: File exists"),
        ("node make-head --address 10.0.0.1 --prefix a-file", EXIT_FAILED, "a-file/"),
        ("doctor --port 99999999", EXIT_USAGE, "--port"),
        ("ready mac --address 127.0.0.1:9", EXIT_FAILED, "There is no Ray at 127.0.0.1:9"),
        ("bench --out a-file/results", EXIT_USAGE, "cannot be written to a-file/results"),
        ("bench sweep --slo ttft:1 --out a-file", EXIT_USAGE, "cannot be written to a-file"),
        ("bench profile --out a-file", EXIT_USAGE, "cannot be written to a-file"),
        ("bench peers --out a-file", EXIT_USAGE, "cannot be written to a-file"),
    ],
)
def test_it_is_named(folder: Path, command: str, exit_code: int, said: str) -> None:
    result = CliRunner().invoke(app, command.split())
    assert said in " ".join(result.output.split())
    assert result.exit_code == exit_code
    assert "a defect of ours" not in result.output


class Status(BaseHTTPRequestHandler):
    """An endpoint of which only the status is there."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/status" else 404)
        self.end_headers()
        self.wfile.write(json.dumps({"replicas": []}).encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Status) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_an_address_may_be_given_as_clients_want_it(url: str, ending: str) -> None:
    result = CliRunner().invoke(app, ["status", "--json", "--url", url + ending])
    assert result.exit_code == 0, result.output
