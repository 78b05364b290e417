"""Commands at an HTTPS endpoint of a fleet: believed with its authority, and refused in words that say what to do."""

from __future__ import annotations

import datetime as dt
import ssl
import threading
from collections.abc import Iterator
from dataclasses import astuple
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serve_app.bench.client import StreamClient, StreamRecord, get_json
from serve_app.bench.target import Target, resolve_model
from serve_app.cli.main import app
from serve_app.node.certificates import make_authority, make_certificate
from serve_app.trust import UntrustedError, trusting

NOW = dt.datetime.now(dt.UTC)
AUTHORITY = make_authority(NOW)
EXIT_FAILED, EXIT_USAGE = 1, 2


class Answers(BaseHTTPRequestHandler):
    """One model, and nothing else."""

    def do_GET(self) -> None:
        body = b'{"data": [{"id": "demo"}], "replicas": []}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def ca(tmp_path: Path) -> str:
    (tmp_path / "ca.crt").write_text(AUTHORITY.certificate)
    return str(tmp_path / "ca.crt")


@pytest.fixture(params=["127.0.0.1"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An endpoint with a certificate for the name that the test is parametrised with."""
    (tmp_path / "pair.pem").write_text("".join(astuple(make_certificate(AUTHORITY, [request.param], NOW))))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "pair.pem")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"https://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


COMMANDS = [
    ["status", "--json"],
    ["bench"],
    ["bench", "run", "--model", "demo"],
    ["bench", "sweep", "--slo", "ttft:1000"],
    ["bench", "profile"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_says_that_a_certificate_is_not_trusted_and_what_to_do(command: list[str], url: str) -> None:
    result = CliRunner().invoke(app, [*command, "--url", url])
    assert result.exit_code == EXIT_FAILED
    assert f"The certificate of {url} is not trusted" in result.output
    assert "--ca" in result.output


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_an_authority_that_is_none_is_refused_before_anything_is_asked(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "empty.pem").touch()
    for name in ("missing.pem", "empty.pem"):
        result = CliRunner().invoke(app, [*command, "--ca", str(tmp_path / name)])
        assert (result.exit_code, name in result.output) == (EXIT_USAGE, True)


def test_with_the_authority_it_answers(url: str, ca: str) -> None:
    for options, environment in ((["--ca", ca], {}), ([], {"METALSLOTS_CA": ca})):
        result = CliRunner().invoke(app, ["status", "--json", "--url", url, *options], env=environment)
        assert result.exit_code == 0, result.output
        assert "replicas" in result.stdout


@pytest.mark.parametrize("url", ["10.0.0.1"], indirect=True)
def test_a_certificate_for_another_address_is_told_apart(url: str, ca: str) -> None:
    result = CliRunner().invoke(app, ["status", "--url", url, "--ca", ca])
    assert result.exit_code == EXIT_FAILED
    assert "an address that its certificate is for" in " ".join(result.output.split())


async def test_the_bench_asks_whom_it_is_told_to_believe(url: str, ca: str) -> None:
    with pytest.raises(UntrustedError):
        await get_json(f"{url}/v1/models")
    trust = trusting(Path(ca))
    assert (await resolve_model(Target("run", url, trust=trust))).model == "demo"
    record = StreamRecord()
    async with StreamClient(url, trust=trust) as client:
        await client.stream(b"{}", record)
    assert record.error is not None
    assert record.error.startswith("HTTP 501"), "it was reached"
