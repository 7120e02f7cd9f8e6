# SPDX-License-Identifier: Apache-2.0
"""`convert --smooth`: inputs of layers that are easier to quantize, made by what multiplies weights alone.

An input x becomes x · s, column by column, in what gives it: a norm, the rows of v_proj, or those of up_proj. Its
readers' columns are divided by s, so that the float model is the same. s = √(ω / σ), where σ² is the mean of x² and ω²
the sum over the readers of a column's energy over that of the reader's output: both then are √(ωσ).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from breccia.bridges import outside
from breccia.bridges.common import bfloat16_bits, float32
from breccia.bridges.parts import Found
from breccia.checkpoint.planning.choices import Choice
from breccia.checkpoint.planning.importance import Importance
from breccia.checkpoint.planning.layer_moments import energy
from breccia.checkpoint.planning.remarks import Remark, some
from breccia.checkpoint.planning.targets import Target
from breccia.checkpoint.reading.source import Checkpoint
from breccia.moments import Moments

Array = Any
_ROWS = 1024  # of a weight whose energy is looked at together
_MOST = 2.0**12
_DTYPES = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
_LAYER = re.compile(r"(.*\blayers\.\d+\.)(.+)")
_ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkv")
_GATED = ("mlp.gate_proj", "mlp.up_proj")
# Models whose layers are norm → q, k, v → o and norm → gate, up → down, by the norm before the gate; those of Gemma
# multiply by their weight and one.
_NORMS = dict.fromkeys(
    ("llama", "mistral", "qwen2", "qwen3", "granite", "smollm3", "gemma"), "post_attention_layernorm"
) | dict.fromkeys(("gemma2", "gemma3_text"), "pre_feedforward_layernorm")
_LAYERS = (*_ATTENTION, "self_attn.o_proj", *_GATED, "mlp.down_proj")
_PARTS = {f"{layer}.{part}" for layer in _LAYERS for part in ("weight", "bias")} | {
    *(f"{name}_layernorm.weight" for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")),
    *("self_attn.q_norm.weight", "self_attn.k_norm.weight", "self_attn.rotary_emb.inv_freq"),
}


class Place(NamedTuple):
    """Where an input may be smoothed: what gives it and what reads it, by their modules' names, and the shape (groups,
    heads, columns) of an input of which heads of a group have one source."""

    source: str
    readers: tuple[str, ...]
    heads: tuple[int, int, int] | None = None


class Smoothing:
    """One input that is smoothed: the layer's prefix, the place in it, and the tensors of source and readers. Factors
    are looked for once, when the first of the tensors is read."""

    def __init__(
        self,
        at: str,
        place: Place,
        found: Mapping[str, Found],
        offset: float,
        checkpoint: Checkpoint,
        importance: Importance,
    ) -> None:
        self.at, self.place, self._offset = at, place, offset
        self._checkpoint, self._importance = checkpoint, importance
        self._source, self._readers = found[f"{place.source}.weight"], [found[f"{one}.weight"] for one in place.readers]
        self._lock = threading.Lock()

    @property
    def of_norm(self) -> bool:
        """Whether a norm gives the input."""
        return len(self._source.shape) == 1

    @functools.cached_property
    def _found(self) -> tuple[Array, Array]:
        """s of what gives the input, float32, and the norm's numbers with it, in their dtype."""
        moments = self._importance.moments(self._readers[0])
        assert moments is not None
        sigma, omega = np.asarray(moments.diag, np.float64), np.zeros(moments.columns)
        for one in self._readers:
            weight = float32(outside.values(self._checkpoint.load(one)))
            whole = sum(energy(weight[i : i + _ROWS], moments) for i in range(0, len(weight), _ROWS))
            omega += np.square(weight, dtype=np.float64).sum(0) / (whole or np.inf)
        if self.place.heads is not None:
            sigma, omega = (each.reshape(self.place.heads).sum(1).reshape(-1) for each in (sigma, omega))
        known = (sigma > 0) & (omega > 0) & np.isfinite(sigma) & np.isfinite(omega)
        logs = np.log(omega, where=known, out=np.zeros_like(omega)) - np.log(
            sigma, where=known, out=np.zeros_like(sigma)
        )
        logs = np.where(known, logs - logs[known].mean() if known.any() else 0.0, 0.0) / 4
        factor = np.clip(np.exp(logs), 1 / _MOST, _MOST).astype(np.float32)
        return self._rounded(factor) if self.of_norm else (factor, factor)

    def _rounded(self, factor: Array) -> tuple[Array, Array]:
        """A norm is stored in few bits: the factor that its rounded numbers have, which the readers then undo."""
        stored = self._checkpoint.load(self._source)
        norm, dtype = float32(outside.values(stored)), self._source.dtype
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            moved = (norm + self._offset) * factor - self._offset
            made, kept = (
                bfloat16_bits(one) if dtype == "BF16" else one.astype(_DTYPES[dtype]) for one in (moved, norm)
            )
            factor = (float32(made) + self._offset) / (norm + self._offset)
        good = np.isfinite(factor) & (factor > 0)
        return np.where(good, factor, np.float32(1)).astype(np.float32), np.where(good, made, kept)

    def factors(self) -> tuple[Array, Array]:
        """`_found`, by any thread."""
        with self._lock:
            return self._found

    @property
    def columns(self) -> Array:
        """s of each column of the input, float32 (K,)."""
        factor, heads = self.factors()[0], self.place.heads
        if heads is None:
            return factor
        return np.broadcast_to(factor.reshape(heads[0], 1, heads[2]), heads).reshape(-1)

    def folded(self, found: Found) -> Found:
        """A tensor of the source or of a reader, with its part of it; others as they are."""
        module, _, kind = found.name.removeprefix(self.at).rpartition(".")
        side = "input" if module in self.place.readers and kind == "weight" else ""
        side = side or ("norm" if self.of_norm else "output") * (module == self.place.source)
        if not side:
            return found
        origin = dataclasses.replace(found.origin, rotations=(*found.origin.rotations, _Side(self, side)))
        return dataclasses.replace(found, dtype="F32" if len(found.shape) > 1 else found.dtype, origin=origin)


class _Side(NamedTuple):
    """What smoothing does to a tensor: to the columns of a reader ("input"), to the rows or the bias of a layer that
    gives the input ("output"), to a norm."""

    of: Smoothing
    side: str

    def undone(self, values: Array, _: Any) -> Array:
        """The numbers of a tensor with it."""
        if self.side == "norm":
            return self.of.factors()[1]
        rows = float32(values)
        if self.side == "input":
            return rows / self.of.columns
        factor = self.of.factors()[0]
        return rows * (factor if rows.ndim == 1 else factor[:, None])


def of_smoothed(diagonal: Array, found: Found) -> Array:
    """What errors of a weight's columns count once its input is smoothed, as it was measured before."""
    s = _columns(found)
    return diagonal if s is None else np.asarray(diagonal * s * s, np.float32)


def moments_of_smoothed(moments: Moments, found: Found) -> Moments:
    """The same of all moments."""
    s = _columns(found)
    if s is None:
        return moments
    block, full = moments.block, moments.full
    if block is not None:
        runs = s.reshape(block.shape[:2])
        block = block * runs[:, :, None] * runs[:, None]
    return Moments(moments.diag * s * s, moments.count, block, full if full is None else full * s[:, None] * s)


def _columns(found: Found) -> Array | None:
    """What the input of a weight is multiplied with; None of others."""
    every = [one.of.columns for one in found.origin.rotations if isinstance(one, _Side) and one.side == "input"]
    return every[0] if every else None


def smoothings(
    checkpoint: Checkpoint, found: Iterable[Found], target: Target, choose: Callable[[Found], Choice]
) -> tuple[list[Smoothing], list[str]]:
    """The inputs to smooth, and notes; ``choose`` says what becomes of a tensor. Raises ValueError where nobody knows
    what reads the norms of the model."""
    text = checkpoint.config.get("text_config") or checkpoint.config
    kind, importance = str(text.get("model_type")), target.importance
    assert importance is not None
    if kind not in _NORMS:
        known = ", ".join(_NORMS)
        raise ValueError(f"smooth must be left out for model_type {kind!r}: what reads its norms is known of {known}")
    layers: dict[str, dict[str, Found]] = {}
    for one in found:
        if match := _LAYER.fullmatch(one.name):
            layers.setdefault(match[1], {})[match[2]] = one
    made, left, high = [], list[str](), list[str]()
    for at, parts in layers.items():
        strange = next((part for part in parts if part not in _PARTS), "")
        for place in _places(kind, text, parts):
            why = (
                f"{at}{strange} may read or scale what is smoothed"
                if strange
                else _why_not(place, parts, choose, importance)
            )
            if why:
                left.append(f"{at}{place.readers[0]}: {why}")
                continue
            made.append(Smoothing(at, place, parts, float(kind.startswith("gemma")), checkpoint, importance))
            weights = [parts[f"{one}.weight"] for one in place.readers]
            high += [w.name for w in weights if not _quantized_inputs(target, choose(w))]
    notes = [f"inputs of {len(left)} places are not smoothed, the first is that of {left[0]}"] if left else []
    if high:
        notes.append(
            f"smoothed inputs of {some(high)} stay in high precision: --activations says how they are quantized"
        )
    if norms := [f"{one.at}{one.place.source}" for one in made if one.of_norm]:
        notes.append(Remark(f"inputs of {len(made)} places are smoothed, which changes the norms {some(norms)}"))
    return made, notes


def _quantized_inputs(target: Target, choice: Choice) -> bool:
    module = choice.found.name.removesuffix(".weight")
    return choice.recipe is not None and target.inputs_of(module, choice.recipe) is not None


def _places(kind: str, config: Mapping[str, Any], parts: Mapping[str, Found]) -> Iterator[Place]:
    """The places of a layer that has all of the weights."""
    places = [
        Place("input_layernorm", _ATTENTION),
        Place(_NORMS[kind], _GATED),
        Place("mlp.up_proj", ("mlp.down_proj",)),
    ]
    yield from (one for one in places if all(f"{name}.weight" in parts for name in (one.source, *one.readers)))
    v, o = (parts.get(f"self_attn.{name}_proj.weight") for name in "vo")
    if v is not None and o is not None:
        width = config.get("head_dim") or config.get("hidden_size", 0) // config.get("num_attention_heads", 1)
        heads = v.shape[0] // width, o.shape[-1] // v.shape[0], width
        if math.prod(heads) == o.shape[-1]:
            yield Place("self_attn.v_proj", ("self_attn.o_proj",), heads)


def _why_not(
    place: Place, parts: Mapping[str, Found], choose: Callable[[Found], Choice], importance: Importance
) -> str:
    """Why an input cannot be smoothed, "" where it can."""
    readers = [parts[f"{one}.weight"] for one in place.readers]
    for one in (parts[f"{place.source}.weight"], *readers):
        if one.format != "plain":
            return f"{one.name} is quantized in the source"
        if len(one.shape) > 1 and choose(one).action not in ("cast", "encode"):
            return f"{one.name} is not quantized"
    return next((f"there are no moments of {one.name}" for one in readers if importance.moments(one) is None), "")
