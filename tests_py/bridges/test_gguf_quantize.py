# SPDX-License-Identifier: Apache-2.0
"""K-quants made of values: gguf-py reads them, and they are no worse than ggml's own."""

import breccia
import numpy as np
import pytest
from breccia import _core
from breccia.bridges import dequantize_gguf, quantize_gguf
from breccia.bridges.gguf import KINDS, RECIPES, TYPES
from breccia.bridges.gguf.quantize import QUANTIZE
from breccia.checkpoint import SafetensorsFile
from checkpoints import minilm

ml_dtypes = pytest.importorskip("ml_dtypes")

K_QUANTS = list(QUANTIZE)
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
@pytest.mark.parametrize("kind", GGML["random"])
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
    _, block, nbytes = TYPES[kind]
    x = ramps(1) / (1 if block == 256 else 16)  # minimums of Q4_1 are float16
    raw = quantize_gguf(x, kind)
    assert raw.dtype == np.uint8 and raw.shape == (24, 1024 // block * nbytes)
    values = quants.dequantize(raw, constants.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(values, dequantize_gguf(raw, kind))
    bits = int(kind.removeprefix("I")[1])
    amax = np.abs(x).reshape(24, -1, block).max(axis=-1)
    error = np.abs(values - x).reshape(24, -1, block).max(axis=-1)
    assert (error <= amax * 2.0 ** (2 - bits)).all()
    assert not values[4::8].any()


@pytest.mark.parametrize("kind", K_QUANTS)
def test_super_blocks_do_not_depend_on_others(kind: str) -> None:
    x = np.concatenate([ramps(seed) for seed in range(16)]) / 16  # more than are worked on at once
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
    # ggml makes zeros of these in Q3_K and Q6_K; the levels of IQ4_NL are far apart near zero.
    assert noise(x * 2.0**-16, kind) < (0.35 if kind != "IQ4_NL" else 0.7)
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
    with pytest.raises(ValueError, match=r"kind must be one of Q2_K, Q3_K, .*, MXFP4, NVFP4, got 'Q8_K'"):
        quantize_gguf(x, "Q8_K")


def test_every_key_is_a_type() -> None:
    for key, kind in KINDS.items():
        assert kind.name == (key[:4] if kind.whole else key).upper()
        assert TYPES[kind.name][1] == kind.block
        assert (kind.encode is None) == (kind.block == 1)


def correlated(columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs whose columns tell of each other, those of even number to calibrate with."""
    rng = np.random.default_rng(0)
    shared = rng.standard_normal((4096, columns // 8)) @ rng.standard_normal((columns // 8, columns))
    x = (shared / 3 + rng.standard_normal((4096, columns))) * np.exp(rng.standard_normal(columns) / 2)
    return x[::2].astype(np.float32), x[1::2].astype(np.float32)


def output_error(kind: str, w: np.ndarray, x: np.ndarray, **data: np.ndarray) -> float:
    lost = dequantize_gguf(quantize_gguf(w, kind, **data), kind) - w
    return float(np.linalg.norm(x @ lost.T) / np.linalg.norm(x @ w.T))


@pytest.mark.parametrize("kind", [*QUANTIZE, *(key.upper() for key in RECIPES)])
def test_gptq_loses_less_on_other_inputs_than_importance(kind: str) -> None:
    """With the same scales: what differs is codes, which gguf-py reads."""
    quants, constants = pytest.importorskip("gguf.quants"), pytest.importorskip("gguf.constants")
    known, other = correlated(512)
    w = np.random.default_rng(1).standard_normal((96, 512)).astype(np.float32)
    moments = known.T @ known
    weighted = output_error(kind, w, other, importance=np.diagonal(moments))
    assert output_error(kind, w, other, moments=moments) < 0.75 * weighted
    raw = quantize_gguf(w, kind, moments=moments)
    if kind not in ("MXFP4", "NVFP4"):  # of which it has the inverse of the last bit
        values = quants.dequantize(raw, constants.GGMLQuantizationType[kind])
        np.testing.assert_array_equal(values, dequantize_gguf(raw, kind))
    # Of diagonal moments the nearest codes stay.
    diagonal = np.diagonal(moments)
    nearest = quantize_gguf(w, kind, importance=diagonal)
    same = dequantize_gguf(quantize_gguf(w, kind, moments=np.diag(diagonal)), kind) == dequantize_gguf(nearest, kind)
    assert same.mean() > 0.995


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_0"])
def test_gptq_of_experts_is_that_of_each(kind: str) -> None:
    known, _ = correlated(256)
    w = np.random.default_rng(1).standard_normal((3, 16, 256)).astype(np.float32)
    w[1, :, 32:64] = 0  # runs whose scale is zero
    moments = np.stack([part.T @ part for part in np.split(known[:1023], 3)])
    made = quantize_gguf(w, kind, moments=moments)
    for i in range(3):
        np.testing.assert_array_equal(made[i], quantize_gguf(w[i], kind, moments=moments[i]))
    one = quantize_gguf(w, kind, moments=moments[0])
    np.testing.assert_array_equal(one[2], quantize_gguf(w[2], kind, moments=moments[0]))
    assert not dequantize_gguf(made, kind)[1, :, 32:64].any()
    runs = moments.reshape(3, 4, 64, 4, 64)[:, range(4), :, range(4)].swapaxes(0, 1)
    whole = np.zeros_like(moments).reshape(3, 4, 64, 4, 64)
    whole[:, range(4), :, range(4)] = runs.swapaxes(0, 1)
    by_runs = quantize_gguf(w, kind, moments=np.ascontiguousarray(runs))
    np.testing.assert_array_equal(by_runs, quantize_gguf(w, kind, moments=whole.reshape(moments.shape)))


def test_feedback_on_levels_is_that_of_a_recipe_of_the_same_numbers() -> None:
    known, _ = correlated(512)
    w = np.random.default_rng(1).standard_normal((64, 512)).astype(np.float32)
    moments, recipe = known.T @ known, RECIPES["q4_0"]
    near = breccia.cast(w, recipe, importance=np.diagonal(moments))
    scale = np.asarray(near.scale, np.float32)
    levels = np.arange(-8, 8, dtype=np.float32)
    codes = (np.rint(near.numpy() / np.repeat(scale, 32, axis=1)) + 8).astype(np.uint8)
    offset = np.zeros_like(scale)
    assert _core.gptq_on_levels(w, moments, scale, offset, levels, codes, True, 0.02) == (0.02, 0, 0)
    made = levels[codes] * np.repeat(scale, 32, axis=1)
    np.testing.assert_array_equal(made, breccia.gptq(w, moments, recipe, damp=0.02).numpy())
    for name, given, message in (
        ("codes", codes[:, :-1], "codes uint8, all C-contiguous"),
        ("codes", codes + np.uint8(1), "codes must be less than the 16 levels"),
        ("scale", scale[:, :15], r"scale must be \(N, K / run\) for w of shape \(64, 512\), got shape \(64, 15\)"),
        ("scale", scale.astype(np.float64), "scale, offset and levels must be float32"),
        ("offset", offset[:, :8].copy(), r"offset must be \(64, 16\) as scale is, got \(64, 8\)"),
        ("levels", levels[::-1].copy(), "levels must be 1 to 256 numbers in rising order"),
        ("damp", 2.0, "damp must be from 0 to 1, got 2"),
    ):
        arguments = {"scale": scale, "offset": offset, "levels": levels, "codes": codes.copy(), "act_order": True}
        arguments |= {"damp": 0.02, name: np.ascontiguousarray(given) if name == "scale" else given}
        with pytest.raises(ValueError, match=message):
            _core.gptq_on_levels(w, moments, *arguments.values())


def test_moments_that_are_not_taken() -> None:
    w = weights("random")[:, :256]
    h = np.eye(256, dtype=np.float32)
    with pytest.raises(ValueError, match="importance must be left out where moments are given"):
        quantize_gguf(w, "Q4_K", importance=h[0], moments=h)
    with pytest.raises(ValueError, match=r"w must be \(N, K\) or \(E, N, K\), got shape \(256,\)"):
        quantize_gguf(w[0], "Q4_K", moments=h)
    with pytest.raises(ValueError, match=r"moments must be \(256, 256\) for w of shape \(64, 256\), got shape"):
        quantize_gguf(w, "Q4_K", moments=h[:128, :128])
    with pytest.raises(ValueError, match="moments must be finite, got nan"):
        quantize_gguf(w, "Q4_K", moments=np.where(h > 0, np.nan, h).astype(np.float32))
    with pytest.raises(ValueError, match="moments must not be negative on the diagonal"):
        quantize_gguf(w, "Q4_K", moments=-h)
