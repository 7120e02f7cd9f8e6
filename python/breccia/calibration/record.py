# SPDX-License-Identifier: Apache-2.0
"""What `breccia.calibrate` returns."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from breccia.moments import Moments

__all__ = ["Calibration"]


@dataclass(frozen=True, eq=False)
class Calibration(Mapping[str, "Moments"]):
    """What `calibrate` returns: a mapping from layers' names to `breccia.moments.Moments`, with what else was seen.

    Attributes:
        moments: name of a linear layer in the model → moments of its input, with its largest magnitude. Layers of one
            input, as q, k and v are, have one object. Name of a parameter of E experts → those of each.
        output_amax: name of a layer of keys or values (``k_proj``, ``v_proj``) → the largest magnitude of its output,
            before any norm and rotary embedding: a KV cache's scale begins there.
        report: "batches"; "tokens" that were counted; "inputs", how many have each level; "notes", sentences on what
            was chosen and left out. JSON types only.
    """

    moments: dict[str, Moments]
    output_amax: dict[str, float] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Moments:
        return self.moments[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.moments)

    def __len__(self) -> int:
        return len(self.moments)

    def save(self, path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None) -> None:
        """Write everything to a safetensors file, which `breccia.moments.load_moments` reads.

        Args:
            path: the file; replaced if it is there.
            metadata: further strings of the header. ``breccia.calibration.output_amax`` and
                ``breccia.calibration.report`` are written as JSON beside them.
        """
        from breccia.moments import save_moments

        own = {"output_amax": self.output_amax, "report": self.report}
        said = {f"breccia.calibration.{key}": json.dumps(value) for key, value in own.items()}
        save_moments(self.moments, path, {**(metadata or {}), **said})
