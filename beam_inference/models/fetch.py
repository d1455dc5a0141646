"""Fetches a network's files to this machine."""

from __future__ import annotations

from beam_inference.config.factories import factory_parts
from beam_inference.config.job import Network
from beam_inference.config.storage import Storage
from beam_inference.volumes.fetch import fetch_file
from beam_inference.volumes.kvstores import LOCAL


def local_model(model: Network, storage: Storage = LOCAL, sha256: str | None = None) -> Network:
    """The model with its files on this machine: those in object stores are fetched, once, and kept.

    Args:
        model: the job's section.
        storage: how stores are reached.
        sha256: what :func:`beam_inference.models.hashes.model_sha256` said at launch; copies that
            agree with it are used again, by every worker process of this machine.

    Raises:
        ModelContractError: a file cannot be fetched, or is not the one that the job was launched
            with.
    """
    hashes = sha256.split("+") if sha256 is not None else [None, None]
    factory = factory_parts(model.path)
    path = fetch_file(factory[0] if factory else model.path, "model.path", storage, hashes[0])
    weights = model.weights and fetch_file(model.weights, "model.weights", storage, hashes[-1])
    return model.model_copy(
        update={"path": f"{path}:{factory[1]}" if factory else path, "weights": weights}
    )
