"""What identifies a job's network: hashes of its files, part of the job's fingerprint."""

from __future__ import annotations

from pathlib import Path

from beam_inference.config.factories import factory_parts
from beam_inference.config.job import Network
from beam_inference.errors import ModelContractError
from beam_inference.models.loading import loader_of, source_file, suffix_of
from beam_inference.models.local_files import existing_file, file_sha256
from beam_inference.models.onnx_file import check_self_contained
from beam_inference.models.openvino_file import check_network


def model_sha256(model: Network) -> str:
    """Hash of what defines the network.

    Returns:
        "identity" for ``identity``; else the hash of the model's file or folder, or of the
        factory's source file, and after a "+" that of ``model.weights``, if there are any.

    Raises:
        ModelContractError: a file is absent, or ``model.sha256`` is given and differs.
    """
    if model.path == "identity":
        return "identity"
    files = [_model_file(model)]
    if model.weights is not None:
        files.append(existing_file(model.weights, "model.weights"))
    suffix = suffix_of(model)
    if suffix == ".onnx":
        check_self_contained(files[0])
    if suffix == ".xml":
        if model.weights is None:  # OpenVINO would take those beside it, which nothing hashed
            raise ModelContractError(
                f"model.path {model.path} is a network of OpenVINO, whose weights are in a file of "
                "their own. Write its path, which ends in .bin, as model.weights."
            )
        check_network(files[0])
    digests = [file_sha256(path) for path in files]
    if model.sha256 is not None and digests[-1] != model.sha256:
        raise ModelContractError(
            f"{files[-1]} has the sha256 {digests[-1]}, the job says model.sha256: {model.sha256}. "
            "It is another file, or was changed or damaged."
        )
    return "+".join(digests)


def _model_file(model: Network) -> Path:
    if factory_parts(model.path):
        return source_file(model)
    loader = loader_of(model)
    is_folder = loader is not None and loader.is_folder
    return existing_file(model.path, "model.path", is_folder=is_folder)
