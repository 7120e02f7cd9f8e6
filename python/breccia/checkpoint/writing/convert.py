# SPDX-License-Identifier: Apache-2.0
"""Converting a whole checkpoint: planned from headers, one tensor at a time, there when complete.

All work is done in ``.NAME.partial`` beside the output (`Work`), with a journal of what is on disk: a conversion that
was killed, or stopped by an error, goes on where it was when the same command runs again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from breccia.bridges.file_kinds import Output
from breccia.calibration.error_feedback import Order
from breccia.checkpoint.arguments import existing, path_of
from breccia.checkpoint.device import Device
from breccia.checkpoint.files import disk
from breccia.checkpoint.files.planned_file import PlannedWriter
from breccia.checkpoint.files.sums import Sums
from breccia.checkpoint.planning.choices import Choice
from breccia.checkpoint.planning.identity import Identity, beside, identity_of
from breccia.checkpoint.planning.model_config import modules_of
from breccia.checkpoint.planning.plan import Files, Plan, Planner
from breccia.checkpoint.planning.remarks import Remark
from breccia.checkpoint.planning.request import Method, Options, Request
from breccia.checkpoint.progress import Progress
from breccia.checkpoint.reading.naming import naming
from breccia.checkpoint.reading.source import Unmarked
from breccia.checkpoint.reports import ConvertReport
from breccia.checkpoint.workers import Workers, thread_count
from breccia.checkpoint.writing import earlier, outputs
from breccia.checkpoint.writing.execute import execute
from breccia.checkpoint.writing.losses import Loss, Losses
from breccia.checkpoint.writing.manifest import Manifest, place_of, sha256_of_file, sha256_of_tensors
from breccia.checkpoint.writing.repack import Sink
from breccia.checkpoint.writing.work import Done, Work, check_destination, check_replaceable, names_folder
from breccia.recipes import ScaleSearch
from breccia.schemes.value import ModelScheme, Rule

# What is written between two entries of the journal, of which whichever comes first makes one.
_SYNC_EVERY = 64 << 20  # bytes
_SYNC_SECONDS = 1.0


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    to: str,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    scale_search: ScaleSearch | None = None,
    group_size: int | str | None = None,
    imatrix: str | os.PathLike[str] | None = None,
    scheme: ModelScheme | str | os.PathLike[str] | None = None,
    rules: Sequence[str | Rule] = (),
    kv: str | None = None,
    activations: str | None = None,
    amax: str | os.PathLike[str] | None = None,
    embeddings: str | None = None,
    head: str | None = None,
    dtype_of_rest: str = "keep",
    moments: str | os.PathLike[str] | None = None,
    method: Method = "nearest",
    order: Order | None = None,
    damp: float | None = None,
    smooth: bool = False,
    device: str = "cpu",
    progress: bool = False,
    threads: int | None = None,
    force: bool = False,
    strict: bool = False,
    checksums: bool = True,
    manifest: bool = False,
    unmarked: Unmarked | None = None,
    dry_run: bool = False,
) -> ConvertReport:
    """Convert a checkpoint. Large tensors are converted some rows at a time; those that cannot be cut take twice their
    size.

    Args:
        source: a safetensors file, a directory of them (with index and config.json), or a GGUF file.
        destination: a file, or a directory where the source is one or the destination ends in ``/``; must not be
            there without ``force``. A directory made of a GGUF file gets the config.json and the tokenizer's files that
            transformers makes of it.
        to: a float dtype, recipe, or format, perhaps with a recipe; see `target_names`.
        include: patterns of names to quantize, instead of all weights but embeddings, norms and routers.
        exclude: patterns of names to leave alone.
        scale_search: "mse" searches block scales for the least error.
        group_size: of INT4; "auto" is, for each tensor, the largest of 128, 64 and 32 that divides its columns.
        imatrix: a file of what errors of each column count: llama.cpp's importance matrix (GGUF or .dat), or moments.
        scheme: a `breccia.ModelScheme`, a TOML file of one, or a checkpoint, whose layers are quantized in the same
            recipes: what layers become, by rules. A layer that no rule
            matches becomes what ``to`` names, and without a recipe there stays as the source has it. Embeddings, norms,
            routers and output layers stay as they are where a rule does not name them.
        rules: rules that come first, each ``"PATTERN=RECIPE"`` or ``"PATTERN=RECIPE,inputs=dynamic"``, or a `Rule`.
        kv: the KV cache: "fp8", "none", or what else a scheme's file may say.
        activations: inputs of layers of which no rule says it: "dynamic", "static", "local" or "none".
        amax: a file of moments that `breccia.calibrate` wrote, whose amax gives the static scales of inputs that the
            source has not.
        embeddings: what tables of vectors become: a recipe or a type of the format, where its programs load such;
            "keep" leaves them in floats. None: as the target has them.
        head: the same of output layers that have a weight of their own.
        dtype_of_rest: of floats that are not quantized: "bf16", "fp16" or "fp32"; "keep" leaves them, and where ``to``
            is a float dtype what a quantized source has in float32 beside its codes.
        moments: a file that `breccia.calibrate` wrote: its diagonals are such an importance.
        method: "nearest", or "gptq", which rounds by ``moments`` what has some; see `breccia.gptq`. One layer's weight
            is then in memory a few times in float32, and its moments of K columns little more than once.
        order: of "gptq": "act" (the default), columns by falling diagonal of the moments, or "natural".
        damp: of "gptq": what is added to the diagonal, in its mean; 0.02 by default.
        smooth: by ``moments``, multiply the inputs of layers in what gives them (norms, v_proj, up_proj) and divide the
            columns of what reads them: inputs are easier to quantize, the float model is the same
            (docs/quality.md).
        device: where weights are rounded: "cpu", or "cuda", "cuda:N" by torch. Bytes are the same, but for those of
            "gptq", of which codes differ beside ties alone; scales by ``imatrix`` and ``moments`` are searched, and
            kinds of GGUF that fit scales and codes together are encoded, on the CPU. Work that was begun on one device
            goes on on any.
        progress: draw a line on a terminal.
        threads: how many to use (default: one per core).
        force: replace a file or a checkpoint's directory at ``destination``, when the new one is complete and not
            before; never the source.
        strict: refuse what would be a note in the report, but for remarks on what is not lost.
        checksums: keep checksums of what is read and written, by which an interrupted conversion sees whether it is
            still so, and write them to breccia.json in a directory; see `breccia.checkpoint.verify`.
        manifest: write SHA-256 of every tensor of source and output, too, for which both are read once more; of a file
            OUT it writes OUT.breccia.json.
        unmarked: "comfyui" or "modelopt": whose order the block scales of a file have that does not say it.
        dry_run: plan alone; nothing is written, and the destination may be there. The report has ``plan``, what becomes
            of each tensor, and no figures of what is lost.

    Returns:
        What was done, of JSON types. "output_errors" has of each tensor that GPTQ rounded its "output_error", that of
        rounding to "nearest" without data, "level" of the moments and "damp"; see `breccia.checkpoint.verify`.

    Raises:
        ValueError: the source is not valid, the target unknown, an option does not go with others, the destination
            inside of the source or the source itself, a pattern matches no tensor, there is a note where it is
            ``strict``, or another program changes the source, or what is made, meanwhile.
        FileExistsError: the destination is there, and ``force`` is not given.
        BlockingIOError: another conversion to the destination is at work.
        ImportError: a GGUF file is to become a directory, and transformers is not installed; or the device is a GPU,
            and torch is not.
        OSError: the disk is full or the like. What is done is kept, and the same call goes on from there.

    Examples:
        >>> from breccia import checkpoint
        >>> w = np.random.default_rng(0).standard_normal((64, 256), dtype=np.float32)
        >>> checkpoint.save_arrays({"up_proj.weight": w, "norm.weight": w[0]}, "model.safetensors")
        >>> report = checkpoint.convert("model.safetensors", "small.safetensors", to="nvfp4")
        >>> report["tensors"], report["bytes_read"], report["bytes_written"]
        ({'copy': 1, 'cast': 1}, 66560, 10244)
    """
    options: Any = dict(zip(Options.__annotations__, map(locals().get, Options.__annotations__), strict=True))
    request = Request(to, **options)
    if manifest and not checksums:
        raise ValueError("manifest must be left out without checksums")
    quiet = progress and not dry_run, threads, force and not dry_run
    how = RunOptions(*quiet, strict, checksums, manifest, Device.of(device))
    wanted = request.target(how.device)
    place = path_of(destination, "destination")
    source = existing(source, "source")
    folder = names_folder(destination)
    if not dry_run:
        check_destination(place, source, force=force)
    with request.opened(source, wanted) as (checkpoint, target):
        job = Job(Planner(checkpoint, target).plan(place, folder), how, request)
        report: ConvertReport = job.dry_run() if dry_run else job.run()
        return report


@dataclass(frozen=True)
class RunOptions:
    """In which way a conversion works, whatever it writes: see `convert`."""

    progress: bool = False
    threads: int | None = None
    force: bool = False
    strict: bool = False
    checksums: bool = True
    manifest: bool = False
    device: Device = field(default=Device())


class Job:
    """One conversion at work; ``request``: what was asked for, None where it was a merge."""

    def __init__(self, plan: Plan, how: RunOptions, request: Request | None = None) -> None:
        self.plan, self.how = plan, how
        self.manifest = Manifest(plan.target, request) if how.checksums else None
        self.checkpoint, self.target = plan.checkpoint, plan.target
        self.notes = list(plan.notes)
        self.losses = Losses()
        self.not_finite: dict[str, int] = {}
        self.rounded: dict[str, dict[str, Any]] = {}
        self.progress = Progress(plan.nbytes, how.progress)
        self.threads = thread_count(how.threads)
        if how.force:
            check_replaceable(plan.destination, plan.into_directory)

    def _identity(self) -> Identity:
        return identity_of(self.checkpoint, self.target, self.plan.files)

    def _companions(self, work: Work) -> None:
        plan = self.plan
        self.notes += outputs.write_companions(self.checkpoint, work.out, plan.config, plan.choices, dict(plan.files))
        if self.checkpoint.container.whole:
            trouble = self.checkpoint.container.write_companions(self.checkpoint.path, work.out)
            self.notes += [trouble] if trouble else []

    def _execute(self, choice: Choice, sink: Sink, losses: dict[str, Loss]) -> int:
        """Write a tensor, and add what it lost; how many of its numbers are infinite or NaN."""
        return execute(self.checkpoint, choice, self.target, sink, losses, self.rounded)

    def dry_run(self) -> Any:
        """What would be done."""
        self._check_strict()
        return {**self._report(0.0), "plan": self.plan.described()}

    def run(self) -> Any:
        begin, others = time.monotonic(), beside(self.checkpoint)
        self._check_strict()
        work = Work(self.plan.destination, self._identity(), directory=self.plan.into_directory, replace=self.how.force)
        with work.kept_when_interrupted():
            if not work.finished:
                work.check_space(self._new_bytes())
                self._make(work)
                with work.noting():
                    if self.plan.into_directory:
                        self._companions(work)
                    self._write_manifest(work)
                self._check_unchanged()
                self._check_beside(others)
                self._check_strict()
            self.notes += [*work.notes, *work.finish()]
        self.progress.finish()
        return self._report(time.monotonic() - begin)

    def _write_manifest(self, work: Work) -> None:
        """Beside the weights of a directory, and of a file where it is asked for."""
        if self.manifest is None or not (self.plan.into_directory or self.how.manifest):
            return
        sha256 = None
        if self.how.manifest:
            output = {name: sha256_of_file(work.out / name, self.threads) for name, _ in self.plan.files}
            sha256 = {"source": sha256_of_tensors(self.checkpoint.home, self.threads), "files": output}
        place = place_of(work.out / ("" if self.plan.into_directory else work.destination.name))
        self.manifest.write(place, [*self.plan.notes, *self._of_tensors], sha256)

    def _check_unchanged(self) -> None:
        """Whether the source and the data are what they were when they were opened."""
        self.checkpoint.check_unchanged()
        if self.target.importance is not None:
            self.target.importance.check_unchanged()

    def _check_beside(self, before: dict[Path, disk.Stamp]) -> None:
        """Whether what lies beside the weights, and is copied, is as it was."""
        now = beside(self.checkpoint)
        if now != before:
            changed = next(path for path in {**before, **now} if before.get(path) != now.get(path))
            raise ValueError(f"{changed}: must not change while its folder is read, it did")

    def _all_notes(self) -> list[str]:
        finite = [
            f"{name}: {count} {'element is' if count == 1 else 'elements are'} not finite"
            for name, count in self.not_finite.items()
        ]
        beyond = [name for name in self.losses.infinite if name not in self.not_finite]
        finite += [
            f"{name}: not finite where numbers are beyond the range of what they are written in" for name in beyond
        ]
        told = [f"{name}: {said['note']}" for name, said in self.rounded.items() if "note" in said]
        return [*self.notes, *finite, *told, *self._of_tensors]

    @functools.cached_property
    def _of_tensors(self) -> list[str]:
        """Notes of the plan on single tensors."""
        return [f"{choice.found.name}: {choice.note}" for choice in self.plan.choices if choice.note]

    def _check_strict(self) -> None:
        notes = [one for one in self._all_notes() if not isinstance(one, Remark)] if self.how.strict else []
        if notes:
            more = f", and {len(notes) - 1} more" if len(notes) > 1 else ""
            raise ValueError(f"strict: there must be nothing to note, there is: {notes[0]}{more}")

    def _make(self, work: Work) -> None:
        """Make the weight files."""
        self._write_files(self.plan.files, work)

    def _new_bytes(self) -> int:
        """What the disk must have a place for."""
        return self.plan.nbytes

    def _write_files(self, files: Files, work: Work) -> None:
        self.checkpoint.sums = Sums() if self.how.checksums else None
        earlier.look(self.checkpoint, files, work)
        work.remove_others(dict(files))
        with contextlib.closing(Workers(self.threads)) as workers:
            for name, choices in files:
                self._write(name, choices, work, workers)
        self.checkpoint.sums = None

    def _write(self, name: str, choices: list[Choice], work: Work, workers: Workers) -> None:
        path = work.out / name
        if not (path.exists() or path.with_name(f".{name}.partial").exists()):
            work.restart(name)
        writer = self._writer(path, choices)
        if writer.complete and not self._is_as_written(writer, name, choices, work):
            disk.rename(path, writer.partial)
            writer = self._writer(path, choices)
        try:
            if writer.complete:
                self.progress.skip(sum(c.nbytes for c in choices))
            else:
                if not writer.resumed:
                    work.restart(name)
                self._fill(writer, name, choices, work, workers)
                writer.commit()
        finally:
            writer.close()
        work.note(name)

    def _is_as_written(self, writer: PlannedWriter, name: str, choices: list[Choice], work: Work) -> bool:
        """Whether a file that is there has the bytes that an earlier run wrote."""
        done = work.done(name)
        for choice in choices:
            of_it = done.get(next(iter(choice.outputs)))
            if of_it is None or not self._is_there(choice, writer, of_it):
                return False
        for choice in choices:
            self._keep(name, [choice], done[next(iter(choice.outputs))])
        return True

    def _keep(self, file: str, choices: list[Choice], done: Done) -> None:
        """Take note of tensors of an output file that are on disk."""
        if self.manifest is not None:
            self.manifest.add(file, choices, done.read, done.wrote)
        self.not_finite |= done.not_finite
        for name, loss in done.losses.items():
            self.losses.add(name, Loss(*loss))
        self.rounded |= done.rounded

    def _fill(self, writer: PlannedWriter, name: str, choices: list[Choice], work: Work, workers: Workers) -> None:
        """Write tensors, and say now and then which are on disk."""
        done = work.done(name)
        writer.sums = Sums() if self.how.checksums else None
        sink = Sink(writer, workers, self.progress.add)
        pending: dict[str, Done] = {}
        written, begin = 0, time.monotonic()
        for choice in choices:
            outputs = choice.outputs
            name_of = next(iter(outputs))  # of which there is one in a file
            if name_of in done and self._is_there(choice, writer, done[name_of]):
                for output in outputs:
                    writer.skip(output)
                self.progress.skip(choice.nbytes)
                self._keep(name, [choice], done[name_of])
                continue
            losses: dict[str, Loss] = {}
            sink.specs.update(outputs)
            try:
                with naming(self.checkpoint.path, choice.found.name):
                    bad = self._execute(choice, sink, losses)
            except OSError:
                with contextlib.suppress(OSError):
                    writer.sync()
                    work.record(name, pending)
                raise
            if (beyond := sum(sink.not_finite)) and beyond > bad:
                losses[choice.found.name] = Loss(0.0, math.inf, False, False)
            sink.not_finite.clear()
            sink.specs.clear()
            counts = {choice.found.name: bad} if bad else {}
            said = self.rounded.get(choice.found.name)
            rounded = {} if said is None else {choice.found.name: said}
            read = self.checkpoint.sums.taken() if self.checkpoint.sums is not None else {}
            wrote = writer.sums.taken() if writer.sums is not None else {}
            pending[name_of] = Done(read, wrote, counts, losses, rounded)
            self._keep(name, [choice], pending[name_of])
            written += choice.nbytes
            if written >= _SYNC_EVERY or time.monotonic() - begin >= _SYNC_SECONDS:
                writer.sync()
                work.record(name, pending)
                pending, written, begin = {}, 0, time.monotonic()
        if pending:
            writer.sync()
            work.record(name, pending)

    def _is_there(self, choice: Choice, writer: PlannedWriter, done: Done) -> bool:
        """Whether a tensor's bytes are those that an earlier run wrote."""
        return not self.how.checksums or all(
            writer.has(output, done.wrote.get(output, "")) for output in choice.outputs
        )

    def _writer(self, path: Path, choices: list[Choice]) -> PlannedWriter:
        bridge, metadata = self.target.bridge, dict(self.plan.words)
        told = self.plan.choices if bridge.container.header_of_all else choices
        for choice in told:
            if choice.form.metadata:
                metadata |= choice.metadata
        if bridge.header is not None:
            metadata |= bridge.header([c.found.name for c in told], modules_of(told), self.target.inputs)
        if not self.plan.into_directory and not bridge.container.whole and (said := self.plan.config.quantization):
            metadata["quantization_config"] = json.dumps(said)
        tensors = [(choice.found, choice.outputs) for choice in choices]
        output = Output(self.checkpoint, tensors, metadata, self.target.names, self.plan.left_out)
        writer, notes = bridge.container.writer(path, output)
        self.notes += [note for note in notes if note not in self.notes]
        return writer

    def _report(self, seconds: float) -> dict[str, Any]:
        return {
            "source": str(self.checkpoint.path),
            "destination": str(self.plan.destination),
            "to": self.target.spelled,
            "tensors": dict(Counter(map(attrgetter("action"), self.plan.choices))),
            "bytes_read": sum([entry.stop - entry.start for entry in self.checkpoint.entries.values()]),
            "bytes_written": self.progress.total,
            "seconds": round(seconds, 3),
            **self.plan.sizes(),
            "requantized": self.losses.requantized(),
            "errors": self.losses.errors(),
            "not_finite": self.not_finite,
            "output_errors": self.rounded,
            "notes": self._all_notes(),
            "accounted": str(self.plan.account),
            "account": {"tensors": self.plan.account.tensors, "keys": self.plan.account.keys},
        }
