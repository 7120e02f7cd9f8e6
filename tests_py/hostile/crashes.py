# SPDX-License-Identifier: Apache-2.0
"""What fuzzers found, as they left it: each once gave something else than tensors or a refusal. Files of a case are
packed into one, in which the fuzzer changes bytes."""

from __future__ import annotations

import struct
from pathlib import Path

from hostile import Hostile


def packed(case: dict[str, bytes]) -> bytes:
    """The files of a case, one after another: name, length, bytes."""
    raw = b""
    for name, content in sorted(case.items()):
        encoded = name.encode()
        raw += struct.pack("<BI", len(encoded), len(content)) + encoded + content
    return raw


def unpacked(raw: bytes) -> dict[str, bytes]:
    """As many files as the bytes have; names that lead elsewhere are left out."""
    case: dict[str, bytes] = {}
    at = 0
    while at + 5 <= len(raw):
        name_length, length = struct.unpack_from("<BI", raw, at)
        name = raw[at + 5 : at + 5 + name_length].decode("utf-8", "replace")
        at += 5 + name_length
        if name and "/" not in name and "\0" not in name and name not in (".", "..") and len(name.encode()) < 200:
            case[name] = raw[at : at + length]
        at += length
    return case


FOUND = Path(__file__).parent.parent / "data" / "crashes"
CASES = {path.name: Hostile(dict(unpacked(path.read_bytes())), "*") for path in sorted(FOUND.iterdir())}
