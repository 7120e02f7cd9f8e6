# SPDX-License-Identifier: Apache-2.0
"""Pages made of templates: HTML files of this package, whose holes data fill. Data are escaped, so that no name in a
file becomes markup.

``{{ a.b | filter }}`` is a value; ``{% for x in a.b %}``, ``{% if a.b %}``, ``{% else %}`` and ``{% end %}`` are what
they are in Python; ``{% file x.css %}`` is another file of the folder, as it is.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

_HOLES = re.compile(r"(\{\{.*?\}\}|\{%.*?%\})", re.DOTALL)
_Data = Mapping[str, Any]
_Node = Callable[[_Data], Iterator[str]]  # a part of a template: data → text


def render(template: Path, data: _Data, filters: Mapping[str, Callable[[Any], str]]) -> str:
    """The text of a template's file with data, of which ``filters`` make text: by default ``str`` does."""
    pieces = iter(_HOLES.split(template.read_text(encoding="utf-8")))
    node, _ = _block(pieces, template.parent, filters)
    return "".join(node(data))


def _block(pieces: Iterator[str], folder: Path, filters: Mapping[str, Callable[[Any], str]]) -> tuple[_Node, str]:
    """What stands up to the next ``else`` or ``end`` that belongs to no inner block, and which of them it was."""
    nodes: list[_Node] = []
    for piece in pieces:
        words = piece[2:-2].split()
        if piece.startswith("{{"):
            nodes.append(_value(words[0], filters[words[2]] if words[1:] else str))
        elif not piece.startswith("{%"):
            nodes.append(_text(piece))
        elif words[0] == "file":
            nodes.append(_text((folder / words[1]).read_text(encoding="utf-8")))
        elif words[0] == "for":
            body, _ = _block(pieces, folder, filters)
            nodes.append(_loop(words[1], words[3], body))
        elif words[0] == "if":
            body, ended = _block(pieces, folder, filters)
            other = _block(pieces, folder, filters)[0] if ended == "else" else _text("")
            nodes.append(_choice(words[1], body, other))
        else:
            return _all(nodes), words[0]
    return _all(nodes), ""


def _text(text: str) -> _Node:
    return lambda data: iter([text])


def _all(nodes: list[_Node]) -> _Node:
    return lambda data: (text for node in nodes for text in node(data))


def _value(path: str, of: Callable[[Any], str]) -> _Node:
    return lambda data: iter([html.escape(of(_look(data, path)))])


def _loop(name: str, path: str, body: _Node) -> _Node:
    return lambda data: (text for one in _look(data, path) for text in body({**data, name: one}))


def _choice(path: str, body: _Node, other: _Node) -> _Node:
    return lambda data: body(data) if _look(data, path) else other(data)


def _look(data: Any, path: str) -> Any:
    for name in path.split("."):
        data = data[name]
    return data
