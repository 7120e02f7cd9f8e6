# SPDX-License-Identifier: Apache-2.0
"""safetensors headers."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

from hostile import Content, Hostile, later


def stored(text: str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A file of a header and data, whose header may lie about its length."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def one(**fields: Any) -> str:
    """A header of one tensor of four bytes."""
    return json.dumps({"t": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4], **fields}})


def case(raw: Content, says: str) -> Hostile:
    return Hostile({"bad.safetensors": raw}, says)


def spelled(text: str, says: str, data: int = 4) -> Hostile:
    """A header as text, before so many bytes of data."""
    return case(stored(text, bytes(data)), says)


def large(text: Callable[[], str], says: str) -> Hostile:
    return case(later(lambda: stored(text(), bytes(4))), says)


GOOD = stored(json.dumps({"t.weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}), bytes(64))
HEAD = len(GOOD) - 72
ENTRY = '"dtype":"U8","shape":[4],"data_offsets":[0,4]'
TWO = '{"a":{"dtype":"U8","shape":[4],"data_offsets":%s},"b":{"dtype":"U8","shape":[4],"data_offsets":%s}}'

CASES: dict[str, Hostile] = {
    f"cut at {at}": case(
        GOOD[:at],
        "at least 8 bytes" if at < 8 else f"truncated, it needs {8 + HEAD} bytes" if at < 8 + HEAD else "file must|<= ",
    )
    for at in (0, 1, 7, 8, 9, 8 + HEAD // 2, 7 + HEAD, 8 + HEAD, 9 + HEAD, 40 + HEAD, len(GOOD) - 1)
}
CASES |= {
    f"length {name}": case(stored(GOOD[8:], length=length), says)
    for name, length, says in (
        ("0", 0, "JSON object"),
        ("one less", HEAD - 1, "JSON"),
        ("one more", HEAD + 1, "more after it|begin <= end <= 63"),
        ("all of the file", HEAD + 64, "more after it|begin <= end <= 0"),
        ("one past the file", HEAD + 65, f"truncated, it needs {HEAD + 73} bytes"),
        ("of 2^31", 2**31, "must be in the format of safetensors"),
        ("of 2^63", 2**63, "must be in the format of safetensors"),
        ("of 2^64 - 1", 2**64 - 1, "must be in the format of safetensors"),
    )
}
CASES |= {
    "trailing byte": case(GOOD + b"\0", "file must have"),
    "empty object": case(stored("{}"), ""),
    "only metadata": case(stored('{"__metadata__":{"a":"b"}}'), ""),
    "a list": spelled("[1]", "JSON object"),
    "a string": spelled('"t"', "JSON object"),
    "open": spelled("{", "string must begin"),
    "open entry": spelled('{"t":{', "dtype, shape and data_offsets"),
    "open string": spelled('{"t', "JSON"),
    "trailing comma": spelled('{"t":{@},}'.replace("@", ENTRY), "string must begin"),
    "no colon": spelled('{"t" {@}}'.replace("@", ENTRY), "colon"),
    "no comma": spelled('{"a":{@} "b":{@}}'.replace("@", ENTRY), "comma"),
    "a comment": spelled('{/**/"t":{@}}'.replace("@", ENTRY), "string must begin"),
    "single quotes": spelled(one().replace('"', "'"), "string must begin"),
    "two objects": spelled(one() + one(), "more after it"),
    "byte order mark": case(stored(b"\xef\xbb\xbf" + one().encode(), bytes(4)), "JSON object"),
    "UTF-16": case(stored(one().encode("utf-16"), bytes(4)), "JSON object"),
    "not UTF-8": case(stored(one().encode().replace(b'"t"', b'"\xff"'), bytes(4)), "UTF-8"),
    "cut UTF-8": case(stored(one().encode().replace(b'"t"', b'"\xe2\x82"'), bytes(4)), "UTF-8"),
    "half a surrogate pair": spelled(one().replace('"t"', '"\\ud800"'), "UTF-8"),
    "control character": spelled(one().replace('"t"', '"a\nb"'), "JSON"),
    "wrong escape": spelled(one().replace('"t"', '"\\x"'), "JSON"),
    "NaN": spelled('{"t":NaN}', "dtype, shape and data_offsets"),
    "NaN inside": spelled(one(shape=[float("nan")]), "NaN"),
    "Infinity inside": spelled(one(data_offsets=[0, float("inf")]), "Infinity"),
    "1e999 inside": spelled(one().replace("[4]", "[1e999]"), "shape must be a list"),
    "deep lists": spelled("[" * 100_000, "JSON object"),
    "deep lists inside": spelled('{"t":' + "[" * 100_000 + "]" * 100_000 + "}", "dtype, shape and data_offsets"),
    "deep objects": spelled('{"a":' * 100_000 + "1" + "}" * 100_000, "dtype, shape and data_offsets"),
    "deep metadata": spelled('{"__metadata__":' + '{"a":' * 50_000 + "1" + "}" * 50_001, "strings to strings"),
    "deep shape": spelled(one().replace("[4]", "[" * 3000 + "]" * 3000), "shape|JSON"),
    "ten million lists": large(lambda: '{"t":[' + "[]," * 10_000_000 + "[]]}", "dtype, shape and data_offsets"),
    "ten million numbers": large(
        lambda: one().replace("[4]", "[" + "1," * 10_000_000 + "1]"), "dtype, shape and data_offsets"
    ),
    "a million equal keys": large(lambda: '{"t":{@}'.replace("@", ENTRY) + ',"t":1' * 1_000_000 + "}", "twice"),
    "a long name": large(lambda: one().replace('"t"', '"' + "n" * 10_000_000 + '"'), ""),
    "a long wrong name": large(
        lambda: one(shape=[5]).replace('"t"', '"' + "n" * 10_000_000 + '"'), "must span 5 bytes"
    ),
    "a long dtype": spelled(one(dtype="U" * 1_000_000), "dtype"),
    "a key of a megabyte in an entry": spelled(one(**{"k" * 1_000_000: 1}), "dtype, shape and data_offsets"),
    "duplicate name": spelled('{"t":{@},"t":{@}}'.replace("@", ENTRY), "twice"),
    "duplicate name, escaped": spelled('{"t":{@},"\\u0074":{@}}'.replace("@", ENTRY), "twice"),
    "duplicate field": spelled('{"t":{"dtype":"F32",@}}'.replace("@", ENTRY), "twice"),
    "duplicate metadata": spelled('{"__metadata__":{"a":"1","a":"2"},"t":{@}}'.replace("@", ENTRY), "twice"),
    "metadata twice": spelled('{"__metadata__":{},"t":{@},"__metadata__":{}}'.replace("@", ENTRY), "twice"),
    "quantization_config of lists": case(
        later(
            lambda: stored(
                json.dumps({"__metadata__": {"quantization_config": '{"a":[' + "[]," * 10_000_000 + "[]]}"}})
            )
        ),
        "",
    ),
    "seven million entries of metadata": case(
        later(lambda: stored(b'{"__metadata__":{' + b",".join(b'"%d":""' % i for i in range(7_000_000)) + b"}}")),
        "must have at most",
    ),
    "a million entries of metadata with escapes": case(
        later(lambda: stored(b'{"__metadata__":{' + b",".join(b'"%d":"\\n"' % i for i in range(1_000_000)) + b"}}")),
        "must have at most",
    ),
    "as much metadata as there may be": case(
        later(
            lambda: stored(b'{"__metadata__":{' + b",".join(b'"%d":"\\"a\\":\\n"' % i for i in range(1 << 18)) + b"}}")
        ),
        "",
    ),
    "a value of a million escapes": case(stored(b'{"__metadata__":{"a":"' + b"\\n" * 1_000_000 + b'"}}'), ""),
    "an open value of a million escapes": case(stored(b'{"__metadata__":{"a":"' + b"\\n" * 1_000_000), "must end"),
    "metadata with an escape": case(stored('{"__metadata__":{"a\\n":"b\\u00e9\\"c"}}'), ""),
    "metadata with half a surrogate pair": case(stored('{"__metadata__":{"a":"\\ud800"}}'), "UTF-8"),
    "metadata with a wrong escape": case(stored('{"__metadata__":{"a":"\\x"}}'), "JSON"),
    "metadata with a control character": case(stored('{"__metadata__":{"a":"b\nc"}}'), "JSON"),
    "metadata with a trailing comma": case(stored('{"__metadata__":{"a":"b",}}'), "string must begin"),
    "metadata null": spelled('{"__metadata__":null}', "strings to strings"),
    "metadata a list": spelled('{"__metadata__":[]}', "strings to strings"),
    "metadata of numbers": spelled('{"__metadata__":{"a":1}}', "strings to strings"),
    "metadata of lists": spelled('{"__metadata__":{"a":[]}}', "strings to strings"),
    "metadata cut": spelled('{"__metadata__":{"a":"b"', "strings to strings"),
    "entry null": spelled('{"t":null}', "dtype, shape and data_offsets"),
    "entry a number": spelled('{"t":1}', "dtype, shape and data_offsets"),
    "entry a list": spelled('{"t":["U8",[4],[0,4]]}', "dtype, shape and data_offsets"),
    "entry empty": spelled('{"t":{}}', "dtype, shape and data_offsets"),
    "field missing": spelled('{"t":{"dtype":"U8","shape":[4]}}', "dtype, shape and data_offsets"),
    "field too many": spelled('{"t":{"x":1,@}}'.replace("@", ENTRY), "dtype, shape and data_offsets"),
    "dtype unknown": spelled(one(dtype="X8"), "dtype must be one of"),
    "dtype in small letters": spelled(one(dtype="u8"), "dtype must be one of"),
    "dtype a list": spelled(one(dtype=[]), "dtype must be one of"),
    "dtype null": spelled(one(dtype=None), "dtype must be one of"),
    "dtype with an escape sequence": spelled(one(dtype="\x1b[31m"), "dtype must be one of"),
    "shape null": spelled(one(shape=None), "shape must be a list"),
    "shape a number": spelled(one(shape=4), "shape must be a list"),
    "shape a string": spelled(one(shape="4"), "shape must be a list"),
    "shape of strings": spelled(one(shape=["4"]), "shape must be a list"),
    "shape negative": spelled(one(shape=[-4]), "shape must be a list"),
    "shape twice negative": spelled(one(shape=[-2, -2]), "shape must be a list"),
    "shape a boolean": spelled(one(shape=[4, True]), "shape must be a list"),
    "shape a float": spelled(one(shape=[4.0]), "shape must be a list"),
    "shape with a leading zero": spelled(one().replace("[4]", "[04]"), "JSON"),
    "shape with an exponent": spelled(one().replace("[4]", "[4e0]"), "shape must be a list"),
    "shape of 2^63": spelled(one(shape=[2**63]), "2.63"),
    "shape of 2^63 by nothing": spelled(one(shape=[2**63, 0], data_offsets=[0, 0]), "2.63", 0),
    "shape of 2^64 + 4": spelled(one(shape=[2**64 + 4]), "shape must be a list"),
    "shape of 5000 digits": spelled(one().replace("[4]", f"[{'9' * 5000}]"), "digit|shape"),
    "shape overflows": spelled(one(shape=[2**62, 4]), "must span|2.63"),
    "shape overflows to its bytes": spelled(one(shape=[2**32, 2**32, 2**32]), "2.63"),
    "64 axes of 2^62": spelled(one(shape=[2**62] * 64), "2.63"),
    "65 axes": spelled(one(shape=[1] * 65), "64 numbers"),
    "100,000 axes": spelled(one(shape=[1] * 100_000), "dtype, shape and data_offsets"),
    "shape too small": spelled(one(shape=[3]), "must span 3 bytes"),
    "shape too large": spelled(one(shape=[5]), "must span 5 bytes"),
    "dtype too wide": spelled(one(dtype="F64"), "must span 32 bytes"),
    "half a byte": spelled(one(dtype="F4", shape=[3], data_offsets=[0, 1]), "whole bytes", 1),
    "F6 of 5 bits": spelled(one(dtype="F6_E2M3", shape=[3], data_offsets=[0, 2]), "whole bytes", 2),
    "offsets null": spelled(one(data_offsets=None), "data_offsets must be"),
    "offsets reversed": spelled(one(data_offsets=[4, 0]), "begin <= end"),
    "offsets negative": spelled(one(data_offsets=[-4, 0]), "data_offsets must be"),
    "offsets floats": spelled(one(data_offsets=[0.0, 4.0]), "data_offsets must be"),
    "three offsets": spelled(one(data_offsets=[0, 2, 4]), "data_offsets must be"),
    "one offset": spelled(one(data_offsets=[4]), "data_offsets must be"),
    "offsets past the end": spelled(one(data_offsets=[0, 5], shape=[5]), "begin <= end <= 4"),
    "offsets of 2^63": spelled(one(data_offsets=[2**63, 2**63 + 4]), "data_offsets must be|begin <= end"),
    "hole first": spelled(one(data_offsets=[1, 5]), "hole", 5),
    "hole between": spelled(TWO % ("[0,4]", "[5,9]"), "hole", 9),
    "overlap": spelled(TWO % ("[0,4]", "[2,6]"), "overlaps", 6),
    "the same bytes": spelled(TWO % ("[0,4]", "[0,4]"), "overlaps"),
    "bytes of nobody": spelled(one(), "file must have", 5),
    "names a terminal obeys": spelled(
        json.dumps({"\x1b[2J\x1b[31mt\r\n\x07": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}), ""
    ),
    "names with NUL and paths": spelled(
        json.dumps(
            {
                n: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
                for n in ("\0", "../../x", "/etc/passwd", "", ".")
            }
        ),
        "",
        0,
    ),
    "rows of nothing": spelled(
        json.dumps({"t.weight": {"dtype": "F32", "shape": [2**40, 0], "data_offsets": [0, 0]}}),
        "rows without elements",
        0,
    ),
    "20,000 tensors": spelled(
        json.dumps({f"t{i}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(20_000)}),
        "",
        20_000,
    ),
}
