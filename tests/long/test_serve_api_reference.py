"""docs/api.md says what the request models do."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from serve_app.ingress.api_reference import ENDPOINTS, markdown

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == markdown(), "run: python -m serve_app.ingress.api_reference > docs/api.md"


@pytest.mark.parametrize(("name", "model"), ENDPOINTS)
def test_every_field_is_in_the_table_of_its_endpoint(name: str, model: type[BaseModel]) -> None:
    section = markdown().split(f"## {name}\n")[1].split("\n## ")[0]
    rows = {row.split("`")[1]: row for row in section.splitlines() if row.startswith("| `")}
    for field in model.model_fields:
        assert any(f"| {support} |" in rows[field] for support in ("honoured", "refused", "no effect"))
