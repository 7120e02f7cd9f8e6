# SPDX-License-Identifier: Apache-2.0
"""Whole models in GGUF: names, hyperparameters and tokenizers, by the programs that read them."""

import functools
import inspect
import json
import re
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from breccia.checkpoint import (
    Checkpoint,
    SafetensorsFile,
    complete,
    convert,
    finish,
    merge_lora,
    plan,
    save_arrays,
    verify,
)
from breccia.checkpoint.judging.verify import values
from breccia.gguf import models as gguf_models
from breccia.gguf import parameters
from breccia.gguf import types as gguf_types
from breccia.gguf.container import GgufFile, GgufWriter
from checkpoints import minilm, weight
from fault_runner import tree
from tiny_models import made_once, transformers


def test_hostile_gguf_is_refused(tmp_path: Path) -> None:
    good = tmp_path / "good.gguf"
    save_arrays({"a.weight": weight(64, 256)}, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", good, "gguf:q8_0", include=["*"])
    raw = good.read_bytes()
    for cut in (0, 3, 10, 23, 40, 100, len(raw) - 64 * 272 - 40, len(raw) - 1000):
        (tmp_path / "bad.gguf").write_bytes(raw[:cut])
        with pytest.raises(ValueError, match=r"bad\.gguf"):
            Checkpoint(tmp_path / "bad.gguf")
    for at in range(4, 160):  # any one byte changed: read, or refused with a message
        (tmp_path / "bad.gguf").write_bytes(raw[:at] + bytes([raw[at] ^ 0xFF]) + raw[at + 1 :])
        try:
            Checkpoint(tmp_path / "bad.gguf").close()
        except ValueError as error:
            assert "bad.gguf" in str(error)


@pytest.mark.parametrize("before", [0, 300_000, (1 << 20) - 400, (1 << 20) - 100, 2_000_000])
@pytest.mark.parametrize("kind", ["strings", "numbers"])
def test_metadata_of_any_length_is_kept(kind: str, before: int, tmp_path: Path) -> None:
    """Two lists of 0.9 MiB, wherever they lie in what is read at once: vocabularies and merges are as long."""
    items = [f"token {i}" for i in range(50_000)] if kind == "strings" else [*range(240_000)]
    lists = {"a": items, "b": items[::-1]}
    others = {"general.padding": (8, "x" * before), "n": (4, 7), "z": (8, "end")}
    fields = {"general.padding": others["general.padding"], "a": (9, lists["a"]), "n": (4, 7), "b": (9, lists["b"])}
    with GgufWriter(tmp_path / "a.gguf", {"a.weight": ("F32", (64, 256))}, {**fields, "z": others["z"]}) as writer:
        writer.write("a.weight", weight(64, 256))
    convert(tmp_path / "a.gguf", tmp_path / "b.gguf", "gguf:q8_0")
    for name in ("a.gguf", "b.gguf"):
        read = GgufFile(tmp_path / name).fields
        assert {key: read[key] for key in others} == others
        assert {key: list(read[key][1]) for key in lists} == lists


def split(source: Path, name: Path, most: int, alone: bool) -> list[Path]:
    """A file cut by gguf-py into files of so many tensors; ``alone``: the first has none."""
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(name, architecture, split_max_tensors=most, small_first_shard=alone)
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        raw = np.ascontiguousarray(tensor.data)
        writer.add_tensor(tensor.name, raw, raw_dtype=tensor.tensor_type)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return sorted(name.parent.glob(f"{name.stem}-*.gguf"))


@pytest.mark.parametrize("alone", [False, True])
def test_files_of_a_split_model_are_one(alone: bool, tmp_path: Path) -> None:
    """Whichever of them is named; what is made of them is what is made of the whole file."""
    transformers()
    source = made_once(tmp_path / "models")("llama-wide")
    convert(source, tmp_path / "whole.gguf", "gguf:q4_k_m")
    paths = split(tmp_path / "whole.gguf", tmp_path / "cut.gguf", 6, alone)
    assert len(paths) == (5 if alone else 4)
    convert(tmp_path / "whole.gguf", f"{tmp_path}/wanted/", "nvfp4")
    for path in (paths[0], paths[-1]):
        convert(path, f"{tmp_path}/out/", "nvfp4", force=True)
        for name in ("model.safetensors", "config.json"):
            assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "wanted" / name).read_bytes()
    report = convert(paths[0], tmp_path / "again.gguf", "gguf:q4_k_m")
    assert report["tensors"] == {"keep": 16, "copy": 5}
    whole, again = GgufFile(tmp_path / "whole.gguf"), GgufFile(tmp_path / "again.gguf")
    assert again.fields.keys() == whole.fields.keys()
    assert all(again.raw(name).tobytes() == whole.raw(name).tobytes() for name in whole.entries)
    assert verify(tmp_path / "whole.gguf", paths[1], min_sqnr_db=200)["ok"]
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4}))
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_{}.weight"
    inner = whole.shapes["blk.0.ffn_down.weight"][1]
    pair = {name.format("A"): weight(4, inner), name.format("B"): weight(256, 4)}
    save_arrays(pair, adapter / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"base must be one GGUF file, .*cut-00001-of-0000\d\.gguf is one of several"):
        merge_lora(paths[0], adapter, tmp_path / "merged.gguf")


def test_files_of_a_split_model_that_do_not_belong_together(tmp_path: Path) -> None:
    save_arrays({f"{i}.weight": weight(32, 64) for i in range(3)}, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "a.gguf", "gguf:f16")
    first, second, third = split(tmp_path / "a.gguf", tmp_path / "x.gguf", 1, False)
    whole = GgufFile(second)
    assert list(whole.entries) == ["0.weight", "1.weight", "2.weight"]
    whole.close()
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(first.read_bytes())
    with pytest.raises(ValueError, match=r"alone\.gguf: one of 3 files must be called as NAME-00001-of-00003\.gguf"):
        GgufFile(alone)
    raw = third.read_bytes()
    third.unlink()
    with pytest.raises(ValueError, match=r"all 3 files of the model must be there, x-00003-of-00003\.gguf is not"):
        GgufFile(first)
    third.write_bytes(second.read_bytes())
    with pytest.raises(ValueError, match=r"x-00003-of-00003\.gguf: tensor '1\.weight' must appear once"):
        GgufFile(first)
    third.write_bytes(first.read_bytes())
    second.write_bytes(raw)
    with pytest.raises(ValueError, match=r"x-00002-of-00003\.gguf: split\.no must be 1 and split\.count 3"):
        GgufFile(first)
    second.write_bytes(raw[:-8])
    with pytest.raises(ValueError, match=r"x-00002-of-00003\.gguf: tensor '2\.weight': file must have \d+ bytes"):
        GgufFile(first)


@pytest.mark.parametrize("count", [0, 1])
def test_of_files_that_were_joined_the_count_is_0(count: int, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "0.gguf", "none")
    writer.add_uint16("split.count", count)
    writer.add_tensor("0.weight", weight(64, 256))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    assert convert(tmp_path / "0.gguf", tmp_path / "out.gguf", "gguf:q8_0")["tensors"] == {"cast": 1}


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_tensor_of_a_type_that_gguf_has_not_is_named_when_the_conversion_is_planned(
    tmp_path: Path, dry_run: bool
) -> None:
    save_arrays({"a.weight": weight(64, 256), "mask": np.ones((4, 4), bool)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="tensor 'mask' must be of a type that GGUF has, it is BOOL"):
        convert(tmp_path / "a.safetensors", tmp_path / "a.gguf", "gguf:q8_0", dry_run=dry_run)
    assert not (tmp_path / "a.gguf").exists()


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}


def split_patterns() -> dict[str, str]:
    """How Llama 3's and Qwen's tokenizers split text, from the package that makes them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        qwen = pytest.importorskip("transformers.models.qwen2.tokenization_qwen2")
        slow = pytest.importorskip("transformers.convert_slow_tokenizer")
    llama = inspect.signature(slow.TikTokenConverter.__init__).parameters["pattern"].default
    return {"llama-bpe": llama, "qwen2": qwen.PRETOKENIZE_REGEX}


def byte_tokenizer(pattern: str | None = None) -> Any:
    """A small byte-level BPE with special tokens at its end, which splits text by a pattern or as GPT-2's."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern is not None:
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, level])
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["block scaled tensors whose scale travels with the data"] * 4, trainer)
    made.add_special_tokens(["<|begin|>", "<|end|>"])
    return made


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """Small models of three architectures with random weights, saved by transformers."""
    torch = pytest.importorskip("torch")
    made = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        for name, more in {"Llama": {}, "Qwen2": {}, "Qwen3": {"head_dim": 32}}.items():
            torch.manual_seed(0)
            config = getattr(transformers, f"{name}Config")(**SIZES, **more, rope_theta=5e5)
            model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(0, 0.02)
            path = tmp_path_factory.mktemp(name)
            model.save_pretrained(path)
            pattern = split_patterns()["llama-bpe" if name == "Llama" else "qwen2"]
            byte_tokenizer(pattern).save(str(path / "tokenizer.json"))
            made[name.lower()] = model, path
    return made


def float_values(checkpoint: Checkpoint) -> dict[str, Any]:
    return {found.name: values(checkpoint.load(found)) for found in checkpoint.found}


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "mxfp4"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_transformers_loads_our_models(
    name: str, kind: str, models: dict[str, tuple[Any, Path]], tmp_path: Path
) -> None:
    """Its reader finds every tensor under the model's own name, Llama's rows in the model's order, and the config."""
    model, source = models[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
        out = tmp_path / "out.gguf"
        report = convert(source, out, f"gguf:{kind}")
        assert not report["notes"]
        assert verify(source, out)["ok"]
        loaded = loader.load_gguf_checkpoint(str(out), return_tensors=True, model_to_load=model)
    ours = float_values(Checkpoint(out))
    assert loaded["tensors"].keys() == ours.keys()
    for tensor, value in loaded["tensors"].items():
        np.testing.assert_array_equal(value.numpy(), ours[tensor], tensor)
    for key in (*SIZES, "rms_norm_eps", "rope_theta"):
        wanted = model.config.rope_parameters[key] if key == "rope_theta" else getattr(model.config, key)
        assert loaded["config"][key] == pytest.approx(wanted), key
    assert loaded["config"]["model_type"] == name


@pytest.mark.parametrize(("name", "levels"), [("llama", 2), ("qwen3", 2), ("qwen2", 1)])
def test_nvfp4_has_the_levels_that_programs_apply(
    name: str, levels: int, models: dict[str, tuple[Any, Path]], tmp_path: Path
) -> None:
    """Programs multiply by the second scale only where the architecture's code asks for it."""
    _, source = models[name]
    report = convert(source, tmp_path / "a.gguf", "gguf:nvfp4")
    assert [note[:19] for note in report["notes"]] == ([] if levels == 2 else ["NVFP4 has one level"])
    convert(source, tmp_path / "two", "modelopt:nvfp4")
    again = convert(tmp_path / "two", tmp_path / "b.gguf", "gguf:nvfp4")
    assert again["tensors"]["repack" if levels == 2 else "requantize"] == 14
    for out in ("a.gguf", "b.gguf"):
        found = [f for f in Checkpoint(tmp_path / out).found if f.kind == "NVFP4"]
        assert len(found) == 14
        assert all(("global_scale" in f.parts) == (levels == 2) for f in found)
        assert verify(source, tmp_path / out, min_sqnr_db=15)["ok"]


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_names_and_rows_survive_the_way_back(name: str, models: dict[str, tuple[Any, Path]], tmp_path: Path) -> None:
    _, source = models[name]
    convert(source, tmp_path / "a.gguf", "gguf:q8_0")
    (note,) = convert(tmp_path / "a.gguf", tmp_path / "b.safetensors", "fp32")["notes"]
    assert note.startswith("there is no config.json")
    convert(tmp_path / "a.gguf", tmp_path / "c.gguf", "gguf")  # GGUF to GGUF
    first = float_values(Checkpoint(tmp_path / "a.gguf"))
    assert first.keys() == {n for f in source.glob("*.safetensors") for n in SafetensorsFile(f)}
    for other in ("b.safetensors", "c.gguf"):
        second = float_values(Checkpoint(tmp_path / other))
        assert first.keys() == second.keys()
        for tensor, value in first.items():
            np.testing.assert_array_equal(second[tensor], value, tensor)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "c.gguf").read_bytes()


def test_the_importance_that_a_file_names_is_not_dropped_in_silence(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "none")
    writer.add_string("quantize.imatrix.file", "calibration.gguf")
    writer.add_tensor("a.weight", weight(64, 256))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    for out in ("b.safetensors", "folder"):
        notes = convert(tmp_path / "a.gguf", tmp_path / out, "mxfp8")["notes"]
        assert any("importance 'calibration.gguf'" in note for note in notes), notes
    convert(tmp_path / "a.gguf", tmp_path / "b.gguf", "gguf:q8_0")
    assert b"calibration.gguf" in (tmp_path / "b.gguf").read_bytes()


def test_llama_rows_are_in_ggufs_order(models: dict[str, tuple[Any, Path]], tmp_path: Path) -> None:
    """Neighbouring rows of a file's head are the same row of the two halves of the model's head."""
    reader = pytest.importorskip("gguf.gguf_reader")
    model, source = models["llama"]
    convert(source, tmp_path / "a.gguf", "gguf:q8_0", exclude=["*_proj.weight"])
    stored = {t.name: t for t in reader.GGUFReader(tmp_path / "a.gguf").tensors}
    q = model.model.layers[0].self_attn.q_proj.weight.detach()
    heads = q.reshape(4, 2, 8, 64)
    got = stored["blk.0.attn_q.weight"].data.view(np.uint16).reshape(4, 8, 2, 64)
    for half in range(2):
        np.testing.assert_array_equal(got[:, :, half], heads[:, half].view(dtype=torch_uint16()).numpy())


def torch_uint16() -> Any:
    import torch

    return torch.uint16


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_destination_with_a_slash_is_a_whole_model(
    name: str, models: dict[str, tuple[Any, Path]], tmp_path: Path
) -> None:
    """A directory that transformers opens by itself, to the logits and tokens of its own reader of GGUF (which reads
    the width of Qwen3's heads wrong, and is given the config)."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    _, source = models[name]
    convert(source, tmp_path / "a.gguf", "gguf:q8_0")
    report = convert(tmp_path / "a.gguf", f"{tmp_path}/out/", "fp32")
    assert report["notes"] == []
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in (tmp_path / "out").iterdir()}
    assert complete(tmp_path / "out")["ok"]
    tokens = torch.arange(3, 40)[None]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf", config=ours.config)
        assert type(ours) is type(theirs)
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)
        texts = ["the scale of a block", "naïve ☂ tensors<|end|>"]
        made = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
        assert made(texts) == transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf")(texts)


def test_a_directory_of_gguf_may_be_quantized(models: dict[str, tuple[Any, Path]], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    convert(models["llama"][1], tmp_path / "a.gguf", "gguf:q8_0")
    convert(tmp_path / "a.gguf", f"{tmp_path}/out/", "compressed-tensors:fp8")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["quantization_config"]["quant_method"] == "compressed-tensors"
    assert said["architectures"] == ["LlamaForCausalLM"]
    assert complete(tmp_path / "out")["ok"]
    assert verify(tmp_path / "a.gguf", tmp_path / "out")["ok"]


def test_a_directory_of_gguf_may_be_made_in_parts(models: dict[str, tuple[Any, Path]], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    convert(models["llama"][1], tmp_path / "a.gguf", "gguf:q8_0")
    convert(tmp_path / "a.gguf", f"{tmp_path}/whole/", "mxfp8")
    for piece in plan(tmp_path / "a.gguf", f"{tmp_path}/out/", "mxfp8", 2):
        piece.run(threads=1)
    finish(tmp_path / "a.gguf", f"{tmp_path}/out/", "mxfp8")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_directories_of_files(models: dict[str, tuple[Any, Path]], tmp_path: Path, monkeypatch: Any) -> None:
    (weights,) = models["llama"][1].glob("*.safetensors")
    convert(weights, f"{tmp_path}/alone/", "bf16")
    assert sorted(p.name for p in (tmp_path / "alone").iterdir()) == ["breccia.json", "model.safetensors"]
    with pytest.raises(ValueError, match=r"^destination must be a file for gguf:q8_0, got .*out/$"):
        convert(weights, f"{tmp_path}/out/", "gguf:q8_0")
    convert(models["llama"][1], tmp_path / "a.gguf", "gguf:q8_0")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"^transformers is needed here: pip install 'breccia\[transformers\]'"):
        convert(tmp_path / "a.gguf", f"{tmp_path}/out/", "bf16")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_the_tokenizer_is_the_same(name: str, models: dict[str, tuple[Any, Path]], tmp_path: Path) -> None:
    """A byte-level BPE made of what gguf-py reads splits texts as the original does."""
    reader_module = pytest.importorskip("gguf.gguf_reader")
    tokenizers = pytest.importorskip("tokenizers")
    _, source = models[name]
    convert(source, tmp_path / "out.gguf", "gguf:q8_0")
    fields = reader_module.GGUFReader(tmp_path / "out.gguf").fields
    said = {key.rpartition(".")[2]: f.contents() for key, f in fields.items() if key.startswith("tokenizer.ggml.")}
    assert said["model"] == "gpt2"
    assert said["pre"] == {"llama": "llama-bpe", "qwen2": "qwen2"}[name]
    assert len(said["tokens"]) == len(said["token_type"]) == SIZES["vocab_size"]
    original = byte_tokenizer(split_patterns()[said["pre"]])
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={token: i for i, token in enumerate(said["tokens"])},
            merges=[tuple(m.split(" ")) for m in said["merges"]],
        )
    )
    made.pre_tokenizer = original.pre_tokenizer
    made.add_special_tokens([t for t, kind in zip(said["tokens"], said["token_type"], strict=True) if kind == 3])
    for text in ("the scale of a block", "naïve ☂ tensors<|end|>"):
        assert made.encode(text).ids == original.encode(text).ids


@pytest.fixture
def tokenizer_of(models: dict[str, tuple[Any, Path]], tmp_path: Path) -> Any:
    """What GGUF says of a tokenizer, by the files beside a model; and the report's notes."""
    reader_module = pytest.importorskip("gguf.gguf_reader")

    def convert_with(files: dict[str, str], model: str = "llama") -> tuple[dict[str, Any], list[str]]:
        shutil.copytree(models[model][1], tmp_path / "in")
        for name, text in files.items():
            (tmp_path / "in" / name).write_text(text)
        report = convert(tmp_path / "in", tmp_path / "out.gguf", "gguf:q8_0")
        fields = reader_module.GGUFReader(tmp_path / "out.gguf").fields
        return {key: field.contents() for key, field in fields.items()}, report["notes"]

    return convert_with


@pytest.mark.parametrize("model", ["llama", "qwen2"])
@pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "gpt-2"])
def test_the_way_text_is_split_is_the_tokenizers_own(name: str, model: str, tokenizer_of: Any) -> None:
    """Whatever the architecture: other programs' models take over each other's tokenizers."""
    made = byte_tokenizer(split_patterns().get(name))
    fields, notes = tokenizer_of({"tokenizer.json": made.to_str()}, model)
    assert fields["tokenizer.ggml.pre"] == name
    assert not notes


def test_a_way_to_split_text_that_has_no_name_is_said(tokenizer_of: Any) -> None:
    fields, notes = tokenizer_of({"tokenizer.json": byte_tokenizer(r"\p{L}+|\p{N}").to_str()})
    assert "tokenizer.ggml.tokens" not in fields
    assert notes == ["tokenizer.json splits text in a way that has no GGUF name here: the file has no tokenizer"]


@pytest.mark.parametrize("form", [str, dict])
def test_a_turn_ends_where_the_tokenizer_says(form: Any, tokenizer_of: Any) -> None:
    """config.json's end of a text is not the end of a turn in a chat."""
    token: Any = "<|end|>" if form is str else {"content": "<|end|>", "lstrip": False}
    template = "{{ messages[0].content }}<|end|>"
    said = {"eos_token": token, "bos_token": None, "chat_template": template}
    fields, _ = tokenizer_of({"tokenizer_config.json": json.dumps(said)})
    assert fields["tokenizer.ggml.tokens"][fields["tokenizer.ggml.eos_token_id"]] == "<|end|>"
    assert fields["tokenizer.ggml.bos_token_id"] == 1  # config.json's: the tokenizer has none
    assert fields["tokenizer.chat_template"] == template
    assert fields["general.file_type"] == 7  # MOSTLY_Q8_0


def test_chat_templates_in_a_file_and_in_a_list(tokenizer_of: Any) -> None:
    several = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    fields, _ = tokenizer_of({"tokenizer_config.json": json.dumps({"chat_template": several})})
    assert (fields["tokenizer.chat_template"], fields["tokenizer.chat_template.tool_use"]) == ("a", "b")
    assert fields["tokenizer.chat_templates"] == ["tool_use"]


@pytest.mark.parametrize(("kind", "number"), [("q8_0", 7), ("q4_0", 2), ("mxfp4", 38), ("nvfp4", 39)])
def test_the_type_of_a_file_is_that_of_its_matrices(
    kind: str, number: int, models: dict[str, tuple[Any, Path]], tmp_path: Path
) -> None:
    reader_module = pytest.importorskip("gguf.gguf_reader")
    convert(models["llama"][1], tmp_path / "a.gguf", f"gguf:{kind}")
    assert reader_module.GGUFReader(tmp_path / "a.gguf").fields["general.file_type"].contents() == number
    convert(tmp_path / "a.gguf", tmp_path / "b.gguf", "gguf:q8_0")
    assert reader_module.GGUFReader(tmp_path / "b.gguf").fields["general.file_type"].contents() == 7


@pytest.fixture(scope="module")
def in_floats(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """MiniLM in floats of a dtype."""
    folder = tmp_path_factory.mktemp("minilm")

    @functools.cache
    def made(dtype: str) -> Path:
        convert(minilm(), folder / dtype, dtype)
        return folder / dtype

    return made


@pytest.mark.in_turn
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "mxfp4", "q4_k"])
def test_llama_cpp_adds_embeddings_of_bert_as_they_are(kind: str, dtype: str, in_floats: Any, tmp_path: Path) -> None:
    """It ends the process where positions or kinds of text are no float32, and asks how many kinds there are."""
    reader = pytest.importorskip("gguf.gguf_reader")
    convert(in_floats(dtype), tmp_path / "out.gguf", f"gguf:{kind}")
    found = reader.GGUFReader(tmp_path / "out.gguf")
    added = {t.name: t.tensor_type.name for t in found.tensors if t.name.startswith(("position", "token_types"))}
    assert added == {"position_embd.weight": "F32", "token_types.weight": "F32"}
    assert found.fields["tokenizer.ggml.token_type_count"].contents() == 2


def test_llama_cpp_computes_minilms_vectors(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    gguf_programs = pytest.importorskip("gguf_programs")  # a source archive has no benchmarks
    assert gguf_programs.sentence_row(tmp_path)["llama.cpp"]["median"] <= 5e-3


def test_minilm_is_a_whole_model(tmp_path: Path) -> None:
    """GGUF's BERT: every tensor that llama.cpp's architecture has and no other, WordPiece, the pooling."""
    reader_module = pytest.importorskip("gguf.gguf_reader")
    constants = pytest.importorskip("gguf.constants")
    source = minilm()
    report = convert(source, tmp_path / "out.gguf", "gguf:q8_0")
    assert {note.partition(":")[0] for note in report["notes"]} == {
        "embeddings.position_ids",
        "pooler.dense.bias",
        "pooler.dense.weight",
    }
    reader = reader_module.GGUFReader(tmp_path / "out.gguf")
    known = {constants.TENSOR_NAMES[t] for t in constants.MODEL_TENSORS[constants.MODEL_ARCH.BERT]}
    names = {re.sub(r"\d+", "{bid}", t.name).rpartition(".")[0] for t in reader.tensors}
    assert names <= known
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert fields["general.architecture"] == "bert"
    assert (fields["bert.block_count"], fields["bert.embedding_length"], fields["bert.pooling_type"]) == (6, 384, 1)
    assert fields["bert.attention.causal"] is False
    vocabulary = (source / "vocab.txt").read_text("utf-8").splitlines()
    assert len(fields["tokenizer.ggml.tokens"]) == len(vocabulary)
    for theirs, ours, kind in zip(
        vocabulary, fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"], strict=True
    ):
        plain = theirs.removeprefix("##") if theirs.startswith("##") else "▁" + theirs
        assert ours == (theirs if kind == 3 else plain)
    assert vocabulary[fields["tokenizer.ggml.bos_token_id"]] == "[CLS]"
    assert vocabulary[fields["tokenizer.ggml.eos_token_id"]] == "[SEP]"
    result = verify(source, tmp_path / "out.gguf")
    assert result["ok"], (result["failed"], result["missing"])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' has no GGUF names here"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 8.0}}, "rope_type 'dynamic' has no GGUF form here"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "config.json lacks what GGUF must say"),
        ({"rms_norm_eps": None}, "config.json lacks what GGUF must say"),
    ],
)
def test_a_model_that_is_not_known_keeps_its_names(
    change: dict[str, Any], reason: str, models: dict[str, tuple[Any, Path]], tmp_path: Path
) -> None:
    _, source = models["llama"]
    shutil.copytree(source, tmp_path / "in")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | change))
    report = convert(tmp_path / "in", tmp_path / "out.gguf", "gguf:q8_0")
    assert len(report["notes"]) == 1
    assert "no program loads a model" in report["notes"][0] and reason in report["notes"][0]
    assert verify(source, tmp_path / "out.gguf")["ok"]
    assert "model.norm.weight" in Checkpoint(tmp_path / "out.gguf").entries


@pytest.mark.parametrize(
    "tokenizer", ["{}", '{"model": {"type": "BPE", "vocab": {"a": -1}}}', '{"model": {"type": "Unigram", "vocab": {}}}']
)
def test_a_tokenizer_that_is_not_one_is_said(
    tokenizer: str, models: dict[str, tuple[Any, Path]], tmp_path: Path
) -> None:
    _, source = models["qwen2"]
    shutil.copytree(source, tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_text(tokenizer)
    report = convert(tmp_path / "in", tmp_path / "out.gguf", "gguf:q8_0")
    assert "tokenizer" in report["notes"][0]
    assert verify(source, tmp_path / "out.gguf")["ok"]


def theirs_of_experts(name: str) -> str:
    """The name of a layer's experts that the library knows."""
    words = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"} if "block_sparse_moe" in name else {}
    start, found, projection = name.partition("switch_mlp.")
    if not found:
        return name
    last = projection.removesuffix(".weight")
    return f"{start}experts.{words.get(last, last)}.weight"


@pytest.mark.parametrize("architecture", gguf_models._TABLES)
def test_names_are_those_of_ggufs_own_map(architecture: str) -> None:
    """The library maps one way, many names to one; the tables here go both ways and need no library."""
    gguf = pytest.importorskip("gguf")
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    theirs = gguf.get_tensor_name_map(kinds[architecture], 4)
    known = gguf_models.ModelMap(architecture)
    for outside, inside in gguf_models._TABLES[architecture].items():
        for block in ("0", "3"):
            name = f"{outside.replace('{}', block)}.weight"
            assert known.inside(name) == f"{inside.replace('{}', block)}.weight"
            shared = theirs_of_experts(name)
            assert theirs.get_name(shared, try_suffixes=(".weight", ".bias")) == known.inside(name)
            assert known.outside(known.inside(name)) == name
            assert known.left_out(name) is False


@pytest.mark.in_turn
def test_names_are_made_of_those_of_transformers_and_gguf() -> None:
    for peer in ("torch", "transformers", "gguf"):
        pytest.importorskip(peer)
    assert pytest.importorskip("make_gguf_names").names() == gguf_models._NAMES


def test_keys_and_types_are_ggufs_own() -> None:
    constants = pytest.importorskip("gguf.constants")
    kinds = constants.GGUFValueType
    for name in ("UINT32", "INT32", "FLOAT32", "BOOL", "STRING", "ARRAY"):
        assert getattr(gguf_types, name) == getattr(kinds, name)
    groups = (constants.Keys.LLM, constants.Keys.Attention, constants.Keys.Rope, constants.Keys.Tokenizer)
    known = {value for group in groups for value in vars(group).values() if isinstance(value, str)}
    decoder = {
        "max_position_embeddings": 512, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128,
        "num_attention_heads": 4, "layer_norm_eps": 1e-12, "rms_norm_eps": 1e-6, "vocab_size": 100,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 32, "beta_slow": 1, "mscale_all_dim": 1.0},
        "model_type": "deepseek_v3", "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "qk_nope_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    }  # fmt: skip
    for architecture in gguf_models._TABLES:
        said = parameters.hyperparameters(decoder, architecture)
        assert len(said) >= 7
        assert {key.replace(architecture, "{arch}", 1) for key in said} <= known
