# SPDX-License-Identifier: Apache-2.0
"""Tensors to and from files, in one word each: `save`, `load`, and `open` for one tensor at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from breccia import frameworks
from breccia.scaled_tensor import ScaledTensor

if TYPE_CHECKING:
    from breccia.checkpoint.reading.source import Unmarked
    from breccia.schemes import ModelScheme

__all__ = ["OpenCheckpoint", "load", "load_scheme", "save"]  # without `open`: import * would hide the built-in


def save(
    tensors: Mapping[str, Any],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write ScaledTensors and arrays to a safetensors file, which `load` reads: see `breccia.bridges.save_safetensors`.

    Args:
        tensors: name → ScaledTensor or array, as `load` gives them.
        path: the file; replaced if it is there.
        metadata: strings to add to the header.

    Raises:
        TypeError: a value is neither, or metadata is not strings.
        ValueError: a tensor is a transposed view, or two are to be stored under one name.

    Examples:
        >>> q = breccia.cast(np.ones((64, 256), np.float32), "nvfp4")
        >>> breccia.save({"up_proj": q}, "model.safetensors", metadata={"license": "apache-2.0"})
        >>> loaded = breccia.load("model.safetensors")["up_proj"]
        >>> loaded.recipe == q.recipe, np.array_equal(loaded.data, q.data)
        (True, True)
    """
    from breccia import bridges

    for key, text in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise TypeError(f"metadata must map strings to strings, got {key!r}: {text!r}")
    bridges.save_safetensors(tensors, path, metadata)


def load(path: str | os.PathLike[str], framework: str = "numpy", *, unmarked: Unmarked | None = None) -> dict[str, Any]:
    """Every tensor of a file or checkpoint, of any format breccia reads.

    Args:
        path: a safetensors file, a directory of them, or a GGUF file.
        framework: "numpy", "torch", "jax" or "mlx".
        unmarked: "comfyui" or "modelopt": whose order the block scales of a file have that does not say it.

    Returns:
        Name → ScaledTensor; arrays where the file has plain ones, and in NumPy what no ScaledTensor can say.

    Raises:
        ValueError: the checkpoint is not valid, or there is no such framework.
        FileNotFoundError: there is no such file.

    Examples:
        >>> w = np.ones((64, 256), np.float32)
        >>> breccia.save({"up_proj": breccia.cast(w, "nvfp4"), "norm": w[0]}, "model.safetensors")
        >>> {name: type(tensor).__name__ for name, tensor in breccia.load("model.safetensors").items()}
        {'norm': 'ndarray', 'up_proj': 'ScaledTensor'}
    """
    with open(path, framework, unmarked=unmarked) as checkpoint:
        return dict(checkpoint)


def load_scheme(path: str | os.PathLike[str]) -> ModelScheme:
    """What a quantized model is stored and computed in, layer by layer: its weights, inputs, outputs and KV cache.

    Args:
        path: a safetensors file, a directory of them, or a GGUF file.

    Returns:
        The `breccia.schemes.ModelScheme`, as the checkpoint's own format means it.

    Raises:
        ValueError: the checkpoint is not valid, or its configuration is not of its method's form.
        FileNotFoundError: there is no such file.
    """
    from breccia.checkpoint import Checkpoint

    with Checkpoint(path) as checkpoint:
        return checkpoint.scheme


def open(  # noqa: A001 (breccia.open)
    path: str | os.PathLike[str], framework: str = "numpy", *, progress: bool = False, unmarked: Unmarked | None = None
) -> OpenCheckpoint:
    """A checkpoint of any format breccia reads, as a mapping that reads a tensor when it is asked for.

    Args:
        path: a safetensors file, a directory of them, or a GGUF file.
        framework: "numpy", "torch", "jax" or "mlx".
        progress: draw a line on the terminal while the tensors are gone through.
        unmarked: "comfyui" or "modelopt": whose order the block scales of a file have that does not say it.

    Returns:
        Its iterator gives pairs, as in ``for name, tensor in breccia.open(path)``.

    Raises:
        ValueError: the checkpoint is not valid, or there is no such framework.
        FileNotFoundError: there is no such file.

    Examples:
        >>> w = np.ones((64, 256), np.float32)
        >>> breccia.save({"up_proj": breccia.cast(w, "nvfp4"), "norm": w[0]}, "model.safetensors")
        >>> with breccia.open("model.safetensors") as model:
        ...     print(list(model.keys()), model["up_proj"].shape)
        ['norm', 'up_proj'] (64, 256)
    """
    return OpenCheckpoint(path, framework, progress, unmarked)


class OpenCheckpoint:
    """What `open` returns. Use it in a ``with``, or let go of it: arrays keep the file's memory."""

    def __init__(
        self, path: str | os.PathLike[str], framework: str, progress: bool, unmarked: Unmarked | None = None
    ) -> None:
        from breccia.checkpoint import Checkpoint

        frameworks.named(framework)
        self._checkpoint = Checkpoint(path, unmarked=unmarked)
        self._found = self._checkpoint.found.by_name()
        self._framework, self._progress = framework, progress

    def keys(self) -> list[str]:
        """Names of the tensors, in the order of the files."""
        return list(self._found)

    def __getitem__(self, name: str) -> Any:
        if not isinstance(name, str):
            raise TypeError(f"name must be that of a tensor, a string, got {name!r}")
        if name not in self._found:
            from breccia.spelling import suggestion

            raise KeyError(f"{self._checkpoint.path} has no tensor {name!r}: {suggestion(name, self.keys())}")
        found = self._checkpoint.refined(self._found[name])
        tensor = self._checkpoint.load(found)
        if self._framework == "numpy":
            return tensor
        if isinstance(tensor, ScaledTensor):
            return tensor.to(self._framework)
        if hasattr(tensor, "scaled"):  # one thing more than a ScaledTensor can say: read in NumPy
            return tensor
        source: Any = frameworks.of(tensor)
        return frameworks.named(self._framework).from_dlpack(*source.to_dlpack(tensor))

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        from breccia.checkpoint.progress import Progress

        sizes = {name: self._checkpoint.nbytes(found) for name, found in self._found.items()}
        line = Progress(sum(sizes.values()), self._progress)
        for name, nbytes in sizes.items():
            yield name, self[name]
            line.add(nbytes)
        line.finish()

    def items(self) -> Iterator[tuple[str, Any]]:
        """The same pairs."""
        return iter(self)

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files; arrays that view them stay."""
        self._checkpoint.close()

    def __repr__(self) -> str:
        return f"breccia.open({str(self._checkpoint.path)!r}): {len(self)} tensors"
