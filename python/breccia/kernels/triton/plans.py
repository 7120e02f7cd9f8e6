# SPDX-License-Identifier: Apache-2.0
"""Launch plans: what a call does on the GPU, recorded once and repeated with other pointers.

A verb allocates its results, launches a few kernels and returns. Which kernels, with which grids and constants, follows
from shapes, strides, dtypes and alignment, never from values. `record` runs such a call and writes down its steps; a
`Plan` repeats them. A repeated call costs its allocations and its launches: no dispatch, no derivation of shapes, no
binding of a kernel's arguments.

A call has no plan if it does anything else: another operator of torch, memory shared between operands, a kernel with
memory of its own. It then runs in full every time.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any, NamedTuple

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver

from breccia.kernels.triton import runtime

_HEADER = 13  # arguments of Triton's launcher before the kernel's own
_STREAM = 3
_ALIGNMENT = 512  # of what torch allocates on a GPU
_MAX_MAPS = 64


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


class _Threads(threading.local):
    """On which devices a thread has a context, which encoding a descriptor wants and a thread's first call may lack."""

    def __init__(self) -> None:
        self.devices: set[int] = set()

    def bind(self, device: int) -> None:
        if device not in self.devices:
            torch.cuda.mem_get_info(device)
            self.devices.add(device)


_threads = _Threads()


class _TensorMap:
    """A TMA descriptor of an operand or result, encoded again when the address is a new one."""

    def __init__(self, at: int, place: _Place, encoding: tuple[Any, ...]) -> None:
        self.at, self.place, self.encoding = at, place, encoding
        self.known: dict[int, Any] = {}

    def of(self, address: int) -> Any:
        made = self.known.get(address)
        if made is None:
            if len(self.known) >= _MAX_MAPS:
                self.known.clear()
            _threads.bind(torch._C._cuda_getDevice())
            made = self.known[address] = driver.active.utils.fill_tma_descriptor(address, *self.encoding)
        return made


class _Launch(NamedTuple):
    launcher: Any
    arguments: list[Any]
    pointers: list[tuple[int, int, int]]  # argument, slot, offset
    maps: list[_TensorMap]
    kept: list[Any]  # tensors whose addresses are constants of the launch


class Plan:
    """A recorded call. `results` are those of its allocations that it returns, in order."""

    def __init__(
        self, device: int, results: list[tuple[Any, ...]], scratch: int, offsets: list[int], launches: list[_Launch]
    ) -> None:
        self.device = torch.device("cuda", device)
        self.results, self.scratch, self.offsets, self.launches = results, scratch, offsets, launches

    def __call__(self, addresses: list[int]) -> list[torch.Tensor]:
        """Repeats the call. `addresses`: those of the operands, multiples of 16, in the order they were recorded in;
        the list is used up."""
        device = self.device
        made = [torch.empty_strided(size, stride, dtype=dtype, device=device) for size, stride, dtype in self.results]
        addresses += [result.data_ptr() for result in made]
        if self.scratch:
            scratch = torch.empty_strided((self.scratch,), (1,), dtype=torch.uint8, device=device)
            start = scratch.data_ptr()
            addresses += [start + offset for offset in self.offsets]
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        for launcher, arguments, pointers, maps, _ in self.launches:
            filled = arguments.copy()
            filled[_STREAM] = stream
            for at, slot, offset in pointers:
                filled[at] = addresses[slot] + offset
            for tensor_map in maps:
                slot, offset = tensor_map.place
                filled[tensor_map.at] = tensor_map.of(addresses[slot] + offset)
            launcher(*filled)
        return made


# The launcher that plans call past Triton's own is that of these versions.
_KNOWN_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)


def hooked() -> bool:
    """Whether launches must go through Triton: a profiler wants to hear of each, or the version is not a known one."""
    if not _KNOWN_VERSION:
        return True
    knobs = triton.knobs.runtime
    return bool(knobs.launch_enter_hook.calls or knobs.launch_exit_hook.calls)


def record(call: Any, operands: list[torch.Tensor]) -> tuple[list[torch.Tensor], Plan | None, str]:
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
        self.before, runtime.observer.launched = runtime.observer.launched, self._launched
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

    def _launched(self, kernel: Any, compiled: Any, grid: tuple[int, ...], args: Any, options: Any) -> None:
        self.launched.append((kernel, compiled, grid, args, options))

    def plan(self, made: list[torch.Tensor]) -> Plan:
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
        launches = [self._launch(*launched) for launched in self.launched]
        offsets, size = [], 0
        for slot, memory in enumerate(rest, len(self.operands) + len(order)):
            offsets.append(size)
            if slot in self.used:
                size += -(-(memory.end - memory.base) // _ALIGNMENT) * _ALIGNMENT
        return Plan(made[0].device.index, results, size, offsets, launches)

    def _launch(self, kernel: Any, compiled: Any, grid: tuple[int, ...], args: Any, options: Any) -> _Launch:
        run = compiled.run
        if run.global_scratch_size or run.profile_scratch_size:
            raise Unplannable(f"{compiled.name} has memory of its own")
        named = {name: value for name, value in options.items() if name in kernel.arg_names}
        bound = inspect.signature(kernel.fn).bind(*args, **named)
        bound.apply_defaults()
        arguments: list[Any] = [*(*grid, 1, 1)[:3], None, compiled.function, run.launch_cooperative_grid]
        arguments += [run.launch_pdl, None, None, compiled.packed_metadata, None, None, None]
        launch = _Launch(_raw_launcher(run.launch), arguments, [], [], [])
        metadata = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        for value, kind in zip(bound.arguments.values(), compiled.src.signature.values(), strict=True):
            self._argument(launch, value, kind, metadata)
        return launch

    def _argument(self, launch: _Launch, value: Any, kind: Any, metadata: Any) -> None:
        at = len(launch.arguments)
        if not isinstance(kind, str):
            raise Unplannable("a kernel takes a tuple")
        if kind == "constexpr":
            launch.arguments.append(None)
        elif kind.startswith("*"):
            place = self._place(value, launch)
            launch.arguments.append(place.offset)
            if place.slot >= 0:
                launch.pointers.append((at, *place))
        elif kind.startswith("tensordesc"):
            encoding = _encoding(value, next(metadata, None))
            tensor_map = _TensorMap(at, self._place(value.base, launch), encoding)
            fixed = tensor_map.place.slot < 0
            launch.arguments.append(tensor_map.of(tensor_map.place.offset) if fixed else None)
            launch.arguments.extend([*value.shape, *value.strides])
            if not fixed:
                launch.maps.append(tensor_map)
        else:
            launch.arguments.append(value)

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


def _encoding(descriptor: Any, metadata: Any) -> tuple[Any, ...]:
    """What Triton's own launcher hands to the encoder of a descriptor, but for the address."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    if metadata is None or metadata["fp4_padded"]:
        raise Unplannable("a kernel reads a descriptor without TMA")
    kind = TMA_DTYPE_DEVICE_TO_HOST[metadata["elem_type"]]
    sizes = (metadata["block_size"], list(descriptor.shape), list(descriptor.strides))
    return metadata["swizzle"], metadata["elem_size"], kind, *sizes, int(descriptor.padding == "nan")


def _raw_launcher(launch: Any) -> Any:
    """The compiled launcher inside the function that Triton wraps around it to encode descriptors."""
    code = getattr(launch, "__code__", None)
    if code is None:
        return launch
    if "launcher" not in code.co_freevars:
        raise Unplannable("this version of Triton launches in another way")
    return launch.__closure__[code.co_freevars.index("launcher")].cell_contents
