"""Text is prepared in processes that run no model: they must start without MLX, and without a word."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.errors import ModelNotFoundError
from engine.model_source import resolve_model

PROGRAM = """
import sys
from engine.model_source import resolve_model
from engine.text import detokenizer, stop_strings, structured
from engine.text.tokenizer import load_tokenizer
load_tokenizer(resolve_model("demo")).apply_chat_template([{"role": "user", "content": "a"}])
print([name for name in sys.modules if name.split(".")[0] in ("mlx", "mlx_lm", "torch")])
"""


def test_a_process_that_only_prepares_text_loads_no_mlx() -> None:
    try:
        resolve_model("demo")
    except ModelNotFoundError:
        pytest.skip("the demo model is not installed")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
