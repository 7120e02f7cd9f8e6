# SPDX-License-Identifier: Apache-2.0
"""Where ml_dtypes, torch and gfloat disagree about the code of a special value, and what breccia answers.

    python benchmarks/oracle_codes.py    # Markdown, as in docs/codecs.md

Only rows on which not all agree are printed. gfloat is asked with saturation; "error" is an exception, "none"
a format the library does not have.
"""

import warnings

import breccia
import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import torch
from breccia import formats

GFLOAT = {
    "float8_e4m3fn": "ocp_e4m3",
    "float8_e5m2": "ocp_e5m2",
    "float6_e2m3fn": "ocp_e2m3",
    "float6_e3m2fn": "ocp_e3m2",
    "float4_e2m1fn": "ocp_e2m1",
    "float8_e8m0fnu": "ocp_e8m0",
}


def inputs(name):
    """Label -> float32."""
    largest = formats.finfo(name).max
    found = {"+NaN": np.nan, "-NaN": -np.nan, "+Inf": np.inf, "-Inf": -np.inf, "+0": 0.0, "-0": -0.0}
    found["1.5 max"], found["-1.5 max"] = 1.5 * largest, -1.5 * largest
    if name == "float8_e8m0fnu":
        found |= {
            "-1": -1.0,
            "1.25 x 2^-127": 1.25 * 2.0**-127,
            "1.5 x 2^-127": 1.5 * 2.0**-127,
            "1.5": 1.5,
            "3": 3.0,
        }
    with np.errstate(over="ignore"):
        return {label: np.array([value], np.float32) for label, value in found.items()}


def by_ml_dtypes(name, x):
    return x.astype(getattr(ml_dtypes, name)).view(np.uint8)[0]


def by_torch(name, x):
    dtype = getattr(torch, name, None)
    return None if dtype is None else torch.from_numpy(x).to(dtype).view(torch.uint8).numpy()[0]


def by_gfloat(name, x):
    if name not in GFLOAT:
        return None
    info = getattr(gfloat.formats, "format_info_" + GFLOAT[name])
    try:
        return gfloat.encode_float(info, gfloat.round_float(info, float(x[0]), sat=True))
    except ValueError:
        return "error"


def text(code):
    return "none" if code is None else code if isinstance(code, str) else f"0x{int(code):02X}"


def main():
    print(f"breccia {breccia.__version__}, ml_dtypes {ml_dtypes.__version__}, torch {torch.__version__}")
    print("\n| format | input | breccia | ml_dtypes | torch | gfloat |\n|---|---|---|---|---|---|")
    for name in formats.names():
        if name in ("int8", "int4", "uint4"):
            continue
        for label, x in inputs(name).items():
            answers = [
                formats.encode(x, name)[0],
                by_ml_dtypes(name, x),
                by_torch(name, x),
                by_gfloat(name, x),
            ]
            cells = [text(answer) for answer in answers]
            if len({cell for cell in cells if cell != "none"}) > 1:
                print(f"| {name} | {label} | {' | '.join(cells)} |")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with np.errstate(all="ignore"):
        main()
