# SPDX-License-Identifier: Apache-2.0
"""GGUF files."""

from __future__ import annotations

import struct

from hostile import Content, Hostile, later


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def field(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def info(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def made(
    fields: tuple[bytes, ...] = (),
    infos: tuple[bytes, ...] = (),
    data: int = 64,
    counts: tuple[int, int] | None = None,
    version: int = 3,
) -> bytes:
    tensors, pairs = counts or (len(infos), len(fields))
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + b"".join(fields) + b"".join(infos)
    return head + bytes(-len(head) % 32) + bytes(data)


def case(raw: Content, says: str) -> Hostile:
    return Hostile({"bad.gguf": raw}, says)


def array(inner: int, count: int, raw: bytes = b"") -> bytes:
    return field("k", 9, struct.pack("<IQ", inner, count) + raw)


GOOD = made((field("k", 8, text("v")),), (info("a.weight", (16,)),))
ALIGNMENT = "general.alignment"

CASES: dict[str, Hostile] = {
    f"cut at {at}": case(GOOD[:at], "24 bytes" if at < 24 else "file must have")
    for at in (0, 3, 4, 8, 23, 24, 31, 33, 40, 50, 70, 100, 130)
}
CASES |= {
    "good": case(GOOD, ""),
    "no tensors": case(made(), ""),
    "another magic": case(b"GGUX" + GOOD[4:], "begin with GGUF"),
    "version 1": case(made(version=1), "version must be"),
    "version 99": case(made(version=99), "version must be"),
    "big-endian": case(made(version=3 << 24), "version must be"),
    "2^64 - 1 tensors": case(made(counts=(2**64 - 1, 0)), "counts must fit"),
    "2^64 - 1 fields": case(made(counts=(0, 2**64 - 1)), "counts must fit"),
    "as many tensors as bytes": case(made(counts=(80, 0)), "file must have|must appear once"),
    "a million fields": case(made(counts=(0, 1_000_000), data=1_100_000), "at most"),
    "key of 2^63": case(made((struct.pack("<Q", 2**63),)), "file must have"),
    "key not UTF-8": case(made((field(b"\xff", 4, bytes(4)),)), "UTF-8"),
    "string not UTF-8": case(made((field("k", 8, text(b"\xff")),)), "UTF-8"),
    "string past the end": case(made((field("k", 8, struct.pack("<Q", 2**40)),)), "file must have"),
    "type 13": case(made((field("k", 13, b""),)), "types must be"),
    "type 2^32 - 1": case(made((field("k", 2**32 - 1, b""),)), "types must be"),
    "array of type 13": case(made((array(13, 1),)), "types must be"),
    "array of 2^64 - 1": case(made((array(0, 2**64 - 1),)), "counts must fit"),
    "array of 2^61 wide ones": case(made((array(10, 2**61),)), "counts must fit"),
    "array past the end": case(made((array(10, 50),)), "file must have"),
    "array of arrays, deep": case(made((field("k", 9, struct.pack("<IQ", 9, 1) * 8),)), "types must be"),
    "array of a million empty arrays": case(
        later(lambda: made((array(9, 1_000_000, struct.pack("<IQ", 0, 0) * 1_000_000),))), "at most"
    ),
    "array of arrays of arrays": case(
        later(lambda: made((array(9, 3000, (struct.pack("<IQ", 9, 1000) + struct.pack("<IQ", 0, 0) * 1000) * 3000),))),
        "at most",
    ),
    "three million empty strings": case(later(lambda: made((array(8, 3_000_000, bytes(24_000_000)),))), "at most"),
    "ten million bytes": case(later(lambda: made((array(0, 10_000_000, bytes(10_000_000)),))), ""),
    "ten million numbers": case(later(lambda: made((array(10, 10_000_000, bytes(80_000_000)),))), ""),
    "the same key twice": case(made((field("k", 4, bytes(4)), field("k", 4, bytes(4)))), "must appear once"),
    "a key with an escape sequence twice": case(
        made((field("\x1b", 4, bytes(4)), field("\x1b", 4, bytes(4)))), "must appear once"
    ),
    "9 axes": case(made((), (info("a", (1,) * 9),)), "at most 8 axes"),
    "2^32 - 1 axes": case(made((), (text("a") + struct.pack("<I", 2**32 - 1),)), "at most 8 axes"),
    "no axes": case(made((), (info("a", ()),)), ""),
    "shape overflows": case(made((), (info("a", (2**63, 2**63)),)), "file must have"),
    "shape overflows to nothing": case(made((), (info("a", (2**32, 2**32)),)), "file must have"),
    "rows of nothing": case(made((), (info("a.weight", (0, 2**31)),)), "rows without elements"),
    "as many rows of nothing as there may be": case(made((), (info("a.weight", (0, 2**20)),)), ""),
    "a million tensors": case(
        later(lambda: made((), tuple(info(f"{i}", (1,), 24, i) for i in range(1_000_000)), 1_000_000)), "at most"
    ),
    "20,000 tensors": case(
        later(lambda: made((), tuple(info(f"{i}", (1,), 24, i) for i in range(20_000)), 20_000)), ""
    ),
    "blocks of nothing": case(made((), (info("a.weight", (0, 2**31), 8),)), "whole Q8_0 blocks"),
    "no rows of blocks": case(made((), (info("a.weight", (2**40, 0), 8),)), "whole Q8_0 blocks"),
    "half a block": case(made((), (info("a", (16,), 8),)), "whole Q8_0 blocks"),
    "unknown type": case(made((), (info("a", (16,), 255),)), "type must be one of"),
    "offset past the end": case(made((), (info("a", (16,), 0, 2**40),)), "file must have"),
    "offset of 2^64 - 1": case(made((), (info("a", (16,), 0, 2**64 - 1),)), "file must have"),
    "offset not aligned": case(made((), (info("a", (8,), 0, 3),)), ""),
    "overlap": case(made((), (info("a", (16,)), info("b", (16,), 0, 4)), 128), "past the tensor before"),
    "the same name twice": case(made((), (info("a", (8,)), info("a", (8,), 0, 32))), "must appear once"),
    "a name of a megabyte": case(made((), (info("n" * 1_000_000, (8,)),)), "at most"),
    "a name a terminal obeys": case(made((), (info("\x1b[31m", (8,)),)), ""),
    **{
        f"alignment {value}": case(made((field(ALIGNMENT, 4, struct.pack("<I", value)),), (info("a", (8,)),)), says)
        for value, says in (
            (0, "multiple of 8"),
            (1, "multiple of 8"),
            (12, "multiple of 8"),
            (2**31, "file must have"),
        )
    },
    "alignment a string": case(made((field(ALIGNMENT, 8, text("32")),)), "multiple of 8"),
    "alignment an array": case(made((field(ALIGNMENT, 9, struct.pack("<IQ", 0, 3) + bytes(3)),)), "multiple of 8"),
    "alignment true": case(made((field(ALIGNMENT, 7, b"\1"),)), "multiple of 8"),
    "architecture a number": case(made((field("general.architecture", 4, bytes(4)),), (info("a", (8,)),)), ""),
    "architecture an array": case(
        made((field("general.architecture", 9, struct.pack("<IQ", 0, 3) + bytes(3)),), (info("a", (8,)),)), ""
    ),
    "heads an array": case(
        made(
            (
                field("general.architecture", 8, text("llama")),
                field("llama.attention.head_count", 9, struct.pack("<IQ", 0, 0)),
            ),
            (info("blk.0.attn_q.weight", (4, 4)),),
        ),
        "",
    ),
    **{
        f"heads {value}": case(
            made(
                (
                    field("general.architecture", 8, text("llama")),
                    field("llama.attention.head_count", 5, struct.pack("<i", value)),
                ),
                (info("blk.0.attn_q.weight", (4, 4)),),
            ),
            "",
        )
        for value in (0, -1, -2, 3, 2**31 - 1)
    },
}
