# SPDX-License-Identifier: Apache-2.0
"""PEFT puts LoRA beside layers of codes, and merges it into them.

Importing this module imports peft, and makes each ``peft.LoraConfig`` that is made from then on one that takes
`breccia.nn.QuantizedLinear`, whoever put it into the model: ``peft.get_peft_model(model, config)``,
``PeftModel.from_pretrained`` and ``add_adapter`` of transformers and diffusers. `register` does it for a config that
was there before.

    y = Q(x) · Wᵀ + scaling · B A x    W: codes, frozen    A, B: float32, trained

Merging adds all merged adapters to the values of W and quantizes the sum to W's recipe; unmerging puts the codes back
that were there.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from breccia.peers import require_version

require_version("peft", "peft")

import torch  # noqa: E402
from peft import LoraConfig  # noqa: E402
from peft import prepare_model_for_kbit_training as _prepare  # noqa: E402
from peft.tuners import tuners_utils  # noqa: E402
from peft.tuners.lora import model as lora_model  # noqa: E402
from peft.tuners.lora.dora import DoraLinearLayer  # noqa: E402
from peft.tuners.lora.layer import Linear  # noqa: E402
from peft.tuners.lora.variants import DoraLinearVariant  # noqa: E402
from peft.tuners.tuners_utils import check_adapters_to_merge  # noqa: E402
from peft.utils.other import ModulesToSaveWrapper  # noqa: E402

from breccia import comparison, verbs  # noqa: E402
from breccia.checkpoint.lora.feedback import How, MergeRounding, OfRows, round_change, seed_of  # noqa: E402  # noqa: E402
from breccia.nn import QuantizedLinear  # noqa: E402
from breccia.recipes import choices, global_divides  # noqa: E402
from breccia.scaled_tensor import ScaledTensor, as_array_is  # noqa: E402
from breccia.value.form import Form  # noqa: E402
from breccia.verbs.packed import PackedWeight, pack  # noqa: E402

__all__ = ["Merged", "Merging", "QuantizedLora", "merging", "prepare_model_for_kbit_training", "register"]

_LARGEST = 448 * 6  # of NVFP4's two levels, in units of the global scale
_INITS = (True, False, "gaussian", "eva", "orthogonal")  # that do not change the base


@dataclasses.dataclass(frozen=True)
class Merged:
    """What merging did to one layer.

    Attributes:
        layer: its number in the order of merging.
        adapters: those that were merged.
        kept: how much of their change is in the new codes: Σ change · (new - old) / Σ change². 1 is all of it, 0 is
            none; of stochastic rounding it is 1 on average.
        changed: elements whose value is another one.
        elements: how many there are.
    """

    layer: int
    adapters: tuple[str, ...]
    kept: float
    changed: int
    elements: int


@dataclasses.dataclass
class Merging:
    """How layers are merged, and what came of it: see `merging`.

    Attributes:
        seed: of what is drawn; None to nearest.
        rounding: "nearest", "stochastic" or "feedback".
        layers: what was done, in order.
    """

    seed: int | None = None
    rounding: str = "nearest"
    layers: list[Merged] = dataclasses.field(default_factory=list)
    _dot: float = 0.0
    _norm: float = 0.0

    @property
    def kept(self) -> float:
        """`Merged.kept` of all layers as one; 1 where nothing was to be kept."""
        return self._dot / self._norm if self._norm else 1.0

    def __repr__(self) -> str:
        return f"Merging({self.rounding}, {len(self.layers)} layers, kept={self.kept:.1%})"


_merging: contextvars.ContextVar[Merging | None] = contextvars.ContextVar("breccia_merging", default=None)


@contextlib.contextmanager
def merging(seed: int | None = None, *, rounding: How | None = None) -> Iterator[Merging]:
    """How layers of codes are merged in a ``with``, as in ``with merging(seed=0) as report: model.merge_and_unload()``.

    Args:
        seed: of what is drawn; 0 where rounding draws and none is given.
        rounding: "nearest", which keeps nothing of a change of less than half a step; "stochastic", up or down by
            chance, so that small changes are kept on average, as a seed alone asks for; or "feedback", where later
            columns also make good what chance loses in one, as `breccia.checkpoint.merge_lora` does.

    Yields:
        The report, which grows by a `Merged` for each layer.

    Raises:
        TypeError: ``seed`` is neither an integer nor None.
        ValueError: ``rounding`` is another word, or a seed is given with one that draws nothing.
    """
    asked = MergeRounding.of(rounding, seed, None)
    report = Merging(asked.seed, asked.rounding)
    token = _merging.set(report)
    try:
        yield report
    finally:
        _merging.reset(token)


class _Values(torch.nn.Module):  # type: ignore[misc]
    """A layer's values for as long as PEFT looks at them."""

    def __init__(self, layer: QuantizedLinear) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(verbs.dequantize(layer.weight), requires_grad=False)
        self.bias = layer.bias


class _Dora(DoraLinearVariant):  # type: ignore[misc]
    """DoRA: rows of W + ΔW are scaled to a learned length."""

    @staticmethod
    def init(module: Any, adapter_name: str, **kwargs: Any) -> None:
        if "lora_magnitude_vector" not in module.adapter_layer_names:
            module.adapter_layer_names = (*module.adapter_layer_names, "lora_magnitude_vector")
        made = DoraLinearLayer(fan_in_fan_out=False)
        a, b = module.lora_A[adapter_name].weight, module.lora_B[adapter_name].weight
        made.update_layer(
            base_layer=_Values(module.get_base_layer()), lora_A=a, lora_B=b, scaling=module.scaling[adapter_name]
        )
        module.lora_magnitude_vector[adapter_name] = made

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Any, result: Any, **kwargs: Any) -> Any:
        dropout = module.lora_dropout[active_adapter]
        undropped = isinstance(dropout, torch.nn.Identity) or not module.training
        dropped = x if undropped else dropout(x)
        base = module.get_base_layer()
        more = module.lora_magnitude_vector[active_adapter](
            dropped,
            lora_A=module.lora_A[active_adapter],
            lora_B=module.lora_B[active_adapter],
            scaling=module.scaling[active_adapter],
            base_layer=_Values(base),
            # With dropout PEFT would multiply by the values, which would stay until the backward pass.
            base_result=result if undropped else base(dropped),
            adapter_name=active_adapter,
        )
        return result + more


class QuantizedLora(Linear):  # type: ignore[misc]
    """PEFT's LoRA layer over a `breccia.nn.QuantizedLinear`; PEFT makes it.

    LoRA, rsLoRA and DoRA, any number of adapters.

    Args:
        base_layer: the layer, or another of PEFT's layers around it.
        adapter_name: of the first adapter.
        config: what the adapter is like.
        kwargs: what PEFT tells its layers.

    Raises:
        ValueError: the layer holds a stack of matrices, or the config asks for what would change the base's values.
    """

    def __init__(self, base_layer: Any, adapter_name: str, config: Any, **kwargs: Any) -> None:
        self._base_codes: ScaledTensor | None = None  # those before merging
        self._base_bias: Any = None
        super().__init__(base_layer, adapter_name, config, **kwargs)

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        if module.weight.ndim != 2:
            raise ValueError(f"target_modules must be linear layers, got {module}, which holds a stack of matrices")
        return module.in_features, module.out_features

    def _get_base_layer_device_and_dtype(self, base_layer: Any) -> tuple[Any, Any]:
        weight = base_layer.weight
        return weight.device, getattr(torch, weight.original_dtype)

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """What PEFT may be asked for beside LoRA."""
        return {(): None, ("use_dora",): _Dora}

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        """Add an adapter, as PEFT asks for it: see `peft.tuners.lora.layer.LoraLayer.update_layer`. One whose
        ``init_lora_weights`` would change the base's values is refused, and so is fan_in_fan_out."""
        if config.init_lora_weights not in _INITS:
            raise ValueError(
                f"init_lora_weights must be one of {', '.join(map(str, _INITS))} for a quantized layer, got "
                f"{config.init_lora_weights!r}: breccia.lora_init makes A and B of the quantization error"
            )
        if config.fan_in_fan_out:
            raise ValueError("fan_in_fan_out must be False for a quantized layer, whose weight is (out, in)")
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Put adapters into the codes: see `merging`.

        Args:
            safe_merge: refuse values that are not finite; the layer then stays as it was.
            adapter_names: which; None for the active ones.

        Raises:
            ValueError: with ``safe_merge``, a merged value is not finite.
            RuntimeError: the adapter has a bias and the layer has none.
        """
        names = [name for name in check_adapters_to_merge(self, adapter_names) or () if name in self.lora_A]
        if not names:
            return
        self._put([*self.merged_adapters, *names], safe_merge)

    def unmerge(self) -> None:
        """Take the adapters out again: the codes are those that were there before."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        base = self.get_base_layer()
        base.put_weight_(self._base_codes)
        if base.bias is not None:
            base.bias.data = self._base_bias
        self.merged_adapters.clear()
        self._base_codes = self._base_bias = None

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _put(self, names: list[str], safe: bool) -> None:
        base = self.get_base_layer()
        codes = base.weight if self._base_codes is None else self._base_codes
        if self._base_codes is None:
            self._base_bias = None if base.bias is None else base.bias.data.clone()
        old = verbs.dequantize(codes)
        values, bias = old.clone(), self._base_bias
        for name in names:
            values = self._with(name, values, old)
            if self.lora_bias[name]:
                if bias is None:
                    raise RuntimeError("an adapter with lora_bias must be of a layer with a bias to be merged")
                bias = bias + self.lora_B[name].bias * self.scaling[name]
        if safe and not (torch.isfinite(values).all() and (bias is None or torch.isfinite(bias).all())):
            raise ValueError(f"merged values must be finite, those with adapters {', '.join(names)} are not")
        report = _merging.get()
        how = Merging() if report is None else report
        rounding, seed, number = how.rounding, how.seed, len(how.layers)
        made = _quantized_again(values, codes, rounding, seed, number)
        if rounding == "feedback" and bool(torch.isfinite(values).all()):
            rows = torch.cat([self.lora_A[name].weight.detach() for name in names])
            made = _fed_back(values, codes, made, rows, (seed or 0) + number)
        _say(report, names, old, verbs.dequantize(made), values - old)
        self._base_codes = codes
        base.put_weight_(pack(made) if isinstance(codes, PackedWeight) else made)
        if bias is not None:
            base.bias.data = bias.to(self._base_bias.dtype)
        self.merged_adapters[:] = names

    def _with(self, name: str, values: Any, base: Any) -> Any:
        delta = self.get_delta_weight(name).to(values.device, torch.float32)
        if name not in self.lora_variant:
            return values + delta
        magnitude = self.lora_magnitude_vector[name]
        norm = magnitude.get_weight_norm(base, delta, scaling=1)
        return (magnitude.weight / norm).view(-1, 1) * (values + delta)

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """Whether PEFT may turn another kind of adapter into this: not over codes."""
        return False


def _quantized_again(values: Any, like: ScaledTensor, rounding: str, seed: int | None, number: int) -> ScaledTensor:
    """Values as codes of another's recipe; a global scale that is large enough stays, which fused layers share."""
    options: dict[str, Any] = {}
    second = None
    if rounding == "stochastic":
        assert seed is not None
        options = {"rounding": "stochastic", "seed": seed_of(seed, str(number))}
    if choices(like.recipe).two_level and like.global_scale is not None:
        there = float(like.global_scale.reshape(-1)[0])
        there = 1 / there if global_divides(like.recipe) else there
        # Scales of blocks up to 464 round to 448.
        if float(values.abs().max()) / _LARGEST * 448 <= there * 464:
            second, options["amax"] = like.global_scale, there * _LARGEST
    made = verbs.cast(values, like.recipe, **options)
    form = Form(made.recipe, made.layout, made._form.packing, like.original_dtype, made._form.parts)
    return ScaledTensor._of(
        form, made.data, made.scale, made.zero_point, made.global_scale if second is None else second
    )


def _fed_back(values: Any, codes: ScaledTensor, nearest: ScaledTensor, rows: Any, seed: int) -> ScaledTensor:
    """What "feedback" makes of codes; ``rows`` are those of all matrices A."""
    host, looked_at = (x.to("cpu", torch.float32).numpy() for x in (values, rows))
    old, made = codes.to("numpy"), nearest.to("numpy")
    fed = as_array_is(round_change(old, host, made, OfRows(looked_at), seed & 0x7FFFFFFF), values)
    return nearest._with(data=fed.data, scale=fed.scale, zero_point=fed.zero_point)


def _say(report: Merging | None, names: list[str], old: Any, new: Any, change: Any) -> None:
    dot, norm = comparison.kept(old, new, change)
    if report is None:
        if norm and dot < 0.9 * norm:
            warnings.warn(
                "merging rounds adapters to the base's recipe, which keeps less than 90 % of their change in some "
                'layers: `with breccia.peft.merging(rounding="feedback") as report` keeps more and says how much',
                stacklevel=4,
            )
        return
    share = dot / norm if norm else 1.0
    report.layers.append(Merged(len(report.layers), tuple(names), share, int((old != new).sum()), old.numel()))
    report._dot += dot
    report._norm += norm


def prepare_model_for_kbit_training(
    model: Any, use_gradient_checkpointing: bool = True, gradient_checkpointing_kwargs: dict[str, Any] | None = None
) -> Any:
    """PEFT's function of that name, which does not know that a model with layers of codes is a quantized one: this one
    turns gradient checkpointing on, too.

    Args:
        model: of transformers.
        use_gradient_checkpointing: whether to compute activations again in the backward pass.
        gradient_checkpointing_kwargs: for ``torch.utils.checkpoint.checkpoint``.

    Returns:
        ``model``, all of it frozen, what was float16 or bfloat16 in float32; codes stay.

    Raises:
        ValueError: it has no layer of codes.
    """
    if not any(isinstance(module, QuantizedLinear) for module in model.modules()):
        raise ValueError("model must have a breccia.nn.QuantizedLinear: quantize it with breccia.quantize_ first")
    model = _prepare(model, use_gradient_checkpointing=False)
    if use_gradient_checkpointing:
        options = gradient_checkpointing_kwargs or {}
        if options.get("use_reentrant", True):
            model.enable_input_require_grads()
        newer = getattr(model, "activation_checkpointing_enable", None)  # of transformers 5.23
        if newer is not None:
            newer(options)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return model


def register(config: LoraConfig) -> LoraConfig:
    """Make a config that was made before this module was imported take layers of codes.

    Args:
        config: a ``peft.LoraConfig``.

    Returns:
        ``config``.
    """
    config._register_custom_module({QuantizedLinear: QuantizedLora})
    return config


def _around(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Puts a function around one of PEFT's, once in a process, where this version of PEFT has that."""

    def put(call: Callable[..., Any]) -> Callable[..., Any]:
        made = getattr(owner, name, None)
        if made is None or getattr(made, "_knows_codes", False):
            return call

        @functools.wraps(made)
        def changed(*of: Any, **named: Any) -> Any:
            return call(made, *of, **named)

        changed._knows_codes = True  # type: ignore[attr-defined]
        setattr(owner, name, changed)
        return call

    return put


@_around(LoraConfig, "__post_init__")
def _take_codes(made: Any, config: LoraConfig) -> None:
    made(config)
    register(config)


@_around(ModulesToSaveWrapper, "check_module")
def _refuse_codes_to_save(made: Any, wrapper: ModulesToSaveWrapper) -> None:
    """PEFT trains a copy of each module that ``modules_to_save`` names; of codes nothing would learn, in silence."""
    made(wrapper)
    if any(isinstance(module, QuantizedLinear) for module in wrapper.original_module.modules()):
        raise ValueError(
            "modules_to_save must be modules without layers of codes, which do not learn, got a "
            f"{type(wrapper.original_module).__name__}: name it in target_modules, or leave it out when you quantize"
        )


@_around(lora_model, "get_device_map")
def _find_device_by_codes(made: Any, model: Any) -> Any:
    """PEFT takes a model's device from its first parameter; where every layer holds codes there may be none."""
    if not hasattr(model, "hf_device_map") and next(model.parameters(), None) is None:
        layer = next((one for one in model.modules() if isinstance(one, QuantizedLinear)), None)
        if layer is not None:
            return {"": layer.weight.device}
    return made(model)


@_around(tuners_utils, "_maybe_include_all_linear_layers")
def _find_codes(made: Any, config: Any, model: Any) -> Any:
    """``target_modules="all-linear"`` is layers of codes, too, but for the head, as PEFT leaves that out."""
    asked = getattr(config, "target_modules", None)
    config = made(config, model)
    if isinstance(config, LoraConfig) and isinstance(asked, str) and isinstance(config.target_modules, set):
        head = getattr(model, "get_output_embeddings", lambda: None)()
        config.target_modules |= {
            name.removesuffix(".base_layer")  # of a layer that has an adapter
            for name, module in model.named_modules()
            if isinstance(module, QuantizedLinear) and module._ndim == 2 and module is not head
        }
    return config
