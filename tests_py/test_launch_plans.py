# SPDX-License-Identifier: Apache-2.0
"""What plans hand to the driver, which a C function in its place writes down; tensors are stand-ins, too."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest
from breccia import _core


class Config(ctypes.Structure):
    """CUlaunchConfig, as cuda.h has it."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_memory", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(Config),
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_void_p),
)


class Device:
    index = 3


class Tensor:
    dtype, shape, requires_grad = "bfloat16", (2, 8), False

    def __init__(self, address: int, **changed: Any) -> None:
        self.address = address
        self.__dict__.update(changed)

    def data_ptr(self) -> int:
        return self.address

    def stride(self) -> tuple[int, ...]:
        return (8, 1)

    def get_device(self) -> int:
        return 3


class Driver:
    """Answers for cuLaunchKernelEx with `code`, and keeps what it was called with."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.code, self.calls = sizes, 0, []  # type: ignore[var-annotated]
        self.function = LAUNCH(self.launched)
        self.address = ctypes.cast(self.function, ctypes.c_void_p).value

    def launched(self, config: Any, function: Any, parameters: Any, extra: Any) -> int:
        asked = config.contents
        attributes = ctypes.string_at(asked.attributes, 72 * asked.attribute_count) if asked.attribute_count else b""
        values = [ctypes.string_at(parameters[i], size) for i, size in enumerate(self.sizes)]
        aligned = [parameters[i] % 64 == 0 for i, size in enumerate(self.sizes) if size == 128]
        assert all(aligned)
        assert not extra
        sizes = list(asked.grid), list(asked.block), asked.shared_memory, asked.stream
        self.calls.append((function, sizes, attributes, values))
        return self.code


def plan_of(driver: Driver, encoded: list[int], **changed: Any) -> Any:
    """A kernel of (operand + 4, number, result, map of scratch + 512, scratch)."""

    def encode(address: int) -> bytes:
        encoded.append(address)
        return struct.pack("<Q", address) * 16

    made = iter(range(0x10000, 0x90000, 0x10000))
    launch = _core.Launch(
        function=77,
        grid=(5, 6, 7),
        threads=128,
        shared_memory=1024,
        attributes=[(6, [1]), (4, [2, 1, 1])],
        parameters=[bytes(8), struct.pack("<i", -9), bytes(8), bytes(128), bytes(8)],
        pointers=[(0, 0, 4), (2, 1, 0), (4, 2, 0)],
        maps=[(3, 3, 0, encode)],
    )
    wanted: dict[str, Any] = {
        "launch": driver.address,
        "allocate": lambda size, stride, *, dtype, device: Tensor(next(made), made=(size, stride, dtype, device)),
        "stream": lambda index: 40 + index,
        "bind": lambda index: None,
        "explain": lambda code: f"CUDA error {code}: too bad",
        "device": Device(),
        "results": [((2, 8), (8, 1), "bfloat16")],
        "scratch": ((1024,), (1,), "uint8"),
        "offsets": [0, 512],
        "launches": [launch],
        "kept": [],
    }
    return _core.LaunchPlan(**{**wanted, **changed})


@pytest.fixture
def driver() -> Driver:
    return Driver([8, 4, 8, 128, 8])


def number(value: bytes) -> int:
    return int.from_bytes(value, "little")


def test_parameters_sizes_and_attributes(driver: Driver) -> None:
    encoded: list[int] = []
    [made] = plan_of(driver, encoded).run([Tensor(0x500)])
    assert made.made[:3] == ((2, 8), (8, 1), "bfloat16")
    [(function, sizes, attributes, values)] = driver.calls
    assert (function, sizes) == (77, ([5, 6, 7], [128, 1, 1], 1024, 43))
    assert attributes == struct.pack("<ii16I", 6, 0, 1, *[0] * 15) + struct.pack("<ii16I", 4, 0, 2, 1, 1, *[0] * 13)
    assert number(values[0]) == 0x500 + 4
    assert struct.unpack("<i", values[1]) == (-9,)
    assert number(values[2]) == made.address == 0x10000
    assert values[3] == struct.pack("<Q", 0x20000 + 512) * 16
    assert number(values[4]) == 0x20000


def test_maps_are_encoded_once_for_an_address(driver: Driver) -> None:
    encoded: list[int] = []
    addresses = iter([0x100, 0x1000, 0x200, 0x1000, 0x300, 0x2000])
    plan = plan_of(driver, encoded, allocate=lambda *size, **kind: Tensor(next(addresses)))
    for _ in range(3):
        plan.run([Tensor(0x500)])
    assert encoded == [0x1000 + 512, 0x2000 + 512]
    assert [call[3][3][:8] for call in driver.calls] == [struct.pack("<Q", a + 512) for a in (0x1000, 0x1000, 0x2000)]


def test_operands_that_are_not_aligned_have_no_plan(driver: Driver) -> None:
    assert plan_of(driver, []).run([Tensor(0x508)]) is None
    assert driver.calls == []


def test_an_error_of_the_driver_is_told(driver: Driver) -> None:
    driver.code = 700
    with pytest.raises(RuntimeError, match=r"^CUDA error 700: too bad$"):
        plan_of(driver, []).run([Tensor(0x500)])


def test_errors_of_what_a_plan_calls_come_through(driver: Driver) -> None:
    def fails(*arguments: Any, **options: Any) -> Any:
        raise MemoryError("none left")

    for index, name in enumerate(("allocate", "stream", "bind"), 10):  # a device that the thread has not seen
        with pytest.raises(MemoryError, match="none left"):
            plan_of(driver, [], device=type("D", (), {"index": index})(), **{name: fails}).run([Tensor(0x500)])
    with pytest.raises(ValueError, match="recorded with"):
        plan_of(driver, []).run([])
    assert driver.calls == []


def test_threads_are_bound_once_to_a_device(driver: Driver) -> None:
    bound: list[int] = []
    plan = plan_of(driver, [], device=type("D", (), {"index": 7})(), bind=bound.append)
    plan.run([Tensor(0x500)])
    plan.run([Tensor(0x500)])
    assert bound == [7]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"pointers": [(1, 0, 0)]}, "parameter 1 must have 8 bytes"),
        ({"pointers": [(2, 0, 0)]}, "parameter 2 must have 8 bytes"),
        ({"maps": [(0, 0, 0, bytes)]}, "parameter 0 must have 128 bytes"),
        ({"parameters": [bytes(8), bytes(4096)]}, "at most 4096 bytes"),
        ({"attributes": [(4, [1] * 17)]}, "at most 16 numbers"),
    ],
)
def test_launches_that_cannot_be(changed: dict[str, Any], message: str) -> None:
    wanted: dict[str, Any] = {"parameters": [bytes(8), bytes(4)], "pointers": [], "maps": [], "attributes": []}
    with pytest.raises(ValueError, match=message):
        _core.Launch(function=1, grid=(1, 1, 1), threads=32, shared_memory=0, **{**wanted, **changed})


class Repeat:
    """A repeated call of `plan_of` with a weight of two parts, of which one is None."""

    def __init__(self, driver: Driver) -> None:
        self.parts: dict[str, Any] = {"data": Tensor(0x900), "zero_point": None}
        self.mode, self.device, self.wrapped = 0, 3, False
        self.call = _core.RepeatedCall(
            plan=plan_of(driver, [], scratch=None, offsets=[0]),
            like=Tensor(0x500),
            parts=self.parts,
            names=("data", "zero_point"),
            unless=(lambda: self.mode,),
            wrapped=lambda x: self.wrapped,
            current_device=lambda: self.device,
        )


def test_a_call_is_repeated_with_what_its_parts_are_now(driver: Driver) -> None:
    driver.sizes = [8, 4, 8]
    repeat = Repeat(driver)
    assert repeat.call.run(Tensor(0x700)).address == 0x10000
    repeat.parts["data"].address = 0xA00
    repeat.call.run(Tensor(0x800))
    assert [number(call[3][0]) for call in driver.calls] == [0x704, 0x804]
    # Slots are numbered as the plan's: the operand, the weight, the result.
    assert [number(call[3][2]) for call in driver.calls] == [0x900, 0xA00]


@pytest.mark.parametrize(
    "change",
    [
        {"x": Tensor(0x700, dtype="float16")},
        {"x": Tensor(0x700, shape=(1, 8))},
        {"x": Tensor(0x700, stride=lambda: (16, 1))},
        {"x": Tensor(0x700, get_device=lambda: 2)},
        {"x": Tensor(0x700, requires_grad=True)},
        {"x": Tensor(0x708)},
        {"x": type("Subclass", (Tensor,), {})(0x700)},
        {"mode": 1},
        {"device": 0},
        {"wrapped": True},
        {"data": Tensor(0x900)},
        {"zero_point": Tensor(0x900)},
    ],
)
def test_nothing_is_repeated_where_something_differs(driver: Driver, change: dict[str, Any]) -> None:
    driver.sizes = [8, 4, 8]
    repeat = Repeat(driver)
    for name, value in change.items():
        if name in repeat.parts:
            repeat.parts[name] = value
        elif name != "x":
            setattr(repeat, name, value)
    assert repeat.call.run(change.get("x", Tensor(0x700))) is None
    assert driver.calls == []
