# SPDX-License-Identifier: Apache-2.0
"""What two models predict, of which one is in memory at a time: the reference's logits are kept on disk."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from breccia.checkpoint.files import disk
from breccia.checkpoint.progress import Progress

_CHUNK = 64  # predictions whose distributions are in memory in double precision


def _log_probabilities(model: Any, row: np.ndarray[Any, Any]) -> torch.Tensor:
    """float32 (T - 1, V): of the token behind each, on the CPU."""
    device = next(iter(model.parameters())).device
    with torch.no_grad():
        logits = model(torch.from_numpy(row)[None].to(device)).logits[0, :-1]
    return logits.float().log_softmax(-1).cpu()


class Predictions:
    """What the reference predicts: the loss of the token that follows, in nats, float64, and the token that it holds
    for the likeliest, int64; both (R, T - 1)."""

    def __init__(self, rows: np.ndarray[Any, Any], vocabulary: int, top_k: int | None, folder: Path) -> None:
        shape = (len(rows), rows.shape[1] - 1)
        self.vocabulary, self.top_k = vocabulary, None if top_k is None or top_k >= vocabulary else top_k
        self.loss, self.top = np.zeros(shape), np.zeros(shape, np.int64)
        wide = (*shape, self.top_k or vocabulary)
        self._values = _mapped(folder / "log_probabilities", np.float32, wide)
        self._tokens = None if self.top_k is None else _mapped(folder / "tokens", np.int32, wide)

    def put(self, number: int, row: np.ndarray[Any, Any], logp: torch.Tensor) -> None:
        """Keep those of one row of tokens."""
        self.loss[number], self.top[number] = _loss(row, logp), logp.argmax(-1).numpy()
        if self._tokens is None:
            self._values[number] = logp.numpy()
        else:
            best = logp.topk(self.top_k or 1, -1)
            self._values[number], self._tokens[number] = best.values.numpy(), best.indices.numpy()

    def divergence(self, number: int, other: torch.Tensor) -> np.ndarray[Any, Any]:
        """KL(reference ‖ other) of each prediction of a row, in nats, float64 (T - 1). Of the k likeliest tokens and
        all others as one where only k are kept: never more than that of all."""
        found = []
        for start in range(0, len(other), _CHUNK):
            part = slice(start, start + _CHUNK)
            ours = torch.from_numpy(np.array(self._values[number, part])).double()
            theirs = other[part].double()
            if self._tokens is not None:
                theirs = theirs.gather(-1, torch.from_numpy(np.array(self._tokens[number, part])).long())
                ours, theirs = (torch.cat([x, _rest(x)], -1) for x in (ours, theirs))
            p = ours.exp()
            found.append(torch.where(p > 0, p * (ours - theirs), 0.0).sum(-1))
        divergences: np.ndarray[Any, Any] = torch.cat(found).numpy()
        return divergences


def _mapped(path: Path, dtype: Any, shape: tuple[int, ...]) -> Any:
    """An array in a file whose space is reserved: a page that finds none when it is written to ends the process."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    fd = disk.create(path)
    try:
        disk.reserve(fd, size, path)
    except OSError as error:
        less = f"{size:,} bytes: folder= or --scratch names another place, top_k= or --top-k takes fewer"
        raise OSError(error.errno, f"{error.strerror}, {less}") from None
    finally:
        os.close(fd)
    return np.memmap(path, dtype, "r+", shape=shape)


def _rest(logp: torch.Tensor) -> torch.Tensor:
    """The logarithm of what is left of 1."""
    return (-torch.expm1(logp.logsumexp(-1, keepdim=True))).clamp_min(1e-12).log()


def _loss(row: np.ndarray[Any, Any], logp: torch.Tensor) -> np.ndarray[Any, Any]:
    losses: np.ndarray[Any, Any] = -logp.gather(-1, torch.from_numpy(row)[1:, None])[:, 0].double().numpy()
    return losses


def kept(model: Any, rows: np.ndarray[Any, Any], top_k: int | None, folder: Path, line: Progress) -> Predictions:
    """The reference over rows of tokens, int64 (R, T), kept in a folder: all logits in 4 R T V bytes, or of the
    ``top_k`` likeliest tokens in 8 R T k. ``line`` counts tokens. Raises ValueError where a logit is not finite."""
    found = None
    for number, row in enumerate(rows):
        logp = _finite(_log_probabilities(model, row), "reference")
        if found is None:
            found = Predictions(rows, logp.shape[-1], top_k, folder)
        found.put(number, row, logp)
        line.add(len(row))
    assert found is not None
    return found


def compared(model: Any, rows: np.ndarray[Any, Any], reference: Predictions, line: Progress) -> dict[str, Any]:
    """Another model over the same rows: its "loss", "kld" against the reference, and "same", whether the likeliest
    token is the same; each float64 (R, T - 1)."""
    found: dict[str, list[Any]] = {"loss": [], "kld": [], "same": []}
    for number, row in enumerate(rows):
        logp = _finite(_log_probabilities(model, row), "checkpoint")
        if logp.shape[-1] != reference.vocabulary:
            raise ValueError(
                f"checkpoint must have the reference's {reference.vocabulary} tokens, got {logp.shape[-1]}"
            )
        found["loss"].append(_loss(row, logp))
        found["kld"].append(reference.divergence(number, logp))
        found["same"].append(logp.argmax(-1).numpy() == reference.top[number])
        line.add(len(row))
    return {name: np.asarray(rows, np.float64) for name, rows in found.items()}


def _finite(logp: torch.Tensor, argument: str) -> torch.Tensor:
    if logp.isnan().any():
        raise ValueError(f"{argument} must predict finite numbers, it gives NaN or infinity")
    return logp
