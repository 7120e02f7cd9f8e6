# SPDX-License-Identifier: Apache-2.0
"""ggml's products, through the shared libraries of a wheel (pywhispercpp carries a whole ggml) or of a build.

ggml quantizes the activations to 8 bits per call, so its products are less exact than those they are compared with.
Weights are in its plain layouts and, where its CPU backend has rows side by side for a type, repacked.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from comparison.timing import Run

REPACKED_BUFFER = "_Z35ggml_backend_cpu_repack_buffer_typev"  # no C name
TYPES = {"q4_0": 2, "q8_0": 8, "q4_K": 12, "mxfp4": 39}
FLOAT32 = 0
FEATURES = ("avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx_int8", "neon")


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class _TensorHead(ctypes.Structure):
    """The part of struct ggml_tensor up to its data: type, buffer, ne, nb, op, op_params, flags, src, view, data,
    name, extra."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
        ("extra", ctypes.c_void_p),
    )


def find() -> Path | None:
    """The folder of an installed wheel's libraries."""
    spec = importlib.util.find_spec("_pywhispercpp")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "pywhispercpp.libs"


class Ggml:
    """One context with its weights; products are graphs of one node."""

    def __init__(self, folder: Path, threads: int) -> None:
        def load(stem: str, *, required: bool = True) -> Any:
            found = sorted(folder.glob(f"{stem}*.so*"), key=lambda path: len(path.name))
            if found:
                return ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)
            if required:
                raise FileNotFoundError(f"{folder} has no {stem}*.so")
            return None

        load("libgomp", required=False)
        self._base, self._cpu, self._threads = load("libggml-base"), load("libggml-cpu"), threads
        pointer = ctypes.c_void_p
        for name in ("ggml_init", "ggml_new_tensor_2d", "ggml_mul_mat", "ggml_new_graph"):
            getattr(self._base, name).restype = pointer
        self._base.ggml_row_size.restype = ctypes.c_size_t
        self._base.ggml_version.restype = ctypes.c_char_p
        self._base.ggml_row_size.argtypes = (ctypes.c_int, ctypes.c_int64)
        self._base.ggml_init.argtypes = (_InitParams,)
        self._base.ggml_free.argtypes = (pointer,)
        self._base.ggml_new_tensor_2d.argtypes = (pointer, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        self._base.ggml_mul_mat.argtypes = (pointer, pointer, pointer)
        self._base.ggml_new_graph.argtypes = (pointer,)
        self._base.ggml_build_forward_expand.argtypes = (pointer, pointer)
        self._base.ggml_quantize_chunk.argtypes = (
            ctypes.c_int, pointer, pointer, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, pointer
        )  # fmt: skip
        self._base.ggml_backend_buft_alloc_buffer.restype = pointer
        self._base.ggml_backend_buft_alloc_buffer.argtypes = (pointer, ctypes.c_size_t)
        self._base.ggml_backend_buffer_get_base.restype = pointer
        self._base.ggml_backend_buffer_get_base.argtypes = (pointer,)
        self._base.ggml_backend_tensor_alloc.argtypes = (pointer, pointer, pointer)
        self._base.ggml_backend_tensor_set.argtypes = (pointer, pointer, ctypes.c_size_t, ctypes.c_size_t)
        self._repacked = getattr(self._cpu, REPACKED_BUFFER, None)
        if self._repacked is not None:
            self._repacked.restype = pointer
        self._cpu.ggml_graph_compute_with_ctx.argtypes = (pointer, pointer, ctypes.c_int)
        self._cpu.ggml_cpu_init()

    def describe(self) -> str:
        """Version and what the libraries were compiled for."""
        version = self._base.ggml_version().decode()
        built = [name for name in FEATURES if getattr(self._cpu, f"ggml_cpu_has_{name}")()]
        return f"ggml {version} compiled for {', '.join(built) or 'the baseline'}"

    def products(self, x: np.ndarray, w: np.ndarray) -> dict[str, Run]:
        """Runs of x (M, K) by w (N, K) in each weight type."""
        runs = {}
        for name, kind in TYPES.items():
            product = _Product(self, kind, x, w)
            runs[f"ggml {name}"] = product.run
            if product.repacks():
                runs[f"ggml {name} repacked"] = _Product(self, kind, x, w, repacked=True).run
        return runs


class _Product:
    def __init__(self, ggml: Ggml, kind: int, x: np.ndarray, w: np.ndarray, *, repacked: bool = False) -> None:
        base, self._ggml = ggml._base, ggml
        (n, k), m = w.shape, x.shape[0]
        weight_bytes = base.ggml_row_size(kind, k) * n
        # A graph's work buffer is taken from its context and never given back, so each call makes a context anew, over
        # memory that stays.
        self._memory = np.zeros(weight_bytes + 4 * (x.size + m * n) + 2 * 4 * x.size + (8 << 20), np.uint8)
        self._codes = np.zeros(weight_bytes, np.uint8)
        base.ggml_quantize_chunk(kind, w.ctypes.data, self._codes.ctypes.data, 0, n, k, None)
        self._x, self._y = np.ascontiguousarray(x), np.zeros((m, n), np.float32)
        self._kind, self._shape = kind, (m, n, k)
        self._weight = self._repack() if repacked else None

    def repacks(self) -> bool:
        """Whether ggml has another layout for the type, which marks its tensors."""
        return self._ggml._repacked is not None and bool(_TensorHead.from_address(self._repack()).extra)

    def _repack(self) -> Any:
        """The weight as a tensor of the buffer that repacks what is put into it. Both stay until the process ends."""
        base, (_, n, k) = self._ggml._base, self._shape
        context = base.ggml_init(_InitParams(1 << 16, None, True))
        w = base.ggml_new_tensor_2d(context, self._kind, k, n)
        buffer = base.ggml_backend_buft_alloc_buffer(self._ggml._repacked(), self._codes.nbytes + 4096)
        base.ggml_backend_tensor_alloc(buffer, w, base.ggml_backend_buffer_get_base(buffer))
        if _TensorHead.from_address(w).extra:
            base.ggml_backend_tensor_set(w, self._codes.ctypes.data, 0, self._codes.nbytes)
        return w

    def run(self) -> np.ndarray:
        """The product; making the graph costs microseconds."""
        base, (m, n, k) = self._ggml._base, self._shape
        context = base.ggml_init(_InitParams(self._memory.nbytes, self._memory.ctypes.data, True))
        w = self._weight or base.ggml_new_tensor_2d(context, self._kind, k, n)
        x = base.ggml_new_tensor_2d(context, FLOAT32, k, m)
        if self._weight is None:
            _TensorHead.from_address(w).data = self._codes.ctypes.data
        _TensorHead.from_address(x).data = self._x.ctypes.data
        y = base.ggml_mul_mat(context, w, x)
        _TensorHead.from_address(y).data = self._y.ctypes.data
        graph = base.ggml_new_graph(context)
        base.ggml_build_forward_expand(graph, y)
        status = self._ggml._cpu.ggml_graph_compute_with_ctx(context, graph, self._ggml._threads)
        base.ggml_free(context)
        if status != 0:
            raise RuntimeError(f"ggml_graph_compute_with_ctx failed with status {status}")
        return self._y
