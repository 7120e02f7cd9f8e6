# SPDX-License-Identifier: Apache-2.0
"""`ScaledLinear` and `QuantizedLinear`."""

from __future__ import annotations

from typing import Any

import torch

from breccia import autograd, delayed, verbs
from breccia.autograd import LinearRecipes
from breccia.delayed import AmaxHistory
from breccia.frameworks.torch import byte_parameters, direct, direct_linear, from_pickle, launches, to_pickle
from breccia.frameworks.torch import gradients as torch_gradients
from breccia.frameworks.torch.direct import as_autocast
from breccia.nn import states
from breccia.recipe_names import resolve
from breccia.recipes import DelayedScaling, ScalingRecipe
from breccia.scaled_tensor import ScaledTensor, ready
from breccia.schemes.inputs import largest_code
from breccia.value.display import brief
from breccia.value.form import PARTS, Form
from breccia.value.inputs import is_integer
from breccia.verbs.packed import PackedWeight

_ROLES = ("x", "w", "grad")
_MAX_REPEATS = 16


class ScaledLinear(torch.nn.Linear):  # type: ignore[misc]
    """``torch.nn.Linear`` whose three products are scaled ones: see `breccia.autograd.linear`.

    The weight stays in high precision and is quantized on every call. With `DelayedScaling` the amax histories are
    buffers, part of ``state_dict``: every forward pass in training mode first takes the scales from what the passes
    before it recorded, as TransformerEngine does between steps.

    Args:
        in_features: K, the length of the input's last axis.
        out_features: N, that of the output's.
        bias: whether to add one.
        recipes: what to quantize to; `LinearRecipes.fp8` by default.
        algorithm: "max" or "most_recent", for `DelayedScaling`.
        device: as ``torch.nn.Linear``.
        dtype: as ``torch.nn.Linear``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        recipes: LinearRecipes | None = None,
        *,
        algorithm: str = "max",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipes = autograd.recipes_of(recipes)
        self.algorithm = algorithm
        for role in _ROLES:
            recipe = getattr(self.recipes, role)
            if isinstance(recipe, DelayedScaling):
                state = delayed.init(recipe, self.weight)
                self.register_buffer(f"{role}_amax", state.amax)
                self.register_buffer(f"{role}_quantizing_scale", state.scale)

    def forward(self, input: Any) -> Any:  # noqa: A002 (torch's name)
        """``input @ weight.T + bias`` with both quantized by the layer's recipes; gradients too.

        Args:
            input: ``(..., in_features)`` of a float dtype.

        Returns:
            ``(..., out_features)`` in the dtype of ``input``.
        """
        input = as_autocast(input)  # noqa: A001
        scales = None
        if any(isinstance(getattr(self.recipes, role), DelayedScaling) for role in _ROLES):
            scales = self._histories(input)
        y = autograd.linear(input, self.weight, self.bias, self.recipes, scales=scales)
        if scales is not None and self.training and y.requires_grad:
            y.register_hook(lambda grad: self._record("grad", grad))
        return y

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipes={brief(self.recipes)}"

    def _histories(self, x: Any) -> Any:
        # What is computed again in a backward pass (torch.utils.checkpoint) takes the scales that were, and is no step.
        moves = self.training and (torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1)
        states: list[AmaxHistory | None] = []
        for role in _ROLES:
            recipe = getattr(self.recipes, role)
            if not isinstance(recipe, DelayedScaling):
                states.append(None)
                continue
            if moves:
                self._keep(role, delayed.update(self._state(role), recipe, self.algorithm))
            # A copy: the buffers may move on before backward reads them.
            state = self._state(role)
            states.append(AmaxHistory(state.amax, state.scale.clone()))
        if moves:
            self._record("x", x)
            self._record("w", self.weight)
        return tuple(states)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        if prefix + "weight" in state_dict and prefix + "w_amax" not in state_dict and hasattr(self, "w_amax"):
            fresh = delayed.init(self.recipes.w, self.weight)  # type: ignore[arg-type]  # another weight's is not its own
            self._keep("w", delayed.update(delayed.record(fresh, state_dict[prefix + "weight"]), self.recipes.w))  # type: ignore[arg-type]
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _state(self, role: str) -> AmaxHistory:
        return AmaxHistory(getattr(self, f"{role}_amax"), getattr(self, f"{role}_quantizing_scale"))

    def _keep(self, role: str, state: AmaxHistory) -> None:
        getattr(self, f"{role}_amax").copy_(state.amax)
        getattr(self, f"{role}_quantizing_scale").copy_(state.scale)

    def _record(self, role: str, x: Any) -> None:
        if hasattr(self, f"{role}_amax"):
            self._keep(role, delayed.record(self._state(role), x.detach()))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Histories stay float32 in a model of another dtype: float16 has no scale above 65504, as small gradients have.
        return _apply_to_bytes(self, fn, lambda: super(ScaledLinear, self)._apply(fn, recurse))


class QuantizedLinear(torch.nn.Module):  # type: ignore[misc]
    """A linear layer with a quantized weight, for inference and for training what is around it.

    Gradients flow to the input and to the bias; with ``activations`` as if quantizing were the identity, and zero where
    a value saturates (`breccia.cast_ste_clipped`). Under ``torch.autocast`` inputs take the dtype of the mode.

    The weight's parts are buffers: ``state_dict`` holds them, ``to(device)`` moves them, and ``half()`` and
    ``to(dtype)`` leave them as they are.

    Args:
        weight: ScaledTensor ``(N, K)`` of torch tensors. Of a `breccia.PackedWeight` the layer keeps the packed codes:
            see `pack_`.
        bias: ``(N,)`` or None.
        activations: what to quantize the input to before each product (a recipe or its name), or None for products with
            the input as it is. FP8 activations by an FP8 weight multiply on the tensor cores of a GPU in FP8: with many
            tokens that is what is fast.
        exact_rows: inputs of at most so many rows (tokens) are multiplied as they are, without ``activations``: with
            few, reading the weight takes the time. 0 quantizes all.
        gradients: what the output's gradient becomes before its product with the weight: a recipe or its name, such as
            "fp8:e5m2" of FP8 training; "bf16"; or None, as it comes.
        input_scale: the static scale of the inputs, a float32 tensor of one number, by which codes of the inputs are
            multiplied: amax / 448 of FP8, amax / 2688 of NVFP4, whose blocks have scales of their own, amax / 127 of
            INT8. A buffer; None makes scales of the inputs each time.

    Attributes:
        unmarked_states: what ``load_state_dict`` does with a state without ``weight_form``, the text that says what
            codes mean: "warn" (takes them for codes of the layer's recipe and warns once), "load" (without a warning)
            or "refuse". Set it on the class or on a layer.
    """

    _ndim = 2  # of the weight
    unmarked_states = "warn"

    def __init__(
        self,
        weight: ScaledTensor,
        bias: Any = None,
        activations: ScalingRecipe | str | None = None,
        *,
        exact_rows: int = 0,
        gradients: ScalingRecipe | str | None = None,
        input_scale: Any = None,
    ) -> None:
        super().__init__()
        wanted = f"weight must be a {self._ndim}-D ScaledTensor of torch tensors"
        if not isinstance(weight, ScaledTensor):
            raise TypeError(f"{wanted}, got {type(weight).__name__}")
        if weight.ndim != self._ndim or not isinstance(weight._held[0], torch.Tensor):
            raise ValueError(f"{wanted}, got {weight!r}")
        if bias is not None and (not isinstance(bias, torch.Tensor) or tuple(bias.shape) != weight.shape[:1]):
            got = f"shape {tuple(bias.shape)}" if hasattr(bias, "shape") else type(bias).__name__
            raise ValueError(f"bias must be a torch tensor of shape ({weight.shape[0]},) or None, got {got}")
        self.out_features, self.in_features = weight.shape[-2:]
        self._repeats: dict[Any, Any] = {}  # products by their inputs' shapes, see `_torch_launch.repeated_linear`
        self._dtypes: dict[str, torch.dtype] = {}  # of the parts that are parameters of bytes
        self._put(weight)
        self.bias = None if bias is None else torch.nn.Parameter(bias.detach(), requires_grad=False)
        if not is_integer(exact_rows) or exact_rows < 0:
            raise ValueError(f"exact_rows must be a non-negative integer, got {exact_rows!r}")
        self.activations = None if activations is None else resolve(activations, "activations")
        self.exact_rows = int(exact_rows)
        self.gradients = gradients if gradients in (None, torch_gradients.BF16) else resolve(gradients, "gradients")
        if input_scale is not None:
            if not isinstance(input_scale, torch.Tensor) or input_scale.numel() != 1:
                raise ValueError(f"input_scale must be a tensor of one number or None, got {input_scale!r}")
            self.register_buffer("input_scale", input_scale.detach().float().reshape(()))

    def _put(self, weight: ScaledTensor) -> None:
        """Take the parts of a weight for buffers."""
        self._form, self._packed = weight._form, isinstance(weight, PackedWeight)
        self.recipe: ScalingRecipe = weight.recipe
        for part, array in zip(PARTS, weight._held, strict=True):
            # A cast on a GPU may store scales in the order that FP8 products want of activations.
            self._buffers[f"weight_{part}"] = array.contiguous() if part == "scale" else array
        self._buffers[states.MEANING] = self._checked = states.meaning(self)  # the text that goes with the recipe
        for name in [name for name, part in self._buffers.items() if part is None]:
            self._buffers[name] = self._buffers.pop(name)  # last: torch.export counts on none between the others
        self._made: ScaledTensor | None = None
        self._repeats.clear()

    def make_shardable_(self) -> QuantizedLinear:
        """Turn the weight's parts into frozen parameters of uint8, which ``torch.distributed.fsdp.fully_shard`` shards
        and gathers as they are; buffers it leaves whole on every rank. Parts of one number stay buffers.

        Returns:
            The layer itself. Its ``state_dict`` keeps its names, holds bytes now, and loads what it held before.
        """
        for name in states.PARTS:
            part = self._buffers.get(name)
            if part is None or part.ndim == 0:
                continue
            self._dtypes[name] = part.dtype
            del self._buffers[name]
            held = states.as_bytes(part)
            if not held.untyped_storage().resizable():  # NumPy's memory, which FSDP cannot give back
                held = held.clone()
            self.register_parameter(name, byte_parameters.parameter_of(held))
        self._made = None
        self._repeats.clear()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        states.complete(self, destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        states.load(self, state_dict, prefix, arguments, super()._load_from_state_dict)

    @property
    def weight(self) -> ScaledTensor:
        """The weight, over the buffers' memory."""
        # Read past torch.nn.Module's __getattr__, which takes as long as all the rest of a small call.
        parts = self._buffers
        if self._dtypes:
            parts = parts | {name: self._parameters[name].view(dtype) for name, dtype in self._dtypes.items()}
        data, scale = parts["weight_data"], parts["weight_scale"]
        zero_point, global_scale = parts["weight_zero_point"], parts["weight_global_scale"]
        made = None if torch.compiler.is_dynamo_compiling() else self._made
        if (
            made is not None
            and (made._held[0] if made._rests else made.data) is data
            and made.scale is scale
            and made.zero_point is zero_point
            and made.global_scale is global_scale
        ):
            return made
        kind = PackedWeight if self._packed else ScaledTensor
        made = kind._of(self._form, data, scale, zero_point, global_scale)
        if not torch.compiler.is_compiling():  # nor exporting, which puts other buffers into the layer meanwhile
            if parts[states.MEANING] is not self._checked:
                states.check(self, parts[states.MEANING])
            self._checked, self._made = parts[states.MEANING], made
        return made

    def check_puttable(self) -> None:
        """Refuse another weight for the parameters of bytes that `make_shardable_` made of this one.

        Raises:
            ValueError: such parameters are there.
        """
        if self._dtypes:
            raise ValueError("weight must be put into a layer before make_shardable_")

    def put_weight_(self, weight: ScaledTensor) -> None:
        """Take another weight.

        Args:
            weight: of the shape of the one there is, on the same device.

        Raises:
            TypeError: it is no ScaledTensor of torch tensors.
            ValueError: its shape is another one, or the weight is sharded.
        """
        if not isinstance(weight, ScaledTensor) or not isinstance(weight._held[0], torch.Tensor):
            raise TypeError(f"weight must be a ScaledTensor of torch tensors, got {type(weight).__name__}")
        if weight.shape != self.weight.shape:
            raise ValueError(f"weight must have shape {self.weight.shape}, got {weight.shape}")
        self.check_puttable()
        self._put(weight)

    def forward(self, input: Any) -> Any:  # noqa: A002 (torch's name)
        """``input @ weight.T + bias``, with the input quantized on the fly where the layer has a recipe for it.

        Args:
            input: ``(..., in_features)`` of a float dtype, or a ScaledTensor, which is multiplied as it is: one cast
                then serves all layers of one input (`breccia.nn.functional` makes such in the kernel before).

        Returns:
            ``(..., out_features)`` in the dtype of ``input``, of what it was quantized from.

        Raises:
            TypeError, ValueError: as `breccia.linear`.
        """
        if isinstance(input, ScaledTensor):
            return verbs.linear(input, self.weight, self.bias, input.original_dtype)
        input = as_autocast(input)  # noqa: A001
        if not torch.compiler.is_dynamo_compiling() and type(input) is torch.Tensor and input.is_cuda:
            return self._on_gpu(input)
        return self._product(input)

    def _on_gpu(self, x: Any) -> Any:
        """`_product` where torch traces nothing: again what was done for such an input, if that is certain."""
        if (self.activations is not None and "input_scale" in self._buffers) or direct.needs_grad(x):
            return self._product(x)
        repeat = self._repeats.get(x.shape)
        y = None if repeat is None else repeat.run(x)
        if y is not None:
            return y if self.bias is None else verbs.plus(y, self.bias, x.dtype)
        self._repeats.pop(x.shape, None)
        recipe = self._activations_of(x)
        y = None
        if recipe is not None and x.shape[-1:] == (self.in_features,):  # cast and product at once
            y = launches.linear(x, ready(self.weight), self._wide(x), recipe)
        if y is None:
            y = self._product(x)
        elif self.bias is not None:
            y = verbs.plus(y, self.bias, x.dtype)
        if not self._dtypes and not self._packed:
            if len(self._repeats) >= _MAX_REPEATS:
                self._repeats.clear()
            repeat = launches.repeated_linear(x, self.weight, self._buffers, states.PARTS, recipe, self._wide(x))
            if repeat is not None:
                self._repeats[x.shape] = repeat
        return y

    def _product(self, input: Any) -> Any:  # noqa: A002
        activations = self._activations_of(input)
        if (activations, self.gradients) == (None, None):
            weight, y = self.weight, None
            if self._form.has_kernels and not self._packed:
                # What `verbs.linear` looks at first takes as long as a small product.
                y = direct_linear(input, weight, input.dtype, "exact", self.bias)
            return verbs.linear(input, weight, self.bias, input.dtype) if y is None else y
        if input.ndim == 1:  # blocks want rows
            return self._product(input[None])[0]
        y = self._differentiable(input, None)
        if y is None:
            x = input if activations is None else self._cast(input, activations)
            return verbs.linear(x, self.weight, self.bias, input.dtype)
        return y if self.bias is None else verbs.plus(y, self.bias, input.dtype)

    def _wide(self, x: Any) -> Any:
        """The dtype of the product of an input, to which a bias is added before it is rounded."""
        return torch.float32 if self.bias is not None and x.dtype.itemsize == 2 else x.dtype

    def _cast(self, x: Any, recipe: ScalingRecipe) -> ScaledTensor:
        """The input, quantized by its static scale where there is one."""
        scale = self._buffers.get("input_scale")
        if scale is None:
            return verbs.cast(x, recipe)
        amax = scale.reshape(()) * largest_code(recipe)
        rows = tuple(x.shape[:-1]) if recipe.layout.block == (1, 0) else ()
        return verbs.cast(x, recipe, amax=amax.expand(*rows, 1) if rows else amax)

    def _differentiable(self, x: Any, offsets: Any) -> Any:
        """The product, where its gradient is more than that of floats by codes and x needs it; else None."""
        activations = self._activations_of(x)
        if (activations, self.gradients) == (None, None) or not (x.requires_grad and torch.is_grad_enabled()):
            return None
        if activations is not None and "input_scale" in self._buffers:
            near = verbs.dequantize(self._cast(x.detach(), activations), x.dtype)
            x, activations = x + (near - x).detach(), None  # its gradient is that of the identity
        if offsets is None:
            verbs.check_linear(x, self.weight)
        key = torch_gradients.gradient_key(self.gradients)
        return torch_gradients.linear(x, ready(self.weight), activations, key, offsets, self._wide(x))

    def _activations_of(self, x: Any) -> ScalingRecipe | None:
        """What an input is quantized to."""
        return self.activations if x.numel() > self.exact_rows * self.in_features else None

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}, recipe={brief(self.recipe)}"
        for name in ("activations", "gradients"):
            chosen = getattr(self, name)
            text += "" if chosen is None else f", {name}={chosen if isinstance(chosen, str) else brief(chosen)}"
        return text

    def __getstate__(self) -> dict[str, Any]:
        # torch's tensors of 8 bits and fewer come out of torch.save and not out of pickle: they go into both as bytes.
        packed = {name: to_pickle(one) if type(one) is torch.Tensor else one for name, one in self._buffers.items()}
        return {**self.__dict__, "_made": None, "_repeats": {}, "_checked": None, "_buffers": packed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        buffers = state["_buffers"].items()
        unpacked = {name: from_pickle(*one) if isinstance(one, tuple) else one for name, one in buffers}
        super().__setstate__({**state, "_buffers": unpacked})
        self.__dict__.setdefault("_repeats", {})
        self.__dict__.setdefault("gradients", None)
        self.__dict__.setdefault("_packed", False)
        if not isinstance(self._form, Form):  # older pickles hold packing, dtype and layout
            packing, dtype, layout = self._form
            parts = tuple(part for part in PARTS if getattr(self, f"weight_{part}") is not None)
            self._form = Form(self.recipe, layout, packing, dtype, parts)
        if states.MEANING not in self._buffers:
            self._buffers[states.MEANING] = self._checked = states.meaning(self)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Codes look like floats to torch: as bytes they move between devices and nothing else happens to them.
        self._repeats.clear()
        known = self._buffers[states.MEANING] is self._checked
        moved = _apply_to_bytes(
            self,
            fn,
            lambda: super(QuantizedLinear, self)._apply(lambda one: byte_parameters.applied(fn, one), recurse),
        )
        self._checked = self._buffers[states.MEANING] if known else None
        return moved


def _apply_to_bytes(module: Any, fn: Any, apply_to_parameters: Any) -> Any:
    """``_apply`` of a module whose buffers are to keep their bits. Where ``fn`` fails, they stay what they were."""
    buffers = dict(module._buffers)
    module._buffers.clear()
    try:
        apply_to_parameters()
    finally:
        module._buffers.update(buffers)
    moved = {
        name: fn(part.reshape(-1).view(torch.uint8)).view(part.dtype).reshape(part.shape)
        for name, part in buffers.items()
        if part is not None
    }
    module._buffers.update(moved)
    return module
