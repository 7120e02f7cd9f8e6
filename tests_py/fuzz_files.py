# SPDX-License-Identifier: Apache-2.0
"""Files that are nearly right, without end: `python fuzz_files.py SECONDS [SEED]` takes checkpoints of every format
and the hostile ones, changes bytes, JSON and headers, and reads what comes of it. Whatever the bytes say, reading gives
tensors or a ValueError or OSError. A case that gives something else is left in the folder that the last line names."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import random
import shutil
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile
import numpy as np
from breccia import dequantize
from breccia.bridges import OutsideTensor
from breccia.checkpoint import Checkpoint, convert, target_names
from breccia.checkpoint.files.dtypes import DTYPES, nbytes_of
from breccia.checkpoint.judging.complete import complete
from breccia.checkpoint.judging.inspect import inspect, lines
from breccia.scaled_tensor import ScaledTensor
from checkpoints import weight, write_shards
from pace import import_peers

Case = dict[str, bytes]
REFUSED = (ValueError, OSError)
SECONDS = 5.0  # of processor time that a case may take
EDGES = [*range(4), 7, 8, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256]
EDGES += [-1, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**64]
ODD: list[Any] = [None, True, False, "", "x", "\0", "..", "é" * 300]
ODD += [0.5, float("nan"), float("inf"), -0.0, [], {}, [[]]]


def seeds(folder: Path) -> tuple[list[Case], list[Case]]:
    """A small model in every format that is written, and the hostile checkpoints that are bytes alone."""
    names = [f"model.layers.{i}.mlp.{kind}.weight" for i in (0, 1) for kind in ("gate_proj", "down_proj")]
    arrays: dict[str, Any] = {name: weight(64, 128) for name in names}
    arrays["model.layers.0.mlp.experts.gate_up_proj"] = weight(64, 128)[None].repeat(2, 0)
    arrays["model.norm.weight"] = weight(64)
    folder.mkdir()
    source = write_shards(folder / "source", [arrays], {"model_type": "llama", "num_hidden_layers": 2})
    found = []
    for i, to in enumerate(["", *target_names()]):
        out = folder / f"{i}"
        try:
            path = convert(source, out, to, threads=1) and out if to else source
        except REFUSED:  # a format that has no place for such a model
            continue
        if path.is_file():
            raw = path.read_bytes()
            found.append({"a.gguf" if raw[:4] == b"GGUF" else "a": raw})
        else:
            found.append({p.name: p.read_bytes() for p in sorted(path.iterdir()) if p.is_file()})
    odd = []
    for case in hostile.every().values():
        contents = {name: raw for name, raw in case.files.items() if isinstance(raw, bytes) and "/" not in name}
        if len(contents) == len(case.files) and sum(map(len, contents.values())) < 1 << 16:
            odd.append(contents)
    return found, odd


class Mutator:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def case(self, case: Case) -> Case:
        case = dict(case)
        for _ in range(self.random.choice([1, 1, 1, 2, 3, 6])):
            name = self.random.choice(sorted(case))
            raw = case[name]
            ways: list[Callable[[bytes], bytes]] = [self.bytes]
            if name.endswith(".json"):
                ways += [self.json, self.json, self.json]
            elif raw[:4] != b"GGUF":
                ways += [self.header, self.header, self.tensors, self.tensors]
            try:
                case[name] = self.random.choice(ways)(raw)
            except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, struct.error):
                case[name] = self.bytes(raw)  # no JSON any more
        return case

    def bytes(self, raw: bytes) -> bytes:
        raw_ = bytearray(raw)
        pick, most = self.random, min(len(raw), 4096)  # where the headers are
        at = pick.randrange(most + 1)
        match pick.randrange(7):
            case 0:
                raw_[at : at + 1] = bytes([pick.randrange(256)])
            case 1:
                raw_[at : at + 8] = struct.pack("<Q", pick.choice(EDGES) % 2**64)
            case 2:
                raw_[at : at + 4] = struct.pack("<I", pick.choice(EDGES) % 2**32)
            case 3:
                del raw_[at : at + pick.choice([1, 2, 4, 8, 64, len(raw)])]
            case 4:
                raw_[at:at] = pick.randbytes(pick.choice([1, 4, 8, 32]))
            case 5:
                begin = pick.randrange(most + 1)
                raw_[at:at] = raw[begin : begin + pick.randrange(64)]
            case 6:
                raw_[-1:] = pick.randbytes(pick.choice([0, 1, 2]))
        return bytes(raw_)

    def json(self, raw: bytes) -> bytes:
        text = json.dumps(self.changed(json.loads(raw)), ensure_ascii=self.random.random() < 0.5)
        return text.encode("utf-8", "replace")

    def changed(self, value: Any) -> Any:
        """A value one of whose nodes is something else."""
        pick = self.random
        if isinstance(value, (dict, list)) and value and pick.random() < 0.85:
            key = pick.choice(list(value)) if isinstance(value, dict) else pick.randrange(len(value))
            way = pick.random()
            if way < 0.1:
                del value[key]
            elif way < 0.2 and isinstance(value, dict):
                value[pick.choice(list(value)) + pick.choice(["", "_scale", ".weight", "2"])] = value[key]
            else:
                value[key] = self.changed(value[key])
            return value
        if isinstance(value, int) and pick.random() < 0.6:
            return value + pick.choice([-1, 1, value, -value])
        if isinstance(value, str) and value and pick.random() < 0.4:
            at = pick.randrange(len(value))
            return value[:at] + pick.choice(["", "x", ".", "0", value]) + value[at + 1 :]
        return pick.choice([*ODD, *EDGES])

    def header(self, raw: bytes) -> bytes:
        (length,) = struct.unpack("<Q", raw[:8])
        said = json.dumps(self.changed(json.loads(raw[8 : 8 + length]))).encode()
        return struct.pack("<Q", len(said)) + said + raw[8 + length :]

    def tensors(self, raw: bytes) -> bytes:
        """A valid file whose tensors have other shapes, types, names or bytes."""
        pick = self.random
        (length,) = struct.unpack("<Q", raw[:8])
        said = json.loads(raw[8 : 8 + length])
        metadata = said.pop("__metadata__", {})
        data = raw[8 + length :]
        parts = {
            name: [entry["dtype"], list(entry["shape"]), data[slice(*entry["data_offsets"])]]
            for name, entry in said.items()
        }
        name = pick.choice(sorted(parts))
        dtype, shape, data = parts[name]
        match pick.randrange(6):
            case 0:
                del parts[name]
            case 1:
                role = pick.choice(["scales", "weight_scale", "qweight", "data", "w"])
                parts[name.replace("weight", role)] = parts.pop(name)
            case 2:
                parts[name][0] = pick.choice(list(DTYPES))
            case 3 if shape:
                shape[pick.randrange(len(shape))] = pick.choice([0, 1, 2, 3, 16, 31, 33, 64, 65, 129])
            case 4:
                others: list[list[int]] = [[], [1], [0], [*shape, 1], [1, *shape], shape[::-1], shape[1:], [0, *shape]]
                parts[name][1] = pick.choice(others)
            case _:
                parts[name][2] = pick.choice([bytes(len(data)), b"\xff" * len(data), pick.randbytes(len(data))])
        if metadata and pick.random() < 0.2:
            key = pick.choice(sorted(metadata))
            metadata[key] = json.dumps(self.changed(json.loads(metadata[key])))
        header, at, body = {"__metadata__": metadata} if metadata else {}, 0, b""
        for key, (dtype, shape, data) in parts.items():
            if not all(isinstance(extent, int) for extent in shape):  # a word times a number is a long word
                raise ValueError("no shape")
            count = nbytes_of(dtype, tuple(shape))
            if count > 1 << 20:
                raise ValueError("too large")
            body += (data + bytes(count))[:count]
            header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + count]}
            at += count
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + body


def read(path: Path, out: Path, *, whole: bool) -> int:
    """Everything that reads; how many tensors were loaded."""
    loaded = 0
    checkpoint = Checkpoint(path)
    try:
        for found in checkpoint.found[:12]:
            try:
                tensor = checkpoint.load(checkpoint.refined(found))
                if isinstance(tensor, ScaledTensor) and tensor.size <= 1 << 20:
                    dequantize(tensor)
                elif isinstance(tensor, OutsideTensor):
                    tensor.dequantize()
                else:
                    np.asarray(tensor)
                loaded += 1
            except REFUSED:
                pass
    finally:
        checkpoint.close()
    inspect(path)
    list(lines(path))
    if whole:
        for step in (lambda: complete(path), lambda: convert(path, out, "bf16", threads=1)):
            with contextlib.suppress(REFUSED):
                step()
            if out.exists():
                shutil.rmtree(out) if out.is_dir() else out.unlink()
    return loaded


def run(folder: Path, seconds: float, seed: int = 0) -> dict[str, int]:
    """Read cases for so long.

    Raises:
        AssertionError: a case gave something else than tensors or a refusal, or took too long.
    """
    mutator, (good, odd) = Mutator(seed), seeds(folder / "seeds")
    counts = {"cases": 0, "refused": 0, "tensors": 0}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        case = mutator.case(mutator.random.choice(odd if mutator.random.random() < 0.3 else good))
        place = folder / "case"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        for name, raw in case.items():
            (place / name).write_bytes(raw)
        path = place if len(case) > 1 else place / next(iter(case))
        counts["cases"] += 1
        begin = time.process_time()
        try:
            counts["tensors"] += read(path, folder / "out", whole=mutator.random.random() < 0.1)
        except REFUSED as error:
            counts["refused"] += 1
            assert len(str(error)) > 8, f"{path}: an empty message"
        except Exception as error:
            what = f"{path} (seed {seed}, case {counts['cases']}): {type(error).__name__}: {error}"
            raise AssertionError(what) from error
        assert time.process_time() - begin < SECONDS, f"{path} took {time.process_time() - begin:.1f} s"
        if counts["cases"] % 256 == 0:
            gc.collect()
    return counts


if __name__ == "__main__":
    faulthandler.enable()
    import resource

    import_peers()
    warnings.simplefilter("error")
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))  # a lying shape must not get its memory
    place = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        print(json.dumps(run(place, float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)))
    except AssertionError:
        traceback.print_exc()
        sys.exit(1)
    shutil.rmtree(place)
