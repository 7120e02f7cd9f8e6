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
from breccia.bridges.contract import BY_COLUMNS
from breccia.bridges.file_kinds import Container, Output, WeightFile
from breccia.bridges.onnx.graph import LEAST, Uses, attributes, needed, raised, without_clips
from breccia.bridges.onnx.nodes import FLOATS, HALVES, PLAIN, Node
from breccia.bridges.packing import pack_nibbles
from breccia.bridges.parts import Found
from breccia.peers import require
from breccia.value.form import axis_of

if TYPE_CHECKING:
    from breccia.checkpoint.files.planned_file import PlannedWriter

NAME = "onnx"
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
        self._others: dict[str, InputFile] = {}  # with bytes of tensors, by location
        self._places: dict[str, tuple[InputFile, int]] = {}  # and where in them those of a tensor begin
        try:
            self.proto = onnx.load_model_from_string(self.file.read(0, self.file.size))
            every = {one.name: one for one in self.proto.graph.initializer}
            self._tensors = {name: self._bytes(one) for name, one in every.items()}
            self.types = {name: one.data_type for name, one in every.items()}
            self.kinds = {name: onnx.TensorProto.DataType.Name(kind) for name, kind in self.types.items()}
            self.dims = {name: tuple(one.dims) for name, one in every.items()}
            if not all(isinstance(name, str) for name in every):
                raise ValueError("names of tensors must be UTF-8")
        except Exception as error:  # of onnx and protobuf, which have none in common
            self.close()
            why = " ".join(str(error).split())[:200] or type(error).__name__  # such as MemoryError
            raise ValueError(f"{path}: file must be an ONNX model: {why}") from error
        self.metadata: dict[str, str] = {}
        self.left_out: list[str] = []
        del self.proto.graph.initializer[:]
        self.entries = {}
        for name, raw in self._tensors.items():
            kind, dims = self.kinds[name], self.dims[name]
            known = kind in PLAIN or kind in HALVES
            if min((*dims, 0)) < 0 or (known and raw.size != _nbytes(kind, dims)):
                self.close()
                where = f"{path}: tensor {name[:200]!r}"
                raise ValueError(f"{where} must have the bytes of its shape {dims}, got {raw.size}")
            shape = dims if kind in PLAIN else (raw.size,)
            self.entries[name] = Entry(name, PLAIN.get(kind, "U8"), shape, 0, raw.size)
        self.nodes: dict[str, list[Any]] = {}  # of described tensors, by the model's own names
        self._uses = Uses(self.proto.graph)
        self._found = self._describe()

    def _bytes(self, tensor: Any) -> Array:
        from onnx import TensorProto, numpy_helper

        if tensor.data_location == TensorProto.EXTERNAL:
            return self._external(tensor)
        if tensor.HasField("raw_data"):
            return np.frombuffer(tensor.raw_data, np.uint8)
        array = np.ascontiguousarray(numpy_helper.to_array(tensor))
        if TensorProto.DataType.Name(tensor.data_type) in HALVES:
            return pack_nibbles(codes(array, tensor.name).reshape(-1) & 15)
        return array.reshape(-1).view(np.uint8)

    def _external(self, tensor: Any) -> Array:
        """A view of the bytes of a tensor that are in a file of their own, which many may share."""
        from onnx import TensorProto, external_data_helper

        from breccia.checkpoint.files.input_file import InputFile

        said = external_data_helper.ExternalDataInfo(tensor)
        if said.location not in self._others:
            none = TensorProto(data_location=TensorProto.EXTERNAL)  # of the bytes: onnx judges the location
            none.external_data.add(key="location", value=said.location)
            none.external_data.add(key="length", value="0")
            external_data_helper.load_external_data_for_tensor(none, str(self.path.parent))
            self._others[said.location] = InputFile(self.path.parent / said.location)
        file, start = self._others[said.location], said.offset or 0
        stop = file.size if said.length is None else start + said.length
        if not start <= stop <= file.size:
            raise ValueError(f"tensor {tensor.name!r} must lie in the {file.size} bytes of {said.location!r}")
        self._places[tensor.name] = file, start
        return file.view(start, stop)

    def _describe(self) -> list[Found]:
        made = {node.output[0]: node for node in self.proto.graph.node if _is_whole(node)}
        scales = {name for node in made.values() for name in node.input[1:2]}
        found = []
        for output, node in made.items():
            first = made.get(node.input[1])  # which makes the scales
            inputs = [node.input[0], *(first or node).input[:2], *node.input[2:3]]
            if output in scales or not all(name in self.entries for name in inputs if name):
                continue
            swap = self._uses.swap(output)
            name = output.removesuffix(_SUFFIX) if swap is None else swap.output[0]
            self.nodes[name] = [one for one in (first, node, swap) if one is not None]
            found.append(self._found_of(name, node, first, swap is not None))
        return found

    def _found_of(self, name: str, node: Any, first: Any, swapped: bool) -> Found:
        said = attributes(node)
        x, zero = node.input[0], node.input[2] if len(node.input) > 2 else ""
        scale = (node if first is None else first).input[1 if first is None else 0]
        parts = {"codes": x, "scale": scale}
        if zero:
            parts["zero_point"] = zero
        if first is not None:
            if math.prod(self.dims[first.input[1]]) != 1 or (len(first.input) > 2 and first.input[2]):
                raise ValueError(f"{self.path}: tensor {name!r} must have one scale of scales, without a zero point")
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
            swapped or self._uses.product(node.output[0]) == BY_COLUMNS,
            swapped,
        )
        if one.element not in (*HALVES, *PLAIN) or one.scale not in (*FLOATS, *PLAIN):
            raise ValueError(f"{self.path}: tensor {x!r} must be of a type that is read here, got {one.element}")
        try:
            one.check()
        except ValueError as error:
            raise ValueError(f"{self.path}: tensor {name!r}: {error}") from None
        recipe, layout = one.form() or (None, None)
        dtype = FLOATS.get(one.scale, "uint8")
        return Found(name, NAME, one.kind, parts, one.logical, recipe, layout, dtype, details=one)

    def products(self) -> dict[str, str]:
        """How the graph multiplies by tensors, by the model's own names."""
        names = [*self.nodes, *(name for name, dims in self.dims.items() if len(dims) > 1)]
        products = {name: self._uses.product(self.output_of(name)) for name in names}
        return {name: product for name, product in products.items() if product}

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

        node = [one for one in self.nodes[name] if one.op_type == "DequantizeLinear"][-1]
        said = attributes(node).get("output_dtype", 0)
        scale = self.kinds.get(node.input[1], "FLOAT")
        kind: str = TensorProto.DataType.Name(said) if said else scale if scale in FLOATS else "FLOAT"
        return kind

    def described(self) -> list[Found]:
        """See `breccia.bridges.WeightFile`."""
        return self._found

    def span(self, name: str, start: int, stop: int, mapped: bool) -> Array:
        """See `breccia.bridges.WeightFile`."""
        if name in self._places and not mapped:
            file, at = self._places[name]
            return file.array(at + start, at + stop)
        return self._tensors[name][start:stop]

    def release(self, name: str) -> None:
        """See `breccia.bridges.WeightFile`."""

    def close(self) -> None:
        """See `breccia.bridges.WeightFile`."""
        for file in (self.file, *self._others.values()):
            file.close()


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

    def products(self, files: Sequence[Any]) -> Mapping[str, str]:
        return files[0].products() if files else {}

    def left_behind(self, files: Sequence[Any], destination: Path, folder: bool) -> str:
        turned = [one for file in files for one in file.described() if one.layout and axis_of(one.layout) == -2]
        more = f", {len(turned)} of them transposed, with their outputs first" if turned else ""
        return f"the graph of the ONNX model is left out: its tensors alone are converted{more}"

    def writer(self, path: Path, output: Output) -> tuple[PlannedWriter, list[str]]:
        require("onnx", "onnx")
        return _writer(path, output)


ONNX = _Onnx()


def _writer(path: Path, output: Output) -> tuple[PlannedWriter, list[str]]:
    """Lays out the message: the model without tensors, then each of them, whose bytes are a span of the file. Gives
    notes, too."""
    from onnx import ModelProto, TensorProto

    from breccia.checkpoint.files import disk
    from breccia.checkpoint.files.planned_file import PlannedWriter

    source = output.source.files[0]
    source = source if isinstance(source, OnnxFile) else None
    model, notes = _model(output, source)
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
    return Writer(path, begin, moved, size, resume=True), notes


def _is_kept(found: Found, stored: Mapping[str, Any], output: Output) -> bool:
    """Whether a tensor that nodes make of others is copied with them."""
    return found.format == NAME and found.name not in output.metadata and found.name not in stored


def _same(output: Output, source: OnnxFile) -> set[str]:
    """Initializers that are copied as they are, whatever their type."""
    return {
        name
        for found, stored in output.tensors
        for name, spec in stored.items()
        if name in source.entries
        and (_is_kept(found, stored, output) or (found.format == "plain" and source.entries[name][1:3] == spec))
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


def _model(output: Output, source: OnnxFile | None) -> tuple[Any, list[str]]:
    """The model without its tensors, and notes on what of it changes."""
    from onnx import GraphProto, ModelProto, OperatorSetIdProto

    model = ModelProto()
    nodes, opset, weights = _made(output, source, model.graph)
    if source is None:
        model.producer_name = "breccia"
        model.opset_import.append(OperatorSetIdProto(domain="", version=opset))
        model.graph.MergeFrom(GraphProto(name=output.source.path.stem or "weights", node=nodes))
        return model, raised(model, opset, {}, output.source.path)
    model.CopyFrom(source.proto)
    notes = raised(model, opset, {name: (source.types[name], dims) for name, dims in source.dims.items()}, source.path)
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
    model.graph.node.extend([*nodes, *without_clips(others, weights)])
    return model, notes


def _made(output: Output, source: OnnxFile | None, graph: Any) -> tuple[list[Any], int, dict[str, int]]:
    """The nodes that make tensors of what is stored, the opset that they need, and the types of what integers are made
    into, by the graph's names. Without a source what is made is the outputs of the graph."""
    from onnx import TensorProto, helper

    types = {name: kind for name, (dtype, _) in output.plan.items() if (kind := _TYPES.get(dtype))}
    nodes, opset, weights = [], LEAST if source is None else 0, {}
    for found, stored in output.tensors:
        name = found.name
        result = name if source is None else source.output_of(name)
        kind = "FLOAT" if source is None else source.type_of(name)
        kind = kind if kind in FLOATS else "FLOAT"
        to = TensorProto.DataType.Value(kind)
        if name in output.metadata:
            said = json.loads(output.metadata[name])
            made = _nodes(name, result, kind, said, types)
            inputs = [types[one] for one in said["parts"].values()]
            opset = max(opset, *(needed(inputs, attributes(node)) for node in made))
            if "INT" in types[said["parts"]["codes"]]:
                weights[result] = to
            nodes += made
            if source is None:
                graph.output.append(helper.make_tensor_value_info(result, TensorProto.FLOAT, found.shape))
        elif source is not None and name in stored and _is_cast(name, output, source):
            nodes.append(helper.make_node("Cast", [f"{name}_stored"], [result], to=to))
        elif source is None and name in types:
            to = TensorProto.DataType.Value(types[name])
            graph.output.append(helper.make_tensor_value_info(result, to, stored[name][1]))
    return nodes, opset, weights


def _nodes(name: str, result: str, kind: str, said: Mapping[str, Any], types: Mapping[str, str]) -> list[Any]:
    """The nodes that make a tensor of its parts, of which types are given by name."""
    from onnx import TensorProto, helper

    parts, nodes = said["parts"], []
    scale, to = parts["scale"], TensorProto.DataType.Value(kind)
    if "global_scale" in parts:
        nodes.append(helper.make_node("DequantizeLinear", [scale, parts["global_scale"]], [f"{scale}_made"]))
        scale = f"{scale}_made"
    inputs = [parts["codes"], scale, *([parts["zero_point"]] if "zero_point" in parts else [])]
    more = {"axis": said["axis"]}
    if said["block_size"]:
        more["block_size"] = said["block_size"]
    if kind != ("FLOAT" if "global_scale" in parts else types[scale]):
        more["output_dtype"] = to
    made = f"{result}_turned" if said["swap"] else result
    nodes.append(helper.make_node("DequantizeLinear", inputs, [made], f"{name}_DequantizeLinear", **more))
    if said["swap"]:
        nodes.append(helper.make_node("Transpose", [made], [result], f"{name}_Transpose", perm=[1, 0]))
    return nodes
