# SPDX-License-Identifier: Apache-2.0
"""Pages of `breccia explain`: each failing example fails with the message that the page is about, each repair passes,
and every note has a page."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import breccia
import pytest
from breccia.cli import explain
from test_cli import run

PACKAGE = Path(breccia.__file__).parent
PAGES = sorted((PACKAGE / "cli/explain").glob("*.md"))
BLOCK = re.compile(r'^```(python|sh)(?: title="(\w+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
# Notes and refusals whose example would need another program's files, a tokenizer, or a broken disk.
WITHOUT_EXAMPLE = {
    "adapter-lost", "block-scale-order", "calibration-short", "damped", "disk-trouble", "earlier-run",
    "experts-misread", "folded", "fp8-numbers", "input-scales", "kv-cache", "names-kept", "no-gguf-tokenizer",
    "no-tokenizer", "not-recorded", "not-smoothed", "one-level", "onnx-opset", "other-files", "other-weights",
    "program-misreads", "rotations", "scheme-not-written", "transformer-engine-states", "unknown-class",
}  # fmt: skip


def blocks(page: Path) -> list[tuple[str, str, str]]:
    return [(match[1], match[2] or "", match[3]) for match in BLOCK.finditer(page.read_text(encoding="utf-8"))]


def do(language: str, code: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run a block; the last command's exit code, and all that was printed."""
    if language == "python":
        exec(compile(code, "<page>", "exec"), {})
        return 0, ""
    said, last = "", 0
    for line in code.replace("\\\n", " ").strip().splitlines():
        program, *words = shlex.split(line)
        assert program == "breccia"
        last, out, err = run(*words, capsys=capsys)
        said += out + err
    return last, said


CASES = [
    pytest.param(page, number, id=f"{page.stem}-{title}{number}")
    for page in PAGES
    for number, (_, title, _) in enumerate(blocks(page))
    if title
]


@pytest.mark.always
@pytest.mark.parametrize(("page", "number"), CASES)
def test_examples(
    page: Path, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    every = blocks(page)
    for language, title, code in every:
        if not title:
            do(language, code, capsys)
    language, title, code = every[number]
    status, said = do(language, code, capsys)
    if language == "python":  # it mends what the failing command reads, or writes it anew as clean.safetensors
        ((_, _, failed),) = (one for one in every if one[1] == "fails")
        failed = failed.replace("model.safetensors", "clean.safetensors") if "clean" in code else failed
        status, said = do("sh", failed, capsys)
    names = re.findall(r"breccia explain ([\w -]+)", " ".join(said.split()))
    names = [name for some in names for name in some.split()]
    if title == "passes":
        assert status == 0, said
        assert page.stem not in names or (language == "sh" and "--strict" not in code)
    else:
        assert status != 0, said
        assert page.stem in names, said


def test_every_page_has_an_example() -> None:
    assert {page.stem for page in PAGES if not any(title == "fails" for _, title, _ in blocks(page))} == WITHOUT_EXAMPLE
    for page in PAGES:
        titles = [title for _, title, _ in blocks(page)]
        assert ("passes" in titles) == ("fails" in titles), page.name
        text = page.read_text(encoding="utf-8")
        assert text.startswith(f"# {page.stem}\n\n<!-- says: ")
        assert max(len(line) for line in text.splitlines() if not line.startswith("<!--")) <= 120, page.name


def strings(node: ast.AST) -> Iterator[str]:
    """Texts of an expression, X for what varies."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
    elif isinstance(node, ast.BinOp):
        yield from strings(node.left)
    elif isinstance(node, ast.List):
        for one in node.elts:
            yield from strings(one)
    elif isinstance(node, ast.ListComp):
        yield from strings(node.elt)
    elif isinstance(node, ast.IfExp):
        yield from strings(node.body)
        yield from strings(node.orelse)
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Remark":
        yield from strings(node.args[0])


def notes() -> Iterator[tuple[str, str]]:
    """Texts of notes in the source: what is added to notes, and remarks."""
    folders = ("checkpoint/planning", "checkpoint/writing", "checkpoint/lora", "calibration")
    for path in (path for folder in folders for path in sorted((PACKAGE / folder).glob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found: list[ast.AST] = []
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
                found = node.args if name == "Remark" or (name == "append" and owner.endswith("notes")) else []
            elif isinstance(node, (ast.Assign, ast.AugAssign)):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                found = [node.value] if ast.unparse(target) in ("notes", "self.notes") else []
            for text in (text for one in found for text in strings(one)):
                yield path.name, text


def test_every_note_has_a_page() -> None:
    found = [(where, text) for where, text in notes() if len(text) > 5]
    assert len(found) > 30
    alone = ("damped", "rounded to nearest, by importance: moments", "X: the moments of all")  # follow a name
    texts = [(where, f"X: {text}" if text.startswith(alone) else text) for where, text in found]
    assert [one for one in texts if not explain.name_of(one[1])] == []


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, said, _ = run("explain", capsys=capsys)
    assert code == 0
    assert said.splitlines() == [page.stem for page in PAGES]
    for page in PAGES:
        code, said, _ = run("explain", page.stem, capsys=capsys)
        assert code == 0
        assert said.startswith(f"# {page.stem}\n")
        assert "<!--" not in said
        assert "```" not in said
    code, _, err = run("explain", "left-as-it", capsys=capsys)
    assert (code, "did you mean left-as-it-is?" in err) == (2, True)


def test_no_text_belongs_to_two_pages() -> None:
    patterns = [(name, pattern) for name, pattern in explain._patterns()]
    for page in PAGES:
        for said in re.findall(r"<!-- says: (.*?) -->", page.read_text(encoding="utf-8")):
            text = said.replace("…", "X")
            assert {name for name, pattern in patterns if pattern.fullmatch(text)} == {page.stem}, text
