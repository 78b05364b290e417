"""A process that owns an engine and keeps it busy until it is ended from outside: what a replica is to its engine."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys

from tests.core_fakes import make_request
from tests.faults.harness import ask, chain_engine

NUM_CLIENTS = 8


async def keep_asking(client: int) -> None:
    """One client without a pause. Announces its first answer."""
    for number in itertools.count():
        await ask(engine, make_request(f"{client}/{number}", f"client {client}", 50))
        if client == number == 0:
            print(engine.engine_pid, flush=True)


async def main() -> None:
    """Serve until cancelled, then end the engine in order."""
    await engine.start()
    if "--fork-a-holder" in sys.argv:
        fork_a_holder()
    try:
        await asyncio.gather(*(keep_asking(client) for client in range(NUM_CLIENTS)))
    finally:
        await engine.close(grace_s=1.0)


def fork_a_holder() -> None:
    """A copy of this process that keeps its end of the engine's socket open. Says who it is."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
    print(pid, flush=True)


if __name__ == "__main__":
    engine = chain_engine()
    asyncio.run(main())
