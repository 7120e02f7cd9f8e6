# SPDX-License-Identifier: Apache-2.0
"""What a conversion was asked for, in one value that can be pickled."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from breccia.checkpoint.arguments import patterns_of
from breccia.checkpoint.device import Device
from breccia.checkpoint.planning.asked import Asked, asked_of
from breccia.checkpoint.planning.rounding import Rounding
from breccia.checkpoint.planning.targets import Target, parse_target
from breccia.checkpoint.reading.source import Checkpoint
from breccia.schemes.value import ModelScheme, Rule

__all__ = ["Options", "Request"]


class Options(TypedDict, total=False):
    """Of what is written, beside the target's name: see `breccia.checkpoint.convert`."""

    include: Sequence[str]
    exclude: Sequence[str]
    scale_search: str | None
    group_size: int | str | None
    imatrix: str | os.PathLike[str] | None
    scheme: ModelScheme | str | os.PathLike[str] | None
    rules: Sequence[str | Rule]
    kv: str | None
    activations: str | None
    amax: str | os.PathLike[str] | None
    moments: str | os.PathLike[str] | None
    method: str
    order: str | None
    damp: float | None
    unmarked: str | None


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        to: as the command line spells it.
        include: patterns of names to quantize.
        exclude: patterns of names to leave alone.
        scale_search: how scales are chosen.
        group_size: of INT4.
        asked: by a scheme or its like; None: nothing.
        rounding: of weights.
        unmarked: whose order block scales have in files that do not say it.
    """

    to: str
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    scale_search: str | None
    group_size: int | str | None
    asked: Asked | None
    rounding: Rounding
    unmarked: str | None

    @classmethod
    def of(
        cls,
        to: str,
        *,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        scale_search: str | None = None,
        group_size: int | str | None = None,
        imatrix: str | os.PathLike[str] | None = None,
        scheme: ModelScheme | str | os.PathLike[str] | None = None,
        rules: Sequence[str | Rule] = (),
        kv: str | None = None,
        activations: str | None = None,
        amax: str | os.PathLike[str] | None = None,
        moments: str | os.PathLike[str] | None = None,
        method: str = "nearest",
        order: str | None = None,
        damp: float | None = None,
        unmarked: str | None = None,
    ) -> Request:
        """The arguments of `breccia.checkpoint.convert`. Raises TypeError or ValueError where one is not of its form,
        or does not go with the others."""
        asked = asked_of(scheme, rules, kv, activations, amax)
        patterns = patterns_of(include, "include"), patterns_of(exclude, "exclude")
        rounding = Rounding(imatrix, moments, method, order, damp)
        return cls(to, *patterns, scale_search, group_size, asked, rounding, unmarked)

    def said(self) -> dict[str, Any]:
        """What `convert` was given beside the target's name and files of data, of JSON types."""
        given: dict[str, Any] = {"include": list(self.include), "exclude": list(self.exclude)}
        given |= {"scale_search": self.scale_search, "group_size": self.group_size, "unmarked": self.unmarked}
        method = "" if self.rounding.method == "nearest" else self.rounding.method
        given |= {"method": method, "order": self.rounding.order, "damp": self.rounding.damp}
        if self.asked is not None:
            given |= {"scheme": self.asked.scheme.to_toml(), "activations": self.asked.activations}
        return {name: value for name, value in given.items() if value not in (None, "", [])}

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
            said = "scheme, rules (--set), kv and activations"
            raise ValueError(f"{said} must be left out with --to {target.spelled}, which has no quantized layers")
        return dataclasses.replace(target, asked=self.asked, device=device)

    @contextlib.contextmanager
    def opened(self, source: Path, target: Target) -> Iterator[tuple[Checkpoint, Target]]:
        """The source, and the target with the data that weights are rounded by, for a while. Raises ValueError where
        the source, or a file of data, is not valid."""
        with contextlib.closing(Checkpoint(source, mapped=False, unmarked=self.unmarked)) as checkpoint:
            target = self.rounding.on(target, checkpoint)
            try:
                yield checkpoint, target
            finally:
                if target.importance is not None:
                    target.importance.close()
