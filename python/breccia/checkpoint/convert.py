# SPDX-License-Identifier: Apache-2.0
"""Converting a whole checkpoint: planned from headers, one tensor at a time, there when complete.

All work is done in ``.NAME.partial`` beside the output, with a journal of what is on disk: a killed
conversion goes on where it was when the same command runs again. An error removes it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from breccia import bridges
from breccia.bridges import gguf
from breccia.checkpoint import outputs
from breccia.checkpoint.execute import execute
from breccia.checkpoint.experts import together
from breccia.checkpoint.gguf_file import GgufFile, GgufWriter
from breccia.checkpoint.gguf_models import ModelMap
from breccia.checkpoint.planned_file import PlannedWriter, sync_directory
from breccia.checkpoint.progress import Progress
from breccia.checkpoint.safetensors_file import SafetensorsWriter
from breccia.checkpoint.shared_scales import share
from breccia.checkpoint.source import Checkpoint
from breccia.checkpoint.targets import Choice, Target, choose, gguf_kind, parse_target
from breccia.checkpoint.unread import check_all_is_read
from breccia.checkpoint.workers import Workers

__all__ = ["convert"]

_SYNC_EVERY = 256 << 20  # bytes between two entries of the journal


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    to: str,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    scale_search: str | None = None,
    group_size: int | None = None,
    progress: bool = False,
    threads: int | None = None,
) -> dict[str, Any]:
    """Convert a checkpoint. Peak memory is below twice the largest tensor plus 256 MiB.

    Args:
        source: a safetensors file, a directory of them (with index and config.json), or a GGUF file.
        destination: a file, or a directory where the source is one; must not be there.
        to: a float dtype, recipe, or format, perhaps with a recipe; see `target_names`.
        include: patterns of names to quantize, instead of all weights but embeddings, norms and routers.
        exclude: patterns of names to leave alone.
        scale_search: "mse" searches block scales for the least error.
        group_size: of INT4.
        progress: draw a line on a terminal.
        threads: how many to use (default: one per core).

    Returns:
        What was done, of JSON types.

    Raises:
        ValueError: the source is not valid, or the target unknown.
        FileExistsError: the destination is there.
        OSError: the disk is full or the like; nothing is left behind.
    """
    target = parse_target(
        to, scale_search=scale_search, group_size=group_size, include=tuple(include), exclude=tuple(exclude)
    )
    destination = Path(destination)
    if destination.exists():
        raise FileExistsError(f"destination must not be there, {destination} is")
    checkpoint = Checkpoint(source)
    job = _Job(checkpoint, destination, target, progress, threads)
    try:
        return job.run()
    finally:
        checkpoint.close()


class _Job:
    def __init__(
        self, checkpoint: Checkpoint, destination: Path, target: Target, show: bool, threads: int | None
    ) -> None:
        self.checkpoint, self.destination = checkpoint, destination
        check_all_is_read(checkpoint)
        self.notes: list[str] = []
        self.left_out: list[str] = []
        if target.format == "gguf":
            names, reason = outputs.gguf_model(checkpoint)
            target = dataclasses.replace(target, names=names)
            self._note_model(names, reason)
        quantized = any(found.format != "plain" for found in checkpoint.found)
        inputs = [f.name.removesuffix(".input_scale") for f in checkpoint.found if f.name.endswith(".input_scale")]
        target = dataclasses.replace(target, left_alone=quantized, model=checkpoint.config, inputs=frozenset(inputs))
        self.target = target
        self._quantized = {f.name for f in checkpoint.found if f.format != "plain"}
        self.work = destination.parent / f".{destination.name}.partial"
        found = [checkpoint.refined(one) for one in checkpoint.found if not self._dropped(one.name)]
        if getattr(bridges.modules().get(target.format), "EXPERTS_TOGETHER", False):
            found = together(found)
        self.choices = [choose(one, target) for one in found]
        if not target.float_dtype:
            self.choices, notes = share(self.choices, target, checkpoint)
            self.notes += notes
            outputs.quantization_config(checkpoint, target, self.choices)  # may refuse, before any work
        if not target.float_dtype and not any(c.action in ("repack", "requantize", "cast") for c in self.choices):
            self.notes.append(f"no tensor is quantized: none of the source has a place in {target.spelled}")
        self.notes += self._note_levels()
        if target.format != "gguf" and isinstance(checkpoint.files[0], GgufFile):
            self.notes.append("there is no config.json: the names are the model's own, programs need its config beside")
        self.files = self._files()
        total = sum(sum(_nbytes(d, s) for d, s in c.outputs.values()) for c in self.choices)
        self.progress = Progress(total, show)
        self.threads = threads
        self.into_directory = checkpoint.path.is_dir() and target.format != "gguf"

    def _note_model(self, names: ModelMap | None, reason: str) -> None:
        if names is None:
            self.notes.append(f"tensors keep their names, by which no program loads a model from GGUF: {reason}")
            return
        self.left_out = [found.name for found in self.checkpoint.found if names.left_out(found.name)]
        self.notes += [f"{name}: left out: GGUF has no place for it" for name in self.left_out]

    def _note_levels(self) -> list[str]:
        names = self.target.names
        nvfp4 = any(getattr(c.recipe, "name", "") == "nvfp4" for c in self.choices)
        if names is None or names.second_scales or not nvfp4:
            return []
        return [f"NVFP4 has one level: programs do not apply all second scales of a {names.architecture} model"]

    def _dropped(self, name: str) -> bool:
        """Scales of activations belong to the format that was quantized for them."""
        if name in self.left_out:
            return True
        if name.endswith(".pre_quant_scale") and self.target.format != "modelopt":
            raise ValueError(
                f"tensor {name!r} must be absent, or --to modelopt: it scales the input of its layer, "
                f"for which no other format has a place"
            )
        if not name.endswith((".input_scale", ".input_global_scale")):
            return False
        weight = name.rpartition(".")[0] + ".weight"
        return weight in self._quantized and self.target.format != "modelopt"

    def _files(self) -> list[tuple[str, list[Choice]]]:
        """Output files and what goes into each: as the source's, where it has several."""
        if not self.checkpoint.path.is_dir() or self.target.format == "gguf":
            return [(self.destination.name, self.choices)]
        by_file: dict[str, list[Choice]] = {f.path.name: [] for f in self.checkpoint.files}
        for choice in self.choices:
            main = next(iter(choice.found.parts.values()))
            by_file[self.checkpoint.home[main].path.name].append(choice)
        return [(name, choices) for name, choices in by_file.items() if choices]

    def run(self) -> dict[str, Any]:
        begin = time.monotonic()
        self.destination.parent.mkdir(parents=True, exist_ok=True)
        done = self._start()
        workers = Workers(self.threads)
        try:
            for name, choices in self.files:
                self._write(name, choices, done, workers)
            self._finish()
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt):
                shutil.rmtree(self.work, ignore_errors=True)
            raise
        finally:
            workers.close()
        self.progress.finish()
        return self._report(time.monotonic() - begin)

    def _start(self) -> set[str]:
        """Tensors that are on disk from an earlier run of the same conversion."""
        identity = [self.target.spelled, repr(self.target)]
        for file in self.checkpoint.files:
            stat = file.path.stat()
            identity += [str(file.path.resolve()), str(stat.st_size), str(stat.st_mtime_ns)]
        mark = hashlib.sha256("\0".join(identity).encode()).hexdigest()
        journal = self.work / "journal"
        if journal.is_file():
            lines = journal.read_text("utf-8").split("\n")[:-1]  # the last line may be half a line
            if lines and lines[0] == mark:
                return set(lines[1:])
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        journal.write_text(mark + "\n", "utf-8")
        return set()

    def _write(self, name: str, choices: list[Choice], done: set[str], workers: Workers) -> None:
        path = self.work / name
        if path.exists() and f"file {name}" in done:
            self.progress.skip(sum(sum(_nbytes(d, s) for d, s in c.outputs.values()) for c in choices))
            return
        writer = self._writer(path, choices, resume=bool(done))
        pending: list[str] = []
        written = 0

        def record() -> None:
            writer.sync()
            with (self.work / "journal").open("a", encoding="utf-8") as journal:
                journal.writelines(line + "\n" for line in pending)
                journal.flush()
                os.fsync(journal.fileno())
            pending.clear()

        try:
            for choice in choices:
                nbytes = sum(_nbytes(d, s) for d, s in choice.outputs.values())
                if f"tensor {choice.found.name}" in done:
                    for output in choice.outputs:
                        writer.skip(output)
                    self.progress.skip(nbytes)
                    continue
                execute(self.checkpoint, choice, self.target, writer, workers, self.progress.add)
                pending.append(f"tensor {choice.found.name}")
                written += nbytes
                if written >= _SYNC_EVERY:
                    record()
                    written = 0
            writer.commit()
        except BaseException:
            writer.close()
            raise
        pending.append(f"file {name}")
        with (self.work / "journal").open("a", encoding="utf-8") as journal:
            journal.writelines(line + "\n" for line in pending)

    def _writer(self, path: Path, choices: list[Choice], resume: bool) -> PlannedWriter:
        plan: dict[str, tuple[str, tuple[int, ...]]] = {}
        for choice in choices:
            for name, spec in choice.outputs.items():
                if name in plan:
                    raise ValueError(f"tensor {name!r} must be written once: {choice.found.name!r} gives it too")
                plan[name] = spec
        if self.target.format == "gguf":
            return self._gguf_writer(path, choices, plan, resume)
        metadata = {"format": "pt"}
        whole = self.target.format == "torchao"  # whose readers take the last shard's header for that of all
        for choice in self.choices if whole else choices:
            metadata |= choice.metadata
        if whole:
            metadata["tensor_names"] = json.dumps([c.found.name for c in self.choices])
        if not self.into_directory:
            said = outputs.quantization_config(self.checkpoint, self.target, self.choices)
            if said:
                metadata["quantization_config"] = json.dumps(said)
        return SafetensorsWriter(path, plan, metadata, resume=resume)

    def _gguf_writer(
        self, path: Path, choices: list[Choice], plan: dict[str, tuple[str, tuple[int, ...]]], resume: bool
    ) -> PlannedWriter:
        names = self.target.names
        kinds = {n: (d if d in gguf.TYPES else gguf_kind(d), s) for n, (d, s) in plan.items()}
        fields, trouble = outputs.gguf_fields(self.checkpoint, names, self.left_out, kinds)
        if trouble:
            self.notes.append(trouble)
        orders = {}
        for choice in choices:
            rows = choice.found.shape[0] if choice.found.shape else 0
            order = None if names is None else names.row_order(choice.found.name, rows)
            if order is not None:
                orders[self.target.spell(choice.found.name)] = order
        return GgufWriter(path, kinds, fields, row_orders=orders, resume=resume)

    def _finish(self) -> None:
        if self.into_directory:
            outputs.write_companions(self.checkpoint, self.work, self.target, self.choices, dict(self.files))
            (self.work / "journal").unlink()
            self.work.replace(self.destination)
        else:
            (self.work / self.destination.name).replace(self.destination)
            shutil.rmtree(self.work)
        sync_directory(self.destination.parent)

    def _report(self, seconds: float) -> dict[str, Any]:
        actions: dict[str, int] = {}
        for choice in self.choices:
            actions[choice.action] = actions.get(choice.action, 0) + 1
        read = sum(f.path.stat().st_size for f in self.checkpoint.files)
        return {
            "source": str(self.checkpoint.path),
            "destination": str(self.destination),
            "to": self.target.spelled,
            "tensors": actions,
            "bytes_read": read,
            "bytes_written": self.progress.total,
            "seconds": round(seconds, 3),
            "notes": [*self.notes, *(f"{c.found.name}: {c.note}" for c in self.choices if c.note)],
        }


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return outputs.stored_bytes(dtype, shape)
