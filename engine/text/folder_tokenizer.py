"""Reads the tokenizer of a model folder in mlx-lm's (Hugging Face's) layout.

Owns: which files say what. Must not know: how the parts are used.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from engine.errors import UnsupportedModelError
from engine.text.parts import TokenizerParts


def read_folder_tokenizer(folder: Path) -> TokenizerParts:
    """Read ``folder``. No code that comes with the model is run.

    Raises UnsupportedModelError when there is no tokenizer that ``tokenizers`` can hold.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises what its many loaders raise
        raise UnsupportedModelError(
            f"The tokenizer in {folder} cannot be loaded: {type(error).__name__}: {error}.",
            "use a model folder that has a tokenizer.json",
        ) from error
    if not loaded.is_fast:
        raise UnsupportedModelError(
            f"The tokenizer in {folder} is a {type(loaded).__name__} written in Python, which threads cannot share.",
            "use a model folder that has a tokenizer.json",
        )
    return TokenizerParts(
        backend=loaded.backend_tokenizer,
        eos_token_ids=_eos_token_ids(folder, loaded.eos_token_id),
        chat_templates=_chat_templates(folder, loaded.chat_template),
        special_tokens=loaded.special_tokens_map,
    )


def _eos_token_ids(folder: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """generation_config.json over config.json, and the tokenizer's own besides: as mlx-lm does."""
    found: Any = None
    config = _read_json(folder / "config.json")
    for values in (_read_json(folder / "generation_config.json"), config, config.get("text_config") or {}):
        found = values.get("eos_token_id") if found is None else found
    ids = found if isinstance(found, list) else [found]
    return tuple(dict.fromkeys(token_id for token_id in (*ids, tokenizer_eos) if token_id is not None))


def _chat_templates(folder: Path, loaded: str | dict[str, str] | None) -> dict[str, str]:
    # Processors of image models keep their template in a file that tokenizers do not read.
    template = loaded or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    return dict(template or {})


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{path} cannot be read: {error}.", "fetch the model again") from error
    return values if isinstance(values, dict) else {}
