# SPDX-License-Identifier: Apache-2.0
"""Files are written by one module, which says what a disk error means and lets files appear when they are complete."""

import ast
from pathlib import Path

import breccia
import pytest

ROOT = Path(breccia.__file__).parent
WRITER = ROOT / "checkpoint/files/disk.py"
# Where a file is written otherwise, and why.
OTHERS = {
    ("kernels/triton/products/autotune.py", "write_text"): "a cache in the user's home, below checkpoints; renamed",
    ("cli/terminal.py", "os.open"): "the null device, for streams that are closed",
    ("evaluation/predictions.py", "np.memmap"): "logits in a folder of temporary files",
}
METHODS = {"write_text", "write_bytes", "savefig", "tofile", "touch", "hardlink_to", "symlink_to"}
FUNCTIONS = {
    "os": {"open", "write", "pwrite", "rename", "replace", "link", "symlink", "truncate", "mkfifo"},
    "shutil": {"copy", "copy2", "copyfile", "copytree", "move"},
    "np": {"save", "savez", "savez_compressed", "savetxt", "memmap"},
    "torch": {"save"},
    "json": {"dump"},
    "pickle": {"dump"},
    "tempfile": {"NamedTemporaryFile", "mkstemp", "TemporaryFile"},
}


def writes(tree):
    """What a module calls that may write a file."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        function = call.func
        if isinstance(function, ast.Name) and function.id in ("save_file", "memmap"):
            yield function.id
        if isinstance(function, ast.Attribute):
            owner = function.value.id if isinstance(function.value, ast.Name) else ""
            if function.attr in METHODS:
                yield function.attr
            elif function.attr in FUNCTIONS.get(owner, ()):
                yield f"{owner}.{function.attr}"
        if getattr(function, "attr", getattr(function, "id", "")) in ("open", "fdopen", "FileIO", "ZipFile"):
            modes = [*call.args, *(one.value for one in call.keywords if one.arg == "mode")]
            texts = [one.value for one in modes if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            if any(len(text) <= 3 and set(text) & set("wax+") for text in texts):
                yield "open"


def test_every_file_is_written_by_one_module():
    found = {
        (path.relative_to(ROOT).as_posix(), what)
        for path in ROOT.rglob("*.py")
        if path != WRITER
        for what in writes(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == set(OTHERS)


@pytest.mark.parametrize(
    "text",
    [
        "open(p, 'w')", "open(p, mode='ab')", "p.open('x')", "p.write_text(t)", "figure.savefig(p)", "np.save(p, x)",
        "x.tofile(p)", "json.dump(x, f)", "torch.save(x, p)", "os.open(p, os.O_CREAT)", "shutil.copyfile(a, b)",
        "save_file(x, p)", "tempfile.mkstemp()", "os.replace(a, b)",
    ],
)  # fmt: skip
def test_ways_of_writing_are_found(text):
    assert list(writes(ast.parse(text)))
