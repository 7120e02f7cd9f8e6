# SPDX-License-Identifier: Apache-2.0
"""Models as GGUF spells them: tensor names of the architectures known here.

Llama (and Mistral, Mixtral), Qwen2, Qwen3 (with experts, too), gpt-oss, DeepSeek-V2 and V3, Gemma 2 and 3, Phi-3 and
BERT. Other models keep their tensors' names: readers of GGUF read them, but no program knows what to do with them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from breccia.bridges.common import float32
from breccia.bridges.outside import OutsideTensor
from breccia.gguf.parameters import check_fields, hyperparameters, key_heads_of, latent_of, latent_of_fields, why_not
from breccia.gguf.types import STRING, UINT32, Fields
from breccia.layouts import Layout
from breccia.scaled_tensor import ScaledTensor


@dataclass(frozen=True)
class Alternate:
    """Every second index of the second axis: (E, 2N, …) → (E, N, …)."""

    start: int

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this half. Raises ValueError where the whole has no halves."""
        if len(whole) < 2 or whole[1] % 2:
            raise ValueError(f"gates and others in turn must be of an even number along the second axis, got {whole}")
        return (whole[0], whole[1] // 2, *whole[2:])

    def whole_shape(self, half: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole."""
        return (half[0], 2 * half[1], *half[2:])

    def of(self, whole: Any) -> Any:
        """This half of a tensor: codes and scales where they are of rows, values elsewhere."""
        if isinstance(whole, ScaledTensor) and keeps_codes(whole.layout):
            return _each(lambda arrays: np.ascontiguousarray(arrays[0][:, self.start :: 2]), [whole])
        return _values(whole)[:, self.start :: 2]

    def together(self, halves: Sequence[Any]) -> Any:
        """The whole of both halves, gates first."""

        def in_turn(arrays: list[Any]) -> Any:
            return np.stack(arrays, axis=2).reshape(self.whole_shape(arrays[0].shape))

        first, other = halves
        scaled = isinstance(first, ScaledTensor) and isinstance(other, ScaledTensor)
        if scaled and first.recipe == other.recipe and keeps_codes(first.layout):
            return _each(in_turn, [first, other])
        return in_turn([_values(half) for half in halves])


@dataclass(frozen=True)
class Heads:
    """Keys, transposed in each head, or values: (heads * (K + V), R) → (heads, R, K) or (heads, V, R)."""

    heads: int
    keys: int
    values: int
    of_keys: bool

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the keys, or of the values. Raises ValueError where the whole has not as many rows."""
        rows = self.heads * (self.keys + self.values)
        if len(whole) != 2 or whole[0] != rows:
            raise ValueError(f"rows of keys and values must be {rows} = heads * (keys + values), got shape {whole}")
        return (self.heads, whole[1], self.keys) if self.of_keys else (self.heads, self.values, whole[1])

    def whole_shape(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole."""
        return (self.heads * (self.keys + self.values), part[1 if self.of_keys else 2])

    def of(self, whole: Any) -> Any:
        """The keys or the values, as numbers."""
        array = _values(whole)
        by_head = array.reshape(self.heads, self.keys + self.values, array.shape[1])
        return by_head[:, : self.keys].swapaxes(1, 2) if self.of_keys else by_head[:, self.keys :]

    def together(self, parts: Sequence[Any]) -> Any:
        """The whole of keys and values."""
        keys, values = (_values(part) for part in parts)
        if keys.dtype != values.dtype:
            keys, values = float32(keys), float32(values)
        return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, values.shape[2])


@dataclass(frozen=True)
class All:
    """All of a tensor, which has another name."""

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The whole's own shape."""
        return whole

    def whole_shape(self, half: tuple[int, ...]) -> tuple[int, ...]:
        """The same."""
        return half

    def of(self, whole: Any) -> Any:
        """The tensor."""
        return whole

    def together(self, halves: Sequence[Any]) -> Any:
        """The tensor."""
        return halves[0]


Cut = All | Alternate | Heads


def keeps_codes(layout: Layout | None) -> bool:
    """Whether halves of a quantized tensor's rows are quantized as the whole is."""
    return layout is not None and layout.block.rows == 1 and layout.block.columns > 0


def _each(make: Any, tensors: list[ScaledTensor]) -> ScaledTensor:
    """A tensor whose codes and scales are made of those of others."""
    first = tensors[0]
    second = first.global_scale
    if second is not None and any(not np.array_equal(one.global_scale, second) for one in tensors):
        raise ValueError("halves must have the same global scales, they have others")
    data = make([one.data for one in tensors])
    zero = None if first.zero_point is None else make([one.zero_point for one in tensors])
    shape = (*data.shape[:2], *first.shape[2:])
    scale = make([one.scale for one in tensors])
    return ScaledTensor(data, scale, first.recipe, first.layout, zero, global_scale=second, shape=shape)


def _values(tensor: Any) -> Any:
    return tensor.dequantize() if isinstance(tensor, (OutsideTensor, ScaledTensor)) else tensor


# Modules → modules, and tensors that are not called as a module's weight or bias → tensors: by the gguf package
# (names.json, which benchmarks/make_gguf_names.py writes). All experts of a layer are one tensor, which is called as
# MLX does until it has GGUF's name.
_NAMES: dict[str, dict[str, dict[str, str]]] = json.loads(Path(__file__).with_name("names.json").read_bytes())
_TABLES, _BARE = _NAMES["modules"], _NAMES["tensors"]
# Biases of all experts, and BERT's embeddings of positions and kinds of text, are added as they are.
_WIDE = (".ffn_gate_inp.weight", "_exps.bias", "position_embd.weight", "token_types.weight")
_OUTSIDE, _BARE_OUTSIDE = (
    {architecture: {inside: name for name, inside in table.items()} for architecture, table in tables.items()}
    for tables in (_TABLES, _BARE)
)
_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "bert": "bert",
}
# Architectures whose programs multiply by the second scale of every NVFP4 matrix; others leave some out.
_SECOND_SCALES = frozenset({"llama", "qwen3"})
# What a model computes anew, and BERT's pooler, which embedding models do without: programs refuse these.
_LEFT_OUT = re.compile(r".*(rotary_emb\.inv_freq|position_ids)$|(bert\.)?pooler\.dense\.(weight|bias)$")
# Tensors that GGUF keeps as two, and those two.
_IN_TURN = re.compile(r"(?P<at>.*\.experts\.)(?P<part>gate_up_proj|gate_proj|up_proj)(?P<end>|_bias)")
_LATENT = re.compile(r"(?P<at>.*\.self_attn\.)(?P<part>kv_b_proj|k_b_proj|v_b_proj)(?P<end>\.weight)")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_ONE_EXPERT = re.compile(r"(.*)\.experts\.\d+\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@dataclass(frozen=True)
class ModelMap:
    """One model's names, both ways.

    Attributes:
        architecture: as GGUF spells it.
        heads: rows of these projections are in GGUF's order, by head: name's last module → number of heads.
        prefix: of the names outside GGUF, such as "bert.".
        latent: of latent attention: heads, and rows of keys and of values in each; zeros where there is none.
        layers: how many there are where further ones, which predict more tokens, are left out; else 0.
        depth: how many layers there are.
        routed: experts of a layer, 0 where there are none.
        tied: whether the output layer has the embeddings' weight.
    """

    architecture: str
    heads: dict[str, int] = field(default_factory=dict)
    prefix: str = ""
    latent: tuple[int, int, int] = (0, 0, 0)
    layers: int = 0
    depth: int = 0
    routed: int = 0
    tied: bool = True

    @property
    def second_scales(self) -> bool:
        """Whether a program applies the second scales of NVFP4."""
        return self.architecture in _SECOND_SCALES

    def inside(self, name: str) -> str | None:
        """GGUF's name of a tensor, None where it has none."""
        bare = _BARE.get(self.architecture, {}).get(_NUMBER.sub("{}", name))
        if bare is not None:
            return _numbered(bare, name)
        module, _, last = name.removeprefix(self.prefix).rpartition(".")
        known = _TABLES[self.architecture].get(_NUMBER.sub("{}", f"{module}.")[:-1])
        return None if known is None or last not in ("weight", "bias") else f"{_numbered(known, module)}.{last}"

    def outside(self, name: str) -> str:
        """The name that the model's own checkpoints give a tensor; a name GGUF does not know as it is."""
        bare = _BARE_OUTSIDE.get(self.architecture, {}).get(_NUMBER.sub("{}", name))
        if bare is not None:
            return _numbered(bare, name)
        module, _, last = name.rpartition(".")
        known = _OUTSIDE[self.architecture].get(_NUMBER.sub("{}", f"{module}.")[:-1])
        return name if known is None else f"{self.prefix}{_numbered(known, module)}.{last}"

    def left_out(self, name: str) -> bool:
        """Whether a tensor has no place in GGUF."""
        layer = _LAYER.match(name)
        if self.layers and layer is not None and int(layer[1]) >= self.layers:
            return True
        return _LEFT_OUT.match(name) is not None

    @property
    def has_cuts(self) -> bool:
        """Whether GGUF keeps some tensors as two."""
        return self.architecture == "gpt-oss" or any(self.latent)

    def cuts(self, name: str) -> list[tuple[str, Cut]]:
        """The two tensors that GGUF keeps one of the model's as, and what each is of it; none where it is one."""
        match = self._of_two(name)
        if match is None or match["part"] not in ("kv_b_proj", "gate_up_proj"):
            return []
        parts: tuple[tuple[str, Cut], ...] = (("gate_proj", Alternate(0)), ("up_proj", Alternate(1)))
        if any(self.latent):
            parts = (("k_b_proj", Heads(*self.latent, True)), ("v_b_proj", Heads(*self.latent, False)))
        return [(f"{match['at']}{part}{match['end']}", cut) for part, cut in parts]

    def whole(self, name: str) -> str:
        """The model's own name of what a tensor is one of two of, or of itself if GGUF keeps it as two; else ""."""
        match, whole = self._of_two(name), "kv_b_proj" if any(self.latent) else "gate_up_proj"
        return "" if match is None else f"{match['at']}{whole}{match['end']}"

    def _of_two(self, name: str) -> re.Match[str] | None:
        return (_LATENT if any(self.latent) else _IN_TURN).fullmatch(name) if self.has_cuts else None

    @property
    def experts(self) -> bool:
        """Whether all experts of a layer are one tensor."""
        return any("_exps" in inside for inside in _TABLES[self.architecture].values())

    def offset(self, name: str) -> float:
        """What GGUF's tensor has more than the model's: norms of Gemma multiply by their weight and one."""
        return 1.0 if self.architecture.startswith("gemma") and name.endswith("norm.weight") else 0.0

    def has_place(self, name: str) -> bool:
        """Whether GGUF has a tensor, as it is, as one of all experts' or as two, or does without it."""
        return self.inside(_of_all(name)) is not None or self.left_out(name) or bool(self.cuts(name))

    def apart(self, name: str) -> bool:
        """Whether a tensor is one expert's, which has no name of its own here."""
        return self.experts and _ONE_EXPERT.fullmatch(name) is not None

    def wide(self, name: str) -> bool:
        """Whether programs want a matrix in float32: what chooses among experts, and what they add to others."""
        return (self.inside(name) or "").endswith(_WIDE)

    def row_order(self, name: str, rows: int) -> np.ndarray[Any, Any] | None:
        """Which row of the model's own tensor each row of GGUF's is; None where they are the same.

        Llama's rotary embedding takes neighbours in GGUF and halves of a head in its own checkpoints.
        """
        heads = self.heads.get(name.split(".")[-2] if "." in name else "")
        if not (heads and rows) or rows % (2 * heads):
            return None
        return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def _of_all(name: str) -> str:
    """One expert's matrix by the name of that of all experts of its layer; others as they are."""
    match = _ONE_EXPERT.fullmatch(name)
    return name if match is None else f"{match[1]}.switch_mlp.{_PROJECTIONS.get(match[2], match[2])}.weight"


def _numbered(pattern: str, module: str) -> str:
    number = _NUMBER.search(f"{module}.")
    return pattern if number is None else pattern.replace("{}", number[0])


def _heads(architecture: str, heads: int, key_heads: int) -> dict[str, int]:
    return {"q_proj": heads, "k_proj": key_heads} if architecture == "llama" else {}


def model_of(fields: Fields, names: Collection[str]) -> ModelMap | None:
    """The names of a GGUF file's model, from its metadata and the names of its tensors; None where it is not known
    here."""
    architecture = fields.get("general.architecture", (STRING, ""))[1]
    if architecture not in _TABLES:
        return None
    heads = fields.get(f"{architecture}.attention.head_count", (UINT32, 0))[1]
    key_heads = fields.get(f"{architecture}.attention.head_count_kv", (UINT32, heads))[1]
    if not isinstance(heads, int) or not isinstance(key_heads, int) or min(heads, key_heads) < 0:
        return None
    layers = fields.get(f"{architecture}.block_count", (UINT32, 0))[1] if architecture == "deepseek2" else 0
    latent = latent_of_fields(fields) if architecture == "deepseek2" else (0, 0, 0)
    known = ModelMap(architecture, _heads(architecture, heads, key_heads), latent=latent, layers=layers)
    return _sized(known, fields, "output.weight" not in names)


def _sized(known: ModelMap, fields: Fields, tied: bool) -> ModelMap:
    """With what mixes of types ask, from a file's metadata."""
    depth, routed = (
        fields.get(f"{known.architecture}.{key}", (UINT32, 0))[1] for key in ("block_count", "expert_count")
    )
    return replace(known, depth=depth, routed=routed, tied=tied)


def model_map(config: Mapping[str, Any], names: Iterable[str]) -> tuple[ModelMap | None, str]:
    """The names of a model, from its config.json and the names of all its tensors; None and the reason
    where it is not known here."""
    kind = str(config.get("model_type", ""))
    if kind not in _ARCHITECTURES:
        return None, f"model_type {kind!r} has no GGUF names here, which are {', '.join(_ARCHITECTURES)}'s"
    architecture = _ARCHITECTURES[kind]
    try:
        if why := why_not(architecture, config):
            return None, why
        heads = int(config["num_attention_heads"])
        prefix = "bert." if any(name.startswith("bert.") for name in names) else ""
        known = ModelMap(architecture, _heads(architecture, heads, int(key_heads_of(config))), prefix)
        if architecture == "deepseek2":
            known = replace(known, latent=latent_of(config), layers=int(config["num_hidden_layers"]))
        fields = hyperparameters(config, known.architecture)
        check_fields(fields)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        return None, f"config.json lacks what GGUF must say: {error}"
    strange = next((n for n in names if not known.has_place(n)), None)
    if strange is not None:
        return None, f"tensor {strange!r} has no GGUF name in architecture {architecture!r}"
    return _sized(known, fields, all(known.inside(name) != "output.weight" for name in names)), ""
