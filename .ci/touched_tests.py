#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Python tests that run whole because of what the change touches.

    .ci/touched_tests.py # a line each: a file of tests, or one of its tests (tests_py/test_a.py::test_b)

The change is that of .ci/stages.py. A test whose lines it touches runs whole, decorators included. The whole file does
where the change touches a line that is of no test and no import, as a fixture or a table: in the file as it was, or as
it is. So does the whole of a file that is named as a source that the change touches (test_a_b.py is named as a/b.py),
of one that imports or names another file of tests_py, or of benchmarks, that it touches, and of those that run the
pages of docs and the examples.

Of more files than FEW_FILES nearly everything would run. Then the files that the change itself touches are whole,
without those named or importing; and where these alone are more, none is. Of more tests than FEW_TESTS whose lines are
touched none runs whole either. What does not, has its part, of each test a case at least, and the rest in its turn.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import stages

FEW_FILES = 40
FEW_TESTS = 300
RUN_BY_ONE = ("docs", "examples")  # folders of texts that the test of this name runs
SHARED = ""  # in place of a test's name: lines on which any test of the file may depend
HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", re.MULTILINE)


def is_test(path: str) -> bool:
    return Path(path).name.startswith("test_")


def named_as(path: str) -> set[str]:
    """What a test of a source may be called: runs of the parts of its path, without the underscore of a private one."""
    parts = [part.lstrip("_") for part in Path(path).with_suffix("").parts]
    return {"_".join(parts[i:j]) for j in range(len(parts) + 1) for i in range(j)}


def called(path: str) -> str:
    """What tests call another file of tests_py by: a module, a package, or a file or folder of data."""
    folder = Path(path).parent
    together = (stages.ROOT / folder / "__init__.py").exists() or folder.parent.name == "data"
    return folder.name if together else Path(path).stem


def importing(touched: list[str], files: list[str]) -> set[str]:
    """Of these files of tests_py, the tests that import or name one that is touched and is no test, or what does; or
    that do so with a file of benchmarks or the README."""
    texts = {path: (stages.ROOT / path).read_text() for path in files if (stages.ROOT / path).exists()}
    found: set[str] = set()
    new = {path for path in touched if path.startswith("tests_py/") and not is_test(path)}
    new |= {path for path in touched if path == "README.md" or re.fullmatch(r"benchmarks/.*\.py", path)}
    while names := "|".join(sorted({re.escape(called(path)) for path in new})):
        mention = re.compile(rf"""^\s*(?:from|import)\b.*\b(?:{names})\b|["'/](?:{names})\b""", re.MULTILINE)
        new = {path for path, text in texts.items() if path not in found and mention.search(text)}
        found |= new
        new = {path for path in new if not is_test(path)}
    return {path for path in found if is_test(path)}


def owners(text: str) -> Iterator[tuple[range, str]]:
    """The lines of each statement of a file of tests, and the test that they are, or SHARED."""
    body = ast.parse(text).body
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        del body[0]  # the docstring
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            continue
        first, name = node.lineno, SHARED
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([first, *(decorator.lineno for decorator in node.decorator_list)])
            name = node.name if node.name.startswith("test_") else SHARED
        yield range(first, (node.end_lineno or first) + 1), name


def lines_of(hunk: re.Match[str], side: int) -> range:
    """The lines of a hunk in the file as it was (side 0) or as it is (1)."""
    first, count = hunk[2 * side + 1], hunk[2 * side + 2]
    return range(int(first), int(first) + int(count or 1))


def tests_in(diff: str, texts: tuple[str, str]) -> set[str]:
    """The tests whose lines a diff without context touches, SHARED among them, of the file as it is.

    Args:
        diff: what git says of one file.
        texts: the file as it was and as it is.
    """
    found: set[str] = set()
    tests: set[str] = set()
    for side, text in enumerate(texts):
        touched = {line for hunk in HUNK.finditer(diff) for line in lines_of(hunk, side)}
        of_each = list(owners(text))
        found |= {name for lines, name in of_each if not touched.isdisjoint(lines)}
        tests = {name for _, name in of_each}
    return found & (tests | {SHARED})


def touched_tests(path: str, before: str) -> set[str]:
    """The tests of a file that the change since a commit touches, SHARED among them."""
    diff = stages.git("diff", "-U0", "--no-renames", "--no-color", "--no-ext-diff", before, "--", path)
    # `git show` says nothing of a file that was not there.
    return tests_in(diff, (stages.git("show", f"{before}:{path}", strip=False), (stages.ROOT / path).read_text()))


def whole_files(edited: set[str], touched: list[str], files: list[str]) -> set[str]:
    """The files of Python tests that run whole.

    Args:
        edited: of them, those that the change touches, and not in tests alone.
        touched: paths that the change touches.
        files: paths of the Python files of tests_py.
    """
    names = {name for path in touched if path.startswith(("python/", "cpp/src/")) for name in named_as(path)}
    names |= {path.partition("/")[0] for path in touched}.intersection(RUN_BY_ONE)
    found = {path for path in files if is_test(path) and Path(path).stem.removeprefix("test_") in names}
    found |= edited | importing(touched, files)
    return next((some for some in (found, edited) if len(some) <= FEW_FILES), set())


def run_whole(before: str, files: list[str]) -> list[str]:
    """Files of tests, and tests, that run whole; none where the commit before the change is not known ("")."""
    touched = stages.touched_since(before) or []
    there = [path for path in files if is_test(path) and path in touched and (stages.ROOT / path).exists()]
    of_files = {path: touched_tests(path, before) for path in there}
    whole = whole_files({path for path, names in of_files.items() if SHARED in names}, touched, files)
    tests = {f"{path}::{name}" for path, names in of_files.items() if path not in whole for name in names - {SHARED}}
    return sorted(whole | (tests if len(tests) <= FEW_TESTS else set()))


if __name__ == "__main__":
    print(*run_whole(stages.base(), stages.git("ls-files", "tests_py/*.py").splitlines()), sep="\n")
