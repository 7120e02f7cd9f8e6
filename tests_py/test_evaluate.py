# SPDX-License-Identifier: Apache-2.0
"""Checkpoints judged on text and by moments: `evaluate`, `verify --moments` and the command `calibrate`."""

import ast
import errno
import json
import math
import os
import shutil
from pathlib import Path

import breccia
import numpy as np
import pytest
from breccia.checkpoint import convert, save_arrays
from breccia.checkpoint.judging.output_error import output_error
from breccia.checkpoint.judging.verify import verify
from breccia.cli import main
from breccia.moments import Moments, load_moments, save_moments
from tiny_models import random_model, transformers

torch = pytest.importorskip("torch")

WORDS = [f"w{i}" for i in range(317)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A model's folder with a tokenizer of words, and a text of 400."""
    pytest.importorskip("tokenizers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    root = tmp_path_factory.mktemp("evaluate")
    model = random_model("Llama", {})
    model.save_pretrained(root / "model")
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {word: i + 3 for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers().PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(root / "model")
    rng = np.random.default_rng(0)
    (root / "a.txt").write_text(" ".join(rng.choice(WORDS, 250)))
    (root / "b.txt").write_text(" ".join(rng.choice(WORDS, 150)))
    return root


def texts(root):
    return [str(root / "a.txt"), str(root / "b.txt")]


def log_probabilities(folder, rows):
    model = transformers().AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.from_numpy(rows)).logits[:, :-1].double().log_softmax(-1)


def rows_of(root, length=50):
    ids = [WORDS.index(word) + 3 for path in texts(root) for word in Path(path).read_text().split()]
    return np.asarray(ids).reshape(-1, length)


@pytest.mark.parametrize(
    "to", ["nvfp4", "compressed-tensors:nvfp4", "modelopt:nvfp4", "mlx:int4", "gguf:q8_0", "fp8", "int8"]
)
def test_figures_are_those_of_the_dequantized_model(llama, tmp_path, to):
    """Whatever format the weights are in, against transformers and plain formulas."""
    if to.startswith("gguf"):
        pytest.importorskip("gguf")
    out = tmp_path / ("out.gguf" if to.startswith("gguf") else "out")
    convert(llama / "model", out, to)
    report = breccia.evaluate(llama / "model", out, texts(llama), length=50)
    state = {}
    for name, tensor in breccia.load(out).items():
        if isinstance(tensor, np.ndarray):
            array = tensor
        else:  # what no ScaledTensor can say has its own way
            array = tensor.dequantize() if hasattr(tensor, "scaled") else breccia.dequantize(tensor)
        if array.dtype == np.uint16 or array.dtype.name == "bfloat16":
            array = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        state[name] = torch.from_numpy(np.array(array, np.float32))
    model = transformers().AutoModelForCausalLM.from_pretrained(llama / "model", dtype=torch.float32).eval()
    own = {name: state.get(name, value) for name, value in model.state_dict().items()}
    assert not to.startswith("nvfp4") or any(not torch.equal(own[n], v) for n, v in model.state_dict().items())
    model.load_state_dict(own)
    rows = rows_of(llama)
    with torch.no_grad():
        theirs = model(torch.from_numpy(rows)).logits[:, :-1].double().log_softmax(-1)
    ours = log_probabilities(llama / "model", rows)
    target = torch.from_numpy(rows)[:, 1:, None]
    for name, logp in (("reference", ours), ("checkpoint", theirs)):
        wanted = math.exp(-logp.gather(-1, target).mean())
        assert report["perplexity"][name]["value"] == pytest.approx(wanted, rel=1e-4)
    kld = (ours.exp() * (ours - theirs)).sum(-1).flatten()
    for name, wanted in (("mean", kld.mean()), ("median", np.median(kld)), ("p99", np.quantile(kld, 0.99))):
        assert report["kld"][name]["value"] == pytest.approx(float(wanted), rel=1e-3, abs=1e-6)
        assert report["kld"][name]["error"] > 0
    same = (ours.argmax(-1) == theirs.argmax(-1)).double().mean()
    assert report["same_top"]["value"] == pytest.approx(float(same), abs=0.006)
    assert (report["predictions"], report["rows"], report["vocabulary"]) == (8 * 49, 8, 320)
    assert report["bytes"]["checkpoint"] < report["bytes"]["reference"]


def test_a_model_is_no_way_from_itself(llama):
    report = breccia.evaluate(llama / "model", llama / "model", texts(llama), length=50, tokens=90)
    assert report["rows"] == 2
    assert report["kld"]["mean"] == {"value": 0.0, "error": 0.0}
    assert report["same_top"]["value"] == 1.0 and report["perplexity"]["ln_ratio"]["value"] == 0.0


def test_a_model_in_memory_has_the_figures_of_its_files(llama, tmp_path):
    """Of the layers that `quantize_` took, and the bytes that they take; the model is left as it was."""
    convert(llama / "model", tmp_path / "out", "mxfp8")
    options = {"length": 50, "tokens": 90}
    wanted = breccia.evaluate(llama / "model", tmp_path / "out", texts(llama), **options)
    model = transformers().AutoModelForCausalLM.from_pretrained(llama / "model", dtype=torch.float32).train()
    model.model.layers[0].eval()
    breccia.quantize_(model, "mxfp8", exclude=["lm_head"])
    report = breccia.evaluate(llama / "model", model, texts(llama), **options)
    assert all(_close(report[of], wanted[of]) for of in ("kld", "perplexity", "same_top"))
    assert report["kld"]["mean"]["value"] > 0
    assert report["checkpoint"] == "LlamaForCausalLM"
    tables = 2 * 2 * 320 * 128  # bytes that embedding and head take more in float32 than in the files' bfloat16
    forms = sum(part.nbytes for name, part in model.named_buffers() if name.endswith("weight_form"))
    assert 0 < report["bytes"]["checkpoint"] - wanted["bytes"]["checkpoint"] - tables - forms < 4000  # norms
    assert model.training and not model.model.layers[0].training
    with pytest.raises(TypeError, match="checkpoint must be a path"):
        breccia.evaluate(llama / "model", 3, texts(llama), **options)


def _close(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_close(a[key], b[key]) for key in a)
    return a == pytest.approx(b, rel=1e-3, abs=1e-5)


def test_a_few_logits_bound_the_divergence_from_below(llama, tmp_path):
    convert(llama / "model", tmp_path / "out", "mxfp4")
    means = [
        breccia.evaluate(llama / "model", tmp_path / "out", texts(llama), length=50, top_k=k)["kld"]["mean"]
        for k in (1, 32, 319, 320)
    ]
    values = [mean["value"] for mean in means]
    assert 0 < values[0] < values[1] < values[2] <= values[3] * (1 + 1e-6)
    assert values[2] == pytest.approx(values[3], rel=1e-3)


@pytest.mark.parametrize("inputs", ["file", "nvfp4", "fp8", "mxfp8", "int8"])
def test_inputs_are_quantized_on_the_way(llama, tmp_path, inputs):
    """As a file says, with its static scale, or in a format with scales made of them: against casts by hand."""
    batch = {"input_ids": torch.from_numpy(rows_of(llama))}
    found = breccia.calibrate(random_model("Llama", {}).float(), 3 * [batch])
    found.save(tmp_path / "m.safetensors")
    static = {"activations": "local", "amax": tmp_path / "m.safetensors"} if inputs == "file" else {}
    convert(llama / "model", tmp_path / "out", "compressed-tensors:nvfp4", **static)
    options = {"length": 50, "tokens": 100, "activations": inputs}
    report = breccia.evaluate(llama / "model", tmp_path / "out", texts(llama), **options)
    assert report["activations"] == {"inputs": inputs, "layers": 14}
    assert f"inputs          {inputs} of 14 layers" in breccia.evaluation.render(report)
    floats, raw = breccia.load(tmp_path / "out"), breccia.checkpoint.SafetensorsFile(tmp_path / "out/model.safetensors")
    model = transformers().AutoModelForCausalLM.from_pretrained(llama / "model", dtype=torch.float32).eval()
    rows = rows_of(llama)[:2]
    with torch.no_grad():
        ours = model(torch.from_numpy(rows)).logits[:, :-1].double().log_softmax(-1)

    def hook(name, recipe):
        scale = f"{name}.input_global_scale"
        amax = {"amax": 2688 / float(raw[scale].reshape(-1)[0])} if inputs == "file" else {}

        def rounded(_, args):  # rows of one text, as they are evaluated
            each = [breccia.cast(x.numpy(), recipe, **amax).numpy() for x in args[0]]
            return (torch.from_numpy(np.stack(each)),)

        return rounded

    recipe = {"file": "nvfp4", "fp8": breccia.Float8CurrentScaling(granularity="row")}.get(inputs, inputs)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.weight.data = torch.from_numpy(floats[f"{name}.weight"].numpy())
            module.register_forward_pre_hook(hook(name, recipe))
    with torch.no_grad():
        theirs = torch.cat([model(torch.from_numpy(row[None])).logits[:, :-1] for row in rows]).double().log_softmax(-1)
    kld = float((ours.exp() * (ours - theirs)).sum(-1).mean())
    assert report["kld"]["mean"]["value"] == pytest.approx(kld, rel=1e-3)
    plain = breccia.evaluate(llama / "model", tmp_path / "out", texts(llama), length=50, tokens=100)
    assert plain["activations"] == {"inputs": None, "layers": 0}
    assert plain["kld"]["mean"]["value"] != pytest.approx(kld, rel=1e-4)


def test_inputs_of_a_float_model_are_those_that_convert_would_quantize(llama, tmp_path):
    evaluate, text = breccia.evaluate, texts(llama)
    report = evaluate(llama / "model", llama / "model", text, length=50, tokens=50, activations="nvfp4")
    assert report["activations"]["layers"] == 14 and report["kld"]["mean"]["value"] > 0
    convert(llama / "model", tmp_path / "out", "nvfp4")
    with pytest.raises(ValueError, match="out does not say that inputs are quantized"):
        evaluate(llama / "model", tmp_path / "out", text, length=50, activations="file")
    with pytest.raises(ValueError, match="activations must be one of file, nvfp4, fp8, mxfp8, int8, got 'int3'"):
        evaluate(llama / "model", tmp_path / "out", text, length=50, activations="int3")


def test_a_full_disk_is_an_error_before_a_model_runs(llama, tmp_path, monkeypatch):
    """And no signal at a page of the mapped file, which ends the process and leaves the folder."""

    def full(*_):
        raise OSError(errno.ENOSPC, "")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"cannot reserve space for .*log_probabilities: .*, 501,760 bytes: .* --scratch"):
        breccia.evaluate(llama / "model", llama / "model", texts(llama), length=50, folder=tmp_path)
    assert not any(tmp_path.iterdir())


def test_bad_input_is_named(llama, tmp_path):
    evaluate, text = breccia.evaluate, texts(llama)
    arrays = {name: value for name, value in breccia.load(llama / "model").items() if "k_proj" not in name}
    breccia.save(arrays, tmp_path / "less.safetensors")
    with pytest.raises(ValueError, match=r"less.safetensors must have every weight of the model, it lacks .*k_proj"):
        evaluate(llama / "model", tmp_path / "less.safetensors", text, length=50)
    with pytest.raises(ValueError, match=r"reference must be a model's folder with config.json, got "):
        evaluate(tmp_path, llama / "model", text)
    with pytest.raises(ValueError, match="text must have at least one row of 512 tokens, it has 400"):
        evaluate(llama / "model", llama / "model", text)
    with pytest.raises(TypeError, match=r"text must be a list of files, got 'a\.txt'"):
        evaluate(llama / "model", llama / "model", "a.txt")
    with pytest.raises(ValueError, match="length must be 2 or more, got 1"):
        evaluate(llama / "model", llama / "model", text, length=1)
    with pytest.raises(ValueError, match="length must be at most 64, the positions of the model, got 65"):
        evaluate(llama / "model", llama / "model", text, length=65)
    with pytest.raises(ValueError, match="device must be one that torch has here, got 'warp'"):
        evaluate(llama / "model", llama / "model", text, length=50, device="warp")
    with pytest.raises(ValueError, match="dtype must be 'auto' or a type of torch, got 'float33'"):
        evaluate(llama / "model", llama / "model", text, length=50, dtype="float33")
    shutil.copytree(llama / "model", tmp_path / "bare", ignore=shutil.ignore_patterns("*token*"))
    with pytest.raises(ValueError, match="bare must have a tokenizer that transformers reads"):
        evaluate(tmp_path / "bare", llama / "model", text, length=50)
    shutil.copytree(llama / "model", tmp_path / "headless")
    config = json.loads((tmp_path / "headless/config.json").read_text())
    (tmp_path / "headless/config.json").write_text(json.dumps({**config, "architectures": ["LlamaModel"]}))
    with pytest.raises(ValueError, match="reference must be a causal language model, got LlamaModel"):
        evaluate(tmp_path / "headless", llama / "model", text, length=50)
    (tmp_path / "latin").write_bytes(b"\xe9")
    with pytest.raises(ValueError, match="latin must be text in UTF-8"):
        evaluate(llama / "model", llama / "model", [tmp_path / "latin"])


def run(*words, capsys):
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_commands(llama, tmp_path, capsys):
    """calibrate, then convert, then what verify and evaluate say of the result."""
    made = tmp_path / "moments.safetensors"
    text = ["--text", *texts(llama), "--length", "50"]
    code, out, err = run("calibrate", llama / "model", *text, "--tokens", "300", "--out", made, capsys=capsys)
    assert (code, err) == (0, "")
    assert "15 layers, inputs 9 full, 300 tokens" in out and "fewer than 4 K rows" in out
    assert max(map(len, out.splitlines())) <= 80 or str(made) in out
    following = " ".join(out[out.index("next:") :].replace("\\\n", "").split())
    assert following == f"next: breccia convert {llama / 'model'} OUT --to FORMAT --moments {made} --method gptq"
    with load_moments(made) as moments:
        assert len(moments) == 15 and moments["lm_head"].count == 300
        assert len(moments.metadata["model"]) == len(moments.metadata["text_sha256"]) == 64
        assert len(json.loads(moments.metadata["breccia.calibration.output_amax"])) == 4
    assert not made.with_name(f"{made.name}.state").exists()
    code, _, err = run("calibrate", llama / "model", *text, "--out", made, capsys=capsys)
    assert (code, err) == (
        2,
        f"breccia calibrate: {made} is there: --force replaces it (breccia explain out-is-there)\n",
    )
    inside = llama / "model" / "moments.safetensors"
    code, _, err = run("calibrate", llama / "model", *text, "--out", inside, capsys=capsys)
    said = "breccia calibrate: --out must not be in the model's folder, whose safetensors files are its weights"
    assert (code, " ".join(err.split())) == (2, f"{said}, got {inside}")
    assert not inside.exists()
    less = ["--out", made, "--force", "--memory", "12.5KB", "--tokens", "9999", "--json"]
    code, out, _ = run("calibrate", llama / "model", *text, *less, capsys=capsys)
    report = json.loads(out)
    assert code == 0 and report["inputs"]["diag"] > 0 == report["inputs"]["full"]
    assert any("9,999 tokens were asked for, the text has 400" in note for note in report["notes"])
    run("calibrate", llama / "model", *text, "--out", made, "--force", capsys=capsys)

    run("convert", llama / "model", tmp_path / "out", "--to", "nvfp4", capsys=capsys)
    code, out, _ = run("verify", llama / "model", tmp_path / "out", "--moments", made, capsys=capsys)
    assert code == 0 and "output  tensor" in out
    assert "on average, of 15 tensors that have moments" in out
    code, out, _ = run("evaluate", llama / "model", tmp_path / "out", *text, capsys=capsys)
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    for word in ("perplexity", "ln of ratio", "KLD mean", "median", "99 %", "same top token", "bytes", " ± "):
        assert word in out
    code, _, err = run("evaluate", llama, tmp_path / "out", *text, capsys=capsys)
    assert code == 2 and err.startswith("breccia evaluate: REF must be a model's folder") and err.count("\n") == 1
    with pytest.raises(SystemExit, match="2"):
        main(["calibrate", "m", "--text", "t", "--out", "o", "--memory", "much"])
    assert "must be bytes, as 500MB or 8GiB, got 'much'" in capsys.readouterr().err


def test_figures_of_a_broken_model_fit_the_screen():
    broken = {"value": 275715457.228, "error": 153827092.4479}
    whole = {"value": 23.45678, "error": None}
    kld = dict.fromkeys(("mean", "median", "p99"), whole)
    report = {"perplexity": {"checkpoint": broken, "reference": whole, "ln_ratio": whole}, "kld": kld}
    report |= {"bytes": {"checkpoint": 1, "reference": 2}, "same_top": {"value": 0.5, "error": 0.01}}
    report |= {"activations": {"inputs": None, "layers": 0}, "top_k": None, "predictions": 10}
    lines = breccia.evaluation.render(report | {"rows": 1, "length": 11})
    assert lines[0] == "perplexity      2.7572e+08 ± 1.5383e+08"
    assert lines[1] == "  of reference  23.4568 ± unknown"


@pytest.mark.parametrize("experts", [None, 3])
@pytest.mark.parametrize("level", ["diag", "block", "full"])
def test_output_error_is_what_the_inputs_see(level, experts):
    rng = np.random.default_rng(0)
    lead = () if experts is None else (experts,)
    x = rng.normal(size=(*lead, 500, 32)) * np.geomspace(0.01, 10, 32)
    runs = x.reshape(*lead, 500, 2, 16)
    moments = Moments(
        diag=np.sum(x * x, -2).astype(np.float32),
        count=np.full(lead, 500, np.int64),
        block=np.einsum("...tbi,...tbj->...bij", runs, runs).astype(np.float32) if level == "block" else None,
        full=(np.swapaxes(x, -1, -2) @ x).astype(np.float32) if level == "full" else None,
    )
    w = rng.normal(size=(*lead, 40, 32)).astype(np.float32)
    v = w + rng.normal(size=w.shape).astype(np.float32) * np.float32(0.1)

    def energy(rows):
        kept = {"full": np.ones((32, 32)), "diag": np.eye(32), "block": np.kron(np.eye(2), np.ones((16, 16)))}[level]
        second = np.swapaxes(x, -1, -2) @ x * kept
        return np.einsum("...ni,...ij,...nj->...", rows, second, rows).sum()

    found = output_error(w, v, moments)
    assert found == pytest.approx(math.sqrt(energy(w - v) / energy(w)), rel=1e-5)
    if level == "full":
        y = x @ np.swapaxes(w, -1, -2)
        assert found == pytest.approx(np.linalg.norm(x @ np.swapaxes(w - v, -1, -2)) / np.linalg.norm(y), rel=1e-5)
    assert output_error(w, w, moments) == 0.0
    assert math.isnan(output_error(w * 0, v, moments))


def test_verify_has_output_errors_of_what_has_moments(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {f"{name}.weight": rng.normal(size=(32, 64)).astype(np.float32) for name in "abc"}
    save_arrays(arrays, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "mxfp4")
    made = {name: Moments(np.ones(64, np.float32), np.asarray(1, np.int64)) for name in ("a", "b", "other")}
    save_moments(made, tmp_path / "m")
    for moments in (made, tmp_path / "m"):
        report = verify(tmp_path / "a.safetensors", tmp_path / "b.safetensors", moments=moments)
        tensors = {tensor["name"]: tensor for tensor in report["tensors"]}
        assert "output_error" not in tensors["c.weight"]
        for name in ("a.weight", "b.weight"):  # with ones it is the error of the weight
            assert tensors[name]["output_error"] == pytest.approx(10 ** (-tensors[name]["sqnr_db"] / 20), rel=1e-4)
        assert report["output_error"]["tensors"] == 2 and report["output_error"]["unused"] == ["other"]
    with pytest.raises(ValueError, match="moments must be of layers that the reference has, got those of other"):
        verify(tmp_path / "a.safetensors", tmp_path / "b.safetensors", moments={"other": made["other"]})
    wrong = {"a": Moments(np.ones(32, np.float32), np.asarray(1, np.int64))}
    with pytest.raises(ValueError, match=r"moments of a\.weight must have 64 columns, it has \(32,\)"):
        verify(tmp_path / "a.safetensors", tmp_path / "b.safetensors", moments=wrong)


def test_a_state_stays_until_the_moments_are_written(llama, tmp_path, monkeypatch):
    """An error of the disk at the end takes no sums away."""
    from breccia.calibration import Calibration, folder

    monkeypatch.setattr(folder, "_STATE_SECONDS", 0.0)
    monkeypatch.setattr(folder, "_BATCH", 32)
    out, options = tmp_path / "m.safetensors", {"tokens": 128, "length": 32}

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Calibration, "save", full)
        with pytest.raises(OSError, match="No space left"):
            folder.calibrate_folder(llama / "model", texts(llama), out, **options)
    assert (tmp_path / "m.safetensors.state").exists()
    folder.calibrate_folder(llama / "model", texts(llama), out, **options)
    assert not (tmp_path / "m.safetensors.state").exists()
    assert len(load_moments(out)) > 0


def test_an_empty_file_is_no_scheme(tmp_path):
    """As a full disk may leave it."""
    save_arrays({"a.weight": np.ones((64, 64), np.float32)}, tmp_path / "a.safetensors")
    (tmp_path / "plan.toml").write_text("\n")
    with pytest.raises(ValueError, match=r"plan.toml: a scheme's file must have rules or a KV cache, it is empty"):
        convert(tmp_path / "a.safetensors", tmp_path / "b", "compressed-tensors", scheme=tmp_path / "plan.toml")
    assert not (tmp_path / "b").exists()


CODE = """
import pathlib
from transformers import LlamaConfig, LlamaForCausalLM
pathlib.Path({mark!r}).touch()

class Config(LlamaConfig):
    model_type = "own"

class Model(LlamaForCausalLM):
    config_class = Config
"""


@pytest.fixture
def own(llama, tmp_path, monkeypatch):
    """The model in a folder whose config.json names classes of a file in it, and the file that this makes when run."""
    for module in ("transformers.dynamic_module_utils", "transformers.utils.hub", "transformers.utils"):
        monkeypatch.setattr(f"{module}.HF_MODULES_CACHE", str(tmp_path / "modules"), raising=False)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question is asked"))
    folder, mark = tmp_path / "own", tmp_path / "ran"
    shutil.copytree(llama / "model", folder)
    said = json.loads((folder / "config.json").read_text())
    said |= {"model_type": "own", "architectures": ["OwnModel"]}
    said["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (folder / "config.json").write_text(json.dumps(said))
    (folder / "own.py").write_text(CODE.format(mark=str(mark)))
    return folder, mark


@pytest.mark.parametrize("trusted", [False, True])
def test_python_files_of_a_folder_run_by_an_option_alone(own, llama, trusted, tmp_path, capsys):
    """No question is asked; weights of codes go into the folder's class, too."""
    folder, mark = own
    out, option = tmp_path / "m.safetensors", ["--trust-remote-code"] if trusted else []
    rows = ["--text", *texts(llama), "--length", "50", *option]
    convert(llama / "model", tmp_path / "codes", "int8")
    for command in (["calibrate", str(folder), "--out", str(out)], ["evaluate", str(folder), str(tmp_path / "codes")]):
        assert main([*command, *rows]) == (0 if trusted else 2), capsys.readouterr().err
        assert mark.exists() == trusted
        if not trusted:
            assert "which run with trust_remote_code (--trust-remote-code) alone" in capsys.readouterr().err
    assert out.exists() == trusted


def test_every_door_to_transformers_says_whether_code_runs():
    """A call of from_pretrained without trust_remote_code asks on a terminal."""
    silent = []
    for path in Path(breccia.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "from_pretrained":
                text = ast.unparse(call)
                if "trust_remote_code" not in text and "**options" not in text and "**_of(" not in text:
                    silent.append(f"{path}:{call.lineno}: {text}")
    assert not silent
