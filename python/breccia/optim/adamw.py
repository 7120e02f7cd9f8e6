# SPDX-License-Identifier: Apache-2.0
"""AdamW whose two moments are codes."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from breccia import _core, recipes
from breccia.frameworks.torch.tensors import FLOATS, core_array
from breccia.kernels import triton
from breccia.scaled_tensor import ScaledTensor, from_buffer
from breccia.verbs import cast

_SMALLEST = 4096  # numbers of a parameter whose moments are quantized; biases and norms have fewer
_WIDE, _GROUP = 4096, 128  # of the rows that a parameter's numbers are cut into: multiples of every group


# Where the recipe has no exponents the second moment is kept as its square root, whose range is half as many powers of
# two, so that what is small does not become zero and divide the first, and both are rounded stochastically: a step
# changes a moment by less than half a step of E4M3, so that it would stand still.
_STATES: dict[str, recipes.ScalingRecipe] = {
    "fp8": recipes.Float8ExpandedScaling(),
    "int8": recipes.INT8ExpandedScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
}
_SQUARES = 2.0**64  # whose squares are beyond float32
_OF_TORCH = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused")  # options that stay off
_FIRST, _SECOND, _ROOT = "exp_avg", "exp_avg_sq", "exp_avg_sq_root"


class AdamW(torch.optim.Optimizer):  # type: ignore[misc]
    """`torch.optim.AdamW` with the moments of each parameter of 4096 numbers or more in one byte a number.

    The update is that of Loshchilov and Hutter, arXiv:1711.05101, with torch's bias corrections, in float32 whatever
    the parameter's dtype is. Moments are read from their codes, updated, used, and quantized again, so that the update
    of a step is of moments before they are rounded. Of a parameter that is a DTensor each rank has the moments of its
    own shard, in groups that begin with the shard; in `state_dict` these are DTensors, too.

    ``state[p]`` has ``step`` and ``exp_avg``, ``exp_avg_sq`` as ScaledTensors; for "mxfp8" ``exp_avg`` and
    ``exp_avg_sq_root``, the square root of the second moment; for smaller parameters ``exp_avg`` and
    ``exp_avg_sq`` as float32 tensors. The rows of these values are the parameter's numbers in order, 4096 where
    that divides, or 128 with zeros after the last.

    Args:
        params: parameters, or groups of them, as torch's optimizers take them.
        lr: learning rate.
        betas: of the running averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: times ``lr``, what a parameter loses of itself in a step.
        states: "fp8", `Float8ExpandedScaling`: E4M3 in groups of 128 with dynamic range expansion (COAT,
            arXiv:2410.19313), 2.094 bytes a number for both moments; "int8", `INT8ExpandedScaling`; "mxfp8", MXFP8
            blocks of 32, 2.063 bytes a number.
        others: options of torch's that are off, such as ``foreach=False``.

    Codes are least exact for the small numbers of a group: where gradients of one group span 10^6, root mean square
    errors of the steps beside those of float32 moments are 0.14 ("fp8"), 0.5 ("int8") and 0.3 ("mxfp8"). No step is
    larger than gradients could make one of float32 moments, by the inequality of Cauchy and Schwarz: ``lr`` times 1 at
    the first, 2.2 at the hundredth, 7.3 after thousands with the default ``betas`` (where betas[0]² < betas[1]).

    A gradient that is not finite makes its own number of the parameter a NaN; one whose square is beyond float32 counts
    as zero: neither is lost to the other numbers of its group.

    Raises:
        ValueError: a number is out of its range, or ``states`` is none of the three.
        TypeError: an option is no number, ``betas`` is no pair, or a parameter is not of float32, float64, bfloat16 or
            float16: codes, such as torch's float8 types, have no small steps.
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
        **others: Any,
    ) -> None:
        if given := [name for name, value in others.items() if value or name not in _OF_TORCH]:
            why = "each step is one kernel a parameter" if given[0] in _OF_TORCH else "there is no such option"
            raise TypeError(f"{given[0]} must be left out, as torch's AdamW alone has it: {why}")
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "states": states}
        _check(options)
        super().__init__(params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own.

        Args:
            param_group: "params" and the options that differ from the defaults, ``states`` among them.

        Raises:
            ValueError, TypeError: as the class.
        """
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if p.dtype not in FLOATS:
                wanted = "parameters must be of float32, float64, bfloat16 or float16"
                raise TypeError(f"{wanted}, got {p.dtype} of shape {tuple(p.shape)}")

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
        if _coded(p) and own.device.type != "cpu" and not (own.is_cuda and triton.TRITON_AVAILABLE):
            raise TypeError(f"states as codes need a CPU or a CUDA device with Triton, got a parameter on {own.device}")
        state = self.state[p]
        if not state:
            state |= {"step": torch.zeros((), dtype=torch.int64), **_fresh(p, group["states"])}
        state["step"] += 1
        beta1, beta2 = group["betas"]
        lr, eps, weight_decay = float(group["lr"]), group["eps"], group["weight_decay"]
        options = _Options(lr, beta1, beta2, eps, weight_decay, int(state["step"]))
        values, grads = own.contiguous(), grad.contiguous()
        if type(own) not in (torch.Tensor, torch.nn.Parameter):  # whose memory is its own affair
            values = torch.empty(own.shape, dtype=own.dtype, device=own.device).copy_(own)
        if not own.numel():
            return
        if not _coded(p):
            _step_of_floats(values.view(-1), grads.view(-1), state[_FIRST], state[_SECOND], options)
        else:
            recipe = _STATES[group["states"]]
            first, second = (_arrays(state[name]) for name in _names(recipe))
            _step_of_codes(values, grads, first, second, recipe, options)
        if values is not own:
            own.copy_(values)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with tensors alone: of ``exp_avg`` the codes, ``exp_avg.scale``, ``exp_avg.exponents``.

        Of a parameter that is a DTensor they are DTensors: moments as floats like it, and codes too where its rows are
        whole groups of 128, which `torch.distributed.checkpoint` loads on any number of ranks. Others are of one axis,
        in which each rank has as many as the largest shard needs, zeros after its own; they load on as many ranks.

        Returns:
            "state" and "param_groups", which `torch.save` writes and `load_state_dict` reads.
        """
        whole = super().state_dict()
        names = [name for group in whole["param_groups"] for name in group["params"]]
        owner = dict(zip(names, (p for group in self.param_groups for p in group["params"]), strict=True))
        return {**whole, "state": {name: _parts(state, owner[name]) for name, state in whole["state"].items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another optimizer of the same parameters was, bit for bit.

        Args:
            state_dict: of `state_dict`, from this class.

        Raises:
            ValueError: it is another optimizer's, the groups are not of as many parameters, or a state is not of its
                parameter's size or not of the group's ``states``.
        """
        for i, group in enumerate(state_dict["param_groups"]):
            if "states" not in group:
                known = ", ".join(sorted(group))
                raise ValueError(
                    f"state_dict must be of breccia.optim.AdamW: param_groups[{i}] must have states, it has {known}; "
                    f"moments of torch's optimizers are floats: start anew, or train on with theirs"
                )
        super().load_state_dict({**state_dict, "state": {}})
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        owners = [(p, group["states"]) for group in self.param_groups for p in group["params"]]
        for name, (p, states) in zip(names, owners, strict=True):
            if name in state_dict["state"]:
                self.state[p] = _state(state_dict["state"][name], p, states, name)


def _check(options: dict[str, Any]) -> None:
    """Refuses options of a group that cannot be used."""
    betas = options["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"betas must be a pair of numbers, got {betas!r}")
    limits = {"lr": torch.inf, "eps": torch.inf, "weight_decay": torch.inf, "betas[0]": 1, "betas[1]": 1}
    given = options | {"betas[0]": betas[0], "betas[1]": betas[1]}
    for name, most in limits.items():
        value = given[name]
        if not isinstance(value, numbers.Real) and not (isinstance(value, torch.Tensor) and value.numel() == 1):
            raise TypeError(f"{name} must be a number, got {value!r}")
        if not 0 <= float(value) < most:
            raise ValueError(f"{name} must be at least 0 and less than {most}, got {value}")
    if options["states"] not in _STATES:
        raise ValueError(f"states must be one of {', '.join(_STATES)}, got {options['states']!r}")


def _local(x: Any) -> torch.Tensor:
    """A tensor, or of a DTensor the shard that is here."""
    local: torch.Tensor = x.to_local() if hasattr(x, "to_local") else x
    return local


def _rows(count: int) -> tuple[int, int]:
    return (count // _WIDE, _WIDE) if count % _WIDE == 0 else (-(-count // _GROUP), _GROUP)


class _Options(NamedTuple):
    """As AdamWOptions in cpp/include/breccia/adamw.hpp."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int

    def factors(self) -> tuple[float, ...]:
        """As AdamWFactors in cpp/src/contract/kernel_table.hpp."""
        rest1, rest2, correction = 1 - self.beta1, 1 - self.beta2, 1 / math.sqrt(1 - self.beta2**self.step)
        limit, ratio = math.inf, self.beta1 * self.beta1 / self.beta2 if self.beta2 else math.inf
        if ratio < 1:
            limit = math.sqrt(rest1 * rest1 / rest2 * (1 - ratio**self.step) / (1 - ratio)) / correction
        rate = self.lr / (1 - self.beta1**self.step)
        return self.beta1, self.beta2, rest1, rest2, 1 - self.lr * self.weight_decay, rate, correction, self.eps, limit


def _step_of_floats(
    values: torch.Tensor, grads: torch.Tensor, first: torch.Tensor, second: torch.Tensor, options: _Options
) -> None:
    """A step of few numbers, whose moments, filled up with zeros, are float32."""
    _, _, rest1, rest2, keep, rate, correction, eps, _ = options.factors()
    change, count = grads.float(), grads.numel()
    first, second = first.view(-1)[:count], second.view(-1)[:count]
    first.mul_(options.beta1).add_(change, alpha=rest1)
    second.mul_(options.beta2).addcmul_(change, change, value=rest2)
    divisor = second.sqrt().mul_(correction).add_(eps)
    values.copy_(values.float().mul_(keep).addcdiv_(first, divisor, value=-rate))


def _step_of_codes(
    values: torch.Tensor,
    grads: torch.Tensor,
    first: list[torch.Tensor],
    second: list[torch.Tensor],
    recipe: recipes.ScalingRecipe,
    options: _Options,
) -> None:
    """A step of contiguous values whose moments are codes, in one pass of one kernel."""
    if values.device.type == "cpu":
        size, finite = grads.abs(), None
        if not bool(size.max() < _SQUARES):  # as they are they would spoil their group
            grads, finite = torch.where(size < _SQUARES, grads, 0), size < torch.inf
        m, v = ([core_array(part, "moment") for part in parts] + [None] for parts in (first, second))
        core = core_array(values, "parameter"), core_array(grads, "gradient")
        moments = (m[0], m[1], m[2]), (v[0], v[1], v[2])
        _core.adamw_step(*core, *moments, recipes._spec(recipe), **options._asdict())
        if finite is not None:
            values[~finite] = torch.nan
        return
    from breccia.kernels.triton.adamw import adamw_step

    adamw_step(values, grads, first, second, recipe, options.factors(), 2 * options.step)


def _coded(p: torch.Tensor) -> bool:
    """Whether the moments of a parameter are codes."""
    return bool(p.numel() >= _SMALLEST)


def _fresh(p: torch.Tensor, states: str) -> dict[str, Any]:
    """Moments of zero."""
    own = _local(p)
    recipe, (rows, width) = _STATES[states], _rows(own.numel())
    if not _coded(p):
        return {name: torch.zeros(rows, width, device=own.device) for name in (_FIRST, _SECOND)}
    row = cast(torch.zeros(1, width, device=own.device), recipe)
    return {
        name: _moment([_bytes(part).repeat(rows, 1).view(part.dtype) for part in _arrays(row)], recipe)
        for name in _names(recipe)
    }


def _names(recipe: recipes.ScalingRecipe) -> tuple[str, str]:
    """What the two moments that are codes are called."""
    return _FIRST, _SECOND if recipes.choices(recipe).expanded else _ROOT


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Types of one byte, which torch knows few operations of, as bytes."""
    return x.contiguous().view(torch.uint8) if x.element_size() == 1 else x


def _moment(arrays: list[torch.Tensor], recipe: recipes.ScalingRecipe) -> ScaledTensor:
    """Codes, scales and, of groups that are expanded, exponents, as one value."""
    return from_buffer(arrays[0], arrays[1], recipe, recipe.layout, *arrays[2:])


def _arrays(moment: ScaledTensor) -> list[torch.Tensor]:
    """What `_moment` makes a value of."""
    return [part for part in (moment.data, moment.scale, moment.exponents) if part is not None]


def _stored(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The arrays of a state, in its own memory, by the names that they are saved under."""
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        arrays = [value] if isinstance(value, torch.Tensor) else _arrays(value)
        found |= dict(zip((name, f"{name}.scale", f"{name}.exponents"), arrays, strict=False))
    return found


def _parts(state: dict[str, Any], p: torch.Tensor) -> dict[str, Any]:
    """A parameter's state as tensors."""
    found = _stored(state)
    if _local(p) is p:
        return found
    return {name: value if name == "step" else _dealt(value, p) for name, value in found.items()}


def _dealt(part: torch.Tensor, p: Any) -> Any:
    """What a rank has of a DTensor's state, filled up to what the rank of the largest shard has, as a DTensor; moments
    that are floats as one like the parameter."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if not _coded(p):
        own = _local(p)
        here = part.flatten()[: own.numel()].view(own.shape)
        about = {"shape": p.shape, "stride": p.stride()}
        return DTensor.from_local(here, p.device_mesh, p.placements, run_check=False, **about)
    of_group = part.shape[1] * _GROUP // _rows(_local(p).numel())[1]
    if math.prod(p.shape[1:]) % _GROUP == 0 and all(one.is_replicate() or one.dim == 0 for one in p.placements):
        width = math.prod(p.shape[1:]) // _GROUP * of_group  # rows are of whole groups, and cut as the parameter's
        about = {"shape": torch.Size((p.shape[0], width)), "stride": (width, 1)}
        return DTensor.from_local(part.view(-1, width), p.device_mesh, p.placements, run_check=False, **about)
    shape = list(p.shape)
    for placement, ranks in zip(p.placements, p.device_mesh.shape, strict=True):
        if not placement.is_replicate():
            shape[placement.dim] = -(-shape[placement.dim] // ranks)
    flat = _bytes(part).new_zeros(-(-math.prod(shape) // _GROUP) * of_group)
    flat[: part.numel()] = _bytes(part).flatten()
    placements = [Replicate() if placement.is_replicate() else Shard(0) for placement in p.placements]
    return DTensor.from_local(flat.view(part.dtype), p.device_mesh, placements, run_check=False)


def _state(parts: dict[str, Any], p: torch.Tensor, states: str, name: Any) -> dict[str, Any]:
    """A parameter's state of its tensors."""
    state = {"step": parts.get("step", torch.zeros(())).clone(), **_fresh(p, states)}
    wanted = _parts(state, p)
    if {key: part.shape for key, part in parts.items()} != {key: part.shape for key, part in wanted.items()} or any(
        parts[key].dtype != part.dtype for key, part in wanted.items() if key != "step"
    ):
        raise ValueError(
            f"state {name} must be of {states} for {p.numel()} numbers, with {_described(wanted)}; "
            f"got {_described(parts)}"
        )
    for key, array in _stored(state).items():
        if key != "step":
            here, to = (_bytes(x).view(-1) for x in (_local(parts[key]).contiguous(), array))
            to[: here.numel()] = here[: to.numel()]
    return state


def _described(parts: dict[str, Any]) -> str:
    described = (f"{key} {part.dtype} {tuple(part.shape)}" for key, part in sorted(parts.items()) if key != "step")
    return ", ".join(described).replace("torch.", "")
