# SPDX-License-Identifier: Apache-2.0
"""What a release would forget."""

import re
from pathlib import Path

import breccia
import pytest

ROOT = Path(__file__).parent.parent
VERSIONS = {
    "pyproject.toml": r'^version = "(.*)"',
    "python/breccia/_version.py": r'^__version__ = "(.*)"',
    "CMakeLists.txt": r"^project\(breccia VERSION (\S+)",
    "CITATION.cff": r"^version: (.*)",
    "CHANGELOG.md": r"^## (\d.*)",
    "cpp/packaging/vcpkg/breccia/vcpkg.json": r'^  "version": "(.*)"',
    "cpp/packaging/conda/recipe.yaml": r'^  version: "(.*)"',
}


def found(path: Path, pattern: str) -> list[str]:
    if not path.exists():  # a source archive has less than the repository
        pytest.skip(f"there is no {path.name}")
    return re.findall(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("name", VERSIONS)
def test_one_version(name: str) -> None:
    assert found(ROOT / name, VERSIONS[name])[0] == breccia.__version__


@pytest.mark.parametrize(
    "name",
    [
        "docs/cpp.md",
        "examples/cpp/CMakeLists.txt",
        "cpp/packaging/conan/test_package/CMakeLists.txt",
        "tests_cpp/consumer/find_package/CMakeLists.txt",
        "tests_cpp/consumer/static_export/CMakeLists.txt",
    ],
)
def test_consumers_ask_for_this_version(name: str) -> None:
    """A package of another minor version does not fit."""
    assert found(ROOT / name, r"find_package\(breccia (\S+)") == [breccia.__version__.rpartition(".")[0]]


def test_the_core_is_in_the_namespace_of_this_version() -> None:
    """A file that opens namespace breccia without it would declare a second function of the same name."""
    version = breccia.__version__.rpartition(".")[0].replace(".", "_")
    for path in sorted(ROOT.glob("cpp/**/*.[hc]pp")):
        opened = found(path, r"^namespace breccia\b(.*)")
        assert all(rest.startswith(f"::inline v{version}") for rest in opened), path
