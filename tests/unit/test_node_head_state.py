"""What the head's Ray keeps on disk is its own head's, of this release and this Ray, or it is forgotten."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from engine.errors import ConfigError
from serve_app.node import head_state
from serve_app.node.head_state import HeadState
from serve_app.node.settings import Installation, load_settings

HEAD = {"role": "head", "address": "10.0.0.1", "head": "10.0.0.1:6379", "keep_state": True}


def state(folder: Path, **changes: object) -> HeadState:
    return HeadState(folder / "ray-state", load_settings({**HEAD, **changes}))


def test_it_stays_from_one_start_to_the_next(tmp_path: Path) -> None:
    state(tmp_path).prepare()
    kept = tmp_path / "ray-state" / "kept"
    kept.touch()
    state(tmp_path).prepare()
    assert kept.exists()
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    state(tmp_path).forget()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("change", ["release", "ray", "address", "nobody's"])
def test_what_others_have_left_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    state(tmp_path).prepare()
    kept = tmp_path / "ray-state" / "kept"
    kept.touch()
    changes = {}
    match change:
        case "release":
            monkeypatch.setattr(sys, "prefix", "/elsewhere")
        case "ray":
            monkeypatch.setattr(head_state, "version", lambda _name: "0.1")
        case "address":
            changes = {"address": "10.0.0.2", "head": "10.0.0.2:6379"}
        case _:
            (tmp_path / "ray-state.made-by").unlink()
    state(tmp_path, **changes).prepare()
    assert not kept.exists()
    assert kept.parent.is_dir()


def test_only_a_head_that_is_to_keep_it_tells_ray_so(tmp_path: Path) -> None:
    installation = Installation(tmp_path)
    kept = installation.environment(load_settings(HEAD))
    assert (kept["RAY_gcs_storage"], kept["RAY_gcs_storage_path"]) == ("rocksdb", str(tmp_path / "run" / "ray-state"))
    assert "RAY_gcs_storage" not in installation.environment(load_settings({**HEAD, "keep_state": False}))
    with pytest.raises(ConfigError, match="only the head"):
        load_settings({**HEAD, "role": "member"})
