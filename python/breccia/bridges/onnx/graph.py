# SPDX-License-Identifier: Apache-2.0
"""What a model's graph does with its weights, and what it must be for those that are codes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from breccia.bridges.contract import BY_COLUMNS, BY_ROWS

# Opsets whose DequantizeLinear first has blocks and INT4, FP4 and a type of its output, and scales of E8M0; and the
# versions of files that know them.
LEAST, _FLOAT4, _E8M0 = 21, 23, 24
_IR = {LEAST: 10, _FLOAT4: 11, _E8M0: 12}


def attributes(node: Any) -> dict[str, Any]:
    """A node's whole numbers, and lists of them, by name."""
    return {one.name: list(one.ints) if one.ints else one.i for one in node.attribute}


def _graphs(graph: Any) -> Iterator[Any]:
    """A graph and those inside of its nodes."""
    yield graph
    for node in graph.node:
        for one in node.attribute:
            for inner in (*one.graphs, *([one.g] if one.HasField("g") else [])):
                yield from _graphs(inner)


class Uses:
    """Which nodes take each tensor of a graph."""

    def __init__(self, graph: Any) -> None:
        self._uses: dict[str, list[tuple[Any, int]]] = defaultdict(list)
        for one in _graphs(graph):
            for node in one.node:
                for place, name in enumerate(node.input):
                    self._uses[name].append((node, place))
            for output in one.output:
                self._uses[output.name].append((None, 0))

    def product(self, name: str, *, behind_transpose: bool = True) -> str:
        """`BY_COLUMNS` where all that takes a tensor is products x·W, `BY_ROWS` where it is x·Wᵀ, else "". A transpose
        in front of the products counts with them."""
        kinds = {self._kind(node, place, behind_transpose) for node, place in self._uses.get(name, ())}
        return kinds.pop() if len(kinds) == 1 else ""

    def _kind(self, node: Any, place: int, behind_transpose: bool) -> str:
        if node is not None and place == 1 and node.op_type == "MatMul":
            return BY_COLUMNS
        if node is not None and place == 1 and node.op_type == "Gemm":
            return BY_ROWS if attributes(node).get("transB") else BY_COLUMNS
        if behind_transpose and node is not None and is_swap(node):
            return BY_ROWS if self.product(node.output[0], behind_transpose=False) == BY_COLUMNS else ""
        return ""

    def swap(self, name: str) -> Any:
        """The transpose that alone takes a tensor, for products x·Wᵀ of what it makes; None where there is none."""
        nodes = [node for node, _ in self._uses.get(name, ())]
        alone = len(nodes) == 1 and nodes[0] is not None and is_swap(nodes[0])
        return nodes[0] if alone and self.product(nodes[0].output[0]) == BY_ROWS else None


def is_swap(node: Any) -> bool:
    """Whether a node transposes a matrix."""
    return bool(node.op_type == "Transpose" and len(node.output) == 1 and attributes(node).get("perm") == [1, 0])


def needed(kinds: Collection[str], said: dict[str, Any]) -> int:
    """The opset that a DequantizeLinear of inputs of some types needs, with some attributes; 21 at least, of which all
    runtimes have one."""
    if "FLOAT8E8M0" in kinds:
        return _E8M0
    return _FLOAT4 if "FLOAT4E2M1" in kinds or "output_dtype" in said else LEAST


def raised(model: Any, opset: int, tensors: dict[str, tuple[int, tuple[int, ...]]], path: Any) -> list[str]:
    """Make a model without its tensors, whose types and shapes are given, one of an opset or more; a note where that
    changes it. Raises ValueError where onnx cannot."""
    from onnx import ModelProto, helper, version_converter

    if not opset:  # nothing is quantized
        return []
    model.ir_version = max(model.ir_version, next(ir for least, ir in _IR.items() if least >= opset))
    own = next((one for one in model.opset_import if one.domain in ("", "ai.onnx")), None)
    if own is None or own.version >= opset:
        return []
    whole, there = ModelProto(), {one.name for one in model.graph.input}
    whole.CopyFrom(model)
    whole.graph.input.extend(
        helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in tensors.items() if name not in there
    )
    try:
        if model.functions:
            raise ValueError("it has functions of its own")
        made = version_converter.convert_version(whole, opset)
    except Exception as error:  # of onnx's converter, which has no class of its own
        why = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path}: model must be of opset {opset} or more, got {own.version}, which onnx cannot raise ({why}): "
            "export it anew"
        ) from error
    inputs = [one for one in made.graph.input if one.name in there]
    del made.graph.input[:]
    made.graph.input.extend(inputs)
    model.graph.CopyFrom(made.graph)
    before, own.version = own.version, opset
    return [f"the model's opset is raised from {before} to {opset}, the first with what its weights need"]


def without_clips(nodes: list[Any], weights: dict[str, int]) -> list[Any]:
    """The nodes with Relu and Clip behind products with weights, of which types are given by name, as Max and Min.
    ONNX Runtime 1.32 takes Relu and Clip for a part of the product, looks for codes behind them, and finding none does
    not fuse the product with its weight."""
    from onnx import helper, numpy_helper

    made: list[Any] = []
    products: dict[str, int] = {}
    for node in nodes:
        kinds = [weights[name] for name in node.input if name in weights] if node.op_type in ("MatMul", "Gemm") else []
        if node.op_type == "Transpose" and node.input[0] in weights:
            weights = weights | {node.output[0]: weights[node.input[0]]}
        if node.op_type == "Add":
            kinds = [products[name] for name in node.input if name in products]
        if kinds and node.output:
            products[node.output[0]] = kinds[0]
        if node.op_type not in ("Relu", "Clip") or not node.input or node.input[0] not in products:
            made.append(node)
            continue
        least, most = ([*node.input, "", ""])[1:3]
        if node.op_type == "Relu":
            least = f"{node.output[0]}_least"
            dtype = helper.tensor_dtype_to_np_dtype(products[node.input[0]])
            zero = numpy_helper.from_array(np.zeros((), dtype), least)
            made.append(helper.make_node("Constant", [], [least], value=zero))
        elif node.attribute or not (least or most):  # of opsets before 11
            made.append(node)
            continue
        steps = [(kind, bound) for kind, bound in (("Max", least), ("Min", most)) if bound]
        names = [node.input[0], *(f"{node.output[0]}_at_least" for _ in steps[1:]), node.output[0]]
        made += [
            helper.make_node(kind, [names[i], bound], [names[i + 1]], f"{node.name}_{kind}" if node.name else "")
            for i, (kind, bound) in enumerate(steps)
        ]
    return made
