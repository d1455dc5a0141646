"""What a job file may name under ``inference.engine``: the engines that are installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, GetJsonSchemaHandler
from pydantic_core import CoreSchema

from beam_inference.config.devices import DeviceKind, titles
from beam_inference.config.fields import Json
from beam_inference.config.plugins import list_plugins, load_plugin, load_usable
from beam_inference.errors import ConfigError

if TYPE_CHECKING:
    from beam_inference.config.inference import Inference
    from beam_inference.config.network import Network

CHOOSE = ("auto", "fastest")
"""Words for an engine that the first launch chooses."""

NetworkKind = Literal["module", "torchscript", "export", "function"]
"""What a network is: three forms of PyTorch's, or a function of NumPy arrays."""

Precision = Literal["float32", "tf32", "bfloat16", "float16", "int8"]
MemoryFormat = Literal["contiguous", "channels_last"]


def make_anew(make: Callable[[], bytes]) -> bytes:
    """Return what a function makes: the default of :attr:`LoadRequest.keep`."""
    return make()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """What an engine is to load.

    Attributes:
        network: a network of PyTorch in evaluation mode, on its device; or a function of NumPy
            arrays; or the local path of a file with one of the engine's suffixes.
        kind: what the network is; "module" for a file.
        batch_shape: shape of the job's batches, (N, C, Z, Y, X), or (N, C, Y, X) if ``model.dims``
            is 2; of one patch, with ``quantized``.
        device: the device as PyTorch names it, such as "cpu" or "cuda:0".
        weights: the local path of ``model.weights``, for a file; None if the job names none.
        model: the job's section ``model``.
        inference: the job's section ``inference``, with nothing left to choose.
        keep: returns what a function makes of the network, or what it made in an earlier process
            of the same files, settings, libraries and machine: for conversions that take long.
        quantized: what :attr:`Engine.quantize` has made of the network at the job's first launch,
            to be run in its place; None unless the precision is int8.
    """

    network: Any
    kind: NetworkKind
    batch_shape: tuple[int, ...]
    device: str
    weights: Path | None
    model: Network
    inference: Inference
    keep: Callable[[Callable[[], bytes]], bytes] = make_anew
    quantized: bytes | None = None

    @property
    def threads(self) -> int:
        """CPU threads that the network may use."""
        return self.inference.threads or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What runs a network.

    An engine is installed by an entry point of the group ``beam_inference.engines`` with the
    engine's name. The module that it lies in is imported when a job names the engine, or when
    ``auto`` looks for one: import large libraries in :attr:`load`, not on top of that module.

    Attributes:
        name: the word that job files use for it.
        package: the installed distribution that does the work; its version is in the job's
            fingerprint. An engine whose package is absent is not chosen.
        load: returns a network's forward pass, which maps float32 arrays of the request's
            ``batch_shape`` to float32 arrays (N, C, …). The next call may overwrite what a call
            returned. It raises :class:`beam_inference.errors.EngineError` where it cannot run the
            network.
        install: how to install the package.
        arrays: the kind of array that the forward pass takes and returns: tensors of PyTorch on the
            request's device, or NumPy arrays.
        networks: what it runs of what a factory or a file gives: networks of PyTorch, functions of
            NumPy arrays, or nothing but its own files.
        suffixes: of files that the engine reads itself, such as ``.onnx``.
        devices: kinds of ``inference.device`` that it runs on.
        precisions: values of ``inference.precision`` that it computes in.
        memory_formats: values of ``inference.memory_format`` that it can have.
        keeps_memory: whether it has an allocator of its own, which keeps what a network took.
        has_fixed_shape: whether a forward pass serves batches of one shape only; for another shape
            the network is loaded anew.
        auto_rank: place among the engines that ``auto`` tries, the lowest first; None if ``auto``
            does not choose it for networks of PyTorch.
        quantize: makes a network of integers of the request's, whose batches have one patch, by
            what it computes of some float32 NumPy arrays of that ``batch_shape``: the content of
            :attr:`LoadRequest.quantized`. None where ``precisions`` is without int8.
        joins_heads: whether, of a file with one of its suffixes that has several outputs, it runs
            those that ``model.heads`` names, and joins them as channels.
    """

    name: str
    package: str
    load: Callable[[LoadRequest], Callable[[Any], Any]]
    install: str
    arrays: Literal["torch", "numpy"] = "torch"
    networks: Literal["torch", "functions", "none"] = "torch"
    suffixes: tuple[str, ...] = ()
    devices: tuple[DeviceKind, ...] = ("cpu",)
    precisions: tuple[Precision, ...] = ("float32",)
    memory_formats: tuple[MemoryFormat, ...] = ("contiguous",)
    keeps_memory: bool = False
    has_fixed_shape: bool = True
    auto_rank: int | None = None
    quantize: Callable[[LoadRequest, Sequence[Any]], bytes] | None = None
    joins_heads: bool = False

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        if ("int8" in self.precisions) != (self.quantize is not None):
            raise ValueError(f"engine {self.name}: precision int8 is what quantize is for")
        if self.arrays == "numpy" and self.devices != ("cpu",):
            raise ValueError(f"engine {self.name}: NumPy arrays are on the device cpu only")

    @property
    def version(self) -> str | None:
        """The version of the engine's package; None if it is not installed."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return None

    @property
    def limits(self) -> str:
        """Devices and precisions in words, such as "on the CPU in float32"."""
        return f"on {titles(self.devices)} in {' or '.join(self.precisions)}"


def get_engine(name: str) -> Engine:
    """Get the installed engine of a name; its module is imported, its package is not.

    Raises:
        ConfigError: there is none, or what is installed under this name is no engine.
    """
    engine = load_plugin("engines", name)
    if not isinstance(engine, Engine) or engine.name != name:
        raise ConfigError(
            f"engine {name} is installed as {list_plugins('engines')[name].object}, which is not a "
            f"beam_inference.config.engines.Engine of the name {name}"
        )
    return engine


def list_engines() -> list[Engine]:
    """List the installed engines in alphabetical order; the packages of some may be absent.

    A broken engine is left out with a warning.
    """
    return list(load_usable("engines", get_engine).values())


def _check_name(name: str) -> str:
    return name if name in CHOOSE else _check_definite_name(name)


def _check_definite_name(name: str) -> str:
    if name not in list_plugins("engines"):
        raise ValueError(
            f"{name} is not among {', '.join(CHOOSE)} and the installed engines: "
            f"{', '.join(list_plugins('engines'))}. Install the package that provides it, here and "
            "on the workers"
        )
    return name


class _InstalledNames:
    """Lists the installed engines in a JSON schema."""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> Json:
        return {**handler(schema), "enum": [*CHOOSE, *list_plugins("engines")]}


EngineName = Annotated[str, AfterValidator(_check_name), _InstalledNames()]
"""An engine, or a word for one that the first launch chooses."""

DefiniteEngineName = Annotated[str, AfterValidator(_check_definite_name)]
"""An engine."""
