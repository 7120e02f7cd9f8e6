# SPDX-License-Identifier: Apache-2.0
"""Models of further architectures as GGUF, both ways: RoPE of Llama 3, experts, fused projections."""

import dataclasses
import json
import math
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from breccia.bridges import Found
from breccia.checkpoint import Checkpoint, SafetensorsFile, convert, finish, plan, save_arrays, verify
from breccia.checkpoint.judging.verify import values
from breccia.checkpoint.planning.choices import wanted
from breccia.checkpoint.planning.targets import parse_target
from breccia.checkpoint.reading.rows import rows_of
from breccia.gguf import models as gguf_models
from breccia.gguf import rope as gguf_rope
from breccia.gguf.container import GgufFile
from breccia.gguf.files import config_of
from checkpoints import weight
from fault_runner import tree
from tiny_models import SIZES, logits, random_model, transformers

ml_dtypes = pytest.importorskip("ml_dtypes")

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 16,
    "long_factor": [1.0 + 0.25 * i for i in range(16)],
    "short_factor": [1.0 + 0.0625 * i for i in range(16)],
}
LATENT_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128, "sliding_window": 16}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
GEMMA = {"query_pre_attn_scalar": 32, "sliding_window": 16, "tie_word_embeddings": True}
LOCAL = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
# name → transformers' class, what its config has beside the sizes, and GGUF's architecture.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "max_position_embeddings": 512}, "llama"),
    "llama-yarn": ("Llama", {"rope_parameters": {**YARN, "attention_factor": 1.5}}, "llama"),
    "qwen2-linear": ("Qwen2", {"rope_parameters": LINEAR}, "qwen2"),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}, "llama"),
    "qwen3-moe": ("Qwen3Moe", EXPERTS, "qwen3moe"),
    "gpt-oss": ("GptOss", {**GPT_OSS, "rope_parameters": {**YARN, "truncate": False}}, "gpt-oss"),
    "gpt-oss-plain": ("GptOss", {**GPT_OSS, "rope_parameters": {"rope_type": "default"}}, "gpt-oss"),
    "deepseek-v2": ("DeepseekV2", DEEPSEEK, "deepseek2"),
    "deepseek-v3": ("DeepseekV3", {**DEEPSEEK, "n_group": 2, "rope_parameters": LATENT_YARN}, "deepseek2"),
    "phi3": ("Phi3", {"sliding_window": 16}, "phi3"),
    "phi3-long": (
        "Phi3",
        {"sliding_window": 16, "original_max_position_embeddings": 16, "rope_parameters": LONG},
        "phi3",
    ),
    "gemma2": ("Gemma2", {**GEMMA, "final_logit_softcapping": 20.0, "attn_logit_softcapping": 40.0}, "gemma2"),
    "gemma3": ("Gemma3", {**GEMMA, "num_hidden_layers": 6, "rope_parameters": LOCAL}, "gemma3"),
}
SCALED = {"llama-yarn": "yarn", "qwen2-linear": "linear", "gemma3": "linear", "gpt-oss": "yarn", "deepseek-v3": "yarn"}
# transformers' reader of GGUF knows neither Mixtral's experts nor DeepSeek, and gpt-oss' experts by other names.
NOT_READ = ("mixtral", "gpt-oss", "gpt-oss-plain", "deepseek-v2", "deepseek-v3")
READ_BY_TRANSFORMERS = [name for name in MODELS if name not in NOT_READ]
# Models of which GGUF keeps some tensors as two.
OF_TWO = ("gpt-oss", "deepseek-v2", "deepseek-v3")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, (kind, more, _) in MODELS.items():
        made[name] = tmp_path_factory.mktemp(name)
        random_model(kind, more, norms=1).save_pretrained(made[name])
    return made


def only_of_tokenizers(notes: list[str]) -> bool:
    return all("tokenizer" in note for note in notes)


def fields_of(path: Path) -> dict[str, Any]:
    reader = gguf.GGUFReader(path)
    return {key: field.contents() for key, field in reader.fields.items()}


def close(got: Any, wanted: Any, bound: float = 1e-5) -> None:
    assert not got.isnan().any()
    assert float((got - wanted).norm() / wanted.norm()) <= bound


@pytest.mark.parametrize("name", MODELS)
def test_tensors_are_those_of_the_architecture(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    report = convert(models[name], tmp_path / "a.gguf", "gguf:f16")
    assert only_of_tokenizers(report["notes"])
    architecture = MODELS[name][2]
    kinds = {text: kind for kind, text in gguf.MODEL_ARCH_NAMES.items()}
    known = {gguf.TENSOR_NAMES[kind] for kind in gguf.MODEL_TENSORS[kinds[architecture]]}
    stored = {re.sub(r"\.\d+\.", ".{bid}.", tensor.name) for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    assert {each.rpartition(".")[0] for each in stored} <= known
    fields = fields_of(tmp_path / "a.gguf")
    assert fields["general.architecture"] == architecture
    if name in ("mixtral", "qwen3-moe"):
        assert (fields[f"{architecture}.expert_count"], fields[f"{architecture}.expert_used_count"]) == (4, 2)
        assert {each for each in stored if "_exps" in each} == {
            f"blk.{{bid}}.ffn_{each}_exps.weight" for each in ("gate", "up", "down")
        }
        router = next(t for t in gguf.GGUFReader(tmp_path / "a.gguf").tensors if "ffn_gate_inp" in t.name)
        assert router.tensor_type.name == "F32"
    windowed = architecture in ("phi3", "gemma2", "gemma3", "gpt-oss")
    assert fields.get(f"{architecture}.attention.sliding_window") == (16 if windowed else None)
    factors = {"llama3": {"rope_freqs.weight"}, "phi3-long": {"rope_factors_long.weight", "rope_factors_short.weight"}}
    assert {each for each in stored if each.startswith("rope_")} == factors.get(name, set())
    assert fields.get(f"{architecture}.rope.scaling.type") == SCALED.get(name)


@pytest.mark.parametrize("to", ["gguf:bf16", "gguf:q8_0", "gguf:mxfp4"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.in_turn
def test_there_and_back(name: str, to: str, models: dict[str, Path], tmp_path: Path) -> None:
    """A directory made of the file computes what a directory of the same values does."""
    convert(models[name], tmp_path / "a.gguf", to)
    assert verify(models[name], tmp_path / "a.gguf")["ok"]
    report = convert(tmp_path / "a.gguf", f"{tmp_path}/out/", "fp32")
    assert only_of_tokenizers(report["notes"])
    assert verify(tmp_path / "a.gguf", tmp_path / "out", min_sqnr_db=1e9)["ok"]
    (source,) = models[name].glob("*.safetensors")
    config, wanted = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", models[name]))
    wanted["rope_parameters"].pop("partial_rotary_factor", None)  # 1.0
    if name == "phi3-long":
        assert config["original_max_position_embeddings"] == wanted["original_max_position_embeddings"] == 16
        wanted["rope_parameters"]["attention_factor"] = pytest.approx(math.sqrt(1.5))  # 1 + ln(64 / 16) / ln 16
    assert config["rope_parameters"] == wanted["rope_parameters"]
    written = SafetensorsFile(tmp_path / "out" / "model.safetensors")
    assert set(written) == set(SafetensorsFile(source))
    shutil.copytree(models[name], tmp_path / "wanted")
    for file in (tmp_path / "wanted").glob("*.safetensors"):
        file.unlink()
    shutil.copy(tmp_path / "out" / "model.safetensors", tmp_path / "wanted")
    found = logits(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(found, logits(tmp_path / "wanted", dtype=torch.float32))
    if to == "gguf:bf16":
        close(found, logits(models[name], dtype=torch.float32))
    # From GGUF to GGUF nothing changes.
    convert(tmp_path / "a.gguf", tmp_path / "b.gguf", to)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_transformers_reads_the_same_model(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    """Its reader of GGUF, given the config (it takes neither RoPE's scaling nor the size of an expert)."""
    convert(models[name], tmp_path / "a.gguf", "gguf:q8_0")
    convert(tmp_path / "a.gguf", f"{tmp_path}/out/", "fp32")
    config = transformers().AutoConfig.from_pretrained(models[name])
    options = {"gguf_file": "a.gguf", "config": config, "dtype": torch.float32}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = transformers().AutoModelForCausalLM
        model, info = loader.from_pretrained(tmp_path, output_loading_info=True, **options)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        found = model(torch.arange(3, 43)[None]).logits
    assert torch.equal(found, logits(tmp_path / "out", dtype=torch.float32))


@pytest.mark.parametrize("name", MODELS)
def test_parts_make_the_whole(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    convert(models[name], tmp_path / "whole.gguf", "gguf:q8_0")
    for piece in plan(models[name], tmp_path / "out.gguf", "gguf:q8_0", 3):
        piece.run(threads=1)
    finish(models[name], tmp_path / "out.gguf", "gguf:q8_0")
    assert (tmp_path / "whole.gguf").read_bytes() == (tmp_path / "out.gguf").read_bytes()
    convert(tmp_path / "whole.gguf", f"{tmp_path}/whole/", "nvfp4")
    for piece in plan(tmp_path / "whole.gguf", f"{tmp_path}/out/", "nvfp4", 3):
        piece.run(threads=1)
    finish(tmp_path / "whole.gguf", f"{tmp_path}/out/", "nvfp4")
    assert tree(tmp_path / "whole") == tree(tmp_path / "out")


def llama3(more: dict[str, Any], **sizes: int) -> dict[str, Any]:
    return {
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "rope_parameters": {**LLAMA3, "rope_theta": 5e5, **more},
        **sizes,
    }


# Llama 3.1, 3.2 (1B) and 3.3, as their config.json have them.
REAL = {
    "3.1": llama3({"original_max_position_embeddings": 8192}, head_dim=128),
    "3.2": llama3({"original_max_position_embeddings": 8192, "factor": 32.0}, head_dim=64),
}


@pytest.mark.parametrize("name", REAL)
def test_factors_are_those_of_transformers_and_give_the_parameters(name: str) -> None:
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    config = REAL[name]
    factors = gguf_rope.rope_tensors(config)["rope_freqs.weight"]
    kind = transformers().LlamaConfig
    scaled, _ = rope.ROPE_INIT_FUNCTIONS["llama3"](kind(**config), torch.device("cpu"))
    width = config["head_dim"]
    plain = 1 / (5e5 ** (torch.arange(0, width, 2, dtype=torch.float64) / width))
    np.testing.assert_allclose(factors, (plain / scaled.double()).numpy(), rtol=1e-5)
    assert factors.min() == 1 and factors.max() == config["rope_parameters"]["factor"]
    unscaled = {**config, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert gguf_rope.llama3_of(factors, unscaled) == config["rope_parameters"]


def test_other_factors_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    config = {**REAL["3.1"], "rope_parameters": {"rope_theta": 5e5}}
    for factors in (np.ones(64), np.linspace(1, 8, 64), np.ones(3), np.geomspace(1, 8, 64), np.zeros(0)):
        with pytest.raises(ValueError, match=r"rope_freqs.weight must have the factors of Llama 3's scaling"):
            gguf_rope.llama3_of(factors.astype(np.float32), config)
    convert(models["llama3"], tmp_path / "a.gguf", "gguf:f16")
    raw = (tmp_path / "a.gguf").read_bytes()
    factors = gguf_rope.rope_tensors(json.loads((models["llama3"] / "config.json").read_text()))["rope_freqs.weight"]
    assert raw.count(factors.tobytes()) == 1
    (tmp_path / "b.gguf").write_bytes(raw.replace(factors.tobytes(), np.linspace(1, 8, 16).astype("<f4").tobytes()))
    with pytest.raises(ValueError, match=r"b\.gguf: rope_freqs\.weight must have the factors of Llama 3's scaling"):
        convert(tmp_path / "b.gguf", f"{tmp_path}/out/", "bf16")


def test_parameters_of_older_configs() -> None:
    """Phi-3's and Phi-4's as their makers wrote them: "su", and numbers beside RoPE's own."""
    config = {
        "hidden_size": 3072, "num_attention_heads": 32, "max_position_embeddings": 131072, "rope_theta": 10000.0,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "su", "long_factor": [2.0] * 36, "short_factor": [1.0] * 36},
    }  # fmt: skip
    assert gguf_rope.check_rope(config, "phi3") == ""
    fields = {key: value for key, (_, value) in gguf_rope.rope_fields(config, "phi3").items()}
    assert fields == {
        "rope.dimension_count": 72,
        "rope.freq_base": 10000.0,
        "rope.scaling.original_context_length": 4096,
        "rope.scaling.attn_factor": math.sqrt(1 + math.log(32) / math.log(4096)),
    }
    assert {name: array.tolist() for name, array in gguf_rope.rope_tensors(config).items()} == {
        "rope_factors_long.weight": [2.0] * 36,
        "rope_factors_short.weight": [1.0] * 36,
    }


def test_attention_of_yarn_is_that_of_transformers() -> None:
    """By what programs multiply beside the usual number, as transformers has it for every way to say it."""
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    for more in ({}, {"attention_factor": 1.25}, {"mscale": 2.0, "mscale_all_dim": 0.5}, {"mscale": 1.0}):
        parameters = {**YARN, **more}
        config = transformers().LlamaConfig(**SIZES, rope_parameters=dict(parameters))
        _, wanted = rope.ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
        fields = gguf_rope.rope_fields({**SIZES, "rope_parameters": parameters}, "llama")
        found = fields.get("rope.scaling.attn_factor", (6, 1.0))[1] * (0.1 * math.log(4) + 1)
        assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("scaling.type", (8, "dynamic"), "scaling.type must be 'linear', 'yarn' or 'longrope', it is 'dynamic'"),
        ("scaling.factor", (6, float("nan")), "scaling.factor must be a finite number of at least 0, it is nan"),
        ("freq_base", (8, "x"), "freq_base must be a finite number of at least 0, it is 'x'"),
        ("freq_base", (9, [1.0]), "freq_base must be a finite number of at least 0, it is an array"),
        ("scaling.original_context_length", (6, 0.5), "must be a whole number from 0 to 2^32 - 1, it is 0.5"),
        ("dimension_count", (4, 17), "dimension_count must be from 1 to the 16 numbers of a head, it is 17"),
    ],
)
def test_odd_fields_of_rope_are_refused(key: str, value: tuple[int, Any], reason: str) -> None:
    config = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64}
    own = gguf_rope.rope_fields({**config, "rope_parameters": YARN}, "llama")
    fields = {f"llama.{name}": said for name, said in own.items()}
    with pytest.raises(ValueError, match=re.escape(reason)):
        gguf_rope.rope_of_fields({**fields, f"llama.rope.{key}": value}, "llama", config)


def test_fields_of_rope_of_other_writers() -> None:
    """A factor without a type is linear, as in llama.cpp, by either of its names; 0 says nothing."""
    config = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64, "rope_theta": 5e5}
    for fields, scaling in (
        ({"llama.rope.scaling.factor": (6, 4.0)}, {"rope_type": "linear", "factor": 4.0}),
        ({"llama.rope.scale_linear": (6, 2.0)}, {"rope_type": "linear", "factor": 2.0}),
        ({"llama.rope.scaling.factor": (6, 0.0)}, {"rope_type": "default"}),
        ({"llama.rope.scaling.type": (8, "none"), "llama.rope.scaling.factor": (6, 4.0)}, {"rope_type": "default"}),
    ):
        assert gguf_rope.rope_of_fields(fields, "llama", config) == {"rope_theta": 5e5, **scaling}


def test_a_part_of_a_head_that_is_turned_comes_back() -> None:
    for width in (64, 80, 88, 92, 96, 100, 110, 128, 192, 256):
        config = {"head_dim": width, "max_position_embeddings": 64}
        for turned in range(2, width + 1, 2):
            fields = {"phi3.rope.dimension_count": (4, turned)}
            rope = gguf_rope.rope_of_fields(fields, "phi3", config)
            assert (
                gguf_rope.rope_fields({**config, "rope_parameters": rope}, "phi3")["rope.dimension_count"][1] == turned
            )


def test_longrope_without_one_of_its_parts_is_refused() -> None:
    config = {"head_dim": 8}
    fields = {"phi3.rope.scaling.original_context_length": (4, 16), "phi3.rope.scaling.attn_factor": (6, 1.5)}
    names = ("rope_factors_long.weight", "rope_factors_short.weight")
    tensors = {name: np.ones(4, np.float32) for name in names}
    assert gguf_rope.longrope_of(tensors, fields, "phi3", config, {})["rope_type"] == "longrope"
    for missing in (*names, *fields):
        left, said = ({k: v for k, v in each.items() if k != missing} for each in (tensors, fields))
        with pytest.raises(ValueError, match=f"{re.escape(missing)} must be there: the model's RoPE is LongRoPE"):
            gguf_rope.longrope_of(left, said, "phi3", config, {})
    for odd in (np.ones(3), np.zeros(4), np.full(4, np.nan)):
        with pytest.raises(ValueError, match=r"rope_factors_short\.weight must have 4 numbers above 0, it has"):
            gguf_rope.longrope_of({**tensors, names[1]: odd.astype(np.float32)}, fields, "phi3", config, {})
    with pytest.raises(ValueError, match=r"rope_factors_long\.weight must be absent in architecture 'llama'"):
        gguf_rope.longrope_of(tensors, fields, "llama", config, {})


ODD = ((8, "x"), (9, (4, [])), (6, float("nan")), (6, float("inf")), (4, 0), (4, 2**32 - 1), (7, True), (6, 0.5), None)


@pytest.mark.parametrize(
    "name", ["llama3", "llama-yarn", "mixtral", "qwen3-moe", "gpt-oss", "deepseek-v3", "phi3-long", "gemma3"]
)
def test_any_field_may_be_odd(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    """A config that JSON can say, or one sentence that names the file."""
    convert(models[name], tmp_path / "a.gguf", "gguf:f16")
    file = GgufFile(tmp_path / "a.gguf")
    own, refused = dict(file.fields), 0
    for key in (key for key in own if key.startswith(f"{MODELS[name][2]}.")):
        for value in ODD:
            file.fields = {other: said for other, said in own.items() if other != key} | ({key: value} if value else {})
            try:
                json.dumps(config_of(file), allow_nan=False)
            except ValueError as error:
                refused += 1
                assert str(error).startswith(f"{file.path}: "), error
                assert len(str(error).splitlines()) == 1
    assert refused > 20


KEYS_OF_SIZE = ("block_count", "embedding_length", "attention.head_count", "feed_forward_length")


@pytest.mark.parametrize("name", MODELS)
def test_a_file_without_the_sizes_of_its_model_gives_no_config(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    """transformers takes its own defaults, those of a model of another size."""
    convert(models[name], tmp_path / "a.gguf", "gguf:f16")
    file, architecture = GgufFile(tmp_path / "a.gguf"), MODELS[name][2]
    own, keys = dict(file.fields), [f"{architecture}.{key}" for key in KEYS_OF_SIZE]
    config_of(file)
    for key in keys:
        if (architecture, key) == ("gpt-oss", "gpt-oss.feed_forward_length"):  # its experts' says it
            continue
        file.fields = {other: said for other, said in own.items() if other != key}
        with pytest.raises(ValueError, match=rf"{re.escape(key)} must be there, above 0"):
            config_of(file)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("qwen3-moe", {"norm_topk_prob": False}, "norm_topk_prob must be true in architecture 'qwen3moe'"),
        ("qwen3-moe", {"mlp_only_layers": [0]}, "all layers must have experts in architecture 'qwen3moe'"),
        ("qwen3-moe", {"rope_parameters": LLAMA3}, "rope_type 'llama3' has no GGUF form here"),
        ("gemma2", {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar must be 32 in architecture 'gemma2'"),
        ("gemma3", {"layer_types": ["full_attention"] * 6}, "every layer of number 6 must see all, and no other"),
        (
            "gemma3",
            {"rope_parameters": {**LOCAL, "sliding_attention": {"rope_theta": 5e5}}},
            "must have the base 10000",
        ),
        (
            "gpt-oss",
            {"layer_types": ["full_attention"] * 2},
            "every second layer, from the first on, must see a window",
        ),
        ("gpt-oss", {"swiglu_limit": 5.0}, "swiglu_limit must be 7 in architecture 'gpt-oss', it is 5.0"),
        ("deepseek-v2", {"topk_method": "group_limited_greedy"}, "topk_method must be 'greedy' in a deepseek_v2 model"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob must be false in a deepseek_v2 model"),
        ("deepseek-v3", {"rope_interleave": False}, "rope_interleave must be true in architecture 'deepseek2'"),
        ("deepseek-v3", {"attention_bias": True}, "attention_bias must be false in architecture 'deepseek2'"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq must be 1 in architecture 'deepseek2', it is 2"),
        ("deepseek-v3", {"rope_parameters": {**LATENT_YARN, "mscale": 0.5}}, "mscale and mscale_all_dim must be said"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope"}}, "config.json lacks what GGUF must say: 'long_factor'"),
        ("phi3", {"rope_parameters": {**LONG, "long_factor": [1.0, 2.0]}}, "must have 16 numbers above 0, it has 2"),
        ("llama3", {"rope_parameters": LONG}, "rope_type 'longrope' has no GGUF form here"),
    ],
)
def test_what_programs_would_compute_otherwise_gets_no_names(
    name: str, change: dict[str, Any], reason: str, models: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(models[name], tmp_path / "in")
    config = json.loads((models[name] / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | change))
    report = convert(tmp_path / "in", tmp_path / "a.gguf", "gguf:q8_0")
    assert reason in report["notes"][0] and "no program loads a model" in report["notes"][0]
    assert "model.norm.weight" in Checkpoint(tmp_path / "a.gguf").entries
    assert verify(models[name], tmp_path / "a.gguf")["ok"]


def test_experts_that_are_not_alike_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    """They would keep names that no program knows."""
    shutil.copytree(models["qwen3-moe"], tmp_path / "in")
    (path,) = (tmp_path / "in").glob("*.safetensors")
    arrays = dict(SafetensorsFile(path).items())
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    arrays[name] = weight(*arrays[name].shape)
    save_arrays(arrays, path, {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"experts\.\d\.up_proj\.weight' must have the form of the other experts' of its"
    ):
        convert(tmp_path / "in", tmp_path / "a.gguf", "gguf:q8_0")


def test_experts_of_quantized_sources(models: dict[str, Path], tmp_path: Path) -> None:
    convert(models["mixtral"], tmp_path / "q", "compressed-tensors:fp8")
    convert(tmp_path / "q", tmp_path / "a.gguf", "gguf:q8_0")
    assert verify(tmp_path / "q", tmp_path / "a.gguf")["ok"]
    opened = Checkpoint(tmp_path / "a.gguf")
    found = [one for one in opened.found if ".experts." in one.name]
    assert len(found) == 2 * 4 * 3
    assert all(values(opened.load(one)).shape == one.shape for one in found)


@pytest.mark.parametrize("source", ["floats", "two levels"])
def test_nvfp4_of_all_experts_in_one_has_one_level(source: str, models: dict[str, Path], tmp_path: Path) -> None:
    """A global scale would be one of all experts, or several, which no program is known to apply."""
    folder = models["mixtral"]
    if source == "two levels":
        folder = tmp_path / "in"
        convert(models["mixtral"], folder, "modelopt:nvfp4")
    report = convert(folder, tmp_path / "a.gguf", "gguf:nvfp4")
    assert any(note.startswith("NVFP4 has one level") for note in report["notes"])
    opened = Checkpoint(tmp_path / "a.gguf")
    levels = {(".experts." in one.name, "global_scale" in one.parts) for one in opened.found if one.kind == "NVFP4"}
    assert levels == {(True, False), (False, True)}
    assert verify(models["mixtral"], tmp_path / "a.gguf", min_sqnr_db=15)["ok"]


@pytest.mark.parametrize("to", ["gguf:bf16", "gguf:f16", "gguf:q8_0"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_a_file_without_config_has_outputs_first(to: str, dtype: Any, tmp_path: Path) -> None:
    """GPT-2's weights and gpt-oss' experts have inputs first in their own files, whose config.json says so."""
    for kind, name, shape in (
        ("gpt2", "transformer.h.0.attn.c_attn.weight", (64, 192)),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj", (2, 64, 128)),
    ):
        source = tmp_path / kind
        source.mkdir()
        x = weight(*shape).astype(dtype)
        save_arrays({name: x}, source / "model.safetensors", {"format": "pt"})
        (source / "config.json").write_text(json.dumps({"model_type": kind}))
        convert(source, tmp_path / f"{kind}.gguf", to)
        assert verify(source, tmp_path / f"{kind}.gguf")["ok"]
        opened = Checkpoint(tmp_path / f"{kind}.gguf")
        (found,) = opened.found
        assert found.shape == (*shape[:-2], shape[-1], shape[-2])


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_norms_of_gemma_are_one_more_in_the_file(dtype: str, models: dict[str, Path], tmp_path: Path) -> None:
    """Whatever float the source has; back to any, and to GGUF again, they are the model's."""
    convert(models["gemma2"], tmp_path / "in", dtype)
    convert(tmp_path / "in", tmp_path / "a.gguf", "gguf:q8_0")
    name, inside = "model.layers.1.pre_feedforward_layernorm.weight", "blk.1.ffn_norm.weight"
    own = np.asarray(SafetensorsFile(tmp_path / "in" / "model.safetensors")[name], np.float32)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors}[inside]
    assert stored.tensor_type.name == "F32"
    np.testing.assert_array_equal(stored.data, own + np.float32(1))
    back = own + np.float32(1) - np.float32(1)
    convert(tmp_path / "a.gguf", tmp_path / "b.safetensors", "fp32")
    np.testing.assert_array_equal(SafetensorsFile(tmp_path / "b.safetensors")[name], back)
    opened = Checkpoint(tmp_path / "a.gguf", mapped=False)
    found = next(one for one in opened.found if one.name == name)
    np.testing.assert_array_equal(rows_of(opened, found, 3, 70), back[3:70])
    convert(tmp_path / "a.gguf", tmp_path / "c.gguf", "gguf:q4_0")
    other = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "c.gguf").tensors}[inside]
    np.testing.assert_array_equal(other.data, stored.data)


def test_norms_of_gemma_in_16_bits(models: dict[str, Path], tmp_path: Path) -> None:
    """Files of other programs may have them so: a file that says that its norm is of F16, in the first half."""
    convert(models["gemma2"], tmp_path / "a.gguf", "gguf:bf16")
    raw = bytearray((tmp_path / "a.gguf").read_bytes())
    name = b"blk.0.attn_norm.weight"
    at = raw.index(name) + len(name) + 4 + 8  # after the number of axes and the one axis: the type
    assert raw[at : at + 4] == bytes(4)
    raw[at] = 1
    (tmp_path / "a.gguf").write_bytes(raw)
    opened = Checkpoint(tmp_path / "a.gguf")
    found = next(one for one in opened.found if one.name == "model.layers.0.input_layernorm.weight")
    wanted = opened.array("blk.0.attn_norm.weight")
    assert (wanted.dtype, found.dtype) == (np.float16, "F32")
    wanted = wanted.astype(np.float32) - np.float32(1)
    np.testing.assert_array_equal(opened.load(found), wanted)
    np.testing.assert_array_equal(rows_of(opened, found, 2, 9), wanted[2:9])
    for to in ("b.gguf", "c.safetensors"):
        convert(tmp_path / "a.gguf", tmp_path / to, "gguf:bf16" if to == "b.gguf" else "fp32")
        other = Checkpoint(tmp_path / to)
        one = next(each for each in other.found if each.name == found.name)
        np.testing.assert_allclose(other.load(one), wanted, rtol=1e-6, atol=1e-6)


def test_routers_are_never_quantized() -> None:
    """Not with every pattern either, with which embeddings are asked for: programs have them in float32."""
    for architecture, block in (("qwen3moe", "mlp"), ("llama", "block_sparse_moe")):
        known = dataclasses.replace(parse_target("gguf:q8_0", include=["*"]), names=gguf_models.ModelMap(architecture))
        router, other = (f"model.layers.0.{block}.{name}.weight" for name in ("gate", "switch_mlp.gate_proj"))
        assert not wanted(Found(router, "plain", "bf16", {"weight": router}, (64, 128), dtype="BF16"), known)
        assert wanted(Found(other, "plain", "bf16", {"weight": other}, (4, 64, 128), dtype="BF16"), known)


def own_values(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*.safetensors")
    return {name: np.asarray(array, np.float32) for name, array in SafetensorsFile(path).items()}


def stored_values(path: Path) -> dict[str, Any]:
    tensors = gguf.GGUFReader(path).tensors
    return {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in tensors}


@pytest.mark.parametrize("to", ["gguf:bf16", "gguf:q8_0", "gguf:mxfp4", "gguf:q4_k"])
@pytest.mark.parametrize("name", OF_TWO)
def test_tensors_kept_as_two_come_back_as_one(name: str, to: str, models: dict[str, Path], tmp_path: Path) -> None:
    convert(models[name], tmp_path / "a.gguf", to)
    assert verify(models[name], tmp_path / "a.gguf")["ok"]
    convert(tmp_path / "a.gguf", tmp_path / "b.safetensors", "fp32")
    assert verify(tmp_path / "a.gguf", tmp_path / "b.safetensors", min_sqnr_db=1e9)["ok"]
    found, wanted = SafetensorsFile(tmp_path / "b.safetensors"), own_values(models[name])
    assert set(found) == set(wanted)
    if to == "gguf:bf16":
        for key, array in wanted.items():
            turned = re.search(r"experts\.(gate_up|down)_proj$", key)
            np.testing.assert_array_equal(found[key], array.swapaxes(-1, -2) if turned else array, err_msg=key)
    convert(tmp_path / "a.gguf", tmp_path / "b.gguf", to)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    opened = Checkpoint(tmp_path / "a.gguf", mapped=False)
    for one in opened.found:
        if one.origin.cut is not None:
            np.testing.assert_array_equal(values(rows_of(opened, one, 1, 3)), values(opened.load(one))[1:3])


def test_tensors_of_gpt_oss(models: dict[str, Path], tmp_path: Path) -> None:
    convert(models["gpt-oss"], tmp_path / "a.gguf", "gguf:bf16")
    own, stored = own_values(models["gpt-oss"]), stored_values(tmp_path / "a.gguf")
    for i in range(2):
        block, at = f"model.layers.{i}", f"blk.{i}"
        both = own[f"{block}.mlp.experts.gate_up_proj"].swapaxes(1, 2)
        for start, kind in enumerate(("gate", "up")):
            np.testing.assert_array_equal(stored[f"{at}.ffn_{kind}_exps.weight"], both[:, start::2])
            bias = own[f"{block}.mlp.experts.gate_up_proj_bias"][:, start::2]
            np.testing.assert_array_equal(stored[f"{at}.ffn_{kind}_exps.bias"], bias)
        down = own[f"{block}.mlp.experts.down_proj"].swapaxes(1, 2)
        np.testing.assert_array_equal(stored[f"{at}.ffn_down_exps.weight"], down)
        for name, inside in (
            ("mlp.experts.down_proj_bias", "ffn_down_exps.bias"),
            ("mlp.router.weight", "ffn_gate_inp.weight"),
            ("mlp.router.bias", "ffn_gate_inp.bias"),
            ("self_attn.sinks", "attn_sinks.weight"),
            ("self_attn.q_proj.weight", "attn_q.weight"),
            ("self_attn.k_proj.bias", "attn_k.bias"),
            ("post_attention_layernorm.weight", "post_attention_norm.weight"),
        ):
            np.testing.assert_array_equal(stored[f"{at}.{inside}"], own[f"{block}.{name}"])
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    assert {types[name] for name in types if "bias" in name or "sinks" in name or "gate_inp" in name} == {"F32"}
    fields = fields_of(tmp_path / "a.gguf")
    for key, value in (
        (gguf.Keys.LLM.EXPERT_COUNT, 4),
        (gguf.Keys.LLM.EXPERT_USED_COUNT, 2),
        (gguf.Keys.LLM.EXPERT_FEED_FORWARD_LENGTH, 128),
        (gguf.Keys.Attention.SLIDING_WINDOW, 16),
        (gguf.Keys.Attention.KEY_LENGTH, 32),
        (gguf.Keys.Rope.SCALING_TYPE, "yarn"),
        (gguf.Keys.Rope.SCALING_FACTOR, 4.0),
        (gguf.Keys.Rope.SCALING_ORIG_CTX_LEN, 16),
        (gguf.Keys.Rope.SCALING_YARN_BETA_FAST, 32.0),
        (gguf.Keys.Rope.SCALING_YARN_BETA_SLOW, 1.0),
    ):
        assert fields[key.format(arch="gpt-oss")] == value


def test_gpt_oss_in_mxfp4_keeps_its_codes(models: dict[str, Path], tmp_path: Path) -> None:
    """Its makers' files have blocks and scales: half of their rows are gates, and every number stays."""
    convert(models["gpt-oss"], tmp_path / "in", "gpt-oss")
    report = convert(tmp_path / "in", tmp_path / "a.gguf", "gguf:mxfp4")
    assert report["tensors"]["repack"] == 2 * 3
    convert(tmp_path / "in", tmp_path / "wanted", "fp32")
    own, stored = own_values(tmp_path / "wanted"), stored_values(tmp_path / "a.gguf")
    for i in range(2):
        both = own[f"model.layers.{i}.mlp.experts.gate_up_proj"].swapaxes(1, 2)
        np.testing.assert_array_equal(stored[f"blk.{i}.ffn_gate_exps.weight"], both[:, ::2])
        np.testing.assert_array_equal(stored[f"blk.{i}.ffn_up_exps.weight"], both[:, 1::2])
    convert(tmp_path / "a.gguf", tmp_path / "b.safetensors", "mxfp4")
    assert verify(tmp_path / "in", tmp_path / "b.safetensors", min_sqnr_db=1e9)["ok"]
    opened = Checkpoint(tmp_path / "a.gguf")
    wholes = [one for one in opened.found if one.name.endswith("gate_up_proj")]
    assert len(wholes) == 2 and all(one.recipe is not None and one.shape == (4, 256, 128) for one in wholes)


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3"])
def test_tensors_of_deepseek(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    convert(models[name], tmp_path / "a.gguf", "gguf:bf16")
    own, stored = own_values(models[name]), stored_values(tmp_path / "a.gguf")
    for i in range(2):
        at = f"model.layers.{i}.self_attn"
        by_head = own[f"{at}.kv_b_proj.weight"].reshape(4, 32 + 64, 64)
        np.testing.assert_array_equal(stored[f"blk.{i}.attn_k_b.weight"], by_head[:, :32].transpose(0, 2, 1))
        np.testing.assert_array_equal(stored[f"blk.{i}.attn_v_b.weight"], by_head[:, 32:])
        for kind in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"):
            inside = {"kv_a_proj_with_mqa": "kv_a_mqa"}.get(kind, kind.removesuffix("_proj"))
            np.testing.assert_array_equal(stored[f"blk.{i}.attn_{inside}.weight"], own[f"{at}.{kind}.weight"])
        for kind in ("q_a", "kv_a"):
            np.testing.assert_array_equal(
                stored[f"blk.{i}.attn_{kind}_norm.weight"], own[f"{at}.{kind}_layernorm.weight"]
            )
    mlp = "model.layers.1.mlp"
    for kind in ("gate", "up", "down"):
        np.testing.assert_array_equal(stored[f"blk.0.ffn_{kind}.weight"], own[f"model.layers.0.mlp.{kind}_proj.weight"])
        shared = own[f"{mlp}.shared_experts.{kind}_proj.weight"]
        np.testing.assert_array_equal(stored[f"blk.1.ffn_{kind}_shexp.weight"], shared)
        experts = np.stack([own[f"{mlp}.experts.{j}.{kind}_proj.weight"] for j in range(4)])
        np.testing.assert_array_equal(stored[f"blk.1.ffn_{kind}_exps.weight"], experts)
    fields = fields_of(tmp_path / "a.gguf")
    third = name == "deepseek-v3"
    wanted: dict[str, Any] = {
        gguf.Keys.Attention.HEAD_COUNT_KV: 1,
        gguf.Keys.Attention.KEY_LENGTH: 64 + 16,
        gguf.Keys.Attention.VALUE_LENGTH: 64,
        gguf.Keys.Attention.KEY_LENGTH_MLA: 32 + 16,
        gguf.Keys.Attention.VALUE_LENGTH_MLA: 64,
        gguf.Keys.Attention.KV_LORA_RANK: 64,
        gguf.Keys.Attention.Q_LORA_RANK: 96,
        gguf.Keys.Rope.DIMENSION_COUNT: 16,
        gguf.Keys.LLM.LEADING_DENSE_BLOCK_COUNT: 1,
        gguf.Keys.LLM.EXPERT_COUNT: 4,
        gguf.Keys.LLM.EXPERT_USED_COUNT: 2,
        gguf.Keys.LLM.EXPERT_SHARED_COUNT: 1,
        gguf.Keys.LLM.EXPERT_FEED_FORWARD_LENGTH: 128,
        gguf.Keys.LLM.EXPERT_WEIGHTS_SCALE: 2.5 if third else 1.0,
        gguf.Keys.LLM.EXPERT_WEIGHTS_NORM: third,
        gguf.Keys.LLM.EXPERT_GATING_FUNC: int(gguf.ExpertGatingFuncType.SIGMOID if third else 1),
        gguf.Keys.LLM.EXPERT_GROUP_COUNT: 2 if third else None,
        gguf.Keys.LLM.EXPERT_GROUP_USED_COUNT: 1 if third else None,
    }
    for key, value in wanted.items():
        assert fields.get(key.format(arch="deepseek2")) == value, key
    multiplier = fields.get(gguf.Keys.Rope.SCALING_YARN_LOG_MUL.format(arch="deepseek2"))
    assert multiplier == (pytest.approx(0.1) if third else None)
    correction = own.get(f"{mlp}.gate.e_score_correction_bias")
    assert (correction is not None) == third == ("blk.1.exp_probs_b.bias" in stored)
    if third:
        np.testing.assert_array_equal(stored["blk.1.exp_probs_b.bias"], correction)


def test_layers_that_predict_more_tokens_are_left_out(models: dict[str, Path], tmp_path: Path) -> None:
    """DeepSeek-V3's own files have one, after the last layer of config.json."""
    shutil.copytree(models["deepseek-v3"], tmp_path / "in")
    (path,) = (tmp_path / "in").glob("*.safetensors")
    arrays = dict(SafetensorsFile(path).items())
    more = "model.layers.2.eh_proj.weight"
    arrays[more] = weight(128, 256)
    save_arrays(arrays, path, {"format": "pt"})
    report = convert(tmp_path / "in", tmp_path / "a.gguf", "gguf:q8_0")
    assert f"{more}: left out: GGUF has no place for it" in report["notes"]
    assert not any(name.startswith("blk.2.") for name in stored_values(tmp_path / "a.gguf"))
    assert verify(tmp_path / "in", tmp_path / "a.gguf")["ok"]


def test_shapes_that_config_does_not_say_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(models["deepseek-v3"], tmp_path / "in")
    config = json.loads((models["deepseek-v3"] / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps({**config, "v_head_dim": 48}))
    with pytest.raises(ValueError, match=r"kv_b_proj.*rows of keys and values must be 320 = heads"):
        convert(tmp_path / "in", tmp_path / "a.gguf", "gguf:q8_0")
