"""A part of the fuzzing that `python -m tests.fuzz_bodies` does, and bodies of many megabytes."""

from __future__ import annotations

import pytest

from tests.fuzz_bodies import run
from tests.serve_fakes import CHAT, EngineFleet, client_of


@pytest.mark.parametrize("seed", range(2))
async def test_no_body_breaks_anything(seed: int) -> None:
    findings = await run(150, seed)
    assert findings.wrong == []
    assert {200, 400} <= set(findings.statuses)


async def test_a_body_of_twenty_megabytes_is_refused_and_the_next_request_answered() -> None:
    async with EngineFleet() as fleet:
        client = client_of(fleet)
        for path in ("/v1/chat/completions", "/v1/messages"):
            reply = await client.post(path, b'{"messages": "' + b"x" * 20_000_000 + b'"}')
            assert reply.status == 413
        assert (await client.post("/v1/chat/completions", {**CHAT, "max_tokens": 1})).status == 200
