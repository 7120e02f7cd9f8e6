# SPDX-License-Identifier: Apache-2.0
"""How far a quantized language model is from its reference, on text: `evaluate`.

Nothing of torch and transformers is imported before it is called.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from breccia.peers import require

if TYPE_CHECKING:
    import torch

__all__ = ["evaluate", "figures_of", "render"]


def evaluate(
    reference: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str] | torch.nn.Module,
    text: Sequence[str | os.PathLike[str]],
    *,
    tokens: int | None = None,
    length: int = 512,
    top_k: int | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    trust_remote_code: bool = False,
    activations: str | None = None,
    folder: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Compare what two causal language models of transformers predict. Files of one are in memory at a time; the
    reference's logits are on disk between. Weights of files are dequantized; KV caches are not simulated.

    Args:
        reference: a model's folder with its tokenizer.
        checkpoint: a folder or file of any format breccia reads, of the same model; or the model itself, as
            `breccia.quantize_` changed it: on any device, run in its evaluation mode and left as it was.
        text: UTF-8 files.
        tokens: how many to take, rounded up to a row of ``length``; None: all there are.
        length: tokens that a model sees at once; every prediction in a row counts.
        top_k: keep only the reference's k likeliest tokens of each prediction, 8 k bytes instead of 4 for each token of
            the vocabulary. KLD is then of these and all others as one: a lower bound.
        dtype: of the parameters and what is computed, a name of torch.
        device: where models run, as torch spells it.
        trust_remote_code: run Python files of the reference's folder that config.json asks for; else such a model is
            refused.
        activations: "nvfp4", "fp8", "mxfp8" or "int8": what inputs of the checkpoint's quantized layers are rounded to,
            with scales made of them; "file": as the checkpoint says, with its static scales. None: they stay.
        folder: where the logits are kept for the time; None: the system's folder of temporary files.
        progress: draw a line on a terminal.

    Returns:
        "perplexity" of "reference" and "checkpoint", and "ln_ratio", the logarithm of the quotient; "kld", the
        divergence of the reference from the checkpoint in nats, its "mean", "median" and "p99"; "same_top", the share
        of predictions with the same likeliest token. Each is a "value" with its "error", one standard error by a seeded
        bootstrap. "bytes" of both, "predictions", "rows", "length", "vocabulary", "top_k"; "activations": the "inputs"
        that were asked for, and how many "layers" have them. JSON types only.

    Raises:
        ImportError: torch or transformers is not installed.
        TypeError: an argument is of a wrong type.
        ValueError: a model, its tokenizer or the text cannot be read, or the checkpoint does not fit the reference.
    """
    require("torch", "transformers")
    require("transformers", "transformers")
    from breccia.calibration.inputs import evaluating
    from breccia.checkpoint.arguments import count_of, existing
    from breccia.checkpoint.files.locks import scratch
    from breccia.checkpoint.progress import Progress
    from breccia.evaluation.inputs import INPUTS, OF_FILE, quantized_inputs
    from breccia.evaluation.models import check_length, folder_of, load_model, load_tokenizer, rows_of_text
    from breccia.evaluation.predictions import compared, kept

    if isinstance(text, (str, bytes)) or not isinstance(text, Sequence) or not text:
        raise TypeError(f"text must be a list of files, got {text!r}")
    best = None if top_k is None else count_of(top_k, "top_k")
    if count_of(length, "length") < 2:
        raise ValueError(f"length must be 2 or more, got {length}")
    if activations not in (None, OF_FILE, *INPUTS):
        raise ValueError(f"activations must be one of {', '.join((OF_FILE, *INPUTS))}, got {activations!r}")
    source = folder_of(reference, "reference")
    in_memory = not isinstance(checkpoint, (str, os.PathLike)) and hasattr(checkpoint, "state_dict")
    if in_memory and activations is not None:
        raise ValueError(
            f"activations must be left out with a model in memory, got {activations!r}: "
            "quantize_(model, recipe, activations=...) makes layers that quantize their inputs"
        )
    other: Any = checkpoint if in_memory else existing(checkpoint, "checkpoint")
    sizes = {"reference": _bytes(source), "checkpoint": _bytes(other)}
    count = None if tokens is None else count_of(tokens, "tokens")
    rows = rows_of_text(text, load_tokenizer(source, trust_remote_code), length, count).rows
    line = Progress(2 * rows.size, progress, "tokens/s", 1)
    with scratch("breccia-evaluate-", folder) as place:
        model = load_model(source, dtype, device=device, code=trust_remote_code)
        check_length(model, length)
        if not model.can_generate() or model.config.is_encoder_decoder:
            raise ValueError(f"reference must be a causal language model, got {type(model).__name__}")
        ours = kept(model, rows, best, place, line)
        del model
        gc.collect()
        model = other if in_memory else load_model(source, dtype, other, device, trust_remote_code)
        with evaluating(model), quantized_inputs(model, other, activations) as layers:
            theirs = compared(model, rows, ours, line)
        loss, vocabulary, used = ours.loss, ours.vocabulary, ours.top_k
        del ours
    line.finish()
    return {
        "reference": str(source),
        "checkpoint": type(other).__name__ if in_memory else str(other),
        **figures_of(loss, theirs),
        "bytes": sizes,
        "predictions": int(loss.size),
        "rows": len(rows),
        "length": length,
        "vocabulary": vocabulary,
        "top_k": used,
        "activations": {"inputs": activations, "layers": len(layers)},
    }


def _bytes(path: Any) -> int:
    """Of the tensors of a checkpoint, or of a model in memory."""
    if not isinstance(path, Path):
        parts = {part.data_ptr(): part.nbytes for part in path.state_dict().values() if hasattr(part, "data_ptr")}
        return sum(parts.values())
    from breccia.checkpoint.reading.source import Checkpoint

    with Checkpoint(path, mapped=False) as checkpoint:
        return sum(checkpoint.nbytes(found) for found in checkpoint.found)


def figures_of(loss: Any, theirs: dict[str, Any]) -> dict[str, Any]:
    """What `evaluate` says of predictions.

    Args:
        loss: of the reference, in nats, float64 (R, T): a row of T predictions for each row of tokens.
        theirs: "loss", "kld" and "same" of the checkpoint, of that shape.

    Returns:
        "perplexity", "kld" and "same_top", as `evaluate` has them.
    """

    def perplexity(x: Any) -> Any:
        return np.exp(np.mean(x))

    return {
        "perplexity": {
            "reference": with_error(perplexity, loss),
            "checkpoint": with_error(perplexity, theirs["loss"]),
            "ln_ratio": with_error(np.mean, theirs["loss"] - loss),
        },
        "kld": {
            "mean": with_error(np.mean, theirs["kld"]),
            "median": with_error(np.median, theirs["kld"]),
            "p99": with_error(lambda x: np.quantile(x, 0.99), theirs["kld"]),
        },
        "same_top": with_error(np.mean, theirs["same"]),
    }


def _spelled(figure: dict[str, Any], style: str = ".4f") -> str:
    error = "unknown" if figure["error"] is None else _short(figure["error"], style)
    return f"{_short(figure['value'], style)} ± {error}"


def _short(number: float, style: str) -> str:
    """A number in a style, or in five digits: those of a model that is broken have no end."""
    return f"{number:{style}}" if abs(number) < 1e5 else f"{number:.5g}"


def render(report: dict[str, Any]) -> list[str]:
    """A report of `evaluate` as lines of at most 80 columns.

    Args:
        report: what it returned.

    Returns:
        The lines.
    """
    perplexity, kld, size = report["perplexity"], report["kld"], report["bytes"]
    share = size["checkpoint"] / size["reference"]
    bound = f", at least: of the {report['top_k']} likeliest" if report["top_k"] else ""
    rows = "1 row" if report["rows"] == 1 else f"{report['rows']} rows"
    inputs = report["activations"]
    said = [f"inputs          {inputs['inputs']} of {inputs['layers']} layers"] if inputs["inputs"] else []
    return [
        f"perplexity      {_spelled(perplexity['checkpoint'])}",
        f"  of reference  {_spelled(perplexity['reference'])}",
        f"  ln of ratio   {_spelled(perplexity['ln_ratio'])}",
        f"KLD mean        {_spelled(kld['mean'], '.5f')} nats{bound}",
        f"  median        {_spelled(kld['median'], '.5f')}",
        f"  99 %          {_spelled(kld['p99'], '.5f')}",
        f"same top token  {_spelled(report['same_top'], '.2%')}",
        *said,
        f"bytes           {size['checkpoint']:,} of {size['reference']:,} ({share:.1%})",
        f"{report['predictions']:,} predictions in {rows} of {report['length']} tokens; ± is one standard error",
    ]


_RUN = 32  # neighbouring predictions are drawn together: they are not independent
_DRAWS = 400

Array = np.ndarray[Any, Any]


def with_error(figure: Callable[[Array], Any], values: Array) -> dict[str, float | None]:
    """A figure of n predictions, "value", and its standard error, "error", by a bootstrap over runs of 32 neighbours
    (Künsch 1989) in the rows of values (R, T); None for fewer than two runs. The same for the same values: draws are
    seeded."""
    runs = [run for row in values for run in np.array_split(row, max(len(row) // _RUN, 1))]
    value = float(figure(np.concatenate(runs)))
    if len(runs) < 2:
        return {"value": value, "error": None}
    rng = np.random.default_rng(0)
    drawn = [figure(np.concatenate([runs[i] for i in rng.integers(0, len(runs), len(runs))])) for _ in range(_DRAWS)]
    return {"value": value, "error": float(np.std(drawn, ddof=1))}
