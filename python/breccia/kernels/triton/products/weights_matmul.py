# SPDX-License-Identifier: Apache-2.0
"""bf16 rows by quantized weights on Hopper, decoded inside the product, on raw tensors."""

from __future__ import annotations

import torch
import triton
from triton.experimental.gluon.language._layouts import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from breccia.kernels.triton.device.elements import form_of
from breccia.kernels.triton.products.add_parts import add_parts
from breccia.kernels.triton.products.configs import FOUR_BITS, WeightTile, weight_tile
from breccia.kernels.triton.products.dense_matmul import sm_count
from breccia.kernels.triton.products.hopper_weights import weights_kernel
from breccia.kernels.triton.products.order_activations import order_kernel
from breccia.kernels.triton.recipes import Source
from breccia.kernels.triton.runtime import launch, one_byte_scales
from breccia.kernels.triton.turn import contiguous_rows

X_LAYOUT = NVMMASharedLayout(128, 16, 2)
DECODED = 1024  # elements of a row that a program decodes
W_LAYOUT = {16: NVMMASharedLayout(64, 32, 2), 32: NVMMASharedLayout(128, 32, 2)}


def kind_of(element: str, sfmt: str, block: tuple[int, int]) -> str | None:
    """The kernel's name for a weight format; None for those it does not take."""
    four = {
        ("e2m1", "e4m3", (1, 16)): "nvfp4",
        ("e2m1", "e8m0", (1, 32)): "mxfp4",
        ("int4", "float", (1, 128)): "int4",
    }.get((element, sfmt, block))
    if four or element not in ("e4m3", "e5m2", "int8"):
        return four
    if sfmt == "e8m0":
        return "mxfp8" if block == (1, 32) else None
    return "whole" if block[1] == 0 and block[0] <= 1 else "block" if block[1] == 128 and block[0] > 0 else None


def takes(x: torch.Tensor, w: torch.Tensor, kind: str | None) -> bool:
    """Whether `weights_matmul` takes these operands: bf16, K a multiple of 128, rows that TMA can address."""
    return x.dtype == torch.bfloat16 and takes_weight(w, x.shape[1], kind)


def takes_weight(w: torch.Tensor, k: int, kind: str | None) -> bool:
    return (
        kind is not None
        and k % 128 == 0
        and k > 0
        and (w.is_contiguous() if w.ndim == 3 else w.stride(1) == 1 and w.stride(0) % 16 == 0)
        and w.data_ptr() % 16 == 0
    )


def weights_matmul(
    x: torch.Tensor | Source,
    w: torch.Tensor,
    scale: torch.Tensor,
    kind: str,
    element: str,
    block: tuple[int, int],
    out_dtype: torch.dtype = torch.bfloat16,
    global_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    tile: WeightTile | None = None,
) -> torch.Tensor:
    """x (M, K) bf16 by packed weights (N, bytes of K) transposed, or by w[e] for rows offsets[e] to offsets[e + 1].

    x may be codes that become bf16 first, where the tile is one whose activations a kernel orders (`tile.order` "").
    """
    (m, k), n = x.shape, w.shape[-2]
    out = torch.empty((m, n), dtype=out_dtype, device=w.device)
    if out.numel() == 0:
        return out
    sms = sm_count(w.device.index)
    experts = 0 if offsets is None else w.shape[0]
    tile = weight_tile(m, n, k, kind, experts, sms) if tile is None else tile
    words = 16 if kind in FOUR_BITS else 32
    row_tiles, col_tiles = triton.cdiv(n, tile.rows), triton.cdiv(m, tile.cols) + experts
    programs = row_tiles * col_tiles * tile.parts
    table = torch.empty((col_tiles, 3), dtype=torch.int32, device=w.device) if experts else out
    if isinstance(x, Source):
        x, global_scale = _decoded_in_order(x, words, col_tiles, tile.cols, global_scale)
    elif tile.order:
        x = x if x.stride(1) == 1 else x.contiguous()
        aligned = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0  # for TMA
        x = x if aligned else x.clone(memory_format=torch.contiguous_format)
    else:
        x = x if x.stride(1) == 1 else x.contiguous()
        x = _ordered(x, words, col_tiles, tile.cols, table, out if offsets is None else offsets, experts)
    made, added = (out, bias) if tile.parts == 1 else (out.new_empty((tile.parts, m, n), dtype=torch.float32), None)
    scale, s_row, s_col, s_expert = scales_of(scale, kind, experts, tile.order == "w")
    packed = w.view(torch.int32)
    packed = packed.flatten(0, 1) if experts else packed
    x_desc = TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [tile.cols, 64], X_LAYOUT)
    # Tiles of 256 columns have results enough for it to pay, and keep two buffers of activations for them.
    tma_store = tile.cols > 128 and out.dtype == x.dtype and n % 8 == 0 and tile.parts == 1
    out_desc = TensorDescriptor(out, [m, n], [n, 1], [tile.cols, 64], X_LAYOUT) if tma_store else x_desc
    launch(
        weights_kernel,
        (programs if tile.split else min(programs, sms),),
        x_desc,
        TensorDescriptor(packed, list(packed.shape), [packed.stride(0), 1], [tile.rows, words], W_LAYOUT[words]),
        out_desc,
        scale,
        scale if global_scale is None else global_scale,
        scale if added is None else added,
        made,
        table,
        n,
        m,
        s_row,
        s_expert,
        n,
        row_tiles,
        col_tiles,
        k // 128,
        tile.slices(k, tile.parts) // tile.step,
        tile.parts,
        s_col,
        KIND=kind,
        FMT=element,
        SN=max(1, block[0]),
        ROUND=tile.rounds(kind, experts),
        GLOBAL=global_scale is not None,
        BIAS=added is not None,
        EXPERTS=experts,
        SPLIT=tile.split,
        ORDER=tile.order,
        CONSUMERS=tile.consumers,
        X_STAGES=tile.x_stages,
        X_UNITS=tile.x_units,
        W_STAGES=tile.w_stages,
        GROUP=tile.group,
        TMA_STORE=tma_store,
        num_warps=4,
        maxnreg=168,
        launch_pdl=True,
    )
    if tile.parts > 1:
        add_parts(made, bias, out)
    return out


def _ordered(
    x: torch.Tensor, words: int, tiles: int, width: int, table: torch.Tensor, offsets: torch.Tensor, experts: int
) -> torch.Tensor:
    """Activations in the order in which weights decode; with experts, also the table of tiles."""
    m, k = x.shape
    # Whole tiles: TMA is slower where it fills up rows. What lies in the others goes to columns no one stores.
    ordered = torch.empty((m if experts else tiles * width, k), dtype=torch.bfloat16, device=x.device)
    per_program = min(4096, triton.next_power_of_2(k))
    launch(
        order_kernel,
        (m, triton.cdiv(k, per_program)),
        *(x, x, x, x),
        ordered,
        table,
        offsets,
        *(x, x),
        m,
        k,
        x.stride(0),
        0,
        0,
        tiles,
        FORM=None,
        LEVELS=0,
        BITS=4 if words == 16 else 8,
        E=experts,
        EP=triton.next_power_of_2(max(1, experts)),
        BN=width,
        BK=per_program,
        num_warps=4,
        launch_pdl=True,
    )
    return ordered


def _decoded_in_order(
    x: Source, words: int, tiles: int, width: int, w_level: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantized activations as `_ordered` has them, and the factor of the product: scales that are floats are in the
    activations, a global one of others is not."""
    m, k = x.shape
    device, levels = x.codes.device, 0
    level = w_level
    if x.global_scale is not None and x.sfmt != "float":
        level = torch.empty(1, dtype=torch.float32, device=device)
        levels = 1 if w_level is None else 2
    ordered = torch.empty((tiles * width, k), dtype=torch.bfloat16, device=device)
    per_program = min(DECODED, triton.next_power_of_2(k))
    launch(
        order_kernel,
        (m, triton.cdiv(k, per_program)),
        *x.pointers(),
        ordered,
        ordered,
        ordered,
        x.scale if w_level is None else w_level,
        x.scale if level is None else level,
        m,
        k,
        x.codes.stride(0),
        *x.scale.stride(),
        tiles,
        FORM=form_of(x.element, x.sfmt, x.block, x.packed, x.zero_point, None if levels else x.global_scale),
        LEVELS=levels,
        BITS=4 if words == 16 else 8,
        E=0,
        EP=1,
        BN=width,
        BK=per_program,
        num_warps=4,
        launch_pdl=True,
    )
    return ordered, level


def scales_of(scale: torch.Tensor, kind: str, experts: int, natural: bool) -> tuple[torch.Tensor, int, int, int]:
    """Scales as the kernel reads them, with their strides along rows, K and experts. One-byte scales are read in pairs
    (nvfp4), with `natural` in words of four."""
    if scale.element_size() == 1:
        scale = one_byte_scales(scale)
        if natural:
            scale = scale.view(torch.int32)
        elif kind == "nvfp4":
            scale = scale.view(torch.int16)
    if kind == "whole":
        scale = scale.reshape(experts, -1) if experts else scale.reshape(-1)
        return scale, 0 if scale.shape[-1] == 1 else scale.stride(-1), 1, scale.stride(0) if experts else 0
    scale = scale if kind == "block" else contiguous_rows(scale)
    return scale, scale.stride(-2), scale.stride(-1), scale.stride(0) if experts else 0
