# SPDX-License-Identifier: Apache-2.0
"""Mistakes of people who try it for the first time: each is answered by one sentence that says what to do instead."""

import re
import shlex
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia import checkpoint
from breccia.cli import main
from breccia.cli.conversion import next_step
from breccia.moments import load_moments, save_moments

Capture = pytest.CaptureFixture[str]
RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 256), dtype=np.float32)  # inputs
W = RNG.standard_normal((64, 256), dtype=np.float32)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a folder model/ with a weight lies, and a text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    checkpoint.save_arrays({"layers.0.up.weight": W}, tmp_path / "model" / "model.safetensors")
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20)
    return tmp_path


def told(words: str, capsys: Capture) -> str:
    """What is said on standard error, of a command that ends with 2."""
    try:
        code = main(words.split())
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2, words
    return capsys.readouterr().err.rstrip()


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("quantize model out", "'quantize' is unknown, did you mean convert?"),
        ("compare model out", "'compare' is unknown, did you mean verify?"),
        ("info model", "'info' is unknown, did you mean inspect?"),
        ("ppl model", "'ppl' is unknown, did you mean evaluate?"),
        ("verify model model --min-sqnr 20dB", "argument --min-sqnr: must be a number, got '20dB'"),
        ("convert model out --to int4 --damp much", "argument --damp: must be a number, got 'much'"),
        ("merge-lora model a b --seed x", "argument --seed: must be a whole number, got 'x'"),
        ("convert model out --to w8a8", "fp8 and int8 are weights of 8 bits, and --activations dynamic is inputs of 8"),
        ("convert model out --to exl2", "ExLlama's files are neither read nor written: gptq and nvfp4 have about 4"),
        ("convert model out --to hqq", "it is not written: int4, with --moments FILE --method gptq, loses less"),
        (
            "convert model out --to iq4_xs",
            "GGUF's IQ types are read and not written, except iq4_nl: gguf:q2_k to gguf:q6_k",
        ),
        ("convert model out --to iq1_s", "gguf:q2_k to gguf:q6_k, with --imatrix FILE, have 2.6 to 6.6 bits"),
        (
            "convert model out --to gguf:iq4_xs",
            "GGUF's IQ types are read and not written, except iq4_nl: gguf:q2_k to gguf:q6_k",
        ),
        ("convert model out --to gguf:q5_k_l", "got 'q5_k_l': did you mean gguf:q5_k?"),
        ("convert model out.gguf --to nvfp4", "GGUF is written by --to gguf:q4_k and its like"),
        ("convert model out.gguf --to nvfp4 --dry-run", "GGUF is written by --to gguf:q4_k and its like"),
        ("convert model/model.safetensors out.gguf --to fp8", "OUT must not end in .gguf with --to fp8, which is safe"),
        ("convert model out.safetensors --to gguf:q8_0", "with --to gguf:q8_0, which is a file of its own kind, got"),
        ("convert model out.safetensors --to nvfp4", "OUT must be a folder, as IN is, got out.safetensors: out.safe"),
        ("convert model out --to int4 --moments text.txt", "that calibrate wrote, text.txt is no such file"),
        ("plan-bits model --moments m --bits 5 --formats q4_k_m", "formats must be a recipe or a format, got 'q4_k_m'"),
        ("inspect text.txt", "its first 8 bytes say that the header has 7163385811044755540 bytes"),
    ],
)
def test_a_command_says_what_is_meant(words: str, answer: str, folder: Path, capsys: Capture) -> None:
    if "plan-bits" in words:
        (folder / "m").write_bytes(b"")
    said = told(words, capsys)
    assert answer in said
    assert len(said.splitlines()) <= 7  # with the usage, where that is short
    assert not (folder / "out").exists() and sorted(p.name for p in folder.iterdir() if p.name[:3] == "out") == []


def test_names_that_are_right_pass(folder: Path) -> None:
    for words in ("model out.gguf --to gguf:q8_0", "model/model.safetensors o.safetensors --to fp8"):
        assert main(["convert", *words.split(), "--quiet"]) == 0
    for out in ("out.safetensors/", "x.gguf/"):  # a folder, as asked
        assert main(["convert", "model", out, "--to", "fp8", "--quiet"]) == 0
        assert (folder / out / "model.safetensors").is_file()


def test_what_is_wrong_is_found_below_a_long_usage(capsys: Capture) -> None:
    said = told("convert a b --to fp8 --threads 0", capsys).splitlines()
    assert said[0] == "usage: breccia convert --help has the options"
    assert said[1:] == ["breccia convert: error: argument --threads: must be a whole number of 1 or more, got '0'"]
    assert told("inspect", capsys).startswith("usage: breccia inspect [-h]")


def test_targets_are_compared_whatever_out_is(folder: Path, capsys: Capture) -> None:
    for out in ("out/", "out.safetensors", "out.gguf"):
        assert main(["convert", "model", out, "--to", "nvfp4,gguf:q8_0", "--dry-run"]) == 0
        said = capsys.readouterr().out.splitlines()
        assert [re.split(r"[ :]+\d|  ", line)[0] for line in said] == ["to", "nvfp4", "gguf:q8_0"]


def test_a_long_next_step_can_be_pasted() -> None:
    command = f"breccia convert {'/long/path' * 3} OUT --to FORMAT --moments {'m' * 30}.safetensors --method gptq"
    lines = next_step(command)
    assert len(lines) == 2 and max(map(len, lines)) <= 80
    assert " ".join("".join(lines).replace("\\", "").split()) == f"next: {command}"
    assert next_step("vllm serve out") == ["next: vllm serve out"]
    assert next_step(f"vllm serve {'x' * 90}") == ["next: vllm serve \\", f"  {'x' * 90}"]  # a path stays whole
    words = shlex.split(" ".join(next_step("vllm serve {out} --model {base}", out="it's *", base="b " * 50)))
    assert [word for word in words if word.strip()] == ["next:", "vllm", "serve", "it's *", "--model", "b " * 50]
    assert next_step("f({out!r})", out="it's *") == ['next: f("it\'s *")']


@pytest.mark.parametrize(
    ("call", "error", "answer"),
    [
        (lambda: breccia.gptq(W, X, "nvfp4"), ValueError, "got shape (16, 256): x.T @ x of the inputs x, not x"),
        (lambda: breccia.gptq(W, X[0, :128], "nvfp4"), ValueError, "for w of shape (64, 256), got shape (128,)"),
        (lambda: breccia.convert, AttributeError, "no attribute 'convert': it is breccia.checkpoint.convert"),
        (lambda: breccia.load_moments, AttributeError, "it is breccia.moments.load_moments"),
        (lambda: breccia.from_pretrained, AttributeError, "module 'breccia' has no attribute 'from_pretrained'"),
    ],
)
def test_python_says_what_is_meant(call: Any, error: type[Exception], answer: str) -> None:
    with pytest.raises(error, match=re.escape(answer)):
        call()


def test_a_file_of_moments_says_how_it_is_opened(tmp_path: Path) -> None:
    diag = np.ones(16, np.float32)
    save_moments({"a": breccia.moments.Moments(diag=diag, count=np.asarray(1, np.int64))}, tmp_path / "m.safetensors")
    opened = load_moments(tmp_path / "m.safetensors")
    assert repr(opened).startswith("breccia.moments.load_moments(")
    assert eval(repr(opened).partition(": moments")[0], {"breccia": breccia}).keys() == {"a"}


def test_torch_says_what_is_meant() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(60, 64))
    for call in (lambda: breccia.quantize_(model, "nvfp4"), lambda: breccia.quantize_layer(model[0], "nvfp4")):
        with pytest.raises(ValueError, match=r"weight cannot be quantized: .* divisible by 16, got") as told:
            call()
        assert "cast w.T" not in str(told.value)  # which is no help to who has a layer
    with pytest.raises(TypeError, match=r"got str: swapped arguments\? quantize_\(model, recipe\)"):
        breccia.quantize_("nvfp4", model)
    for batches in (["a text"], [("a text", "another")], {"input_ids": torch.ones(1, 2)}, "text.txt"):
        with pytest.raises(TypeError, match=r"batches must be tensors or dict.*, got str: the command breccia"):
            breccia.calibrate(model, batches)
    with pytest.raises(TypeError, match="of one number has no length"):
        torch.tensor(breccia.cast(torch.ones(4, 16), "fp8"))
