"""What of this machine and its libraries determines how an engine does a network."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from importlib import metadata
from pathlib import Path

import beam_inference
from beam_inference.config.engines import list_engines
from beam_inference.config.fields import Json
from beam_inference.config.plugins import list_plugins
from beam_inference.environment import usable_cores, usable_memory

_PACKAGES = (
    "dynamic-network-architectures",
    "monai",
    "nncf",
    "numpy",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "openvino",
    "torch",
)
_VARIABLES = (
    "ATEN_",
    "CUBLAS_",
    "CUDA_",
    "CUDNN_",
    "DNNL_",
    "KMP_",
    "MKL_",
    "NVIDIA_",
    "OMP_",
    "ONEDNN_",
    "OPENVINO_",
    "OV_",
    "PYTORCH_",
    "TORCH",
)
"""How the names of variables begin that libraries of networks look at."""


def describe_surroundings() -> Json:
    """Describe libraries, processor, memory and settings, as JSON values.

    What one process found out about a network, or made of it, serves another one only where these
    are the same.
    """
    packages = {*_PACKAGES, *(engine.package for engine in list_engines())}
    plugins = [*list_plugins("engines").values(), *list_plugins("models").values()]
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in sorted(packages)},
        "plugins": [[each.object, each.distribution, each.version] for each in plugins],
        "source": _source_state(),
        "system": [platform.system(), platform.release(), platform.machine()],
        "processor": describe_processor(),
        "cores": usable_cores(),
        "memory": usable_memory(),
        "variables": _hash_of(
            *(item for item in sorted(os.environ.items()) if item[0].startswith(_VARIABLES))
        ),
    }


def describe_processor(file: Path = Path("/proc/cpuinfo")) -> Json:
    """Describe the model of the processor and a hash of its features, as far as the system tells.

    Args:
        file: where Linux tells.
    """
    first = file.read_text().partition("\n\n")[0] if file.is_file() else platform.processor()
    pairs = (line.partition(":") for line in first.splitlines())
    values = {name.strip(): value.strip() for name, _, value in pairs}
    # "microcode" decides which instructions are slow, and some features are there only by it
    kept = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "CPU part")
    features = values.get("flags") or values.get("Features") or first
    return {
        **{name: values[name] for name in kept if name in values},
        "features": _hash_of(features),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _source_state() -> str:
    """Hash of names, sizes and times of this package's files, which change more than its version.

    A version alone would not tell a developer's change of an engine.
    """
    folder = Path(beam_inference.__file__).parent
    files = sorted(folder.rglob("*.py"))
    stats = [file.stat() for file in files]
    states = zip(files, stats, strict=True)
    return _hash_of(*((str(file), stat.st_size, stat.st_mtime_ns) for file, stat in states))


def _hash_of(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()
