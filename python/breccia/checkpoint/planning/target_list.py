# SPDX-License-Identifier: Apache-2.0
"""All that `parse_target` understands, as a table, and what is meant by names that it does not."""

from __future__ import annotations

import re
from typing import Any

from breccia import bridges, recipe_names
from breccia.bridges.contract import FileFormat
from breccia.bridges.parts import ghost
from breccia.checkpoint.files.dtypes import DTYPES, nbytes_of
from breccia.gguf.container import block_bytes
from breccia.recipes import ScalingRecipe

__all__ = ["FLOATS", "meant", "targets"]

FLOATS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}

_SHAPE = (1024, 4096)  # of a matrix, whose bits a weight are told
_FLOAT_NAMES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
_OTHERS = {
    "nf4": "bitsandbytes' NF4 is read and not written: nvfp4, mxfp4 and int4 have as many bits",
    "fp4": "nvfp4 and mxfp4 are FP4 with scales of 16 and 32 weights",
}
_OTHERS |= dict.fromkeys(
    ("w8a8", "fp8-dynamic", "fp8_dynamic"),
    "fp8 and int8 are weights of 8 bits, and --activations dynamic is inputs of 8",
)
_OTHERS |= dict.fromkeys(
    ("exl2", "exl3"), "ExLlama's files are neither read nor written: gptq and nvfp4 have about 4 bits"
)
_OTHERS["hqq"] = "it is not written: int4, with --moments FILE --method gptq, loses less"
_OTHERS |= dict.fromkeys(("bitsandbytes", "bnb", "qlora"), _OTHERS["nf4"])
_OF_BITS = {4: "nvfp4, mxfp4 and int4", 6: "mxfp6 and gguf:q6_k", 8: "fp8, mxfp8 and int8", 16: "bf16 and fp16"}
_PROGRAMS = {
    "llamacpp": "llama.cpp",
    "ollama": "llama.cpp",
    "lmstudio": "llama.cpp",
    "mlx-lm": "mlx-lm",
    "hf": "transformers",
}


def targets() -> list[dict[str, Any]]:
    """Every target, of JSON types: ``name``, its ``format`` and ``key`` there, ``bits`` a weight of a matrix of 1024 ×
    4096 with its scales, the programs that it ``opens_in``, and what it ``needs``."""
    plain = bridges.bridge("")
    rows = [
        {"name": name, "format": "", "key": name, "bits": 32.0 if name == "fp32" else 16.0, **_told(plain, name)}
        for name in FLOATS
    ]
    own = bridges.bridge(bridges.OWN)
    rows += [
        {
            "name": name,
            "format": bridges.OWN,
            "key": name,
            "bits": _bits(recipe_names.recipe_of(name)),
            **_told(own, name),
        }
        for name in recipe_names.names()
    ]
    for name, bridge in bridges.registry().items():
        if bridge.writes and name != bridges.OWN:
            bits = {key: _bits(recipe) for key, recipe in bridge.recipes.items()}
            bits |= {key: _bits_of_type(kind.name) for key, kind in bridge.kinds.items()}
            rows += [
                {"name": f"{name}:{key}", "format": name, "key": key, "bits": of, **_told(bridge, key)}
                for key, of in bits.items()
            ]
    return rows


def _told(bridge: FileFormat, key: str) -> dict[str, Any]:
    return {"opens_in": bridge.programs(key), "needs": bridge.needs}


def _bits(recipe: ScalingRecipe) -> float:
    return round(8 * ghost(_SHAPE, recipe).nbytes / (_SHAPE[0] * _SHAPE[1]), 3)


def _programs(row: dict[str, Any]) -> set[str]:
    return {one.partition(" with ")[0].lower() for one in row["opens_in"]}


def _bits_of_type(dtype: str) -> float:
    nbytes = nbytes_of(dtype, _SHAPE) if dtype in DTYPES else block_bytes(dtype, _SHAPE)
    return round(8 * nbytes / (_SHAPE[0] * _SHAPE[1]), 3)


def meant(spelled: str) -> str:
    """What a name in lower case that is no target probably means, in words; "" where nobody knows."""
    known = [row["name"] for row in targets()]
    if spelled in known:
        return ""
    if spelled in _FLOAT_NAMES:
        return f"did you mean {_FLOAT_NAMES[spelled]}?"
    if spelled in _OTHERS:
        return _OTHERS[spelled]
    if found := [name for name in known if name.partition(":")[2] == spelled]:
        return f"did you mean {' or '.join(found[:4])}?"
    if re.fullmatch(r"(?:gguf:)?iq\d(?:_\w+)?", spelled):
        return (
            "GGUF's IQ types are read and not written, except iq4_nl: gguf:q2_k to gguf:q6_k, with --imatrix FILE, "
            "have 2.6 to 6.6 bits"
        )
    bits = re.fullmatch(r"(?:w|int|fp|q)?(\d{1,3})[-_ ]?(?:bit|bits|b)?(?:a16)?", spelled)
    if bits and int(bits[1]) in _OF_BITS:
        return f"{_OF_BITS[int(bits[1])]} have about {bits[1]} bits a weight"
    bare = re.sub(r"_[sml]$|^e4m3(fn)?$|^fp8_e4m3(fn)?$", lambda match: "" if match[0][0] == "_" else "fp8", spelled)
    if found := [name for name in known if name == bare or name.partition(":")[2] == bare]:
        return f"did you mean {' or '.join(found[:4])}?"
    program = _PROGRAMS.get(spelled, spelled)
    opened = {row["format"] or "bf16" for row in targets() if program in _programs(row)}
    if opened:
        order = list(dict.fromkeys(row["format"] or "bf16" for row in targets()))
        names = [name for name in order if name in opened and name != bridges.OWN]
        return f"it is a program, which opens {', '.join(names)}"
    return ""
