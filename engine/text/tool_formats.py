"""How each family of models writes a tool call, found by what its chat template shows.

Owns: the marks around a call and the parser between them. Must not know: streams, requests.

The parsers are mlx-lm's. They are plain Python, but importing ``mlx_lm`` imports MLX, so their folder is loaded as a
package of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

Parse = Callable[[str, Any], Any]
Tool = Mapping[str, Any]

_PACKAGE = "metalslots_tool_parsers"
BARE = "bare"
HARMONY = "harmony"
# Llama 3 may write it before a call.
PYTHON_TAG = "<|python_tag|>"
# Special tokens inside of a call, which its parser has to see.
_INNER_MARKS = {
    "mistral": ("[ARGS]", "[CALL_ID]"),
    "kimi_k2": ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "gemma4": ('<|"|>',),
    "function_gemma": ("<escape>",),
    "glm47": ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    BARE: (PYTHON_TAG,),
    "longcat": ("<longcat_arg_key>", "</longcat_arg_key>", "<longcat_arg_value>", "</longcat_arg_value>"),
}
# What a template has to hold for each of mlx-lm's parsers; the first that fits is taken.
_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("function_gemma", ("<start_function_call>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("glm47", ("<arg_key>",)),
    ("pythonic", ("<|tool_call_start|>",)),
    ("pythonic", ("<|tool_list_start|>",)),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("minicpm5", ('<function name="', '<param name="')),
    ("mistral", ("[TOOL_CALLS]",)),
    ("muse_spark", ("<atem:function_calls>",)),
    ("json_tools", ("<tool_call>",)),
)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """``start`` and ``end`` enclose one or more calls; without an ``end`` they last to the answer's end. Calls of the
    formats BARE (engine.text.bare_calls) and HARMONY (engine.text.harmony) have no marks and readers of their own.

    ``parse`` takes the text between them and the tools, and returns one call or several, each with ``name`` and
    ``arguments``; it may raise anything. ``native``: the model's template shows tools and calls by itself.
    ``writes_json``: a call is the JSON of its name and arguments, in that order.
    """

    name: str
    start: str
    end: str
    parse: Parse
    native: bool
    writes_json: bool

    @property
    def marks(self) -> tuple[str, ...]:
        """Everything that stands around and inside of calls and may be a special token."""
        return tuple(mark for mark in (self.start, self.end, *_INNER_MARKS.get(self.name, ())) if mark)


@lru_cache(8)
def find_tool_format(template: str) -> ToolFormat:
    """Return the format that ``template`` speaks of; JSON between ``<tool_call>`` marks for one that knows no tools."""
    if not re.search(r"\btools\b", template):
        return _json_format(native=False)
    for name, marks in _MARKS:
        if all(mark in template for mark in marks):
            module = _load_parser(name)
            if module is not None and name != "json_tools":
                return ToolFormat(
                    name, module.tool_call_start, module.tool_call_end, module.parse_tool_call, True, False
                )
            return _json_format(native=True)
    if all(mark in template for mark in ("<|channel|>", "<|message|>")):
        return ToolFormat(HARMONY, "", "", _parse_json, True, False)
    # A template that shows tools without any of the marks leaves JSON alone to expect, as Llama 3's do.
    return ToolFormat(BARE, "", "", _parse_json, True, False)


def _json_format(*, native: bool) -> ToolFormat:
    return ToolFormat("json", "<tool_call>", "</tool_call>", _parse_json, native, True)


def _parse_json(text: str, _tools: Sequence[Tool]) -> Any:
    return json.loads(text)


def _load_parser(name: str) -> ModuleType | None:
    """One of mlx-lm's parsers, without mlx-lm itself; None when this mlx-lm has none of that name."""
    if _PACKAGE not in sys.modules:
        found = importlib.util.find_spec("mlx_lm")  # does not import it
        folders = [Path(place) / "tool_parsers" for place in (found.submodule_search_locations or ())] if found else []
        folder = next((folder for folder in folders if folder.is_dir()), None)
        if folder is None:
            return None
        spec = importlib.util.spec_from_file_location(
            _PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules[_PACKAGE] = package
        spec.loader.exec_module(package)
    try:
        return importlib.import_module(f"{_PACKAGE}.{name}")
    except ImportError:
        return None
