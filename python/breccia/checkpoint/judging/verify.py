# SPDX-License-Identifier: Apache-2.0
"""How close two checkpoints are, tensor by tensor, and which classic mistake would explain a bad one."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from breccia import comparison
from breccia.bridges.common import codes, swizzle, unswizzle
from breccia.bridges.outside import OutsideTensor, comparable, values
from breccia.bridges.parts import Found
from breccia.checkpoint.arguments import existing
from breccia.checkpoint.judging.output_error import OutputErrors
from breccia.checkpoint.judging.survival import Survival
from breccia.checkpoint.planning.plan import Planner
from breccia.checkpoint.planning.request import Request
from breccia.checkpoint.progress import Progress
from breccia.checkpoint.reading.source import Checkpoint, Unmarked, is_float
from breccia.checkpoint.reports import VerifyReport
from breccia.checkpoint.writing.manifest import Written, read
from breccia.formats import finfo
from breccia.gguf.rope import ROPE_TENSORS
from breccia.scaled_tensor import ScaledTensor
from breccia.schemes import differences, modules_of
from breccia.value.form import axis_of

if TYPE_CHECKING:
    from breccia.moments import Moments

# The least signal to quantization noise that an honest conversion has, by the bits of its format: 3 dB for each.
# A bit is worth 6 dB at most. On gaussian weights the targets of `convert` reach 3.2 dB a bit (FP8 of E5M2) to 5.8
# (Q2_K), on weights with outliers integers reach less: half of a bit's worth is left for that.
_DB_PER_BIT = 3.0
VALUES_DB = 48.0  # of what was quantized, in floats: bfloat16 rounds numbers by 2^-8 of themselves at most, 48.2 dB
FLOATS_DB = 12.0  # of plain floats, which do not say from what they were made
_GAIN = 6.0  # decibels by which undoing a mistake must improve on leaving it


@dataclass(frozen=True)
class Difference:
    """Of one tensor against its reference.

    Attributes:
        sqnr_db: signal to quantization noise, infinite where equal, NaN where the reference is zero.
        cosine: of the two tensors as vectors.
        max_error: largest absolute difference.
        equal: whether every value is the same, and one of them is a number.
        mistake: what would explain a bad one, "" where nothing does.
        bound_db: SQNR below which it fails.
    """

    name: str
    shape: tuple[int, ...]
    sqnr_db: float
    cosine: float
    max_error: float
    equal: bool
    mistake: str = ""
    bound_db: float = FLOATS_DB

    @property
    def ok(self) -> bool:
        """Whether it is equal or near enough."""
        return self.equal or self.sqnr_db >= self.bound_db


def compare(name: str, reference: Any, tensor: Any, bound_db: float = FLOATS_DB) -> Difference:
    """One tensor against its reference: arrays, ScaledTensors or OutsideTensors of one shape. One that is not above
    ``bound_db`` is tried against the classic mistakes. Raises ValueError where the shapes differ."""
    shape = tuple(reference.shape)
    if (
        tuple(tensor.shape) != shape
        and math.prod(tensor.shape) == math.prod(shape)
        and 1 in (len(shape), len(tensor.shape))
    ):
        shape = max(shape, tuple(tensor.shape), key=len)
        reference, tensor = values(reference).reshape(shape), values(tensor).reshape(shape)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"tensor {name!r}: shape must be {shape}, got {tuple(tensor.shape)}")
    sums = comparison.compare(comparable(reference), comparable(tensor))
    if 0 < sums.count == min(sums.nans, sums.reference_nans):  # no number is there that could be compared
        return Difference(name, shape, -math.inf, math.nan, math.nan, False, "every element is NaN", bound_db)
    mistake = ""
    if not sums.equal and not sums.sqnr_db > bound_db and isinstance(tensor, ScaledTensor):
        mistake = diagnose(reference, tensor)
    return Difference(name, shape, sums.sqnr_db, sums.cosine, sums.max_error, sums.equal, mistake, bound_db)


def diagnose(reference: Any, tensor: ScaledTensor) -> str:
    """The classic mistake whose undoing brings a tensor to its reference, "" where none does."""
    wanted = np.asarray(values(reference), np.float32)
    if wanted.ndim != 2 or wanted.size > 1 << 26:
        return ""
    start = comparison.compare(wanted, tensor).sqnr_db
    best, name = (start if math.isfinite(start) else -math.inf), ""
    floor = best + _GAIN
    for label, undo in _MISTAKES.items():
        try:
            with np.errstate(all="ignore"):
                candidate = undo(tensor, wanted)
        except (ValueError, TypeError):
            continue
        if candidate is None:
            continue
        reached = comparison.compare(wanted, candidate).sqnr_db
        if reached > max(best + 0.5, floor, 3.0):
            best, name = reached, label
    return name


def _reciprocal_scale(t: ScaledTensor, _: Any) -> Any:
    if t.scale.dtype.itemsize > 1:
        return replace(t, scale=(1 / np.asarray(t.scale, np.float32)).astype(t.scale.dtype))
    if getattr(t.recipe, "name", "").startswith("mx"):
        return replace(t, scale=np.uint8(254) - codes(t.scale, "scale"))
    return None


def _reciprocal_global_scale(t: ScaledTensor, _: Any) -> Any:
    if t.global_scale is None:
        return None
    return replace(t, global_scale=(1 / np.asarray(t.global_scale, np.float32)).astype(np.float32))


def _swapped_nibbles(t: ScaledTensor, _: Any) -> Any:
    if not t.is_packed:
        return None
    data = codes(t.data, "data")
    return replace(t, data=(data >> 4) | (data << 4))


def _transposed_scale(t: ScaledTensor, _: Any) -> Any:
    if t.scale.ndim != 2:
        return None
    flat = np.ascontiguousarray(t.scale).reshape(t.scale.shape[::-1])
    return replace(t, scale=np.ascontiguousarray(flat.T))


def _swizzled_scale(t: ScaledTensor, _: Any) -> Any:
    if t.scale.ndim != 2 or t.scale.dtype.itemsize > 1 or t.scale.shape[0] % 128 or t.scale.shape[1] % 4:
        return None
    return replace(t, scale=unswizzle(codes(t.scale, "scale").reshape(-1), *t.scale.shape))


def _unswizzled_twice(t: ScaledTensor, _: Any) -> Any:
    if t.scale.ndim != 2 or t.scale.dtype.itemsize > 1 or t.scale.shape[0] % 128 or t.scale.shape[1] % 4:
        return None
    return replace(t, scale=swizzle(t.scale).reshape(t.scale.shape))


def _wrong_global_scale(t: ScaledTensor, wanted: Any) -> Any:
    """One factor for the whole tensor, fitted."""
    sums = comparison.compare(wanted, t)
    return values(t) * np.float32(sums.dot / sums.other) if sums.other else None


def _zero_point(shift: int) -> Callable[[ScaledTensor, Any], Any]:
    def undo(t: ScaledTensor, _: Any) -> Any:
        if t.recipe.element not in ("int4", "uint4", "int8"):
            return None
        zero = np.zeros(t.scale.shape, np.float32) if t.zero_point is None else np.asarray(t.zero_point, np.float32)
        return replace(t, zero_point=zero + np.float32(shift))

    return undo


_MISTAKES: dict[str, Callable[[ScaledTensor, Any], Any]] = {
    "reciprocal scale": _reciprocal_scale,
    "reciprocal global scale": _reciprocal_global_scale,
    "swapped nibbles": _swapped_nibbles,
    "transposed scale": _transposed_scale,
    "swizzled scale": _swizzled_scale,
    "scale unswizzled twice": _unswizzled_twice,
    "zero point too high by one": _zero_point(-1),
    "zero point too low by one": _zero_point(1),
    "zero point of 8 missing": _zero_point(8),
    "missing or wrong global scale": _wrong_global_scale,
}


def verify(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    min_sqnr_db: float | None = None,
    adapter: str | os.PathLike[str] | None = None,
    moments: str | os.PathLike[str] | Mapping[str, Moments] | None = None,
    progress: bool = False,
    unmarked: Unmarked | None = None,
) -> VerifyReport:
    """Compare checkpoint ``b`` with its reference ``a``. JSON types only.

    Args:
        a: the reference.
        b: what is to be judged.
        min_sqnr_db: a tensor below it fails; None for a bound that follows from the format of each, 3 dB a bit, and
            12 dB where both are plain floats.
        adapter: folder or GGUF file of a LoRA adapter that was merged into ``a`` to make ``b``, which is then compared
            with ``a`` and the adapter's change.
        moments: what `breccia.calibrate` gives of ``a``, or its file.
        progress: draw a line on a terminal.
        unmarked: "comfyui" or "modelopt": whose order the block scales of a file have that does not say it.

    Returns:
        ``ok``, and per tensor SQNR, cosine, largest error, the likely mistake and the bound that held. "damaged" are
        tensors of which stored ones have other bytes than `convert` wrote, by breccia.json beside them. With an adapter
        also ``kept``, of all that it changes and of each tensor: Σ change · (b - a) / Σ change². 1 is all of the
        change, 0 is none. With moments H also ``output_error`` of each tensor that has them, √(tr RHRᵀ / tr WHWᵀ) for
        W in ``a`` and R what ``b`` changes, and of all: how many, their mean, and layers that fit no tensor. It says
        what an error does, and a bound of SQNR what it is: GPTQ raises the latter to lower the former.

    Raises:
        TypeError: ``min_sqnr_db`` is neither a number nor None.
        ValueError: a checkpoint or the adapter is not valid, or the adapter changes what is not there, or the moments
            are of other layers.

    Examples:
        >>> from breccia import checkpoint
        >>> w = np.random.default_rng(0).standard_normal((64, 256), dtype=np.float32)
        >>> breccia.save({"up_proj.weight": w}, "model.safetensors")
        >>> breccia.save({"up_proj.weight": breccia.cast(w, "nvfp4")}, "small.safetensors")
        >>> report = checkpoint.verify("model.safetensors", "small.safetensors")
        >>> report["ok"], report["failed"], report["missing"]
        (True, [], [])
    """
    if min_sqnr_db is not None and not isinstance(min_sqnr_db, (int, float)):
        raise TypeError(f"min_sqnr_db must be a number of decibels, got {min_sqnr_db!r}")
    first, second = (
        Checkpoint(existing(path, name), mapped=False, unmarked=unmarked) for name, path in (("a", a), ("b", b))
    )
    merged = None if adapter is None else Survival(adapter, first)
    outputs = None if moments is None else OutputErrors(moments)
    report = verify_open(
        first, second, min_sqnr_db=min_sqnr_db, merged=merged, outputs=outputs, moments=moments, progress=progress
    )
    first.close()
    second.close()
    return report


def verify_open(
    first: Checkpoint,
    second: Checkpoint,
    *,
    min_sqnr_db: float | None = None,
    merged: Survival | None = None,
    outputs: OutputErrors | None = None,
    moments: Any = None,
    progress: bool = False,
    look: Callable[[Found, Any, Any], None] = lambda found, reference, tensor: None,
) -> VerifyReport:
    """The same of checkpoints that are open; ``look`` is called with each tensor of the second, the reference's values
    and its own."""
    written, damaged = Written(second), dict[str, list[str]]()
    others = {_canonical(f): f for f in second.found}
    results, failed, missing = [], [], []
    smoothed = _smoothed(first, second, moments)
    line = Progress(sum(first.nbytes(found) for found in first.found), progress)
    for found in first.found:
        line.add(first.nbytes(found))
        other = others.pop(_canonical(found), None)
        if other is None:
            said = found.name in ROPE_TENSORS and bool(second.config)  # by config.json
            if not found.name.endswith(("_scale", ".scale")) and found.name not in second.left_out and not said:
                missing.append(found.name)
            continue
        if not _comparable(found) or not _comparable(other):
            plain = found.format == other.format == "plain"
            same = plain and first.raw(found).tobytes() == second.raw(other).tobytes()
        else:
            exact = smoothed.get(found.name, found)
            results.append(_compared(first, exact, second, other, min_sqnr_db, merged, outputs, look))
            same = results[-1].ok
        if wrong := written.differing(other):
            damaged[found.name] = wrong
        if wrong or not same:
            failed.append(found.name)
    line.finish()
    tensors: Any = [
        {
            "name": d.name,
            "shape": list(d.shape),
            "sqnr_db": d.sqnr_db if math.isfinite(d.sqnr_db) else str(d.sqnr_db),
            "cosine": d.cosine,
            "max_error": d.max_error if math.isfinite(d.max_error) else str(d.max_error),
            "equal": d.equal,
            "mistake": d.mistake,
            "bound_db": d.bound_db,
            **({} if merged is None else merged.of(d.name)),
            **({} if outputs is None else outputs.of(d.name)),
        }
        for d in results
    ]
    report: VerifyReport = {
        "reference": str(first.path),
        "checked": str(second.path),
        "ok": not failed and not missing,
        "min_sqnr_db": min_sqnr_db,
        "failed": failed,
        "damaged": damaged,
        "missing": missing,
        "extra": [f.name for f in others.values()],
        "scheme": _scheme_differences(first, second),
        "tensors": tensors,
    }
    if merged is not None:
        report["kept"] = merged.kept
        merged.close()
    if outputs is not None:
        report["output_error"] = outputs.finish()
    return report


def _smoothed(first: Checkpoint, second: Checkpoint, moments: Any) -> dict[str, Found]:
    """The reference's tensors as `convert --smooth` made them before it quantized, where its manifest says so. Raises
    ValueError where the moments that it was given are not there."""
    said = read(second.path) or {}
    if not said.get("options", {}).get("smooth"):
        return {}
    if not isinstance(moments, (str, os.PathLike)):
        file = said["data"]["moments"]["file"]
        raise ValueError(
            f"moments must be given for {second.path}: it was smoothed by those of {file} (--moments FILE)"
        )
    request = Request.again(said, dict.fromkeys(said["data"], moments))
    target = request.with_data(request.target(), first)
    return {one.found.name: one.found for one in Planner(first, target).plan(second.path, True).choices}


def _scheme_differences(first: Checkpoint, second: Checkpoint) -> list[str]:
    """What programs do with inputs and KV caches of one and not of the other."""
    try:
        return differences(first.scheme, second.scheme, modules_of(second))
    except ValueError as error:
        return [f"what is said of inputs and KV cache is not compared: {error}"]


def _compared(
    first: Checkpoint,
    a: Found,
    second: Checkpoint,
    b: Found,
    bound_db: float | None,
    merged: Survival | None,
    outputs: OutputErrors | None,
    look: Callable[[Found, Any, Any], None],
) -> Difference:
    reference, tensor = first.load(first.folded(a)), second.load(second.folded(b))
    if first.container is not second.container and {_axis(reference), _axis(tensor)} == {-1, -2}:
        reference, tensor = _upright(reference), _upright(tensor)
    if bound_db is None:
        bound_db = least(bits_of(first, a, reference), bits_of(second, b, tensor))
    if merged is not None:
        reference = merged.add(a, reference, tensor)
    difference = compare(a.name, reference, tensor, bound_db)
    if outputs is not None:
        outputs.add(a, lambda: values(reference), lambda: values(tensor))
    look(b, reference, tensor)
    first.release(a)
    second.release(b)
    return difference


def _axis(tensor: Any) -> int | None:
    """Along which a ScaledTensor's blocks run; None of others."""
    return axis_of(tensor.layout) if isinstance(tensor, ScaledTensor) else None


def _upright(tensor: Any) -> Any:
    """A weight of a graph, which is written elsewhere with its outputs first, so; others as they are."""
    return tensor.mT if _axis(tensor) == -2 else tensor


def _canonical(found: Found) -> str:
    """Experts' matrices have ``.weight`` in some formats and not in others."""
    return found.name.removesuffix(".weight")


def _comparable(found: Found) -> bool:
    return found.format != "plain" or is_float(found)


def bits_of(checkpoint: Checkpoint, found: Found, tensor: Any) -> int | None:
    """Bits per element of a loaded tensor's codes, scales left out; None where it is plain floats."""
    if found.format == "plain":
        return None
    stored = 8 * checkpoint.nbytes(found) // max(math.prod(found.shape), 1)
    scaled = tensor.scaled if isinstance(tensor, OutsideTensor) else tensor
    # Codes may be stored wider than they are, and made wider than they are stored.
    bits = finfo(scaled.recipe.element).bits if isinstance(scaled, ScaledTensor) else stored
    return max(min(bits, stored), 1)


def least(reference: int | None, checked: int | None) -> float:
    """The bound of two tensors in dB, by their bits per element, None of floats: that of the fewer, for the reference's
    own error counts, too."""
    if checked is None:
        return FLOATS_DB if reference is None else VALUES_DB
    return _DB_PER_BIT * min(checked, checked if reference is None else reference)
