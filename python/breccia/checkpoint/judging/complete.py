# SPDX-License-Identifier: Apache-2.0
"""Whether a checkpoint is whole: every tensor is there with all its parts, and every scale is a number.

Programs that serve models start with scales missing or never written, and answer nonsense. What must be there
is told by the model's own class where transformers or diffusers has it, by the parts that each format has, and by the
other layers of the same model.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections import Counter, defaultdict
from typing import Any

import numpy as np

from breccia import formats, verbs
from breccia.bridges.outside import OutsideTensor, values
from breccia.bridges.parts import Found
from breccia.checkpoint.judging.architecture import Architecture, architecture
from breccia.checkpoint.judging.histograms import block_scales
from breccia.checkpoint.reading.logical import AS_NUMBERS
from breccia.checkpoint.reading.source import Checkpoint, is_float
from breccia.checkpoint.reports import CompleteReport
from breccia.checkpoint.writing.losses import counted
from breccia.checkpoint.writing.manifest import NAME, Written
from breccia.scaled_tensor import ScaledTensor
from breccia.schemes import traps
from breccia.screen import wrapped

# Parts of quantized weights, by the last word of their name: none may be left over.
_PARTS = re.compile(
    r"(^|[._])(weight_scale(_\w+)?|weight_zero_point|weight_shape|weight_packed|weight_global_scale|weight_g_idx"
    r"|scales?|qweight|qzeros|g_idx|absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+|_blocks|_scales)$"
)
_OF_ACTIVATIONS = re.compile(r"(^|[._])(input|output|k|v|q|prob|kv|pre_quant|logit|residual)_(global_)?scales?$")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_LAYERS = re.compile(r"(^|\.)(layers|layer|h|blocks|block|blk)$")
_HARMLESS = (AS_NUMBERS, "shown flat", "as breccia 0.1.3 wrote them")


def complete(path: str | os.PathLike[str]) -> CompleteReport:
    """Look through one checkpoint for what is missing, was never written, or nobody reads. JSON types only.

    Args:
        path: the checkpoint.

    Returns:
        ``ok``; ``problems``, each of a tensor; ``missing``, ``extra`` and ``unread`` names; how many tensors there are;
        ``readers``, what single programs refuse or misread though all is there; ``checked``, the class that names and
        shapes were compared with, or why names alone were looked at.

    Raises:
        ValueError: the checkpoint is not valid.
    """
    with Checkpoint(path, mapped=False) as checkpoint:
        written = Written(checkpoint)
        with np.errstate(all="ignore"):
            problems = [(f.name, text) for f in checkpoint.found for text in _problems(checkpoint, f, written)]
        checkpoint.sums = None
        problems += traps.scales(checkpoint)
        unread = [f.name for f in checkpoint.found if f.format == "plain" and _is_part(f.name)]
        model = _architecture(checkpoint)
        missing = _missing(checkpoint)
        extra: list[str] = []
        if isinstance(model, Architecture):
            judged = {name for name, _ in problems}
            rest = (f for f in checkpoint.found if f.name not in judged)
            problems += [(f.name, text) for f in rest if (text := model.problem(f))]
            missing, extra = _by_model(checkpoint, model, missing, set(unread))
        return {
            "path": str(checkpoint.path),
            "ok": not (problems or missing or extra or unread),
            "tensors": len(checkpoint.found),
            "quantized": sum(f.format != "plain" for f in checkpoint.found),
            "problems": [{"tensor": name, "problem": text} for name, text in problems],
            "missing": missing,
            "extra": extra,
            "unread": unread,
            "readers": traps.readers(checkpoint),
            "checked": model.name if isinstance(model, Architecture) else f"names only: {model}",
        }


def render(report: CompleteReport) -> str:
    """The report as lines of at most 80 columns."""
    findings = [f"! {p['tensor']}: {p['problem']}" for p in report["problems"]]
    findings += [f"! {word}: {name}" for word in ("missing", "extra", "unread") for name in report[word]]
    findings += [f"! {text}" for text in report["readers"]]
    lines = [line for text in findings for line in wrapped(text)]
    lines.append(f"{report['tensors']} tensors, {report['quantized']} of them quantized")
    lines += wrapped(f"compared with {report['checked']}".replace("compared with names only", "names only"))
    lines.append("ok" if report["ok"] else "not ok")
    return "\n".join(lines)


def _architecture(checkpoint: Checkpoint) -> Architecture | str:
    """What the model of config.json consists of, or why that is not known."""
    if checkpoint.container.whole:
        return f"{checkpoint.container.title} files have names of their own"
    if not checkpoint.config:
        return "there is no config.json"
    return architecture(checkpoint.config, checkpoint.found.names())


def _by_model(
    checkpoint: Checkpoint, model: Architecture, missing: list[str], unread: set[str]
) -> tuple[list[str], list[str]]:
    """Names that are missing, by the model and by other layers, and those that are too many."""
    there = [found.name for found in checkpoint.found if found.name not in unread]
    kept = [name for name in missing if _is_part(name) or model.has(name)]
    more = [name for name in model.missing(there) if not any(f"{name}.".startswith(f"{one}.") for one in kept)]
    extra = [name for name in model.extra(there) if _OF_ACTIVATIONS.search(name) is None]
    return sorted([*kept, *more]), extra


def _is_part(name: str) -> bool:
    return _PARTS.search(name) is not None and _OF_ACTIVATIONS.search(name) is None


def _problems(checkpoint: Checkpoint, found: Found, written: Written) -> list[str]:
    """What is wrong with one tensor: what it looks like, and whether it is as it was written."""
    said = _of_tensor(checkpoint, found)
    others = written.differing(found)
    checkpoint.release(found)
    return [*([f"not the bytes that convert wrote, by {NAME}: {', '.join(others)}"] if others else []), *said]


def _of_tensor(checkpoint: Checkpoint, found: Found) -> list[str]:
    try:
        found = checkpoint.refined(found)
        tensor = None if found.format == "plain" else checkpoint.load(found)
    except ValueError as error:
        return [*_findings(found), str(error)]
    said = _findings(found)
    if found.format == "plain":
        return said + (_of_floats(checkpoint, found) if is_float(found) else [])
    scaled = tensor.scaled if isinstance(tensor, OutsideTensor) else tensor
    if not isinstance(scaled, ScaledTensor):
        return said + _of_values(values(tensor))
    return said + _of_scales(scaled) + damage(scaled, found.name)


def _findings(found: Found) -> list[str]:
    return [text for text in found.findings if not text.endswith(_HARMLESS)]


def _of_floats(checkpoint: Checkpoint, found: Found) -> list[str]:
    array = values(checkpoint.load(found)) if found.origin.numbers else checkpoint.array(found.parts["weight"])
    flat = array.reshape(-1)
    return _of_values(flat) + (["every element is zero: never written?"] if _unwritten(found, flat) else [])


def _unwritten(found: Found, flat: Any) -> bool:
    return found.name.endswith("weight") and math.prod(found.shape) > 1 and not flat.view(np.uint8).any()


def _of_values(array: Any) -> list[str]:
    bad = counted(array)
    return [f"{bad} elements are not finite"] if bad else []


def _of_scales(scaled: ScaledTensor) -> list[str]:
    said = []
    scales = np.asarray(block_scales(scaled))
    for what, count in (("NaN", np.isnan(scales).sum()), ("infinite", np.isinf(scales).sum())):
        if count:
            said.append(f"{int(count)} of {scales.size} scales are {what}")
    second = scaled.global_scale
    if second is not None and not (np.isfinite(np.asarray(second)).all() and np.asarray(second).all()):
        said.append("the global scale must be a number other than zero")
    elif scales.size and not scales.any():
        said.append("every scale is zero: never written?")
    elif (lost := _lost(scaled, scales)) > 0:
        said.append(f"{lost} elements are lost: their scales are zero, their codes are not")
    return said


def _lost(scaled: ScaledTensor, scales: Any) -> int:
    """Elements that would be other than zero if their scales were."""
    zero = np.abs(scales) == 0
    if not zero.any():
        return 0
    raw = np.asarray(scaled.scale)
    one = raw.reshape(-1)[np.flatnonzero(~zero.reshape(-1))[0]]
    shown = np.where(zero, one, np.zeros((), raw.dtype)).astype(raw.dtype).reshape(raw.shape)
    return int(np.count_nonzero(verbs.dequantize(dataclasses.replace(scaled, scale=shown))))


def _missing(checkpoint: Checkpoint) -> list[str]:
    """Names that the other layers, or config.json, say must be there."""
    if checkpoint.container.whole:
        return _missing_layers(checkpoint, set(checkpoint.found.names()))
    children: dict[str, set[str]] = defaultdict(set)
    for name in checkpoint.entries:
        child, (parent, _, last) = name, name.rpartition(".")
        while child and last not in children[parent]:
            children[parent].add(last)
            child, (parent, _, last) = parent, parent.rpartition(".")
    missing = _missing_layers(checkpoint, set(checkpoint.entries))
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for node in children:
        weight = checkpoint.entries.get(f"{node}.weight")  # kept in high precision, it has other parts
        alike[_NUMBER.sub("#", f".{node}."), "" if weight is None else weight.dtype].append(node)
    dtypes = {dtype for _, dtype in alike if dtype}
    for (pattern, dtype), nodes in alike.items():
        others = [] if dtype else [alike[pattern, other] for other in dtypes if (pattern, other) in alike]
        usual = _usual(children, max([nodes, *others], key=len))
        if any(part.isdigit() for part in usual):
            continue
        for node in nodes:
            if children[node] < usual:
                missing += [f"{node}.{part}" for part in sorted(usual - children[node])]
    return sorted(missing)


def _usual(children: dict[str, set[str]], nodes: list[str]) -> frozenset[str]:
    """What most modules of a kind consist of."""
    sets = Counter(frozenset(children[node]) for node in nodes)
    return max(sets, key=lambda one: (sets[one], len(one)))


def _missing_layers(checkpoint: Checkpoint, names: set[str]) -> list[str]:
    """Numbers of layers or experts that are left out."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for name in names:
        for found in _NUMBER.finditer(name):
            if len(found[0]) < 9:
                numbers[name[: found.start() - 1]].add(int(found[0]))
    said = checkpoint.config.get("num_hidden_layers")
    layers = said if isinstance(said, int) and 0 < said <= 10_000 and not isinstance(said, bool) else 0
    missing = []
    for parent, there in numbers.items():
        most = max(there) + 1
        if _LAYERS.search(parent) and "." not in parent.removeprefix("model.").removesuffix("layers").strip("."):
            most = max(most, layers)
        if most <= 4 * len(there) + layers:
            missing += [f"{parent}.{number}" for number in range(most) if number not in there]
    return missing


_ROWS = 1 << 20  # bytes looked at together
_FEWEST = 64  # elements in a row of one code that is no chance


def damage(scaled: ScaledTensor, name: str) -> list[str]:
    """What is wrong with the codes of a tensor, all of which are read."""
    data = np.asarray(scaled.data)
    if not data.size or data.dtype.itemsize != 1:
        return []
    rows = np.ascontiguousarray(data.view(np.uint8)).reshape(-1, data.shape[-1])
    step = max(_ROWS // rows.shape[1], 1)
    least, most = _not_finite(scaled.recipe.element)
    bad, constant, zero = 0, list[int](), True
    for start in range(0, rows.shape[0], step):
        piece = rows[start : start + step]
        if least:
            magnitude = piece & np.uint8(0x7F)
            bad += int(np.count_nonzero(magnitude >= least)) if magnitude.max() >= least else 0
        elif most:
            bad += int(np.count_nonzero(piece == most))
        same = np.flatnonzero((piece[:, :8] == piece[:, :1]).all(axis=1))  # few rows get any further
        constant += [start + int(i) for i in same if (piece[i] == piece[i, 0]).all()]
        zero = zero and len(constant) == start + len(piece)
    said = [f"{bad} codes are NaN or infinite"] if bad else []
    if zero and name.endswith("weight") and math.prod(scaled.shape) > 1 and not _any(scaled):
        return [*said, "every code is zero: never written?"]
    return said if bad else said + _of_constant(scaled, rows, constant)


def _of_constant(scaled: ScaledTensor, rows: Any, constant: list[int]) -> list[str]:
    """Rows of one code that rounding does not give: a row of one number has the code of the largest magnitude, by
    which its scale was chosen, or of half of that where scales are powers of two. Pairs of 4-bit codes are one where
    both halves are."""
    codes = rows.shape[1] * (2 if scaled.is_packed else 1)
    if codes < _FEWEST or len(scaled.shape) != 2 or rows.shape[0] != scaled.shape[0]:
        return []
    odd = [i for i in constant if not scaled.is_packed or rows[i, 0] >> 4 == rows[i, 0] & 15]
    odd = [i for i in odd if _share(int(rows[i, 0]) & (15 if scaled.is_packed else 255), scaled.recipe.element) < 0.45]
    tile = scaled.layout.block.rows or 1
    count = sum(_any(scaled[i // tile * tile : (i // tile + 1) * tile][i % tile : i % tile + 1]) for i in odd[:1000])
    return [f"{count} rows hold one code alone: damaged?"] if count else []


def _share(code: int, element: str) -> float:
    """A code's number, as a share of the largest; of codes without a sign, from the middle of them."""
    said, number = formats.finfo(element), float(formats.decode(np.array([code], np.uint8), element)[0])
    return abs(number / said.max if said.min < 0 else 2 * number / said.max - 1)


def _any(scaled: ScaledTensor) -> bool:
    """Whether an element is other than zero."""
    return bool(np.any(np.asarray(verbs.dequantize(scaled))))


@functools.cache
def _not_finite(element: str) -> tuple[int, int]:
    """The least magnitude of a code that is no number, and the largest such code; magnitude 0 where that is one code
    alone, and (0, 0) where every code is a number."""
    if not element.startswith("float8"):
        return 0, 0
    every = np.arange(256, dtype=np.uint8)
    bad = every[~np.isfinite(formats.decode(every, element))]
    if not bad.size:
        return 0, 0
    return (0, int(bad[0])) if bad.size == 1 else (int((bad & 0x7F).min()), int(bad.max()))
