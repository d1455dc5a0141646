"""What the description of a bioimage.io model says, formats 0.4 and 0.5, read as data alone.

The library ``bioimageio.spec`` is not used: reading a description through it fetches what the
description names on the internet, and its release 0.5.12 brings 30 packages and fails with current
pydantic. What the keys mean was read there, and in ``bioimageio.core`` 0.11.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from importlib.resources.abc import Traversable
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    FiniteFloat,
    NonNegativeFloat,
    field_validator,
    model_validator,
)

from beam_inference.config.fields import Json
from beam_inference.errors import ModelContractError
from beam_inference.foreign_text import shorten_text, shorten_value
from beam_inference.models.package_files import ForeignModel, Length, parse_foreign, read_yaml

_TOOL = "bioimage.io"
_NAMES = ("bioimageio.yaml", "rdf.yaml", "model.yaml")
"""Names of descriptions; others may end in a dot and such a name. The first found counts."""

_AXES_04 = {"b": "batch", "i": "index", "t": "time", "c": "channel"}
_AXES_05 = {**_AXES_04, "batch": "batch", "channel": "channel", "time": "time", "index": "index"}

_FARTHEST = 1 << 20

Extent = Annotated[int, Field(gt=0, le=1 << 20)]


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a tensor.

    Attributes:
        name: batch, channel, time, index, or of space z, y or x.
        least: the smallest size, in voxels; the only one if ``step`` is 0. Of an output's axis
            that follows one of the input's, what is added to that one's size times ``ratio``.
        step: by which sizes grow.
        ratio: an output's voxels for each of the input's; 0 where its size does not follow it.
        halo: voxels on each side that are not to be used.
        size: of a voxel, in ``unit``.
        unit: the word for it; None if none is stated.
    """

    name: str
    least: int
    step: int = 0
    ratio: Fraction = Fraction(0)
    halo: int = 0
    size: float = 1.0
    unit: str | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """A step of pre- or postprocessing.

    Attributes:
        name: what it does.
        values: its arguments.
    """

    name: str
    values: Json


@dataclass(frozen=True, slots=True)
class Tensor:
    """The input or the output of a model.

    Attributes:
        name: by which others refer to it.
        axes: in their order.
        operations: before or after the network, in their order.
        test_file: an example, a path in the package; None if there is none.
        test_sha256: hash of that file.
        padding: mode and value, beyond the image; None if it is left to the tool.
    """

    name: str
    axes: Sequence[Axis]
    operations: Sequence[Operation]
    test_file: str | None
    test_sha256: str | None
    padding: tuple[str, float] | None

    @property
    def channels(self) -> int:
        """How many channels it has; one without such an axis."""
        return next((axis.least for axis in self.axes if axis.name == "channel"), 1)

    def axis(self, name: str) -> Axis:
        """The axis of a name; there must be one."""
        return next(axis for axis in self.axes if axis.name == name)


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of a model in one form.

    Attributes:
        form: such as torchscript.
        source: a path in the package, or a URL.
        sha256: hash of the file.
        architecture: of a state dict, what makes the network.
    """

    form: str
    source: str
    sha256: str | None
    architecture: Architecture | None


@dataclass(frozen=True, slots=True)
class Architecture:
    """What makes a network.

    Attributes:
        source: a Python file in the package, or a URL; None if it is in a library.
        module: the library's module.
        name: of the class or function.
        arguments: by name.
        sha256: hash of the file.
    """

    source: str | None
    module: str | None
    name: str
    arguments: Json
    sha256: str | None


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far an output may be from its example.

    Attributes:
        absolute: difference that is allowed anywhere.
        relative: and this share of the example's value.
        mismatches: values in a million that may differ by more.
    """

    absolute: float
    relative: float
    mismatches: float


@dataclass(frozen=True, slots=True)
class Description:
    """What a package says about its model.

    Attributes:
        root: its folder.
        file: the description.
        name: of the model.
        version: of the description's format.
        facts: what a user may want to know, by name.
        input: the only input.
        output: the only output.
        weights: in all forms that are known here, the first preferred.
        other_forms: of weights that are not known here.
        tolerances: by form of the weights; the key is empty for all others.
    """

    root: Traversable
    file: Traversable
    name: str
    version: str
    facts: Mapping[str, str]
    input: Tensor
    output: Tensor
    weights: Sequence[Weights]
    other_forms: Sequence[str]
    tolerances: Sequence[tuple[Sequence[str], Tolerance]]

    def tolerance_of(self, form: str) -> Tolerance:
        """How far the output may be from its example with weights of a form."""
        for forms, tolerance in self.tolerances:
            if not forms or form in forms:
                return tolerance
        return Tolerance(1e-3, 1e-3, 100)


def description_file(folder: Traversable) -> Traversable | None:
    """The file in a folder that describes a bioimage.io model; None if there is none."""
    try:
        names = sorted(each.name for each in folder.iterdir() if each.name.endswith(_NAMES))
    except OSError:  # it may not be read
        return None
    for ending in _NAMES:
        fitting = [name for name in names if name == ending or name.endswith(f".{ending}")]
        if fitting:
            return folder / (ending if ending in fitting else fitting[0])
    return None


FORMS = ("torchscript", "onnx", "pytorch_state_dict")
"""Forms of weights that are known here, the preferred first."""


def read_description(root: Traversable) -> Description:
    """Read the description in a package's folder.

    Raises:
        ModelContractError: it is damaged, or of a format or a kind that is not known here.
    """
    file = description_file(root)
    if file is None:
        raise ModelContractError(f"{root} has no {', '.join(_NAMES)}")
    values = read_yaml(file)
    header = parse_foreign(values, _Header, file, _TOOL)
    if header.type != "model":
        raise ModelContractError(f"{file} describes a {shorten_text(header.type)}, not a model")
    major = ".".join(header.format_version.split(".")[:2])
    if major == "0.5":
        read = _read_05
    elif major == "0.4":
        read = _read_04
    else:
        raise ModelContractError(
            f"{file}: its format_version is {shorten_text(header.format_version)}; 0.4 and 0.5 are "
            "read here"
        )
    tensors = read(values, file)
    names = [tensor.name for tensor in (*tensors.inputs, *tensors.outputs)]
    if len(set(names)) < len(names):
        raise ModelContractError(f"{file}: two tensors have one name: {', '.join(names)}")
    if len(tensors.inputs) != 1 or len(tensors.outputs) != 1:
        raise ModelContractError(
            f"{file}: the model has {len(tensors.inputs)} inputs and {len(tensors.outputs)} "
            f"outputs ({', '.join(names)}); models with one of each are run here"
        )
    input = tensors.inputs[0]
    output = _with_channels(tensors.outputs[0], input)
    _check_sizes(input, input.axes, file)
    _check_sizes(output, [axis for axis in output.axes if axis.name == "channel"], file)
    known = [_weights(header.weights[form], form, file) for form in FORMS if form in header.weights]
    return Description(
        root,
        file,
        header.name,
        header.format_version,
        {
            "licence": header.license or "not stated",
            "format": f"bioimage.io {header.format_version}",
        },
        input,
        output,
        known,
        [form for form in header.weights if form not in FORMS],
        _tolerances(header.config, file),
    )


def _with_channels(output: Tensor, input: Tensor) -> Tensor:
    """An output whose channels are counted, where they follow the input's."""

    def count(axis: Axis) -> Axis:
        if axis.name != "channel" or not axis.ratio:
            return axis
        following = int(axis.ratio * input.channels)
        return replace(axis, least=axis.least + following, ratio=Fraction(0))

    return replace(output, axes=[count(axis) for axis in output.axes])


def _check_sizes(tensor: Tensor, axes: Sequence[Axis], file: Traversable) -> None:
    """Refuse axes whose sizes follow others, and leave nothing."""
    for axis in axes:
        if axis.least < 1:
            raise ModelContractError(
                f"{file}: by what its axis {shorten_text(axis.name)} follows, "
                f"{shorten_text(tensor.name)} has the size {axis.least} along it; expected 1 or "
                "more. Mend the offset or the scale."
            )


class _Header(ForeignModel):
    type: str
    format_version: str
    name: str
    license: str | None = None
    weights: dict[str, Json] = Field(min_length=1)
    config: Json = Field({})


@dataclass(frozen=True, slots=True)
class _Tensors:
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]


class _WithArguments(ForeignModel):
    @model_validator(mode="before")
    @classmethod
    def _rename(cls, values: Any) -> Any:
        """A field cannot have the name that these files give it."""
        return {**values, "arguments": values.get("kwargs")} if isinstance(values, dict) else values

    @field_validator("arguments", mode="before", check_fields=False)
    @classmethod
    def _fill_in(cls, arguments: Any) -> Any:
        return {} if arguments is None else arguments


class _Operation05(_WithArguments):
    id: str
    arguments: Json = Field({})


class _File(ForeignModel):
    source: str
    sha256: str | None = None


class _Axis05(ForeignModel):
    type: Literal["batch", "channel", "index", "time", "space"]
    id: str | None = None
    size: Extent | Json | None = None
    scale: Length = 1.0
    unit: str | None = None
    channel_names: list[str] = Field([])
    halo: Annotated[int, Field(ge=0, le=1 << 16)] = 0

    @property
    def name(self) -> str:
        """The name by which it is referred to."""
        default = "x" if self.type == "space" else self.type
        name = (self.id or default).lower()
        return _AXES_05.get(name, name)


class _Sized(ForeignModel):
    min: Extent
    step: Extent


class _Reference(ForeignModel):
    tensor_id: str
    axis_id: str
    offset: Annotated[int, Field(ge=-_FARTHEST, le=_FARTHEST)] = 0


class _Padding(ForeignModel):
    mode: Literal["constant", "edge", "reflect", "symmetric"] = "constant"
    value: FiniteFloat = 0.0


class _Data05(ForeignModel):
    type: str | None = None
    values: Any = None

    @property
    def dtype(self) -> str:
        """The dtype, or the one that the format means where none is stated."""
        return self.type or ("float32" if self.values is None else "uint8")


class _Tensor05(ForeignModel):
    id: str | None = None
    data: _Data05 | Annotated[list[_Data05], Field(min_length=1)] = _Data05()
    axes: Annotated[list[_Axis05], Field(min_length=1, max_length=8)]
    test_tensor: _File | None = None
    preprocessing: list[_Operation05] = Field([])
    postprocessing: list[_Operation05] = Field([])
    pad: _Padding | None = None

    def list_operations(self) -> list[Operation]:
        """The operations, and the dtype that the format has made of their values in the end.

        Before the first one it makes the same dtype of an image, which has it by itself.
        """
        stated = [
            Operation(each.id, each.arguments) for each in self.preprocessing + self.postprocessing
        ]
        if stated and stated[-1].name in ("ensure_dtype", "binarize"):
            return stated
        first = self.data[0] if isinstance(self.data, list) else self.data
        return [*stated, Operation("ensure_dtype", {"dtype": first.dtype})]


class _Model05(ForeignModel):
    inputs: list[_Tensor05]
    outputs: list[_Tensor05]


def _read_05(values: Json, file: Traversable) -> _Tensors:
    model = parse_foreign(values, _Model05, file, _TOOL)
    inputs = [_tensor_05(tensor, "input", {}, file) for tensor in model.inputs]
    axes = {(tensor.name, axis.name): axis for tensor in inputs for axis in tensor.axes}
    return _Tensors(inputs, [_tensor_05(each, "output", axes, file) for each in model.outputs])


def _tensor_05(
    tensor: _Tensor05, default: str, axes: Mapping[tuple[str, str], Axis], file: Traversable
) -> Tensor:
    name = tensor.id or default
    made: list[Axis] = []
    for axis in tensor.axes:
        known = {**axes, **{(name, each.name): each for each in made}}
        made.append(_axis_05(axis, known, is_output=default == "output", file=file))
    test = tensor.test_tensor
    return Tensor(
        name,
        made,
        tensor.list_operations(),
        None if test is None else test.source,
        None if test is None else test.sha256,
        None if tensor.pad is None else (tensor.pad.mode, tensor.pad.value),
    )


def _axis_05(
    axis: _Axis05, known: Mapping[tuple[str, str], Axis], *, is_output: bool, file: Traversable
) -> Axis:
    made = Axis(axis.name, 1, halo=axis.halo, size=axis.scale, unit=axis.unit)
    size = axis.size
    if axis.type == "channel":
        if not axis.channel_names:
            raise ModelContractError(
                f"{file}: an axis of channels has no channel_names; expected one for each channel"
            )
        return replace(made, least=len(axis.channel_names))
    if axis.type == "batch":
        return made
    if isinstance(size, int):
        return replace(made, least=size)
    if isinstance(size, dict) and "tensor_id" in size:
        return _referring_axis(made, size, known, is_output=is_output, file=file)
    if isinstance(size, dict) and "step" in size and not is_output:
        sized = parse_foreign(size, _Sized, file, _TOOL)
        return replace(made, least=sized.min, step=sized.step)
    raise ModelContractError(
        f"{file}: the size of axis {axis.name} is {shorten_value(size)}: expected a number, min "
        "and step, or tensor_id and axis_id; sizes that depend on data are not run here"
    )


def _referring_axis(
    axis: Axis,
    size: Json,
    known: Mapping[tuple[str, str], Axis],
    *,
    is_output: bool,
    file: Traversable,
) -> Axis:
    """An axis whose size follows that of another one."""
    reference = parse_foreign(size, _Reference, file, _TOOL)
    name = _AXES_05.get(reference.axis_id.lower(), reference.axis_id.lower())
    origin = known.get((reference.tensor_id, name))
    if origin is None:
        raise ModelContractError(
            f"{file}: the size of axis {axis.name} refers to axis {shorten_text(name)} of "
            f"{shorten_text(reference.tensor_id)}, which is not there"
        )
    ratio = (Fraction(origin.size) / Fraction(axis.size)).limit_denominator(64)
    if not is_output:  # it is as large as another axis of the image
        least = int(origin.least * ratio) + reference.offset
        return replace(axis, least=least, step=int(origin.step * ratio))
    if name != axis.name:
        raise ModelContractError(
            f"{file}: the output's axis {axis.name} follows the input's {name}: a network that "
            "swaps axes is not run here"
        )
    return replace(axis, least=reference.offset, ratio=ratio)


class _Operation04(_WithArguments):
    name: str
    arguments: Json = Field({})


class _Shape04(ForeignModel):
    min: list[Extent] = Field([])
    step: list[Annotated[int, Field(ge=0, le=1 << 20)]] = Field([])
    reference_tensor: str | None = None
    scale: list[Annotated[FiniteFloat, Field(ge=0, le=_FARTHEST)] | None] = Field([])
    offset: list[Annotated[FiniteFloat, Field(ge=-_FARTHEST, le=_FARTHEST)]] = Field([])


class _Tensor04(ForeignModel):
    name: str
    axes: Annotated[str, Field(min_length=1, max_length=8)]
    shape: list[Extent] | _Shape04
    halo: list[Annotated[int, Field(ge=0, le=1 << 16)]] = Field([])
    preprocessing: list[_Operation04] = Field([])
    postprocessing: list[_Operation04] = Field([])


class _Model04(ForeignModel):
    inputs: list[_Tensor04]
    outputs: list[_Tensor04]
    test_inputs: list[str] = Field([])
    test_outputs: list[str] = Field([])


def _read_04(values: Json, file: Traversable) -> _Tensors:
    model = parse_foreign(values, _Model04, file, _TOOL)
    return _Tensors(
        [
            _tensor_04(each, model.test_inputs[n : n + 1], file)
            for n, each in enumerate(model.inputs)
        ],
        [
            _tensor_04(each, model.test_outputs[n : n + 1], file)
            for n, each in enumerate(model.outputs)
        ],
    )


def _tensor_04(tensor: _Tensor04, tests: Sequence[str], file: Traversable) -> Tensor:
    shape = tensor.shape
    count = len(tensor.axes)
    halo = tensor.halo or [0] * count
    if isinstance(shape, list):
        shape = _Shape04(min=shape, step=[0] * len(shape))
    follows = shape.reference_tensor is not None
    lists = [shape.offset, shape.scale] if follows else [shape.min, shape.step]
    if any(len(each) != count for each in (halo, *lists)):
        raise ModelContractError(
            f"{file}: {shorten_text(tensor.name)} has the axes {shorten_text(tensor.axes)}, but "
            "its shape or halo has another number of axes"
        )
    if follows:
        sizes = [
            (round(2 * offset), 0, Fraction(scale or 0).limit_denominator(64))
            for scale, offset in zip(shape.scale, shape.offset, strict=True)
        ]
    else:
        sizes = [
            (least, step, Fraction(0)) for least, step in zip(shape.min, shape.step, strict=True)
        ]
    axes = [
        Axis(_AXES_04.get(letter, letter), least, step, ratio, margin)
        for letter, (least, step, ratio), margin in zip(tensor.axes, sizes, halo, strict=True)
    ]
    operations = [
        Operation(each.name, each.arguments)
        for each in tensor.preprocessing + tensor.postprocessing
    ]
    return Tensor(tensor.name, axes, operations, next(iter(tests), None), None, None)


class _Architecture05(_WithArguments):
    source: str | None = None
    import_from: str | None = None
    callable: str
    arguments: Json = Field({})
    sha256: str | None = None


class _Weights(_WithArguments):
    source: str
    sha256: str | None = None
    architecture: Json | str | None = None
    architecture_sha256: str | None = None
    arguments: Json = Field({})


def _weights(values: Json, form: str, file: Traversable) -> Weights:
    entry = parse_foreign(values, _Weights, file, _TOOL)
    return Weights(form, entry.source, entry.sha256, _architecture(entry, file))


def _architecture(entry: _Weights, file: Traversable) -> Architecture | None:
    stated = entry.architecture
    if stated is None:
        return None
    if isinstance(stated, dict):
        made = parse_foreign(stated, _Architecture05, file, _TOOL)
        return Architecture(
            made.source, made.import_from, made.callable, made.arguments, made.sha256
        )
    source, colon, name = stated.rpartition(":")
    if colon:
        return Architecture(source, None, name, entry.arguments, entry.architecture_sha256)
    module, _, name = stated.rpartition(".")
    return Architecture(None, module, name, entry.arguments, None)


class _Tolerance(ForeignModel):
    absolute_tolerance: NonNegativeFloat = 1e-3
    relative_tolerance: NonNegativeFloat = 1e-3
    mismatched_elements_per_million: NonNegativeFloat = 100
    weights_formats: list[str] = Field([])


class _Tolerances(ForeignModel):
    reproducibility_tolerance: list[_Tolerance] = Field([])


def _tolerances(config: Json, file: Traversable) -> list[tuple[Sequence[str], Tolerance]]:
    own: Any = config.get("bioimageio", {})
    stated = parse_foreign(own, _Tolerances, file, _TOOL).reproducibility_tolerance
    return [
        (
            each.weights_formats,
            Tolerance(
                each.absolute_tolerance,
                each.relative_tolerance,
                each.mismatched_elements_per_million,
            ),
        )
        for each in stated
    ]
