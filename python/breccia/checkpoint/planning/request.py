# SPDX-License-Identifier: Apache-2.0
"""What a conversion was asked for, in one value that can be pickled."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict, get_args

from breccia import _core
from breccia.calibration.error_feedback import Order
from breccia.checkpoint.arguments import existing, patterns_of
from breccia.checkpoint.device import Device
from breccia.checkpoint.planning.asked import Asked, asked_of
from breccia.checkpoint.planning.importance import Importance, print_of
from breccia.checkpoint.planning.targets import FLOATS, KEEP, Feedback, Target, parse_target
from breccia.checkpoint.reading.source import Checkpoint, Unmarked
from breccia.gguf.files import model_names
from breccia.recipes import ScaleSearch
from breccia.schemes.value import ModelScheme, Rule

Method: TypeAlias = Literal["nearest", "gptq"]
_MANIFEST = (
    *("include", "exclude", "scale_search", "group_size", "unmarked", "method", "order", "damp", "smooth"),
    *("embeddings", "head", "dtype_of_rest", "activations"),
)


class Options(TypedDict, total=False):
    """Of what is written, beside the target's name: see `breccia.checkpoint.convert`."""

    include: Sequence[str]
    exclude: Sequence[str]
    scale_search: ScaleSearch | None
    group_size: int | str | None
    imatrix: str | os.PathLike[str] | None
    scheme: ModelScheme | str | os.PathLike[str] | None
    rules: Sequence[str | Rule]
    kv: str | None
    activations: str | None
    amax: str | os.PathLike[str] | None
    embeddings: str | None
    head: str | None
    dtype_of_rest: str
    moments: str | os.PathLike[str] | None
    method: Method
    order: Order | None
    damp: float | None
    smooth: bool
    unmarked: Unmarked | None


@dataclass(frozen=True)
class Request:
    """The target's name and `Options`, as `breccia.checkpoint.convert` takes them.

    Raises:
        TypeError: an option is of a wrong type.
        ValueError: an option has a value it cannot have, or does not go with the others.
    """

    to: str
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    scale_search: ScaleSearch | None = None
    group_size: int | str | None = None
    imatrix: str | os.PathLike[str] | None = None
    scheme: ModelScheme | str | os.PathLike[str] | None = None
    rules: Sequence[str | Rule] = ()
    kv: str | None = None
    activations: str | None = None
    amax: str | os.PathLike[str] | None = None
    embeddings: str | None = None
    head: str | None = None
    dtype_of_rest: str = KEEP
    moments: str | os.PathLike[str] | None = None
    method: Method = "nearest"
    order: Order | None = None
    damp: float | None = None
    smooth: bool = False
    unmarked: Unmarked | None = None

    def __post_init__(self) -> None:
        _ = self.asked  # which reads the scheme's file
        for option in ("include", "exclude"):
            object.__setattr__(self, option, patterns_of(getattr(self, option), option))
        for option in ("imatrix", "moments"):
            if (path := getattr(self, option)) is not None:
                existing(path, option)
        if self.dtype_of_rest not in (KEEP, *FLOATS):
            known = ", ".join((KEEP, *FLOATS))
            raise ValueError(f"dtype_of_rest must be one of {known}, got {self.dtype_of_rest!r}")
        if self.imatrix is not None and self.moments is not None:
            raise ValueError("moments must be left out where imatrix is given: their diagonal is an importance too")
        if not isinstance(self.smooth, bool):
            raise TypeError(f"smooth must be True or False, got {self.smooth!r}")
        if self.smooth and self.moments is None:
            raise ValueError("moments must be given for smooth: calibrate makes a file of them")
        if self.method not in get_args(Method):
            raise ValueError(f"method must be 'nearest' or 'gptq', got {self.method!r}")
        if self.method == "nearest":
            for option in ("order", "damp"):
                if (value := getattr(self, option)) is not None:
                    raise ValueError(f"{option} must be left out except with method gptq, got {value!r}")
            return
        if self.moments is None:
            raise ValueError("moments must be given for method gptq: calibrate makes a file of them")
        if self.order not in (None, *get_args(Order)):
            raise ValueError(f"order must be 'act' or 'natural', got {self.order!r}")
        if self.damp is None:
            return
        if isinstance(self.damp, bool) or not isinstance(self.damp, (int, float)):
            raise TypeError(f"damp must be a number, got {self.damp!r}")
        if not 0 <= self.damp <= 1:
            raise ValueError(f"damp must be from 0 to 1, got {self.damp!r}")

    @cached_property
    def asked(self) -> Asked | None:
        """What is asked by a scheme or its like; None: nothing."""
        return asked_of(self.scheme, self.rules, self.kv, self.activations, self.amax, self.embeddings, self.head)

    @classmethod
    def again(cls, said: Mapping[str, Any], files: Mapping[str, Any]) -> Request:
        """What a manifest says that was asked for, with files of data by the options that name them."""
        options = {**said["options"], **files}
        if "scheme" in options:
            options["scheme"] = ModelScheme.from_toml(options["scheme"])
        return cls(str(said.get("to")), **options)

    def said(self) -> dict[str, Any]:
        """What `convert` was given beside the target's name and files of data, of JSON types."""
        given = {name: getattr(self, name) for name in _MANIFEST if getattr(self, name) != getattr(Request, name)}
        if self.asked is not None and (scheme := self.asked.scheme.to_toml()):
            given["scheme"] = scheme
        return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}

    def target(self, device: Device = Device()) -> Target:  # noqa: B008
        """What is to be written. Raises TypeError or ValueError where there is none of that name, or no format of
        quantized layers for what is asked."""
        target = parse_target(
            self.to,
            scale_search=self.scale_search,
            group_size=self.group_size,
            include=self.include,
            exclude=self.exclude,
            by_rules=self.asked is not None and bool(self.asked.scheme.rules),
        )
        if self.asked is not None and target.float_dtype:
            said = "scheme, rules (--set), kv, activations, embeddings and head"
            raise ValueError(f"{said} must be left out where to is {target.spelled!r}, which has no quantized layers")
        table = None if self.asked is None else self.asked.embeddings
        if table is not None and table.weights is not None and not target.bridge.readers.embeddings:
            why = f"no program loads them from {target.format} otherwise"
            raise ValueError(
                f"embeddings must be 'keep' where to is {target.spelled!r}, got {self.embeddings!r}: {why}"
            )
        return dataclasses.replace(target, asked=self.asked, device=device, rest=FLOATS.get(self.dtype_of_rest, KEEP))

    @contextlib.contextmanager
    def opened(self, source: Path, target: Target) -> Iterator[tuple[Checkpoint, Target]]:
        """The source, and the target with the data that weights are rounded by, for a while. Raises ValueError where
        the source, or a file of data, is not valid."""
        with Checkpoint(source, mapped=False, unmarked=self.unmarked) as checkpoint:
            target = self.with_data(target, checkpoint)
            try:
                yield checkpoint, target
            finally:
                if target.importance is not None:
                    target.importance.close()

    def with_data(self, target: Target, checkpoint: Checkpoint) -> Target:
        """A target with the file of data, which is looked up by the names of the source, and the method."""
        argument = "imatrix" if self.imatrix is not None else "moments"
        path = getattr(self, argument)
        if path is None:
            return target
        importance = Importance(path, model_names(checkpoint)[0], argument)
        if said := importance.of_model.get("model"):
            importance.of_other_weights = said != print_of(checkpoint)
        feedback = None
        if self.method != "nearest":
            feedback = Feedback(self.order or "act", _core.GPTQ_DAMP if self.damp is None else float(self.damp))
        return dataclasses.replace(target, importance=importance, feedback=feedback, smooth=self.smooth)
