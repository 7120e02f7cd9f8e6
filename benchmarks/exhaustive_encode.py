# SPDX-License-Identifier: Apache-2.0
"""Encode every float32 there is, all 2^32 bit patterns, and compare with ml_dtypes, format by format.

    python benchmarks/exhaustive_encode.py                            # everything
    python benchmarks/exhaustive_encode.py --formats int8 --step 257  # one format, every 257th pattern

breccia departs from ml_dtypes by documented rules, which are applied to its answers before the comparison:
  * what rounds beyond the largest finite value saturates, infinities included (ml_dtypes: infinity or NaN);
  * float8_e8m0fnu has no zero: zeros give 2^-127, overflow 2^127 (ml_dtypes: NaN);
  * integers round half to even and clamp, NaN gives 0 (ml_dtypes truncates and wraps around).
Exit status 1 if a single code differs.
"""

import argparse
import functools
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import breccia
import ml_dtypes
import numpy as np
from breccia import formats

INTEGERS = {"int8": (-128, 127), "int4": (-8, 7), "uint4": (0, 15)}
CHUNK = 1 << 20  # patterns at a time: they stay in the L2 cache, and share a sign and an exponent
SPECIAL = 255  # the exponent field of infinities and NaNs


@functools.cache
def saturating_codes(name, negative):
    """A code of ml_dtypes' for a finite number of that sign -> breccia's: not finite means that it
    overflowed."""
    dtype = getattr(ml_dtypes, name)
    values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    finite = np.nonzero(np.isfinite(values) & (np.arange(256) < 1 << ml_dtypes.finfo(dtype).bits))[0]
    largest = finite[np.argmin(values[finite]) if negative else np.argmax(values[finite])]
    codes = np.arange(256, dtype=np.uint8)
    codes[~np.isfinite(values)] = largest
    if name == "float8_e8m0fnu" and negative:
        codes[0xFF] = 0xFF  # no negative number is representable
    return codes


def expected(x, name, start):
    """x holds bit patterns of one sign and exponent, the first of them `start`."""
    if name in INTEGERS:
        lowest, highest = INTEGERS[name]
        rounded = np.rint(x)
        np.clip(rounded, lowest, highest, out=rounded)
        rounded[np.isnan(rounded)] = 0
        return rounded.astype(np.int8).view(np.uint8) & np.uint8(255 if name == "int8" else 15)
    codes = x.astype(getattr(ml_dtypes, name)).view(np.uint8)
    negative, exponent = bool(start >> 31), start >> 23 & 255
    table = saturating_codes(name, negative)
    if exponent == SPECIAL:
        infinite = np.isinf(x)
        codes[infinite] = table[codes[infinite]]
    elif not np.array_equal(table, np.arange(256)):
        codes = table[codes]
    if name == "float8_e8m0fnu" and exponent == 0:
        codes[x == 0] = 0
    return codes


def check(name, start, step):
    """Mismatches in one chunk: how many of how many, and the first few bit patterns."""
    patterns = np.arange(start + -start % step, start + CHUNK, step, dtype=np.uint32)
    x = patterns.view(np.float32)
    with np.errstate(all="ignore"):
        want = expected(x, name, start)
    got = formats.encode(x, name)
    if np.array_equal(got, want):
        return 0, x.size, []
    wrong = np.nonzero(got != want)[0]
    return wrong.size, x.size, [(hex(patterns[i]), int(got[i]), int(want[i])) for i in wrong[:3]]


def run(name, step, pool):
    begin = time.perf_counter()
    mismatches, inputs, examples = 0, 0, []
    for wrong, size, few in pool.imap_unordered(
        functools.partial(check, name, step=step), range(0, 1 << 32, CHUNK), chunksize=64
    ):
        mismatches += wrong
        inputs += size
        examples += few
    return {
        "format": name,
        "inputs": inputs,
        "mismatches": mismatches,
        "first_mismatches": sorted(examples)[:10],  # (float32 bits, code, expected code)
        "seconds": round(time.perf_counter() - begin, 1),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--formats", nargs="+", default=list(formats.names()), choices=list(formats.names()), metavar="NAME"
    )
    parser.add_argument(
        "--step", type=int, default=1, help="every step-th bit pattern only; odd steps visit all low bits"
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--json", type=Path, help="write the table there too")
    options = parser.parse_args()
    if not 1 <= options.step <= CHUNK:
        parser.error(f"--step must be between 1 and {CHUNK}")

    rows = []
    print(f"{'format':<16} {'inputs':>13} {'mismatches':>10} {'seconds':>8}")
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for name in options.formats:
            rows.append(run(name, options.step, pool))
            print("{format:<16} {inputs:>13,} {mismatches:>10,} {seconds:>8.1f}".format(**rows[-1]), flush=True)
            for pattern, got, want in rows[-1]["first_mismatches"]:
                print(f"    float32 {pattern}: code {got:#04x}, expected {want:#04x}")
    if options.json:
        report = {
            "breccia": breccia.__version__,
            "ml_dtypes": ml_dtypes.__version__,
            "numpy": np.__version__,
            "backend": breccia.cpu_info()["backend"],
            "results": rows,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if any(row["mismatches"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
