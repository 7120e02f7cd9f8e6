# SPDX-License-Identifier: Apache-2.0
"""What goes into the linear layers of a torch model, measured on data: `calibrate`.

Nothing of torch is imported before it is called.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from breccia.peers import require

if TYPE_CHECKING:
    import torch

    from breccia.calibration.levels import Level
    from breccia.moments import Moments


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


__all__ = ["Calibration", "calibrate"]


def calibrate(
    model: torch.nn.Module,
    batches: Iterable[Any],
    level: Level = "full",
    memory: int | None = None,
    *,
    block: int = 16,
    dtype: Literal["float32", "float64"] = "float32",
    state: str | os.PathLike[str] | None = None,
    state_seconds: float = 300.0,
) -> Calibration:
    """Run a model over batches and keep second moments Σ x.T x of the rows x that go into its linear layers.

    Layers are ``torch.nn.Linear`` and transformers' ``Conv1D``. Those that are given one tensor share one record.
    Experts have a record each, never a full one, whether they are linear layers or matrices of one parameter, as in
    transformers 5: such a parameter's record has the parameter's name and an axis of experts. The first batch is run
    twice: once to learn which layers share their inputs.

    Args:
        model: on any device, or spread over several; run in its evaluation mode without gradients, and left as it was.
        batches: each is a mapping of the model's keyword arguments, a tuple of its arguments, or its one argument.
            Where a mapping has ``attention_mask`` of shape (batch, tokens), rows where it is 0 are not counted.
        level: the most to keep of an input of K columns: "diag", K numbers; "block", also K · ``block``, products of
            columns in one run of ``block`` neighbours; "full", also K², products of all.
        memory: bytes that all sums may take together; while they take more, the largest goes from full to block, and
            from block to diag. The report says which. None: no bound.
        block: columns in a run; the group size of the format the weights are for.
        dtype: "float32" or "float64": what products are computed and summed in. The moments are float32 in the end.
        state: a safetensors file where sums are kept while this runs. If it is there, batches that it counts are
            skipped and the sums go on; the result is the same, byte for byte, as of one run on the same machine. It is
            removed at the end.
        state_seconds: how often it is written, after a batch.

    Returns:
        The record, in memory of the CPU.

    Raises:
        ImportError: torch is not installed.
        TypeError: ``model`` is not a module, or an argument is of a wrong type.
        ValueError: an argument has a value it cannot have; there is no batch or no linear layer; padding cannot be told
            from tokens in a layer's input; an input is not finite; ``memory`` is too small for diag; ``state`` is of
            another run.

    Warns:
        UserWarning: an input has seen fewer than 4 K rows.
    """
    require("torch", "torch")
    from breccia.calibration.run import Options, run

    return Calibration(*run(model, batches, Options.checked(level, memory, block, dtype, state, state_seconds)))
