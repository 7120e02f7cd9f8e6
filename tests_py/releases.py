# SPDX-License-Identifier: Apache-2.0
"""Quantized releases in small: names, shapes in proportion, dtypes, extra files and quantization_config of each one's
published checkpoint, with invented values."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia import bridges
from breccia.bridges.contract import Place
from breccia.bridges.parts import materialize
from breccia.recipes import ScalingRecipe
from checkpoints import write_shards

ml_dtypes = pytest.importorskip("ml_dtypes")

HIDDEN, INNER, EXPERTS, WORDS = 256, 128, 2, 64
TILES = breccia.Float8BlockScaling(block_m=128)
TILES_BF16 = breccia.Float8BlockScaling(block_m=128, scale_format="bf16")  # Qwen's scales
TILES_E8M0 = breccia.Float8BlockScaling(block_m=128, scale_format="e8m0")
MXFP4 = breccia.MXFP4BlockScaling()
INT4 = breccia.INT4Scaling(group_size=32, scale_dtype="bf16")
FP8 = breccia.Float8CurrentScaling(granularity="tensor")
FP8_ROWS = breccia.Float8CurrentScaling(granularity="row", scale_rule="torchao")
DTYPES = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "I64": np.int64}
FINE = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
Shape = tuple[int, ...]


@dataclass
class Release:
    """A release.

    Attributes:
        format: that its codes are in.
        back: the target, and options, that give the same format.
        config: config.json.
        quantized: shapes and recipes of weights that are codes, by their modules.
        rest: dtypes and shapes of all others.
        files: what else lies beside the weights.
        heads: how the names begin of heads for later tokens.
        exact: whether bfloat16 holds every value of the codes.
        static: whether layers have a scale of their inputs.
    """

    format: str
    back: tuple[str, dict[str, Any]]
    config: dict[str, Any]
    quantized: dict[str, tuple[Shape, ScalingRecipe]] = field(default_factory=dict)
    rest: dict[str, tuple[str, Shape]] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)
    heads: tuple[str, ...] = ()
    exact: bool = False
    static: bool = False

    def codes(self, at: str, recipe: ScalingRecipe, **shapes: Shape) -> None:
        self.quantized |= {f"{at}{name.replace('__', '.')}": (shape, recipe) for name, shape in shapes.items()}

    def floats(self, at: str, dtype: str = "BF16", **shapes: Shape) -> None:
        """With ``.weight`` behind the names of matrices and of norms."""
        for name, shape in shapes.items():
            own = "norm" in name or len(shape) > 1
            self.rest[f"{at}{name.replace('__', '.')}{'.weight' if own else ''}"] = dtype, shape

    def floats_as_named(self, at: str, dtype: str = "BF16", **shapes: Shape) -> None:
        self.rest |= {f"{at}{name.replace('__', '.')}": (dtype, shape) for name, shape in shapes.items()}

    def ends(self, at: str = "model.", head: str = "lm_head") -> None:
        self.floats("", **{f"{at}embed_tokens": (WORDS, HIDDEN), f"{at}norm": (HIDDEN,), head: (WORDS, HIDDEN)})

    def experts(self, at: str, recipe: ScalingRecipe, names: tuple[str, str, str] = ("gate", "down", "up")) -> None:
        """Experts apart: gates, outputs, and what is gated."""
        ends = "" if names[0] == "w1" else "_proj"
        for expert in range(EXPERTS):
            gate, down, up = (f"{name}{ends}" for name in names)
            wide = (INNER, HIDDEN)
            self.codes(f"{at}{expert}.", recipe, **{gate: wide, down: (HIDDEN, INNER), up: wide})

    def array(self, name: str) -> Any:
        """The values of a tensor that is no codes; in float32 not those of bfloat16."""
        dtype, shape = self.rest[name]
        rng = np.random.default_rng(len(name))
        if dtype == "I64":
            return rng.integers(0, EXPERTS, shape)
        middle = 1.0 if "norm" in name else 0.0
        return np.asarray(middle + rng.normal(0, 0.02, shape), np.float32).astype(DTYPES[dtype])

    def stored(self, module: str) -> dict[str, Any]:
        """The tensors that a quantized weight is stored as."""
        shape, recipe = self.quantized[module]
        bridge = bridges.bridge(self.format)
        values = np.random.default_rng(len(module)).standard_normal(shape, np.float32) * np.float32(0.02)
        values = values.astype(ml_dtypes.bfloat16).astype(np.float32)  # as they were trained
        scaled = breccia.cast(values, recipe)
        if self.format == "compressed-tensors" and recipe == FP8_ROWS:  # its makers' scales are bfloat16
            scale = np.asarray(scaled.scale).astype(ml_dtypes.bfloat16).astype(np.float32)
            codes = np.clip(values / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            scaled = dataclasses.replace(scaled, data=codes, scale=scale)
        name = module if len(shape) == 3 else f"{module}.weight"
        parts, _ = bridge.stored(name, scaled, Place(self.static, self.config))
        inputs = f"{name}_input_scale" if len(shape) == 3 else f"{module}.input_scale"
        return materialize(parts) | ({inputs: np.float32(len(module) / 7e3)} if self.static else {})


def write(release: Release, path: Path) -> Path:
    """A folder of two shards; heads for later tokens lie in the second."""
    shards: list[dict[str, Any]] = [{}, {}]
    for module in release.quantized:
        shards[module.startswith(release.heads) if release.heads else 0] |= release.stored(module)
    for name in release.rest:
        shards[name.startswith(release.heads) if release.heads else 0][name] = release.array(name)
    write_shards(path, [one for one in shards if one], release.config)
    for name, said in {"generation_config.json": {"do_sample": True}, **release.files}.items():
        (path / name).write_text(said if isinstance(said, str) else json.dumps(said))
    return path


def _config(kind: str, architecture: str, said: dict[str, Any], **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": 1, "vocab_size": WORDS, "num_attention_heads": 4}
    return {"architectures": [architecture], "model_type": kind, "torch_dtype": "bfloat16", **sizes, **more} | (
        {"quantization_config": said} if said else {}
    )


def _latent(one: Release, at: str, recipe: ScalingRecipe | None) -> None:
    """DeepSeek's attention, whose rows are no multiple of a tile."""
    shapes = {"q_a_proj": (96, HIDDEN), "q_b_proj": (192, 96), "kv_a_proj_with_mqa": (160, HIDDEN)}
    shapes |= {"kv_b_proj": (256, 128), "o_proj": (HIDDEN, 128)}
    if recipe is None:
        one.floats(f"{at}self_attn.", **shapes)
    else:
        one.codes(f"{at}self_attn.", recipe, **shapes)
    one.floats(at, self_attn__q_a_layernorm=(96,), self_attn__kv_a_layernorm=(128,))
    one.floats(at, input_layernorm=(HIDDEN,), post_attention_layernorm=(HIDDEN,))


def _heads(one: Release, at: str, recipe: ScalingRecipe, bias: str = "") -> None:
    """Attention with query, key and value."""
    shapes = {"q_proj": (HIDDEN, HIDDEN), "k_proj": (128, HIDDEN), "v_proj": (128, HIDDEN), "o_proj": (HIDDEN, HIDDEN)}
    one.codes(f"{at}self_attn.", recipe, **shapes)
    if bias:
        biases = {f"{name}__bias": shape[:1] for name, shape in shapes.items() if name[0] in bias}
        one.floats_as_named(f"{at}self_attn.", **biases)
    one.floats(at, input_layernorm=(HIDDEN,), post_attention_layernorm=(HIDDEN,))


def _next_layer(one: Release, at: str) -> None:
    """What DeepSeek has beside a layer past the last, and who copied it."""
    one.floats(at, enorm=(HIDDEN,), hnorm=(HIDDEN,), eh_proj=(HIDDEN, 2 * HIDDEN), shared_head__norm=(HIDDEN,))
    one.floats(at, embed_tokens=(WORDS, HIDDEN), shared_head__head=(WORDS, HIDDEN))


def deepseek_v3() -> Release:
    config = _config("deepseek_v3", "DeepseekV3ForCausalLM", FINE, num_nextn_predict_layers=1, n_routed_experts=EXPERTS)
    one = Release("deepseek", ("deepseek:block", {}), config, heads=("model.layers.1.",))
    one.ends()
    for layer in range(2):
        at = f"model.layers.{layer}."
        _latent(one, at, TILES)
        one.experts(f"{at}mlp.experts.", TILES)
        wide = (INNER, HIDDEN)
        one.codes(f"{at}mlp.shared_experts.", TILES, gate_proj=wide, up_proj=wide, down_proj=(HIDDEN, INNER))
        one.floats(f"{at}mlp.", gate=(EXPERTS, HIDDEN))
        one.floats_as_named(f"{at}mlp.", "F32", gate__e_score_correction_bias=(EXPERTS,))
    _next_layer(one, "model.layers.1.")
    return one


def deepseek_v4() -> Release:
    said = {**FINE, "scale_fmt": "ue8m0"}
    config = _config("deepseek_v4", "DeepseekV4ForCausalLM", said, num_nextn_predict_layers=1, expert_dtype="fp4")
    back = ("deepseek:block-ue8m0", {"rules": ["*.experts.*=mxfp4"], "include": ["*"]})
    one = Release("deepseek", back, config, heads=("mtp.",), exact=True)
    one.floats("", embed=(WORDS, HIDDEN), norm=(HIDDEN,), head=(WORDS, HIDDEN))
    one.floats_as_named("", "F32", hc_head_fn=(4, 4 * HIDDEN), hc_head_base=(4,), hc_head_scale=(1,))
    for at in ("layers.0.", "mtp.0."):
        one.codes(f"{at}attn.", TILES_E8M0, wq_a=(128, HIDDEN), wq_b=(512, 128), wkv=(128, HIDDEN))
        one.codes(f"{at}attn.", TILES_E8M0, wo_a=(256, HIDDEN), wo_b=(HIDDEN, 256))
        one.floats(f"{at}attn.", q_norm=(128,), kv_norm=(128,))
        one.floats_as_named(at, "F32", attn__attn_sink=(4,), ffn__gate__bias=(EXPERTS,))
        one.floats(at, attn_norm=(HIDDEN,), ffn_norm=(HIDDEN,), ffn__gate=(EXPERTS, HIDDEN))
        one.experts(f"{at}ffn.experts.", MXFP4, ("w1", "w2", "w3"))
        wide = (INNER, HIDDEN)
        one.codes(f"{at}ffn.shared_experts.", TILES_E8M0, w1=wide, w2=(HIDDEN, INNER), w3=wide)
        for part in ("attn", "ffn"):
            shapes = {f"hc_{part}_fn": (24, 4 * HIDDEN), f"hc_{part}_base": (24,), f"hc_{part}_scale": (3,)}
            one.floats_as_named(at, "F32", **shapes)
    one.codes("layers.0.attn.indexer.", TILES_E8M0, wq_b=(256, 128))
    one.floats("layers.0.attn.", indexer__weights_proj=(4, HIDDEN), compressor__wkv=(128, HIDDEN))
    one.floats("layers.0.attn.compressor.", wgate=(128, HIDDEN), norm=(64,))
    one.floats_as_named("layers.0.attn.compressor.", "F32", ape=(4, 128))
    one.floats_as_named("layers.0.ffn.gate.", "I64", tid2eid=(WORDS, EXPERTS))
    one.codes("mtp.0.", TILES_E8M0, e_proj=(HIDDEN, HIDDEN), h_proj=(HIDDEN, HIDDEN))
    one.floats("mtp.0.", enorm=(HIDDEN,), hnorm=(HIDDEN,), norm=(HIDDEN,))
    one.floats_as_named("mtp.0.", "F32", hc_head_fn=(4, 4 * HIDDEN), hc_head_base=(4,), hc_head_scale=(1,))
    return one


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None, ignore: list[str]) -> dict[str, Any]:
    group = {"input_activations": inputs, "output_activations": None, "targets": ["Linear"], "weights": weights}
    said = {"config_groups": {"group_0": group}, "format": form, "ignore": ignore, "kv_cache_scheme": None}
    return {**said, "quant_method": "compressed-tensors", "quantization_status": "compressed"}


_NUMBERS = {"actorder": None, "block_structure": None, "dynamic": False, "observer": "minmax", "observer_kwargs": {}}


def kimi_k2() -> Release:
    weights = {**_NUMBERS, "group_size": 32, "num_bits": 4, "strategy": "group", "symmetric": True, "type": "int"}
    left = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]
    said = _compressed("pack-quantized", weights, None, left)
    config = _config("kimi_k2", "DeepseekV3ForCausalLM", said, num_nextn_predict_layers=0, n_routed_experts=EXPERTS)
    back = ("compressed-tensors:int4", {"include": ["*.experts.*"], "group_size": 32})
    files = {"tiktoken.model": "AA== 0\n", "tokenization_kimi.py": "", "configuration_deepseek.py": ""}
    one = Release("compressed-tensors", back, config, files=files)
    one.ends()
    at = "model.layers.0."
    _latent(one, at, None)
    one.experts(f"{at}mlp.experts.", INT4)
    wide = (INNER, HIDDEN)
    one.floats(f"{at}mlp.shared_experts.", gate_proj=wide, up_proj=wide, down_proj=(HIDDEN, INNER))
    one.floats(f"{at}mlp.", gate=(EXPERTS, HIDDEN))
    one.floats_as_named(f"{at}mlp.", "F32", gate__e_score_correction_bias=(EXPERTS,))
    return one


def glm() -> Release:
    weights = {**_NUMBERS, "group_size": None, "num_bits": 8, "strategy": "channel", "symmetric": True, "type": "float"}
    inputs = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True, "type": "float"}
    left = ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "model.layers.1.eh_proj"]
    said = _compressed("float-quantized", weights, inputs, [*left, "model.layers.1.shared_head.head"])
    config = _config("glm4_moe", "Glm4MoeForCausalLM", said, num_nextn_predict_layers=1, n_routed_experts=EXPERTS)
    one = Release("compressed-tensors", ("compressed-tensors:fp8", {}), config, heads=("model.layers.1.",))
    one.files = {"chat_template.jinja": "{{ messages }}"}
    one.ends()
    for layer in range(2):
        at = f"model.layers.{layer}."
        _heads(one, at, FP8_ROWS, bias="qkv")
        one.experts(f"{at}mlp.experts.", FP8_ROWS)
        one.floats(f"{at}mlp.", gate=(EXPERTS, HIDDEN))
        one.floats_as_named(f"{at}mlp.", "F32", gate__e_score_correction_bias=(EXPERTS,))
    _next_layer(one, "model.layers.1.")
    return one


def minimax() -> Release:
    said = {**FINE, "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]}
    config = _config("minimax_m2", "MiniMaxM2ForCausalLM", said, num_local_experts=EXPERTS, use_mtp=True)
    one = Release("deepseek", ("deepseek:block", {}), config)
    one.ends()
    at = "model.layers.0."
    _heads(one, at, TILES)
    one.floats(f"{at}self_attn.", q_norm=(HIDDEN,), k_norm=(128,))
    one.experts(f"{at}block_sparse_moe.experts.", TILES, ("w1", "w2", "w3"))
    one.floats(f"{at}block_sparse_moe.", "F32", gate=(EXPERTS, HIDDEN))
    one.floats_as_named(f"{at}block_sparse_moe.", "F32", e_score_correction_bias=(EXPERTS,))
    return one


def gpt_oss() -> Release:
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    said = {"quant_method": "mxfp4", "modules_to_not_convert": left}
    config = _config("gpt_oss", "GptOssForCausalLM", said, num_local_experts=EXPERTS)
    one = Release("gpt-oss", ("gpt-oss:mxfp4", {"include": ["*.experts.*"]}), config, exact=True)
    one.files = {"chat_template.jinja": "{{ messages }}"}
    one.ends()
    at = "model.layers.0."
    shapes = {"q_proj": (HIDDEN, HIDDEN), "k_proj": (128, HIDDEN), "v_proj": (128, HIDDEN), "o_proj": (HIDDEN, HIDDEN)}
    one.floats(f"{at}self_attn.", **shapes)
    one.floats_as_named(f"{at}self_attn.", **{f"{name}__bias": shape[:1] for name, shape in shapes.items()}, sinks=(4,))
    one.floats(at, input_layernorm=(HIDDEN,), post_attention_layernorm=(HIDDEN,), mlp__router=(EXPERTS, HIDDEN))
    one.codes(f"{at}mlp.experts.", MXFP4, gate_up_proj=(EXPERTS, 2 * INNER, HIDDEN), down_proj=(EXPERTS, HIDDEN, INNER))
    biases = {"gate_up_proj_bias": (EXPERTS, 2 * INNER), "down_proj_bias": (EXPERTS, HIDDEN)}
    one.floats_as_named(f"{at}mlp.", router__bias=(EXPERTS,), **{f"experts__{name}": s for name, s in biases.items()})
    return one


def qwen3_next() -> Release:
    left = ["lm_head", "model.embed_tokens", "mtp.fc", "mtp.layers.0.mlp.gate", "mtp.layers.0.mlp.shared_expert_gate"]
    more = ("mlp.gate", "mlp.shared_expert_gate", "linear_attn.conv1d", "linear_attn.in_proj_ba")
    left += [f"model.layers.0.{name}" for name in more]
    said = {**FINE, "modules_to_not_convert": left}
    config = _config("qwen3_next", "Qwen3NextForCausalLM", said, num_experts=EXPERTS)
    one = Release("deepseek", ("deepseek:block", {}), config, heads=("mtp.",))
    one.ends()
    one.codes("model.layers.0.linear_attn.", TILES_BF16, in_proj_qkvz=(512, HIDDEN), out_proj=(HIDDEN, 128))
    one.floats("model.layers.0.linear_attn.", in_proj_ba=(32, HIDDEN), conv1d=(256, 1, 4), norm=(64,))
    one.floats_as_named("model.layers.0.linear_attn.", A_log=(16,), dt_bias=(16,))
    _heads(one, "mtp.layers.0.", TILES_BF16)
    one.floats("mtp.layers.0.self_attn.", q_norm=(64,), k_norm=(64,))
    one.floats("model.layers.0.", input_layernorm=(HIDDEN,), post_attention_layernorm=(HIDDEN,))
    for at in ("model.layers.0.mlp.", "mtp.layers.0.mlp."):
        one.experts(f"{at}experts.", TILES_BF16)
        wide = (INNER, HIDDEN)
        one.codes(f"{at}shared_expert.", TILES_BF16, gate_proj=wide, up_proj=wide, down_proj=(HIDDEN, INNER))
        one.floats(at, gate=(EXPERTS, HIDDEN), shared_expert_gate=(1, HIDDEN))
    one.floats("mtp.", fc=(HIDDEN, 2 * HIDDEN), norm=(HIDDEN,))
    one.floats("mtp.", pre_fc_norm_embedding=(HIDDEN,), pre_fc_norm_hidden=(HIDDEN,))
    return one


def llama4() -> Release:
    left = ["*router*", "*vision_model*", "*multi_modal_projector*", "*self_attn*", "*lm_head"]
    said = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": left}
    text = {"model_type": "llama4_text", "hidden_size": HIDDEN, "num_hidden_layers": 1, "intermediate_size": INNER}
    config = _config("llama4", "Llama4ForConditionalGeneration", said, text_config=text, vision_config={"depth": 1})
    back = ("modelopt:fp8-tensor", {"include": ["*.experts.*", "*.shared_expert.*"]})
    one = Release("modelopt", back, config, static=True)
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": left}
    one.files = {"hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": quantization}}
    one.files["preprocessor_config.json"] = {}
    one.ends("language_model.model.", "language_model.lm_head")
    at = "language_model.model.layers.0."
    shapes = {"q_proj": (HIDDEN, HIDDEN), "k_proj": (128, HIDDEN), "v_proj": (128, HIDDEN), "o_proj": (HIDDEN, HIDDEN)}
    one.floats(f"{at}self_attn.", **shapes)
    one.floats(at, input_layernorm=(HIDDEN,), post_attention_layernorm=(HIDDEN,), feed_forward__router=(2, HIDDEN))
    one.codes(f"{at}feed_forward.experts.", FP8, gate_up_proj=(2, 2 * INNER, HIDDEN), down_proj=(2, HIDDEN, INNER))
    wide = (INNER, HIDDEN)
    one.codes(f"{at}feed_forward.shared_expert.", FP8, gate_proj=wide, up_proj=wide, down_proj=(HIDDEN, INNER))
    one.floats("", vision_model__layers__0__self_attn__q_proj=(128, 128), multi_modal_projector__linear_1=(HIDDEN, 128))
    one.floats_as_named("vision_model.", class_embedding=(128,), layers__0__self_attn__q_proj__bias=(128,))
    return one


def mimo() -> Release:
    said = {**FINE, "ignored_layers": ["model.layers.0.self_attn.o_proj", "model.mtp.layers.0.self_attn.o_proj"]}
    heads = {"num_key_value_heads": 4, "swa_num_key_value_heads": 4}
    config = _config("mimo_v2_flash", "MiMoV2FlashForCausalLM", said, n_routed_experts=EXPERTS, **heads)
    one = Release("deepseek", ("deepseek:block", {}), config, heads=("model.mtp.",))
    one.ends()
    for at in ("model.layers.0.", "model.mtp.layers.0."):
        shapes = {"q_proj": (HIDDEN, HIDDEN), "k_proj": (192, HIDDEN), "v_proj": (128, HIDDEN)}
        one.codes(f"{at}self_attn.", TILES, **shapes)
        one.floats(f"{at}self_attn.", o_proj=(HIDDEN, HIDDEN))
        one.floats_as_named(f"{at}self_attn.", attention_sink_bias=(4,))
        one.floats(at, input_layernorm=(HIDDEN,))
    one.floats("model.layers.0.", post_attention_layernorm=(HIDDEN,))
    one.experts("model.layers.0.mlp.experts.", TILES)
    one.floats("model.layers.0.mlp.", "F32", gate=(EXPERTS, HIDDEN))
    one.floats_as_named("model.layers.0.mlp.", "F32", gate__e_score_correction_bias=(EXPERTS,))
    wide = (INNER, HIDDEN)
    one.codes("model.mtp.layers.0.mlp.", TILES, gate_proj=wide, up_proj=wide, down_proj=(HIDDEN, INNER))
    one.floats("model.mtp.layers.0.", enorm=(HIDDEN,), hnorm=(HIDDEN,), eh_proj=(HIDDEN, 2 * HIDDEN))
    one.floats("model.mtp.layers.0.", pre_mlp_layernorm=(HIDDEN,), final_layernorm=(HIDDEN,))
    return one


def nemotron_h() -> Release:
    left = ["lm_head", "backbone.layers.0.mixer.conv1d", "backbone.layers.1.mixer.gate", "mtp*"]
    said = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": left}
    config = _config("nemotron_h", "NemotronHForCausalLM", said, n_routed_experts=EXPERTS, num_nextn_predict_layers=1)
    one = Release("modelopt", ("modelopt:fp8-tensor", {}), config, heads=("mtp.",), static=True)
    one.config["num_hidden_layers"] = 2
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": left}
    one.files = {"hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": quantization}}
    one.floats("", backbone__embeddings=(WORDS, HIDDEN), backbone__norm_f=(HIDDEN,), lm_head=(WORDS, HIDDEN))
    one.codes("backbone.layers.0.mixer.", FP8, in_proj=(512, HIDDEN), out_proj=(HIDDEN, 128))
    one.floats("backbone.layers.0.mixer.", conv1d=(256, 1, 4), norm=(128,))
    one.floats_as_named("backbone.layers.0.mixer.", "F32", A_log=(16,), D=(16,), dt_bias=(16,))
    one.floats_as_named("backbone.layers.0.mixer.", conv1d__bias=(256,))
    one.floats("backbone.layers.", **{"0__norm": (HIDDEN,), "1__norm": (HIDDEN,)})
    for at, recipe in (("backbone.layers.1.mixer.", FP8), ("mtp.layers.1.mixer.", None)):
        for expert in range(EXPERTS):
            shapes = {"up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
            if recipe is None:
                one.floats(f"{at}experts.{expert}.", **shapes)
            else:
                one.codes(f"{at}experts.{expert}.", recipe, **shapes)
        one.floats(at, gate=(EXPERTS, HIDDEN))
        one.floats_as_named(at, "F32", gate__e_score_correction_bias=(EXPERTS,))
    shapes = {"q_proj": (HIDDEN, HIDDEN), "k_proj": (128, HIDDEN), "v_proj": (128, HIDDEN), "o_proj": (HIDDEN, HIDDEN)}
    one.floats("mtp.layers.0.mixer.", **shapes)
    one.floats("mtp.layers.", **{"0__norm": (HIDDEN,), "1__norm": (HIDDEN,), "1__final_layernorm": (HIDDEN,)})
    one.floats("mtp.layers.0.", enorm=(HIDDEN,), hnorm=(HIDDEN,), eh_proj=(HIDDEN, 2 * HIDDEN))
    return one


RELEASES: dict[str, Callable[[], Release]] = {
    made.__name__: made
    for made in (
        *(deepseek_v3, deepseek_v4, kimi_k2, glm, minimax, gpt_oss, qwen3_next, llama4, mimo),
        nemotron_h,
    )
}
