# SPDX-License-Identifier: Apache-2.0
"""Regular expressions of adapters: Python's own matching tells the same, and takes for ever where this refuses."""

import random
import re
import time

import pytest
from breccia.schemes.matching import Patterns

NAMES = [
    "q",
    "a.q",
    "ab.q",
    "a.b.q_proj",
    "layers.1.mlp",
    "layers.12.mlp",
    "model.layers.1.mlp.q",
    "",
    ".",
    "a\nb.q",
    "aq",
]
PATTERNS = [
    "q", "q_proj", "b.q", "b\\.q", ".*q", "a.*", r"layers\.\d+\.mlp", "layers.(1|12).mlp", "(a|b)?q", "^a.q", "q$",
    "[ab]+.q", "[^a]q", r"layers\.[0-9]\.mlp", "(?:a|ab)+", "", "a?b?.?q", r".*\.q", "x|q", "^q|^a", ".+", "l-q",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_of_adapters(pattern: str) -> None:
    for name in NAMES:
        wanted = re.fullmatch(rf"(.*\.)?({pattern})", name) is not None
        assert Patterns("p").ends(pattern, name) == wanted, name


def test_patterns_of_anything() -> None:
    """What is refused is no regular expression to Python either, or a repetition of an end, or of what Python repeats
    without going back."""
    pick, matched = random.Random(0), 0
    for _ in range(20_000):
        pattern = "".join(
            pick.choices(["a", "b", ".", "*", "+", "?", "(", ")", "|", "[ab]", "\\.", "^", "$"], k=pick.randrange(9))
        )
        name = "".join(pick.choices("ab.", k=pick.randrange(7)))
        try:
            made = Patterns("p").ends(pattern, name)
        except ValueError as error:
            assert "must be of regular expressions" in str(error)
            continue
        wanted = re.fullmatch(rf"(.*\.)?({pattern})", name) is not None
        assert made == wanted, (pattern, name)
        matched += made
    assert matched > 500


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+b",
        "(a|a)" * 40 + "b",
        ".*" * 60 + "b",
        "(a?)" * 40 + "b",
        "((a*)*)*b",
        "(.*)*" * 9 + "b",
        "a" * 300,
        "(" * 250,
        "a{9}" * 9,
    ],
)
def test_patterns_that_never_end(pattern: str) -> None:
    begin = time.process_time()
    try:
        patterns = Patterns("p")
        for _ in range(100):
            assert not patterns.ends(pattern, "a" * 2000)
    except ValueError as error:
        assert str(error).startswith("p must ")
    assert time.process_time() - begin < 5
