# SPDX-License-Identifier: Apache-2.0
"""The value type."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol

import numpy as np
from numpy.typing import NDArray

from breccia import _core, frameworks, recipes
from breccia.layouts import Layout
from breccia.recipe_names import resolve
from breccia.value import slicing
from breccia.value.arrays import check_arrays, equal, from_pickle, hash_of, make_core, to_numpy, to_pickle
from breccia.value.form import PARTS, Form, foreign_packing, logical_shape, packing_for, parts_there
from breccia.value.inputs import FLOATS

if TYPE_CHECKING:
    from typing_extensions import Self, TypeVar  # of what is left open, type checkers know nothing

    class Array(Protocol):
        """What arrays of every framework have, and strings, lists, numbers and ScaledTensors have not."""

        def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

        @property
        def shape(self) -> Any: ...
        @property
        def dtype(self) -> Any: ...

    A = TypeVar("A", bound=Array, default=Any)
else:
    from typing import TypeVar

    A = TypeVar("A")

__all__ = ["A", "ScaledTensor", "check_inner", "check_kernels", "data_of", "framework_of", "from_buffer", "ready"]


@dataclass(frozen=True, init=False, repr=False, eq=False)
class ScaledTensor(Generic[A]):
    """A block-scaled low-precision tensor: value = (decode(data) - zero_point) · scale · global_scale.

    Immutable; holds the arrays it is given without copying them. Every invariant is checked once,
    on construction. For type checkers ``ScaledTensor[A]`` has values of arrays A, which `breccia.cast` was given and
    `breccia.dequantize` returns; ``ScaledTensor`` alone has any.

    Args:
        data: codes; ``uint8``, or the framework's own low-precision dtype. 4-bit codes are two per
            byte, the element of even index in the low nibble; one code per byte is accepted too
            (which of the two follows from ``shape``, else from ``scale.shape`` and the layout).
        scale: dequantization scales in the shape ``layout`` demands; E8M0 and E4M3 scales as codes.
        recipe: what the codes and scales mean.
        layout: how scales map onto data.
            A recipe or layout of another library is carried, compared and pickled as it is: its ``validate(data,
            scale)`` is called where a layout has one. The verbs refuse such a tensor.
        zero_point: of integer-coded recipes; shaped like ``scale``. Of recipes with exponents it holds these, float16:
            see ``exponents``.
        global_scale: float32 second-level scale, one element or one per matrix of a batch; required where
            the recipe has two levels (1.0 where the block scales are all there is).
        shape: logical shape, where packed data leaves it open (an odd number of columns).
        original_dtype: name of the dtype the values came from.

    Raises:
        TypeError: an argument is not an array, or has a dtype the recipe has no meaning for.
        ValueError: shapes do not fit, or a required part is missing.
    """

    # Whether codes rest in another form than data has, as those of a `PackedWeight` do, and the attribute where they
    # rest. Asked where a call counts.
    _rests: ClassVar[bool] = False
    _held_as: ClassVar[str] = "data"

    data: Any
    scale: Any
    recipe: Any
    layout: Any
    zero_point: Any = None
    global_scale: Any = None
    # Arguments that dataclasses.replace reads from the properties of the same names; a type checker would take
    # these lines for the properties.
    if TYPE_CHECKING:
        _packing: str = field(init=False)
        _original_dtype: str = field(init=False)
    else:
        _: KW_ONLY
        shape: InitVar[tuple[int, ...] | None]
        original_dtype: InitVar[str]

    def __init__(
        self,
        data: Any,
        scale: Any,
        recipe: Any,
        layout: Any,
        zero_point: Any = None,
        *,
        global_scale: Any = None,
        shape: tuple[int, ...] | None = None,
        original_dtype: str = "float32",
    ) -> None:
        check_arrays(data, scale, zero_point)
        if recipe is None:
            raise ValueError("recipe is required (see breccia.recipes)")
        if layout is None:
            raise ValueError("layout is required (see breccia.layouts)")
        if isinstance(recipe, (str, type)):
            recipe = resolve(recipe)
        if isinstance(layout, (str, type)):
            raise TypeError(f"layout must be a layout such as breccia.PerTensor(), got {layout!r}")
        arrays = (data, scale, zero_point, global_scale)
        form = Form(recipe, layout, "one", original_dtype)
        core = None
        if form.has_kernels:
            core = make_core(arrays, recipe, layout, shape, original_dtype)
            packing = packing_for(4 if core.is_packed else 8, core.shape[form.axis])
        else:
            packing = foreign_packing(data, scale, layout, shape)
        fill(self, form._replace(packing=packing), arrays, core)

    @classmethod
    def _of(
        cls,
        form: Form,
        data: Any,
        scale: Any,
        zero_point: Any = None,
        global_scale: Any = None,
        core: _core.ScaledTensor | None = None,
    ) -> Self:
        """Wrap parts that cannot be checked, because they are tracers or a tree's leaves, or need not be: those of
        other tensors, or what the core has made (``core``)."""
        self = object.__new__(cls)
        fill(self, form, (data, scale, zero_point, global_scale), core)
        return self

    @property
    def _form(self) -> Form:
        """All but the arrays."""
        parts = parts_there(self.zero_point, self.global_scale)
        return Form(self.recipe, self.layout, self._packing, self._original_dtype, parts)

    @property
    def _meaning(self) -> Form:
        """All but the arrays and which of them there are: metadata of a node of a tree, whose leaves may be anything in
        place of arrays, None too."""
        return Form(self.recipe, self.layout, self._packing, self._original_dtype)

    def _with(self, **changed: Any) -> ScaledTensor:
        """The tensor with other arrays (``data``, ``scale``, ``zero_point``, ``global_scale``) or another ``form``,
        unchecked; what is not named stays. A plain ScaledTensor of a prepared one."""
        form = changed.pop("form", None) or self._form
        return ScaledTensor._of(form, **(dict(zip(PARTS, _parts(self), strict=True)) | changed))

    def map(self, function: Callable[[Any], Any]) -> ScaledTensor:
        """The tensor with ``function(array)`` in place of each of its arrays, unchecked.

        Args:
            function: moves or views an array; its result has the shape and the codes of what it was given.

        Returns:
            ScaledTensor of the same recipe and layout. A part that there is not stays None.
        """
        return self._with(
            **{name: None if part is None else function(part) for name, part in zip(PARTS, _parts(self), strict=True)}
        )

    @property
    def _held(self) -> tuple[Any, Any, Any, Any]:
        """The arrays in memory: data, scale, zero_point, global_scale, and of a `PackedWeight` what it makes data
        of."""
        return _parts(self)

    @property
    def _unit(self) -> tuple[int, int]:
        """How many codes share how many bytes of what is held."""
        return (1, 1) if self._packing == "one" else (2, 1)

    @property
    def _ready(self) -> ScaledTensor[A]:
        """The tensor as kernels read it: see `ready`."""
        return self

    @property
    def _core(self) -> _core.ScaledTensor:
        """The core's form, made when first asked for."""
        core: _core.ScaledTensor | None = self.__dict__["_made"]
        if core is None:
            check_kernels(self)
            core = make_core(_parts(self), self.recipe, self.layout, self.shape, self.original_dtype)
            self.__dict__["_made"] = core
        return core

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape: counts values, not bytes."""
        stored = tuple(self.data.shape)
        return stored if self._packing == "one" else logical_shape(stored, self.layout, self._packing)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.data.shape)

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> Any:
        """dtype the values were cast from, as the framework of ``data`` has it (its name where it has none)."""
        return frameworks.of(self.scale).dtype(self.original_dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of data, scale, zero point and global scale."""
        return sum(int(part.nbytes) for part in self._held if part is not None)

    @property
    def data_dtype(self) -> Any:
        """dtype of ``data``."""
        return self.data.dtype

    @property
    def scale_dtype(self) -> Any:
        """dtype of ``scale``."""
        return self.scale.dtype

    @property
    def original_dtype(self) -> str:
        """Name of the dtype the values were cast from."""
        return self._original_dtype

    @property
    def is_packed(self) -> bool:
        """Whether a byte of ``data`` holds two codes."""
        return bool(self._packing != "one")

    @property
    def exponents(self) -> Any:
        """Exponents of the groups, float16 in the shape of ``scale``, of `Float8ExpandedScaling` and
        `INT8ExpandedScaling`; None of other recipes. They are what ``zero_point`` holds: the number that a block has
        beside its scale."""
        return self.zero_point if recipes.has_exponents(self.recipe) else None

    @property
    def device(self) -> Any:
        """Device of ``data``, where its framework has devices."""
        return getattr(self.data, "device", "cpu")

    def to(self, target: Any) -> ScaledTensor:
        """The same tensor in another framework, or on another device of its own.

        Args:
            target: ``"numpy"``, ``"torch"``, ``"jax"`` or ``"mlx"``; else a device as the framework of
                ``data`` names it (``"cuda"``, ``torch.device``, ``jax.Device``).

        Returns:
            ScaledTensor. Between frameworks on one device the memory is shared wherever both sides can
            (docs/frameworks.md says where); an equal target returns the tensor itself.

        Raises:
            TypeError, ValueError: no such framework or device.
            ImportError: the framework is not installed.
        """
        source = frameworks.of(self.scale)
        if _is_dtype(target):
            raise TypeError(f"target must be a framework or a device, got {target}: dequantize({target}) gives values")
        if not isinstance(target, str) or not frameworks.is_named(target):
            return self.map(lambda array: source.to_device(array, target))
        goal = frameworks.named(target)
        if goal is source:
            return self
        moved = self.map(lambda array: goal.from_dlpack(*source.to_dlpack(array)))
        return moved if target == "numpy" else moved.view()

    def cpu(self) -> ScaledTensor[A]:
        """The same tensor in the memory of the CPU, in its framework; itself where it is there."""
        on_cpu = str(getattr(self.device, "type", self.device)) == "cpu" or not hasattr(self.scale, "device")
        return self if on_cpu else self.to("cpu")

    def cuda(self, device: Any = None) -> ScaledTensor[A]:
        """The same tensor on a GPU: the current one, or that of a number.

        Args:
            device: number of the GPU, or a device of the framework.

        Returns:
            ScaledTensor.
        """
        return self.to("cuda" if device is None else f"cuda:{device}" if isinstance(device, int) else device)

    def detach(self) -> ScaledTensor[A]:
        """The same tensor, whose scales no gradient flows through; itself where the framework has none on its
        arrays."""
        return self.map(lambda array: array.detach()) if hasattr(self.scale, "detach") else self

    def numel(self) -> int:
        """Number of values, as torch calls it."""
        return self.size

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch's functions of ScaledTensors: those that have a verb here, else a TypeError that names them."""
        torch: Any = frameworks.named("torch")
        return torch.called(func, args, kwargs or {})

    def view(self) -> ScaledTensor[A]:
        """The same memory in the framework's own low-precision dtypes: ml_dtypes for NumPy, and for torch
        and JAX what ``breccia.cast`` returns anyway. Two codes in a byte stay ``uint8`` where the
        framework has no dtype for them."""
        if not isinstance(self.recipe, recipes.ScalingRecipe):  # another library's: its codes have no dtype known here
            return self
        native = frameworks.of(self.data).native
        coded = recipes.scale_format(self.recipe)
        return self._with(
            data=native(self.data, self.recipe.element + ("_x2" if self.is_packed else "")),
            scale=self.scale if coded is None else native(self.scale, coded),
        )

    def dequantize(self, out_dtype: Any = "float32", out: A | None = None) -> A:
        """The values: see `breccia.dequantize`."""
        check_kernels(self)
        scaled = self._ready
        framework = frameworks.of(scaled.data)
        if scaled.ndim == 0:  # which kernels do not have
            flat = scaled._with(data=scaled.data.reshape(1))
            into: Any = out
            number: A = framework.dequantize(flat, out_dtype, None if out is None else into.reshape(1)).reshape(())
            return number
        result: A = framework.dequantize(scaled, out_dtype, out)
        return result

    def numpy(self) -> NDArray[np.float32]:
        """The values as a NumPy array, float32, wherever the tensor lies."""
        values: NDArray[np.float32] = self.__array__()
        return values

    def reshape(self, *shape: Any) -> ScaledTensor[A]:
        """The values in another shape whose rows are whole blocks: see `breccia.value.joining.reshape`."""
        return slicing.reshape(self, *shape)

    def __getitem__(self, key: Any) -> ScaledTensor[A]:
        """Matrices of a batch, rows, or whole blocks: see `breccia.value.slicing.index`."""
        return slicing.index(self, key)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a ScaledTensor of one number has no length: dequantize() gives its value")
        return self.shape[0]

    def __iter__(self) -> Iterator[ScaledTensor[A]]:
        if self.ndim < 3:
            raise TypeError(
                f"a ScaledTensor of shape {self.shape} has no parts to go through: a row alone has no blocks"
            )
        return (self[i] for i in range(len(self)))

    def __matmul__(self, other: ScaledTensor[A] | A) -> A:
        """``breccia.matmul(self, other)`` in the dtype of ``other`` where that is an array, else float32."""
        result: A = _product(self, other)
        return result

    def __rmatmul__(self, other: A) -> A:
        result: A = _product(other, self)
        return result

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        # NumPy asks here before it multiplies: its own product would dequantize first.
        if ufunc is np.matmul and method == "__call__" and not kwargs:
            return _product(*inputs)
        if method == "at" and isinstance(inputs[0], ScaledTensor):
            raise TypeError(f"{ufunc.__name__}.at must write to an array, got a ScaledTensor, whose codes stay")
        if any(isinstance(x, ScaledTensor) for x in kwargs.get("out", ())):
            raise TypeError(f"out of {ufunc.__name__} must be an array, got a ScaledTensor, whose codes stay")

        def values(x: Any) -> Any:
            return np.asarray(x) if isinstance(x, ScaledTensor) else x

        return getattr(ufunc, method)(*map(values, inputs), **{name: values(x) for name, x in kwargs.items()})

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """The dequantized values as a NumPy array.

        Raises:
            ValueError: ``copy=False``: values are made, not viewed.
        """
        if copy is False:
            raise ValueError("copy=False cannot be met: the values of a ScaledTensor are made by dequantizing")
        return to_numpy(self, dtype)

    @property
    def mT(self) -> ScaledTensor[A]:  # noqa: N802 (NumPy's name)
        """The last two axes swapped: a view, no copy. A 1-D tensor is its own transpose."""
        return slicing.transposed(self) if self.ndim >= 2 else self

    @property
    def T(self) -> ScaledTensor[A]:  # noqa: N802 (NumPy's name)
        """Transpose of a 1-D or 2-D tensor: a view, no copy. Use ``mT`` for batches.

        Raises:
            ValueError: more than two axes.
        """
        if self.ndim > 2:
            raise ValueError(f"T needs at most 2 axes, got shape {self.shape}; use mT for a batch of matrices")
        return self.mT

    def _repr_html_(self) -> str:
        from breccia.value import display

        return display.html_of(self)

    def __repr__(self) -> str:
        return (
            f"breccia.{type(self).__name__}(shape={self.shape}, data_dtype={self.data_dtype}, "
            f"scale_shape={tuple(self.scale.shape)}, recipe={type(self.recipe).__name__}, "
            f"layout={type(self.layout).__name__})"
        )

    def __eq__(self, other: object) -> Any:
        """Whether both hold the same bytes in one framework and on one device, under equal recipes and layouts."""
        if self is other:
            return True
        return equal(self, other) if isinstance(other, ScaledTensor) else NotImplemented

    def __hash__(self) -> int:
        return hash_of(self)

    def __copy__(self) -> ScaledTensor[A]:
        return self.map(lambda part: part)

    def __reduce__(self) -> tuple[Any, ...]:
        arrays = to_pickle(_parts(self))
        return _unpickle, (*arrays, self.recipe, self.layout, self.shape, self.original_dtype)


def fill(scaled: ScaledTensor, form: Form, arrays: tuple[Any, ...], core: Any) -> None:
    """Gives a tensor that is being made its attributes; ``arrays`` as `ScaledTensor._held` has them."""
    # The class is frozen: attributes are set past its __setattr__, once, in the way torch's compiler follows. One by
    # one, for a loop over their names takes as long again, a tenth of the time of a small cast.
    write = object.__setattr__
    recipe, layout, packing, original_dtype, _ = form
    data, scale, zero_point, global_scale = arrays
    write(scaled, scaled._held_as, data)
    write(scaled, "scale", scale)
    write(scaled, "recipe", recipe)
    write(scaled, "layout", layout)
    write(scaled, "zero_point", zero_point)
    write(scaled, "global_scale", global_scale)
    write(scaled, "_packing", packing)
    write(scaled, "_original_dtype", original_dtype)
    write(scaled, "_made", core)


def check_kernels(scaled: Any) -> None:
    """Refuses a ScaledTensor whose recipe or layout is another library's, which the message names; anything else
    passes."""
    if not isinstance(scaled, ScaledTensor):
        return
    if not (isinstance(scaled.recipe, recipes.ScalingRecipe) and isinstance(scaled.layout, Layout)):
        scaled._form.check_kernels()


def _is_dtype(target: Any) -> bool:
    """Whether a target is a dtype, which a device is not: torch's, NumPy's, or a name of one of floats."""
    if isinstance(target, str):
        return target in FLOATS
    return type(target).__name__ == "dtype" or (isinstance(target, type) and issubclass(target, np.generic))


def data_of(operand: Any) -> Any:
    """The array that tells an operand's framework: its codes, where it is a ScaledTensor."""
    return operand.data if isinstance(operand, ScaledTensor) else operand


def ready(operand: Any) -> Any:
    """An operand whose data can be read again and again: of a `PackedWeight` the codes of a byte each; others as they
    are."""
    return operand._ready if isinstance(operand, ScaledTensor) else operand


def as_array_is(scaled: ScaledTensor, array: Any) -> ScaledTensor:
    """A tensor of NumPy's, in the framework and on the device of an array."""
    name = frameworks.of(array).__name__.rpartition(".")[2]  # type: ignore[attr-defined]
    if name == "numpy":
        return scaled
    moved = scaled.to(name)
    device = getattr(array, "device", None) if name in ("torch", "jax") else None
    return moved if device is None or str(device) == "cpu" else moved.to(device)


def check_inner(a: Any, b: Any) -> None:
    """Refuses an array times a weight as it is stored, (N, K), and not turned: other messages know shapes alone."""
    if not isinstance(b, ScaledTensor) or isinstance(a, ScaledTensor):
        return
    x, w = tuple(getattr(a, "shape", ())), b.shape
    if len(x) > 1 and len(w) == 2 and x[-1] != w[0] and x[-1] == w[1]:
        raise ValueError(
            f"shape mismatch: a of shape {x} has {x[-1]} columns and b of shape {w} has {w[0]} rows: a weight is "
            f"stored (N, K): use linear or q.T"
        )


def framework_of(a: Any, b: Any) -> Any:
    """What multiplies ``a @ b``."""
    check_kernels(a)
    check_kernels(b)
    check_inner(a, b)
    return frameworks.common(data_of(a), data_of(b))


def _product(a: Any, b: Any) -> Any:
    a, b = ready(a), ready(b)
    framework = framework_of(a, b)
    other = b if isinstance(a, ScaledTensor) else a
    name = str(getattr(other, "dtype", "")).rpartition(".")[2]
    known = name in ("float64", "float16", "bfloat16") and not isinstance(other, ScaledTensor)
    return framework.matmul(a, b, framework.dtype(name if known else "float32"), "exact")


def _parts(scaled: ScaledTensor) -> tuple[Any, Any, Any, Any]:
    """The arrays: data, scale, zero_point, global_scale."""
    return scaled.data, scaled.scale, scaled.zero_point, scaled.global_scale


def _unpickle(*stored: Any) -> ScaledTensor:
    # Four arrays as `to_pickle` has them, then what they mean.
    recipe, layout, shape, original_dtype = stored[4:]
    data, scale, zero_point, global_scale = from_pickle(stored[:4], layout)
    meant = {"shape": tuple(shape), "original_dtype": original_dtype}
    return from_buffer(data, scale, recipe, layout, zero_point, global_scale=global_scale, **meant)


def from_buffer(
    data: Any,
    scale: Any,
    recipe: Any,
    layout: Any,
    zero_point: Any = None,
    *,
    global_scale: Any = None,
    shape: tuple[int, ...] | None = None,
    original_dtype: str = "float32",
) -> ScaledTensor:
    """Wrap buffers that are already quantized, without copying: see `ScaledTensor` for the arguments
    and errors."""
    return ScaledTensor(
        data, scale, recipe, layout, zero_point, global_scale=global_scale, shape=shape, original_dtype=original_dtype
    )
