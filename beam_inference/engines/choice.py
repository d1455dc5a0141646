"""Which engines a job may be run by, and what of an engine determines the bits it computes."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

from beam_inference.config.devices import kind_of
from beam_inference.config.engines import Engine, get_engine, list_engines
from beam_inference.config.factories import factory_parts
from beam_inference.config.inference import Inference
from beam_inference.config.network import Network, network_keys
from beam_inference.engines import identity
from beam_inference.errors import ConfigError, EngineError
from beam_inference.models.loading import gives_function, loader_of, suffix_of


def engine_description(model: Network, inference: Inference) -> dict[str, str]:
    """The settings of an engine that determine bits; ``inference.engine`` must be definite.

    Returns:
        Engine, version, device and precision; threads on a CPU; and whatever else is not as usual.

    Raises:
        EngineError: the engine is not installed.
    """
    engine = get_engine(inference.engine)
    version = engine.version
    if version is None:
        raise EngineError(
            f"inference.engine: {engine.name} is not installed here: {engine.install}, here and on "
            "the workers"
        )
    description = {
        "engine": engine.name,
        "engine_version": version,
        "device": kind_of(inference.device),
        "precision": inference.precision,
    }
    if inference.memory_format != "contiguous":
        description["memory_format"] = inference.memory_format
    if inference.device == "cpu":
        description["threads"] = str(inference.threads or 1)
    if inference.members > 1:
        description["partition"] = ",".join(map(str, inference.partition))
    if inference.precision == "int8":
        description["patches_at_once"] = "1"  # one that was given several could mix them
    is_converted = engine.networks == "torch" and suffix_of(model) not in engine.suffixes
    if is_converted and engine.package != "torch":
        description["converted_from"] = f"torch {metadata.version('torch')}"
    return description


def describe_engine(model: Network, inference: Inference) -> dict[str, str]:
    """Describe a predictor on a worker that has this process's libraries; nothing is loaded.

    Raises:
        ConfigError: workers could not tell whether they have the same network.
        EngineError: the engine is not installed.
    """
    if model.path == "identity":
        return dict(identity.DESCRIPTION)
    is_torch = get_engine(inference.engine).networks == "torch"
    for member, key in zip(model.members, network_keys(model), strict=True):
        if not is_torch or not factory_parts(member.path) or member.weights is not None:
            continue
        raise ConfigError(
            f"{key}.path {member.path} has no weights beside it: workers elsewhere could not "
            "tell whether they have the same network. Save its weights to a file, and name that "
            f"as {key}.weights."
        )
    return engine_description(model, inference)


def engines_to_try(model: Network, inference: Inference) -> Sequence[str]:
    """Names of the engines that ``inference.engine`` may mean, the best first.

    ``inference.device`` must be definite.

    Raises:
        EngineError: none of those installed runs a file of this kind.
    """
    readers = _readers(model)
    if readers:
        names = [engine.name for engine in readers]
        if inference.engine not in ("auto", *names):
            raise EngineError(
                f"{_name_read_file(model)} is run by {' or '.join(names)}, not by "
                f"inference.engine: {inference.engine}"
            )
        fitting = _installed_readers(model, inference, readers)
        return [e.name for e in fitting] if inference.engine == "auto" else [inference.engine]
    if inference.engine != "auto":
        return [inference.engine]
    if model.path == "identity":
        return ["torch"]
    engines = _engines_for(model, inference)
    return [e.name for e in engines if e.auto_rank is not None or e.networks == "functions"]


def engines_to_measure(model: Network, inference: Inference) -> list[dict[str, str]]:
    """The choices of ``inference.engine: fastest``, as keys of ``inference``.

    ``inference.device`` must be definite.

    Raises:
        EngineError: none of those installed runs a file of this kind.
    """
    if model.path == "identity":
        return [{"engine": "torch"}]
    readers = _readers(model)
    if readers:
        installed = _installed_readers(model, inference, readers)
        return [{"engine": engine.name} for engine in installed]
    engines = _engines_for(model, inference)
    one_format = [engine for engine in engines if len(engine.memory_formats) == 1]
    others = [engine for engine in engines if len(engine.memory_formats) > 1]
    return [
        *({"engine": engine.name} for engine in one_format),
        *(
            {"engine": engine.name, "memory_format": memory_format}
            for engine in others
            for memory_format in engine.memory_formats
        ),
    ]


def is_installed(engine: Engine) -> bool:
    """Whether the package that does an engine's work is there."""
    return engine.version is not None


def keeps_memory(engine_name: str) -> bool:
    """Whether an engine has an allocator of its own, which keeps what a network took.

    It is False where the engine is not chosen yet, and for the network ``identity``.
    """
    return (
        engine_name not in ("auto", "fastest", "identity") and get_engine(engine_name).keeps_memory
    )


def runs_on_cpu_only(model: Network, inference: Inference) -> bool:
    """Whether the engine, or every engine that reads the network's file, runs on CPUs only."""
    if inference.engine not in ("auto", "fastest"):
        return get_engine(inference.engine).devices == ("cpu",)
    readers = _readers(model)
    return bool(readers) and all(engine.devices == ("cpu",) for engine in readers)


def _readers(model: Network) -> list[Engine]:
    """Engines that read the network's file themselves, the best first.

    In an ensemble, those that read all files of which any engine does.
    """
    of_files = [found for each in model.members if (found := _readers_of(each))]
    common = [{engine.name for engine in found} for found in of_files]
    return [
        engine for engine in (of_files or [[]])[0] if all(engine.name in each for each in common)
    ]


def _readers_of(model: Network) -> list[Engine]:
    suffix = suffix_of(model)
    if not suffix or factory_parts(model.path) or loader_of(model) is not None:
        return []
    return sorted((e for e in list_engines() if suffix in e.suffixes), key=_rank)


def _name_read_file(model: Network) -> str:
    """The key and path of the first file that engines read themselves."""
    keys = zip(network_keys(model), model.members, strict=True)
    return next(f"{key}.path {each.path}" for key, each in keys if _readers_of(each))


def _installed_readers(
    model: Network, inference: Inference, readers: Sequence[Engine]
) -> list[Engine]:
    fitting = [engine for engine in readers if _fits(engine, inference)]
    if not fitting:
        best = readers[0]
        to_write = []
        if kind_of(inference.device) not in best.devices:
            to_write.append(f"device: {best.devices[0]}")
        if inference.precision not in best.precisions:
            to_write.append(f"precision: {best.precisions[0]}")
        raise EngineError(
            f"{_name_read_file(model)} runs {best.limits} only: write {' and '.join(to_write)}"
        )
    installed = [engine for engine in fitting if is_installed(engine)]
    if not installed:
        raise EngineError(
            f"{_name_read_file(model)} is run by {' or '.join(each.name for each in fitting)}, "
            f"which is not installed: {fitting[0].install}"
        )
    return installed


def _engines_for(model: Network, inference: Inference) -> list[Engine]:
    """Installed engines that run what a factory or a file gives, the best first."""
    is_function = inference.device == "cpu" and gives_function(model)
    networks = "functions" if is_function else "torch"
    return sorted(
        (
            engine
            for engine in list_engines()
            if engine.networks == networks and _fits(engine, inference) and is_installed(engine)
        ),
        key=_rank,
    )


def _fits(engine: Engine, inference: Inference) -> bool:
    return kind_of(inference.device) in engine.devices and inference.precision in engine.precisions


def _rank(engine: Engine) -> tuple[bool, int, str]:
    return engine.auto_rank is None, engine.auto_rank or 0, engine.name
