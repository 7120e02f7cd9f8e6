# SPDX-License-Identifier: Apache-2.0
"""Every public function, class and method says what it takes, gives and raises: the API reference is made of it."""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import breccia
import required_peers

# The modules whose ``__all__`` is public; those that import a peer that is not here are left out.
MODULES = (
    "breccia",
    "breccia.bridges",
    "breccia.calibration",
    "breccia.checkpoint",
    "breccia.comparison",
    "breccia.delayed",
    "breccia.diffusers",
    "breccia.distributed",
    "breccia.sharding",
    "breccia.dlpack",
    "breccia.evaluation",
    "breccia.formats",
    "breccia.kernels.reference",
    "breccia.layouts",
    "breccia.moments",
    "breccia.nn",
    "breccia.optim",
    "breccia.recipes",
    "breccia.sglang",
    "breccia.transformers",
    "breccia.vllm",
)
HEADINGS = ("Args:", "Attributes:", "Returns:", "Raises:", "Examples:")
PLAIN = {"self", "cls", "_"}


def public() -> dict[str, Any]:
    """Every public function, class and method, by its dotted name; each once."""
    found: dict[str, Any] = {}
    seen: set[int] = set()

    def add(name: str, value: Any) -> None:
        if id(value) not in seen:
            seen.add(id(value))
            found[name] = value

    for module_name in MODULES:
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            if required_peers.REQUIRED:
                raise
            continue
        for name in getattr(module, "__all__", [n for n in dir(module) if not n.startswith("_")]):
            value = getattr(module, name)
            ours = getattr(value, "__module__", "").startswith("breccia")
            if inspect.isfunction(value) and ours:
                add(f"{module_name}.{name}", value)
            elif inspect.isclass(value) and ours:
                add(f"{module_name}.{name}", value)
                for inner, member in vars(value).items():
                    method = getattr(member, "__func__", getattr(member, "fget", member))
                    # Defaults of a dataclass' fields have names of their own.
                    if not inner.startswith("_") and inspect.isfunction(method) and method.__name__ == inner:
                        add(f"{module_name}.{name}.{inner}", method)
    add("breccia.open", breccia.open)  # `__all__` leaves it out: import * would hide the built-in
    return found


PUBLIC = public()
FUNCTIONS = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value)}


def sections(doc: str) -> dict[str, str]:
    """The text under each heading, that before the first under ""."""
    parts: dict[str, str] = {}
    heading = ""
    for line in doc.splitlines():
        if line.strip() in HEADINGS and not line.startswith(" "):
            heading = line.strip()
        else:
            parts[heading] = parts.get(heading, "") + line + "\n"
    return parts


def described(text: str) -> dict[str, str]:
    """The entries of a section: name → what is said of it."""
    entries: dict[str, str] = {}
    names: list[str] = []
    for line in textwrap.dedent(text).splitlines():
        match = re.match(r"^([\w*, ]+): *(.*)$", line)
        if match and not line.startswith(" "):
            names = [name.strip().lstrip("*") for name in match[1].split(",")]
            entries |= dict.fromkeys(names, match[2])
        elif line.strip():
            entries |= {name: f"{entries[name]} {line.strip()}" for name in names}
    return entries


def raised(function: Any) -> bool:
    """Whether its own body raises something that is not an assertion of its own sense."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return any(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(tree))


def wanting(function: Any) -> Iterator[str]:
    """What a function's docstring lacks."""
    doc = inspect.getdoc(function)
    if not doc:
        yield "has no docstring"
        return
    parts = sections(doc)
    first = parts.get("", "").strip()
    if not first or not first.rstrip().endswith((".", ":", "`", ">")):
        yield "does not begin with a sentence"
    if re.search(r"\b[Ss]ee `[\w.]+`", first):
        return  # the other's sections hold
    signature = inspect.signature(function)
    names = [name for name in signature.parameters if name not in PLAIN and not name.startswith("_")]
    said = described(parts.get("Args:", ""))
    yield from (f"does not say what {name} is" for name in names if not said.get(name))
    yield from (f"describes {name}, which it does not take" for name in said if name not in signature.parameters)
    returns = signature.return_annotation
    gives = returns not in (None, "None", inspect.Signature.empty)
    only_gives = not names and "Returns:" not in parts  # the first sentence says it
    if gives and not only_gives and not parts.get("Returns:", "").strip():
        yield "does not say what it returns"
    if raised(function) and not described(parts.get("Raises:", "")):
        yield "does not say what it raises"


def test_functions_say_what_they_take_give_and_raise() -> None:
    found = {name: list(wanting(function)) for name, function in FUNCTIONS.items()}
    assert {name: lacks for name, lacks in found.items() if lacks} == {}


def test_classes_say_what_they_are() -> None:
    for name in PUBLIC.keys() - FUNCTIONS.keys():
        kind = PUBLIC[name]
        doc = vars(kind).get("__doc__") or ""
        assert len(doc.split()) > 3, f"{name} has no docstring of its own"
        assert not doc.startswith(f"{kind.__name__}("), f"{name} has the docstring that dataclasses make"


def test_the_check_finds_what_is_missing() -> None:
    def bad(x: int, y: int) -> int:
        """Adds them.

        Args:
            x: a number.
            z: nobody's.
        """
        if x > y:
            raise ValueError(x)
        return x + y

    assert list(wanting(bad)) == [
        "does not say what y is",
        "describes z, which it does not take",
        "does not say what it returns",
        "does not say what it raises",
    ]
    assert len(FUNCTIONS) > 100
