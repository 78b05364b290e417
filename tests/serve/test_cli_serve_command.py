"""`metalslots serve` as a person runs it: from nothing to an answer, beside a foreign Ray, and out by Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

from serve_app.cli.serve_checks import check_port

COMMAND = Path(sys.executable).with_name("metalslots")
START_S = 110
NO_ORPHAN_S = 5
INTERRUPTED = 130


class Served:
    """A running `metalslots serve`: its process, port and what it has printed."""

    def __init__(self, environment: dict[str, str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.process = subprocess.Popen(
            [COMMAND, "serve", "--port", str(self.port), "--slots", "2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment},
            # A group of its own, as a shell gives it: Ctrl-C reaches all that it has started.
            process_group=0,
        )
        self.text = ""

    def read_until(self, words: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.text += line
            if words in line:
                return
        pytest.fail(f"ended without {words!r}:\n{self.text}")

    def interrupt(self) -> int:
        os.killpg(self.process.pid, signal.SIGINT)
        self.process.communicate(timeout=60)
        return self.process.returncode


@pytest.fixture
def served() -> Iterator[Served]:
    # An address where nothing answers: joining it would fail, so an answer proves a Ray of its own.
    running = Served({"RAY_ADDRESS": "127.0.0.1:1"})
    yield running
    if running.process.poll() is None:
        running.interrupt()


@pytest.mark.timeout(START_S + 120)
def test_serve_answers_and_ctrl_c_in_the_middle_of_a_load_leaves_nothing(served: Served) -> None:
    served.read_until("ready:")
    assert "Paris" in served.text
    folder = re.search(r"logs +(/\S+/mslots-\w+)", served.text)
    assert folder, served.text
    started = psutil.Process(served.process.pid).children(recursive=True)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0)
    stream = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Count."}],
        stream=True,
        max_tokens=4000,
        # An answer that ends by itself within the grace is no answer that was cut off.
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    assert served.interrupt() == 0
    with pytest.raises(openai.APIError, match="stopping"):
        list(stream)
    _, alive = psutil.wait_procs(started, timeout=NO_ORPHAN_S)
    assert not alive
    assert not Path(folder.group(1)).exists()
    check_port("127.0.0.1", served.port)


def test_ctrl_c_while_it_starts_leaves_nothing(served: Served) -> None:
    served.read_until("starting the app")
    started = psutil.Process(served.process.pid).children(recursive=True)
    assert served.interrupt() == INTERRUPTED
    _, alive = psutil.wait_procs(started, timeout=NO_ORPHAN_S)
    assert not alive
