# SPDX-License-Identifier: Apache-2.0
"""A test that passes by absence proves nothing: with REQUIRE_PEERS=1, as continuous integration sets it, a test or a
module that is skipped for want of a package fails.

Reasons of such skips are those of pytest.importorskip, or say of the package that it "is not installed".
"""

import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

REQUIRED = os.environ.get("REQUIRE_PEERS") == "1"
WANTING = re.compile(r"could not import '(?P<asked>[\w.]+)'|No module named|(?P<named>[\w.-]+) is not installed")
# What may be missing all the same, and why.
OPTIONAL = {
    "llama_cpp": "there is no wheel of llama-cpp-python on PyPI",
    "timm": "it wants torchvision, whose wheels beside the CPU build of torch do not load",
    **({"tomllib": "Python has it from 3.11 on"} if sys.version_info < (3, 11) else {}),
}


def is_wanting(reason: str) -> bool:
    """Whether a test is skipped for want of a package that must be there."""
    found = WANTING.search(reason)
    return found is not None and (found["asked"] or found["named"] or "").partition(".")[0] not in OPTIONAL


def fail_if_wanting(report: Any) -> None:
    if REQUIRED and report.skipped and isinstance(report.longrepr, tuple) and is_wanting(report.longrepr[2]):
        path, line, reason = report.longrepr
        report.outcome, report.longrepr = "failed", f"{path}:{line}: REQUIRE_PEERS=1, but {reason}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    fail_if_wanting((yield).get_result())  # type: ignore[attr-defined, func-returns-value]


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    fail_if_wanting((yield).get_result())  # type: ignore[attr-defined, func-returns-value]
