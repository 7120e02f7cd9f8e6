# SPDX-License-Identifier: Apache-2.0
"""The core's handlers for XLA: compiled code on a CPU calls it without passing through Python.

The same functions as in `callbacks`, which stand in where the extension was built without jaxlib's headers, or
jaxlib is older than they."""

from __future__ import annotations

import functools
import os
from typing import Any

import jax
import numpy as np

from breccia import _core
from breccia.frameworks.jax import callbacks
from breccia.layouts import Layout
from breccia.layouts import _spec as _layout_spec
from breccia.recipes import ScalingRecipe, choices
from breccia.scaled_tensor import ScaledTensor


@functools.cache
def register() -> bool:
    """Make the handlers known to XLA; whether that was possible."""
    handlers: dict[str, Any] = getattr(_core, "xla_handlers", dict)()
    try:
        # XLA looks at a handler when its backend starts, and does not start over one that is newer than itself: once it
        # runs, it refuses the handler instead.
        jax.local_devices(backend="cpu")
        for name, handler in handlers.items():
            jax.ffi.register_ffi_target(f"breccia_{name}", handler, platform="cpu")
    except Exception:  # jaxlib says in its own words that it is too old
        return False
    return bool(handlers)


def call(name: str, results: Any, vmap_method: str, now: Any, operands: tuple[Any, ...], **attributes: Any) -> Any:
    """The core's handler of that name, in compiled code.

    Args:
        name: of the verb.
        results: what it returns, as XLA wants to know it.
        vmap_method: what `jax.vmap` does.
        now: the same at once, of NumPy's arrays, which `callbacks.call` calls instead.
        operands: arrays and ScaledTensors.
        attributes: what the handler takes beside arrays.
    """
    handler = jax.ffi.ffi_call(f"breccia_{name}", results, vmap_method=vmap_method)
    return handler(*[part for operand in operands for part in _parts(operand)], **attributes)


def cast(
    x: Any,
    seed: Any,
    recipe: ScalingRecipe,
    hadamard: tuple[int, int] | None,
    square_blocks: bool,
    amax: Any = None,
) -> Any:
    """``seed``: two uint32, the low half first; None to round to nearest. ``amax`` of a larger tensor, float32, which
    callbacks do not have."""
    # A batch is a leading axis to recipes whose scales see one matrix; others, and casts whose draws depend on
    # positions, are called once for each member.
    method = "sequential" if seed is not None or choices(recipe).one_for_all else "expand_dims"
    block, signs = hadamard or (0, 0)

    def now(x: Any, *seeds: Any) -> Any:
        drawn = int(seeds[0][0]) | int(seeds[0][1]) << 32 if seeds else None
        return callbacks.cast_now(x, recipe, seed=drawn, hadamard=hadamard, square_blocks=square_blocks)

    return way()(
        "cast",
        callbacks.cast_results(x.shape, recipe),
        method,
        now,
        tuple(one for one in (x, seed, amax) if one is not None),
        recipe=_recipe_text(recipe),
        hadamard_block=np.int64(block),
        hadamard_seed=np.int64(_signed(signs)),
        square_blocks=np.bool_(square_blocks),
        amax=np.bool_(amax is not None),
    )


def dequantize(scaled: ScaledTensor, name: str) -> Any:
    whole = scaled.layout.one_scale or scaled.global_scale is not None
    results, method = callbacks.result(scaled.shape, name), "sequential" if whole else "broadcast_all"
    now = functools.partial(callbacks.dequantize_now, name=name)
    return way()("dequantize", results, method, now, (scaled,), tensor=_text(scaled))


def requantize(scaled: ScaledTensor, recipe: ScalingRecipe) -> Any:
    results, now = (
        callbacks.cast_results(scaled.shape, recipe),
        functools.partial(callbacks.requantize_now, recipe=recipe),
    )
    texts = {"tensor": _text(scaled), "recipe": _recipe_text(recipe)}
    return way()("requantize", results, "sequential", now, (scaled,), **texts)


def matmul(a: Any, b: Any, name: str, precision: str) -> Any:
    results = callbacks.result(_core.matmul_shape(list(a.shape), list(b.shape)), name)
    now = functools.partial(callbacks.matmul_now, name=name, precision=precision)
    texts = {"a": _text(a), "b": _text(b), "precision": precision}
    return way()("matmul", results, "sequential", now, (a, b), **texts)


def _parts(operand: Any) -> list[Any]:
    if not isinstance(operand, ScaledTensor):
        return [operand]
    return [getattr(operand, part) for part in operand._form.parts]


def _text(operand: Any) -> str:
    """A ScaledTensor but for its arrays; nothing for a plain array."""
    if not isinstance(operand, ScaledTensor):
        return ""
    form = operand._form
    flags = "".join({"zero_point": "z", "global_scale": "g"}.get(part, "") for part in form.parts)
    return "|".join((_recipe_text(form.recipe), _layout_text(form.layout), form.packing, flags))


@functools.cache
def _recipe_text(recipe: ScalingRecipe) -> str:
    fields = recipe.to_dict()
    fields["name"] = type(recipe).__name__
    return ",".join(map(str, fields.values()))


@functools.cache
def _layout_text(layout: Layout) -> str:
    spec = _layout_spec(layout)
    return f"{spec.kind},{spec.block_m},{spec.block_n},{spec.axis}"


def _signed(seed: int) -> int:
    """An integer's low 64 bits as a signed one."""
    return (seed + 2**63) % 2**64 - 2**63


def _checked(method: str) -> str:
    if method not in ("", "ffi", "callback"):
        raise ValueError(f"BRECCIA_XLA must be 'ffi' or 'callback', got {method!r}")
    return method


def chosen(method: str) -> Any:
    """`call`, or that of `callbacks`."""
    if _checked(method) == "callback" or not register():
        if method == "ffi":
            raise RuntimeError(
                "BRECCIA_XLA must be 'callback' or unset here, got 'ffi': breccia was built without jaxlib's headers, "
                "or with those of a newer one"
            )
        return callbacks.call
    return call


method = _checked(os.environ.get("BRECCIA_XLA", ""))


def way() -> Any:
    """How compiled code on a CPU reaches the core: asked where it is compiled first, by when jax has been configured
    and may start."""
    return chosen(method)


def by_platform(core: Any, plain: Any, *operands: Any) -> Any:
    """``core`` of the operands on a CPU, ``plain`` of them elsewhere. Inside of ``jax.shard_map`` the results of both
    vary over what one operand varies over: of a handler's results jax does not know that."""
    axes = frozenset[str]().union(*map(_varies_over, jax.tree.leaves(operands)))

    def varying(result: Any) -> Any:
        missing = tuple(axes - _varies_over(result))
        return jax.lax.pcast(result, missing, to="varying") if missing else result

    def of(call: Any) -> Any:
        return lambda *operands: jax.tree.map(varying, call(*operands))

    return jax.lax.platform_dependent(*operands, cpu=of(core), default=of(plain))


def _varies_over(x: Any) -> frozenset[str]:
    """Axes of the mesh; none where jax is too old to say it."""
    return frozenset(getattr(getattr(jax.typeof(x), "manual_axis_type", None), "varying", ()))


def ways(core: Any, plain: Any) -> tuple[Any, Any]:
    """What computes ``core`` on a CPU and ``plain`` elsewhere; and what a device computes in code that the compiler
    splits, in which callbacks do not live long enough."""

    def whole(*operands: Any) -> Any:
        return by_platform(core, plain, *operands)

    return whole, plain if way() is callbacks.call else whole
