"""The app's configuration: defaults, names, and errors that name the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config import MAX_SLOTS
from engine.errors import ConfigError
from serve_app.config import REFUSAL_HEADROOM, load_app_config, read_app_config

ROOT = Path(__file__).parents[2]


def test_nothing_given_serves_the_demo_model_on_this_machine_only() -> None:
    config = load_app_config({})
    assert [model.name for model in config.models] == ["demo"]
    assert (config.host, config.port) == ("127.0.0.1", 8000)
    assert config.limits.max_body_bytes == 8 * 2**20


def test_the_file_for_one_mac_is_valid_as_it_comes() -> None:
    assert read_app_config(ROOT / "configs" / "apps" / "one-mac.yaml").models


@pytest.mark.parametrize(
    ("values", "message", "fix"),
    [
        ({"prot": 1}, "`prot`", "`port`"),
        ({"port": "http"}, "`port`", ""),
        ({"port": 99999}, "`port`", ""),
        ({"models": []}, "`models`", ""),
        ({"models": {"name": "demo"}}, "`models`", "a list"),
        ({"models": ["demo"]}, "`models.0`", ""),
        ({"models": [{"nam": "demo"}]}, "`nam`", "`name`"),
        ({"models": [{"engine": {"slot": 4}}]}, "`slot`", "`slots`"),
        ({"models": [{"engine": {"slots": 1000}}]}, "`slots`", str(MAX_SLOTS)),
        ({"models": [{"engine": 4}]}, "`models.0.engine`", ""),
        ({"models": [{"engine": "missing.yaml"}]}, "missing.yaml", ""),
        ({"models": [{}, {}]}, "`demo`", "another `name`"),
        ({"models": [{"name": "a", "aliases": ["demo"]}, {}]}, "`demo`", "another `name`"),
        ({"replica": {"flush_interval": 30}}, "`replica.flush_interval`", "`flush_interval_ms`"),
        ({"replica": {"engine_runs": "elsewhere"}}, "`replica.engine_runs`", ""),
        ({"limits": {"max_body_bytes": 0}}, "`limits.max_body_bytes`", ""),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], message: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_app_config(values)
    assert message in caught.value.message
    assert fix in caught.value.fix


def test_sizes_may_have_units_and_slots_an_alias() -> None:
    config = load_app_config({"limits": {"max_body_bytes": "1 MiB"}, "models": [{"engine": {"parallel": 8}}]})
    assert config.limits.max_body_bytes == 2**20
    assert config.engines[0].slots == 8


def test_an_engine_file_is_found_beside_the_app_file(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text("slots: 2\n")
    (tmp_path / "app.yaml").write_text("models:\n- engine: small.yaml\n")
    assert read_app_config(tmp_path / "app.yaml").engines[0].slots == 2


@pytest.mark.parametrize(
    ("model", "name"),
    [("demo", "demo"), ("org/model", "org/model"), ("/models/llama-8b", "llama-8b"), ("./small.gguf", "small")],
)
def test_a_model_is_called_after_its_file_or_hub_name(model: str, name: str) -> None:
    assert load_app_config({"models": [{"engine": {"model": model}}]}).models[0].name == name


def test_deployments_have_names_that_serve_allows_and_none_twice() -> None:
    models = [{"name": name} for name in ("org/model", "org-model", "org#model", "demo")]
    names = [model.deployment_name for model in load_app_config({"models": models}).models]
    assert len(set(names)) == len(names)
    assert all(character.isalnum() or character in "_.-" for name in names for character in name)


@pytest.mark.parametrize(("slots", "num_slots"), [(4, 4), ("auto", MAX_SLOTS)])
def test_serve_lets_more_calls_through_than_the_engine_takes(slots: int | str, num_slots: int) -> None:
    engine = {"slots": slots, "max_waiting_requests": 10}
    model = load_app_config({"models": [{"engine": engine}]}).models[0]
    assert model.max_ongoing_requests == num_slots + 10 + REFUSAL_HEADROOM
