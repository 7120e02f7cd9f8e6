# SPDX-License-Identifier: Apache-2.0
"""RoPE and how it is scaled: config.json's ``rope_parameters`` as GGUF's fields and tensors, and back.

| ``rope_type`` | GGUF |
|---|---|
| linear, yarn | fields ``rope.scaling.*`` |
| llama3 | tensor ``rope_freqs.weight``: what each frequency is divided by |
| longrope | tensors ``rope_factors_{long,short}.weight``, the same for long and short contexts |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from breccia.gguf.types import FLOAT32, STRING, UINT32, Fields, number, whole

ROPE_FACTORS = "rope_freqs.weight"
_LONG = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
ROPE_TENSORS = frozenset({ROPE_FACTORS, *_LONG.values()})
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_ORIGINAL = "original_max_position_embeddings"
_WIDEST = 2**16
_LONG_KNOWN = ("phi3",)
# Scalings that some architectures' programs know besides linear and YaRN.
_KNOWN = {"llama": ("llama3",), **dict.fromkeys(_LONG_KNOWN, ("longrope",))}

Array = np.ndarray[Any, Any]


def head_width(config: Mapping[str, Any]) -> int:
    """Numbers of a head. Raises KeyError, TypeError, ValueError or ArithmeticError where config.json does not say it,
    or says what cannot be."""
    width = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    if not 0 < width <= _WIDEST:
        raise ValueError(f"a head must have from 1 to {_WIDEST} numbers, it has {width}")
    return width


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_parameters`` of config.json, whichever of transformers' forms it has; those of layers that see all, where
    others have their own."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"rope_scaling must be an object, got {given!r}")
    said = dict(given.get("full_attention") or given)
    kind = said.get("rope_type") or said.get("type") or "default"
    said["rope_type"] = "longrope" if kind == "su" else kind
    said.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    for key in ("partial_rotary_factor", _ORIGINAL):
        if config.get(key) is not None:
            said.setdefault(key, config[key])
    return said


def check_rope(config: Mapping[str, Any], architecture: str) -> str:
    """Why the programs of an architecture have no such RoPE; "" where they have. Raises KeyError, TypeError or
    ValueError where config.json does not say what it must."""
    rope = rope_of(config)
    kind = rope["rope_type"]
    if kind not in ("default", "linear", "yarn", *_KNOWN.get(architecture, ())):
        return f"rope_type {kind!r} has no GGUF form here"
    rope_tensors(config)  # raises where something is not said
    return _odd_factors(rope, config) if kind == "longrope" else ""


def rope_fields(config: Mapping[str, Any], architecture: str) -> Fields:
    """What GGUF's metadata says of it, without the architecture's name. Raises KeyError where config.json does not say
    it."""
    rope = rope_of(config)
    kind = rope["rope_type"]
    said: Fields = {
        "rope.dimension_count": (UINT32, _turned(rope, config)),
        "rope.freq_base": (FLOAT32, float(rope["rope_theta"])),
    }
    if kind in ("linear", "yarn"):
        said["rope.scaling.type"] = (STRING, kind)
        said["rope.scaling.factor"] = (FLOAT32, float(rope["factor"]))
    if kind in ("linear", "yarn", "longrope"):
        original = rope.get(_ORIGINAL, config["max_position_embeddings"])
        said["rope.scaling.original_context_length"] = (UINT32, int(original))
    if kind == "yarn":
        for key in ("beta_fast", "beta_slow"):
            if rope.get(key) is not None:
                said[f"rope.scaling.yarn_{key}"] = (FLOAT32, float(rope[key]))
        # Programs multiply by the usual one themselves; of DeepSeek they know what else it has.
        more = 1.0 if architecture == "deepseek2" else _attention_of_yarn(rope) / _usual_of_yarn(float(rope["factor"]))
        if not math.isclose(more, 1, rel_tol=1e-6):
            said["rope.scaling.attn_factor"] = (FLOAT32, more)
    if kind == "longrope":
        said["rope.scaling.attn_factor"] = (FLOAT32, _attention_of_longrope(rope, config))
    return said


def rope_tensors(config: Mapping[str, Any]) -> dict[str, Array]:
    """Tensors that GGUF has for a scaling, float32 of one number for each frequency; none for most. Raises KeyError,
    TypeError or ValueError where config.json does not say them."""
    rope = rope_of(config)
    if rope["rope_type"] == "longrope":
        return {name: np.asarray(rope[key], np.float32) for key, name in _LONG.items()}
    return {ROPE_FACTORS: _llama3_factors(rope, config)} if rope["rope_type"] == "llama3" else {}


def rope_of_fields(fields: Fields, architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_parameters`` of what a file's metadata says, without what only tensors tell; of what it leaves out, the
    sizes of ``config``. Raises ValueError where a field is not what it must be."""
    at = f"{architecture}.rope"
    # DeepSeek has what is turned apart from the rest of a head.
    width = whole(fields, f"{at}.dimension_count", 1) if architecture == "deepseek2" else head_width(config)
    turned = whole(fields, f"{at}.dimension_count", width)
    if not 0 < turned <= width:
        raise ValueError(f"{at}.dimension_count must be from 1 to the {width} numbers of a head, it is {turned}")
    rope: dict[str, Any] = {
        "rope_theta": number(fields, f"{at}.freq_base", rope_of(config)["rope_theta"]),
        "rope_type": "default",
    }
    if turned != width:
        rope["partial_rotary_factor"] = _part(turned, width)
    factor = number(fields, f"{at}.scaling.factor", number(fields, f"{at}.scale_linear", 1.0))
    kind = fields.get(f"{at}.scaling.type", (STRING, "linear" if factor != 1 else "none"))[1]
    if kind not in ("none", "linear", "yarn", "longrope"):
        shown = repr(kind)[:80] if isinstance(kind, str) else "no text"
        raise ValueError(f"{at}.scaling.type must be 'linear', 'yarn' or 'longrope', it is {shown}")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        rope[_ORIGINAL] = whole(fields, f"{at}.scaling.original_context_length", config["max_position_embeddings"])
        for key in ("beta_fast", "beta_slow"):
            if (beta := number(fields, f"{at}.scaling.yarn_{key}")) is not None:
                rope[key] = beta
        more = number(fields, f"{at}.scaling.attn_factor", 1.0)
        if architecture == "deepseek2":
            scale = round(number(fields, f"{at}.scaling.yarn_log_multiplier", 0.1) / 0.1, 6)
            rope |= {"mscale": scale, "mscale_all_dim": scale}
        elif architecture == "gpt-oss":
            rope["truncate"] = False  # for which GGUF has no field: the model's own
        if more != 1 and architecture != "deepseek2":
            rope["attention_factor"] = round(more * _usual_of_yarn(factor), 6)  # of float32
    return rope


def longrope_of(
    tensors: Mapping[str, Array], fields: Fields, architecture: str, config: Mapping[str, Any], rope: dict[str, Any]
) -> dict[str, Any]:
    """The parameters of LongRoPE, of its tensors and fields."""
    if architecture not in _LONG_KNOWN:
        raise ValueError(f"{sorted(tensors)[0]} must be absent in architecture {architecture!r}")
    at = f"{architecture}.rope.scaling"
    missing = [name for name in _LONG.values() if name not in tensors]
    original = whole(fields, f"{at}.original_context_length")
    attention = number(fields, f"{at}.attn_factor")
    if missing or not original or not attention:
        first = [*missing, f"{at}.{'attn_factor' if original else 'original_context_length'}"][0]
        raise ValueError(f"{first} must be there: the model's RoPE is LongRoPE")
    said = {key: [float(value) for value in tensors[name]] for key, name in _LONG.items()}
    made = {**rope, "rope_type": "longrope", **said, _ORIGINAL: original, "attention_factor": attention}
    if why := _odd_factors(made, config):
        raise ValueError(why)
    return made


def llama3_of(factors: Array, config: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of Llama 3's scaling, of the tensor that they give; ``low_freq_factor`` is 1, which leaves none to
    choose. Raises ValueError where no parameters give the tensor."""
    rope = rope_of(config)
    wide = factors.astype(np.float64) if np.isfinite(factors).all() else np.zeros(0)
    periods = _periods(rope, config)
    factor = float(wide.max(initial=1.0))
    between = np.flatnonzero((wide > 1) & (wide < factor)) if len(wide) == len(periods) else np.arange(0)
    if len(between) > 1:
        # The share of the undivided frequency is a line in the number of turns: through the first and the last one.
        ends = between[[0, -1]]
        share = (1 / wide[ends] - 1 / factor) / (1 - 1 / factor)
        slope = (share[0] - share[1]) / (1 / periods[ends[0]] - 1 / periods[ends[1]])
        start = slope / periods[ends[0]] - share[0]
        high, original = 1 + 1 / start, slope / start
        if math.isfinite(high) and math.isfinite(original) and original > 0:
            said = (factor, 1.0, float(round(high, 3)), round(original))
            found = {**rope, **dict(zip(_LLAMA3, said, strict=True)), "rope_type": "llama3"}
            if np.allclose(_llama3_factors(found, config), factors, rtol=1e-4):
                return found
    raise ValueError(f"{ROPE_FACTORS} must have the factors of Llama 3's scaling, it has others")


def _turned(rope: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """How many numbers of a head are turned."""
    return int(head_width(config) * float(rope.get("partial_rotary_factor") or 1))


def _periods(rope: Mapping[str, Any], config: Mapping[str, Any]) -> Array:
    """After how many tokens each frequency of a head has turned once."""
    width = head_width(config)
    periods: Array = 2 * math.pi * float(rope["rope_theta"]) ** (np.arange(0, width, 2) / width)
    return periods


def _part(turned: int, width: int) -> float:
    """The number by which a width gives what is turned of it, rounded down as transformers does."""
    factor = turned / width
    while int(width * factor) < turned:
        factor = math.nextafter(factor, 1)
    return factor


def _odd_factors(rope: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """What is wrong with the numbers of LongRoPE; "" where nothing is."""
    wanted = _turned(rope, config) // 2
    for key, name in _LONG.items():
        factors = np.asarray(rope[key], np.float32)
        if factors.shape != (wanted,) or not (np.isfinite(factors) & (factors > 0)).all():
            return f"{name} must have {wanted} numbers above 0, it has {factors.size}"
    return ""


def _llama3_factors(rope: Mapping[str, Any], config: Mapping[str, Any]) -> Array:
    """What Llama 3's scaling divides each frequency by."""
    factor, low, high, original = (float(rope[key]) for key in _LLAMA3)
    # Frequencies that turn rarely in the original context are divided, those that turn often are not.
    share = np.clip((original / _periods(rope, config) - low) / (high - low), 0, 1)
    factors: Array = (1 / ((1 - share) / factor + share)).astype(np.float32)
    return factors


def _usual_of_yarn(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def _attention_of_yarn(rope: Mapping[str, Any]) -> float:
    """What queries and keys are multiplied by together, as a root."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    factor, one, all_dim = float(rope["factor"]), rope.get("mscale"), rope.get("mscale_all_dim")
    if one and all_dim:
        return _usual_of_yarn(factor, float(one)) / _usual_of_yarn(factor, float(all_dim))
    return _usual_of_yarn(factor)


def _attention_of_longrope(rope: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    original = float(rope[_ORIGINAL])
    factor = float(rope.get("factor") or config["max_position_embeddings"] / original)
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
