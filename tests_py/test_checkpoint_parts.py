# SPDX-License-Identifier: Apache-2.0
"""Conversions in parts write what one process writes, whoever runs them and however often they are killed."""

import contextlib
import importlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path

import checkpoints
import pytest
from breccia.checkpoint import convert, finish, plan
from breccia.checkpoint.files import disk
from breccia.checkpoint.files.input_file import InputFile
from breccia.checkpoint.writing import parts
from fault_runner import tree
from pace import pace

CASES = [
    ("deepseek", "nvfp4"),
    ("deepseek", "bf16"),
    ("gpt-oss", "mxfp8"),
    ("modelopt", "compressed-tensors:nvfp4"),
    ("modelopt", "modelopt:nvfp4"),  # whose inputs are a set, in another order in every process
    ("deepseek", "torchao:fp8"),
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    return {name: make(folder / name) for name, make in checkpoints.MAKERS.items()}


def cli(*words, seed="0"):
    env = {**os.environ, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-m", "breccia", "convert", *map(str, words), "--quiet"]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(("name", "to"), CASES)
@pytest.mark.parametrize("count", [1, 2, 3, 50])
@pytest.mark.in_turn
def test_any_number_of_parts_gives_the_bytes_of_one_process(sources, tmp_path, name, to, count):
    convert(sources[name], tmp_path / "whole", to)
    pieces = pickle.loads(pickle.dumps(plan(sources[name], tmp_path / "out", to, count)))
    done = [piece.run(threads=1) for piece in reversed(pieces)]
    assert sum(report["tensors"] for report in done) == sum(piece.tensors for piece in pieces) > 0
    finish(sources[name], tmp_path / "out", to)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    assert sorted(os.listdir(tmp_path)) == ["out", "whole"]


@pytest.mark.parametrize("to", ["mxfp8", "gguf:q8_0", "gguf:nvfp4"])
def test_one_file(tmp_path, to):
    source = checkpoints.first_layer_of_minilm(tmp_path / "source")
    source = source if to.startswith("gguf") else source / "model.safetensors"
    convert(source, tmp_path / "whole", to)
    for piece in plan(source, tmp_path / "out", to, 3):
        piece.run(threads=1)
    finish(source, tmp_path / "out", to, parts=3)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_directory_by_its_spelling(tmp_path):
    source = checkpoints.first_layer_of_minilm(tmp_path / "source") / "model.safetensors"
    convert(source, f"{tmp_path}/whole/", "mxfp8")
    for piece in plan(source, f"{tmp_path}/out/", "mxfp8", 3):
        piece.run(threads=1)
    with pytest.raises(ValueError, match=r"1-of-3 must be made from this source and target"):
        finish(source, tmp_path / "out", "mxfp8")
    finish(source, f"{tmp_path}/out/", "mxfp8")
    assert (tmp_path / "out").is_dir()
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    with pytest.raises(ValueError, match=r"destination must be a file for gguf:q8_0, got .*/again/$"):
        plan(source, f"{tmp_path}/again/", "gguf:q8_0", 2)


def test_rows_in_the_order_of_gguf_are_put_there_once(tmp_path):
    """Llama's query and key rows have another order in GGUF."""
    shapes = {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (64, 64), "mlp.up_proj": (128, 64)}
    arrays = {f"model.layers.0.{part}.weight": checkpoints.weight(*shape) for part, shape in shapes.items()}
    said = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    said |= {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "intermediate_size": 128}
    said |= {"rms_norm_eps": 1e-5, "max_position_embeddings": 64, "vocab_size": 32}
    source = checkpoints.write_shards(tmp_path / "source", [arrays], said)
    (source / "tokenizer.json").unlink()
    convert(source, tmp_path / "whole", "gguf:q8_0")
    for piece in plan(source, tmp_path / "out", "gguf:q8_0", 3):
        piece.run(threads=1)
    finish(source, tmp_path / "out", "gguf:q8_0")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_parts_of_other_processes_by_the_command(sources, tmp_path):
    """Sets are in another order in each process; each part is planned anew from the same headers."""
    source, out, to = sources["modelopt"], tmp_path / "out", ("--to", "modelopt:nvfp4")
    convert(source, tmp_path / "whole", "modelopt:nvfp4")
    for part in (1, 3):
        assert cli(source, out, *to, "--part", f"{part}/3", seed=str(part)).returncode == 0
    run = cli(source, out, *to, "--finish")
    assert run.returncode == 2
    assert "1 of 3 are not: run --part I/3 for I = 2" in run.stderr
    assert not out.exists()
    assert cli(source, out, *to, "--part", "2/3", seed="7").returncode == 0
    assert "was there" in cli(source, out, *to, "--part", "2/3", seed="8").stdout
    assert cli(source, out, *to, "--finish", seed="9").returncode == 0
    assert tree(out) == tree(tmp_path / "whole")


# Prints the exit codes of its children: of one that is stopped before a call to the disk, and of one that is not.
KILLED = """
import os, sys
from fault_runner import forked, stopping_at
from breccia.checkpoint import finish, plan
source, out, steps = sys.argv[1], sys.argv[2], sys.argv[3:]
def all_parts():
    for piece in plan(source, out, "nvfp4", 2):
        piece.run(threads=1)
    finish(source, out, "nvfp4")
for step in steps:
    for run in (stopping_at(int(step), all_parts), all_parts):
        print(forked(run), flush=True)
        sys.stdin.readline()  # the test has looked
"""


def test_killed_at_any_call_a_run_again_gives_the_same_bytes(sources, tmp_path):
    """A process that does all parts is stopped before one of its calls to the disk, then run again in full."""
    source, out = sources["deepseek"], tmp_path / "out"
    convert(source, tmp_path / "whole", "nvfp4")
    steps = ("0", "3", "9", "17", "26", "38", "47", "55")
    command = [sys.executable, "-c", KILLED, source, out, *steps]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, **pipes) as forks:
        for step in steps:
            assert forks.stdout.readline() == "77\n", step
            if out.exists():
                assert tree(out) == tree(tmp_path / "whole")
            print(file=forks.stdin, flush=True)
            assert forks.stdout.readline() == "0\n", step
            assert tree(out) == tree(tmp_path / "whole")
            shutil.rmtree(out)
            print(file=forks.stdin, flush=True)
        forks.stdin.close()
        assert (forks.stdout.read(), forks.wait(timeout=60)) == ("", 0)


def test_what_is_missing_or_of_another_conversion_is_told(sources, tmp_path):
    source, out = sources["deepseek"], tmp_path / "out"
    with pytest.raises(ValueError, match=r"parts must be there before --finish, there are none"):
        finish(source, out, "nvfp4")
    pieces = plan(source, out, "nvfp4", 3)
    pieces[1].run()
    with pytest.raises(ValueError, match=r"2 of 3 are not: run --part I/3 for I = 1, 3$"):
        finish(source, out, "nvfp4")
    with pytest.raises(ValueError, match=r"2-of-3 must be made from this source and target"):
        plan(source, out, "mxfp8", 3)[1].run()
    plan(source, out, "nvfp4", 2)[0].run()
    with pytest.raises(ValueError, match=r"must be of one division, there are some of 2 and 3"):
        finish(source, out, "nvfp4")
    with pytest.raises(ValueError, match=r"parts must be 1 or more, got 0"):
        plan(source, out, "nvfp4", 0)
    assert not out.exists()


def test_a_part_that_was_cut_is_told(sources, tmp_path):
    source, out = sources["deepseek"], tmp_path / "out"
    for piece in plan(source, out, "nvfp4", 3):
        piece.run()
    damaged = next(parts.parts_of(out).glob("2-of-3/*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"must be as its part wrote it, it is not: remove .*2-of-3"):
        finish(source, out, "nvfp4")
    assert not out.exists()


@pytest.mark.parametrize(("name", "to"), CASES)
@pytest.mark.parametrize("count", [2, 3])
def test_a_part_whose_bytes_changed_is_told(sources, tmp_path, name, to, count):
    """Four bytes of any of its files, anywhere but in the header; files that are linked, and those that are joined."""
    source, out = sources[name], tmp_path / "out"
    for piece in plan(source, out, to, count):
        piece.run(threads=1)
    for file in sorted(parts.parts_of(out).glob("*/*.safetensors")):
        raw = file.read_bytes()
        begin = 8 + int.from_bytes(raw[:8], "little")
        for at in {begin, (begin + len(raw)) // 2, len(raw) - 4}:
            file.write_bytes(raw[:at] + bytes(byte ^ 255 for byte in raw[at : at + 4]) + raw[at + 4 :])
            with pytest.raises(
                ValueError, match=rf"{file.name}: tensor .* must be as its part wrote it.*run the part$"
            ):
                finish(source, out, to)
            assert not out.exists() and not out.with_name(".out.partial").exists()
        file.write_bytes(raw)
    finish(source, out, to)
    convert(source, tmp_path / "whole", to)
    assert tree(out) == tree(tmp_path / "whole")


def swapped(source: Path) -> None:
    """Other weights of the same size and time."""
    for path in source.glob("*.safetensors"):
        said, raw = path.stat(), bytearray(path.read_bytes())
        begin = 8 + int.from_bytes(raw[:8], "little")
        raw[begin::7] = bytes(byte ^ 1 for byte in raw[begin::7])
        path.write_bytes(raw)
        os.utime(path, ns=(said.st_atime_ns, said.st_mtime_ns))


def test_a_source_that_was_swapped_between_parts_is_told(tmp_path):
    source, out = checkpoints.deepseek_v3(tmp_path / "source"), tmp_path / "out"
    pieces = plan(source, out, "nvfp4", 3)
    pieces[0].run()
    swapped(source)
    pieces[1].run()
    pieces[2].run()
    with pytest.raises(
        ValueError, match=r"must be as part 1 read it, it is another now: remove .*1-of-3 and run the part"
    ):
        finish(source, out, "nvfp4")
    assert not out.exists()
    swapped(source)  # back again
    with pytest.raises(ValueError, match=r"must be as part 2 read it"):
        finish(source, out, "nvfp4")


def test_a_source_that_is_swapped_while_a_part_is_interrupted_is_read_again(tmp_path, monkeypatch):
    source, out = checkpoints.deepseek_v3(tmp_path / "source"), tmp_path / "out"
    module = importlib.import_module("breccia.checkpoint.writing.convert")
    monkeypatch.setattr(module, "_SYNC_EVERY", 1)
    (piece,), seen = plan(source, out, "nvfp4", 1), [0]

    def stop(what, path):
        seen[0] += what == "write" and path.name == "journal"
        if seen[0] == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(disk, "before", stop)
    with pytest.raises(KeyboardInterrupt):
        piece.run()
    monkeypatch.setattr(disk, "before", None)
    swapped(source)
    piece.run()
    finish(source, out, "nvfp4")
    convert(source, tmp_path / "wanted", "nvfp4")
    assert tree(out) == tree(tmp_path / "wanted")


def test_what_is_done_of_an_interrupted_conversion_is_looked_at(sources, tmp_path, monkeypatch):
    """Bytes that changed meanwhile are made anew, in files that are complete and in those that are not."""
    source = sources["deepseek"]
    module = importlib.import_module("breccia.checkpoint.writing.convert")
    monkeypatch.setattr(module, "_SYNC_EVERY", 1)
    convert(source, tmp_path / "whole", "nvfp4")
    for number in (2, 3, 5, 6):
        out, seen = tmp_path / f"out{number}", [0]

        def stop(what, path, seen=seen, number=number):
            seen[0] += what == "write" and path.name == "journal"
            if seen[0] == number:
                raise KeyboardInterrupt

        monkeypatch.setattr(disk, "before", stop)
        with contextlib.suppress(KeyboardInterrupt):
            convert(source, out, "nvfp4", threads=1)
        monkeypatch.setattr(disk, "before", None)
        changed = 0
        for file in out.with_name(f".{out.name}.partial").glob("out/*safetensors*"):
            raw = bytearray(file.read_bytes())
            begin = 8 + int.from_bytes(raw[:8], "little")
            raw[begin::64] = bytes(byte ^ 255 for byte in raw[begin::64])
            file.write_bytes(raw)
            changed += 1
        assert changed
        convert(source, out, "nvfp4", threads=1)
        assert tree(out) == tree(tmp_path / "whole")


def test_checksums_are_left_out_by_the_flag_alone(sources, tmp_path):
    source, out = sources["modelopt"], tmp_path / "out"
    to = ("--to", "modelopt:nvfp4")
    assert cli(source, out, *to, "--part", "1/2").returncode == 0
    assert cli(source, out, *to, "--part", "2/2", "--no-checksums").returncode == 0
    run = cli(source, out, *to, "--finish")
    assert run.returncode == 2
    assert "2-of-2 must have checksums, it was made without: remove" in run.stderr
    file = next(parts.parts_of(out).glob("1-of-2/*.safetensors"))
    raw = file.read_bytes()
    file.write_bytes(raw[:-4] + bytes(4))
    assert cli(source, out, *to, "--finish", "--no-checksums").returncode == 0
    assert cli(source, tmp_path / "whole", *to, "--no-checksums").returncode == 0
    assert tree(out) != tree(tmp_path / "whole")  # which nobody looked at


def test_checksums_that_changed_are_told(sources, tmp_path):
    source, out = sources["deepseek"], tmp_path / "out"
    for piece in plan(source, out, "nvfp4", 2):
        piece.run()
    sums = parts.parts_of(out) / "1-of-2" / "part.sums"
    raw = sums.read_bytes()
    for changed in (b"", raw[:-1], raw[:20] + b"0" + raw[21:], b"x" * 9, bytes(9), b"[" * 100_000):
        sums.write_bytes(changed)
        with pytest.raises(ValueError, match=r"part.sums must be as its part wrote it, it is not"):
            finish(source, out, "nvfp4")
    sums.unlink()
    with pytest.raises(ValueError, match=r"part.sums must be as its part wrote it, it is not"):
        finish(source, out, "nvfp4")


@pytest.mark.parametrize("count", [parts.MAX_PARTS + 1, 10**6, 10**18])
def test_the_number_of_parts_is_bounded_before_it_is_used(sources, tmp_path, count):
    begin = time.process_time()
    with pytest.raises(ValueError, match=rf"parts must be at most 65536, got {count}$"):
        plan(sources["deepseek"], tmp_path / "out", "nvfp4", count)
    parts.parts_of(tmp_path / "out").mkdir()
    (parts.parts_of(tmp_path / "out") / f"1-of-{count}").mkdir()
    with pytest.raises(ValueError, match=rf"parts must be at most 65536, got {count}$"):
        finish(sources["deepseek"], tmp_path / "out", "nvfp4")
    assert time.process_time() - begin < 1


def test_as_many_parts_as_there_may_be_are_planned_at_once(sources, tmp_path):
    begin = time.process_time()
    pieces = plan(sources["deepseek"], tmp_path / "out", "nvfp4", parts.MAX_PARTS)
    assert time.process_time() - begin < 2 * pace()
    assert len(pieces) == parts.MAX_PARTS
    assert sum(piece.tensors for piece in pieces) == 6


def test_parts_of_an_output_that_is_there_are_said_to_be_left(sources, tmp_path):
    source, out = sources["deepseek"], tmp_path / "out"
    convert(source, out, "nvfp4")
    parts.parts_of(out).mkdir()
    with pytest.raises(FileExistsError, match=r"it is complete, and .*\.out\.parts is not needed any more"):
        finish(source, out, "nvfp4", parts=2)


def test_a_source_that_changed_is_told(tmp_path):
    source = checkpoints.deepseek_v3(tmp_path / "source")
    piece = plan(source, tmp_path / "out", "nvfp4", 2)[0]
    shard = next(source.glob("*.safetensors"))
    os.utime(shard, ns=(1, 1))
    assert not piece.run()["was_there"]  # of the same contents
    raw = shard.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    shard.write_bytes((length + 8).to_bytes(8, "little") + raw[8 : 8 + length] + b" " * 8 + raw[8 + length :])
    with pytest.raises(ValueError, match=r"must be as it was planned for, it is another now"):
        piece.run()


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "1/", "/3", "-1/3", "a/b"])
def test_the_command_refuses_other_parts(tmp_path, text):
    run = cli(tmp_path / "in", tmp_path / "out", "--to", "nvfp4", f"--part={text}")
    assert run.returncode == 2
    assert "must be I/N with I from 1 to N" in run.stderr


@pytest.mark.parametrize("count", range(1, 9))
def test_shares_are_the_best_runs_there_are(count):
    """Against every way to cut a short list."""
    costs = [5, 1, 1, 9, 2, 2, 2]
    best = min(max(_sums(costs, cuts)) for cuts in _all_cuts(len(costs), count))
    found = parts.shares(costs, count)
    assert [i for run in found for i in run] == list(range(len(costs)))
    assert len(found) == count
    assert max(sum(costs[i] for i in run) for run in found) == best


def _all_cuts(length, count, begin=0):
    if count == 1:
        yield [(begin, length)]
        return
    for end in range(begin, length + 1):
        for rest in _all_cuts(length, count - 1, end):
            yield [(begin, end), *rest]


def _sums(costs, cuts):
    return [sum(costs[begin:end]) for begin, end in cuts]


def large(folder: Path, layers: int, experts: int) -> Path:
    """The headers of DeepSeek-V3's checkpoint, of so many layers and experts; files are holes."""
    folder.mkdir()
    tensors = {"model.embed_tokens.weight": ("BF16", (129280, 7168)), "lm_head.weight": ("BF16", (129280, 7168))}
    for layer in range(layers):
        wide = 18432 if layer < 3 else 2048
        names = [""] if layer < 3 else [f"experts.{i}." for i in range(experts)]
        weights = {
            f"mlp.{name}{p}": (7168, wide) if p == "down_proj" else (wide, 7168)
            for name in names
            for p in ("gate_proj", "up_proj", "down_proj")
        }
        weights |= {"self_attn.q_b_proj": (24576, 1536), "self_attn.o_proj": (7168, 16384)}
        for name, (rows, columns) in weights.items():
            base = f"model.layers.{layer}.{name}.weight"
            tensors[base] = ("F8_E4M3", (rows, columns))
            tensors[f"{base}_scale_inv"] = ("F32", (rows // 128, columns // 128))
    shards, sizes = [{}], [0]
    for name, (dtype, shape) in tensors.items():
        size = shape[0] * shape[1] * {"BF16": 2, "F8_E4M3": 1, "F32": 4}[dtype]
        if sizes[-1] + size > 4 << 30:
            shards.append({})
            sizes.append(0)
        shards[-1][name] = {"dtype": dtype, "shape": shape, "data_offsets": [sizes[-1], sizes[-1] + size]}
        sizes[-1] += size
    for i, (header, size) in enumerate(zip(shards, sizes, strict=True)):
        text = json.dumps(header).encode()
        with (folder / f"model-{i:05}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + size)
    said = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v3", "quantization_config": said}))
    return folder


@pytest.mark.slow
def test_a_large_checkpoint_is_divided_evenly_from_headers(tmp_path, monkeypatch):
    """All 671 billion parameters of DeepSeek-V3 for 64 workers, in seconds of one core."""
    source = large(tmp_path / "large", 61, 256)
    headers = 0
    for path in source.glob("*.safetensors"):
        with path.open("rb") as file:
            headers += 8 + int.from_bytes(file.read(8), "little")
    counted, fill = [0], InputFile._fill

    def counting(self, view, start):
        counted[0] += len(view)
        fill(self, view, start)

    monkeypatch.setattr(InputFile, "_fill", counting)
    monkeypatch.setattr(InputFile, "view", None)
    begin = time.process_time()
    pieces = plan(source, tmp_path / "out", "nvfp4", 64)
    assert time.process_time() - begin < 60
    assert 0 < counted[0] <= 2 * headers
    costs = [piece.cost for piece in pieces]
    assert sum(piece.bytes_read for piece in pieces) > 660e9
    assert max(costs) <= 1.05 * sum(costs) / len(costs)
    assert min(costs) >= 0.95 * sum(costs) / len(costs)
