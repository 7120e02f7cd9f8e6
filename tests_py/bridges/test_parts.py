# SPDX-License-Identifier: Apache-2.0
"""What a bridge writes, as torch's tensors: savers of other programs name their types by torch's."""

import breccia
import cases
import numpy as np
import pytest
from breccia.bridges import native
from breccia.bridges.parts import materialize, part
from breccia.checkpoint.files.dtypes import DTYPES


@cases.ALL
def test_parts_have_the_type_of_their_header_in_torch(recipe):
    torch = pytest.importorskip("torch")
    weight = breccia.cast(np.random.default_rng(0).standard_normal((128, 256), np.float32), recipe)
    parts, _ = native.store("weight", weight)
    for name, array in materialize(parts).items():
        made = parts[name].in_torch()
        wanted = DTYPES[parts[name].dtype].torch
        assert made.dtype == getattr(torch, wanted or "uint8", torch.uint8), name
        assert tuple(made.shape) == parts[name].shape
        assert made.reshape(-1).view(torch.uint8).numpy().tobytes() == array.tobytes(), name


def test_codes_of_less_than_a_byte_stay_bytes_in_torch():
    torch = pytest.importorskip("torch")
    packed = np.arange(8, dtype=np.uint8).reshape(2, 4)
    assert torch.equal(part(packed, "F4").in_torch(), torch.from_numpy(packed))
