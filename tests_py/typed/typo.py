"""Mistakes that a type checker must find, which `.ci/lint` looks for: an ignored line without a mistake is an error."""

import breccia
import numpy as np
from breccia.checkpoint import verify

w = np.ones((4, 64), np.float32)
breccia.catt(w, "nvfp4")  # type: ignore[attr-defined]
breccia.cast("no", "nvfp4")  # type: ignore[type-var]
breccia.cast(w, 3)  # type: ignore[arg-type]
breccia.cast(w, "nvfp4", rounding="neerest")  # type: ignore[arg-type]
breccia.linear(w, breccia.cast(w, "nvfp4"), precision="high")  # type: ignore[arg-type]
breccia.INT8Scaling(scale_search="msee")  # type: ignore[arg-type]
print(breccia.cast(w, "nvfp4").nothing)  # type: ignore[attr-defined]
breccia.bridges.to_modelopt_(w)  # type: ignore[attr-defined]
breccia.checkpoint.konvert("a", "b", "nvfp4")  # type: ignore[attr-defined]
breccia.checkpoint.convert("a", "b", "nvfp4", method="gptqq")  # type: ignore[arg-type]
breccia.nn.QuantizedLinearr()  # type: ignore[attr-defined]
print(breccia.distributed.lod)  # type: ignore[attr-defined]
verify("a", "b")["okay"]  # type: ignore[typeddict-item]
