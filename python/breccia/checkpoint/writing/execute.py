# SPDX-License-Identifier: Apache-2.0
"""Doing what was chosen for one tensor: pieces of rows through reused memory where values are made,
bytes as they are where they are kept."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from breccia import _core, verbs
from breccia.bridges import outside
from breccia.bridges.common import bfloat16_bits, float32
from breccia.bridges.contract import Kind
from breccia.bridges.parts import STORED, Found
from breccia.checkpoint.files.dtypes import typed
from breccia.checkpoint.planning.choices import Choice
from breccia.checkpoint.planning.rounding import why_nearest
from breccia.checkpoint.planning.shared_scales import Cast, amax_of_all, cast_shared, is_wide
from breccia.checkpoint.planning.smoothing import of_smoothed
from breccia.checkpoint.planning.targets import Target
from breccia.checkpoint.reading.rows import STEP, piece_of, pieces_of
from breccia.checkpoint.reading.source import Checkpoint
from breccia.checkpoint.workers import PIECE
from breccia.checkpoint.writing.feedback import encoded
from breccia.checkpoint.writing.feedback import rounded as feedback
from breccia.checkpoint.writing.losses import FLOATS, Loss, counted, in_piece, summed
from breccia.checkpoint.writing.repack import Sink, repack_pieces
from breccia.comparison import Comparison, compare
from breccia.layouts import PerChannel, PerTensor
from breccia.recipes import Float8BlockScaling, Float8CurrentScaling, ScalingRecipe, choices
from breccia.scaled_tensor import ScaledTensor
from breccia.verbs.cast_options import column_weights

_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
_SIZES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}

Array = Any
Read = Callable[[int, int], Array]


def execute(
    checkpoint: Checkpoint,
    choice: Choice,
    target: Target,
    sink: Sink,
    losses: dict[str, Loss] | None = None,
    rounded: dict[str, dict[str, Any]] | None = None,
) -> int:
    """Write one tensor; gives how many of its numbers are infinite or NaN, none of codes that are kept. Adds by its
    name how far new codes are from what was read to ``losses``, and what became of it where GPTQ rounded it to
    ``rounded``. Raises ValueError where its bytes do not fit its format; the message names it."""
    found = choice.found
    bad: list[int] = []
    sums: list[Comparison] = []
    repacked = choice.action == "repack"
    counts = not repacked or any(dtype in FLOATS for dtype, _ in choice.outputs.values())

    def pieces(cut: bool) -> Iterator[tuple[int, Any]]:
        """The tensor, or where it may be ``cut`` some rows of a large one after the other, with the number of the
        first; counts what is not finite."""
        runs = pieces_of(checkpoint, found)
        for start, stop in runs if cut else [(0, runs[-1][1])]:
            loaded = piece_of(checkpoint, found, start, stop)
            values = loaded if repacked else outside.comparable(loaded)
            if counts:
                bad.append(counted(values, sink.workers))
            yield start, values

    match choice.action:
        case "copy":
            (name,) = choice.outputs
            read, nbytes = _bytes_of(checkpoint, found)
            _copy(_counting(read, found.dtype, bad), nbytes, name, sink)
        case "same":
            for name in choice.outputs:
                read = functools.partial(checkpoint.span, name)
                _copy(read, checkpoint.entries[name].nbytes, name, sink)
        case "float":
            ((name, (dtype, _)),) = choice.outputs.items()
            if found.format == "plain" and not choice.turned and found.origin is STORED:
                read, nbytes = _bytes_of(checkpoint, found)
                _convert(_counting(read, found.dtype, bad), nbytes, found.dtype, name, dtype, sink)
            else:
                write = _turned_floats if choice.turned else _floats
                for at, values in pieces(len(found.shape) > 2 or not choice.turned):
                    write(values, name, dtype, sink, at * math.prod(found.shape[1:]) * _SIZES[dtype])
        case "multiply" | "divide":
            ((name, (_, shape)),), (number,) = choice.outputs.items(), choice.values
            stored = float32(checkpoint.array(found.parts["weight"])).astype(np.float64)
            with np.errstate(divide="ignore", over="ignore"):
                scale = np.asarray(stored * number if choice.action == "multiply" else number / stored, np.float32)
            bad.append(counted(stored))
            sink.put(name, scale.reshape(shape))
        case "make":
            (name,) = choice.outputs
            sink.put(name, np.asarray(choice.values, np.float32))
        case "keep":
            (name,) = choice.outputs
            blocks = checkpoint.blocks(found)
            _copy(lambda start, stop: blocks[start:stop], blocks.size, name, sink)
        case "encode":
            ((name, (written, _)),) = choice.outputs.items()
            kind = next(one for one in target.bridge.kinds.values() if one.name == written)
            if _feeds(choice, target):
                ((_, values),) = pieces(False)
                made, said = encoded(choice, target, values, kind)
                sink.put(name, made)
                if rounded is not None:
                    rounded[found.name] = said
                if losses is not None and kind.decode is not None:
                    sums.append(compare(values, kind.decode(made)))
            else:
                importance = _importance(target, found)
                for at, values in pieces(True):
                    weights = _importance_at(importance, found, at, values)
                    _encode(values, kind, weights, name, sink, sums, at * math.prod(found.shape[1:]))
            if losses is not None and sums:
                losses[found.name] = summed(sums, again=isinstance(values, ScaledTensor))
        case "repack":
            by_rows = found.recipe is not None and found.name not in target.products
            repack_pieces(pieces(by_rows), choice, target, sink)
        case "cast" | "requantize":
            cut, amax = _cut(checkpoint, choice, target)
            made = _quantized(pieces(cut), choice, target, amax, rounded, None if losses is None else sums)
            repack_pieces(made, choice, target, sink)
            if losses is not None:
                losses[found.name] = summed(sums, again=choice.action == "requantize")
    checkpoint.release(found)
    if target.importance is not None:
        target.importance.release()
    return sum(bad)


def _feeds(choice: Choice, target: Target) -> bool:
    """Whether GPTQ rounds a tensor, for which it takes the whole of a matrix."""
    return target.feedback is not None and not why_nearest(choice, target)


def _cut(checkpoint: Checkpoint, choice: Choice, target: Target) -> tuple[bool, Any]:
    """Whether pieces of a tensor can be quantized one by one, and the largest magnitude of all that has one scale; None
    where scales lie within a piece."""
    found, recipe = choice.found, choice.recipe
    assert recipe is not None
    known = None if choice.shared is None else choice.shared.amax(checkpoint)
    if len(pieces_of(checkpoint, found)) < 2 or found.name in target.products or _feeds(choice, target):
        return False, known
    rows, asked = recipe.layout.block.rows, choices(recipe)
    if known is not None or not asked.one_for_all:
        return len(found.shape) > 2 or (rows > 0 and STEP % rows == 0), known
    rounds = isinstance(recipe, Float8CurrentScaling) and target.bridge.readers.bfloat16_scales
    keeps = choice.action == "requantize" and not (asked.two_level and is_wide(found.recipe))  # a scale, maybe
    if rounds or keeps or asked.has_zero_point:
        return False, None
    return True, amax_of_all(checkpoint, found)


def _quantized(
    pieces: Iterator[tuple[int, Any]],
    choice: Choice,
    target: Target,
    amax: Any,
    rounded: dict[str, dict[str, Any]] | None,
    sums: list[Comparison] | None,
) -> Iterator[tuple[int, ScaledTensor]]:
    """A tensor in its new recipe: by GPTQ, by importance, or without data."""
    recipe, found = choice.recipe, choice.found
    assert recipe is not None
    feeds, requantized = _feeds(choice, target), choice.action == "requantize"
    importance = None if feeds or requantized else _importance(target, found)
    for at, values in pieces:
        if feeds:
            made, said = feedback(choice, target, values, amax, functools.partial(_cast, target))
            if rounded is not None:
                rounded[found.name] = said
        elif requantized and amax is None:
            made = target.device.requantize(values, recipe)
        else:
            made = _cast(target, values, recipe, amax, importance=_importance_at(importance, found, at, values))
        if sums is not None:
            sums.append(compare(values, made))
        yield at, made


def _cast(
    target: Target, values: Any, recipe: ScalingRecipe, amax: Any, cast: Cast | None = None, importance: Any = None
) -> ScaledTensor:
    """Quantize with the global scale of an amax, if there is one; by ``cast``, or else to nearest by importance."""
    if amax is None:
        return cast_for(target, values, recipe, cast, importance=importance)
    if cast is None:
        return cast_for(target, values, recipe, importance=importance, amax=amax)
    return cast_shared(values, recipe, amax, cast)


def _counting(read: Read, dtype: str, bad: list[int]) -> Read:
    """The same, which adds to a list how many numbers of each piece are infinite or NaN."""

    def counting(start: int, stop: int) -> Array:
        piece = read(start, stop)
        bad.append(in_piece(piece, dtype))
        return piece

    return counting


def _importance(target: Target, found: Found) -> Array | None:
    """Of a tensor's columns, as `Importance.of` has it."""
    diagonal = None if target.importance is None else target.importance.of_found(found)
    return None if diagonal is None else of_smoothed(diagonal, found)


def _importance_at(of_all: Array | None, found: Found, at: int, values: Any) -> Array | None:
    """The importance of the columns of a piece that begins at a matrix or a row, by that of all."""
    if of_all is None:
        return None
    if values.shape == found.shape:
        return of_all
    weights = column_weights(of_all, found.shape)
    return weights if weights.ndim == 1 else weights[at : at + len(values)]


def cast_for(
    target: Target, values: Any, recipe: ScalingRecipe, cast: Cast | None = None, **options: Any
) -> ScaledTensor:
    """Quantize, with scales that bfloat16 can hold where the format's readers round them to it; ``options`` are those
    of `breccia.cast`, in whose place ``cast`` quantizes a matrix if it is given."""
    values = outside.values(values)
    if not (isinstance(recipe, Float8CurrentScaling) and target.bridge.readers.bfloat16_scales):
        return target.device.cast(values, recipe, **options) if cast is None else cast(values, recipe)
    shape = values.shape
    if cast is not None:
        rows = 1 if recipe.granularity == "row" else shape[0]
        return _of_block(cast(values, _block(recipe, rows, shape[1])), recipe, shape)
    rows = values if recipe.granularity == "row" else values.reshape(1, -1)
    importance = options.get("importance")
    if importance is not None and recipe.granularity != "row":
        options["importance"] = np.broadcast_to(importance[..., None, :], shape).reshape(-1)
    return _of_block(target.device.cast(rows, _block(recipe, 1, rows.shape[-1]), **options), recipe, shape)


def _block(recipe: Float8CurrentScaling, rows: int, columns: int) -> Float8BlockScaling:
    """One block per row, or for all of them: the scale is rounded first and codes are made with it."""
    return Float8BlockScaling(
        fp8_format=recipe.fp8_format,
        block_k=columns,
        block_m=rows,
        scale_format="bf16",
        scale_search=recipe.scale_search,
    )


def _of_block(made: ScaledTensor, recipe: Float8CurrentScaling, shape: tuple[int, ...]) -> ScaledTensor:
    scale = made.scale.float() if hasattr(made.scale, "float") else float32(made.scale)  # torch's, or NumPy's
    if recipe.granularity == "row":
        return ScaledTensor(made.data, scale, recipe, PerChannel())
    return ScaledTensor(made.data.reshape(shape), scale.reshape(()), recipe, PerTensor())


def _bytes_of(checkpoint: Checkpoint, found: Found) -> tuple[Read, int]:
    """How to read a plain tensor's bytes, and how many there are."""
    if found.origin.is_made or found.origin.row_order is not None:
        raw = checkpoint.raw(found)
        return lambda start, stop: raw[start:stop], raw.size
    name = found.parts["weight"]
    return lambda start, stop: checkpoint.span(name, start, stop), checkpoint.entries[name].nbytes


def _copy(read: Read, nbytes: int, name: str, sink: Sink) -> None:
    def work(at: int, _: Any = None) -> None:
        sink.put(name, read(at, min(at + 4 * PIECE, nbytes)), at, copied=True)

    if nbytes > 4 * PIECE:
        sink.workers.each(work, iter(range(0, nbytes, 4 * PIECE)))
    elif nbytes:
        work(0)


def _convert(read: Read, nbytes: int, source: str, name: str, dtype: str, sink: Sink, begin: int = 0) -> None:
    """A plain tensor's floats as others, from a byte on."""
    width, size = _SIZES[source], _SIZES[dtype]
    step = PIECE // 4 * width

    def convert(at: int, _: Array) -> None:
        stop = min(at + step, nbytes)
        piece = as_dtype(typed(read(at, stop), source, ((stop - at) // width,)), dtype)
        sink.put(name, piece, begin + at // width * size)

    sink.workers.each(convert, iter(range(0, nbytes, step)))


def _floats(values: Any, name: str, dtype: str, sink: Sink, begin: int) -> None:
    """Dequantized values, from a byte on."""
    size = _SIZES[dtype]
    values = outside.comparable(values)
    if not isinstance(values, ScaledTensor):
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        source = {"float32": "F32", "float16": "F16", "float64": "F64"}.get(values.dtype.name, "BF16")
        _convert(lambda start, stop: flat[start:stop], flat.size, source, name, dtype, sink, begin)
        return

    def decode(piece: tuple[int, ScaledTensor], memory: Array) -> None:
        at, part = piece
        shape = part.shape
        count = math.prod(shape)
        buffer = memory if count * size <= memory.nbytes else np.empty(count * size, np.uint8)
        out = buffer[: count * size]
        strides = [size * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        view = _core.Array(out.__array_interface__["data"][0], list(shape), strides, _NAMES[dtype])
        _core.dequantize_into(part._core, view)
        sink.put(name, out, begin + at * size)

    sink.workers.each(decode, _pieces(values, size))


def _encode(
    values: Any, kind: Kind, importance: Array | None, name: str, sink: Sink, sums: list[Comparison], begin: int
) -> None:
    """Values as a format's own kind, some rows at a time, from an element on; adds to ``sums`` how far each piece is
    from what it was."""
    encode: Any = kind.encode
    weights = None if importance is None else column_weights(importance, tuple(values.shape))
    values = outside.comparable(values)

    def work(piece: tuple[int, Any], _: Array) -> None:
        at, part = piece
        wide = verbs.dequantize(part) if isinstance(part, ScaledTensor) else float32(part)
        made = encode(wide) if weights is None else encode(wide, _of_piece(weights, at, part.shape, values.shape))
        # Rows before this one take as many bytes each.
        sink.put(name, made, (begin + at) // part.shape[-1] * made.shape[-1])
        if kind.decode is not None:
            sums.append(compare(wide, kind.decode(made)))

    pieces = _pieces(values, _SIZES["F32"]) if isinstance(values, ScaledTensor) else _rows(values)
    sink.workers.each(work, pieces)


def _of_piece(weights: Array, at: int, piece: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    """The weights of the columns of a piece: of the whole, or of rows of one of the batch."""
    if weights.ndim == 1 or tuple(piece) == tuple(shape):
        return weights
    return weights.reshape(-1, weights.shape[-1])[at // math.prod(shape[-2:])]


def _rows(values: Array) -> Iterator[tuple[int, Array]]:
    """Runs of rows, with the number of the first element of each."""
    step = max(PIECE // 4 // values.shape[-1], 1)
    lead = values.shape[:-2]
    for number, index in enumerate(np.ndindex(*lead)):
        matrix = values[index] if values.ndim > 1 else values[None]
        for row in range(0, matrix.shape[0], step):
            yield (number * matrix.shape[0] + row) * matrix.shape[1], matrix[row : row + step]


def _turned_floats(values: Any, name: str, dtype: str, sink: Sink, begin: int) -> None:
    """A matrix transposed, or the matrices of a batch one by one, from a byte on."""
    values = outside.comparable(values)
    alone = len(values.shape) == 2

    def turn(index: int, _: Array) -> None:
        one = values if alone else values[index]
        one = one.dequantize() if isinstance(one, ScaledTensor) else one
        piece = np.ascontiguousarray(as_dtype(np.swapaxes(one, -1, -2), dtype))
        sink.put(name, piece, begin + index * piece.nbytes)

    sink.workers.each(turn, iter(range(1 if alone else values.shape[0])))


def as_dtype(values: Array, dtype: str) -> Array:
    """Numbers as a header's dtype of floats; of bfloat16, the bits."""
    if values.dtype == np.uint16:  # bfloat16 without ml_dtypes
        values = float32(values)
    if dtype != "BF16":
        with np.errstate(over="ignore"):
            return values.astype(_NAMES[dtype])
    return bfloat16_bits(values)


def _pieces(scaled: ScaledTensor, size: int) -> Iterator[tuple[int, ScaledTensor]]:
    """Runs of whole rows of blocks, with the number of the first element of each."""
    shape = scaled.shape
    if len(shape) < 2 or math.prod(shape) * size <= PIECE:
        yield 0, scaled
        return
    matrix = shape[-2] * shape[-1]
    tile = scaled.layout.block.rows or 1
    step = max(PIECE // (shape[-1] * size) // tile * tile, tile)
    for index in np.ndindex(*shape[:-2]):
        one = scaled[index]
        flat = int(np.ravel_multi_index(index, shape[:-2])) if index else 0
        for row in range(0, shape[-2], step):
            stop = min(row + step, shape[-2])
            yield flat * matrix + row * shape[-1], one[row:stop]
