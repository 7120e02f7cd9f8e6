# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters in GGUF files, as llama.cpp's convert_lora_to_gguf.py writes and its llama-adapter.cpp reads them.

``general.type`` is "adapter", ``adapter.type`` "lora". A tensor NAME of the model is changed by two matrices,
NAME.lora_a of (r, IN) and NAME.lora_b of (OUT, r), the rows of the latter in the order of GGUF's NAME; of embeddings
lora_a is (tokens, r). What is added is alpha / r · B A, where ``adapter.lora.alpha`` is missing or zero B A.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from breccia.bridges.gguf import dequantize_gguf
from breccia.checkpoint.files.dtypes import typed
from breccia.checkpoint.lora.adapters import Adapter, Change
from breccia.checkpoint.reading.source import Checkpoint
from breccia.gguf.container import GgufFile
from breccia.gguf.files import model_names
from breccia.gguf.models import ModelMap

__all__ = ["read_adapter"]

_SIDES = (".lora_a", ".lora_b")
_TOKENS = "adapter.alora.invocation_tokens"


def read_adapter(path: Path, base: Checkpoint) -> Adapter:
    """An adapter of llama.cpp by the names of the model's own checkpoints; names in the GGUF file are those that GGUF
    gives the base's model. Raises ValueError where it is not LoRA, or a kind of it that is not a product of two
    matrices for each weight, or it is of another model."""
    file = GgufFile(path)
    try:
        return _read(path, file, base)
    except BaseException:
        file.close()
        raise


def _read(path: Path, file: GgufFile, base: Checkpoint) -> Adapter:
    fields = {key: value for key, (_, value) in file.fields.items()}
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if fields.get(key) != wanted:
            raise ValueError(f"adapter's {key} must be {wanted!r}, {path} has {str(fields.get(key))[:80]!r}")
    if _TOKENS in fields:
        raise ValueError(f"adapter must not have {_TOKENS}: it acts after these alone, which is not merged here")
    alpha = fields.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, float) or not np.isfinite(alpha):
        raise ValueError(f"adapter.lora.alpha must be a finite float32, got {str(alpha)[:80]}")
    names, reason = model_names(base)
    if names is None:
        raise ValueError(f"adapter must be PEFT's folder, whose names are the base's own, not a GGUF file: {reason}")
    if fields.get("general.architecture") != names.architecture:
        said = str(fields.get("general.architecture"))[:80]
        raise ValueError(f"adapter's general.architecture must be the base's, {names.architecture!r}, got {said!r}")
    made = Adapter(path, {"alpha": alpha}, file, {})
    for inside in _changed(file):
        name = names.outside(inside)
        made.changes[name] = _change(file, inside, name, names, alpha)
    return made


def _changed(file: GgufFile) -> list[str]:
    """Names of the tensors that pairs change, in order."""
    for name in file.entries:
        if not name.endswith(_SIDES):
            raise ValueError(f"adapter's tensor {name!r} must end in .lora_a or .lora_b: others are not merged here")
    pairs = dict.fromkeys(name[: -len(_SIDES[0])] for name in file.entries)
    for name in pairs:
        for side in _SIDES:
            if name + side not in file.entries:
                raise ValueError(f"adapter must have .lora_a and .lora_b of {name!r}, it has no {side}")
    if not pairs:
        raise ValueError("adapter must change a tensor, it has none")
    return list(pairs)


def _change(file: GgufFile, inside: str, name: str, names: ModelMap, alpha: float) -> Change:
    a, b = (_values(file, inside + side) for side in _SIDES)
    embedding = inside.endswith("token_embd.weight")
    a = a.T if embedding and a.ndim == 2 else a
    if a.ndim != 2 or b.ndim != 2 or not 0 < a.shape[0] == b.shape[1]:
        wanted = "(tokens, r) and (OUT, r)" if embedding else "(r, IN) and (OUT, r)"
        shapes = ", ".join(str(file.shapes[inside + side]) for side in _SIDES)
        raise ValueError(f"adapter's matrices of {inside!r} must be {wanted}, got {shapes}")
    order = names.row_order(name, b.shape[0])
    if order is not None:
        stored, b = b, np.empty_like(b)
        b[order] = stored
    return Change(a, b, alpha / a.shape[0] if alpha else 1.0, turned=embedding)


def _values(file: GgufFile, name: str) -> Any:
    """A tensor in memory of its own, float32 where its type has blocks."""
    entry, kind = file.entries[name], file.kinds[name]
    raw = file.span(name, 0, entry.stop - entry.start, mapped=False)
    if kind in ("F32", "F16", "BF16"):
        return typed(raw, entry.dtype, entry.shape)
    if entry.dtype != "U8" or len(entry.shape) != 2:
        raise ValueError(f"adapter's tensor {name!r} must be a matrix of floats or of blocks, got {kind} {entry.shape}")
    return dequantize_gguf(raw.reshape(entry.shape), kind)
