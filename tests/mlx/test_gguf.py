"""GGUF files: each architecture gives the model it was made of, each block format its numbers, the rest is refused."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from engine.errors import UnsupportedModelError
from engine.mlx_backend.gguf import read_gguf
from engine.mlx_backend.gguf_blocks import LoadedTensor, load_tensor
from engine.mlx_backend.loader import _from_gguf, load_model
from engine.mlx_backend.mlx_lm_parts import Model
from engine.mlx_backend.step_model import StepForm
from engine.model_source import resolve_model
from engine.text.gguf_metadata import GgufTensor
from tests.mlx.gguf_files import save_gguf
from tests.mlx.k_quants import QUANTISERS, quantise
from tests.mlx.tiny_models import build

TOKENS = [[5, 17, 3, 99, 0, 42, 7, 7, 120, 11, 64, 2, 9, 150, 31, 8]]
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}


def logits_of(model: Model) -> mx.array:
    return model(mx.array(TOKENS))


# GGUF's name -> mlx-lm's module and what its tiny model must have.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"layer_types": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 7, "sliding_window_pattern": 6}),
    "phi2": ("phi", {}),
    "phi3": ("phi3", {}),
}


def build_and_save(architecture: str, path: Path, **changes: Any) -> tuple[Model, Path]:
    module, needs = ARCHITECTURES[architecture]
    model, config = build(module, **{**needs, **changes})
    _randomise_vectors(model)
    return model, save_gguf(model, config, architecture, path)


def _randomise_vectors(model: Model) -> None:
    """Norms and biases begin as ones and zeros, which would hide a wrong place or a missing offset."""
    mx.random.seed(1)
    model.apply(lambda array: mx.random.normal(array.shape) * 0.2 + array if array.ndim == 1 else array)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_file_gives_the_model_it_was_made_of(tmp_path: Path, architecture: str) -> None:
    model, path = build_and_save(architecture, tmp_path / "m.gguf")
    loaded = load_model(resolve_model(str(path)), backend="cpu")
    np.testing.assert_allclose(logits_of(loaded.model), logits_of(model), atol=2e-5)
    assert loaded.facts.eos_token_ids == (3,)
    assert loaded.form is not StepForm.SINGLE


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "phi3"])
def test_tied_embeddings(tmp_path: Path, architecture: str) -> None:
    model, path = build_and_save(architecture, tmp_path / "m.gguf", tie_word_embeddings=True)
    loaded = load_model(resolve_model(str(path)), backend="cpu", parity="off")
    np.testing.assert_allclose(logits_of(loaded.model), logits_of(model), atol=2e-5)


def test_a_window_that_mlx_lm_leaves_out_bounds_the_context(tmp_path: Path) -> None:
    _, path = build_and_save("gemma2", tmp_path / "m.gguf", sliding_window=64)
    assert load_model(resolve_model(str(path)), backend="cpu", parity="off").facts.max_model_len == 64
    _, path = build_and_save("gemma3", tmp_path / "n.gguf", sliding_window=64)
    assert load_model(resolve_model(str(path)), backend="cpu", parity="off").facts.max_model_len == 512


def test_the_parts_of_a_split_model_are_found(tmp_path: Path) -> None:
    model, config = build("llama", layer_types=None)
    save_gguf(model, config, "llama", tmp_path / "m.gguf", split_max_tensors=16)
    first, second = sorted(tmp_path.glob("m-*-of-00002.gguf"))
    loaded = load_model(resolve_model(str(first)), backend="cpu", parity="off")
    np.testing.assert_allclose(logits_of(loaded.model), logits_of(model), atol=2e-5)
    with pytest.raises(UnsupportedModelError, match="name the one that ends in -00001-of-00002"):
        load_model(resolve_model(str(second)), backend="cpu")
    second.unlink()
    with pytest.raises(UnsupportedModelError, match="No such file"):
        load_model(resolve_model(str(first)), backend="cpu")


def test_llama_3_frequency_factors_are_applied(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model, config = build("llama", layer_types=None, rope_scaling=scaling)
    plain = 10000.0 ** (np.arange(0, 16, 2) / 16)
    factors = (np.array(model.layers[0].self_attn.rope._freqs) / plain).astype(np.float32)
    path = save_gguf(model, config, "llama", tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors})
    loaded = load_model(resolve_model(str(path)), backend="cpu", parity="off")
    np.testing.assert_allclose(logits_of(loaded.model), logits_of(model), atol=1e-5)


def test_phi_3_frequency_factors_are_applied(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    short, long = (rng.uniform(1, 3, 4).astype(np.float32) for _ in range(2))
    scaling = {"type": "longrope", "short_factor": short.tolist(), "long_factor": long.tolist()}
    model, config = build("phi3", rope_scaling=scaling, original_max_position_embeddings=128)
    metadata = {"phi3.rope.scaling.original_context_length": 128, "phi3.rope.scaling.type": "longrope"}
    tensors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    path = save_gguf(model, config, "phi3", tmp_path / "m.gguf", metadata=metadata, tensors=tensors)
    loaded = load_model(resolve_model(str(path)), backend="cpu", parity="off")
    np.testing.assert_allclose(logits_of(loaded.model), logits_of(model), atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_linear_rope_scaling_is_applied(tmp_path: Path, architecture: str) -> None:
    module, needs = ARCHITECTURES[architecture]
    model, config = build(module, **needs, rope_scaling={"type": "linear", "factor": 4.0})
    metadata = {f"{architecture}.rope.scaling.type": "linear", f"{architecture}.rope.scaling.factor": 4.0}
    path = save_gguf(model, config, architecture, tmp_path / "m.gguf", metadata=metadata)
    loaded = load_model(resolve_model(str(path)), backend="cpu", parity="off")
    np.testing.assert_allclose(logits_of(loaded.model), logits_of(model), atol=2e-5)


EXACT = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q4_K, Kind.Q5_K)
QUANTISED_ANEW = {Kind.Q2_K: 4, Kind.Q3_K: 5, Kind.Q6_K: 8, Kind.TQ1_0: 4, Kind.TQ2_0: 4, Kind.MXFP4: 6}
DEQUANTISED_ONLY = (
    Kind.IQ1_S,
    Kind.IQ2_XXS,
    Kind.IQ2_XS,
    Kind.IQ2_S,
    Kind.IQ3_XXS,
    Kind.IQ3_S,
    Kind.IQ4_NL,
    Kind.IQ4_XS,
)


def random_values(rows: int = 24, columns: int = 512) -> NDArray[np.float32]:
    return np.random.default_rng(0).normal(size=(rows, columns)).astype(np.float32)


def blocks_of(kind: Kind) -> NDArray[np.uint8]:
    if kind in QUANTISERS:
        return quantise(random_values(), kind)
    if kind in DEQUANTISED_ONLY:  # the package cannot write these: random codes with a sane scale in front
        values, size = GGML_QUANT_SIZES[kind]
        blocks = np.random.default_rng(0).integers(0, 256, (24 * 512 // values, size), np.uint8)
        blocks[:, :2] = np.array([0.01], np.float16).view(np.uint8)
        return blocks.reshape(24, -1)
    return quantize(random_values(), kind).view(np.uint8).reshape(24, -1)


def load_blocks(
    folder: Path, kind: Kind, dense_dtype: mx.Dtype | None, half_dtype: mx.Dtype = mx.float16
) -> LoadedTensor:
    path = folder / "blocks"
    path.write_bytes(b"head" * 8 + blocks_of(kind).tobytes())
    return load_tensor(GgufTensor("blk.0.ffn_up.weight", (512, 24), kind.value, path, 32), dense_dtype, half_dtype)


def unpack(loaded: LoadedTensor) -> NDArray[np.float32]:
    leaves = loaded.leaves
    if loaded.bits is None:
        return np.array(leaves["weight"].astype(mx.float32))
    scales, biases = leaves["scales"].astype(mx.float32), leaves["biases"].astype(mx.float32)
    return np.array(mx.dequantize(leaves["weight"], scales, biases, 32, loaded.bits))


@pytest.mark.parametrize("kind", [*EXACT, *QUANTISED_ANEW, *DEQUANTISED_ONLY, Kind.BF16, Kind.F16, Kind.F32])
def test_dense_weights_are_the_dequantisers(tmp_path: Path, kind: Kind) -> None:
    loaded = load_blocks(tmp_path, kind, mx.float32)
    assert loaded.bits is None
    np.testing.assert_array_equal(unpack(loaded), dequantize(blocks_of(kind), kind))


@pytest.mark.parametrize("kind", EXACT)
def test_affine_formats_keep_their_codes(tmp_path: Path, kind: Kind) -> None:
    loaded = load_blocks(tmp_path, kind, None)
    expected = dequantize(blocks_of(kind), kind)
    assert loaded.leaves["weight"].nbytes * 8 == loaded.bits * expected.size
    # One scale and one smallest value of a K block are products that half precision rounds; the rest is kept.
    spread = np.abs(expected).max() * (2**-10 if kind in QUANTISERS else 0)
    np.testing.assert_allclose(unpack(loaded), expected, atol=spread + 1e-7)
    assert loaded.added_error < (1e-3 if kind in QUANTISERS else 1e-6)


@pytest.mark.parametrize("kind", QUANTISED_ANEW)
def test_other_formats_get_the_fewest_bits_that_add_little(tmp_path: Path, kind: Kind) -> None:
    loaded = load_blocks(tmp_path, kind, None)
    expected = dequantize(blocks_of(kind), kind)
    assert loaded.bits == QUANTISED_ANEW[kind]
    measured = np.sqrt(np.square(unpack(loaded) - expected).mean() / np.square(expected).mean())
    np.testing.assert_allclose(loaded.added_error, measured, rtol=1e-3)
    if kind in QUANTISERS:
        own = np.sqrt(np.square(expected - random_values()).mean())
        both = np.sqrt(np.square(unpack(loaded) - random_values()).mean())
        assert both < 1.1 * own


@pytest.mark.parametrize("half_dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16])
def test_floats_stay_dense(tmp_path: Path, kind: Kind, half_dtype: mx.Dtype) -> None:
    loaded = load_blocks(tmp_path, kind, None, half_dtype)
    assert (loaded.bits, loaded.leaves["weight"].dtype, loaded.added_error) == (None, half_dtype, 0.0)


@pytest.mark.parametrize("kind", [Kind.Q8_K, Kind.I32, Kind.F64])
def test_formats_without_a_dequantiser_are_refused(tmp_path: Path, kind: Kind) -> None:
    tensor = GgufTensor("blk.0.ffn_up.weight", (512, 24), kind.value, tmp_path / "blocks", 0)
    tensor.path.write_bytes(bytes(200_000))
    with pytest.raises(UnsupportedModelError, match=f"stored as {kind.name}"):
        load_tensor(tensor, None, mx.float16)


def test_values_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    blocks = blocks_of(Kind.Q8_0)
    blocks[5, :2] = np.array([np.inf], np.float16).view(np.uint8)
    path = tmp_path / "blocks"
    path.write_bytes(blocks.tobytes())
    with pytest.raises(UnsupportedModelError, match="no numbers"):
        load_tensor(GgufTensor("blk.0.ffn_up.weight", (512, 24), Kind.Q8_0.value, path, 0), mx.float32, mx.float16)


def test_loading_needs_its_result_and_little_more(tmp_path: Path) -> None:
    values, size = GGML_QUANT_SIZES[Kind.Q4_K]
    rows, columns = 4096, 4096
    path = tmp_path / "blocks"
    path.write_bytes(bytes(rows * columns // values * size))
    tensor = GgufTensor("output.weight", (columns, rows), Kind.Q4_K.value, path, 0)
    for dense_dtype in (mx.float32, None):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        tracemalloc.start()
        loaded = load_tensor(tensor, dense_dtype, mx.float16)
        in_numpy = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        result = sum(leaf.nbytes for leaf in loaded.leaves.values())
        # 64 MiB dense; a piece is 4 MiB in float32, of which few copies exist in each of at most nine places.
        assert mx.get_peak_memory() - before < result + 32 * 2**20
        assert in_numpy < 160 * 2**20
        del loaded


def test_a_packed_file_computes_what_its_dense_form_does(tmp_path: Path) -> None:
    model, config = build("llama", layer_types=None, **WIDE)
    kinds = (Kind.Q4_K, Kind.Q6_K, Kind.Q5_0, Kind.Q3_K)
    path = save_gguf(model, config, "llama", tmp_path / "m.gguf", kinds=lambda name, _: kinds[len(name) % 4])
    packed, dense = read_gguf(path, None), read_gguf(path, mx.float32)
    assert not dense.quantization
    assert not dense.notes
    assert {entry["bits"] for entry in packed.quantization.values()} == {4, 5, 8}
    assert any("Q3_K are held in MLX's 5-bit groups of 32" in note for note in packed.notes)
    for module, entry in packed.quantization.items():
        scales, biases = (packed.weights[f"{module}.{leaf}"].astype(mx.float32) for leaf in ("scales", "biases"))
        unpacked = mx.dequantize(packed.weights[f"{module}.weight"], scales, biases, 32, entry["bits"])
        expected = dense.weights[f"{module}.weight"]
        assert (mx.square(unpacked - expected).mean() / mx.square(expected).mean()).item() < 0.04**2


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "phi3", "qwen2"])
def test_a_packed_model_computes_nearly_what_its_file_says(tmp_path: Path, architecture: str) -> None:
    module, needs = ARCHITECTURES[architecture]
    model, config = build(module, **needs, **WIDE)
    _randomise_vectors(model)
    kinds = (Kind.Q8_0, Kind.Q6_K, Kind.BF16)
    path = save_gguf(model, config, architecture, tmp_path / "m.gguf", kinds=lambda name, _: kinds[len(name) % 3])
    packed, _, _ = _from_gguf(path, None)
    dense = load_model(resolve_model(str(path)), backend="cpu", parity="off").model
    half_dtype = mx.bfloat16 if architecture == "gemma3" else mx.float16
    assert {array.dtype for _, array in tree_flatten(packed.parameters())} == {mx.uint32, half_dtype}
    # Activations in bfloat16 would differ far more than weights do.
    packed.set_dtype(mx.float32)
    expected = np.array(logits_of(dense))
    difference = np.abs(np.array(logits_of(packed)) - expected)
    assert difference.max() < (0.15 if half_dtype == mx.bfloat16 else 0.05) * np.abs(expected).max()


def test_the_demo_file_keeps_its_packed_weights_for_a_gpu() -> None:
    path = resolve_model("demo").path
    packed, dense = read_gguf(path, None), read_gguf(path, mx.float32)
    assert packed.quantization["model.layers.0.mlp.up_proj"] == {"group_size": 32, "bits": 4}
    assert packed.quantization["model.embed_tokens"] == {"group_size": 32, "bits": 8}
    assert not packed.notes
    name = "model.layers.3.self_attn.q_proj"
    scales, biases = (packed.weights[f"{name}.{leaf}"].astype(mx.float32) for leaf in ("scales", "biases"))
    unpacked = mx.dequantize(packed.weights[f"{name}.weight"], scales, biases, 32, 4)
    np.testing.assert_allclose(unpacked, dense.weights[f"{name}.weight"], atol=1e-6)
    assert {a.dtype for a in packed.weights.values()} == {mx.uint32, mx.float16}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "RoPE scaling 'yarn'"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "only a part of each head"),
        ({"tensors": {"blk.0.ffn_gate_inp.weight": np.zeros((4, 64), np.float32)}}, "ffn_gate_inp"),
        ({"metadata": {"llama.feed_forward_length": 97}}, "does not fit its own description"),
        ({"metadata": {"llama.block_count": "three"}}, "no single number under llama.block_count"),
    ],
)
def test_files_that_cannot_be_computed_right_are_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    model, config = build("llama", layer_types=None)
    path = save_gguf(model, config, "llama", tmp_path / "m.gguf", **changes)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(resolve_model(str(path)), backend="cpu")


def test_an_architecture_without_an_entry_is_refused_with_those_that_have_one(tmp_path: Path) -> None:
    model, config = build("llama", layer_types=None)
    path = save_gguf(model, config, "rwkv7", tmp_path / "m.gguf")
    with pytest.raises(UnsupportedModelError, match=r"'rwkv7' is not known here \(known: llama, qwen2, qwen3, gemma, "):
        load_model(resolve_model(str(path)), backend="cpu")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(resolve_model("demo").path.read_bytes()[:60_000_000])
    with pytest.raises(UnsupportedModelError, match=r"m\.gguf cannot be read.*past the end of the file"):
        load_model(resolve_model(str(path)), backend="cpu")
