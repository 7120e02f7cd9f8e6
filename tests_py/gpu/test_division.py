# SPDX-License-Identifier: Apache-2.0
"""The short divisions of the casts give the codes of the true quotient: looked for where they could not.

`codecs.divide` corrects x * r once for 16-bit inputs, which leaves a relative error of about 2^-44 before the last
rounding. A code could then differ only where x / s lies that close to the point half a float32 ulp beside a boundary
T between two codes. With s = S * 2^a (S of 24 bits) and x = X * 2^b (X of 8 or 11 bits) that takes S within a few
units of a multiple of 2^20: few enough to try with exact arithmetic.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

pytestmark = pytest.mark.offline
ULP = 24  # bits of a float32 significand


def rounded(v: Fraction) -> Fraction:
    """v to 24 significant bits, ties to even (no exponent limits: the kernels keep s within [1e-24, 1e24] / 448)."""
    if v == 0:
        return v
    e = 0
    a = abs(v)
    while a >= 1 << ULP:
        a, e = a / 2, e + 1
    while a < 1 << (ULP - 1):
        a, e = a * 2, e - 1
    low = a.numerator // a.denominator
    rest = a - low
    low += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and low % 2 == 1)
    return (1 if v > 0 else -1) * low * Fraction(2) ** e


def short(x: Fraction, s: Fraction, r: Fraction) -> Fraction:
    q = rounded(x * r)
    return rounded(rounded(q * s - x) * -r + q)


@pytest.mark.parametrize("bits", [8, 11])
def test_candidates(bits: int) -> None:
    tried = 0
    for c in range(8, 16):
        for delta in range(-6, 7):
            s = Fraction((c << 20) + delta)
            if s >= 1 << ULP or s < 1 << (ULP - 1):
                continue
            near = rounded(1 / s)
            for t in range(1, 256, 2):  # boundaries between codes: five significant bits for FP8, eight for INT8
                for significand in {c * t, *(c * t + d for d in (-1, 1))}:
                    x = Fraction(significand << 20)
                    if significand.bit_length() > bits:
                        continue
                    for r in (near, near * (1 + Fraction(1, 1 << 23)), near * (1 - Fraction(1, 1 << 23))):
                        tried += 1
                        ours, true = short(x, s, rounded(r)), rounded(x / s)
                        # The same side of the boundary is the same code.
                        assert (ours > t) == (true > t) and (ours < t) == (true < t), (c, delta, t, significand)
    assert tried > 1000


@pytest.mark.parametrize("bits", [8, 11])
def test_snapped(bits: int) -> None:
    """`words._SNAP`: integers up to 15 by a scale of 11 bits, near every tie. float64 holds each step exactly."""
    scale = np.arange(1 << 10, 1 << 11, dtype=np.float64)[:, None, None, None]
    tie = (np.arange(16) + 0.5)[None, :, None, None]
    unit = 2.0 ** np.arange(-12, 8)[None, None, :, None]  # of x's last place
    x = (np.floor(scale * tie / unit) + np.arange(-1, 3)) * unit
    x = x * ((x >= 0) & (x / unit < 1 << bits))
    near = (1 / scale).astype(np.float32)
    for r in (near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(1))):
        snapped = np.rint(x * r.astype(np.float64) * 2**16) / 2**16
        true = np.rint(np.float32(x) / np.float32(scale))
        assert np.array_equal(np.rint(snapped), true)
