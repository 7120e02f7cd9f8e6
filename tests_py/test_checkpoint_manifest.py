# SPDX-License-Identifier: Apache-2.0
"""Checksums that `convert` writes and `verify` compares, codes that are damaged, conversions that are done again."""

import hashlib
import itertools
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from breccia.checkpoint import SafetensorsFile, convert, save_arrays, verify
from breccia.checkpoint.files.sums import Sums, checksum, joined, pieces_of
from breccia.checkpoint.judging.complete import complete
from breccia.checkpoint.judging.rederive import rederive, statement
from breccia.checkpoint.judging.rederive import render as rederived
from breccia.checkpoint.planning.targets import parse_target
from breccia.checkpoint.writing.manifest import Manifest
from checkpoints import weight, write_shards

# Formats of 8-bit codes with a code that is no number, and that code.
NANS = {
    "compressed-tensors:fp8": 0x7F,
    "compressed-tensors:fp8-block": 0x7F,
    "deepseek:block": 0xFF,
    "modelopt:fp8": 0x7F,
    "mxfp8": 0x7F,
    "fp8:e5m2": 0x7E,
    "quark:fp8": 0x7F,
}


def source(path: Path) -> Path:
    arrays = [{f"l.{shard}.{i}.weight": weight(96, 128) for i in range(2)} for shard in range(2)]
    arrays[1]["norm.weight"] = weight(128)
    return write_shards(path, arrays, {})


def change(folder: Path, name: str, at: int, data: bytes) -> None:
    """Bytes of a stored tensor, from one on."""
    for path in folder.glob("*.safetensors") if folder.is_dir() else [folder]:
        with SafetensorsFile(path) as file:
            entry = file.entries.get(name)
        if entry is not None:
            with path.open("r+b") as raw:
                raw.seek(entry.start + at)
                raw.write(data)
            return
    raise AssertionError(name)


def codes_of(folder: Path) -> tuple[str, int]:
    """The stored tensor of the first weight's codes, and its bytes."""
    for path in sorted(folder.glob("*.safetensors")):
        with SafetensorsFile(path) as file:
            found = [(n, e.nbytes) for n, e in file.entries.items() if n.startswith("l.0.0.") and e.nbytes > 4096]
        if found:
            return max(found, key=lambda one: one[1])
    raise AssertionError("no codes")


@pytest.mark.parametrize("start", [0, 1, 3, 4, 32764, 32768, 40001])
def test_a_checksum_is_the_sum_of_those_of_pieces(start: int) -> None:
    raw = np.random.default_rng(start).integers(0, 256, 200_003, np.uint8)
    cuts = [0, start, start + 1, start + 99_000, raw.size]
    pieces = [checksum(raw[a:b], a) for a, b in itertools.pairwise(cuts)]
    assert sum(pieces) % 2**64 == checksum(raw)
    other = raw.copy()
    other[start] ^= 0x80
    assert checksum(other) != checksum(raw)
    other[start + 4] ^= 0x80  # two that would cancel one another modulo 2^64 in words of 64 bits
    assert checksum(other) != checksum(raw)


def test_pieces_that_follow_one_another_are_joined() -> None:
    raw, sums = np.arange(1000, dtype=np.uint8), Sums()
    for start, stop in ((300, 1000), (0, 300), (100, 200)):
        sums.add("a", start, raw[start:stop])
    line = sums.taken()["a"]
    assert pieces_of(line) == {(0, 1000): checksum(raw)} and not sums.taken()
    sums.add("a", 1000, raw)
    assert list(pieces_of(joined(f"{sums.taken()['a']} 3000-3004=7 {line}"))) == [(0, 2000), (3000, 3004)]


@pytest.mark.always
@pytest.mark.parametrize("to", NANS)
def test_codes_that_are_no_numbers_are_told(to: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(source(tmp_path / "in"), out, to, checksums=False)
    assert complete(out)["ok"], complete(out)["problems"]
    name, nbytes = codes_of(out)
    change(out, name, nbytes // 2, bytes([NANS[to]]) * 3)
    (problem,) = complete(out)["problems"]
    assert problem["problem"] == "3 codes are NaN or infinite"


@pytest.mark.always
@pytest.mark.parametrize("to", ["int8", "int4", "nvfp4", "mxfp4", "compressed-tensors:fp8", "compressed-tensors:int4"])
def test_rows_of_one_code_are_told(to: str, tmp_path: Path) -> None:
    """Of one that rounding does not give: rows of one number have the largest code."""
    out = tmp_path / "out"
    convert(source(tmp_path / "in"), out, to, checksums=False)
    assert complete(out)["ok"], complete(out)["problems"]
    name, nbytes = codes_of(out)
    code = b"\x99" if to == "compressed-tensors:int4" else b"\x33"  # which counts from -8
    change(out, name, 3 * (nbytes // 96), code * (2 * nbytes // 96))
    (problem,) = complete(out)["problems"]
    assert problem["problem"] == "2 rows hold one code alone: damaged?"


@pytest.mark.always
@pytest.mark.parametrize("to", ["nvfp4", "mxfp8", "int8", "bf16", "compressed-tensors:int4", "gptq:int4", "mlx:int4"])
def test_any_changed_byte_is_told(to: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(source(tmp_path / "in"), out, to)
    assert complete(out)["ok"], complete(out)["problems"]
    assert verify(tmp_path / "in", out)["ok"]
    name, nbytes = codes_of(out)
    with SafetensorsFile(next(p for p in out.glob("*.safetensors") if name in SafetensorsFile(p).entries)) as file:
        old = file.raw(name)[nbytes // 2]
    change(out, name, nbytes // 2, bytes([old ^ 1]))
    (problem,) = (one for one in complete(out)["problems"] if "convert wrote" in one["problem"])
    assert problem["problem"] == f"not the bytes that convert wrote, by breccia.json: {name}"
    report = verify(tmp_path / "in", out)
    assert not report["ok"]
    assert list(report["damaged"].values()) == [[name]]


def test_a_manifest_is_the_same_in_every_run_and_of_none_of_the_source(tmp_path: Path) -> None:
    convert(source(tmp_path / "in"), tmp_path / "a", "nvfp4", threads=1)
    shutil.copytree(tmp_path / "in", tmp_path / "other" / "in")
    convert(tmp_path / "other" / "in", tmp_path / "b", "nvfp4", threads=3)
    assert (tmp_path / "a" / "breccia.json").read_bytes() == (tmp_path / "b" / "breccia.json").read_bytes()
    convert(tmp_path / "a", tmp_path / "c", "bf16")
    assert json.loads((tmp_path / "c" / "breccia.json").read_text())["to"] == "bf16"
    convert(tmp_path / "a", tmp_path / "d", "bf16", checksums=False)
    assert not (tmp_path / "d" / "breccia.json").exists()


def test_a_manifest_has_all_of_a_tensor_of_which_several_are_made(tmp_path: Path) -> None:
    manifest, raw = Manifest(parse_target("nvfp4"), None), np.arange(200, dtype=np.uint8)
    for start in (100, 0):
        read = Sums()
        read.add("a", start, raw[start : start + 100])
        manifest.add("out", [], read.taken(), {})
    manifest.write(tmp_path / "breccia.json", [], None)
    said = json.loads((tmp_path / "breccia.json").read_text())
    assert said["source"] == {"a": f"0-200={checksum(raw):016x}"}


@pytest.mark.parametrize("text", ["0-4=1 0-4=2", "0-4"])
def test_a_manifest_of_other_checksums_is_refused(text: str, tmp_path: Path) -> None:
    convert(source(tmp_path / "in"), tmp_path / "out", "bf16")
    place = tmp_path / "out" / "breccia.json"
    said = json.loads(place.read_text())
    next(iter(said["files"].values()))["l.0.0.weight"][2] = text
    place.write_text(json.dumps(said))
    with pytest.raises(ValueError, match="must have checksums as convert writes them"):
        complete(tmp_path / "out")


@pytest.mark.parametrize("to", ["nvfp4", "gguf:q8_0"])
def test_sha256_of_all_tensors_on_request(to: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(source(tmp_path / "in"), out, to, manifest=True)
    place = out / "breccia.json" if out.is_dir() else tmp_path / "out.breccia.json"
    said = json.loads(place.read_text())["sha256"]
    for path in (tmp_path / "in").glob("*.safetensors"):
        for name, array in SafetensorsFile(path).items():
            assert said["source"][name] == hashlib.sha256(array.tobytes()).hexdigest()
    if out.is_dir():
        for path in out.glob("*.safetensors"):
            file = SafetensorsFile(path)
            assert said["files"][path.name] == {n: hashlib.sha256(file.raw(n)).hexdigest() for n in file}
    assert complete(out)["ok"]


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("nvfp4", {"scale_search": "mse", "exclude": ["l.0.0.*"]}),
    ("compressed-tensors:nvfp4", {"rules": ["*1.0=fp8"], "activations": "dynamic"}),
    ("gguf:q4_k", {}),
    ("int4", {"group_size": 32}),
]


@pytest.mark.always
@pytest.mark.parametrize(("to", "options"), OPTIONS)
def test_a_conversion_is_made_again(to: str, options: dict[str, Any], tmp_path: Path) -> None:
    base, out = source(tmp_path / "in"), tmp_path / "out"
    convert(base, out, to, manifest=True, **options)
    before = sorted(path.name for path in tmp_path.iterdir())
    report = rederive(base, out)
    assert report["ok"], report
    assert before == sorted(path.name for path in tmp_path.iterdir())
    said = statement(report)
    files = [out] if out.is_file() else sorted(out.glob("*.safetensors"))
    subjects = {one["name"]: one["digest"]["sha256"] for one in said["subject"]}
    for path in files:
        assert subjects[path.name] == hashlib.sha256(path.read_bytes()).hexdigest()
    with files[-1].open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    size = files[-1].stat().st_size
    report = rederive(base, out)
    assert report["differs"] == f"{files[-1].name}: byte {size - 1:,}; it was changed afterwards"
    assert rederived(report)[-1] == "not ok"


def test_another_base_is_told(tmp_path: Path) -> None:
    base, out = source(tmp_path / "in"), tmp_path / "out"
    convert(base, out, "mxfp8")
    change(base, "l.1.1.weight", 0, struct.pack("<f", 100.0))
    report = rederive(base, out)
    assert not report["ok"]
    assert report["differs"].endswith("base is not what it was made of: tensor 'l.1.1.weight' has other bytes")


def test_data_is_asked_for_by_its_digest(tmp_path: Path) -> None:
    from breccia.moments import Moments, save_moments

    base, out, file = source(tmp_path / "in"), tmp_path / "out", tmp_path / "m.safetensors"
    diagonal = np.linspace(1, 9, 128).astype(np.float32)
    moments = {f"l.{a}.{b}": Moments(diag=diagonal, count=np.int64(1000)) for a in range(2) for b in range(2)}
    save_moments(moments, file)
    convert(base, out, "nvfp4", moments=file, scale_search="mse")
    with pytest.raises(ValueError, match=r"data must have the moments of SHA-256 \w{64}, which was m.safetensors"):
        rederive(base, out)
    shutil.move(file, tmp_path / "elsewhere")
    assert rederive(base, out, data=[tmp_path / "elsewhere"])["ok"]


def test_what_has_no_manifest_is_told(tmp_path: Path) -> None:
    save_arrays({"a.weight": weight(64, 64)}, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "mxfp8")
    assert not (tmp_path / "b.safetensors.breccia.json").exists()
    with pytest.raises(ValueError, match=r"must have b\.safetensors\.breccia\.json to be made again"):
        rederive(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
