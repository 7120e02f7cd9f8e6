# SPDX-License-Identifier: Apache-2.0
"""6-bit codes from four in three bytes to one per byte, and products of packed weights."""

from __future__ import annotations

import gc

import breccia
import cases
import numpy as np
import pytest
import torch
from breccia.kernels.triton.conversions import sixes
from breccia.value import sixes as arrays


@pytest.mark.interpreted
@pytest.mark.parametrize("shape", [(0, 12), (1, 12), (3, 24), (37, 96), (2, 5, 384)], ids=str)
def test_unpack(shape: tuple[int, ...], device: str) -> None:
    packed = np.random.default_rng(1).integers(0, 256, shape).astype(np.uint8)
    wanted = torch.from_numpy(arrays.unpack(packed))
    given = torch.from_numpy(packed).to(device)
    assert torch.equal(sixes.unpack(given).cpu(), wanted)
    wide = torch.cat([given, given], -1)[..., : shape[-1]]  # rows that do not follow one another
    assert torch.equal(sixes.unpack(wide).cpu(), wanted)


@pytest.mark.parametrize("fmt", ["E2M3", "E3M2"])
@pytest.mark.parametrize("rows", [1, 16, 300])
def test_products(fmt: str, rows: int, device: str) -> None:
    x = torch.from_numpy(cases.normal((rows, 512))).to(device).bfloat16()
    w = breccia.cast(torch.from_numpy(cases.normal((256, 512), 1)), breccia.MXFP6BlockScaling(fmt)).to(device)
    packed = breccia.pack(w)
    assert packed.packed_data.is_cuda
    assert packed == w
    for _ in range(4):  # by torch's dispatcher, then by plans
        assert torch.equal(breccia.linear(x, packed), breccia.linear(x, w))
        assert torch.equal(breccia.matmul(x, packed.T), breccia.matmul(x, w.T))
        assert torch.equal(breccia.dequantize(packed), breccia.dequantize(w))
    layer, plain = breccia.nn.QuantizedLinear(packed), breccia.nn.QuantizedLinear(w)
    compiled = torch.compile(layer)
    for _ in range(4):
        assert torch.equal(layer(x), plain(x))
    torch.testing.assert_close(compiled(x), plain(x))


def test_memory_of_layers(device: str) -> None:
    """A model rests in three quarters of its codes' bytes; a product adds the codes of one weight to what it takes."""
    count, side = 8, 2048
    w = breccia.cast(torch.randn(side, side, device=device).bfloat16(), "mxfp6")
    x = torch.randn(1, side, device=device).bfloat16()

    def taken(weight: breccia.ScaledTensor) -> tuple[int, int]:
        """Bytes of the layers, and the most that calls of them add."""
        gc.collect()  # layers of the call before
        start = torch.cuda.memory_allocated()
        layers = [breccia.nn.QuantizedLinear(weight.map(torch.clone)) for _ in range(count)]
        rest = torch.cuda.memory_allocated()
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            for layer in layers:
                layer(x)
        return rest - start, torch.cuda.max_memory_allocated() - rest

    (plain, more), (packed, most) = taken(w), taken(breccia.pack(w))
    assert plain - packed == count * side * side // 4
    assert most - more <= 1.01 * side * side
