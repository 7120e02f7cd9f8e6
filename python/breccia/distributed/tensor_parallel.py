# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism of quantized layers: the styles of ``torch.distributed.tensor.parallel``, for them too.

ColwiseParallel                     RowwiseParallel
x: whole on every rank              x: columns of rank 0 │ of rank 1
rows of W: rank 0 │ rank 1          columns of W: rank 0 │ rank 1, cut between blocks
y: columns of rank 0 │ of rank 1    y: their sum
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor import parallel as torch_parallel

from breccia.distributed.rules import check_cut
from breccia.frameworks.torch.byte_parameters import bytes_in, disguised, parameter_of
from breccia.nn import QuantizedLinear


class _OfCodes:
    """What both styles do with a `QuantizedLinear`; other modules are torch's."""

    axis: int
    bias: Any
    desired: Any

    def _apply(self: Any, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        if not isinstance(module, QuantizedLinear):
            return super()._apply(module, device_mesh)  # type: ignore[misc]
        self.desired_input_layouts = (self.desired,)
        made: torch.nn.Module = distribute_module(
            module,
            device_mesh,
            self._partition_codes,
            partial(self._prepare_input_fn, self.input_layouts, self.desired_input_layouts),
            partial(self._prepare_output_fn, self.output_layouts, self.use_local_output),
        )
        return made

    def _partition_codes(self: Any, name: str, module: QuantizedLinear, mesh: Any) -> None:
        weight = module.weight
        check_cut(weight.shape, weight.layout, weight.recipe, self.axis, mesh.size(), f"the weight of {module}")
        module.make_shardable_()
        for key, parameter in module.named_parameters():
            if key == "bias":
                placement = self.bias
            elif self.axis < parameter.ndim and not (self.axis == 1 and _one_per_row(module, key)):
                placement = Shard(self.axis)
            else:
                placement = Replicate()
            plain = bytes_in(parameter)
            dealt = distribute_tensor(plain, mesh, [placement], src_data_rank=self.src_data_rank)
            made = parameter_of(dealt) if disguised(parameter) else torch.nn.Parameter(dealt, parameter.requires_grad)
            module.register_parameter(key, made)


def _one_per_row(module: QuantizedLinear, key: str) -> bool:
    return module._form.layout.name == "per_channel" and key != "weight_data"


class ColwiseParallel(_OfCodes, torch_parallel.ColwiseParallel):  # type: ignore[misc]
    """``torch.distributed.tensor.parallel.ColwiseParallel`` that takes a `breccia.nn.QuantizedLinear` too: each rank
    has rows of its codes and scales, and makes columns of the output.

    Raises:
        ValueError: from ``parallelize_module``, where the cut would go through blocks; the message has the legal cuts.
    """

    axis, bias, desired = 0, Shard(0), Replicate()


class RowwiseParallel(_OfCodes, torch_parallel.RowwiseParallel):  # type: ignore[misc]
    """``torch.distributed.tensor.parallel.RowwiseParallel`` that takes a `breccia.nn.QuantizedLinear` too: each rank
    has columns of its codes and scales, and the ranks' products are added up.

    Raises:
        ValueError: from ``parallelize_module``, where the cut would go through blocks; the message has the legal cuts.
    """

    axis, bias, desired = 1, Replicate(), Shard(-1)
