"""The measured gain as the engine reads it from a profile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.core.gains import read_gains
from engine.errors import ConfigError
from serve_app.capacity.perf_model import FittedTimes
from serve_app.capacity.profile import SCHEMA, MachineProfile, write_profile


def test_what_the_bench_writes_is_read(tmp_path: Path) -> None:
    times = FittedTimes(0.01, 0.001, 1e-6, 0.02, 1e-4, 1e-8)
    gains = {1: 1.0, 2: 1.7, 4: 2.25}
    path = tmp_path / "profile.json"
    write_profile(MachineProfile(SCHEMA, "2026-01-01", "a Mac", "demo", times, 0.05, 0.1, gains, 512, 0.5), path)
    assert read_gains(str(path), "demo") == gains


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (json.dumps({"model": "other", "gains": {"1": 1.0}}), "measured with 'other'"),
        (json.dumps({"model": "demo"}), "no profile"),
        ("{", "no profile"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_profile_of_this_model_is_refused(text: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_gains(str(path), "demo")
    assert "bench profile" in caught.value.fix
