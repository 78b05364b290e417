"""However a process that owns an engine ends, in the middle of a load: five seconds later nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.faults.harness import poll

GONE_WITHIN_S = 5.0
PARENT = (sys.executable, "-P", "-m", "tests.faults.parent_process")
Owner = tuple[subprocess.Popen[str], psutil.Process]


def start_owner(*options: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(pytest_root())}
    # A session of its own, so that the test can signal the whole process group as a terminal does.
    return subprocess.Popen(
        [*PARENT, *options], stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


def pytest_root() -> str:
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def read_process(owner: subprocess.Popen[str]) -> psutil.Process:
    """The next process that the owner names."""
    assert owner.stdout is not None
    return psutil.Process(int(owner.stdout.readline()))


@pytest.fixture
def owner() -> Iterator[Owner]:
    """A process with a busy engine, and the engine's process."""
    process = start_owner()
    engine = read_process(process)
    yield process, engine
    end(process)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


async def all_gone(*processes: psutil.Process) -> None:
    await poll(lambda: not any(map(alive, processes)), GONE_WITHIN_S, f"the end of {processes}")


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
async def test_the_owner_is_ended(owner: Owner, number: signal.Signals) -> None:
    process, engine = owner
    process.send_signal(number)
    await all_gone(psutil.Process(process.pid), engine)


async def test_ctrl_c_reaches_the_whole_group(owner: Owner) -> None:
    process, engine = owner
    os.killpg(process.pid, signal.SIGINT)
    await all_gone(psutil.Process(process.pid), engine)


async def test_sigterm_to_everything_at_once(owner: Owner) -> None:
    process, engine = owner
    for pid in (engine.pid, process.pid):
        os.kill(pid, signal.SIGTERM)
    await all_gone(psutil.Process(process.pid), engine)


async def test_the_engine_is_killed_and_then_the_owner(owner: Owner) -> None:
    process, engine = owner
    restarted = psutil.Process(process.pid)
    engine.kill()
    await all_gone(engine)
    await poll(lambda: bool(restarted.children()), GONE_WITHIN_S, "the engine's next life")
    children = restarted.children()
    process.kill()
    await all_gone(restarted, *children)


async def test_a_forked_copy_of_the_owner_holds_the_socket_open() -> None:
    process = start_owner("--fork-a-holder")
    holder = read_process(process)
    try:
        engine = read_process(process)
        process.kill()
        await all_gone(psutil.Process(process.pid), engine)
        assert alive(holder)
    finally:
        holder.kill()
        end(process)
