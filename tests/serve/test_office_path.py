"""The README's path for an office: install, join, deploy, ask, drain, upgrade, lose the head, remove. In this order."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.office_path import Office, readme_lines
from tests.serve_endpoint import user

LINES = readme_lines()
# Each step starts machines anew and loads models; on two busy cores that takes minutes.
PATIENCE_S = 200.0
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def office(request: pytest.FixtureRequest) -> Iterator[Office]:
    with Office() as made:
        yield made
        if request.session.testsfailed:
            made.show_logs()


def line(*words: str) -> str:
    """The first line of the README that holds all the words."""
    return next(line for line in LINES if all(word in line for word in words))


def replicas(office: Office) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = office.get("/status").json()["replicas"]
    except (httpx.HTTPError, KeyError, ValueError):
        return []
    return found


def wait_for_replicas(office: Office, num: int) -> None:
    """Wait until ``num`` replicas answer."""
    deadline_s = time.monotonic() + PATIENCE_S
    while (ready := sum(replica["ready"] for replica in replicas(office))) != num:
        assert time.monotonic() < deadline_s, f"{ready} replicas instead of {num}"
        threading.Event().wait(0.5)


def ask(office: Office, model: str) -> str:
    answer = office.client().chat.completions.create(model=model, messages=user("What is new?"), max_tokens=8)
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0
    return answer.model


class Colleagues:
    """People who ask one question after the other while something is done to the fleet."""

    def __init__(self, office: Office, model: str, num: int = 2) -> None:
        self._office = office
        self._model = model
        self._done = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(num)]
        self.num_answers = 0
        self.errors: list[str] = []

    def __enter__(self) -> Colleagues:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        while not self._done.is_set():
            try:
                ask(self._office, self._model)
                self.num_answers += 1
            except openai.OpenAIError as error:
                self.errors.append(repr(error))
            self._done.wait(0.2)


def test_install_the_head_and_make_a_key(office: Office) -> None:
    office.walk(f"{line('install.sh')} --label studio")
    office.key = office.walk(line("keys add")).strip().splitlines()[-1]
    assert office.key.startswith("sk-")


def test_the_others_join_with_the_heads_ticket(office: Office) -> None:
    for address in ("192.168.1.11", "192.168.1.12"):
        assert "is a member" in office.walk(f"{line('join.sh', address)} --label mini")


def test_deploy_and_ask(office: Office) -> None:
    office.walk(line("deploy.sh"))
    office.walk(line("ready"))
    assert ask(office, "office") == "office"
    assert len({replica["node_id"] for replica in replicas(office)}) == len(replicas(office)) == 3


def test_everything_is_as_it_should_be(office: Office) -> None:
    assert "FAIL" not in office.walk(line("check.sh"), office.macs[1])


def test_who_has_no_secret_reaches_nothing(office: Office) -> None:
    assert httpx.get(f"{office.url}/v1/models", verify=office.trust()).status_code == 401
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{office.url}/v1/models")
    with pytest.raises(httpx.TransportError):
        httpx.get(office.url.replace("https", "http"), timeout=5)
    # Ray's agents run jobs and tell what runs.
    for mac in office.macs:
        for number in (2, 4):
            assert httpx.get(f"http://{mac.address}:{mac.first_port + number}/").status_code == 401
    # The list of machines: a stranger has no certificate; whoever has stolen one has no secret.
    assert not office.shakes_hands(office.head.address, office.head_port, certificate=None)
    assert office.shakes_hands(office.head.address, office.head_port, certificate=office.head)
    code = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1]).get_all_node_info()"
    thief = {**office.tls_variables(office.head), "RAY_AUTH_MODE": "disabled"}
    python = str(office.head.prefix / "current" / "bin" / "python")
    said = office.run([python, "-c", code, f"{office.head.address}:{office.head_port}"], expect=1, environment=thief)
    assert "InvalidAuthToken" in said


def test_no_secret_stands_in_a_list_of_processes_or_in_a_log(office: Office) -> None:
    secrets = [(office.head.prefix / "etc" / "token").read_text().strip(), office.key]
    secrets += [path.read_text().splitlines()[1] for path in office.folder.glob("?/etc/tls/*.key")]
    for mac in office.macs:
        processes = mac.processes
        assert len(processes) > 3
        for process in processes:
            try:
                visible = [*process.cmdline(), *process.environ().values()]
            except psutil.Error:
                continue
            assert not [text for text in visible for secret in secrets if secret in text]
        for log in [path for folder in ("log", "ray") for path in (mac.prefix / folder).rglob("*") if path.is_file()]:
            text = log.read_text(errors="replace")
            assert not [secret for secret in secrets if secret in text], log


def test_a_mac_is_drained_and_back_while_people_ask(office: Office) -> None:
    mac = office.macs[1]
    with Colleagues(office, "office") as colleagues:
        office.walk(line("drain.sh"), mac)
        assert sum(replica["draining"] for replica in replicas(office)) == 1
        office.walk(line("drain.sh", "--undo"), mac)
    assert colleagues.errors == []
    assert colleagues.num_answers > 0
    assert not [replica for replica in replicas(office) if replica["draining"]]


def test_a_mac_is_upgraded_while_people_ask(office: Office) -> None:
    mac = office.macs[2]
    old = (mac.prefix / "current").readlink()
    with Colleagues(office, "office") as colleagues:
        office.walk(line("upgrade.sh"), mac)
    assert colleagues.errors == []
    assert (mac.prefix / "current").readlink() != old
    assert sum(replica["ready"] for replica in replicas(office)) == 3


def test_the_head_deploys_again_after_a_power_cut(office: Office) -> None:
    office.head.cut_the_power()
    # What launchd does at boot.
    office.walk(f"{line('install.sh')} --label studio")
    wait_for_replicas(office, 3)
    assert ask(office, "office") == "office"


def test_two_models_for_unlike_macs_at_one_address(office: Office) -> None:
    office.walk(line("deploy.sh").replace("three-macs", "mixed-macs"))
    assert [model["id"] for model in office.get("/v1/models").json()["data"]] == ["large", "small"]
    assert ask(office, "large") == "large"
    assert ask(office, "gpt-4o-mini") in ("gpt-4o-mini", "small")
    by_node: dict[str, list[str]] = {}
    for replica in replicas(office):
        by_node.setdefault(replica["model"], []).append(replica["node_id"])
    assert {model: len(set(nodes)) for model, nodes in by_node.items()} == {"large": 1, "small": 2}
    with pytest.raises(openai.NotFoundError, match=r"large.*small"):
        ask(office, "huge")


def test_a_mac_is_removed_and_leaves_nothing(office: Office) -> None:
    mac = office.macs[2]
    with Colleagues(office, "small") as colleagues:
        office.walk(line("remove.sh"), mac)
    assert colleagues.errors == []
    assert not mac.prefix.exists()
    assert mac.processes == []
    assert Path(office.head.prefix).exists()
