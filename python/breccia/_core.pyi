# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from breccia.device import CoreInfo

_Field = bool | int | str | None
_Buffer = tuple[list[int], str]

class _CastPlan(TypedDict):
    data: _Buffer
    scale: _Buffer
    zero_point: _Buffer | None
    global_scale: _Buffer | None

class Array:
    """Memory of a framework: pointer, shape, byte strides, dtype name. Borrowed."""

    def __init__(self, pointer: int, shape: Sequence[int], strides: Sequence[int], dtype: str) -> None: ...
    @staticmethod
    def of_elements(pointer: int, shape: Sequence[int], strides: Sequence[int], dtype: str) -> Array:
        """The same, with strides in elements."""

class Layout:
    @staticmethod
    def per_tensor() -> Layout: ...
    @staticmethod
    def per_block_k(block_size: int, axis: int = -1) -> Layout: ...
    @staticmethod
    def per_channel(axis: int = -1) -> Layout: ...
    @staticmethod
    def per_block_mn(block_m: int, block_n: int, axis: int = -1) -> Layout: ...
    @property
    def kind(self) -> str: ...
    @property
    def block_m(self) -> int: ...
    @property
    def block_n(self) -> int: ...
    @property
    def axis(self) -> int: ...
    @property
    def T(self) -> Layout: ...
    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]: ...
    def validate(self, shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> None: ...

class Recipe:
    def __init__(self, name: str, fields: dict[str, _Field]) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def element(self) -> str: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def two_level(self) -> bool: ...
    @property
    def global_divides(self) -> bool: ...
    @property
    def has_zero_point(self) -> bool: ...
    @property
    def is_expanded(self) -> bool: ...

class ScaledTensor:
    def __init__(
        self,
        data: Any,
        scale: Any,
        recipe: Recipe,
        layout: Layout,
        zero_point: Any,
        global_scale: Any,
        shape: list[int] | None,
        original_dtype: str,
    ) -> None: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def packed_nbytes(self) -> int: ...
    @property
    def is_packed(self) -> bool: ...
    @property
    def original_dtype(self) -> str: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def T(self) -> ScaledTensor: ...

_Cast = tuple[ScaledTensor, NDArray[Any], NDArray[Any], NDArray[Any] | None, NDArray[Any] | None]

class _Comparison(TypedDict):
    count: int
    signal: float
    other: float
    dot: float
    noise: float
    max_error: float
    max_error_at: int
    reference_nans: int
    nans: int
    equal: bool
    sqnr_db: float
    cosine: float

class _Magnitudes(TypedDict):
    first: int
    counts: NDArray[np.int64]
    zeros: int
    not_finite: int
    largest: float

class BackendScope:
    def __init__(self, name: str) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *args: object) -> None: ...

class Launch:
    def __init__(
        self,
        *,
        function: int,
        grid: tuple[int, int, int],
        threads: int,
        shared_memory: int,
        attributes: list[tuple[int, list[int]]],
        parameters: list[bytes],
        pointers: list[tuple[int, int, int]],
        maps: list[tuple[int, int, int, Any]],
    ) -> None: ...

class LaunchPlan:
    def __init__(
        self,
        *,
        launch: int,
        allocate: Any,
        stream: Any,
        bind: Any,
        explain: Any,
        device: Any,
        results: list[tuple[Any, ...]],
        scratch: tuple[Any, ...] | None,
        offsets: list[int],
        launches: list[Launch],
        kept: list[Any],
    ) -> None: ...
    def run(self, operands: list[Any]) -> list[Any] | None: ...

class RepeatedCall:
    def __init__(
        self,
        *,
        plan: LaunchPlan,
        like: Any,
        parts: dict[str, Any],
        names: tuple[str, ...],
        unless: tuple[Any, ...],
        wrapped: Any,
        current_device: Any,
    ) -> None: ...
    def run(self, x: Any) -> Any: ...

def catalogue() -> list[tuple[str, str, dict[str, _Field]]]: ...
def plan_cast(shape: Sequence[int], recipe: Recipe) -> _CastPlan: ...
def cast(
    x: Any,
    recipe: Recipe,
    seed: int | None = None,
    hadamard: tuple[int, int] | None = None,
    factor: float | None = None,
    square_blocks: bool = False,
    amax: Sequence[float] | None = None,
    offset: tuple[int, int] = (0, 0),
    importance: Any = None,
) -> _Cast: ...
def cast_into(
    x: Any,
    recipe: Recipe,
    data: Any,
    scale: Any,
    zero_point: Any,
    global_scale: Any,
    seed: int | None = None,
    hadamard: tuple[int, int] | None = None,
    factor: float | None = None,
    square_blocks: bool = False,
    amax: Sequence[float] | None = None,
    offset: tuple[int, int] = (0, 0),
    importance: Any = None,
) -> None: ...
def cast_at(
    pointer: int,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: str,
    recipe: Recipe,
    addresses: tuple[int, int, int, int],
    seed: int | None = None,
    hadamard: tuple[int, int] | None = None,
    factor: float | None = None,
    square_blocks: bool = False,
    amax: Sequence[float] | None = None,
    offset: tuple[int, int] = (0, 0),
    importance: Any = None,
) -> None:
    """From the memory ``Array.of_elements`` would take to C-contiguous memory of the plan's shapes and types at
    addresses; 0 for what the plan has not."""

GPTQ_DAMP: float
"""The damping of `gptq` unless another is given."""

def more_damping(damp: float) -> float:
    """The damping to try where one below 1 leaves moments that are not positive definite."""

def adamw_step(
    weights: Any,
    gradients: Any,
    first: tuple[Any, Any, Any],
    second: tuple[Any, Any, Any],
    recipe: Recipe,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None: ...
def gptq(w: Any, moments: Any, recipe: Recipe, act_order: bool, damp: float) -> tuple[_Cast, float, int, int]: ...
def gptq_on_levels(
    w: Any, moments: Any, scale: Any, offset: Any, levels: Any, codes: Any, act_order: bool, damp: float
) -> tuple[float, int, int]: ...
def dequantize(scaled: ScaledTensor, dtype: str) -> NDArray[Any]: ...
def dequantize_into(scaled: ScaledTensor, out: Any) -> None: ...
def requantize(scaled: ScaledTensor, recipe: Recipe) -> _Cast: ...
def requantize_into(
    scaled: ScaledTensor, recipe: Recipe, data: Any, scale: Any, zero_point: Any, global_scale: Any
) -> None: ...
def requantize_at(scaled: ScaledTensor, recipe: Recipe, addresses: tuple[int, int, int, int]) -> None: ...
def transpose(scaled: ScaledTensor) -> tuple[_Cast, int, int]: ...
def matmul_shape(a: list[int], b: list[int]) -> tuple[int, ...]: ...
def matmul(a: Any, b: Any, out_dtype: str, precision: str = "exact") -> NDArray[Any]: ...
def matmul_into(a: Any, b: Any, out: Any, precision: str = "exact") -> None: ...
def linear(x: Any, w: Any, bias: Any, out_dtype: str, precision: str) -> NDArray[Any]: ...
def linear_into(x: Any, w: Any, bias: Any, out: Any, precision: str) -> None: ...
def grouped_matmul(x: Any, w_stack: ScaledTensor, offsets: list[int], out_dtype: str) -> NDArray[Any]: ...
def grouped_matmul_into(x: Any, w_stack: ScaledTensor, offsets: list[int], out: Any) -> None: ...
def compare(reference: Any, tensor: Any) -> _Comparison: ...
def magnitudes(x: Any) -> _Magnitudes: ...
def error_magnitudes(reference: Any, tensor: Any, unit: float) -> _Magnitudes: ...
def count_codes(scaled: ScaledTensor) -> NDArray[np.int64]: ...
def prepare(weight: ScaledTensor) -> ScaledTensor: ...
def xla_handlers() -> dict[str, Any]:
    """Only where the extension was built with jaxlib's headers."""

def format_names() -> list[str]: ...
def format_info(name: str) -> dict[str, Any]: ...
def encode(x: NDArray[np.float32], name: str) -> NDArray[np.uint8]: ...
def decode(codes: NDArray[np.uint8], name: str) -> NDArray[np.float32]: ...
def pack(codes: NDArray[np.uint8]) -> NDArray[np.uint8]: ...
def unpack(packed: NDArray[np.uint8], n: int) -> NDArray[np.uint8]: ...
def pack_sixes(codes: NDArray[np.uint8]) -> NDArray[np.uint8]: ...
def unpack_sixes(packed: NDArray[np.uint8]) -> NDArray[np.uint8]: ...
def codes_from_gptq(words: NDArray[np.uint32], bits: int, order: NDArray[np.int64], flip: int) -> NDArray[np.uint8]:
    """Columns stay where they are where ``order`` is empty; ``flip`` are the bits of each word to turn round."""

def codes_to_gptq(codes: NDArray[np.uint8], bits: int, order: NDArray[np.int64], flip: int) -> NDArray[np.uint32]: ...
def codes_from_awq(words: NDArray[np.uint32], flip: int) -> NDArray[np.uint8]: ...
def codes_to_awq(codes: NDArray[np.uint8], columns: int, flip: int) -> NDArray[np.uint32]: ...
def cpu_info() -> CoreInfo: ...
def matmul_kernels() -> list[tuple[str, str, bool, int, str]]: ...
def matmul_rules() -> list[tuple[str, str, str, str, str, str]]: ...
def set_backend(name: str) -> None: ...
def set_num_threads(count: int) -> None: ...
def num_threads() -> int: ...
