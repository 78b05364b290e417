"""The demo model's file: equal to its converted folder, and still an answer after its weights became K-quants."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from engine.mlx_backend.export import export_folder
from engine.mlx_backend.loaded_model import LoadedModel
from engine.mlx_backend.loader import load_model
from engine.mlx_backend.model_runner import MlxModelRunner
from engine.model_source import resolve_model
from engine.text.gguf_metadata import read_gguf_metadata, read_gguf_tensors
from engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.mlx.driver import Driver, Sequence
from tests.mlx.k_quants import quantise
from tests.mlx.test_demo_greedy import QUESTIONS
from tests.unit.text_samples import HARD_TEXTS

NUM_TOKENS = 8


def answers(loaded: LoadedModel, tokenizer: Tokenizer, questions: tuple[str, ...]) -> list[str]:
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": question}]) for question in questions]
    runner = MlxModelRunner(loaded, num_blocks=100, block_size=16, slots=4, max_chunk_tokens=64)
    sequences = [Sequence(str(index), prompt) for index, prompt in enumerate(prompts)]
    Driver(runner, 100, 16).generate(sequences, 4, NUM_TOKENS, stop=frozenset(tokenizer.eos_token_ids))
    runner.close()
    return [tokenizer.decode(sequence.output) for sequence in sequences]


def test_the_converted_folder_gives_equal_greedy_text(tmp_path: Path, demo: LoadedModel) -> None:
    export_folder(resolve_model("demo"), tmp_path, backend="cpu")
    source = resolve_model(str(tmp_path))
    ours, theirs = load_tokenizer(resolve_model("demo")), load_tokenizer(source)
    for text in HARD_TEXTS:
        assert ours.encode(text) == theirs.encode(text)
    converted = load_model(source, backend="cpu", parity="off")
    assert theirs.eos_token_ids == ours.eos_token_ids
    assert answers(converted, theirs, QUESTIONS[:4]) == answers(demo, ours, QUESTIONS[:4])


@pytest.fixture(scope="module")
def k_quant_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo file with every ``ffn_down`` in K formats, the one kind of row in it that is a multiple of 256 long."""
    source = resolve_model("demo").path
    path = tmp_path_factory.mktemp("k") / "demo-K.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in read_gguf_metadata(source).items():
        if key not in ("general.architecture", "general.quantization_version", "general.file_type"):
            _add(writer, key, value)
    kinds = (Kind.Q4_K, Kind.Q6_K)
    for index, tensor in enumerate(read_gguf_tensors(source)):
        kind = Kind(tensor.type_number)
        block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        num_bytes = tensor.num_values // block_values * block_bytes
        data = np.fromfile(source, np.uint8, num_bytes, offset=tensor.offset)
        data = data.reshape(*reversed(tensor.dimensions[1:]), -1)
        if tensor.name.endswith("ffn_down.weight"):
            values, kind = dequantize(data, kind), kinds[index % 2]
            data = quantise(values, kind)
        floats = {Kind.F32: np.float32, Kind.F16: np.float16}.get(kind)
        writer.add_tensor(tensor.name, data if floats is None else data.view(floats), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    kind = gguf.GGUFValueType.get_type(value)
    if isinstance(value, int) and not isinstance(value, bool):
        kind = gguf.GGUFValueType.UINT32
    writer.add_key_value(key, value, kind)


def test_a_file_with_k_quants_loads_and_answers(k_quant_file: Path) -> None:
    source = resolve_model(str(k_quant_file))
    loaded = load_model(source, backend="cpu", parity="off")
    (answer,) = answers(loaded, load_tokenizer(source), ("What is the capital of France?",))
    assert "Paris" in answer
