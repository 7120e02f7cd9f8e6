# SPDX-License-Identifier: Apache-2.0
"""The ``breccia`` command: what it prints, and its exit codes."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia import bridges, recipes
from breccia.checkpoint import SafetensorsFile, convert, doctor, save_arrays, target_names, verify
from breccia.checkpoint.judging.doctor import render
from breccia.cli import demo, main


@pytest.fixture
def model(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    arrays = {f"layers.{i}.weight": rng.normal(0, 0.02, (128, 256)).astype(np.float32) for i in range(2)}
    save_arrays(arrays, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def run(*argv: Any, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main([str(a) for a in argv])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_version_and_module() -> None:
    out = subprocess.run([sys.executable, "-m", "breccia", "--version"], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == f"breccia {breccia.__version__}"


def test_convert_verify_inspect(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("convert", model, tmp_path / "q", "--to", "modelopt:nvfp4", capsys=capsys)
    assert code == 0
    assert "2 cast" in out
    code, out, _ = run("verify", model, tmp_path / "q", capsys=capsys)
    assert code == 0
    assert out.rstrip().endswith("ok")
    code, out, _ = run("verify", model, tmp_path / "q", "--min-sqnr", "40", "--json", capsys=capsys)
    assert code == 1
    assert len(json.loads(out)["failed"]) == 2
    code, out, _ = run("inspect", tmp_path / "q", capsys=capsys)
    assert code == 0
    assert "modelopt nvfp4" in out
    code, out, _ = run("inspect", tmp_path / "q", "--json", capsys=capsys)
    assert json.loads(out)["total"]["formats"] == {"modelopt nvfp4": 2}


def test_convert_says_what_requantizing_lost(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def convert(source: str, made: str, to: str) -> tuple[str, Any]:
        code, out, _ = run("convert", tmp_path / source, tmp_path / made, "--to", to, capsys=capsys)
        assert code == 0
        _, told, _ = run("convert", tmp_path / source, tmp_path / f"{made}2", "--to", to, "--json", capsys=capsys)
        return out, json.loads(told)["requantized"]

    out, lost = convert("model.safetensors", "mxfp4", "mxfp4")
    assert lost is None
    assert "requantize" not in out
    out, lost = convert("mxfp4", "nvfp4", "compressed-tensors:nvfp4")
    assert "requantize: lossless, 2 tensors hold every value that they held" in out
    assert lost == {"tensors": 2, "lossless": 2, "sqnr_db": None}
    out, lost = convert("mxfp4", "int4", "int4")
    assert lost["lossless"] == 0
    a, b = (breccia.open(tmp_path / name) for name in ("mxfp4", "int4"))
    old, new = (np.concatenate([breccia.dequantize(one[f"layers.{i}.weight"]) for i in range(2)]) for one in (a, b))
    old, new = old.astype(np.float64), new.astype(np.float64)
    assert lost["sqnr_db"] == round(10 * np.log10((old**2).sum() / ((old - new) ** 2).sum()), 2)
    assert f"requantize: 0 of 2 tensors lossless, SQNR of the others {lost['sqnr_db']:.1f} dB" in out


def test_json_is_that_of_the_standard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tensor that nothing is lost of has an infinite ratio of signal to noise, for which JSON has no number."""
    source = tmp_path / "model.safetensors"
    rng = np.random.default_rng(0)
    arrays = {"exact.weight": rng.choice([0.0, 1.0, 2.0], (128, 256)), "zeros.weight": np.zeros((128, 256))}
    save_arrays({name: array.astype(np.float32) for name, array in arrays.items()}, source)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    run("convert", source, tmp_path / "q", "--to", "mxfp8", capsys=capsys)
    for command in (
        ("report", tmp_path / "q", "--reference", source, "--html", tmp_path / "p.html"),
        ("verify", source, tmp_path / "q"),
        ("inspect", tmp_path / "q"),
    ):
        code, out, _ = run(*command, "--json", capsys=capsys)
        assert code == 0
        said = json.loads(out, parse_constant=refuse)
        if command[0] == "verify":
            assert {row["sqnr_db"] for row in said["tensors"]} == {"inf"}
        if command[0] == "report":
            tensors = [one["row"] for layer in said["layers"] for one in layer["tensors"]]
            assert {row["sqnr_db"] for row in tensors} == {"inf"}


def test_targets_are_listed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("convert", model, "none", "--to", "list", "--json", capsys=capsys)
    assert code == 0
    rows = {row["name"]: row for row in json.loads(out)}
    assert set(rows) >= {name for name in target_names() if ":" in name}
    assert (rows["compressed-tensors:nvfp4"]["bits"], rows["gguf:q6_k"]["opens_in"]) == (4.5, ["llama.cpp"])


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("doctor", "--json", capsys=capsys)
    assert code == 0
    report = json.loads(out)
    assert report["cpu"]["backend"] == breccia.cpu_info()["backend"]
    assert report["peers"]["numpy"] == np.__version__
    assert run("doctor", capsys=capsys)[1].startswith(f"breccia {breccia.__version__}")


@pytest.mark.parametrize("way", ["callback", "ffi"])
def test_doctor_says_how_compiled_code_of_jax_calls_the_core(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRECCIA_XLA", "callback" if way == "callback" else "")
    if way == "ffi" and not hasattr(breccia._core, "xla_handlers"):
        pytest.skip("built without jaxlib's headers")
    assert doctor()["jit_of_jax"] == way
    assert f"({way}) on a CPU" in render(doctor())


def test_doctor_names_the_backends_that_a_build_left_out() -> None:
    report = doctor()
    report["cpu"] |= {"backend": "avx2", "supported": ["portable", "avx2"], "left_out": []}
    assert "left out" not in render(report)
    report["cpu"]["left_out"] = ["avx512", "avx512_bf16"]
    assert "this build left out avx512, avx512_bf16: BRECCIA_BACKENDS" in " ".join(render(report).split())


@pytest.mark.parametrize("command", ["inspect", "report"])
def test_errors_are_one_line(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 20)
    code, out, err = run(command, tmp_path / "bad.safetensors", "--json", capsys=capsys)
    assert code == 2
    assert "file must be in the format of safetensors or GGUF" in json.loads(out)["error"]
    assert err.startswith(f"breccia {command}: ")
    assert len(err.splitlines()) == 1


def test_every_command_has_json() -> None:
    for command in ("demo", "convert", "merge-lora", "inspect", "verify", "calibrate", "evaluate", "report", "doctor"):
        out = subprocess.run(
            [sys.executable, "-m", "breccia", command, "--help"], capture_output=True, text=True, check=True
        )
        assert "--json" in out.stdout


# --- screens ------------------------------------------------------------------------------------------------------


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Layers that are alike, with names that are long."""
    rng = np.random.default_rng(0)
    arrays = {
        f"model.language_model.layers.{i}.self_attention.{part}.weight": rng.normal(0, 0.02, (32, 64)).astype(
            np.float32
        )
        for i in range(12)
        for part in ("query", "dense")
    }
    arrays["model.embed_tokens.weight"] = rng.normal(0, 1, (64, 64)).astype(np.float32)
    save_arrays(arrays, tmp_path / "many.safetensors")
    return tmp_path / "many.safetensors"


def test_screens_fit_80_columns(
    many: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run("convert", many, tmp_path / "q.safetensors", "--to", "mxfp8", "--quiet", capsys=capsys)
    broken(many, tmp_path / "broken.safetensors")
    commands = [
        ["verify", many, tmp_path / "q.safetensors"],
        ["verify", many, tmp_path / "broken.safetensors"],
        ["verify", "--complete", tmp_path / "broken.safetensors"],
        ["inspect", tmp_path / "q.safetensors"],
        ["inspect", tmp_path / "q.safetensors", "--all"],
        ["doctor"],
        ["convert", many, "r.safetensors", "--to", "fp8"],
        ["convert", many, f"{'long' * 15}.safetensors", "--to", "fp8"],
        ["demo", "--limit", 1],
        ["demo", "--weights", many, "--limit", 2],
    ]
    for command in commands:
        code, out, _ = run(*command, capsys=capsys)
        assert code == ("broken.safetensors" in str(command[-1]))
        lines = [line for line in out.splitlines() if "/" not in line]  # a command may hold paths of any length
        assert max(map(len, lines)) <= 80, command


def broken(path: Path, to: Path) -> None:
    """A checkpoint of which one tensor is missing, one is zero, one is not a number and one is half of itself."""
    arrays = {name: value.copy() for name, value in SafetensorsFile(path).items()}
    missing, zero, bad, half = sorted(arrays)[:4]
    del arrays[missing]
    arrays[zero] *= 0
    arrays[bad][0, 0] = np.nan
    arrays[half] *= 0.5
    save_arrays(arrays, to)


def test_help_fits_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    screen = capsys.readouterr().out
    commands = re.findall(r"^ {4}([a-z-]+)", screen, re.MULTILINE)
    assert "plan-bits" in commands and max(map(len, screen.splitlines())) <= 80
    for command in commands:
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 80, command


@pytest.mark.parametrize(
    "options",
    [
        ["--to", "modelopt:nvfp4", "--kv", "FP8"],
        ["--to", "compressed-tensors:fp8", "--activations", "Dynamic"],
        ["--to", "nvfp4", "--scale-search", "MSE", "--method", "Nearest"],
        ["--to", "INT4", "--group-size", "AUTO", "--unmarked", "ComfyUI"],
    ],
    ids=" ".join,
)
def test_words_of_options_are_taken_in_any_case(tmp_path: Path, options: list[str]) -> None:
    save_arrays({"up_proj.weight": np.ones((16, 128), np.float32)}, tmp_path / "in.safetensors")
    files = [str(tmp_path / "in.safetensors"), str(tmp_path / "out.safetensors")]
    assert main(["convert", *files, *options, "--quiet"]) == 0


def test_inspect_joins_layers_that_are_alike(many: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run("inspect", many, capsys=capsys)
    lines = out.splitlines()
    assert lines[0].split() == ["count", "shape", "bits", "format", "name"]
    assert out.count("model.language_model.layers.*.self_attention") == 2
    assert [line.split()[0] for line in lines[1:] if line.lstrip()[:1].isdigit()][:3] == ["1", "12", "12"]
    _, out, _ = run("inspect", many, "--all", capsys=capsys)
    assert out.count(".self_attention.query.weight") == 12
    _, out, _ = run("inspect", many, "--summary", capsys=capsys)
    assert out.startswith("25 tensors in 1 file: ")


def test_demo_has_every_recipe() -> None:
    """That of delayed scaling has the codes of "FP8 per tensor" until it has a history."""
    shown = {type(recipe) for recipe in demo.RECIPES.values()}
    assert shown == set(recipes.all_recipes()) - {breccia.DelayedScaling}


def test_demo_takes_a_directory(many: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("demo", "--weights", many.parent, "--limit", 3, "--json", capsys=capsys)
    assert (code, json.loads(out)["tensors"]) == (0, 3)


def test_targets_are_listed_without_paths(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("convert", "--to", "list", capsys=capsys)
    assert code == 0
    assert {"fp8-block", "nvfp4", "modelopt:", "q6_k", "llama.cpp"} <= {word.strip(",") for word in out.split()}
    code, _, err = run("convert", "--to", "nvfp4", capsys=capsys)
    assert (code, err) == (2, "breccia convert: IN and OUT must be given, except with --to list\n")


def test_json_may_stand_before_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("--json", "doctor", capsys=capsys)
    assert code == 0
    assert json.loads(out)["breccia"] == breccia.__version__


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspcet", "x"], "argument COMMAND: 'inspcet' is unknown, did you mean inspect?"),
        (["convert", "a", "b", "--to", "fp8", "--scale-search", "msee"], "'msee' is unknown, did you mean mse?"),
        (
            ["bake"],
            "'bake' is unknown, known are convert, merge-lora, inspect, verify, calibrate, plan-bits, evaluate, "
            "report, explain, doctor, demo",
        ),
    ],
)
def test_a_word_that_is_no_choice_gets_the_close_ones(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert capsys.readouterr().err.rstrip().endswith(message)


@pytest.mark.parametrize("argv", [["demo", "--limit", "0"], ["convert", "a", "b", "--to", "nvfp4", "--threads", "-1"]])
def test_counts_are_counts(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert "must be a whole number of 1 or more, got" in capsys.readouterr().err


def test_doctor_says_what_to_install(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from breccia.checkpoint import doctor

    module = sys.modules[doctor.__module__]
    known = module._version
    monkeypatch.setattr(module, "_version", lambda name: None if name == "torchao" else known(name))
    _, out, _ = run("doctor", capsys=capsys)
    assert "pip install 'breccia[torchao]'" in out
    assert "pip install . in its repository: as yet pip install breccia fetches 0.1.3" in " ".join(out.split())
    assert "memory " in out
    assert "GPUs " in out


def test_terminals_that_know_ascii_alone(model: Path) -> None:
    command = [sys.executable, "-m", "breccia", "inspect", str(model)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    assert "128x256" in out


@pytest.mark.parametrize("option", ["--include", "--exclude"])
def test_patterns_that_match_nothing(option: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run("convert", model, model.parent / "q", "--to", "nvfp4", option, "layer.*", capsys=capsys)
    assert code == 2
    assert f"{option} 'layer.*' must match the name of a tensor, it matches none of 2, such as 'layers.0.weight'" in err
    assert not (model.parent / "q").exists()


@pytest.mark.parametrize("options", [["int4", "--group-size", "7"], ["int4:7"], ["gptq:int4", "--group-size", "48"]])
def test_a_group_size_that_divides_nothing(
    options: list[str], many: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run("convert", many, tmp_path / "q.safetensors", "--to", *options, capsys=capsys)
    size = options[-1].rpartition(":")[2]
    assert (code, err) == (
        2,
        f"breccia convert: group size must divide the columns of a tensor, {size} divides those of none: "
        "'model.language_model.layers.0.self_attention.dense.weight' has 64 (breccia explain group-size-refused)\n",
    )
    assert list(tmp_path.iterdir()) == [many]


def test_notes_leave_room_on_the_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """14 kinds of tensors that do not fit, in 3 layers each, one alone, and one that does."""
    narrow = np.ones((32, 40), np.float32)
    arrays = {f"layers.{i}.{kind}.weight": narrow for i in range(3) for kind in "abcdefghijklmn"}
    save_arrays({"alone.weight": narrow, **arrays, "fits.weight": np.ones((32, 64), np.float32)}, tmp_path / "odd")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd").rename("odd.safetensors")
    words = ("convert", "odd.safetensors", "q.safetensors", "--to", "int4:32")
    code, out, _ = run(*words, "--quiet", capsys=capsys)
    assert code == 0
    assert out.startswith(
        "! alone.weight: left as it is: int4 has blocks of 32, which do not divide its 40\n  columns\n"
    )
    assert out.count("! 3 × layers.*.") == 11
    assert out.count("left as it is") == 12
    assert "! and 3 more, which --json has\n" in out
    assert max(map(len, out.splitlines())) <= 80
    _, out, _ = run(*words, "--force", "--json", capsys=capsys)
    assert len([note for note in json.loads(out)["notes"] if "left as it is" in note]) == 43


def test_options_that_many_commands_have_are_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever works for long is told to be quiet, and what makes a file to replace one, in the same words."""
    commands = ("convert", "merge-lora", "verify", "calibrate", "plan-bits", "evaluate", "report")
    texts = {}
    for command in commands:
        with pytest.raises(SystemExit, match=r"^0$"):
            run(command, "--help", capsys=capsys)
        texts[command] = " ".join(capsys.readouterr().out.split())
        assert "--quiet draw no progress bar" in texts[command], command
    assert [c for c in commands if "--threads N threads to use (default: one per core)" in texts[c]] == [*commands[:2]]
    assert [c for c in commands if "--force replace " in texts[c]] == [c for c in commands if "--force" in texts[c]]


def test_the_command_alone_helps(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys=capsys)
    assert (code, out) == (2, "")
    assert "Start with 'breccia demo' or 'breccia inspect PATH'" in err


def test_a_file_of_another_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.html"
    path.write_text("<!DOCTYPE html>")
    code, _, err = run("inspect", path, capsys=capsys)
    number = int.from_bytes(b"<!DOCTYP", "little")
    assert (code, err) == (
        2,
        f"breccia inspect: {path}: file must be in the format of safetensors or GGUF: its first 8 bytes say that the "
        f"header has {number} bytes (breccia explain not-a-checkpoint)\n",
    )


def test_a_header_cut_short(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = model.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    path = tmp_path / "cut.safetensors"
    path.write_bytes(whole[:20])
    code, _, err = run("inspect", path, capsys=capsys)
    assert (code, err) == (
        2,
        f"breccia inspect: {path}: header must have {length} bytes, as the first 8 say: the file is truncated, it "
        f"needs {8 + length} bytes or more and has 20\n",
    )


def test_what_is_kept_is_said(many: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("convert", many, tmp_path / "a.safetensors", "--to", "nvfp4", "--quiet", capsys=capsys)
    assert code == 0
    assert "37% of the bytes are weights kept as they were, the largest:\n  model.embed_tokens.weight\n" in out
    _, out, _ = run("convert", many, tmp_path / "b.safetensors", "--to", "nvfp4", "--include", "*", capsys=capsys)
    assert "kept as they were" not in out
    assert (tmp_path / "b.safetensors").stat().st_size < (tmp_path / "a.safetensors").stat().st_size


def test_embeddings_that_no_program_loads_are_not_advised(
    many: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Formats whose readers take linear layers alone: asked for by name, they are written, and it is said."""
    reason = "embeddings have no form in {} that a program loads"
    for name, bridge in bridges.registry().items():
        if not bridge.writes or "nvfp4" not in bridge.recipes:
            continue
        words = ("convert", many, "--to", "nvfp4" if name == bridges.OWN else f"{name}:nvfp4", "--dry-run")
        _, out, _ = run(*words, capsys=capsys)
        assert (f"  {reason.format(name)}\n" in out) != bridge.readers.embeddings, name
        kind = "q8_0" if name == "gguf" else "int8"
        offer = "--include '*'" if name == bridges.OWN else f"are the embedding: --embeddings {kind} saves 8.19 kB"
        assert (offer in out) == bridge.readers.embeddings, name
        if bridge.readers.embeddings:
            _, out, _ = run(*words, "--embeddings", kind, capsys=capsys)
            assert "kept as they were" not in out and "are the embedding" not in out, name
        _, out, _ = run(*words, "--include", "*", "--json", capsys=capsys)
        noted = [note for note in json.loads(out)["notes"] if reason.format(name) in note]
        assert noted == [f"model.embed_tokens.weight: quantized as asked, but {reason.format(name)}"] * (
            not bridge.readers.embeddings
        ), name


def test_not_into_its_own_source(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run("convert", model.parent, model.parent / "q", "--to", "nvfp4", capsys=capsys)
    assert code == 2
    assert "OUT must not be inside of the source" in err
    code, _, err = run("convert", model, model, "--to", "nvfp4", capsys=capsys)
    assert (code, err) == (2, f"breccia convert: OUT must not replace the source {model}, got {model}\n")


def test_force_replaces_an_output(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "q.safetensors"
    run("convert", model, out, "--to", "mxfp8", capsys=capsys)
    before = out.read_bytes()
    code, _, err = run("convert", model, out, "--to", "bf16", capsys=capsys)
    assert (code, out.read_bytes()) == (2, before)
    assert (
        err == f"breccia convert: OUT must not be there, {out} is: --force replaces it (breccia explain out-is-there)\n"
    )
    code, _, err = run("convert", model, out, "--to", "no-such-format", "--force", capsys=capsys)
    assert (code, out.read_bytes()) == (2, before)
    code, _, _ = run("convert", model, out, "--to", "bf16", "--force", capsys=capsys)
    assert code == 0
    assert out.read_bytes() != before
    for option in (["--finish"], ["--part", "1/2"]):
        code, _, err = run("convert", model, out, "--to", "bf16", "--force", *option, capsys=capsys)
        assert code == 2
        assert err == "breccia convert: --force must be left out with --part and --finish: remove OUT before\n"


class Terminal(io.StringIO):
    encoding = "ascii"

    def isatty(self) -> bool:
        return True


def test_long_work_shows_how_far_it_is(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal, and on nothing else; not where JSON was asked for or it was to be quiet."""
    q = tmp_path / "q.safetensors"
    commands: list[list[str | Path]] = [
        ["convert", many, q, "--to", "nvfp4"],
        ["verify", many, q],
        ["report", q, "--reference", many, "--html", tmp_path / "p.html"],
    ]
    for command in commands:
        monkeypatch.setattr(sys, "stderr", Terminal())
        assert main([str(word) for word in command]) == 0
        drawn = sys.stderr.getvalue()
        assert re.search(r"\r#{24} 100% +[\d.]+ MB/s  0:00:00 left \n$", drawn), command
        assert max(map(len, re.split(r"[\r\n]", drawn))) <= 80
    for quiet in (
        ["convert", many, tmp_path / "r.safetensors", "--to", "fp8", "--quiet"],
        ["verify", many, q, "--json"],
    ):
        monkeypatch.setattr(sys, "stderr", Terminal())
        assert main([str(word) for word in quiet]) == 0
        assert sys.stderr.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert len(list(breccia.open(q, progress=True))) == 25
    assert " 100% " in sys.stderr.getvalue()
    capsys.readouterr()


def shell(line: str, *words: Any) -> subprocess.CompletedProcess[str]:
    """A command by a shell, in which ``breccia`` is the command of this package, and $1 … are words."""
    script = f"breccia() {{ '{sys.executable}' -m breccia \"$@\"; }}; {line}"
    path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/bin", "/bin"))  # where the shell and its tools are
    return subprocess.run(
        [shutil.which("bash", path=path) or "bash", "-c", script, "bash", *map(str, words)],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


FULL = "breccia: standard output cannot be written: No space left on device\n"
TO_ALL = ("convert --quiet $1 $2/out --to nvfp4", "verify --json $1 $3", "inspect $1")  # others try two of them
STREAMS = {
    ">/dev/full": FULL,
    ">&-": "",
    "2>&-": "",
    ">&- 2>&-": "",
    "<&- >&- 2>&-": "",
    "| true": "",
    "2>/dev/full": "",
}
COMMANDS = {
    "convert --quiet $1 $2/out --to nvfp4": 0,
    "convert --json $1 $2/out --to nvfp4": 0,
    "convert $1 $2/out --to nvfp4": 0,
    "convert --quiet $1 $2/out --to nonsense": 2,
    "convert --json --quiet $1 $2/out --to nonsense": 2,
    "convert --to list": 0,
    "inspect $1": 0,
    "inspect --json $1": 0,
    "inspect nowhere": 2,
    "verify $1 $1": 0,
    "verify $1 $3": 1,
    "verify --json $1 $3": 1,
    "verify --complete $1": 0,
    "convert": 2,
    "--help": 0,
    "--version": 0,
    "": 2,
}


@pytest.mark.in_turn
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no stream that is always full")
@pytest.mark.parametrize("command", COMMANDS)
def test_streams_that_take_nothing_change_no_exit_code(command: str, model: Path, tmp_path: Path) -> None:
    """What is done decides: closed, full, and given up by who reads."""
    other = tmp_path / "other.safetensors"
    save_arrays({f"layers.{i}.weight": np.ones((128, 256), np.float32) for i in range(2)}, other)
    tried = [one for one in STREAMS.items() if command in TO_ALL or one[0] in (">/dev/full", ">&- 2>&-")]
    for number, (stream, says) in enumerate(tried):
        folder = tmp_path / str(number)
        folder.mkdir()
        done = shell(f"set -o pipefail; breccia {command} {stream}", model, folder, other)
        assert done.returncode == COMMANDS[command], (stream, done)
        assert (folder / "out").is_file() == (COMMANDS[command] == 0 and "$2" in command), stream
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, (stream, done)
        wanted = COMMANDS[command] != 2 and says
        assert not wanted or done.stderr.endswith(says), (stream, done)


def test_streams_that_are_none_or_closed_change_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of programs without a console."""
    closed = io.StringIO()
    closed.close()
    for number, stream in enumerate((None, closed)):
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        assert main(["convert", str(model), str(tmp_path / f"q{number}"), "--to", "nvfp4"]) == 0
        assert main(["verify", str(model), str(tmp_path / f"q{number}")]) == 0
        assert main(["inspect", str(tmp_path / "nowhere")]) == 2
        assert sys.stdout is stream
        made = tmp_path / f"r{number}"
        assert convert(model, made, "nvfp4", progress=True)["tensors"] == {"cast": 2}
        assert verify(model, made, progress=True)["ok"]
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("line", "word"),
    [("breccia conv", "convert"), ("breccia convert --excl", "--exclude"), ("breccia verify --min", "--min-sqnr")],
)
def test_shells_complete_words(line, word, tmp_path):
    """As bash, zsh and fish ask by argcomplete."""
    pytest.importorskip("argcomplete")
    asked = {
        "_ARGCOMPLETE": "1",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_STDOUT_FILENAME": "out",
    }
    command = [sys.executable, "-m", "breccia"]
    subprocess.run(command, cwd=tmp_path, env=os.environ | asked, check=True)
    assert word in (tmp_path / "out").read_text()


@pytest.mark.parametrize(
    ("command", "wrong", "meant"), [("convert", "--excludes", "--exclude"), ("inspect", "--sumary", "--summary")]
)
def test_a_mistyped_option_is_answered_with_the_near_one(command, wrong, meant, capsys):
    with pytest.raises(SystemExit) as left:
        main([command, "a", *(["b", "--to", "nvfp4"] if command == "convert" else []), f"{wrong}=x"])
    assert left.value.code == 2
    assert f"error: {wrong} is unknown, did you mean {meant}?" in capsys.readouterr().err


def test_the_command_names_options_where_functions_name_arguments(tmp_path, capsys):
    model = tmp_path / "a.safetensors"
    save_arrays({"w.weight": np.ones((64, 64), np.float32)}, model)
    told = {
        ("convert", model, "b", "--to", "nvpf4"): "--to must be a recipe or a format, got 'nvpf4': did you mean nvfp4?",
        (
            "convert",
            model,
            "b",
            "--to",
            "int4",
            "--moments",
            "no",
        ): "--moments must be a file or a directory, there is no no",
        (
            "convert",
            "https://hub/a",
            "b",
            "--to",
            "int4",
        ): "IN must be a file or a directory, there is no https:/hub/a: a URL is",
        ("verify", model, model, "--moments", "no"): "--moments must be a file or a directory, there is no no: breccia",
        ("verify", model, "no"): "B must be a file or a directory, there is no no",
    }
    for words, sentence in told.items():
        assert main([*map(str, words)]) == 2
        assert f"breccia {words[0]}: {sentence}" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"^to must be a recipe or a format, got 'nvpf4'"):
        breccia.checkpoint.convert(model, "b", "nvpf4")
    with pytest.raises(
        FileNotFoundError, match=r"^moments must be a file or a directory, there is no no: breccia calibrate makes one$"
    ):
        breccia.checkpoint.convert(model, "b", "int4", moments="no")
