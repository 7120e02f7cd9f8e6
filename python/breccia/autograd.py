# SPDX-License-Identifier: Apache-2.0
"""Gradients through quantization: the straight-through estimator, and a linear layer whose forward and backward
products are scaled ones.

Works on torch tensors and JAX arrays; on NumPy and MLX arrays, which record no gradients here, the values are
those of the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from breccia import frameworks
from breccia.delayed import AmaxHistory
from breccia.recipe_names import resolve
from breccia.recipes import (
    DelayedScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    ScalingRecipe,
)
from breccia.scaled_tensor import A, ScaledTensor, data_of
from breccia.verbs import check_bias, plus
from breccia.verbs import linear as scaled_linear
from breccia.verbs.cast_options import CastOptions, Hadamard

__all__ = ["LinearRecipes", "cast_ste", "cast_ste_clipped", "linear"]


def cast_ste(x: A, recipe: ScalingRecipe | str) -> A:
    """``dequantize(cast(x, recipe))`` in the dtype of ``x``, with the gradient of the identity.

    Args:
        x: float array, as for `breccia.cast`.
        recipe: what to quantize to, or its name.

    Returns:
        Array of the shape, dtype and framework of ``x``.

    Raises:
        TypeError, ValueError: as `breccia.cast`.
    """
    result: A = frameworks.of(x).straight_through(x, resolve(recipe), None)
    return result


def cast_ste_clipped(
    x: A, recipe: ScalingRecipe | str, clip_min: float | None = None, clip_max: float | None = None
) -> A:
    """`cast_ste` with a gradient of zero where ``x`` saturates.

    Args:
        x: float array, as for `breccia.cast`.
        recipe: what to quantize to, or its name.
        clip_min: the least value whose gradient passes. By default that of each block: the least that its
            scale can hold, half a unit in the last place past the outermost code included (a value that
            rounds to that code does not saturate).
        clip_max: the largest, likewise.

    Returns:
        Array of the shape, dtype and framework of ``x``.
    """
    result: A = frameworks.of(x).straight_through(x, resolve(recipe), (clip_min, clip_max))
    return result


@dataclass(frozen=True)
class LinearRecipes:
    """What `linear` quantizes its operands to, for its three products.

    Attributes:
        x, w, grad: recipes of the input, the weight and the gradient of the output, or their names.
        stochastic: round gradients stochastically.
        hadamard: transform both operands of the weight's gradient along the axis they are contracted over.
        square_weights: one scale per square of the weight, so that the forward product and the gradient of the
            input see the same quantized weight.
    """

    x: ScalingRecipe
    w: ScalingRecipe
    grad: ScalingRecipe
    stochastic: bool = False
    hadamard: Hadamard | None = None
    square_weights: bool = False

    def __post_init__(self) -> None:
        for role in ("x", "w", "grad"):
            object.__setattr__(self, role, resolve(getattr(self, role), role))
        for name in ("stochastic", "square_weights"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.hadamard is not None and not isinstance(self.hadamard, Hadamard):
            raise TypeError(f"hadamard must be a breccia.Hadamard or None, got {type(self.hadamard).__name__}")

    @staticmethod
    def fp8() -> LinearRecipes:
        """Per-tensor current scaling, E4M3 forward and E5M2 backward: TransformerEngine's HYBRID."""
        return LinearRecipes(Float8CurrentScaling(), Float8CurrentScaling(), Float8CurrentScaling(fp8_format="E5M2"))

    @staticmethod
    def delayed(amax_history_len: int = 16, margin: int = 0) -> LinearRecipes:
        """Delayed scaling, E4M3 forward and E5M2 backward; `linear` then needs a state."""
        forward = DelayedScaling("E4M3", amax_history_len, margin)
        return LinearRecipes(forward, forward, DelayedScaling("E5M2", amax_history_len, margin))

    @staticmethod
    def mxfp8() -> LinearRecipes:
        """MXFP8 E4M3 throughout, as TransformerEngine's MXFP8BlockScaling."""
        return LinearRecipes(MXFP8BlockScaling(), MXFP8BlockScaling(), MXFP8BlockScaling())

    @staticmethod
    def nvfp4() -> LinearRecipes:
        """NVFP4 throughout, with stochastic rounding of gradients, a random Hadamard transform before the
        weight's gradient, and 16 × 16 weight scaling: TransformerEngine's NVFP4BlockScaling, after "Pretraining
        Large Language Models with NVFP4" (NVIDIA, 2025), which also keeps some of the last layers in high
        precision."""
        recipe = NVFP4BlockScaling()
        return LinearRecipes(recipe, recipe, recipe, stochastic=True, hadamard=Hadamard(16), square_weights=True)


def recipes_of(recipes: LinearRecipes | None) -> LinearRecipes:
    """What was given, or the default."""
    if recipes is None:
        return LinearRecipes.fp8()
    if not isinstance(recipes, LinearRecipes):
        raise TypeError(f"recipes must be a LinearRecipes, such as LinearRecipes.fp8(), got {recipes!r}")
    return recipes


def linear(
    x: Any,
    w: Any,
    bias: Any = None,
    recipes: LinearRecipes | None = None,
    *,
    seed: Any = None,
    scales: tuple[Any, Any, Any] | None = None,
) -> Any:
    """``x @ w.T + bias`` whose forward product and both backward products are scaled ones.

    Args:
        x: float array ``(..., K)``.
        w: float array ``(N, K)``; a master weight, quantized anew on every call.
        bias: ``(N,)`` or None.
        recipes: what to quantize to; `LinearRecipes.fp8` by default.
        seed: integer for stochastic rounding; for JAX it may be traced, and is required. torch draws one
            from its default generator where it is None.
        scales: for `DelayedScaling`, the `breccia.delayed.AmaxHistory` of x, w and grad. They are read;
            `breccia.nn.ScaledLinear` also keeps them up to date.

    Returns:
        Array ``(..., N)`` of the dtype of ``x``. The contracted axes are padded with zeros to whole blocks.

    Raises:
        TypeError: ``w`` is not of the framework of ``x``, or ``recipes`` is something else.
        ValueError: the shapes do not match, or a seed or a state is missing.
    """
    recipes = recipes_of(recipes)
    framework = frameworks.common(data_of(x), data_of(w))
    if len(w.shape) != 2 or not len(x.shape) or x.shape[-1] != w.shape[-1]:
        raise ValueError(f"x must be (..., K) and w (N, K), got shapes {tuple(x.shape)} and {tuple(w.shape)}")
    if bias is not None:
        check_bias(bias, w)
    if scales is None and any(isinstance(r, DelayedScaling) for r in (recipes.x, recipes.w, recipes.grad)):
        raise ValueError("scales is required for DelayedScaling: the AmaxHistory of x, w and grad")
    products = Products(recipes, scales, bias is not None and "float16" in str(x.dtype))
    y = framework.linear(x.reshape(-1, x.shape[-1]), w, products, seed)
    y = y if len(x.shape) == 2 else y.reshape(*x.shape[:-1], w.shape[0])
    return y if bias is None else plus(y, bias, x.dtype)


class Products:
    """The three products of a linear layer, in any framework. Operands are 2-D arrays; the weight may be quantized
    already: then it has ``width``, ``quantized(width)`` and, for the gradient of x, ``turned()``. With ``wide`` the
    first is float32, whatever x is."""

    def __init__(self, recipes: LinearRecipes, scales: tuple[Any, Any, Any] | None, wide: bool = False) -> None:
        self.wide = wide
        self.recipes = recipes
        self.scales: tuple[AmaxHistory | None, ...] = scales or (None, None, None)

    def forward(self, x: Any, w: Any) -> Any:
        return _product(self._x(x), self._w(w), "float32" if self.wide else x)

    def grad_x(self, grad: Any, w: Any, seed: Any) -> Any:
        turned = w.turned() if hasattr(w, "turned") else _turned(w)
        return _product(self._grad(grad, self._draws(seed, 0)), self._w(turned), grad)

    def grad_w(self, grad: Any, x: Any, seed: Any) -> Any:
        hadamard = self.recipes.hadamard
        a = self._grad(_turned(grad), self._draws(seed, 1), hadamard)
        return _product(a, self._x(_turned(x), hadamard), grad)

    def _x(self, x: Any, hadamard: Hadamard | None = None) -> _Factor:
        return _Factor(x, self.recipes.x, self.scales[0], CastOptions(hadamard=hadamard))

    def _w(self, w: Any) -> Any:
        if hasattr(w, "quantized"):
            return w
        options = CastOptions(square_blocks=self.recipes.square_weights)
        return _Factor(w, self.recipes.w, self.scales[1], options)

    def _grad(self, grad: Any, seed: Any, hadamard: Hadamard | None = None) -> _Factor:
        rounding = "stochastic" if self.recipes.stochastic else "nearest"
        return _Factor(grad, self.recipes.grad, self.scales[2], CastOptions(rounding, seed, hadamard))

    def _draws(self, seed: Any, product: int) -> Any:
        # Two streams of one seed: the products must not round alike.
        return 2 * seed + product if self.recipes.stochastic else None


@dataclass(frozen=True)
class _Factor:
    """One side of a product, (rows, contracted axis), and how it is quantized."""

    array: Any
    recipe: ScalingRecipe
    history: AmaxHistory | None
    options: CastOptions

    @property
    def width(self) -> int:
        """What the contracted axis must be a multiple of."""
        hadamard = self.options.hadamard
        return _common_multiple(block_width(self.recipe), 1 if hadamard is None else hadamard.block)

    def quantized(self, width: int) -> ScaledTensor:
        """Padded with zeros along the contracted axis to a multiple of ``width``."""
        framework = frameworks.of(self.array)
        short = -self.array.shape[-1] % width
        array = self.array if framework.namespace.is_zero(short) else framework.namespace.pad(self.array, 0, short)
        if isinstance(self.recipe, DelayedScaling) and self.history is not None:
            return framework.cast_scaled(array, self.recipe, self.history.scale, self.options)
        if self.options.is_default:
            return framework.cast(array, self.recipe)
        return framework.cast_with(array, self.recipe, self.options)


def _product(a: _Factor, b: Any, like: Any) -> Any:
    width = _common_multiple(a.width, b.width)
    kind = like if isinstance(like, str) else str(like.dtype).rpartition(".")[2]
    return scaled_linear(a.quantized(width), b.quantized(width), None, kind)


def _common_multiple(a: int, b: int) -> int:
    """The least; in plain steps, because torch.compile traces it."""
    multiple = a
    while multiple % b:
        multiple += a
    return multiple


def block_width(recipe: ScalingRecipe) -> int:
    """How many elements the contracted axis must be a multiple of."""
    if getattr(recipe, "block_m", 1) > 1:
        return 1
    return recipe.layout.block.columns or 1


def _turned(x: Any) -> Any:
    return frameworks.of(x).swap_last_axes(x)
