# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter merged into a checkpoint of any format that can be written."""

from __future__ import annotations

import contextlib
import os

from breccia.checkpoint.arguments import path_of
from breccia.checkpoint.device import Device
from breccia.checkpoint.lora.adapters import open_adapter
from breccia.checkpoint.lora.job import Merge
from breccia.checkpoint.lora.rounding import How, MergeRounding
from breccia.checkpoint.reading.source import Checkpoint
from breccia.checkpoint.reports import MergeReport
from breccia.checkpoint.writing.convert import RunOptions
from breccia.checkpoint.writing.work import check_destination

__all__ = ["merge_lora"]


def merge_lora(
    base: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    rounding: How | None = None,
    seed: int | None = None,
    moments: str | os.PathLike[str] | None = None,
    device: str = "cpu",
    progress: bool = False,
    threads: int | None = None,
    force: bool = False,
    strict: bool = False,
) -> MergeReport:
    """Merge a LoRA adapter of PEFT or llama.cpp into a checkpoint, which keeps its format.

    Args:
        base: a safetensors file or a directory of them, quantized or not; or a GGUF file.
        adapter: a folder with adapter_config.json and adapter_model.safetensors, or a GGUF file as llama.cpp's
            convert_lora_to_gguf.py makes it.
        destination: a file, or a directory where the base is one; must not be there without ``force``.
        rounding: of quantized weights: "nearest"; "stochastic", up or down by chance, so that small changes are kept on
            average; or "feedback", by chance, where later columns make good what one loses, and blocks whose scales
            reach the new values keep them. None: "stochastic" if a seed is given, else "nearest".
        seed: of what is drawn; None is 0.
        moments: of "feedback", a file that `breccia.calibrate` wrote: remainders are fed by the inputs that layers
            meet. None, and layers that it has not: by the inputs that the adapter's own matrices look at.
        device: where weights are quantized again: "cpu", or "cuda", "cuda:N" by torch, with the same bytes. The second
            pass of "feedback" and K-quants of GGUF run on the CPU.
        progress: draw a line on a terminal.
        threads: how many to use (default: one per core).
        force: replace what is at ``destination``, as `convert` does.
        strict: refuse what would be a note in the report, such as a tensor that keeps less than 90 % of its change.

    Returns:
        What was done, of JSON types. "change" has the "rounding", how much of the adapter's change is "kept", by
        `breccia.comparison.kept`, None where no matrix has one, and the same of each of "tensors".

    Raises:
        ValueError: base or adapter is not valid, they do not fit, or the base's format cannot be written.
        FileExistsError: the destination is there, and ``force`` is not given.
        ImportError: the device is a GPU, and torch is not installed.
        OSError: the disk is full or the like. What is done is kept, and the same call goes on from there.
    """
    destination = path_of(destination, "destination")
    base, adapter = path_of(base, "base"), path_of(adapter, "adapter")
    run = RunOptions(progress, threads, force, strict, device=Device.of(device))
    check_destination(destination, base, adapter, force=force)
    with (
        contextlib.closing(MergeRounding.of(rounding, seed, moments)) as how,
        Checkpoint(base, mapped=False) as read,
        contextlib.closing(open_adapter(adapter, read)) as opened,
    ):
        kind: type[Merge] = read.container.merging or Merge
        report: MergeReport = kind(read, destination, opened, how, run).run()
        return report
