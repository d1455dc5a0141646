"""Fetches a network's files to this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from beam_inference.config.factories import factory_parts
from beam_inference.config.network import Member, Network, network_keys
from beam_inference.config.storage import Storage
from beam_inference.models.hugging_face import SCHEME, fetch_repository
from beam_inference.models.local_files import local_path
from beam_inference.models.packages import Folds, Package, open_package
from beam_inference.volumes.fetch import fetch_file
from beam_inference.volumes.kvstores import LOCAL, storage_of_environment


@contextmanager
def fetch_package(path: str, folds: Folds | None) -> Iterator[Package]:
    """Open a package, which is fetched first if it is not on this machine.

    Args:
        path: a folder or zip file, a path or URL.
        folds: those that are to be used; None for those that the package's own tool takes.

    Raises:
        ModelContractError: it cannot be fetched, or is no package.
    """
    network = Network(path=path, folds=None if folds is None else list(folds))
    local = local_model(network, storage_of_environment(LOCAL)).path
    with open_package(local_path(local) or Path(local), folds) as package:
        yield package


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
    main, *others = network_keys(model)
    known: Sequence[str | None] = [None] * (1 + len(others))
    if sha256 is not None:
        known = sha256.split(",")
    fetched = [
        each.model_copy(update=_fetch(each, key, storage, hashes))
        for each, key, hashes in zip(model.ensemble, others, known[1:], strict=True)
    ]
    return model.model_copy(update={**_fetch(model, main, storage, known[0]), "ensemble": fetched})


def _fetch(
    model: Network | Member, key: str, storage: Storage, sha256: str | None
) -> dict[str, object]:
    """Fetch the files of one network; where they are then, by keys of its section."""
    if model.path.startswith(SCHEME):
        return {"path": str(fetch_repository(model.path))}
    hashes = sha256.split("+") if sha256 is not None else [None, None]
    factory = factory_parts(model.path)
    path = fetch_file(factory[0] if factory else model.path, f"{key}.path", storage, hashes[0])
    weights = model.weights and fetch_file(model.weights, f"{key}.weights", storage, hashes[-1])
    return {"path": f"{path}:{factory[1]}" if factory else path, "weights": weights}
