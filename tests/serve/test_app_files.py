"""The app files that come with metalslots: each is valid, Serve takes it, and none listens to others without keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import ConfigError
from serve_app.app import build_app
from serve_app.config import AppConfig, read_app_config
from serve_app.keys import add_key

APPS = Path(__file__).parents[2] / "configs" / "apps"
FILES = sorted(path.name for path in APPS.glob("*.yaml"))
FLEETS = [name for name in FILES if name != "one-mac.yaml"]


def installed(name: str, prefix: Path) -> Path:
    """The app file as on a head whose installation is at ``prefix``."""
    path = prefix / name
    text = (APPS / name).read_text().replace("/opt/metalslots", str(prefix))
    path.write_text(text.replace("../engines", str(APPS.parent / "engines")))
    return path


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    add_key(tmp_path / "etc" / "keys.yaml", "anna")
    return tmp_path


def read(name: str, prefix: Path) -> AppConfig:
    return read_app_config(installed(name, prefix))


def test_there_is_one_for_each_kind_of_office() -> None:
    assert FILES == ["mixed-macs.yaml", "one-mac.yaml", "three-macs.yaml"]


@pytest.mark.parametrize("name", FILES)
def test_serve_takes_it(name: str, prefix: Path) -> None:
    build_app(read(name, prefix))


@pytest.mark.parametrize("name", FLEETS)
def test_what_others_can_reach_asks_for_keys(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are no API keys"):
        read(name, tmp_path)


@pytest.mark.parametrize("name", FLEETS)
def test_it_wants_as_many_replicas_as_there_are_macs(name: str, prefix: Path) -> None:
    config = read(name, prefix)
    assert sum(model.replicas for model in config.models) == config.ingress.replicas == 3


def test_mixed_macs_have_two_models_each_on_macs_of_its_own(prefix: Path) -> None:
    labels = [model.only_on for model in read("mixed-macs.yaml", prefix).models]
    assert labels == ["studio", "mini"]
