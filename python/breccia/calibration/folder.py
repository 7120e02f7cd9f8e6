# SPDX-License-Identifier: Apache-2.0
"""`breccia calibrate`: a model's folder and text files in, a file of moments out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from breccia.calibration import Calibration
from breccia.calibration.levels import Level
from breccia.calibration.run import Options, run
from breccia.checkpoint.arguments import count_of, path_of
from breccia.checkpoint.planning.importance import print_of
from breccia.checkpoint.progress import Progress
from breccia.checkpoint.reading.source import Checkpoint
from breccia.evaluation.models import Rows, check_length, folder_of, load_model, load_tokenizer, rows_of_text

_BATCH = 2048  # tokens that go through the model at once
_STATE_SECONDS = 60.0


def calibrate_folder(
    folder: str | os.PathLike[str],
    text: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    tokens: int | None = None,
    length: int = 512,
    level: Level = "full",
    memory: int | None = None,
    block: int = 16,
    dtype: str = "auto",
    device: str = "cpu",
    trust_remote_code: bool = False,
    force: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    """`breccia.calibrate` of a model of transformers. Sums are kept beside ``out`` meanwhile, and the same call goes on
    from them.

    Args:
        folder: the model's, with its tokenizer.
        text: UTF-8 files.
        out: the file of moments.
        tokens: how many to take, rounded up to a row of ``length``; None: all.
        length: tokens of a row.
        level, memory, block: see `breccia.calibrate`.
        dtype: of the model's parameters; "auto": that of its files.
        device: where it runs.
        trust_remote_code: run Python files of the folder that config.json asks for; else such a model is refused.
        force: replace ``out``.
        progress: draw a line on a terminal.

    Returns:
        The report of `breccia.calibrate`, with "out", "bytes" and the layers that have moments. JSON types only.

    Raises:
        FileExistsError: ``out`` is there.
        ValueError: as `breccia.calibrate`, ``out`` is in the model's folder, or the model, its tokenizer or the text
            cannot be read.
    """
    source, target = folder_of(folder, "MODEL"), path_of(out, "out")
    if target.exists() and not force:
        raise FileExistsError(f"{target} is there: force=True replaces it")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent} must be a folder: the moments are to be written there")
    if target.parent.resolve() == source.resolve():
        raise ValueError(
            f"out must not be in the model's folder, whose safetensors files are its weights, got {target}"
        )
    rows = rows_of_text(text, load_tokenizer(source, trust_remote_code), count_of(length, "length"), tokens)
    model = load_model(source, dtype, device=device, code=trust_remote_code)
    check_length(model, length)
    line = Progress(rows.rows.size, progress, "tokens/s", 1)
    with warnings.catch_warnings():  # the report's notes say it
        warnings.filterwarnings("ignore", "more data is needed")
        state = target.with_name(f"{target.name}.state")
        options = Options.checked(level, memory, block, "float32", state, _STATE_SECONDS)
        found = Calibration(*run(model, _batches(model, rows, line), options, keep=True))
    line.finish()
    if tokens is not None and rows.rows.size < tokens:
        short = f"{tokens:,} tokens were asked for, the text has {rows.available:,}: {rows.rows.size:,} in whole rows"
        found.report["notes"].append(short)
    with Checkpoint(source, mapped=False) as checkpoint:
        found.save(target, {"model": print_of(checkpoint), "text_sha256": rows.digest})
    state.unlink(missing_ok=True)
    return {"out": str(target), "bytes": target.stat().st_size, "layers": len(found), **found.report}


def _batches(model: Any, rows: Rows, line: Progress) -> Iterator[dict[str, Any]]:
    cache = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    at_once = max(_BATCH // rows.rows.shape[1], 1)
    for start in range(0, len(rows.rows), at_once):
        ids = torch.from_numpy(rows.rows[start : start + at_once])
        yield {"input_ids": ids, **cache}
        line.add(ids.numel())
