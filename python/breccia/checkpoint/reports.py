# SPDX-License-Identifier: Apache-2.0
"""What the functions of this package return: dictionaries of JSON types, whose keys the functions describe."""

from __future__ import annotations

from typing import Any, TypedDict


class _Requantized(TypedDict):
    tensors: int
    lossless: int
    sqnr_db: float | None


class _Errors(TypedDict):
    tensors: int
    worst: str
    worst_db: float | str
    median_db: float | str


class _Kept(TypedDict):
    tensors: int
    bytes: int
    largest: str | None
    largest_bytes: int


_Planned = TypedDict(  # "from" is a keyword
    "_Planned",
    {"name": str, "shape": list[int], "action": str, "from": str, "stored": dict[str, str], "nbytes": int},
)


class _Account(TypedDict):
    tensors: dict[str, str]
    keys: dict[str, str]


class _Job(TypedDict):
    source: str
    destination: str
    to: str
    tensors: dict[str, int]
    bytes_read: int
    bytes_written: int
    seconds: float
    weights: int
    bits_per_weight: float | None
    bits_per_quantized_weight: float | None
    kept: _Kept | None
    requantized: _Requantized | None
    errors: _Errors | None
    not_finite: dict[str, int]
    output_errors: dict[str, dict[str, Any]]
    notes: list[str]
    accounted: str
    account: _Account


class ConvertReport(_Job, total=False):
    """Of `breccia.checkpoint.convert`; "plan" is there in a dry run."""

    plan: list[_Planned]


class _Change(TypedDict):
    rounding: str
    kept: float | None
    tensors: dict[str, float]


class MergeReport(_Job):
    """Of `breccia.checkpoint.merge_lora`."""

    change: _Change


class _Compared(TypedDict):
    name: str
    shape: list[int]
    sqnr_db: float | str
    cosine: float
    max_error: float | str
    equal: bool
    mistake: str
    bound_db: float


class VerifiedTensor(_Compared, total=False):
    """One of `VerifyReport`; "kept" is there with an adapter, "output_error" with moments."""

    kept: float
    output_error: float | str


class OutputErrorReport(TypedDict):
    """Of all tensors that have moments, in a `VerifyReport`."""

    tensors: int
    mean: float | None
    unused: list[str]


class _Verified(TypedDict):
    reference: str
    checked: str
    ok: bool
    min_sqnr_db: float | None
    failed: list[str]
    damaged: dict[str, list[str]]
    missing: list[str]
    extra: list[str]
    scheme: list[str]
    tensors: list[VerifiedTensor]


class VerifyReport(_Verified, total=False):
    """Of `breccia.checkpoint.verify`; "kept" is there with an adapter, "output_error" with moments."""

    kept: float
    output_error: OutputErrorReport


class _Scales(TypedDict):
    layout: str
    shape: list[int]


class InspectedTensor(TypedDict):
    """One of `InspectReport`."""

    name: str
    format: str
    kind: str
    shape: list[int]
    nbytes: int
    bits_per_weight: float
    recipe: dict[str, Any] | None
    scales: _Scales | None
    parts: dict[str, str]
    findings: list[str]


class _Total(TypedDict):
    tensors: int
    weights: int
    nbytes: int
    bits_per_weight: float
    formats: dict[str, int]


class InspectReport(TypedDict):
    """Of `breccia.checkpoint.inspect`."""

    path: str
    files: int
    tensors: list[InspectedTensor]
    total: _Total
    quantization_config: dict[str, Any]
    findings: list[str]


class Problem(TypedDict):
    """One of `CompleteReport`."""

    tensor: str
    problem: str


class CompleteReport(TypedDict):
    """Of `breccia.checkpoint.complete`."""

    path: str
    ok: bool
    tensors: int
    quantized: int
    problems: list[Problem]
    missing: list[str]
    extra: list[str]
    unread: list[str]
    readers: list[str]
    checked: str
