# SPDX-License-Identifier: Apache-2.0
"""What the rest of the package asks a format, and the list of those that answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from breccia.bridges.common import Array
from breccia.bridges.contract import Kind, Made, Place, Sample
from breccia.bridges.file_kinds import Container
from breccia.bridges.outside import OutsideTensor
from breccia.bridges.parts import Found, Part
from breccia.bridges.readers import Readers
from breccia.bridges.written import InputScale, Written
from breccia.recipes import ScalingRecipe
from breccia.scaled_tensor import ScaledTensor
from breccia.schemes.value import Activations, Unsaid

__all__ = ["Bridge"]


class Bridge(Protocol):
    """What the rest of the package asks a format. `FileFormat` answers each question with the usual answer."""

    @property
    def name(self) -> str:
        """The format's name on the command line."""

    @property
    def peer(self) -> str | None:
        """The module that the functions for live objects import; None where there is none."""

    @property
    def extra(self) -> str:
        """The extra that installs the peer, "" where there is none."""

    @property
    def recipes(self) -> Mapping[str, ScalingRecipe]:
        """What ``--to NAME:KEY`` writes, by key; the first is what ``--to NAME`` quantizes to."""

    @property
    def recipes_with_inputs(self) -> Mapping[str, ScalingRecipe]:
        """What ``--to NAME:KEY`` writes of layers with a scale of their inputs, where that is not `recipes`'."""

    @property
    def kinds(self) -> Mapping[str, Kind]:
        """What else ``--to NAME:KEY`` writes, by key."""

    @property
    def anchors(self) -> tuple[str, ...]:
        """Ends of the stored names that `find` is asked about."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Patterns of names of stored tensors that only say that a file is of this format, which conversions leave
        out."""

    @property
    def writes(self) -> bool:
        """Whether `stored` can write the format."""

    @property
    def opens_in(self) -> tuple[str, ...]:
        """Programs that open what is written, the most usual first; "PROGRAM with LIBRARY" where it needs one."""

    @property
    def needs(self) -> str:
        """What else they need, in words; "" where nothing."""

    @property
    def calibrated(self) -> bool:
        """Whether files of the format are mostly made by data, which rounding to the nearest is not."""

    @property
    def container(self) -> Container:
        """The kind of file that holds the format's tensors."""

    @property
    def input_scales(self) -> bool:
        """Whether scales of activations (``input_scale``) are written beside the weights."""

    @property
    def output_scales(self) -> bool:
        """Whether a source of the format that has static scales of a layer's outputs (``output_scale``) keeps them."""

    def input_scale(self, recipe: ScalingRecipe, said: Mapping[str, Any]) -> InputScale | None:
        """How the scale of a layer's inputs is stored beside a weight.

        Args:
            recipe: of the weight.
            said: the source's ``quantization_config``; empty for what is written.

        Returns:
            None where there is none, or nothing says what it means.
        """

    def inputs_beside(self, found: Found, names: Collection[str]) -> Activations | Unsaid | None:
        """How the inputs of a layer are quantized, where not config.json but what is stored beside the weight says it.

        Args:
            found: the layer's weight, as `find` or `find_all` gave it.
            names: of all stored tensors.

        Returns:
            None where they stay in high precision; `UNSAID` where config.json says it, or nothing does.
        """

    def inputs_written(self, recipe: ScalingRecipe, inputs: Activations | None) -> Activations | Unsaid | None:
        """What `inputs_beside` finds in what is written.

        Args:
            recipe: of the weight.
            inputs: how those of its layer are to be quantized, with a static scale that is written, if it takes one.

        Returns:
            ``inputs`` where the format can say it.
        """

    @property
    def cache_scales(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Where the scales of an FP8 KV cache are written, of keys ("k") and of values ("v"): their names with ``{}``
        for the layer's, and shapes; empty where there is no place for them."""

    @property
    def readers(self) -> Readers:
        """What the programs that load the format know."""

    @property
    def row_axis(self) -> int | None:
        """The axis of stored tensors along which a matrix's rows lie: 0 or -1; None where there is none, or where what
        is stored for some rows is not what would be stored for these rows alone. With 0, a batch's matrices lie there,
        too."""

    @property
    def shape_role(self) -> str:
        """The role whose numbers are the logical shape; "" where there is none."""

    def reshaped(self, found: Found, shape: tuple[int, ...]) -> Found:
        """The description of some of a tensor's rows.

        Args:
            found: the tensor.
            shape: of these rows.

        Returns:
            What `open` is called with, and their stored parts.
        """

    @property
    def sample(self) -> Sample:
        """A tensor to try the format with."""

    @property
    def beside(self) -> str:
        """The file beside config.json that says of quantization what `said_beside` reads; "" where there is none."""

    def said_beside(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """The ``quantization_config`` that the file `beside` stands for.

        Args:
            said: the file's JSON object.

        Returns:
            An object as config.json has it under ``quantization_config``.
        """

    @property
    def methods(self) -> tuple[str, ...]:
        """The ``quant_method`` of config.json that names the format, or several."""

    @property
    def claims(self) -> Callable[[Mapping[str, Any]], int] | None:
        """Says how much of a checkpoint is this format's, which settles who is asked first to `find` a tensor: called
        with the context of `find`. `NAMED` where config.json names the format, `NO` where it is not to be asked, else
        `LIKELY`, or more where it tells its own tensors from another's that look alike. Where two that claim as much
        find a tensor, none reads it. None: `NAMED` by one of its `methods`, else `LIKELY`."""

    def find(self, name: str, entries: Mapping[str, Any], context: Mapping[str, Any]) -> Found | None:
        """The logical tensor that a stored one belongs to, known from headers alone; None where it is of another
        format.

        Args:
            name: of the stored tensor; it ends with one of `anchors`.
            entries: all stored tensors by name, with ``name``, ``dtype`` and ``shape`` as headers say them.
            context: what config.json says: "quantization_config", of which "quant_method" is the method, "" where it
                names none, and "quantization"; the whole of it is "config".

        Returns:
            The tensor with its shape and recipe.

        Raises:
            ValueError: the tensor is of this format and does not fit.
        """

    @property
    def find_all(self) -> Callable[[Mapping[str, Any], Mapping[str, str]], list[Found]] | None:
        """Finds the logical tensors that a header's metadata describes: called with all stored tensors by name, see
        `find`, and the header's strings; gives none where these are of other formats, and raises ValueError where they
        are the format's but not of its form. None where metadata describes no tensor of the format."""

    def refine(self, found: Found, array: Callable[[str], Array]) -> Found:
        """``found`` with what only small stored tensors tell; ``array`` reads one by its name.

        Args:
            found: the tensor, as `find` or `find_all` gave it.
            array: reads a stored tensor by its name.

        Returns:
            ``found`` itself where there is nothing to add.

        Raises:
            ValueError: they say what does not fit.
        """

    def open(self, parts: Mapping[str, Array], found: Found) -> Made:
        """A logical tensor of its stored ones, by role: values without a ScaledTensor form are an OutsideTensor or a
        float array.

        Args:
            parts: stored arrays by role, as typed by the header; views of a file that must not be written to.
            found: the tensor, as `find` or `find_all` gave it.

        Returns:
            A ScaledTensor in NumPy where the values have that form.

        Raises:
            ValueError, TypeError: they do not fit.
        """

    def keeps(self, found: Found) -> bool:
        """Whether a tensor of this format that has no recipe is written as it is stored where none is asked for.

        Args:
            found: the tensor, as `refine` gives it.

        Returns:
            True where its stored bytes are copied.
        """

    def carries(self, recipe: ScalingRecipe) -> bool:
        """Whether the format holds a recipe's bytes as they are.

        Args:
            recipe: of the tensor to write.

        Returns:
            True where a repack loses nothing.
        """

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the format has a place for a quantized weight of that name and shape.

        Args:
            name: of the logical tensor.
            shape: logical.

        Returns:
            False where the tensor stays as it is.
        """

    def why_not(self, name: str) -> str:
        """Why a weight must not be quantized though the format could hold it; "" where it may.

        Args:
            name: of the logical tensor.

        Returns:
            A reason for the report, in words.
        """

    def model_knows(self, recipe: ScalingRecipe, model: Mapping[str, Any]) -> bool:
        """Whether the program of a model, known by its config.json, reads a recipe in this format.

        Args:
            recipe: of the tensor to write.
            model: config.json.

        Returns:
            False where the model's program would not load it.
        """

    def stored(
        self, name: str, scaled: ScaledTensor | OutsideTensor, place: Place
    ) -> tuple[dict[str, Part], dict[str, str]]:
        """The stored tensors of a logical one by full name, and its entries in the header's metadata.

        Args:
            name: of the logical tensor.
            scaled: the tensor, or one of the same form whose memory is never touched (in planning).
            place: where it goes.

        Returns:
            Full name → `Part`, and entries of the metadata.

        Raises:
            ValueError: the format has no place for such a tensor.
        """

    def plain_metadata(self, name: str) -> dict[str, str]:
        """The header's entries for a tensor that stays plain.

        Args:
            name: of the tensor.

        Returns:
            Key → text.
        """

    def header(
        self, names: Sequence[str], recipes: Mapping[str, ScalingRecipe], inputs: frozenset[str]
    ) -> dict[str, str]:
        """The header's entries for a file of these logical tensors.

        Args:
            names: of the tensors.
            recipes: of the quantized modules, by their names.
            inputs: modules with a scale of their activations.

        Returns:
            Key → text.
        """

    def config(self, written: Written) -> dict[str, Any]:
        """What config.json says of a checkpoint written here; under the name of `beside` what that file says.

        Args:
            written: the checkpoint.

        Returns:
            Entries of config.json.

        Raises:
            ValueError: it cannot say it.
        """


registered: dict[str, Bridge] = {}


def all_of(built_in: Iterable[Bridge]) -> dict[str, Bridge]:
    """Those that the package has and those that were added, by name."""
    return {bridge.name: bridge for bridge in (*built_in, *registered.values())}
