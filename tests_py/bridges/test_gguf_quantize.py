# SPDX-License-Identifier: Apache-2.0
"""K-quants made of values: gguf-py reads them, and they are no worse than ggml's own."""

import numpy as np
import pytest
from breccia.bridges import dequantize_gguf, quantize_gguf
from breccia.bridges.gguf import KINDS, TYPES
from breccia.checkpoint import SafetensorsFile
from checkpoints import minilm

ml_dtypes = pytest.importorskip("ml_dtypes")

K_QUANTS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
# The error of ggml's quantize_row_*_ref on `weights`, as a part of the norm: the library in the wheel of gpt4all 2.8.2.
GGML = {
    "random": {"Q2_K": 0.30256, "Q3_K": 0.15229, "Q4_K": 0.07226, "Q5_K": 0.0387, "Q6_K": 0.0179},
    "minilm": {"Q2_K": 0.31637, "Q3_K": 0.16041, "Q4_K": 0.07645, "Q5_K": 0.04176, "Q6_K": 0.0194},
}


def weights(which: str) -> np.ndarray:
    if which == "random":
        return np.random.default_rng(0).standard_normal((64, 1024)).astype(np.float32) / 50
    (path,) = minilm().glob("*.safetensors")
    return np.asarray(SafetensorsFile(path)["encoder.layer.3.output.dense.weight"], np.float32)


def noise(x: np.ndarray, kind: str) -> float:
    values = dequantize_gguf(quantize_gguf(x, kind), kind)
    return float(np.linalg.norm(values - x) / np.linalg.norm(x))


@pytest.mark.parametrize("which", GGML)
@pytest.mark.parametrize("kind", K_QUANTS)
def test_error_is_below_that_of_ggml(kind: str, which: str) -> None:
    assert noise(weights(which), kind) < GGML[which][kind]


def ramps(seed: int) -> np.ndarray:
    """Runs of every kind: of one sign, of one value, of zeros, with one large value, in any order of magnitude."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((24, 1024)).astype(np.float32)
    x[1::8], x[2::8], x[3::8] = np.abs(x[1::8]), -np.abs(x[2::8]), 0.375
    x[4::8] = 0
    x[5::8, ::50] *= 1000
    x[6::8, 100:400] = 0
    scale = 2.0 ** rng.integers(-8, 9, (24, 1))
    return (x * scale).astype(np.float32)


@pytest.mark.parametrize("kind", K_QUANTS)
def test_gguf_py_reads_the_same_values(kind: str) -> None:
    quants, constants = pytest.importorskip("gguf.quants"), pytest.importorskip("gguf.constants")
    x = ramps(1)
    raw = quantize_gguf(x, kind)
    _, block, nbytes = TYPES[kind]
    assert raw.dtype == np.uint8 and raw.shape == (24, 1024 // block * nbytes)
    values = quants.dequantize(raw, constants.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(values, dequantize_gguf(raw, kind))
    bits = {"Q2_K": 2, "Q3_K": 3, "Q4_K": 4, "Q5_K": 5, "Q6_K": 6}[kind]
    amax = np.abs(x).reshape(24, -1, block).max(axis=-1)
    error = np.abs(values - x).reshape(24, -1, block).max(axis=-1)
    assert (error <= amax * 2.0 ** (2 - bits)).all()
    assert not values[4::8].any()


@pytest.mark.parametrize("kind", K_QUANTS)
def test_super_blocks_do_not_depend_on_others(kind: str) -> None:
    x = np.concatenate([ramps(seed) for seed in range(16)])  # more than are worked on at once
    whole = quantize_gguf(x, kind)
    for start, stop in ((0, 1), (7, 150), (383, 384)):
        np.testing.assert_array_equal(quantize_gguf(x[start:stop], kind), whole[start:stop])
    batch = quantize_gguf(x.reshape(2, 3, 64, 1024), kind)
    np.testing.assert_array_equal(batch.reshape(whole.shape), whole)
    assert quantize_gguf(x[:0], kind).shape == (0, whole.shape[1])


@pytest.mark.parametrize("kind", K_QUANTS)
def test_numbers_near_the_ends_of_float16(kind: str) -> None:
    """Scales below the least float16 become that one, not zero; those above the largest have no form."""
    x = weights("random")[:4]
    assert noise(x, kind) < 0.3
    assert noise(x * 2.0**-16, kind) < 0.35  # ggml makes zeros of these in Q3_K and Q6_K
    tiny = dequantize_gguf(quantize_gguf(x * 1e-30, kind), kind)
    assert np.abs(tiny).max() < 1e-6
    with pytest.raises(ValueError, match=f"x must have values of which the scales fit float16 in {kind}, the largest"):
        quantize_gguf(x * 1e12, kind)


def test_any_floats_are_taken() -> None:
    x = weights("random")[:2].astype(ml_dtypes.bfloat16)
    wanted = quantize_gguf(x.astype(np.float32), "Q4_K")
    torch = pytest.importorskip("torch")
    for given in (x, x.view(np.uint16), x.astype(np.float64), torch.from_numpy(x.astype(np.float32))):
        np.testing.assert_array_equal(quantize_gguf(given, "Q4_K"), wanted)


def test_what_is_not_taken() -> None:
    x = weights("random")
    for bad in (np.nan, np.inf):
        x[3, 5] = bad
        with pytest.raises(ValueError, match="x must be finite to be quantized to Q6_K, it has infinities or NaN"):
            quantize_gguf(x, "Q6_K")
    with pytest.raises(ValueError, match=r"x must have a multiple of 256 columns for Q4_K, got shape \(64, 1000\)"):
        quantize_gguf(x[:, :1000], "Q4_K")
    with pytest.raises(ValueError, match="kind must be one of Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, got 'Q8_0'"):
        quantize_gguf(x, "Q8_0")


def test_every_key_is_a_type() -> None:
    for key, kind in KINDS.items():
        assert kind.name == key.upper()
        assert TYPES[kind.name][1] == kind.block
        assert (kind.encode is None) == (kind.block == 1)
