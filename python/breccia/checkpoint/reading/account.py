# SPDX-License-Identifier: Apache-2.0
"""What becomes of everything that a source has: each stored tensor, and each key of what says how it is quantized."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from breccia.bridges.extra_state import ENDING
from breccia.bridges.fp8 import FP8_DTYPES
from breccia.bridges.parts import STORED, Found
from breccia.checkpoint.files.safetensors_header import Entry
from breccia.schemes.dialects import dialect_of

if TYPE_CHECKING:
    from breccia.checkpoint.planning.choices import Choice
    from breccia.checkpoint.reading.source import Checkpoint

# Last parts of the names of tensors that say how a quantized layer's inputs or outputs are quantized.
OF_LAYERS = re.compile(
    r"(.+)(?:\.|(?<=experts\.down_proj)_|(?<=experts\.gate_up_proj)_)"
    r"((input|output)_(scale|scale_2|global_scale|zero_point)|activation_scale|scale_input"
    r"|_weight_act_(per_tensor_scale|quant_(scale|zero_point)))"
)
# The names that vLLM reads, and those that ModelOpt, compressed-tensors and Quark write.
OF_CACHE = re.compile(
    r".+\.([kvq]_(scale|zero_point)|([kv])_proj\.\3_bias|kv_scale|[kv]_cache\.scale|prob_(output_)?scale)"
    r"|.+\.[kvq]_proj\.output_scale"
)
_CODES = ("U8", "I8", "I16", "I32", "U32", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4")
# Last parts of the names under which quantized weights and what belongs to them are stored.
_WEIGHT = re.compile(r".*\b_?(weight|qweight|qzeros|weight_packed|W_q|qdata|\w+_blocks|\w+_packed|SCB|absmax)")
_TABLE = re.compile(r".*(\bbias|masked_bias|mask|position_ids|_index|_ids|_table)")
# What every format may have beside a quantized weight, by the name behind the module's.
_KNOWN = frozenset({"bias", "pre_quant_scale", ENDING.removeprefix(".")})
_PARTS = re.compile(
    r"(.+)\.((weight_(scale|zero|offset|global_scale)|qzeros|scale_weight|smooth_(scale|factor))\w*"
    r"|(weight_quantizer\.)?svdquant_lora_[ab])"
)
# A tensor that is no part of a quantized weight and named like one.
STRAYS = re.compile(f"{_PARTS.pattern}|{OF_LAYERS.pattern}")
STRAY = "it says something of a quantized weight, and its weight is not quantized: nobody reads it here"


@dataclass(frozen=True)
class Account:
    """What becomes of all that a source has.

    Attributes:
        tensors: stored name → the action of the conversion that reads it, "copy" where it is carried over as it is, or
            "left out".
        keys: of what says how the source is quantized → "read", "carried" where the same stands in the output, or
            "unread".
    """

    tensors: Mapping[str, str]
    keys: Mapping[str, str]

    def __str__(self) -> str:
        tensors, keys = Counter(self.tensors.values()), Counter(self.keys.values())
        out, carried, every = tensors["left out"], tensors["copy"], len(self.tensors)
        text = f"accounted: {every:,} tensors ({every - out - carried:,} read, {carried:,} carried"
        text += f", {out:,} left out)" if out else ")"
        if keys:
            text += f", {len(self.keys):,} keys of the scheme ({keys['read']:,} read, {keys['carried']:,} carried"
            text += f", {keys['unread']:,} named)" if keys["unread"] else ")"
        return text


def fates(choices: Iterable[Choice], entries: Mapping[str, Entry]) -> dict[str, str]:
    """What becomes of each stored tensor."""
    fate = dict.fromkeys(entries, "left out")
    for choice in choices:
        found, action = choice.found, choice.action
        for name in found.parts.values() if found.origin is STORED else _stored(found):
            if action != "make" and fate.get(name) in ("left out", "copy"):
                fate[name] = action
    return fate


def _stored(found: Found) -> Iterable[str]:
    """The stored tensors that a logical one is made of."""
    origin = found.origin
    beside = [name for name in (origin.factor, *origin.low_rank) if name]
    return [*found.parts.values(), *beside, *(name for one in origin.sources for name in _stored(one))]


def keys_of(said: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, str]:
    """What becomes of each key of ``quantization_config``, those of objects with dots between them; ``written`` is what
    the output says where it is in the same words."""
    dialect = dialect_of(said)
    if dialect is None:
        return dict.fromkeys(map(str, said), "unread")
    kept = {path: value for path, value, _ in dialect.keys(written)} if written else {}
    return {
        path: "read" if known else "carried" if path in kept and kept[path] == value else "unread"
        for path, value, known in dialect.keys(said)
    }


def beside_weights(found: Iterable[Found], entries: Mapping[str, Entry], taken: set[str], marks: Any) -> dict[str, str]:
    """What is wrong with stored tensors that belong to a quantized weight and are read by nobody, by name; ``marks``
    matches names that only say whose file it is."""
    modules = {one.name.removesuffix(".weight") for one in found}
    fused = {name for name in modules if f"{name}.weight" not in entries}
    troubles: dict[str, str] = {}
    left = entries.keys() - taken
    for name in left if modules else ():
        module, _, role = name.rpartition(".")
        known = (module in modules and role in _KNOWN) or OF_LAYERS.fullmatch(name) or OF_CACHE.fullmatch(name)
        if not known and not (marks and marks.fullmatch(name)) and _inside(name, module, modules, fused):
            troubles[name] = "it stands beside a quantized weight, and nothing that is read here says what it means"
    codes = [name for name in left if entries[name].dtype in FP8_DTYPES and len(entries[name].shape) > 1]
    scales = scales_beside(entries) if codes else {}
    for name in codes:
        own = scales.get(name) or scales.get(name.rpartition(".")[0])
        if "scal" in name.rpartition(".")[2]:
            troubles.setdefault(name, "it is a scale of no weight that is read here")
        elif own:
            troubles.setdefault(name, f"nothing that is read here says what its scale, {own!r}, means")
    return {name: f"looks quantized but does not fit: {text}" for name, text in troubles.items()}


def check_all_is_read(checkpoint: Checkpoint, found: Iterable[Found]) -> None:
    """Refuse a checkpoint whose quantized tensors, of those found in it, are not all understood. Raises ValueError
    where one is not; the message names it, what it looks like, and the method config.json names."""
    method = checkpoint.quantization.get("quant_method")
    unread = [one for one in found if (one.findings or one.dtype in _CODES) and is_unread(one, bool(method))]
    if not unread:
        return
    first = next((one for one in unread if _in_trouble(one)), unread[0])
    why = "; ".join(first.findings) or f"{first.dtype} codes whose meaning nothing says"
    said = f", quant_method {method!r} in config.json" if method else ""
    raise ValueError(
        f"{checkpoint.path}: all quantized tensors must be in a format that is read here, {len(unread)} are not{said}: "
        f"{first.name!r} {list(first.shape)}: {why}"
    )


def is_unread(found: Found, quantized: bool) -> bool:
    """Whether a tensor is one of codes whose meaning nobody here knows; ``quantized``: config.json names a method."""
    if found.findings and _in_trouble(found):
        return True
    if found.format != "plain" or found.dtype not in _CODES or found.origin.numbers:
        return False
    if _WEIGHT.fullmatch(found.name):
        return len(found.shape) > 0
    return quantized and len(found.shape) > 1 and not _TABLE.fullmatch(found.name)


def unread_modules(checkpoint: Checkpoint) -> Iterable[str]:
    """The modules of such tensors."""
    method = bool(checkpoint.quantization.get("quant_method"))
    return dict.fromkeys(one.name.rpartition(".")[0] for one in checkpoint.found if is_unread(one, method))


def _in_trouble(found: Found) -> bool:
    return any(text.startswith("looks quantized") for text in found.findings)


def scales_beside(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Tensors that are called scales, by the names of what they may be of: a module, or a tensor."""
    found: dict[str, str] = {}
    for name in entries:
        if "scal" in name and not name.endswith(".weight"):
            found |= {name.rpartition(".")[0]: name, name.partition("scal")[0].rstrip("._"): name}
    return found


def _inside(name: str, module: str, modules: set[str], fused: set[str]) -> bool:
    """Whether a tensor is of a quantized module, of what is inside of one, or named after experts in one tensor whose
    bias it is not."""
    while module:
        if module in modules:
            return True
        module = module.rpartition(".")[0]
    start = "" if name.removesuffix("_bias") in fused else name
    while fused and "_" in start and start not in fused:
        start = start.rpartition("_")[0]
    return start in fused
