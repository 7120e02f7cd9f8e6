# SPDX-License-Identifier: Apache-2.0
"""Launch plans: what a call does on the GPU, recorded once and repeated with other pointers.

A verb allocates its results, launches a few kernels and returns. Which kernels, with which grids and constants, follows
from shapes, strides, dtypes and alignment, never from values. `record` runs such a call and writes down its steps; a
`_core.LaunchPlan` repeats them. A repeated call costs its allocations and its launches: no dispatch, no derivation of
shapes, no binding of a kernel's arguments.

A call has no plan if it does anything else: another operator of torch, memory shared between operands, a kernel with
memory of its own. It then runs in full every time.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import struct
from typing import Any, NamedTuple

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode

from breccia import _core
from breccia.kernels.triton import runtime

_ALIGNMENT = 512  # of what torch allocates on a GPU
_NUMBERS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I",
            "u64": "Q", "fp32": "f", "fp64": "d"}  # fmt: skip
_POINTER = bytes(8)
_MAP = bytes(128)  # a CUtensorMap
# Attributes of a launch (CUlaunchAttributeID), and a value of the policy's.
_COOPERATIVE, _CLUSTER, _CLUSTER_POLICY, _OVERLAPS = 2, 4, 5, 6
_SPREAD = 1
_MAX_CLUSTER = 8  # what every GPU with clusters has
_L2_128_BYTES, _NAN = 2, 1  # CUtensorMapL2promotion, CUtensorMapFloatOOBfill


class Unplannable(Exception):  # noqa: N818 (no error: the call has run)
    """The call does something that a plan cannot repeat."""


class _Place(NamedTuple):
    """A byte of memory: of operand or allocation `slot`, or, with slot -1, at the address `offset` itself."""

    slot: int
    offset: int


class _Memory(NamedTuple):
    tensor: torch.Tensor  # kept alive, so that its address means nothing else while the call is recorded
    base: int
    start: int
    end: int


class _Launch(NamedTuple):
    """What `_core.Launch` wants of a kernel's parameters, and the tensors whose addresses are constants of it."""

    parameters: list[bytes]
    pointers: list[tuple[int, int, int]]  # parameter, slot, offset
    maps: list[tuple[int, int, int, Any]]  # the same, and what encodes an address
    kept: list[Any]


# The parameters that kernels of these versions have are known.
_KNOWN_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)


def hooked() -> bool:
    """Whether launches must go through Triton: a profiler wants to hear of each, or the version is not a known one."""
    if not _KNOWN_VERSION:
        return True
    knobs = triton.knobs.runtime
    return bool(knobs.launch_enter_hook.calls or knobs.launch_exit_hook.calls)


def record(call: Any, operands: list[torch.Tensor]) -> tuple[list[torch.Tensor], _core.LaunchPlan | None, str]:
    """Runs `call`, which returns a list of tensors: (those, its plan or None, why there is none)."""
    recorder = _Recorder(operands)
    with recorder:
        made = call()
    try:
        return made, recorder.plan(made), ""
    except Unplannable as reason:
        return made, None, str(reason)


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Sees each operator of torch and, through `runtime.launch`, each kernel."""

    def __init__(self, operands: list[torch.Tensor]) -> None:
        super().__init__()
        self.operands = [_memory(tensor) for tensor in operands]
        self.allocations: list[_Memory] = []
        self.launched: list[tuple[Any, ...]] = []
        self.problem = ""
        starts = [memory.start for memory in self.operands]
        if len(set(starts)) != len(starts):
            self.problem = "operands share memory"

    def __enter__(self) -> Any:
        self.before = runtime.observer.launched
        runtime.observer.launched = lambda *launched: self.launched.append(launched)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        runtime.observer.launched = self.before
        super().__exit__(*error)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: with True, the first call would import torch's compiler, for seconds, to keep it off this class.
        Nothing traces where plans are recorded."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in ("aten::empty", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"):
            self.allocations.append(_memory(made))
        elif not func.is_view and not self.problem:
            self.problem = f"it calls {name}"
        return made

    def plan(self, made: list[torch.Tensor]) -> _core.LaunchPlan:
        """The plan of the call that returned `made`."""
        if self.problem:
            raise Unplannable(self.problem)
        results: list[tuple[Any, ...]] = []
        order: list[_Memory] = []
        for tensor in made:
            found = next((m for m in self.allocations if m.base == tensor.data_ptr()), None)
            whole = found is not None and _extent(tensor) == found.end - found.start
            if found is None or not whole or any(found is other for other in order):
                raise Unplannable("a result is no allocation of its own")
            order.append(found)
            results.append((tuple(tensor.shape), tensor.stride(), tensor.dtype))
        rest = [m for m in self.allocations if not any(m is other for other in order) and m.end > m.start]
        self.slots = [*self.operands, *order, *rest]
        self.used: set[int] = set()
        kept: list[Any] = []
        launches = [self._launch(kept, *launched) for launched in self.launched]
        offsets, size = [], 0
        for slot, memory in enumerate(rest, len(self.operands) + len(order)):
            offsets.append(size)
            if slot in self.used:
                size += -(-(memory.end - memory.base) // _ALIGNMENT) * _ALIGNMENT
        return _core.LaunchPlan(
            launch=_driver().address,
            allocate=torch.empty_strided,
            stream=torch._C._cuda_getCurrentRawStream,
            bind=_driver().bind,
            explain=_driver().explain,
            device=made[0].device,
            results=results,
            scratch=((size,), (1,), torch.uint8) if size else None,
            offsets=offsets if size else [0] * len(offsets),
            launches=launches,
            kept=kept,
        )

    def _launch(
        self, kept: list[Any], kernel: Any, compiled: Any, grid: tuple[int, ...], args: Any, options: Any
    ) -> _core.Launch:
        run, metadata = compiled.run, compiled.metadata
        if run.global_scratch_size or run.profile_scratch_size:
            raise Unplannable(f"{compiled.name} has memory of its own")
        named = {name: value for name, value in options.items() if name in kernel.arg_names}
        bound = inspect.signature(kernel.fn).bind(*args, **named)
        bound.apply_defaults()
        launch = _Launch([], [], [], kept)
        maps = iter(getattr(metadata, "tensordesc_meta", None) or ())
        for value, kind in zip(bound.arguments.values(), compiled.src.signature.values(), strict=True):
            self._argument(launch, value, kind, maps)
        launch.parameters.extend([_POINTER, _POINTER])  # memory of its own and of a profiler
        width, height, depth = (*grid, 1, 1)[:3]
        return _core.Launch(
            function=compiled.function,
            grid=(width * metadata.num_ctas, height, depth),
            threads=32 * metadata.num_warps,
            shared_memory=metadata.shared,
            attributes=_attributes(run, metadata.num_ctas),
            parameters=launch.parameters,
            pointers=launch.pointers,
            maps=launch.maps,
        )

    def _argument(self, launch: _Launch, value: Any, kind: Any, maps: Any) -> None:
        at = len(launch.parameters)
        if not isinstance(kind, str):
            raise Unplannable("a kernel takes a tuple")
        if kind == "constexpr":
            return
        if kind.startswith("*"):
            place = self._place(value, launch)
            launch.parameters.append(place.offset.to_bytes(8, "little"))
            if place.slot >= 0:
                launch.pointers.append((at, *place))
        elif kind.startswith("tensordesc"):
            encode: Any = functools.partial(_driver().encode, *_encoding(value, next(maps, None)))
            place = self._place(value.base, launch)
            launch.parameters.append(_MAP if place.slot >= 0 else encode(place.offset))
            if place.slot >= 0:
                launch.maps.append((at, *place, encode))
            launch.parameters.extend(struct.pack("<i", size) for size in value.shape)
            launch.parameters.extend(struct.pack("<q", stride) for stride in value.strides)
        elif kind in _NUMBERS:
            launch.parameters.append(struct.pack(f"<{_NUMBERS[kind]}", value))
        else:
            raise Unplannable(f"a kernel takes a number of type {kind}")

    def _place(self, tensor: torch.Tensor, launch: _Launch) -> _Place:
        address = tensor.data_ptr()
        for slot, memory in enumerate(self.slots):
            if memory.start <= address < memory.end:
                self.used.add(slot)
                return _Place(slot, address - memory.base)
        launch.kept.append(tensor)
        return _Place(-1, address)


def _memory(tensor: torch.Tensor) -> _Memory:
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    return _Memory(tensor, tensor.data_ptr(), start, start + storage.nbytes())


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from its first element to the end of its last: those of its storage, where torch allocated it so."""
    steps = [(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.element_size() * (1 + sum(steps)) if tensor.numel() else 0


def _attributes(run: Any, ctas: int) -> list[tuple[int, list[int]]]:
    """What Triton asks of a launch beside its sizes."""
    asked = []
    if run.launch_pdl:
        asked.append((_OVERLAPS, [1]))
    if run.launch_cooperative_grid:
        asked.append((_COOPERATIVE, [1]))
    if ctas != 1:
        asked += [(_CLUSTER, [ctas, 1, 1]), (_CLUSTER_POLICY, [_SPREAD])]
    if ctas > _MAX_CLUSTER:
        raise Unplannable(f"a kernel has clusters of more than {_MAX_CLUSTER} programs")
    return asked


def _encoding(descriptor: Any, metadata: Any) -> tuple[Any, ...]:
    """What a TMA descriptor consists of, but for the address: see `_Driver.encode`."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    if metadata is None or metadata["fp4_padded"]:
        raise Unplannable("a kernel reads a descriptor without TMA")
    kind = TMA_DTYPE_DEVICE_TO_HOST[metadata["elem_type"]]
    sizes = (metadata["block_size"], list(descriptor.shape), list(descriptor.strides))
    return kind, metadata["elem_size"], metadata["swizzle"], *sizes, descriptor.padding == "nan"


class _Driver:
    """The functions of NVIDIA's driver that plans need."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.address = ctypes.cast(self.library.cuLaunchKernelEx, ctypes.c_void_p).value or 0

    def bind(self, device: int) -> None:
        """Give a thread that has no context, as its first call may find it, that of a device."""
        context = ctypes.c_void_p()
        self.library.cuCtxGetCurrent(ctypes.byref(context))
        if context.value is None:
            torch.cuda.mem_get_info(device)

    def explain(self, code: int) -> str:
        text = ctypes.c_char_p()
        self.library.cuGetErrorString(code, ctypes.byref(text))
        return f"CUDA error {code}: {(text.value or b'unknown').decode()}"

    def encode(
        self,
        kind: int,
        size: int,
        swizzle: int,
        block: list[int],
        shape: list[int],
        strides: list[int],
        nan: bool,
        address: int,
    ) -> bytes:
        """The TMA descriptor (CUtensorMap) of a tensor: elements of `size` bytes, read in blocks; sizes in elements,
        the innermost axis last."""
        rank = len(block)
        memory = ctypes.create_string_buffer(len(_MAP) + 64)
        start = -(-ctypes.addressof(memory) // 64) * 64  # the driver wants it so aligned
        code = self.library.cuTensorMapEncodeTiled(
            ctypes.c_void_p(start),
            ctypes.c_int(kind),
            ctypes.c_uint32(rank),
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*reversed(shape)),
            (ctypes.c_uint64 * rank)(*(stride * size for stride in reversed(strides[:-1]))),
            (ctypes.c_uint32 * rank)(*reversed(block)),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            ctypes.c_int(0),
            ctypes.c_int(swizzle),
            ctypes.c_int(_L2_128_BYTES),
            ctypes.c_int(_NAN if nan else 0),
        )
        if code:
            raise RuntimeError(self.explain(code))
        return ctypes.string_at(start, len(_MAP))


@functools.cache
def _driver() -> _Driver:
    return _Driver()
