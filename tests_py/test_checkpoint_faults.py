# SPDX-License-Identifier: Apache-2.0
"""What happens to a conversion that is killed, interrupted, out of disk, or not alone."""

import errno
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from breccia.checkpoint import SafetensorsFile, SafetensorsWriter, convert, inspect, save_arrays, verify
from breccia.checkpoint.files import disk, locks
from breccia.checkpoint.writing.journal import Journal, read_journal
from breccia.checkpoint.writing.work import partial_of
from checkpoints import weight, write_shards
from fault_runner import tree

RUNNER = Path(__file__).with_name("fault_runner.py")
KILLER = Path(__file__).with_name("kill_runner.py")
convert_module = importlib.import_module("breccia.checkpoint.writing.convert")


def shards(path: Path) -> Path:
    arrays = {f"layers.{i}.weight": weight(32, 64) for i in range(2)}
    return write_shards(path, [arrays, {"z.weight": weight(64, 32), "z.bias": weight(64)}], {})


def one_file(path: Path) -> Path:
    save_arrays({f"layers.{i}.weight": weight(32, 64) for i in range(3)}, path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


KINDS_OF_ERRORS = [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.ESTALE, errno.ETIMEDOUT]
CASES = [(shards, "mxfp8"), (one_file, "gguf:q8_0"), (one_file, "bf16")]


@pytest.mark.in_turn
@pytest.mark.parametrize(("make", "to"), CASES)
def test_a_kill_before_any_call_loses_nothing(make: Any, to: str, tmp_path: Path) -> None:
    """The output is absent or complete, and the resumed one is the uninterrupted one, byte for byte."""
    command = [sys.executable, str(RUNNER), str(make(tmp_path / "in")), str(tmp_path / "out"), to]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    assert said["stopped"] > 60
    assert {"make directory", "create", "reserve space for", "write", "flush", "rename to", "remove"} <= {
        *said["calls"]
    }


@pytest.mark.parametrize("to", ["mxfp8", "gguf:q8_0"])
def test_a_kill_at_any_moment_loses_nothing(to: str, tmp_path: Path) -> None:
    """The same with signals that come when they like."""
    arrays = [{f"l.{shard}.{i}.weight": weight(128, 256) for i in range(4)} for shard in range(2)]
    source = write_shards(tmp_path / "in", arrays, {})
    command = [sys.executable, str(KILLER), str(source), str(tmp_path / "out"), to, "8"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["killed"] >= 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_every_change_of_the_disk_is_stopped_at(tmp_path: Path) -> None:
    """Nothing but `breccia.checkpoint.files.disk` changes the disk: else the kills above would miss it."""
    source, seen = shards(tmp_path / "in"), []
    changes = {
        "os.mkdir",
        "os.rename",
        "os.remove",
        "os.rmdir",
        "os.truncate",
        "os.link",
        "os.symlink",
        "shutil.rmtree",
    }
    watching = [True]

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if not watching[0] or threading.get_ident() != main:
            return
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if (event in changes or writes) and not str(args[0]).startswith(("/proc", "/dev")):
            frames = []
            frame = sys._getframe(1)
            while frame is not None and len(frames) < 6:
                frames.append(frame.f_code.co_filename)
                frame = frame.f_back  # type: ignore[assignment]
            seen.append((event, frames))

    main = threading.get_ident()
    sys.addaudithook(audit)
    convert(source, tmp_path / "out", "mxfp8", threads=1)
    watching[0] = False
    assert len(seen) > 10
    for event, frames in seen:
        assert any(name.endswith("disk.py") for name in frames), (event, frames)
    for path in Path(disk.__file__).parents[1].rglob("*.py"):
        if path.name != "disk.py":
            text = path.read_text()
            for call in ("os.pwrite(", "os.fsync(", "os.ftruncate(", "fallocate(", '.open("w', '.open("a', "shutil."):
                assert call not in text, f"{path.name} calls {call}"


def test_a_final_file_without_its_record_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between a shard's last name and anything that says so."""
    source = shards(tmp_path / "in")
    convert(source, tmp_path / "wanted", "mxfp8")
    monkeypatch.setattr(convert_module, "_SYNC_EVERY", 1)

    def stop(what: str, path: Path) -> None:
        if what == "flush" and path.name == "out":
            raise KeyboardInterrupt

    monkeypatch.setattr(disk, "before", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", "mxfp8")
    monkeypatch.setattr(disk, "before", None)
    assert len(list((tmp_path / ".out.partial" / "out").glob("*.safetensors"))) == 1
    convert(source, tmp_path / "out", "mxfp8")
    assert tree(tmp_path / "out") == tree(tmp_path / "wanted")


@pytest.mark.parametrize("number", KINDS_OF_ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize(("make", "to"), [(shards, "mxfp8"), (one_file, "gguf:q8_0")])
def test_an_error_of_any_call_leaves_nothing_half_written(
    number: int, make: Any, to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is done is kept, and the same conversion goes on from there; where nothing is, nothing is left."""
    source, out = make(tmp_path / "in"), tmp_path / "new" / "out"
    monkeypatch.setattr(convert_module, "_SYNC_EVERY", 1)
    calls: list[str] = []
    monkeypatch.setattr(disk, "before", lambda what, _: calls.append(what))
    convert(source, out, to, threads=1)
    wanted, lost = tree(out), 0
    for step, call in enumerate(calls):
        folder = tmp_path / f"new{step}"
        left = [step]

        whole_before: dict[str, int] = {}

        def fail(what: str, path: Path, left: list[int] = left, folder: Path = folder) -> None:
            left[0] -= 1
            if left[0] == -1:
                whole_before.update(shards_of(partial_of(folder / "out") / "out"))
                raise OSError(number, os.strerror(number))

        monkeypatch.setattr(disk, "before", fail)
        try:
            report = convert(source, folder / "out", to, threads=1)
        except OSError as error:
            assert error.errno == number
            assert os.strerror(number) in str(error) and str(tmp_path) in str(error)
            assert len(str(error).splitlines()) == 1
            kept = "the same command goes on from there" in str(error)
            assert kept == partial_of(folder / "out").exists() == folder.exists(), (step, call)
            assert not (folder / "out").exists(), (step, call)
            there = shards_of(partial_of(folder / "out") / "out")
            lost += bool(whole_before) and not there
            monkeypatch.setattr(disk, "before", None)
            report = convert(source, folder / "out", to, threads=1)
            assert tree(folder / "out") == wanted, (step, call)
            assert there.items() <= shards_of(folder / "out").items(), (step, call)
            assert any("of an earlier run" in note for note in report["notes"]) == kept, (step, call)
            continue
        assert tree(folder / "out") == wanted, (step, call)
        assert call in ("remove", "flush"), (step, call)
        left_over = partial_of(folder / "out").exists()
        said = report["notes"][-1] if report["notes"] else ""  # said, not raised: the output is complete
        assert ("could not be removed" in said) == left_over, (step, call)
        assert call == "remove" or "may not outlast a power failure" in said, (step, call)
    assert not lost, "an error removed a file that was complete"


def shards_of(folder: Path) -> dict[str, int]:
    """When each complete file of weights was written last."""
    there = sorted(folder.glob("[!.]*.safetensors")) if folder.is_dir() else []
    return {path.name: path.stat().st_mtime_ns for path in there}


def test_a_journal_cut_anywhere_is_read_to_where_it_holds(tmp_path: Path) -> None:
    key, path = bytes(32), tmp_path / "journal"
    journal = Journal(path, key)
    records = [("begin",), ("tensor", "a", "x\ny"), ("tensor", "a", "\u00fc" * 100)]
    for record in records:
        journal.add([record])
    journal.close()
    raw = path.read_bytes()
    for cut in range(len(raw)):
        path.write_bytes(raw[:cut])
        got, end = read_journal(path, key)
        assert got == records[: len(got)] and end <= cut and len(got) < 3
    for at in range(len(raw)):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        assert len(read_journal(path, key)[0]) < 3
    path.write_bytes(raw)
    assert read_journal(path, key)[0] == records
    assert read_journal(path, b"\1" * 32) == ([], 16)
    path.write_bytes(raw[:-3])
    again = Journal(path, key)
    again.add([("tensor", "b", "z")])
    again.close()
    assert read_journal(path, key)[0] == [*records[:2], ("tensor", "b", "z")]


@pytest.mark.parametrize("name", ["journal", "lock", "out"])
def test_outputs_may_have_any_name(name: str, tmp_path: Path) -> None:
    source = shards(tmp_path / "in")
    index = source / "model.safetensors.index.json"
    old = "model-00001-of-00002.safetensors"
    (source / old).rename(source / name)
    index.write_text(index.read_text().replace(old, name))
    convert(source, tmp_path / "q", "mxfp8")
    assert verify(source, tmp_path / "q")["ok"]
    save_arrays({"a.weight": weight(32, 64)}, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / name, "mxfp8")
    assert verify(tmp_path / "a.safetensors", tmp_path / name)["ok"]


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", "other.index.json"])
def test_shards_may_not_have_names_of_what_is_written_beside_them(name: str, tmp_path: Path) -> None:
    source = shards(tmp_path / "in")
    index = source / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001-of-00002.safetensors", name))
    with pytest.raises(ValueError, match="files must be of tensors"):
        convert(source, tmp_path / "q", "mxfp8")


def stopped_half_way(source: Path, out: Path, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupts a conversion when its first tensor is on disk."""
    monkeypatch.setattr(convert_module, "_SYNC_EVERY", 1)
    records = [0]

    def stop(what: str, path: Path) -> None:
        records[0] += what == "write" and path.name == "journal"
        if records[0] == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(disk, "before", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, to)
    monkeypatch.setattr(disk, "before", None)
    assert partial_of(out).is_dir()


def test_names_cannot_forge_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["a.weight", "a.weight\ntensor b.weight", "b.weight", '["tensor", "out", "b.weight"]']
    save_arrays({name: weight(32, 64) + i for i, name in enumerate(names)}, tmp_path / "in.safetensors")
    convert(tmp_path / "in.safetensors", tmp_path / "wanted", "bf16")
    stopped_half_way(tmp_path / "in.safetensors", tmp_path / "out", "bf16", monkeypatch)
    convert(tmp_path / "in.safetensors", tmp_path / "out", "bf16")
    assert tree(tmp_path / "out") == tree(tmp_path / "wanted")


def change_config(source: Path) -> None:
    path = source / "config.json"
    path.write_text(path.read_text().replace('"test"', '"test", "x": 1'))


def change_version(source: Path) -> None:
    importlib.import_module("breccia.checkpoint.planning.identity").__version__ = "another"


@pytest.mark.parametrize("change", [change_config, change_version])
def test_only_the_same_conversion_is_resumed(change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("breccia.checkpoint.planning.identity")
    monkeypatch.setattr(module, "__version__", module.__version__)
    source = shards(tmp_path / "in")
    stopped_half_way(source, tmp_path / "out", "mxfp8", monkeypatch)
    change(source)
    done = []
    real = convert_module.execute
    monkeypatch.setattr(convert_module, "execute", lambda *a: (done.append(a), real(*a))[1])
    report = convert(source, tmp_path / "out", "mxfp8")
    assert len(done) == 4  # all of them
    what = "config.json" if change is change_config else "version of breccia"
    assert any(f"all is made anew: an earlier run was of other {what}" in note for note in report["notes"])
    assert verify(source, tmp_path / "out")["ok"]


def touch(source: Path) -> None:
    for path in source.iterdir():
        path.chmod(0o600)
        os.utime(path)


def link(source: Path) -> None:
    for path in source.glob("*.safetensors"):
        path.with_suffix(".link").hardlink_to(path)
        path.with_suffix(".link").unlink()


def copy(source: Path) -> None:
    shutil.copytree(source, source.with_name("copied"))
    shutil.rmtree(source)
    source.with_name("copied").rename(source)


def others_beside(source: Path) -> None:
    (source / "README.md").write_text("x")
    (source / "tokenizer.json").write_text("{ }")


def other_spelling(source: Path) -> None:
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=7))


@pytest.mark.always
@pytest.mark.parametrize("change", [touch, link, copy, others_beside, other_spelling])
def test_a_source_is_known_by_its_contents(change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = shards(tmp_path / "in")
    (source / "README.md").write_text("a")
    stopped_half_way(source, tmp_path / "out", "mxfp8", monkeypatch)
    change(source)
    done = []
    real = convert_module.execute
    monkeypatch.setattr(convert_module, "execute", lambda *a: (done.append(a), real(*a))[1])
    report = convert(source, tmp_path / "out", "mxfp8")
    assert len(done) == 3  # but one
    assert "1 tensors are kept of an earlier run" in report["notes"]
    convert(source, tmp_path / "wanted", "mxfp8")
    assert tree(tmp_path / "out") == tree(tmp_path / "wanted")


@pytest.mark.always
@pytest.mark.parametrize(("kind", "to"), [("gguf:q8_0", "mxfp8"), ("gguf:q8_0", "gguf:q4_k"), ("gptq:int4", "bf16")])
def test_a_file_of_any_kind_is_known_by_its_contents(
    kind: str, to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = {f"layers.{i}.weight": weight(256, 256) for i in range(3)}
    plain = write_shards(tmp_path / "plain", [arrays], {})
    convert(plain, tmp_path / "in", kind)
    stopped_half_way(tmp_path / "in", tmp_path / "out", to, monkeypatch)
    for path in (tmp_path / "in").iterdir() if kind == "gptq:int4" else [tmp_path / "in"]:
        os.utime(path)
    report = convert(tmp_path / "in", tmp_path / "out", to)
    assert "1 tensors are kept of an earlier run" in report["notes"]
    convert(tmp_path / "in", tmp_path / "wanted", to)
    assert tree(tmp_path / "out") == tree(tmp_path / "wanted")


def test_only_what_changed_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what has its scale from a part that changed, in another file."""
    names = [f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo"]
    arrays = [{name: weight(64, 64) * (i + 1) for i, name in enumerate(names[:3])}, {names[3]: weight(64, 64)}]
    arrays[1]["layers.1.self_attn.q_proj.weight"] = weight(64, 64)
    arrays[1]["layers.1.self_attn.k_proj.weight"] = weight(64, 64)
    source = write_shards(tmp_path / "in", [arrays[0], arrays[1]], {})
    monkeypatch.setattr(convert_module, "_SYNC_EVERY", 1)

    def stop(what: str, path: Path) -> None:
        if what == "write" and path.name == "model.safetensors.index.json":
            raise KeyboardInterrupt

    monkeypatch.setattr(disk, "before", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", "compressed-tensors:nvfp4")
    monkeypatch.setattr(disk, "before", None)
    arrays[0][names[2]] = arrays[0][names[2]] * 2
    shutil.rmtree(source)
    write_shards(source, [arrays[0], arrays[1]], {})
    done = []
    real = convert_module.execute
    monkeypatch.setattr(convert_module, "execute", lambda *a: (done.append(a[1].found.name), real(*a))[1])
    report = convert(source, tmp_path / "out", "compressed-tensors:nvfp4")
    assert sorted(done) == sorted(names[:3])
    said = "3 tensors are kept of an earlier run, 3 are made anew: model-00001-of-00002.safetensors has other bytes now"
    assert said in report["notes"]
    convert(source, tmp_path / "wanted", "compressed-tensors:nvfp4")
    assert tree(tmp_path / "out") == tree(tmp_path / "wanted")


def test_a_disk_without_space_is_found_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, real = shards(tmp_path / "in"), os.statvfs
    calls: list[str] = []

    def small(path: Any) -> Any:
        return os.statvfs_result((1024, 1024, 100, 4, 4, *real(path)[5:]))

    monkeypatch.setattr(os, "statvfs", small)
    monkeypatch.setattr(disk, "before", lambda what, _: calls.append(what))
    with pytest.raises(OSError, match=r"No space left on device: .*out.partial needs [\d.]+ kB, 4.1 kB free") as error:
        convert(source, tmp_path / "out", "mxfp8")
    assert error.value.errno == errno.ENOSPC
    assert "reserve space for" not in calls
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_temporary_folders_of_killed_processes_are_removed(tmp_path: Path) -> None:
    code = (
        "import os, sys; from breccia.checkpoint.files.locks import scratch\nwith scratch('t-', sys.argv[1]) as place:"
    )
    code += "\n (place / 'large').write_bytes(bytes(9))\n os.kill(os.getpid(), 9)"
    for _ in range(2):
        assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -signal.SIGKILL
        assert len(list(tmp_path.iterdir())) == 1
    (tmp_path / "t-empty").mkdir()  # of a process that was killed before it had its lock
    (tmp_path / "t-full").mkdir()  # of one whose disk did not remove all of it, but its lock
    (tmp_path / "t-full" / "large").write_bytes(bytes(9))
    with locks.scratch("t-", tmp_path) as first, locks.scratch("t-", tmp_path) as second:
        assert sorted(tmp_path.iterdir()) == sorted([first, second])  # what is in use stays
    assert not list(tmp_path.iterdir())


def test_a_temporary_folder_may_be_taken_for_one_that_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a process that looks between its making and its lock: another is made."""
    removed: list[Path] = []

    def before(what: str, path: Path) -> None:
        if what == "create" and not removed:
            removed.append(path.parent)
            path.parent.rmdir()

    monkeypatch.setattr(disk, "before", before)
    with locks.scratch("t-", tmp_path) as made:
        assert [made] == list(tmp_path.iterdir()) != removed
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_faults_of_every_command_that_takes_long_lose_nothing() -> None:
    for name in ("onnx", "tokenizers", "transformers", "matplotlib"):
        pytest.importorskip(name)
    command = [sys.executable, str(Path(__file__).with_name("fault_counts.py")), "--kills", "44", "--errors", "66"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    *each, every = map(json.loads, run.stdout.splitlines())
    assert run.returncode == 0, run.stderr
    assert len(each) == 11 and min(one["kills"] for one in each) >= 4
    assert every["kills"] >= 44 and every["errors"] >= 66 and every["kept shards"] and not every["lost shards"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_a_small_file_is_whole_or_as_it_was(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, calls = tmp_path / "plan.toml", list[str]()
    monkeypatch.setattr(disk, "before", lambda what, _: calls.append(what))
    disk.replace_file(path, b"old")
    for step in range(len(calls)):
        left = [step]

        def fail(what: str, _: Path, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == -1:
                raise OSError(number, os.strerror(number))

        monkeypatch.setattr(disk, "before", fail)
        with pytest.raises(OSError, match=os.strerror(number)):
            disk.replace_file(path, b"another")
        assert path.read_bytes() in (b"old", b"another")
        assert [one.name for one in tmp_path.iterdir()] == ["plan.toml"]


@pytest.mark.always
@pytest.mark.parametrize("to", ["mxfp8", "gguf:q8_0", "onnx:int8", "onnx:nvfp4"])
def test_a_file_that_no_record_speaks_of_is_not_trusted(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a writer lays down before the tensors: killed between any two of its writes, it begins anew."""
    if to.startswith("onnx"):
        pytest.importorskip("onnx")
    source = one_file(tmp_path / "in")
    convert(source, tmp_path / "wanted", to)
    for step in range(1, 8):
        count = [0]

        def stop(what: str, path: Path, step: int = step, count: list[int] = count) -> None:
            count[0] += what == "write" and path.name == ".out.partial"
            if count[0] == step:
                raise KeyboardInterrupt

        monkeypatch.setattr(disk, "before", stop)
        try:
            convert(source, tmp_path / "out", to, checksums=False)
        except KeyboardInterrupt:
            monkeypatch.setattr(disk, "before", None)
            convert(source, tmp_path / "out", to, checksums=False)
        assert tree(tmp_path / "out") == tree(tmp_path / "wanted"), step
        (tmp_path / "out").unlink()


def gptq_said_to_be_v2(source: Path) -> None:
    """Zero points that count from 0, not from 1, of the same bytes."""
    path = source / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    path.write_text(json.dumps(config))


def changed_weights(source: Path) -> None:
    """By as many bytes as there were, at the time that there was."""
    path = next(source.glob("*.safetensors"))
    said, raw = path.stat(), bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(said.st_atime_ns, said.st_mtime_ns))


@pytest.mark.parametrize("change", [gptq_said_to_be_v2, changed_weights])
def test_what_a_changed_source_gives_is_of_one_source(
    change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = write_shards(tmp_path / "plain", [{f"layers.{i}.weight": weight(64, 128) for i in range(4)}], {})
    convert(plain, tmp_path / "in", "gptq:int4")
    stopped_half_way(tmp_path / "in", tmp_path / "out", "bf16", monkeypatch)
    change(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "wanted", "bf16")
    convert(tmp_path / "in", tmp_path / "out", "bf16")
    assert tree(tmp_path / "out") == tree(tmp_path / "wanted")


@pytest.mark.parametrize(
    ("to", "options"),
    [("mxfp4", {}), ("nvfp4", {"scale_search": "mse"}), ("nvfp4", {"exclude": ["*layers.0*"]}), ("int4:asym:32", {})],
)
def test_another_target_begins_anew(
    to: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shards(tmp_path / "in")
    stopped_half_way(source, tmp_path / "out", "nvfp4", monkeypatch)
    convert(source, tmp_path / "out", to, **options)
    convert(source, tmp_path / "wanted", to, **options)
    assert tree(tmp_path / "out") == tree(tmp_path / "wanted")


def test_a_partial_that_does_not_fit_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = one_file(tmp_path / "in")
    convert(source, tmp_path / "wanted", "mxfp8")
    stopped_half_way(source, tmp_path / "out", "mxfp8", monkeypatch)
    (partial,) = (partial_of(tmp_path / "out") / "out").iterdir()
    partial.unlink()
    steps = [0]

    def stop(what: str, path: Path) -> None:
        steps[0] += path.name == partial.name
        if steps[0] == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(disk, "before", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", "mxfp8")  # begins the file again, and is interrupted
    monkeypatch.setattr(disk, "before", None)
    convert(source, tmp_path / "out", "mxfp8")
    assert tree(tmp_path / "out") == tree(tmp_path / "wanted")


def test_conversions_to_one_output_exclude_each_other(tmp_path: Path) -> None:
    source = shards(tmp_path / "in")
    inside, go = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def wait(what: str, path: Path) -> None:
        if what == "reserve space for" and threading.current_thread().name == "first":
            inside.set()
            assert go.wait(20)

    def first() -> None:
        try:
            convert(source, tmp_path / "out", "mxfp8")
        except BaseException as error:
            errors.append(error)

    disk.before = wait
    try:
        thread = threading.Thread(target=first, name="first")
        thread.start()
        assert inside.wait(20)
        with pytest.raises(BlockingIOError, match="one conversion at a time"):
            convert(source, tmp_path / "out", "mxfp8")
        go.set()
        thread.join()
    finally:
        disk.before = None
    assert not errors
    assert verify(source, tmp_path / "out")["ok"]
    assert not partial_of(tmp_path / "out").exists()
    with pytest.raises(FileExistsError, match="destination must not be there"):
        convert(source, tmp_path / "out", "mxfp8")


def test_converters_race_for_one_output(tmp_path: Path) -> None:
    source = shards(tmp_path / "in")
    command = [sys.executable, "-m", "breccia", "convert", str(source), str(tmp_path / "out"), "--to", "mxfp8"]
    runs = [subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    codes = [(run.communicate()[1], run.returncode) for run in runs]
    assert sorted(code for _, code in codes) == [0, 2, 2]
    for text, code in codes:
        assert code == 0 or "one conversion at a time" in text or "OUT must not be there" in text
    assert verify(source, tmp_path / "out")["ok"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


def test_writers_of_one_file_exclude_each_other(tmp_path: Path) -> None:
    plan = {"a": ("U8", (4,))}
    with SafetensorsWriter(tmp_path / "a.safetensors", plan) as writer:
        with pytest.raises(BlockingIOError, match="one writer at a time"):
            SafetensorsWriter(tmp_path / "a.safetensors", plan)
        writer.write("a", np.arange(4, dtype=np.uint8))
    assert SafetensorsFile(tmp_path / "a.safetensors")["a"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_leave_what_the_next_run_goes_on_with(number: int, tmp_path: Path) -> None:
    save_arrays({f"layers.{i}.weight": weight(512, 1024) for i in range(24)}, tmp_path / "in.safetensors")
    code = (
        "import signal, sys, time; from breccia.checkpoint.files import disk; from breccia.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # which a shell in the background leaves out
        "def slow(what, path):\n"
        "    if what == 'write': time.sleep(0.02); print('.', flush=True)\n"
        "disk.before = slow; sys.exit(main(['convert', *sys.argv[1:], '--to', 'mxfp8']))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "in.safetensors"), str(tmp_path / "out")]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    for _ in range(6):
        run.stdout.readline()
    run.send_signal(number)
    begin = time.monotonic()
    _, said = run.communicate(timeout=20)
    assert time.monotonic() - begin < 5
    assert run.returncode == (130 if number == signal.SIGINT else 143)
    assert said == "breccia: interrupted: the same command goes on where this one was\n"
    assert not (tmp_path / "out").exists()
    convert(tmp_path / "in.safetensors", tmp_path / "out", "mxfp8")
    convert(tmp_path / "in.safetensors", tmp_path / "wanted", "mxfp8")
    assert tree(tmp_path / "out") == tree(tmp_path / "wanted")
    assert not partial_of(tmp_path / "out").exists()


def test_an_interrupt_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_arrays({"a.weight": weight(4096, 2048)}, tmp_path / "in.safetensors")
    before = set(threading.enumerate())
    writes = [0]

    def stop(what: str, path: Path) -> None:
        writes[0] += what == "write"
        if writes[0] == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(disk, "before", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "in.safetensors", tmp_path / "out", "bf16", threads=4)
    assert set(threading.enumerate()) == before


def test_an_input_that_is_cut_meanwhile_is_an_error(tmp_path: Path) -> None:
    """Where files are mapped it kills the process: run in one of its own."""
    source = tmp_path / "in.safetensors"
    save_arrays({f"layers.{i}.weight": weight(1024, 1024) for i in range(4)}, source)
    code = (
        "import os, sys; from breccia.checkpoint.files import disk; from breccia.cli import main\n"
        "def cut(what, path):\n"
        "    if what == 'reserve space for': os.truncate(sys.argv[1], 1 << 20)\n"
        "disk.before = cut; sys.exit(main(['convert', *sys.argv[1:]]))"
    )
    for to in ("bf16", "mxfp8", "fp32", "modelopt:nvfp4"):
        save_arrays({f"layers.{i}.weight": weight(1024, 1024) for i in range(4)}, source)
        command = [sys.executable, "-c", code, str(source), str(tmp_path / "out"), "--to", to]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 2, (to, run)
        assert "in.safetensors: must not change while it is read" in run.stderr
        assert [p.name for p in tmp_path.iterdir()] == ["in.safetensors"]


@pytest.mark.parametrize("what", ["weights", "replaced", "config.json", "index"])
def test_an_input_that_changes_meanwhile_is_an_error(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shards(tmp_path / "in")
    shard = source / "model-00001-of-00002.safetensors"

    def change(call: str, path: Path) -> None:
        if call != "flush" or not path.name.startswith(".model-00001"):
            return
        if what == "weights":
            with shard.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"\1")
        elif what == "replaced":
            (source / "copy").write_bytes(shard.read_bytes())
            (source / "copy").replace(shard)
        else:
            file = source / ("config.json" if what == "config.json" else "model.safetensors.index.json")
            file.write_text(file.read_text() + " ")

    monkeypatch.setattr(disk, "before", change)
    with pytest.raises(ValueError, match="must not change while it is read"):
        convert(source, tmp_path / "out", "mxfp8")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_a_lying_shape_reserves_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """weight_shape is data, which headers do not bound."""
    arrays = {
        "a.weight_packed": np.zeros((64, 8), np.int32),
        "a.weight_scale": np.ones((64, 1), np.float32),
        "a.weight_shape": np.array([1 << 20, 1 << 19], np.int64),
    }
    save_arrays(arrays, tmp_path / "in.safetensors")
    reserved: list[int] = []
    monkeypatch.setattr(disk, "reserve", lambda fd, size, path: reserved.append(size))
    with pytest.raises(ValueError, match=r"in\.safetensors: tensor 'a\.weight'.*weight_shape"):
        convert(tmp_path / "in.safetensors", tmp_path / "out", "bf16")
    assert not reserved
    assert [p.name for p in tmp_path.iterdir()] == ["in.safetensors"]
    assert inspect(tmp_path / "in.safetensors")["tensors"]


@pytest.mark.in_turn
@pytest.mark.parametrize(("make", "to"), [(shards, "mxfp8"), (one_file, "bf16")])
def test_a_kill_while_an_output_is_replaced_loses_neither(make: Any, to: str, tmp_path: Path) -> None:
    """The output is the old one or the new one, whole; at most it waits beside to be put back by the next run."""
    source, old = make(tmp_path / "in"), tmp_path / "old"
    convert(source, old, "fp16")
    command = [sys.executable, str(RUNNER), str(source), str(tmp_path / "out"), to, str(old)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["stopped"] > 60


@pytest.mark.parametrize(("make", "to"), [(shards, "mxfp8"), (one_file, "bf16")])
def test_an_error_while_an_output_is_replaced_leaves_the_old_one(
    make: Any, to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = make(tmp_path / "in"), tmp_path / "out"
    calls: list[str] = []
    convert(source, tmp_path / "old", "fp16")
    old = tree(tmp_path / "old")
    convert(source, out, "fp16")
    monkeypatch.setattr(disk, "before", lambda what, _: calls.append(what))
    convert(source, out, to, threads=1, force=True)
    monkeypatch.setattr(disk, "before", None)
    new = tree(out)
    assert new != old
    for step, call in enumerate(calls):
        convert(source, out, "fp16", force=True)
        left = [step]

        def fail(what: str, path: Path, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == -1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(disk, "before", fail)
        try:
            convert(source, out, to, threads=1, force=True)
        except OSError:
            assert tree(out) == old, (step, call)
        else:
            assert tree(out) == new, (step, call)
        monkeypatch.setattr(disk, "before", None)
    convert(source, out, to, force=True)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def test_another_conversion_finds_the_old_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the two steps, with the old output beside: whoever comes next, it is there again."""
    source, out = shards(tmp_path / "in"), tmp_path / "out"
    convert(source, out, "fp16")
    old = tree(out)

    def stop(what: str, path: Path) -> None:
        if what == "rename to" and path == out:
            raise KeyboardInterrupt

    monkeypatch.setattr(disk, "before", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, "mxfp8", force=True)
    monkeypatch.setattr(disk, "before", None)
    assert not out.exists()
    with pytest.raises(FileExistsError, match=f"^destination must not be there, {out} is"):
        convert(source, out, "mxfp4")
    assert tree(out) == old


def test_the_source_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    source = shards(tmp_path / "in" / "model")
    before = tree(source)
    (tmp_path / "link").symlink_to(source)
    for out, sentence in (
        (source, "destination must not replace the source"),
        (tmp_path / "link", "destination must not replace the source"),
        (tmp_path / "in", "destination must not replace the source"),
        (source / "q", "destination must not be inside of the source"),
    ):
        with pytest.raises(ValueError, match=f"^{sentence} {source}, got {out}$"):
            convert(source, out, "bf16", force=True)
    assert tree(source) == before
    assert sorted(p.name for p in tmp_path.rglob(".*")) == []


def test_only_an_output_of_the_same_kind_is_replaced(tmp_path: Path) -> None:
    source, file = shards(tmp_path / "in"), one_file(tmp_path / "a")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "letter.txt").write_text("dear")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    for given, out, sentence in (
        (source, tmp_path / "folder", "must hold a checkpoint to be replaced by one, .* holds other files"),
        (source, file, "must be a directory to be replaced by one, .* is something else"),
        (file, tmp_path / "folder", "must be a file to be replaced by one, .* is something else"),
        (source, tmp_path / "link", "must be a directory to be replaced by one, .* is something else"),
    ):
        before = tree(out)
        with pytest.raises(ValueError, match=f"^destination {sentence}$"):
            convert(given, out, "bf16", force=True)
        assert tree(out) == before
    (tmp_path / "empty").mkdir()
    convert(source, tmp_path / "empty", "bf16", force=True)
    convert(source, tmp_path / "new", "bf16", force=True)
    assert tree(tmp_path / "empty") == tree(tmp_path / "new")


MEDDLING = (
    "remove a shard",
    "change a shard",
    "replace a shard",
    "add a shard",
    "remove config.json",
    "remove all",
    "move",
)


@pytest.mark.parametrize("what", MEDDLING)
def test_an_output_that_others_touch_meanwhile_is_an_error(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a file is complete and before the whole has its name."""
    source, out = shards(tmp_path / "in"), tmp_path / "out"
    work, first = partial_of(out), partial_of(out) / "out" / "model-00001-of-00002.safetensors"

    def meddle(call: str, path: Path) -> None:
        # The last file is on disk, and so is config.json where it is meant.
        last = "journal" if "all" in what or "config" in what else ".model-00002-of-00002.safetensors.partial"
        if done or call != "flush" or path.name not in (last, "tokenizer.json"):
            return
        if ("config" in what and not (work / "out/config.json").exists()) or not first.exists():
            return
        done.append(path)
        if what == "remove a shard":
            first.unlink()
        elif what == "change a shard":
            raw = first.read_bytes()
            first.write_bytes(raw[:-1] + b"\0")
        elif what == "replace a shard":
            first.with_name("x").write_bytes(first.read_bytes())
            first.with_name("x").replace(first)
        elif what == "add a shard":
            first.with_name("more.safetensors").write_bytes(first.read_bytes())
        elif what == "remove config.json":
            (work / "out" / "config.json").unlink()
        elif what == "remove all":
            disk.before = None
            disk.remove_tree(work)
        else:
            work.rename(tmp_path / "elsewhere")

    done: list[Path] = []
    monkeypatch.setattr(disk, "before", meddle)
    with pytest.raises((ValueError, OSError)) as caught:
        convert(source, out, "mxfp8")
    monkeypatch.setattr(disk, "before", None)
    assert done, "nothing was touched"
    assert len(str(caught.value).splitlines()) == 1 and str(tmp_path) in str(caught.value)
    assert not out.exists()
    if what != "move":
        assert not work.exists()


def without_locks(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(locks.fcntl, "flock", refuse)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_a_file_takes_the_place_of_locks_where_there_are_none(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = shards(tmp_path / "in"), tmp_path / "out"
    convert(source, tmp_path / "wanted", "mxfp8")
    without_locks(number, monkeypatch)
    others: list[str] = []

    def another(call: str, path: Path) -> None:
        if call == "reserve space for" and not others:
            others.append("")
            with pytest.raises(BlockingIOError, match=r"lock.owner must not be there: the file system has no locks"):
                convert(source, out, "mxfp8")

    monkeypatch.setattr(disk, "before", another)
    convert(source, out, "mxfp8")
    monkeypatch.setattr(disk, "before", None)
    assert others
    assert tree(out) == tree(tmp_path / "wanted")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "wanted"]


def test_the_file_of_a_process_that_has_ended_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_locks(errno.ENOLCK, monkeypatch)
    code = (
        "import os, sys; from breccia.checkpoint.files import locks; from pathlib import Path\n"
        "def refuse(*_): raise OSError(37, 'x')\n"
        "locks.fcntl.flock = refuse; locks.lock(Path(sys.argv[1])); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "lock")], check=True)
    owner = tmp_path / "lock.owner"
    assert owner.exists()
    held = locks.lock(tmp_path / "lock")
    assert held is not None and held.holds()
    assert owner.read_text() == locks._me()
    owner.write_text("another")
    assert not held.holds()
    held.close()
    assert owner.exists(), "another's"
    owner.write_text("some.host 1 2 99999999 3")  # of another machine: nobody knows whether it has ended
    with pytest.raises(BlockingIOError, match=r"process 'some.host 1 2 99999999 3' is at work; remove it"):
        locks.lock(tmp_path / "lock")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EINTR], ids=errno.errorcode.get)
def test_an_error_of_locking_is_no_other_conversion(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shards(tmp_path / "in")
    without_locks(number, monkeypatch)
    with pytest.raises(OSError, match=r"cannot lock .*/\.out\.partial/lock: ") as caught:
        convert(source, tmp_path / "out", "mxfp8")
    assert caught.value.errno == number
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_kill_in_the_tidying_up_leaves_an_output_that_is_said_to_be_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each of its calls: the next run says that it is done, or that the output is there and complete."""
    source, calls = shards(tmp_path / "in"), []
    monkeypatch.setattr(disk, "before", lambda what, path: calls.append((what, path.name)))
    convert(source, tmp_path / "all", "mxfp8", threads=1)
    begin = calls.index(("rename to", "all")) + 1
    assert len(calls) - begin >= 3
    for step in range(begin, len(calls)):
        out, left = tmp_path / f"out{step}", [step]

        def stop(what: str, path: Path, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == -1:
                raise KeyboardInterrupt

        monkeypatch.setattr(disk, "before", stop)
        with pytest.raises(KeyboardInterrupt):
            convert(source, out, "mxfp8", threads=1)
        monkeypatch.setattr(disk, "before", None)
        try:
            convert(source, out, "mxfp8", threads=1)
        except FileExistsError as error:
            assert "is: it is complete, an earlier conversion to it was stopped while it tidied up" in str(error)
            assert calls[step] == ("remove", ".all.partial")
        assert tree(out) == tree(tmp_path / "all")
        assert not partial_of(out).exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "new.txt", "deep/er.txt"])
def test_what_is_copied_must_not_change_meanwhile(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = shards(tmp_path / "in")
    (source / "deep").mkdir()
    (source / "deep" / "er.txt").write_text("a")
    done: list[Path] = []

    def change(call: str, path: Path) -> None:
        if call == "reserve space for" and not done:
            done.append(path)
            (source / name).write_text("other")

    monkeypatch.setattr(disk, "before", change)
    with pytest.raises(ValueError, match=f"{name}: must not change while its folder is read, it did"):
        convert(source, tmp_path / "out", "mxfp8")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
