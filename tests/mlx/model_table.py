"""``python -m tests.mlx.model_table --write``: docs/models.md from what the parity probe finds on tiny models.

Owns: the page. The registry test holds it to what the probe finds in the test's own run.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.paged_cache import LayerShape
from engine.mlx_backend.probe import prove_form
from engine.mlx_backend.step_model import StepForm
from tests.mlx.tiny_models import tiny_model
from tests.model_zoo import module_names
from tests.model_zoo_configs import NOT_BUILT

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_BEGIN, _END = "<!-- table: python -m tests.mlx.model_table --write -->", "<!-- end of table -->"


@dataclass(frozen=True, slots=True)
class Line:
    """What the page says of one module."""

    module: str
    keeps: str
    served: str
    form: str
    reason: str

    def __str__(self) -> str:
        return f"| {self.module} | {self.keeps} | {self.served} | {self.form} | {self.reason} |"


def line_of(module: str) -> Line:
    """Build the module's tiny model and let the probe judge it."""
    if module in NOT_BUILT:
        return Line(module, "", "unknown", "", f"Not made here: {NOT_BUILT[module]}.")
    loaded = prove_form(tiny_model(module))
    served = "single" if loaded.form is StepForm.SINGLE else "slots"
    return Line(module, _keeps(loaded), served, loaded.form.value, _without_numbers(loaded.form_reason))


def _keeps(loaded: LoadedModel) -> str:
    """The kinds of cache, by number of layers."""
    layout = loaded.layout
    if layout is None:
        return "its own caches"
    kinds = Counter(_kind(layer) for layer in layout.attention)
    kinds["state"] = len(layout.states)
    return ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()) if number)


def _kind(layer: LayerShape) -> str:
    if layer.window:
        return "window"
    return "latent" if layer.num_kv_heads == 1 and layer.k_head_dim != layer.v_head_dim else "full"


def _without_numbers(reason: str) -> str:
    """Sizes of differences vary with the machine's arithmetic."""
    return re.sub(r"(own result)( beyond[^:]*)?:.*", r"\1\2.", reason)


def table(lines: list[Line]) -> str:
    """The page's table with its summary."""
    served = Counter(line.served for line in lines)
    forms = Counter(line.form for line in lines if line.form)
    by_form = ", ".join(f"{number} {form}" for form, number in forms.most_common())
    return "\n".join(
        [
            _BEGIN,
            "",
            f"{served['slots']} modules in slots, {served['single']} one at a time, {served['unknown']} not made here; "
            f"by form: {by_form}.",
            "",
            "| module | keeps, by layer | served | form | why not a faster form |",
            "| --- | --- | --- | --- | --- |",
            *map(str, lines),
            "",
            _END,
        ]
    )


def table_in_page() -> str:
    """The table as the page has it."""
    text = PAGE.read_text()
    return text[text.index(_BEGIN) : text.index(_END) + len(_END)]


def main() -> int:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description="docs/models.md from the parity probe on tiny models.")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    text = table([line_of(module) for module in module_names()])
    if options.write:
        PAGE.write_text(PAGE.read_text().replace(table_in_page(), text))
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
