# SPDX-License-Identifier: Apache-2.0
"""Which linear layers of a model are given one tensor, and the rows of it that are tokens."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from breccia.calibration.fused import FusedExperts, products_of
from breccia.calibration.levels import is_expert, of_any_expert

# Called with the layer's name and its input, before the layer is run.
Seen = Callable[[str, torch.Tensor], None]


def linear_layers(model: torch.nn.Module) -> dict[str, int]:
    """Name of each linear layer → K, the columns of its input."""
    widths = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            widths[name] = module.in_features
        elif type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # transformers': weight is (K, N)
            widths[name] = module.weight.shape[0]
    return widths


def tied_layers(model: torch.nn.Module) -> dict[str, str]:
    """Names of linear layers whose weight is an embedding's, and those embeddings: a checkpoint has the weight once,
    under the embedding's name."""
    tables = {id(m.weight): name for name, m in model.named_modules() if isinstance(m, torch.nn.Embedding)}
    weights = {name: id(model.get_submodule(name).weight) for name in linear_layers(model)}
    return {name: tables[weight] for name, weight in weights.items() if weight in tables}


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """While inside, a model is in its evaluation mode; then each module is as it was."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextlib.contextmanager
def watching(model: torch.nn.Module, names: list[str], seen: Seen, after: Seen, outputs: list[str]) -> Iterator[None]:
    """While inside, calls ``seen`` with the input of each layer, and ``after`` with the output of some."""
    hooks: list[Any] = []

    def before(name: str) -> Any:
        def hook(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            seen(name, args[0] if args else next(iter(named.values())))

        return hook

    def behind(name: str) -> Any:
        def hook(_: Any, __: Any, output: Any) -> None:
            after(name, output)

        return hook

    try:
        layers = {name: model.get_submodule(name) for name in names}
        hooks += [layer.register_forward_pre_hook(before(name), with_kwargs=True) for name, layer in layers.items()]
        hooks += [layers[name].register_forward_hook(behind(name)) for name in outputs]
        yield
    finally:
        for hook in hooks:
            hook.remove()


def run_batch(model: torch.nn.Module, batch: Any) -> None:
    """A model over one batch, whose tensors are put where the model's first parameter is. Raises TypeError where the
    batch is text."""
    first = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if isinstance(first, (str, bytes)):
        raise TypeError(
            f"batches must be tensors or dictionaries of a model's arguments, got {type(first).__name__}: the command "
            f"breccia calibrate takes files of text"
        )
    device = next(iter(model.parameters())).device

    def placed(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    with torch.no_grad():
        if isinstance(batch, Mapping):
            model(**{key: placed(value) for key, value in batch.items()})
        else:
            model(*map(placed, batch if isinstance(batch, (tuple, list)) else (batch,)))


class Watch:
    """Tells whether a layer is given the tensor that another was given in the same run of the model."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, str]] = {}

    def first(self, name: str, x: torch.Tensor) -> str:
        """The layer that was the first to be given this tensor, with these values: maybe this one."""
        if (known := self._known.get(id(x))) is not None:
            tensor, version, first = known
            if version == x._version and tensor() is x:
                return first
        self._known[id(x)] = (weakref.ref(x), x._version, name)
        return name


def shared(
    model: torch.nn.Module, names: list[str], batch: Any, experts: dict[str, FusedExperts]
) -> tuple[dict[str, str], dict[str, int]]:
    """Runs one batch: layer → the first layer that has the same input, and name of a parameter of experts → K. Experts
    that no token went to share as others of their layer do."""
    watch, first, widths = Watch(), dict[str, str](), dict[str, int]()

    def seen(name: str, x: torch.Tensor) -> None:
        first.setdefault(name, watch.first(name, x))

    def multiplied(name: str, _: int, rows: torch.Tensor) -> None:
        widths[name] = rows.shape[-1]

    with watching(model, names, seen, seen, []), products_of(model, experts, multiplied):
        run_batch(model, batch)
    alike = {of_any_expert(name): of_any_expert(leader) for name, leader in first.items() if is_expert(name)}
    by_pattern: dict[str, dict[str, str]] = {}
    for name in names:
        if is_expert(name):
            number = name.removeprefix(of_any_expert(name).partition("*")[0]).partition(".")[0]
            by_pattern.setdefault(of_any_expert(name), {})[number] = name
    for pattern, members in by_pattern.items():
        leaders = by_pattern.get(alike.get(pattern, pattern), members)
        first = {**{name: leaders.get(number, name) for number, name in members.items()}, **first}
    return {name: first[name] for name in names if name in first}, widths


def rows_of(x: torch.Tensor, mask: torch.Tensor | None, name: str) -> torch.Tensor:
    """The rows (R, K) of a layer's input (…, K) that are no padding; ``mask`` (batch, tokens) is 0 where there is some,
    None where there is none. Raises ValueError where it cannot be told which rows are padding."""
    rows = x.detach().reshape(-1, x.shape[-1])
    if mask is None:
        return rows
    batch, tokens = mask.shape
    if x.shape[:-1] in ((batch, tokens), (batch * tokens,)) and not is_expert(name):
        return rows[mask.reshape(-1).to(rows.device)]
    if x.shape[:-1] == (batch,) and not is_expert(name):  # one row for each text, as poolers have
        return rows
    raise ValueError(
        f"batches must have no padding where {name} is given rows of {tuple(x.shape)}: which of them are padding "
        f"cannot be told; let all texts of a batch have one length"
    )
