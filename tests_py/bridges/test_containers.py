# SPDX-License-Identifier: Apache-2.0
"""A kind of file is one value: one of another package is read and written like GGUF."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia import bridges
from breccia.bridges import Container, FileFormat, Found, Output, Part
from breccia.checkpoint import Checkpoint, convert, inspect, save_arrays, verify
from breccia.checkpoint.files.dtypes import nbytes_of
from breccia.checkpoint.files.input_file import InputFile
from breccia.checkpoint.files.planned_file import PlannedWriter
from breccia.checkpoint.files.safetensors_file import Entry

PACKAGE = Path(breccia.__file__).parent
ROW = breccia.INT8Scaling()
MAGIC, HEADER = b"CRATE", 4096


class Crate:
    """An open file: a magic word, a page of JSON, and bytes."""

    def __init__(self, path: Path) -> None:
        self.path, self.file, self.model, self.metadata = path, InputFile(path), None, dict[str, str]()
        said = json.loads(self.file.read(len(MAGIC), HEADER - len(MAGIC)))
        self.entries = {name: Entry(name, dtype, tuple(shape), *at) for name, (dtype, shape, at) in said.items()}
        self.left_out: list[str] = []

    def described(self) -> list[Found]:
        found = []
        for name in self.entries:
            if name.endswith(".codes"):
                module, shape = name.removesuffix(".codes"), self.entries[name].shape
                parts = {"codes": name, "size": f"{module}.size"}
                found.append(Found(f"{module}.weight", "crate", "int8", parts, shape, ROW, ROW.layout, "float32"))
        return found

    def span(self, name: str, start: int, stop: int, mapped: bool) -> Any:
        at = self.entries[name].start
        return self.file.array(at + start, at + stop)

    def release(self, name: str) -> None:
        pass

    def close(self) -> None:
        self.file.close()


class Crates(Container):
    title, whole = "crate", True

    def holds(self, path: Path, start: bytes) -> bool:
        return start.startswith(MAGIC)

    def open(self, path: Path) -> Any:
        return Crate(path)

    def writer(self, path: Path, output: Output) -> tuple[PlannedWriter, list[str]]:
        at, said = HEADER, {}
        for name, (dtype, shape) in output.plan.items():
            said[name] = (dtype, shape, (at, at + nbytes_of(dtype, shape)))
            at = said[name][2][1]
        header = (MAGIC + json.dumps(said).encode()).ljust(HEADER)
        return PlannedWriter(path, header, {name: one[2] for name, one in said.items()}, at, resume=True), []


def lay_out(scaled: Any, place: Any) -> dict[str, Part]:
    codes = Part("I8", scaled.shape, lambda: np.asarray(scaled.data))
    return {"codes": codes, "size": Part("F32", tuple(scaled.scale.shape), lambda: np.asarray(scaled.scale))}


@pytest.fixture
def crates() -> Iterator[FileFormat]:
    bridge = FileFormat(
        "crate",
        container=Crates(),
        recipes={"int8": ROW},
        carries=lambda recipe: recipe == ROW,
        read=lambda parts, found: breccia.ScaledTensor(parts["codes"].view(np.int8), parts["size"], ROW, ROW.layout),
        lay_out=lay_out,
    )
    bridges.register(bridge)
    try:
        yield bridge
    finally:
        bridges.unregister("crate")


def test_a_kind_of_file_of_ones_own(crates: FileFormat, tmp_path: Path) -> None:
    values = np.random.default_rng(3).normal(0, 0.1, (64, 96)).astype(np.float32)
    source = tmp_path / "in"
    source.mkdir()
    save_arrays({"a.weight": values, "norm.weight": np.ones(96, np.float32)}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"model_type": "llama"}))
    report = convert(source, tmp_path / "out.crate", "crate")
    assert report["tensors"] == {"cast": 1, "copy": 1}
    assert (tmp_path / "out.crate").read_bytes().startswith(MAGIC)
    read = Checkpoint(tmp_path / "out.crate")
    assert read.container is crates.container
    assert [(one.name, one.format) for one in read.found] == [("a.weight", "crate"), ("norm.weight", "plain")]
    assert breccia.cast(values, ROW) == dict(breccia.open(tmp_path / "out.crate"))["a.weight"]
    assert inspect(tmp_path / "out.crate")["files"] == 1
    verify(tmp_path / "out.crate", source)
    report = convert(tmp_path / "out.crate", tmp_path / "back.safetensors", "int8")
    assert report["tensors"] == {"repack": 1, "copy": 1}


def test_a_directory_is_refused(crates: FileFormat, tmp_path: Path) -> None:
    save_arrays({"a.weight": np.ones((64, 96), np.float32)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="destination must be a file for crate"):
        convert(tmp_path / "a.safetensors", f"{tmp_path}/out/", "crate")


def test_safetensors_is_what_no_other_kind_holds() -> None:
    every = bridges.containers()
    assert every[-1].title == "safetensors"
    assert len({one.title for one in every if one.whole}) == sum(one.whole for one in every)


def test_only_gguf_knows_its_files() -> None:
    """Nobody else asks what kind of file is open."""
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] == "gguf":
            continue
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        names |= {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        asked = {"GgufFile", "GgufWriter"} & names
        assert not asked or path == PACKAGE / "bridges/gguf/file_kind.py", path
