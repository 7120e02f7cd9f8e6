# SPDX-License-Identifier: Apache-2.0
"""AdamW whose two moments are codes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from breccia.optim.expanded import ExpandedTensor, expand
from breccia.recipes import Float8BlockScaling, INT8Scaling, MXFP8BlockScaling, ScalingRecipe
from breccia.scaled_tensor import ScaledTensor, from_buffer
from breccia.verbs import cast, dequantize

__all__ = ["AdamW"]

_SMALLEST = 4096  # numbers of a parameter whose moments are quantized; biases and norms have fewer
_RUN = 2**16  # numbers that a CPU updates at a time
_WIDE, _GROUP = 4096, 128  # of the rows that a parameter's numbers are cut into: multiples of every group
_FLOOR = 2.0**-16  # of a block's largest: E4M3 under the scales of MX does not round it to zero, even at random


class _Storage(NamedTuple):
    """How moments are kept.

    ``expanded``: with an exponent for each group. Otherwise the second moment is kept as its square root, whose range
    is half as many powers of two, so that what is small does not become zero and divide the first.
    """

    recipe: ScalingRecipe
    expanded: bool


_STATES = {
    "fp8": _Storage(Float8BlockScaling(block_k=128), True),
    "int8": _Storage(INT8Scaling(group_size=128), True),
    "mxfp8": _Storage(MXFP8BlockScaling(), False),
}
_FIRST, _SECOND, _ROOT = "exp_avg", "exp_avg_sq", "exp_avg_sq_root"


class AdamW(torch.optim.Optimizer):  # type: ignore[misc]
    """`torch.optim.AdamW` with the moments of each parameter of 4096 numbers or more in one byte a number.

    The update is that of Loshchilov and Hutter, arXiv:1711.05101, with torch's bias corrections, in float32 whatever
    the parameter's dtype is. Moments are read from their codes, updated, used, and quantized again, so that the update
    of a step is of moments before they are rounded. Parameters that are DTensors have the moments of their own shard.

    ``state[p]`` has ``step`` and ``exp_avg``, ``exp_avg_sq`` as `ExpandedTensor`; for "mxfp8" ``exp_avg`` and
    ``exp_avg_sq_root``, the square root of the second moment, as ScaledTensor; for smaller parameters ``exp_avg`` and
    ``exp_avg_sq`` as float32 tensors. The rows of these values are the parameter's numbers in order, 4096 where
    that divides, or 128 with zeros after the last.

    Args:
        params: parameters, or groups of them, as torch's optimizers take them.
        lr: learning rate.
        betas: of the running averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: times ``lr``, what a parameter loses of itself in a step.
        states: "fp8", E4M3 in groups of 128 with dynamic range expansion (COAT, arXiv:2410.19313), 2.094 bytes a
            number for both moments; "int8", the same over INT8; "mxfp8", MXFP8 blocks of 32, 2.063 bytes a number.

    Raises:
        ValueError: a number is out of its range, or ``states`` is none of the three.
        TypeError: a parameter is not of a float dtype.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        states: str = "fp8",
    ) -> None:
        for name, value, most in (
            ("lr", lr, torch.inf), ("eps", eps, torch.inf), ("weight_decay", weight_decay, torch.inf),
            ("betas[0]", betas[0], 1), ("betas[1]", betas[1], 1),
        ):  # fmt: skip
            if not 0 <= value < most:
                raise ValueError(f"{name} must be at least 0 and less than {most}, got {value}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "states": states})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own.

        Args:
            param_group: "params" and the options that differ from the defaults, ``states`` among them.

        Raises:
            ValueError, TypeError: as the class.
        """
        states = param_group.get("states", self.defaults["states"])
        if states not in _STATES:
            raise ValueError(f"states must be one of {', '.join(_STATES)}, got {states!r}")
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if not p.is_floating_point():
                raise TypeError(f"parameters must be of a float dtype, got {p.dtype} of shape {tuple(p.shape)}")

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss again, where given.

        Returns:
            What ``closure`` returns, or None.

        Raises:
            TypeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        return loss

    def _update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        own, grad = _local(p), _local(p.grad)
        if grad.layout != torch.strided:
            raise TypeError(f"gradients must be dense, got {grad.layout}")
        state = self.state[p]
        state["step"] = state.get("step", torch.zeros((), dtype=torch.int64)) + 1
        count, lr, (beta1, beta2) = int(state["step"]), float(group["lr"]), group["betas"]
        storage = _STATES[group["states"]] if own.numel() >= _SMALLEST else None
        values, grads, written = _matrix(own), _matrix(grad), []
        for rows in _runs(values):
            change = grads[rows].float()
            first, second = _read(state, rows, change)
            first.lerp_(change, 1 - beta1)
            second.mul_(beta2).addcmul_(change, change, value=1 - beta2)
            divisor = second.sqrt().div_((1 - beta2**count) ** 0.5).add_(group["eps"])
            value = values[rows].float().mul(1 - lr * group["weight_decay"])
            values[rows] = value.addcdiv_(first, divisor, value=-lr / (1 - beta1**count)).to(own.dtype)
            written.append(_quantized(first, second, storage, rows.start << 32 | 2 * count))
        if values.data_ptr() != own.data_ptr():
            own.copy_(values.flatten()[: own.numel()].reshape(own.shape))
        for name in written[0]:
            state[name] = _joined([part[name] for part in written])

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with tensors alone: of ``exp_avg`` the codes, ``exp_avg.scale``, ``exp_avg.exponents``.

        Returns:
            "state" and "param_groups", which `torch.save` writes and `load_state_dict` reads.
        """
        whole = super().state_dict()
        return {**whole, "state": {name: _parts(state) for name, state in whole["state"].items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another optimizer of the same parameters was, bit for bit.

        Args:
            state_dict: of `state_dict`, from this class.

        Raises:
            ValueError: the groups are not of as many parameters, or a state is not of its parameter's size or not of
                the group's ``states``.
        """
        super().load_state_dict({**state_dict, "state": {}})
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        owners = [(p, group["states"]) for group in self.param_groups for p in group["params"]]
        for name, (p, states) in zip(names, owners, strict=True):
            if name in state_dict["state"]:
                self.state[p] = _state(state_dict["state"][name], _local(p), states, name)


def _local(x: Any) -> torch.Tensor:
    """A tensor, or of a DTensor the shard that is here."""
    local: torch.Tensor = x.to_local() if hasattr(x, "to_local") else x
    return local


def _rows(count: int) -> tuple[int, int]:
    return (count // _WIDE, _WIDE) if count % _WIDE == 0 else (-(-count // _GROUP), _GROUP)


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor in rows, zeros after the last."""
    rows, width = _rows(x.numel())
    flat, rest = x.flatten(), rows * width - x.numel()
    return (torch.nn.functional.pad(flat, (0, rest)) if rest else flat).reshape(rows, width)


def _runs(values: torch.Tensor) -> list[slice]:
    """Rows whose moments are in memory as floats together: on a CPU what its caches hold."""
    count, width = values.shape
    step = max(_RUN // width, 1) if values.device.type == "cpu" and values.numel() >= _SMALLEST else max(count, 1)
    return [slice(begin, min(begin + step, count)) for begin in range(0, max(count, 1), step)]


def _read(state: dict[str, Any], rows: slice, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both moments in float32; zeros before the first step."""
    found = []
    for name in (_FIRST, _ROOT if _ROOT in state else _SECOND):
        value = state.get(name)
        if value is None:
            found.append(torch.zeros_like(like))
        elif isinstance(value, torch.Tensor):
            found.append(value[rows].clone())
        elif isinstance(value, ExpandedTensor):
            found.append(ExpandedTensor(_cut(value.codes, rows), value.exponents[rows]).dequantize())
        else:
            moment = dequantize(_cut(value, rows))
            found.append(moment.square_() if name == _ROOT else moment)
    return found[0], found[1]


def _cut(codes: ScaledTensor, rows: slice) -> ScaledTensor:
    return from_buffer(codes.data[rows], codes.scale[rows], codes.recipe, codes.layout)


def _quantized(first: torch.Tensor, second: torch.Tensor, storage: _Storage | None, seed: int) -> dict[str, Any]:
    """What is kept of both moments."""
    if storage is None:
        return {_FIRST: first, _SECOND: second}
    if storage.expanded:
        return {_FIRST: expand(first, storage.recipe), _SECOND: expand(second, storage.recipe)}
    # A step changes a moment by less than half a step of E4M3: rounded to nearest, it would stand still.
    root = _floored(second.sqrt())
    return {
        _FIRST: cast(first, storage.recipe, rounding="stochastic", seed=seed),
        _ROOT: cast(root, storage.recipe, rounding="stochastic", seed=seed + 1),
    }


def _joined(parts: list[Any]) -> Any:
    """Values of consecutive rows as one."""
    one = parts[0]
    if len(parts) == 1:
        return one
    if isinstance(one, ExpandedTensor):
        return ExpandedTensor(_joined([part.codes for part in parts]), torch.cat([part.exponents for part in parts]))
    data, scale = (torch.cat([getattr(part, name) for part in parts]) for name in ("data", "scale"))
    return from_buffer(data, scale, one.recipe, one.layout)


def _floored(x: torch.Tensor) -> torch.Tensor:
    """Numbers above zero that their block of 32 would round to zero, at the least that it keeps."""
    blocks = x.reshape(x.shape[0], -1, 32)
    least = blocks.amax(-1, keepdim=True) * _FLOOR
    return torch.where(blocks > 0, blocks.maximum(least), blocks).reshape(x.shape)


def _parts(state: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state as tensors."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        codes = value.codes if isinstance(value, ExpandedTensor) else value
        if isinstance(codes, ScaledTensor):
            found |= {name: codes.data, f"{name}.scale": codes.scale}
            if codes is not value:
                found[f"{name}.exponents"] = value.exponents
        else:
            found[name] = value
    return found


def _state(parts: dict[str, Any], p: torch.Tensor, states: str, name: Any) -> dict[str, Any]:
    """A parameter's state of its tensors."""
    recipe, expanded = _STATES[states]
    stored = (_FIRST, _SECOND) if expanded or p.numel() < _SMALLEST else (_FIRST, _ROOT)
    shape = _rows(p.numel())
    wanted = {"step", *stored}
    if p.numel() >= _SMALLEST:
        wanted |= {f"{key}.{part}" for key in stored for part in ("scale", *(("exponents",) if expanded else ()))}
    if set(parts) != wanted or any(tuple(parts[key].shape) != shape for key in stored):
        raise ValueError(
            f"state {name} must be of {states} for {p.numel()} numbers, with {', '.join(sorted(wanted))}; "
            f"got {', '.join(f'{key} {tuple(value.shape)}' for key, value in sorted(parts.items()))}"
        )
    here = {key: value if key == "step" else value.to(p.device, copy=True) for key, value in parts.items()}
    if p.numel() < _SMALLEST:
        return here
    state: dict[str, Any] = {"step": here["step"]}
    for key in stored:
        codes = from_buffer(here[key], here[f"{key}.scale"], recipe, recipe.layout)
        state[key] = ExpandedTensor(codes, here[f"{key}.exponents"]) if expanded else codes
    return state
