# SPDX-License-Identifier: Apache-2.0
"""Rounding that makes good, in the columns still to be rounded, what rounding a column loses: GPTQ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from breccia import _core, frameworks, verbs
from breccia.frameworks import numpy
from breccia.moments import Moments
from breccia.recipe_names import resolve
from breccia.recipes import ScalingRecipe, _spec
from breccia.scaled_tensor import A, ScaledTensor, as_array_is
from breccia.value.inputs import check_float32, refuse_mask
from breccia.verbs.cast_options import column_weights

Order: TypeAlias = Literal["act", "natural"]


@dataclass(frozen=True)
class GptqReport:
    """What became of a `gptq_reported`.

    Attributes:
        level: of the moments that were used: "full", "block" or "diag".
        damp: the damping that the moments took: more than asked for where they were not positive definite with that.
        dead: columns (of all experts) that no input reached; they are rounded to nearest.
        nearest: matrices, one or of the experts, that no damping made positive definite; they are rounded to nearest.
    """

    level: str
    damp: float
    dead: int
    nearest: int


def gptq(
    w: A, moments: Any, recipe: ScalingRecipe | str, *, order: Order = "act", damp: float = _core.GPTQ_DAMP
) -> ScaledTensor[A]:
    """Quantize a weight for the inputs that it meets: GPTQ, columns ordered by activity and scales chosen first.

    Args:
        w: float array ``(N, K)``, or ``(E, N, K)`` of experts: the weight of ``x @ w.T``.
        moments: of the inputs x: a `breccia.moments.Moments`, of which the most detailed part is used; or an array
            ``(K, K)`` or ``(E, K, K)`` of sums or means of ``x.T @ x``; or of runs of g neighbours alone,
            ``(K / g, g, g)`` or ``(E, K / g, g, g)``; or the diagonal, ``(K,)`` or ``(E, K)``. A factor makes no
            difference.
        recipe: what to quantize to, or its name. Scales, zero points and the global scale are those of
            ``cast(w, recipe, importance=diagonal)``; so are the codes where the moments are diagonal.
        order: "act", columns by falling diagonal of the moments, or "natural".
        damp: what is added to the diagonal, in its mean; from 0 to 1, 0.02 by default. Where it does not make the
            moments positive definite, ten times as much does, up to 1.

    Returns:
        ScaledTensor of the shape, framework and device of ``w``. torch tensors of a GPU are rounded there, all others
        on the CPU: the bytes do not depend on the number of threads, and as those of `matmul` they may on the backend.
        On a GPU scales are the same, and a code differs only where sums of remainders, rounded otherwise, lie beside a
        tie.

    Raises:
        TypeError: ``w`` or ``moments`` is no array of floats.
        ValueError: the shapes do not fit, moments are not finite or negative on the diagonal, or an option is not what
            it must be.

    Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
    ICLR 2023; order and static scales as its authors' ``--act-order --static-groups``.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> w, x = (rng.standard_normal((n, 256), dtype=np.float32) for n in (64, 512))
        >>> quantized = breccia.gptq(w, x.T @ x, "int4"), breccia.cast(w, "int4")
        >>> by_gptq, nearest = (np.linalg.norm(breccia.linear(x, q) - x @ w.T) for q in quantized)
        >>> bool(by_gptq < nearest)
        True
    """
    return gptq_reported(w, moments, recipe, order=order, damp=damp)[0]


def gptq_reported(
    w: Any, moments: Any, recipe: ScalingRecipe | str, *, order: Order = "act", damp: float = _core.GPTQ_DAMP
) -> tuple[ScaledTensor, GptqReport]:
    """`gptq`, and a report of what it had to do. It raises what `gptq` does."""
    recipe = resolve(recipe)
    if order not in get_args(Order):
        raise ValueError(f"order must be 'act' or 'natural', got {order!r}")
    if isinstance(w, ScaledTensor):
        raise TypeError("w must be an array of floats, got a ScaledTensor: dequantize it first")
    if getattr(w, "is_cuda", False):
        return gptq_by_torch(w, moments, recipe, order, damp)
    level, matrix = _as_known(moments, w)
    made, damped, dead, nearest = _core.gptq(_host(w, "w"), matrix, _spec(recipe), order == "act", float(damp))
    scaled = numpy.tensor_of(made, recipe, _dtype_name(w))
    return as_array_is(scaled, w), GptqReport(level, damped, dead, nearest)


def gptq_encoded(
    w: np.ndarray[Any, Any],
    moments: Any,
    encode: Callable[..., np.ndarray[Any, Any]],
    *,
    order: Order = "act",
    damp: float = _core.GPTQ_DAMP,
) -> tuple[np.ndarray[Any, Any], GptqReport]:
    """Bytes of a weight, float32 (N, K) or (E, N, K), in a type that no recipe makes, and a report as `gptq_reported`
    gives one. ``encode`` is called with a matrix, what its columns count, and what chooses codes. It raises what `gptq`
    does."""
    if w.ndim not in (2, 3):
        raise ValueError(f"w must be (N, K) or (E, N, K), got shape {w.shape}")
    level, known = _as_known(moments, w)
    columns, run = w.shape[-1], known.shape[-1]
    batch = known.shape[: -2 if run == columns else -3]
    whole = (columns, columns) if run == columns else (columns // max(run, 1), run, run)
    if batch not in ((), w.shape[:-2]) or known.shape[len(batch) :] != whole or columns % run:
        raise ValueError(f"moments must be ({columns}, {columns}) for w of shape {w.shape}, got shape {known.shape}")
    diagonals = np.diagonal(known, axis1=-2, axis2=-1).reshape(*batch, columns)
    if (diagonals < 0).any():
        raise ValueError(f"moments must not be negative on the diagonal, got {diagonals.min()}")
    said: list[tuple[float, int, int]] = []
    made = []
    for index, matrix in enumerate(w[None] if w.ndim == 2 else w):
        own = known[index] if batch else known
        diagonal = diagonals[index] if batch else diagonals

        def feed(x: Any, scale: Any, offset: Any, levels: Any, codes: Any, own: Any = own) -> None:
            said.append(_core.gptq_on_levels(x, own, scale, offset, levels, codes, order == "act", float(damp)))

        made.append(encode(matrix, column_weights(diagonal, matrix.shape), feed))
    damped, dead, nearest = zip(*said, strict=True) if said else ((damp,), (0,), (0,))
    report = GptqReport(level, max(damped), sum(dead if batch else dead[:1]), sum(nearest))
    return (made[0] if w.ndim == 2 else np.stack(made)), report


def gptq_by_torch(
    w: Any, moments: Any, recipe: ScalingRecipe, order: Order, damp: float
) -> tuple[ScaledTensor, GptqReport]:
    """`gptq_reported` of a torch tensor, by torch's operations on its device but for the search of scales."""
    import torch

    from breccia.frameworks.torch import error_feedback

    _check_floats(w, "w")
    if not 0 <= damp <= 1:
        raise ValueError(f"damp must be from 0 to 1, got {damp}")
    if w.ndim < 2:
        _core.plan_cast(list(w.shape), _spec(recipe))  # which may have more to say
        raise ValueError(f"w must be at least 2-D (N, K), got shape {tuple(w.shape)}")
    if isinstance(moments, torch.Tensor) and moments.ndim >= 2 and moments.shape[-1] == moments.shape[-2]:
        _check_floats(moments, "moments")
        level, matrix = _level(moments.shape, w.shape), moments.to(w.device)
    else:
        level, host = _as_known(moments, w)
        matrix = torch.from_numpy(np.require(host, np.float32, "W")).to(w.device)  # of one that is not it warns
    matrix, diagonal = error_feedback.check_moments(matrix, tuple(w.shape))
    nearest = verbs.cast(w, recipe, importance=diagonal.cpu().numpy())
    made = error_feedback.rounded(w, matrix, nearest, order == "act", float(damp))
    return made.scaled, GptqReport(level, made.damp, made.dead, made.nearest)


def _dtype_name(array: Any) -> str:
    return str(array.dtype).rpartition(".")[2]


def _host(array: Any, name: str) -> np.ndarray[Any, Any]:
    """Floats of any framework in the CPU's memory; those of 16 bits as float32, which holds them. Raises TypeError
    where it is no array of floats."""
    dtype = _check_floats(array, name)
    refuse_mask(array, name)
    if hasattr(array, "detach"):  # torch: a GPU's too
        array = array.detach().cpu()
        array = array.float() if dtype.endswith("16") else array
    elif dtype == "bfloat16" and not isinstance(array, np.ndarray):
        array = array.astype(frameworks.of(array).dtype("float32"))  # of MLX, which NumPy cannot read
    host = np.asarray(array)
    check_float32(host, name)
    return host.astype(np.float32) if dtype.endswith("16") else host


def _check_floats(array: Any, name: str) -> str:
    """The name of an array's dtype. Raises TypeError where it is no array of floats."""
    dtype = _dtype_name(array) if hasattr(array, "dtype") else type(array).__name__
    if dtype not in ("float32", "float64", "float16", "bfloat16"):
        raise TypeError(f"{name} must be a float32, float64, float16 or bfloat16 array, got {dtype}")
    return dtype


def matrix_of_moments(moments: Any) -> np.ndarray[Any, Any]:
    """The (…, K, K) of moments, zero where nothing is known."""
    level, known = _known(moments)
    return _of_blocks(known) if level in ("block", "diag") else known


def _as_known(moments: Any, w: Any) -> tuple[str, np.ndarray[Any, Any]]:
    """The level of moments of a weight, and what is known of them: (…, K, K), or (…, K / g, g, g) of runs."""
    level, known = _known(moments)
    shape = tuple(np.shape(w))
    if level == "diag" and len(shape) > 1 and known.shape[:-2] not in (shape[-1:], (*shape[:-2], shape[-1])):
        of = shape[-1]
        more = ": x.T @ x of the inputs x, not x" if known.ndim == 4 else ""
        raise ValueError(
            f"moments must be ({of}, {of}) or ({of},) for w of shape {shape}, got shape {known.shape[:-2]}{more}"
        )
    return level or _level(known.shape, shape), known


def _known(moments: Any) -> tuple[str, np.ndarray[Any, Any]]:
    """The same; no level of an array that can be whole or of runs."""
    if isinstance(moments, Moments):
        if moments.full is not None:
            return "full", moments.full
        if moments.block is not None:
            return "block", moments.block
        return "diag", _of_diagonal(moments.diag)
    array = _host(moments, "moments")
    square = array.ndim >= 2 and array.shape[-1] == array.shape[-2]
    return ("", array) if square else ("diag", _of_diagonal(array))


def _level(moments: Any, w: Any) -> str:
    """Of square moments, by the shapes of both."""
    return "block" if len(moments) > 2 and len(w) > 1 and moments[-1] < w[-1] else "full"


def _of_diagonal(diagonal: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """As runs of one column."""
    if diagonal.ndim not in (1, 2):
        raise ValueError(f"moments must be (K, K) or (E, K, K), or (K,) or (E, K), got shape {diagonal.shape}")
    return diagonal[..., None, None]


def _of_blocks(block: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """(…, K / g, g, g) as (…, K, K), zero between blocks."""
    *experts, count, group, _ = block.shape
    out = np.zeros((*experts, count, group, count, group), np.float32)
    each = np.arange(count)
    out[..., each, :, each, :] = np.moveaxis(block, -3, 0)
    return out.reshape(*experts, count * group, count * group)
