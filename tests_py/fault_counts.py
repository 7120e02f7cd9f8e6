# SPDX-License-Identifier: Apache-2.0
"""Kills every command that takes long, and has its calls of the disk fail, so many times each, and counts what became
of the output: `python fault_counts.py [--kills 500] [--errors 500] [--verbs convert,parts]` prints a line of JSON for
each verb. Half of the kills come before a call that changes the disk, the others at random moments. An error comes once
or stays; it is one of writing or of reading.

After each fault the output is absent or complete. The same command again ends well, with the bytes of a run that was
let alone; it writes no file of weights again that was complete, and leaves nothing behind. Run as a process of its own,
which forks for every run and has no other thread."""

import argparse
import contextlib
import errno
import importlib
import io
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import breccia
import flushes  # noqa: F401 (a kill takes nothing from what the system has)
import numpy as np
from breccia.checkpoint import save_arrays
from breccia.checkpoint.files import disk
from breccia.checkpoint.files.input_file import InputFile
from breccia.cli import main
from fault_runner import tree

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.ESTALE, errno.ETIMEDOUT)
WORDS = [f"w{i}" for i in range(317)]
NAMES = [f"model.layers.{i}.{part}" for i in range(3) for part in ("self_attn.q_proj", "self_attn.o_proj")]


def commands(source: Path, out: Path) -> dict[str, list[list[str]]]:
    """What each verb runs, one after the other."""
    model, text = str(source / "model"), str(source / "text.txt")
    moments = ["--moments", str(source / "moments.safetensors")]
    convert = ["convert", model, str(out), "--threads", "1", "--to"]
    parts = [*convert, "nvfp4"]
    tokens = ["--tokens", "160", "--length", "32"]
    folder = ["--scratch", str(out.parent)]
    return {
        "convert": [[*convert, "compressed-tensors:nvfp4"]],
        "convert, GPTQ": [[*convert, "compressed-tensors:int4", *moments, "--method", "gptq"]],
        "convert, GGUF": [["convert", str(source / "one.safetensors"), str(out), "--to", "gguf:q4_k"]],
        "convert, ONNX": [["convert", str(source / "one.onnx"), str(out), "--to", "onnx:int8"]],
        "merge-lora": [["merge-lora", model, str(source / "adapter"), str(out)]],
        "parts": [[*parts, "--part", f"{i}/3"] for i in (1, 2, 3)] + [[*parts, "--finish"]],
        "plan-bits": [["plan-bits", model, *moments, "--bits", "6", "--out", str(out)]],
        "plot": [["plot", str(source / "small"), "--reference", model, "--out", str(out)]],
        "calibrate": [["calibrate", model, "--text", text, "--out", str(out), *tokens]],
        "evaluate": [["evaluate", model, str(source / "small"), "--text", text, *tokens, *folder, "--json"]],
        "rederive": [["verify", model, str(source / "small"), "--rederive", "--json"]],
    }


def make(folder: Path) -> Path:
    """What the commands read: a model of transformers with a tokenizer and text, its moments, an adapter, a quantized
    one, a file of safetensors and one of ONNX."""
    import onnx
    from tiny_models import random_model, transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    rng = np.random.default_rng(0)
    model = folder / "model"
    random_model("Llama", {"num_hidden_layers": 3}).save_pretrained(model, max_shard_size="400KB")
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {word: i + 3 for i, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers().PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(model)
    (folder / "text.txt").write_text(" ".join(rng.choice(WORDS, 200)))
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        words_of = ["--text", str(folder / "text.txt"), "--length", "32"]
        main(["calibrate", str(model), *words_of, "--out", str(folder / "moments.safetensors")])
    pairs = {f"base_model.model.{name}.lora_{ab}.weight": rng.normal(0, 0.05, shape).astype(np.float32)
             for name in NAMES for ab, shape in (("A", (4, 128)), ("B", (128, 4)))}  # fmt: skip
    (folder / "adapter").mkdir()
    save_arrays(pairs, folder / "adapter" / "adapter_model.safetensors", {"format": "pt"})
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"]}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(said))
    weights = {f"layers.{i}.weight": rng.standard_normal((64, 256), dtype=np.float32) for i in range(3)}
    save_arrays(weights, folder / "one.safetensors")
    breccia.checkpoint.convert(model, folder / "small", "nvfp4")
    floats = [onnx.numpy_helper.from_array(array.T.copy(), name) for name, array in weights.items()]
    kinds = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, size])
             for name, size in (("x", 256), ("y", 64))]  # fmt: skip
    nodes = [onnx.helper.make_node("MatMul", ["x", name], ["y" if i == 0 else f"y{i}"])
             for i, name in enumerate(weights)]  # fmt: skip
    graph = onnx.helper.make_graph(nodes, "g", kinds[:1], kinds[1:], floats)
    onnx.save(onnx.helper.make_model(graph), folder / "one.onnx")
    return folder


class Verb:
    """One verb at work in a folder of its own; ``counts`` says what became of its runs."""

    def __init__(self, name: str, source: Path, folder: Path, seed: int) -> None:
        self.name, self.folder, self.counts = name, folder, Counter[str]()
        self.source = source
        folder.mkdir()
        self.out, self.said = folder / ("out.html" if name == "plot" else "out"), folder.with_name(f"{name}.said")
        self.commands = commands(source, self.out)[name]
        self.before = tree(source)
        self.random = random.Random(seed)
        calls = self.child(None, note=True)
        assert calls[0] == 0, f"{name} fails without a fault: {calls[2]}"
        self.seconds, self.calls = calls[1], json.loads(self.said.read_text())
        self.steps: dict[str, list[int]] = {kind: [] for kind in ("read", "change")}
        self.wanted = tree(self.out)
        assert self.wanted is not None and not self.left(), (name, self.left())
        self.clear()

    def left(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path != self.out)

    def clear(self) -> None:
        shutil.rmtree(self.folder)
        self.folder.mkdir()

    def run(self) -> None:
        for command in self.commands:
            shown = io.StringIO()
            with contextlib.redirect_stdout(shown):
                code = main(command)
            if code:
                raise SystemExit(code)
            if "--json" in command:  # what a script would keep of it
                report = json.loads(shown.getvalue())
                report.pop("seconds", None)
                self.said.with_suffix(".json").write_text(json.dumps(report))
                self.said.with_suffix(".json").rename(self.out)

    def child(self, hook: Callable[[str], None] | None, kill: float | None = None, note: bool = False) -> Any:
        """Run it in a process of its own; ``hook`` is called before each change of the disk and each reading. Gives the
        exit code, seconds, and what it said. With ``note`` the calls are noted."""
        start, log = time.monotonic(), self.said.with_suffix(".log")
        child = os.fork()
        if not child:
            status = 1
            with log.open("w") as file:
                os.dup2(file.fileno(), 2)
                try:
                    seen: list[tuple[str, str]] = []
                    self.watch(seen, hook)
                    self.run()
                    status = 0
                except SystemExit as ended:
                    status = int(str(ended.code))
                except BaseException:
                    import traceback

                    traceback.print_exc()
                finally:
                    disk.before = None
                    if note:
                        self.said.write_text(json.dumps(seen))
                    file.flush()
                    os._exit(status)
        if kill is not None:
            time.sleep(kill)
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code, time.monotonic() - start, log.read_text()

    def watch(self, seen: list[tuple[str, str]], hook: Callable[[str], None] | None) -> None:
        def before(what: str, path: Path) -> None:
            seen.append((what, str(path)))
            if hook is not None:
                hook("read" if what == "read" else "change")

        fill = InputFile._fill

        def reading(file: InputFile, view: memoryview, start: int) -> None:
            before("read", file.path)
            fill(file, view, start)

        disk.before = before
        InputFile._fill = reading  # type: ignore[method-assign]

    def complete(self) -> dict[Path, int]:
        """Complete files of weights that are not under their last name, and directories of complete parts."""
        there = [
            p for p in self.folder.rglob("*.safetensors") if not p.name.startswith(".") and self.out not in p.parents
        ]
        return {path: path.stat().st_mtime_ns for path in there}

    def look(self) -> None:
        assert tree(self.out) in (None, self.wanted), "the output is neither absent nor complete"

    def again(self, kept: dict[Path, int]) -> None:
        complete = not kept and tree(self.out) == self.wanted  # which the same command refuses to replace
        code, _, said = self.child(None, note=True)
        there = tree(self.out)
        assert there == self.wanted, f"the same command ends with {code} and another output: {said[-600:]}"
        assert code == 0 or complete or "it is complete" in said, said[-600:]
        written = {
            Path(path) for what, path in json.loads(self.said.read_text()) if what in ("write", "reserve space for")
        }
        redone = [path for path in kept if path.with_name(f".{path.name}.partial") in written]
        redone += [path for path in kept if path.parent.with_name(f".{path.parent.name}.partial") / "out" in
                   {one.parent for one in written}]  # fmt: skip
        self.counts["lost shards"] += len(redone)
        assert not redone, f"made again though it was complete: {redone}"
        self.counts["kept shards"] += len(kept)
        assert not self.left() or "is not needed any more" in said, f"left behind: {self.left()}"
        assert tree(self.source) == self.before, "the source changed"
        self.clear()

    def kill(self, number: int) -> None:
        """One kill, or a run that was faster; then the same command again."""
        if number % 2:
            code, _, said = self.child(None, self.random.uniform(0, self.seconds))
        else:
            kill = self.at(self.step("change"), "change", lambda: os.kill(os.getpid(), signal.SIGKILL))
            code, _, said = self.child(kill)
        assert code in (0, -signal.SIGKILL), said[-600:]
        self.counts["kills"] += code != 0
        self.look()
        self.again(self.complete())

    def fail(self, number: int) -> None:
        """One error of the disk; then the same command again."""
        stays, kind = number % 3 == 1, "read" if number % 3 == 2 else "change"
        errors = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT) if kind == "read" else ERRORS
        error = errors[number // 3 % len(errors)]

        def failing() -> None:
            raise OSError(error, os.strerror(error))

        code, _, said = self.child(self.at(self.step(kind), kind, failing, stays))
        self.counts["errors"] += 1
        assert code in (0, 1, 2) and "Traceback" not in said, f"{os.strerror(error)} ends with {code}: {said[-900:]}"
        self.counts["told"] += code != 0 and os.strerror(error) in said
        self.look()
        self.again(self.complete())

    def step(self, kind: str) -> int:
        """The number of a call of a kind: each once, in a random order, and again."""
        if not self.steps[kind]:
            self.steps[kind] = list(range(sum((what == "read") == (kind == "read") for what, _ in self.calls)))
            self.random.shuffle(self.steps[kind])
        return self.steps[kind].pop()

    @staticmethod
    def at(step: int, kind: str, act: Callable[[], None], stays: bool = False) -> Callable[[str], None]:
        left = itertools.count(step, -1)

        def hook(what: str) -> None:
            if what == kind and ((now := next(left)) == 0 or (stays and now < 0)):
                act()

        return hook


def count(source: Path, folder: Path, kills: int, errors: int, verbs: list[str]) -> Iterator[dict[str, Any]]:
    """Faults of each verb, and what became of them."""
    importlib.import_module("breccia.checkpoint.writing.convert")._SYNC_EVERY = 1  # a record a tensor
    calibration = importlib.import_module("breccia.calibration.folder")
    calibration._STATE_SECONDS, calibration._BATCH = 0.0, 32
    for name in verbs:
        verb = Verb(name, source, folder / name, 0)
        for number in itertools.count():
            if verb.counts["kills"] >= kills:
                break
            faulty(verb, verb.kill, number)
        for number in range(errors):
            faulty(verb, verb.fail, number)
        yield {"verb": name, "calls": len(verb.calls), **verb.counts}


def faulty(verb: Verb, act: Callable[[int], None], number: int) -> None:
    try:
        act(number)
    except AssertionError as error:
        verb.counts["wrong"] += 1
        print(f"{verb.name}, {act.__name__} {number}: {error}", file=sys.stderr, flush=True)
        verb.clear()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500, help="of all verbs together, at least")
    parser.add_argument("--errors", type=int, default=500, help="of all verbs together, at least")
    parser.add_argument("--verbs", default="", help="names, separated by semicolons")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        (root := Path(place) / "in").mkdir()
        source = make(root)
        every = list(commands(source, root))
        chosen = [name for name in options.verbs.split(";") if name] or every
        each = [-(-number // len(chosen)) for number in (options.kills, options.errors)]
        sums = Counter[str]()
        for said in count(source, Path(place), *each, chosen):
            print(json.dumps(said), flush=True)
            sums.update({key: value for key, value in said.items() if key not in ("verb", "calls")})
    print(json.dumps({"verb": "all", **sums}))
    sys.exit(sums["wrong"] > 0)
