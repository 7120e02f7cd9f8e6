# SPDX-License-Identifier: Apache-2.0
"""ONNX models as files of tensors, read and written with the onnx package. A model that comes from ONNX keeps its
graph; of one that does not a graph is made whose outputs are the weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from breccia.bridges.common import Array, codes
from breccia.bridges.file_kinds import Container, Output, WeightFile
from breccia.bridges.onnx.nodes import FLOATS, HALVES, PLAIN, Node
from breccia.bridges.packing import pack_nibbles
from breccia.bridges.parts import Found
from breccia.peers import require

if TYPE_CHECKING:
    from breccia.checkpoint.files.planned_file import PlannedWriter

__all__ = ["NAME", "ONNX"]

NAME = "onnx"
_OPSET, _IR = 25, 12  # the first with codes of 4 bits, blocks and scales of E8M0; what they need of the file
_FIELDS = (2, 3, 4, 5, 6, 7, 8, 14, 20, 25)  # of a model
_MOST = (1 << 31) - 1  # bytes of a message
_TYPES = {dtype: kind for kind, dtype in PLAIN.items()} | {kind: kind for kind in HALVES}
_SUFFIX = "_DequantizeLinear_Output"  # of names that ONNX Runtime gives what it dequantizes


class OnnxFile:
    """An open model: see `breccia.bridges.WeightFile`. Its tensors are in memory."""

    model = None  # names are the model's own

    def __init__(self, path: Path) -> None:
        from breccia.checkpoint.files.input_file import InputFile
        from breccia.checkpoint.files.safetensors_header import Entry

        onnx = require("onnx", "onnx")
        self.path, self.file = path, InputFile(path)
        try:
            self.proto = onnx.load_model_from_string(self.file.read(0, self.file.size))
            self._tensors = {one.name: self._bytes(one) for one in self.proto.graph.initializer}
            every = {one.name: one for one in self.proto.graph.initializer}
            self.kinds = {name: onnx.TensorProto.DataType.Name(one.data_type) for name, one in every.items()}
            self.dims = {name: tuple(one.dims) for name, one in every.items()}
            if not all(isinstance(name, str) for name in every):
                raise ValueError("names of tensors must be UTF-8")
        except Exception as error:  # of onnx and protobuf, which have none in common
            self.file.close()
            raise ValueError(f"{path}: file must be an ONNX model: {' '.join(str(error).split())[:200]}") from error
        self.metadata: dict[str, str] = {}
        self.left_out: list[str] = []
        del self.proto.graph.initializer[:]
        self.entries = {}
        for name, raw in self._tensors.items():
            dtype, shape = PLAIN.get(self.kinds[name], "U8"), self.dims[name]
            shape = shape if self.kinds[name] in PLAIN else (raw.size,)
            wanted = _nbytes(self.kinds[name], shape) if self.kinds[name] in PLAIN else raw.size
            halves = -(-math.prod(self.dims[name]) // 2) if self.kinds[name] in HALVES else raw.size
            if min((*self.dims[name], 0)) < 0 or raw.size != wanted or raw.size != halves:
                self.file.close()
                where = f"{path}: tensor {name[:200]!r}"
                raise ValueError(f"{where} must have the bytes of its shape {self.dims[name]}, got {raw.size}")
            self.entries[name] = Entry(name, dtype, shape, 0, raw.size)
        self.nodes: dict[str, list[Any]] = {}  # of described tensors, by the model's own names
        self._found = self._describe()

    def _bytes(self, tensor: Any) -> Array:
        from onnx import TensorProto, external_data_helper, numpy_helper

        if tensor.data_location == TensorProto.EXTERNAL:
            external_data_helper.load_external_data_for_tensor(tensor, str(self.path.parent))
        if tensor.HasField("raw_data"):
            return np.frombuffer(tensor.raw_data, np.uint8)
        array = np.ascontiguousarray(numpy_helper.to_array(tensor))
        if TensorProto.DataType.Name(tensor.data_type) in HALVES:
            return pack_nibbles(codes(array, tensor.name).reshape(-1) & 15)
        return array.reshape(-1).view(np.uint8)

    def _describe(self) -> list[Found]:
        made = {node.output[0]: node for node in self.proto.graph.node if _is_whole(node)}
        scales = {name for node in made.values() for name in node.input[1:2]}
        found = []
        for output, node in made.items():
            first = made.get(node.input[1])  # which makes the scales
            inputs = [node.input[0], *(first or node).input[:2], *node.input[2:3]]
            if output in scales or not all(name in self.entries for name in inputs if name):
                continue
            name = output.removesuffix(_SUFFIX)
            self.nodes[name] = [node] if first is None else [first, node]
            found.append(self._found_of(name, node, first))
        return found

    def _found_of(self, name: str, node: Any, first: Any) -> Found:
        said = {one.name: one.i for one in node.attribute}
        x, zero = node.input[0], node.input[2] if len(node.input) > 2 else ""
        scale = (node if first is None else first).input[1 if first is None else 0]
        parts = {"codes": x, "scale": scale}
        if zero:
            parts["zero_point"] = zero
        if first is not None:
            if math.prod(self.dims[first.input[1]]) != 1 or (len(first.input) > 2 and first.input[2]):
                raise ValueError(
                    f"{self.path}: tensor {name!r} must have one scale of its scales, without a zero point"
                )
            parts["global_scale"] = first.input[1]
        axis, shape = said.get("axis", 1), self.dims[x]
        one = Node(
            self.kinds[x],
            shape,
            self.kinds[scale],
            self.dims[scale],
            axis + len(shape) if axis < 0 else axis,
            said.get("block_size", 0),
            bool(zero) and bool(self._tensors[zero].any()),
            first is not None,
        )
        if one.element not in (*HALVES, *PLAIN) or one.scale not in (*FLOATS, *PLAIN):
            raise ValueError(f"{self.path}: tensor {x!r} must be of a type that is read here, got {one.element}")
        try:
            one.check()
        except ValueError as error:
            raise ValueError(f"{self.path}: tensor {name!r}: {error}") from None
        recipe, layout = one.form() or (None, None)
        dtype = FLOATS.get(one.scale, "uint8")
        return Found(name, NAME, one.kind, parts, shape, recipe, layout, dtype, details=one)

    def output_of(self, name: str) -> str:
        """What the graph calls a tensor."""
        output: str = self.nodes[name][-1].output[0] if name in self.nodes else name
        return output

    def type_of(self, name: str) -> str:
        """The type that the graph takes a tensor for."""
        if name not in self.nodes:
            plain: str = self.kinds.get(name, "FLOAT")
            return plain
        from onnx import TensorProto

        node = self.nodes[name][-1]
        said = next((one.i for one in node.attribute if one.name == "output_dtype" and one.i), 0)
        scale = self.kinds.get(node.input[1], "FLOAT")
        kind: str = TensorProto.DataType.Name(said) if said else scale if scale in FLOATS else "FLOAT"
        return kind

    def described(self) -> list[Found]:
        """See `breccia.bridges.WeightFile`."""
        return self._found

    def span(self, name: str, start: int, stop: int, mapped: bool) -> Array:
        """See `breccia.bridges.WeightFile`."""
        return self._tensors[name][start:stop]

    def release(self, name: str) -> None:
        """See `breccia.bridges.WeightFile`."""

    def close(self) -> None:
        """See `breccia.bridges.WeightFile`."""
        self.file.close()


def _is_whole(node: Any) -> bool:
    """Whether a node dequantizes, and has what the operator must have."""
    named = all(isinstance(name, str) for name in (*node.input, *node.output))
    return named and node.op_type == "DequantizeLinear" and len(node.input) > 1 and len(node.output) == 1


class _Onnx(Container):
    title = "ONNX"
    whole = True
    peer = NAME

    @property
    def types(self) -> Mapping[str, tuple[int, int]]:
        return dict.fromkeys(HALVES, (2, 1))

    def holds(self, path: Path, start: bytes) -> bool:
        # A message begins with ir_version, behind which another field begins; safetensors with a length of few bytes.
        begins = len(start) > 7 and start[0] == 8 and start[1] < 128 and start[2] & 7 in (0, 2) and any(start[4:8])
        return path.suffix == ".onnx" or (begins and start[2] >> 3 in _FIELDS)

    def open(self, path: Path) -> WeightFile:
        return OnnxFile(path)

    def left_behind(self, files: Sequence[Any], destination: Path, folder: bool) -> str:
        return "the graph of the ONNX model is left out: its tensors alone are converted"

    def writer(self, path: Path, output: Output) -> tuple[PlannedWriter, list[str]]:
        require("onnx", "onnx")
        return _writer(path, output), []


ONNX = _Onnx()


def _writer(path: Path, output: Output) -> PlannedWriter:
    """Lays out the message: the model without tensors, then each of them, whose bytes are a span of the file."""
    from onnx import ModelProto, TensorProto

    from breccia.checkpoint.files import disk
    from breccia.checkpoint.files.planned_file import PlannedWriter

    source = output.source.files[0]
    source = source if isinstance(source, OnnxFile) else None
    model = _model(output, source)
    at, gaps, spans = 0, [], {}
    same = set() if source is None else _same(output, source)
    dims_of = {key: dims for said in output.metadata.values() for key, dims in json.loads(said).get("dims", {}).items()}
    for name, (dtype, shape) in output.plan.items():
        if source is not None and name in same:
            kind, dims, nbytes = source.kinds[name], source.dims[name], source.entries[name].nbytes
        elif dtype in _TYPES:
            kind, dims = _TYPES[dtype], dims_of.get(name, shape)
            nbytes = _nbytes(kind, shape)
        else:
            raise ValueError(f"tensor {name!r} must be of a type that ONNX has, got {dtype}")
        tensor = TensorProto(name=_stored(name, output, source), data_type=TensorProto.DataType.Value(kind), dims=dims)
        text = tensor.SerializeToString() + b"\x4a" + _varint(nbytes)  # raw_data
        text = b"\x2a" + _varint(len(text) + nbytes) + text  # initializer
        gaps.append((at, text))
        spans[name] = (at + len(text), at + len(text) + nbytes)
        at += len(text) + nbytes
    graph = model.graph.SerializeToString()
    rest = ModelProto()
    rest.CopyFrom(model)
    rest.ClearField("graph")
    begin = rest.SerializeToString() + b"\x3a" + _varint(len(graph) + at) + graph  # graph
    size = len(begin) + at
    if size > _MOST:
        raise ValueError(f"{path}: an ONNX file must have less than 2 GiB, got {size} bytes")

    class Writer(PlannedWriter):
        def commit(self) -> None:
            # Every run writes what stands between tensors: an earlier one, of the same header, may not have come to it.
            for start, text in gaps:
                disk.write(self._fd, text, len(begin) + start, self.partial)
            super().commit()

    moved = {name: (len(begin) + start, len(begin) + stop) for name, (start, stop) in spans.items()}
    return Writer(path, begin, moved, size, resume=True)


def _is_kept(found: Found, stored: Mapping[str, Any], output: Output) -> bool:
    """Whether a tensor that nodes make of others is copied with them."""
    return found.format == NAME and found.name not in output.metadata and found.name not in stored


def _same(output: Output, source: OnnxFile) -> set[str]:
    """Initializers that are copied as they are, whatever their type."""
    return {
        name
        for found, stored in output.tensors
        for name, (dtype, shape) in stored.items()
        if name in source.entries
        and (
            _is_kept(found, stored, output) or (found.format == "plain" and source.entries[name][1:3] == (dtype, shape))
        )
    }


def _nbytes(kind: str, shape: tuple[int, ...]) -> int:
    from breccia.checkpoint.files.dtypes import nbytes_of

    return -(-math.prod(shape) // 2) if kind in HALVES else nbytes_of(PLAIN[kind], shape)


def _varint(value: int) -> bytes:
    result = bytearray()
    while value > 127:
        result.append(value & 127 | 128)
        value >>= 7
    return bytes([*result, value])


def _stored(name: str, output: Output, source: OnnxFile | None) -> str:
    """What an initializer is called: a plain tensor as the graph calls it, or otherwise where its type is another."""
    if source is None:
        return name
    if _is_cast(name, output, source):
        return f"{name}_stored"
    return source.output_of(name)


def _is_cast(name: str, output: Output, source: OnnxFile) -> bool:
    """Whether a float has another type than the graph takes it for."""
    kind = _TYPES.get(output.plan[name][0])
    known = name in source.kinds or name in source.nodes
    return known and kind in FLOATS and name not in source.kinds and kind != source.type_of(name)


def _model(output: Output, source: OnnxFile | None) -> Any:
    """The model without its tensors."""
    from onnx import GraphProto, ModelProto, OperatorSetIdProto, TensorProto, helper

    model = ModelProto()
    if source is not None:
        model.CopyFrom(source.proto)
        first = next((one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), 0)
        if first < _OPSET and output.metadata:
            raise ValueError(
                f"{source.path}: model must be of opset {_OPSET} or more, got {first}: "
                "onnx.version_converter.convert_version makes one"
            )
    else:
        model.producer_name = "breccia"
        model.opset_import.append(OperatorSetIdProto(domain="", version=_OPSET))
        model.graph.CopyFrom(GraphProto(name=output.source.path.stem or "weights"))
    model.ir_version = max(model.ir_version, _IR)
    nodes = []
    for found, stored in output.tensors:
        name = found.name
        result = name if source is None else source.output_of(name)
        kind = "FLOAT" if source is None else source.type_of(name)
        kind = kind if kind in FLOATS else "FLOAT"
        if name in output.metadata:
            nodes += _nodes(name, result, kind, json.loads(output.metadata[name]))
            if source is None:
                model.graph.output.append(helper.make_tensor_value_info(result, TensorProto.FLOAT, found.shape))
        elif source is not None and name in stored and _is_cast(name, output, source):
            to = TensorProto.DataType.Value(kind)
            nodes.append(helper.make_node("Cast", [f"{name}_stored"], [result], to=to))
        elif source is None and name in stored and stored[name][0] in _TYPES:
            to = TensorProto.DataType.Value(_TYPES[stored[name][0]])
            model.graph.output.append(helper.make_tensor_value_info(result, to, stored[name][1]))
    if source is not None:
        anew = {
            node.output[0]
            for found, stored in output.tensors
            if found.name in source.nodes and not _is_kept(found, stored, output)
            for node in source.nodes[found.name]
        }
        inputs = [one for one in model.graph.input if one.name not in source.kinds]
        others = [node for node in model.graph.node if not (node.output and node.output[0] in anew)]
        del model.graph.input[:], model.graph.node[:]
        model.graph.input.extend(inputs)
        nodes += others
    model.graph.node.extend(nodes)
    return model


def _nodes(name: str, result: str, kind: str, said: Mapping[str, Any]) -> list[Any]:
    """The nodes that make a tensor of its parts."""
    from onnx import TensorProto, helper

    parts, nodes = said["parts"], []
    scale, to = parts["scale"], TensorProto.DataType.Value(kind)
    if "global_scale" in parts:
        nodes.append(helper.make_node("DequantizeLinear", [scale, parts["global_scale"]], [f"{scale}_made"]))
        scale = f"{scale}_made"
    inputs = [parts["codes"], scale, *([parts["zero_point"]] if "zero_point" in parts else [])]
    more = {"axis": said["axis"], "block_size": said["block_size"], "output_dtype": to}
    return [*nodes, helper.make_node("DequantizeLinear", inputs, [result], f"{name}_DequantizeLinear", **more)]
