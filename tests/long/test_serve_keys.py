"""Keys: kept as hashes, asked for beyond loopback, limited each by itself, and named to the engine as its user."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from engine.errors import ConfigError
from serve_app.cli.main import app
from serve_app.config import load_app_config
from serve_app.errors import RateLimitError
from serve_app.ingress import ledger
from serve_app.ingress.accounts import AccountBook, KeyAccount
from serve_app.ingress.auth import KeyBook
from serve_app.ingress.ledger import KeyLedger, LocalDoor, SharedDoor
from serve_app.keys import ApiKey, add_key, find_key, read_keys, remove_key
from tests.core_fakes import make_core
from tests.serve_fakes import CHAT, Client, EngineFleet, ScriptedFleet, client_of, said


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def made(tmp_path: Path, **limits: int) -> tuple[tuple[ApiKey, ...], str]:
    text = add_key(tmp_path / "keys.yaml", "anna", **limits)
    add_key(tmp_path / "keys.yaml", "ben")
    return read_keys(tmp_path / "keys.yaml"), text


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


def test_only_the_hash_is_kept(tmp_path: Path) -> None:
    keys, text = made(tmp_path, requests_per_minute=5)
    path = tmp_path / "keys.yaml"
    assert text not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    assert [key.name for key in keys] == ["anna", "ben"]
    found = find_key(keys, text)
    assert found is not None
    assert (found.name, found.requests_per_minute) == ("anna", 5)
    for wrong in ("", text[:-1], text + "x", found.sha256, "\ud800"):
        assert find_key(keys, wrong) is None


def test_names_are_distinct_and_keys_go_away(tmp_path: Path) -> None:
    _, text = made(tmp_path)
    with pytest.raises(ConfigError, match="anna"):
        add_key(tmp_path / "keys.yaml", "anna")
    remove_key(tmp_path / "keys.yaml", "anna")
    assert find_key(read_keys(tmp_path / "keys.yaml"), text) is None
    with pytest.raises(ConfigError, match="no key"):
        remove_key(tmp_path / "keys.yaml", "anna")
    with pytest.raises(ConfigError, match="name"):
        add_key(tmp_path / "keys.yaml", "has spaces")


def test_the_command_makes_lists_and_removes(tmp_path: Path) -> None:
    run, where = CliRunner(), ["--file", str(tmp_path / "keys.yaml")]
    text = run.invoke(app, ["keys", "add", "anna", "--max-parallel", "2", *where]).stdout.strip()
    found = find_key(read_keys(tmp_path / "keys.yaml"), text)
    assert found is not None
    assert found.max_parallel == 2
    listed = run.invoke(app, ["keys", "list", "--json", *where]).stdout
    assert "anna" in listed
    assert found.sha256 not in listed
    assert run.invoke(app, ["keys", "remove", "anna", *where]).exit_code == 0
    assert run.invoke(app, ["keys", "remove", "anna", *where]).exit_code == 2


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "mac.local"])
def test_others_may_reach_it_only_with_keys(tmp_path: Path, host: str) -> None:
    values: dict[str, Any] = {"host": host, "keys_file": "keys.yaml"}
    with pytest.raises(ConfigError, match="no API keys"):
        load_app_config(values, tmp_path)
    made(tmp_path)
    assert len(load_app_config(values, tmp_path).keys) == 2


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_this_machine_needs_none(host: str) -> None:
    assert load_app_config({"host": host}).keys == ()


async def test_only_known_keys_come_in(tmp_path: Path) -> None:
    keys, text = made(tmp_path)
    fleet = ScriptedFleet(*said("hi"))
    client = client_of(fleet, book=KeyBook(keys))
    for headers in ({}, bearer("wrong"), {"authorization": f"Basic {text}"}, {"x-api-key": "wrong"}):
        reply = await client.post("/v1/chat/completions", CHAT, **headers)
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
        assert reply.headers["www-authenticate"] == "Bearer"
    assert (await client.get("/v1/models")).status == 401
    assert (await client.get("/status")).status == 401
    assert (await client.get("/health")).status == 200
    for headers in (bearer(text), {"x-api-key": text}):
        assert (await client.post("/v1/chat/completions", CHAT, **headers)).status == 200


async def test_the_key_is_the_user_whatever_the_body_says(tmp_path: Path) -> None:
    keys, text = made(tmp_path, priority=-3)
    fleet = ScriptedFleet(*said("hi"))
    await client_of(fleet, book=KeyBook(keys)).post("/v1/chat/completions", {**CHAT, "user": "ben"}, **bearer(text))
    assert (fleet.calls[0].user, fleet.calls[0].priority) == ("anna", -3)


async def test_limits_are_each_keys_own(tmp_path: Path) -> None:
    _, text = made(tmp_path, requests_per_minute=2)
    other = add_key(tmp_path / "keys.yaml", "carl")
    keys = read_keys(tmp_path / "keys.yaml")
    book = KeyBook(keys, LocalDoor(AccountBook(keys, 60.0, Clock())))
    client = client_of(ScriptedFleet(*said("hi")), book=book)
    statuses = [(await client.post("/v1/chat/completions", CHAT, **bearer(text))).status for _ in range(3)]
    assert statuses == [200, 200, 429]
    assert (await client.post("/v1/chat/completions", CHAT, **bearer(other))).status == 200
    refused = await client.post("/v1/chat/completions", CHAT, **bearer(text))
    assert refused.error["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert (await book.door.usage())["anna"] == {"requests": 2, "tokens": 8, "refused": 2, "open": 0}


async def test_parallel_requests_are_counted_until_they_end_however_they_end(tmp_path: Path) -> None:
    keys, text = made(tmp_path, max_parallel=1)
    never = asyncio.Event()
    fleet = ScriptedFleet(never)
    client = client_of(fleet, book=KeyBook(keys))
    headers = {"content-type": "application/json", **bearer(text)}
    async with client.connection("POST", "/v1/chat/completions", json.dumps(CHAT).encode(), **headers):
        await fleet.opened.wait()
        assert (await client.post("/v1/chat/completions", CHAT, **bearer(text))).status == 429
    fleet_that_answers = client_of(ScriptedFleet(*said("hi")), book=KeyBook(keys))
    assert (await fleet_that_answers.post("/v1/chat/completions", CHAT, **bearer(text))).status == 200
    never.set()
    assert (await client.post("/v1/chat/completions", {**CHAT, "model": "?"}, **bearer(text))).status == 404


def test_a_limit_says_when_it_is_over() -> None:
    clock = Clock()
    account = KeyAccount(ApiKey(name="a", sha256="0" * 64, tokens_per_minute=10), clock)
    for count in (4, 8):
        account.enter()
        account.spend(count)
        account.leave()
        clock.now_s += 10
    with pytest.raises(RateLimitError) as caught:
        account.enter()
    assert caught.value.retry_after_s == 40
    clock.now_s += 40
    account.enter()


def test_a_request_that_nobody_ends_is_not_open_for_ever() -> None:
    clock = Clock()
    book = AccountBook([ApiKey(name="a", sha256="0" * 64, max_parallel=1)], 600.0, clock)
    book.enter("a", "1")
    clock.now_s += 599
    with pytest.raises(RateLimitError, match="parallel"):
        book.enter("a", "2")
    clock.now_s += 1
    book.enter("a", "3")
    book.leave("1")
    assert book.usage()["a"] == {"requests": 2, "tokens": 0, "refused": 1, "open": 1}


class LedgerHandle:
    """A ledger in this process, asked as through a Serve handle. ``gone``: nothing answers."""

    def __init__(self, keys: tuple[ApiKey, ...]) -> None:
        self._ledger = KeyLedger(keys, 60.0)
        self.gone = False

    def __getattr__(self, name: str) -> Any:
        async def answer(*arguments: Any) -> Any:
            if self.gone:
                raise ConnectionError("no ledger")
            return await getattr(self._ledger, name)(*arguments)

        return SimpleNamespace(remote=lambda *arguments: asyncio.ensure_future(answer(*arguments)))


async def test_several_ingresses_share_a_keys_limits(tmp_path: Path) -> None:
    keys, text = made(tmp_path, requests_per_minute=3)
    handle = LedgerHandle(keys)
    doors = [SharedDoor(handle, LocalDoor(AccountBook(keys, 60.0))) for _ in range(2)]
    clients = [client_of(ScriptedFleet(*said("hi")), book=KeyBook(keys, door)) for door in doors]

    async def ask(number: int) -> int:
        return (await clients[number % 2].post("/v1/chat/completions", CHAT, **bearer(text))).status

    assert [await ask(number) for number in range(6)] == [200] * 3 + [429] * 3
    await asyncio.sleep(0)
    assert (await doors[0].usage())["anna"] == {"requests": 3, "tokens": 12, "refused": 3, "open": 0}
    # Without the ledger each counts for itself, and nobody is locked out.
    handle.gone = True
    assert [await ask(number) for number in range(8)] == [200] * 6 + [429] * 2
    assert (await doors[1].usage())["anna"]["requests"] == 3


@pytest.mark.parametrize("leaves", [True, False], ids=["its client leaves", "the ledger is slow"])
async def test_a_request_that_does_not_wait_for_the_ledger_is_not_open_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    keys, _ = made(tmp_path, max_parallel=1)
    handle = LedgerHandle(keys)
    counted = asyncio.Event()

    async def enter(name: str, lease: str) -> None:
        await KeyLedger.enter(handle._ledger, name, lease)
        counted.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(handle._ledger, "enter", enter)
    monkeypatch.setattr(ledger, "ANSWER_LIMIT_S", 60.0 if leaves else 0.01)
    door = SharedDoor(handle, LocalDoor(AccountBook(keys, 60.0)))
    entering = asyncio.ensure_future(door.enter(keys[0]))
    await counted.wait()
    if leaves:
        entering.cancel()
    await asyncio.wait([entering])
    assert entering.cancelled() is leaves
    await asyncio.gather(*ledger._on_their_way)
    assert handle._ledger._book.usage()["anna"]["open"] == 0


async def test_another_keys_cached_prompts_cannot_be_told_from_none(tmp_path: Path) -> None:
    _, anna = made(tmp_path)
    ben = add_key(tmp_path / "keys.yaml", "carl")
    long = {**CHAT, "messages": [{"role": "user", "content": "a secret " * 8}], "max_tokens": 1, "temperature": 0}
    async with EngineFleet(make_core(prefix_cache="per-user")) as fleet:
        client = client_of(fleet, book=KeyBook(read_keys(tmp_path / "keys.yaml")))

        async def cached(text: str) -> int:
            reply = await client.post("/v1/chat/completions", long, **bearer(text))
            return int(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert await cached(anna) == 0
        assert await cached(anna) > 0
        assert await cached(ben) == 0


async def test_pages_of_other_origins_are_let_in_only_where_configured(tmp_path: Path) -> None:
    async def ask(client: Client) -> dict[str, str]:
        return (await client.post("/v1/chat/completions", CHAT, origin="https://a.example")).headers

    fleet = ScriptedFleet(*said("hi"))
    assert "access-control-allow-origin" not in await ask(client_of(fleet))
    allowed = await ask(client_of(fleet, cors_origins=("https://a.example",)))
    assert allowed["access-control-allow-origin"] == "https://a.example"
