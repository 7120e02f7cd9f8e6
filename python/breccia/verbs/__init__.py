# SPDX-License-Identifier: Apache-2.0
"""The verbs: find the framework of the arguments, hand over."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np

from breccia import frameworks
from breccia.recipe_names import resolve
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import A, ScaledTensor, check_kernels, data_of, framework_of, ready
from breccia.spelling import suggestion
from breccia.value.inputs import SHORT_NAMES, refuse_mask
from breccia.verbs.cast_options import CastOptions, Hadamard, Rounding

__all__ = ["cast", "dequantize", "linear", "matmul", "requantize"]

Precision: TypeAlias = Literal["exact", "fast"]


def cast(
    x: A,
    recipe: ScalingRecipe | str,
    *,
    rounding: Rounding = "nearest",
    seed: Any = None,
    hadamard: Hadamard | None = None,
    square_blocks: bool = False,
    amax: Any = None,
    offset: Any = 0,
    importance: Any = None,
    **unknown: NoReturn,
) -> ScaledTensor[A]:
    """Quantize.

    Args:
        x: float32, float64, float16 or bfloat16 array of any strides. Block recipes need
            ``x.ndim >= 2`` and ``x.shape[-1]`` divisible by the block size (tiles of
            ``Float8BlockScaling(block_m > 1)`` may be short at the edges).
        recipe: what to quantize to, or its name: "nvfp4", "fp8-block", "int4:mse" (`breccia.recipe_names`).
        rounding: "nearest" (ties to even), or "stochastic": up or down with the probabilities that make
            the expected value of a code exact. Scales are those of "nearest".
        seed: integer (for JAX also a traced one), with "stochastic": the same seed gives the same codes
            in every framework.
        hadamard: a `breccia.Hadamard` transform to apply to the rows first. The result holds the
            transformed values.
        square_blocks: for recipes whose blocks of n lie along rows: n × n elements share a scale, which
            each of their rows stores. A matrix and its transpose then quantize to the same values, which
            a weight's forward and backward products want (NVFP4's 16 × 16 weight scaling).
        amax: for a part of a larger tensor, whose scale follows from all of it: the whole's largest finite
            magnitude, a number or an array of one, for recipes of one scale per tensor or of two levels;
            for recipes of one scale per row, cut along the rows, an array with that of each row, in which NaN
            says that the row holds a NaN that the element format has not. `breccia.distributed.amax` makes it.
        offset: position of the part's first element in the larger tensor, on which stochastic rounding draws:
            an integer where the part has whole rows, else a pair (position, length of the larger tensor's rows).
        importance: what errors of each column count, numbers of shape ``(K,)``, or ``(…, K)`` with the leading axes of
            stacked experts: Σ x² of what the columns are multiplied with, as a llama.cpp imatrix or
            `breccia.moments.Moments.diag` has it. Scales are those of least weighted squared error, whatever
            ``scale_search`` says (docs/numerics.md). Zeros and NaNs take the mean of their column over the experts,
            else of all. Runs on the CPU: tensors of a GPU are copied there and the result back.
        unknown: none; the message says which argument was meant.

    Returns:
        ScaledTensor of logical shape ``x.shape``.

    Raises:
        TypeError: ``x`` is not an array of floats, or ``recipe`` is not a recipe.
        ValueError: the shape does not suit the recipe, there is no recipe of that name, or ``amax`` is not finite,
            has not one number per scale, or is given for a recipe whose scales lie within any part; ``importance``
            has another shape, a negative number, or is given beside ``hadamard`` or the amax of a one-level recipe.

    Special values: the scale follows from the finite elements of a block. NaN stays NaN where the
    format has one; elsewhere the block's scale becomes NaN. Infinities saturate.

    Examples:
        >>> w = np.random.default_rng(0).standard_normal((64, 256), dtype=np.float32)
        >>> q = breccia.cast(w, "nvfp4")
        >>> q.shape, q.data.shape, q.scale.shape  # two codes to a byte, a scale for 16
        ((64, 256), (64, 128), (64, 16))
        >>> w.nbytes, q.nbytes
        (65536, 9220)
    """
    if unknown:
        raise _unknown(next(iter(unknown)), recipe)
    if isinstance(x, (ScalingRecipe, str)) and not isinstance(recipe, (ScalingRecipe, str)):
        raise TypeError(
            f"x must be an array of floats and recipe a recipe, got {type(x).__name__} and {type(recipe).__name__}: "
            f"swapped arguments? cast(x, recipe)"
        )
    if recipe is None:
        raise TypeError("recipe must be a recipe such as breccia.NVFP4BlockScaling(), or its name as 'nvfp4', got None")
    recipe = resolve(recipe)
    if isinstance(x, ScaledTensor):
        raise TypeError("x must be an array of floats, got a ScaledTensor: use requantize(x, recipe)")
    plain = rounding == "nearest" and seed is None and hadamard is None and not square_blocks and amax is None
    if plain and importance is None and isinstance(offset, int) and offset == 0:
        return frameworks.of(x).cast(x, recipe)
    options = CastOptions(rounding, seed, hadamard, square_blocks, amax, offset, importance)
    return frameworks.of(x).cast_with(x, recipe, options)


def _unknown(argument: str, recipe: Any) -> TypeError:
    """The error of an argument that `cast` has not; fields of recipes are known by name."""
    kind = type(resolve(recipe))
    if argument == "block_size" or argument in (field.name for field in dataclasses.fields(kind)):
        given = f"cast(x, breccia.{kind.__name__}({argument}=...))"
        return TypeError(f"cast() has no argument {argument!r}, which is a field of the recipe: {given}")
    known = [name for name in inspect.signature(cast).parameters if name != "unknown"]
    return TypeError(f"cast() has no argument {argument!r}: {suggestion(argument, known)}")


def dequantize(scaled: ScaledTensor[A], out_dtype: Any = "float32", out: A | None = None, *, dtype: Any = None) -> A:
    """Recover the values, (decode(data) - zero_point) · scale · global_scale.

    Args:
        scaled: a ScaledTensor.
        out_dtype: float32 (default), float64, float16 or bfloat16, as a name ("bf16" is one, too) or a dtype. Values
            are made in float32 and rounded once more to ``out_dtype``, ties to even.
        out: array of the logical shape to write to and return; ``out_dtype`` is then that of ``out``.
        dtype: the name of ``out_dtype`` before 0.5, which goes in 0.6.

    Returns:
        An array of the logical shape, in the framework and on the device of ``scaled``; ``out`` where it is given.

    Raises:
        TypeError: ``scaled`` is not a ScaledTensor, or ``out_dtype`` is not one of the four.
        ValueError: ``out`` has another shape, is read-only, or overlaps the operand.

    Examples:
        >>> w = np.full((2, 32), 1.5, np.float32)
        >>> back = breccia.dequantize(breccia.cast(w, "mxfp8"), "float16")
        >>> back.shape, back.dtype, np.array_equal(back, w)
        ((2, 32), dtype('float16'), True)
    """
    if dtype is not None:
        warnings.warn("dtype= of dequantize is out_dtype=; the old name goes in 0.6", DeprecationWarning, stacklevel=2)
        out_dtype = dtype
    values: A = _scaled(scaled, "scaled").dequantize(out_dtype, out)
    return values


def matmul(
    a: ScaledTensor[A] | A, b: ScaledTensor[A] | A, out_dtype: Any = np.float32, *, precision: Precision = "exact"
) -> A:
    """Scaled product ``a @ b`` with NumPy's broadcasting of leading axes.

    Args:
        a: ScaledTensor or array of shape ``(..., M, K)``.
        b: ScaledTensor or array of shape ``(..., K, N)``; ``w.T`` for a weight stored ``(N, K)``.
        out_dtype: float32, float64, float16 or bfloat16; None for the dtype of ``a`` (of what it was
            quantized from, where it is a ScaledTensor). With torch tensors the default, NumPy's float32, stands for
            the dtype of the operand that is one, as of ``a @ b``; "float32" or ``torch.float32`` asks for that.
        precision: "exact" takes operands as they are: products of codes with codes or bfloat16 numbers
            are exact, others are those of float32. "fast" permits rounding activations to bfloat16,
            an error of up to 2^-8 |a||b| per product; CPU kernels use it.

    Returns:
        Array ``(..., M, N)``. Products accumulate in float32; with u = 2^-24 the error of "exact"
        against the exact product of the dequantized operands is at most
        (min(K, 256) + K / 8 + 8) · u · Σ|a||b|, plus the rounding to ``out_dtype``, and K · 2^-126:
        bfloat16 instructions have no subnormals. CPU results do not depend on the number of threads.

    Raises:
        TypeError: an operand is neither, or has an unsupported dtype.
        ValueError: the shapes do not match, or ``precision`` is neither.

    Examples:
        >>> a = np.ones((4, 256), np.float32)
        >>> w = breccia.cast(np.ones((64, 256), np.float32), "fp8-block")
        >>> breccia.matmul(a, w.T).shape  # w is stored (N, K)
        (4, 64)
        >>> breccia.matmul(a, w.T, out_dtype="float16").dtype
        dtype('float16')
    """
    precision = _precision(precision)
    if getattr(a, "_rests", False) or getattr(b, "_rests", False):
        a, b = ready(a), ready(b)
    framework = framework_of(a, b)
    result: A = framework.matmul(a, b, _result_dtype(a, b, out_dtype, framework), precision)
    return result


def linear(
    x: ScaledTensor[A] | A,
    w: ScaledTensor[A] | A,
    bias: A | None = None,
    out_dtype: Any = np.float32,
    *,
    precision: Precision = "exact",
) -> A:
    """``x @ w.T + bias`` for a weight stored as checkpoints do.

    Args:
        x: ScaledTensor or array ``(..., K)``.
        w: ScaledTensor or array ``(N, K)``.
        bias: array ``(N,)`` or None.
        out_dtype: see `matmul`.
        precision: see `matmul`.

    Returns:
        Array ``(..., N)``.

    Raises:
        TypeError: an operand has an unsupported dtype, or they are of different frameworks.
        ValueError: the shapes do not match.

    Examples:
        >>> w = breccia.cast(np.ones((64, 256), np.float32), "int8")
        >>> x, bias = np.ones((4, 256), np.float32), np.zeros(64, np.float32)
        >>> breccia.linear(x, w, bias).shape
        (4, 64)
        >>> breccia.linear(breccia.cast(x, "int8"), w).shape  # inputs may be quantized, too
        (4, 64)
    """
    check_kernels(x)
    check_kernels(w)
    if not isinstance(w, ScaledTensor) and not hasattr(w, "shape"):
        raise TypeError(f"w must be a ScaledTensor or an array, got {type(w).__name__}")
    if bias is not None:
        check_bias(bias, w)
    precision = _precision(precision)
    if getattr(w, "_rests", False) or getattr(x, "_rests", False):
        x, w = ready(x), ready(w)
    framework = frameworks.of(data_of(w))
    out_dtype = _result_dtype(x, w, out_dtype, framework)
    # Without a view of w transposed, where the framework has such a product and nothing is to be refused.
    direct = getattr(framework, "direct_linear", None) if isinstance(w, ScaledTensor) else None
    y: Any = None if direct is None else direct(x, w, out_dtype, precision, bias)
    if y is None and bias is None:
        y = _linear(x, w, out_dtype, precision)
    elif y is None:
        y = plus(linear(x, w, None, wide(out_dtype, bias), precision=precision), bias, out_dtype)
    result: A = y
    return result


def check_bias(bias: Any, w: Any) -> None:
    """Refuses a bias that is not one number a row of the weight, within float32's range."""
    if tuple(getattr(bias, "shape", ())) != tuple(w.shape[:1]):
        got = f"shape {tuple(bias.shape)}" if hasattr(bias, "shape") else type(bias).__name__
        raise ValueError(f"bias must be ({w.shape[0]},) for w of shape {tuple(w.shape)}, got {got}")
    refuse_mask(bias, "bias")
    _check_dtype(bias, "bias")
    floats = getattr(frameworks.of(bias), "floats", None)
    if floats is not None:
        floats(bias, "bias")


def wide(out_dtype: Any, bias: Any) -> Any:
    """The dtype of a product to which a bias is added before it is rounded."""
    return "float32" if bias is not None and "float16" in str(out_dtype) else out_dtype


def _check_dtype(operand: Any, name: str) -> None:
    """Refuses what is no number as `matmul` does, by the name that `linear` has for it."""
    if isinstance(operand, ScaledTensor):
        return
    kind = str(getattr(operand, "dtype", "")).rpartition(".")[2]
    if kind.startswith(("complex", "str", "object", "<", ">", "datetime", "timedelta")):
        wanted = "float32, float64, float16 or bfloat16 array (or integers)"
        raise TypeError(f"{name} must be a {wanted}, got dtype {kind}")


def plus(y: Any, bias: Any, out_dtype: Any) -> Any:
    """The sum, rounded to the dtype that is asked for whatever that of the bias is."""
    total = y + bias
    name = next(one for one in ("bfloat16", "float16", "float32", "float64") if one in str(out_dtype))
    dtype = frameworks.of(y).dtype(name)
    if total.dtype == dtype:
        return total
    return total.to(dtype) if hasattr(total, "to") else total.astype(dtype)


def _precision(precision: str) -> Precision:
    word = precision.lower() if isinstance(precision, str) else precision
    if word == "exact":
        return "exact"
    if word == "fast":
        return "fast"
    raise ValueError(f"precision must be 'exact' or 'fast', got {precision!r}")


def _result_dtype(a: Any, b: Any, out_dtype: Any, framework: Any) -> Any:
    """The dtype of a product: as asked for, else that of the activations; of integers float32."""
    if out_dtype is np.float32 and getattr(framework, "products_follow", False):
        a = b if isinstance(a, ScaledTensor) else a
        if isinstance(a, ScaledTensor):
            return "float32"
        out_dtype = None
    if out_dtype is not None:
        return SHORT_NAMES.get(out_dtype, out_dtype) if isinstance(out_dtype, str) else out_dtype
    if isinstance(a, ScaledTensor):
        return a.original_dtype
    known = str(getattr(a, "dtype", "")).rpartition(".")[2] in ("float32", "float64", "float16", "bfloat16")
    return a.dtype if known else "float32"


def check_linear(x: Any, w: Any) -> None:
    """Refuses x that cannot be multiplied by w transposed."""
    if len(w.shape) != 2:
        raise ValueError(f"w must be 2-D (N, K), got shape {tuple(w.shape)}")
    if not hasattr(x, "shape") or len(x.shape) < 1 or x.shape[-1] != w.shape[1]:
        found = getattr(x, "shape", None)
        got = type(x).__name__ if found is None else f"shape {tuple(found)}"
        raise ValueError(f"x must be (..., {w.shape[1]}) for w of shape {tuple(w.shape)}, got {got}")
    _check_dtype(x, "x")
    _check_dtype(w, "w")


def _linear(x: Any, w: Any, out_dtype: Any, precision: Precision) -> Any:
    check_linear(x, w)
    vector = len(x.shape) == 1
    if vector and isinstance(x, ScaledTensor):
        raise ValueError(f"x must be at least 2-D where it is a ScaledTensor, got shape {x.shape}")
    y = matmul(x[None] if vector else x, w.mT if isinstance(w, ScaledTensor) else w.T, out_dtype, precision=precision)
    return y[0] if vector else y


def requantize(scaled: ScaledTensor[A], new_recipe: ScalingRecipe | str) -> ScaledTensor[A]:
    """Convert to another recipe, block by block, without a float copy of the whole tensor.

    Nothing is lost where the target can hold every value (docs/numerics.md): each block keeps a scale under
    which its values come back, NVFP4 with two levels for the whole tensor; otherwise the bytes equal
    ``cast(dequantize(scaled), new_recipe)``. Already of that recipe and layout: returned as it is.

    Args:
        scaled: a ScaledTensor.
        new_recipe: what to convert to, or its name (see `cast`).

    Returns:
        A ScaledTensor of the same shape, framework and device.

    Raises:
        TypeError: ``scaled`` is not a ScaledTensor, or ``new_recipe`` is not a recipe.
        ValueError: the shape does not suit the recipe, or there is no recipe of that name.

    Examples:
        >>> q = breccia.cast(np.ones((64, 256), np.float32), "fp8-block")
        >>> n = breccia.requantize(q, "nvfp4")
        >>> q.nbytes, n.nbytes
        (16392, 9220)
        >>> breccia.requantize(n, "nvfp4") is n
        True
    """
    recipe = resolve(new_recipe, "new_recipe")
    _scaled(scaled, "scaled")
    if scaled.recipe == recipe and scaled.layout == recipe.layout:
        return scaled
    scaled = ready(scaled)
    return frameworks.of(scaled.data).requantize(scaled, recipe)


def _scaled(scaled: Any, argument: str) -> ScaledTensor:
    if not isinstance(scaled, ScaledTensor):
        raise TypeError(f"{argument} must be a ScaledTensor, got {type(scaled).__name__}")
    check_kernels(scaled)
    return scaled
