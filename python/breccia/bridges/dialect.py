# SPDX-License-Identifier: Apache-2.0
"""The words of a format: what its config.json says of a quantized model, read and written in one place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from breccia.bridges.written import Written
    from breccia.schemes.dialects.common import Said
    from breccia.schemes.value import ModelScheme

__all__ = ["PLACES", "Dialect"]

PLACES = ("quantization_config", "compression_config", "quantization")  # entries of config.json that formats share


def _nothing(*_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Dialect:
    """What a format says beside its tensors.

    Attributes:
        methods: further values of ``quant_method`` whose words are these, beside those of the format.
        read: (what a checkpoint says) → its scheme, ValueError where that is not of the format's form. None: the
            weights as they are stored, with nothing said of their inputs.
        write: (the checkpoint as it is written) → entries of config.json, and under the name of `file` what that file
            says; ValueError where it cannot say it.
        owns: entries of config.json that are the format's, beside those of `PLACES`: no output of another format keeps
            them.
        file: the file beside config.json that says of quantization what `of_file` reads, without ``.json``; "" where
            there is none.
        of_file: (that file's JSON object) → the object that config.json has under ``quantization_config``.
        words: the keys of ``quantization_config``, at any depth, whose meaning is known, with blanks between; those
            included that say how the model was made alone. What others say is named in the report. "": all are known.
        names: of these, those whose own keys are names or patterns of modules; "" where ``quantization_config`` itself
            has such.
        closed: of these, those inside of which nothing says what a tensor is.
    """

    methods: tuple[str, ...] = ()
    read: Callable[[Said], ModelScheme] | None = None
    write: Callable[[Written], dict[str, Any]] = _nothing
    owns: tuple[str, ...] = ()
    file: str = ""
    of_file: Callable[[Mapping[str, Any]], dict[str, Any]] = _nothing
    words: str = ""
    names: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()

    @functools.cached_property
    def _words(self) -> frozenset[str]:
        return frozenset(self.words.split())

    def keys(self, said: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, Any, bool]]:
        """Each key of ``quantization_config``, those of objects with dots between them.

        Args:
            said: the object, or one inside of it.
            inside: the key that this one stands under.

        Yields:
            The key, its value, and whether its meaning is known. What is null or empty says nothing.
        """
        named = inside.rpartition(".")[2] in self.names
        for key, value in said.items():
            path = f"{inside}.{key}" if inside else str(key)
            known = not self.words or key in self._words or (named and (inside or isinstance(value, (dict, bool))))
            if isinstance(value, Mapping) and value and known and key not in self.closed:
                yield from self.keys(value, path)
            else:
                yield path, value, bool(known or not value)
