# SPDX-License-Identifier: Apache-2.0
"""What `breccia convert` says of what it did, would do, or could do."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from breccia import bridges
from breccia.checkpoint import SafetensorsFile, convert, save_arrays, target_names, verify
from breccia.checkpoint.planning.targets import meant, targets
from breccia.cli.conversion import amount
from checkpoints import weight
from test_cli import run
from tiny_models import tiny

NAMES = ("model.embed_tokens.weight", *(f"model.layers.{i}.{name}.weight" for i in (0, 1) for name in ("up", "down")))
SHAPES = {"model.embed_tokens.weight": (512, 256), "model.norm.weight": (256,)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with weights that are harder to quantize from layer to layer."""
    folder = tmp_path / "model"
    folder.mkdir()
    arrays: dict[str, Any] = {name: weight(*SHAPES.get(name, (128, 256))) for name in (*NAMES, "model.norm.weight")}
    arrays["model.layers.1.down.weight"] *= np.exp(3 * np.random.default_rng(0).standard_normal(256)).astype(np.float32)
    save_arrays(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


@pytest.mark.parametrize("to", ["compressed-tensors:nvfp4", "int4", "gguf:q4_k", "mxfp8"])
def test_the_report_says_what_verify_says(to: str, model: Path, tmp_path: Path) -> None:
    out = tmp_path / f"out.{'gguf' if 'gguf' in to else 'd'}"
    report = convert(model, out, to)
    found = {t["name"]: float(t["sqnr_db"]) for t in verify(model, out)["tensors"] if not t["equal"]}
    assert len(found) == report["errors"]["tensors"] == 4
    worst = min(found, key=lambda name: found[name])
    assert report["errors"]["worst"] == worst
    assert report["errors"]["worst_db"] == pytest.approx(found[worst], abs=6e-3)
    assert report["errors"]["median_db"] == pytest.approx(np.median(list(found.values())), abs=6e-3)
    assert report["bytes_read"] == 4 * report["weights"]  # sizes of the tensors, before and after
    if not out.is_file():
        stored = SafetensorsFile(out / "model.safetensors").entries.values()
        assert report["bytes_written"] == sum(entry.nbytes for entry in stored)
        assert report["bits_per_weight"] == pytest.approx(8 * report["bytes_written"] / report["weights"], abs=1e-3)
    again = convert(out, tmp_path / "again.d", "mxfp4")
    assert again["requantized"] is not None or "int4" in to or "gguf" in to
    assert again["errors"]["tensors"] == 4


def test_losses_are_known_after_a_conversion_that_goes_on(model: Path, tmp_path: Path) -> None:
    """What was written before is in the journal, and in what parts say."""
    from breccia.checkpoint import finish, plan

    whole = convert(model, tmp_path / "whole", "nvfp4")["errors"]
    for piece in plan(model, tmp_path / "out", "nvfp4", 3):
        piece.run()
    assert finish(model, tmp_path / "out", "nvfp4")["errors"] == whole


def test_lossless_is_said(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(model, tmp_path / "a", "mxfp4")
    _, out, _ = run("convert", tmp_path / "a", tmp_path / "b", "--to", "mlx:mxfp8", "--quiet", capsys=capsys)
    assert "quantized), lossless in 4 tensors" in " ".join(out.split())
    _, out, _ = run("convert", tmp_path / "a", tmp_path / "c", "--to", "mlx:mxfp8", "--json", capsys=capsys)
    assert json.loads(out)["errors"]["worst_db"] == "inf"


NEXT = {
    "compressed-tensors:nvfp4": "vllm serve",
    "nvfp4": "vllm serve",
    "bf16": "transformers.AutoModelForCausalLM",
    "mlx:int4": "mlx_lm.generate",
    "gguf:q4_k": "breccia verify",  # a model that llama.cpp does not know
    "torchao:int8": "transformers.AutoModelForCausalLM",
    "comfyui:fp8": "breccia verify",  # which opens a file, and not a folder
}


@pytest.mark.parametrize("to", NEXT)
def test_the_last_line_is_the_next_step(
    to: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / f"out.{'gguf' if 'gguf' in to else 'd'}"
    _, said, _ = run("convert", model, out, "--to", to, "--quiet", capsys=capsys)
    last = next_step(said)
    assert last.startswith(f"next: {NEXT[to]}")
    assert str(out) in last
    file = tmp_path / f"out.{'gguf' if 'gguf' in to else 'safetensors'}2"
    _, said, _ = run("convert", model / "model.safetensors", file, "--to", to, "--quiet", capsys=capsys)
    # A file without config.json has no architecture, so that llama.cpp does not open its GGUF.
    alone = {"comfyui:fp8": "copy"}.get(to, "breccia verify")
    assert next_step(said).startswith(f"next: {alone}")


def test_a_gguf_that_llama_cpp_opens_goes_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, said, _ = run("convert", tiny("llama", tmp_path / "m"), tmp_path / "m.gguf", "--to", "gguf:q8_0", capsys=capsys)
    assert next_step(said).startswith("next: llama-server -m")


def test_the_next_step_says_what_it_needs(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for to, needs in (("nvfp4", "breccia installed"), ("modelopt:nvfp4", "")):
        _, said, _ = run("convert", model, tmp_path / to.replace(":", "-"), "--to", to, "--quiet", capsys=capsys)
        assert said.endswith(f"\n  needs: {needs}\n") if needs else "needs:" not in said


def next_step(said: str) -> str:
    """The command near the end of a screen, of 80 columns: what is longer goes on below. After it comes at most what
    it needs."""
    assert all(len(line) <= 80 or " " not in line.strip(" \\") for line in said.splitlines())
    *_, before, last = said.replace(" \\\n ", "").strip().splitlines()
    return before if last.startswith("  needs: ") else last


@pytest.mark.parametrize("to", ["awq", "gptq"])
def test_rounding_to_nearest_is_said(to: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, said, _ = run("convert", model, tmp_path / "a", "--to", to, "--quiet", capsys=capsys)
    assert "rounded to nearest: --moments FILE --method gptq" in said
    _, said, _ = run("convert", model, tmp_path / "b", "--to", to, "--dry-run", capsys=capsys)
    assert "rounded to nearest: --moments FILE --method gptq" in said
    _, said, _ = run("convert", tmp_path / "a", tmp_path / "b", "--to", to, "--quiet", capsys=capsys)
    assert "rounded to nearest" not in said  # the codes of another


@pytest.mark.parametrize("to", ["gguf:q4_k", "compressed-tensors:nvfp4", "bf16"])
def test_a_dry_run_says_what_a_run_does(
    to: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / f"out.{'gguf' if 'gguf' in to else 'd'}"
    planned = convert(model, out, to, dry_run=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    report = convert(model, out, to)
    for key in ("bytes_read", "bytes_written", "tensors", "bits_per_weight", "kept", "to"):
        assert planned[key] == report[key], key
    assert sum(one["nbytes"] for one in planned["plan"]) == report["bytes_written"]
    code, said, _ = run("convert", model, "--to", to, "--dry-run", capsys=capsys)
    assert code == 0
    assert re.search(r"^ +2  128×256  .*  model\.layers\.\*\.up\.weight$", said, re.MULTILINE)
    assert said.endswith("nothing was written\n")
    assert max(map(len, said.splitlines())) <= 80
    code, _, _ = run("convert", model, out, "--to", to, "--dry-run", capsys=capsys)  # it is there
    assert code == 0


def test_dry_runs_are_compared(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = "nvfp4,gguf:q4_k, compressed-tensors:int4-asym,deepseek:mxfp4"
    code, said, _ = run("convert", model, "--to", names, "--dry-run", capsys=capsys)
    assert code == 0
    lines = said.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0].rstrip(":") for line in lines[1:4]] == [
        "nvfp4",
        "gguf:q4_k",
        "compressed-tensors:int4-asym",
    ]
    assert "deepseek:mxfp4: " in said  # refused, and why
    _, said, _ = run("convert", model, "--to", names, "--dry-run", "--json", capsys=capsys)
    plans = json.loads(said)["plans"]
    assert plans[0]["bytes_written"] == convert(model, tmp_path / "out", "nvfp4")["bytes_written"]
    code, _, err = run("convert", model, tmp_path / "x", "--to", "nvfp4,int4", capsys=capsys)
    assert (code, "--to must be one target, or --dry-run given" in err) == (2, True)
    code, _, err = run("convert", model, "--to", "nvfp5,nvfp6", "--dry-run", capsys=capsys)
    assert (code, "did you mean nvfp4?" in err) == (2, True)


def test_the_list_has_every_target_and_its_programs() -> None:
    rows = targets()
    assert [row["name"] for row in rows] == [name for name in target_names() if not bridges_alone(name)]
    for row in rows:
        assert row["bits"] > 2
        assert row["opens_in"], row["name"]


def bridges_alone(name: str) -> bool:
    return name in bridges.registry()


def test_the_list_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    _, said, _ = run("convert", "--to", "list", capsys=capsys)
    assert max(map(len, said.splitlines())) <= 80
    assert "\nawq:                        vLLM, SGLang, transformers with GPTQModel\n  4.19  int4\n" in said
    for row in targets():
        some = re.findall(rf"^ *(\d+\.\d\d)  (?:.*, )?{row['key']}(?:,|$)", said, re.MULTILINE)
        assert any(abs(float(bits) - row["bits"]) <= 0.02 for bits in some), row


@pytest.mark.parametrize(
    ("spelled", "hint"),
    [
        ("q4_k_m", "did you mean gguf:q4_k_m?"),
        ("iq4_nl", "did you mean gguf:iq4_nl?"),
        ("q2_k_s", "did you mean gguf:q2_k?"),
        ("q8_0", "did you mean gguf:q8_0?"),
        ("4bit", "nvfp4, mxfp4 and int4 have about 4 bits a weight"),
        ("int8bit", "fp8, mxfp8 and int8 have about 8 bits"),
        ("w4a16", "nvfp4, mxfp4 and int4"),
        ("nf4", "bitsandbytes' NF4 is read and not written"),
        ("vllm", "it is a program, which opens bf16, awq, compressed-tensors"),
        ("ollama", "it is a program, which opens gguf"),
        ("bfloat16", "did you mean bf16?"),
        ("e4m3", "did you mean fp8"),
        ("nvfp5", "did you mean nvfp4?"),
    ],
)
def test_names_that_people_try(spelled: str, hint: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run("convert", model, model.parent / "x", "--to", spelled, capsys=capsys)
    assert code == 2
    assert hint in err


@pytest.mark.parametrize("name", target_names())
def test_no_target_is_meant_by_another_name(name: str) -> None:
    assert name in meant(name) or not meant(name) or name in bridges.registry()


def test_what_is_not_there_is_named_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    for name, more in (("none", ""), ("Org/Name-7B", "hf download Org/Name-7B --local-dir Name-7B gets it")):
        code, _, err = run("convert", name, "out", "--to", "nvfp4", capsys=capsys)
        assert (code, f"there is no {name}" in err, more in err) == (2, True, True)
    _, _, err = run("convert", "none", "out", "--to", "nvfp4", "--part", "1/2", capsys=capsys)
    assert "there is no none" in err
    _, _, err = run("merge-lora", "none", "adapter", "out", capsys=capsys)
    assert "there is no none" in err
    (tmp_path / "Org").mkdir()  # then it is a path
    _, _, err = run("inspect", "Org/Name-7B", capsys=capsys)
    assert "hf download" not in err


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pth"])
def test_folders_of_pickles_are_told_what_to_do(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(b"x")
    code, _, err = run("convert", tmp_path / "in", tmp_path / "out", "--to", "nvfp4", capsys=capsys)
    assert code == 2
    assert f"but {name}, a pickle" in err
    assert ".save_pretrained('NEW') writes safetensors" in err
    (tmp_path / "in" / "m.gguf").write_bytes(b"x")
    _, _, err = run("convert", tmp_path / "in", tmp_path / "out", "--to", "nvfp4", capsys=capsys)
    assert "name the .gguf file itself" in err


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (5_750_000, "5.75 MB"), (999_600, "1 MB"), (10**15, "1 PB")],
)
def test_amounts(nbytes: int, text: str) -> None:
    assert amount(nbytes) == text
