"""The table of everything that reads what others wrote, each with contents to begin with."""

from __future__ import annotations

import atexit
import bz2
import gzip
import hashlib
import io
import json
import lzma
import math
import pickle
import shutil
import string
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import bioimageio_packages
import cellmap_packages
import monai_bundles
import nnunet_folders
import numpy as np
import yaml
from fakes.receipts import receipt, resolved
from foreign_files import mrc_bytes, nifti_bytes, nrrd_bytes, tiff_bytes
from helpers import job_values, write_volume
from instrument_files import LIBCZI, lif_bytes, nd2_bytes, write_dicom, write_ims

from beam_inference.errors import BeamInferenceError, ConfigError
from fuzz.property import OUTSIDE_NAME, SECRET, Parser

ARRAY = np.arange(5 * 6 * 7, dtype=np.uint8).reshape(5, 6, 7)
MOST_READ_BYTES = 2**24
OUTSIDE = f"../{OUTSIDE_NAME}"


# ----------------------------------------------------------------------------- jobs and settings


def _job_texts() -> list[bytes]:
    full = job_values(
        "in",
        "out",
        output={"encoding": "raw", "dtype": "uint8"},
        inference={"seams": "exchange", "chunk_shape": "16x32x32"},
        job={"max_failed_chunks": 3},
        storage={"s3": {"endpoint": "http://localhost:1", "region": "eu"}},
        roi={"start": [0, 0, 0], "stop": "64x64x64"},
        mask={"path": "mask"},
    )
    full["postprocess"] = [{"operator": "smooth", "sigma": 2.5}, {"operator": "argmax"}]
    full["model"] = {"path": "net.pt", "output_channels": 2, "normalize": {"scale": 2, "offset": 0}}
    nested = b"a: &a [x, x]\nb: &b [*a, *a]\ninput: {path: in}\nmodel: !!python/name:os.system ''\n"
    return [yaml.safe_dump(job_values("in", "out")).encode(), yaml.safe_dump(full).encode(), nested]


def _parse_job(content: bytes, folder: Path) -> object:
    from beam_inference.launch.job_files import load_job

    path = folder / "job.yaml"
    path.write_bytes(content)
    return _check_job(load_job(path))


def _steps_texts() -> list[bytes]:
    steps = {
        "levels": "levels in --to 'a b.json'",
        "map": job_values("in", "map"),
        "many": {"volumes": [{"name": "a", "input": "map"}], "job": {"state_path": "state"}},
        "objects": "components map objects --threshold 0.5 --chunk_shape 8x8x8",
        "page": "report map --to page.html",
    }
    values = {"steps": steps, **job_values("in", "{name}")}
    return [yaml.safe_dump(values, sort_keys=False).encode()]


def _parse_steps(content: bytes, folder: Path) -> object:
    from beam_inference.cli.step_actions import open_steps
    from beam_inference.config.steps import Steps
    from beam_inference.launch.job_files import load_job_file

    path = folder / "steps.yaml"
    path.write_bytes(content)
    loaded = load_job_file(path)
    if isinstance(loaded, Steps):
        open_steps(loaded)
    return None


def _parse_job_with_secret(content: bytes, folder: Path) -> object:
    from beam_inference.launch.job_files import load_job

    path = folder / "job.yaml"
    path.write_bytes(content)
    return load_job(path, [f"input.path=s3://key:{SECRET}@bucket/x"])


def _check_job(job: Any) -> object:
    again = type(job).model_validate(job.model_dump())
    if again != job:
        raise AssertionError("a job is another one when it is read again")
    return None


def _parse_overrides(content: bytes, folder: Path) -> object:
    from beam_inference.config.job_file import parse_job_text

    overrides = content.decode(errors="surrogateescape").split("\n")
    text = yaml.safe_dump(job_values("in", "out"))
    parse_job_text(text, folder, "job.yaml", overrides)
    return None


def _training_texts() -> list[bytes]:
    values = {
        "volumes": [{"image": "em", "labels": "labels", "mask": {"path": "mask"}}],
        "output": "out",
        "patch_shape": "4x8x8",
        "target": {"kind": "affinities", "offsets": [[-1, 0, 0], [0, 0, 9]]},
        "network": {"residual_unet": {"widths": [4, 8]}},
        "augmentation": {"flips": "yx", "elastic": {"amplitude": [0, 1, 1]}},
        "normalize": {"scale": 2, "offset": 0},
        "label_weights": {0: 0.5},
    }
    other = values | {"target": {"kind": "classes", "count": 3}, "network": {"path": "n.py:make"}}
    return [yaml.safe_dump(each).encode() for each in (values, other)]


def _parse_training(content: bytes, folder: Path) -> object:
    from beam_inference.training.config import load_training

    path = folder / "training.yaml"
    path.write_bytes(content)
    return _check_job(load_training(path))


def _parse_prices(content: bytes, folder: Path) -> object:
    from beam_inference.launch.job_files import load_prices

    (folder / "prices.yaml").write_bytes(content)
    return load_prices(str(folder / "prices.yaml"))


# ------------------------------------------------------------------------------------- volumes


@cache
def _files(format: str) -> dict[str, bytes]:
    """The files of a small volume, by path."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "v"
        write_volume(folder, ARRAY, format=format, block_shape=(4, 4, 4))
        return {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }


def _volume(marker: str, format: str) -> Parser:
    """A volume of which one file of metadata is what is tried, and the others are sound."""

    def parse(content: bytes, folder: Path) -> object:
        for name, sound in _files(format).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(sound)
        (folder / marker).write_bytes(content)
        _open_and_read(folder)
        return None

    name = f"{format}-{marker}"
    words = (b'"multiscales"', b'"attributes"', b'"node_type"', b'"scales"', b'"resolution"')
    return Parser(name, lambda: [_files(format)[marker]], parse, (*words, b'"../outside"'))


def _further_input(marker: str, format: str) -> Parser:
    """A second volume of a job, one file of whose metadata is what is tried."""

    def parse(content: bytes, folder: Path) -> object:
        from beam_inference.config.job_file import parse_job
        from beam_inference.job.parts import open_input

        for volume in ("in", "other"):
            for name, sound in _files(format).items():
                (folder / volume / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / volume / name).write_bytes(sound)
        (folder / "other" / marker).write_bytes(content)
        values = job_values("in", "out", model={"input_channels": 2, "output_channels": 2})
        opened = open_input(parse_job(values | {"inputs": [{"path": "other"}]}, folder))
        box = _small_box(opened.bounds, 2 * opened.cutout_dtype.itemsize)
        if math.prod(opened.volumes[1].block_shape) > MOST_READ_BYTES // 8:
            return None
        array = opened.cutout(box, "reflect", 0.0)
        if array.shape != (opened.all_channels, *box.shape) or (array[0] != ARRAY).any():
            raise AssertionError("what follows the first volume has changed it")
        return None

    name = f"inputs-{format}-{marker}"
    words = (b'"scale"', b'"translation"', b'"resolution"', b'"voxel_offset"', b'"size"', b"1e-9")
    return Parser(name, lambda: [_files(format)[marker]], parse, words)


def _open_and_read(folder: Path) -> None:
    from beam_inference.volumes.opening import open_volume

    volume = open_volume(str(folder))
    box = _small_box(volume.bounds, volume.channels * volume.dtype.itemsize)
    if box is not None and math.prod(volume.block_shape) < MOST_READ_BYTES // 8:
        array = volume.read(box)
        if array.shape != (volume.channels, *box.shape):
            raise AssertionError("read another shape than the volume states")


def _small_box(bounds: Any, voxel_bytes: int) -> Any:
    """A box of a few voxels at the start of a volume; None where even these are too many."""
    from beam_inference.geometry.bounding_box import BoundingBox

    stop = tuple(min(a + 8, b) for a, b in zip(bounds.start, bounds.stop, strict=True))
    box = BoundingBox(bounds.start, stop)
    return box if box.size * voxel_bytes <= MOST_READ_BYTES else None


def _packed(suffix: str) -> Parser:
    """A block file of a volume that is packed as cloud-volume does it."""

    def parse(content: bytes, folder: Path) -> object:
        for name, sound in _files("precomputed").items():
            is_block = "/" in name
            path = folder / (f"{name}{suffix}" if is_block else name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_PACKERS[suffix](sound) if is_block else sound)
            if name == first_block():
                path.write_bytes(content)
        _open_and_read(folder)
        return None

    def first_block() -> str:
        return min(name for name in _files("precomputed") if "/" in name)

    def seeds() -> list[bytes]:
        block = _files("precomputed")[first_block()]
        return [_PACKERS[suffix](each) for each in (block, bytes(len(block)), bytes(2**20))]

    return Parser(f"block{suffix}", seeds, parse)


def _pack_brotli(content: bytes) -> bytes:
    import brotli

    packed: bytes = brotli.compress(content)
    return packed


def _pack_zstd(content: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor().compress(content)


_PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".br": _pack_brotli,
    ".zstd": _pack_zstd,
    ".xz": lzma.compress,
}


# ------------------------------------------------------------------------ sources of conversion


def _source(
    suffix: str, seeds: Callable[[], list[bytes]], *words: bytes, dataset: str = ""
) -> Parser:
    def parse(content: bytes, folder: Path) -> object:
        from beam_inference.conversion.find_source import find_source
        from beam_inference.volumes.kvstores import LOCAL

        path = folder / f"a{suffix}"
        path.write_bytes(content)
        (folder / "beside.raw").write_bytes(ARRAY.tobytes())
        source = find_source(str(path), dataset or None, 0, LOCAL)
        json.dumps(source.identity)
        pickle.dumps(source)
        if source.info.nbytes <= MOST_READ_BYTES:
            array = source.open()(source.info.bounds)
            if (array.shape, array.dtype.name) != (
                (source.info.channels, *source.info.bounds.shape),
                source.info.dtype,
            ):
                raise AssertionError("read another shape or dtype than the header states")
            if suffix == ".npy":
                _compare_with_numpy(path, array)
        return None

    return Parser(suffix.removeprefix("."), seeds, parse, words)


def _compare_with_numpy(path: Path, array: np.ndarray) -> None:
    expected = np.load(path, allow_pickle=False)
    expected = expected.astype(expected.dtype.newbyteorder("="))
    if array.tobytes() != np.ascontiguousarray(expected).tobytes():
        raise AssertionError("read other voxels than NumPy")


def _npy() -> list[bytes]:
    contents = []
    for array in (ARRAY, np.asfortranarray(ARRAY.astype(">u2")), ARRAY.astype(np.float32)[None]):
        file = io.BytesIO()
        np.save(file, array)
        contents.append(file.getvalue())
    return contents


def _npz() -> list[bytes]:
    contents = []
    for save in (np.savez, np.savez_compressed):
        file = io.BytesIO()
        save(file, v=ARRAY)
        contents.append(file.getvalue())
    return contents


def _nrrd() -> list[bytes]:
    lines = [
        "space dimension: 3",
        'space units: "nm" "nm" "nm"',
        "space directions: (8,0,0) (0,8,0) (0,0,8)",
        "space origin: (8,16,24)",
        "kinds: domain domain domain",
    ]
    return [
        nrrd_bytes(ARRAY, []),
        nrrd_bytes(ARRAY, lines),
        nrrd_bytes(ARRAY, ["spacings: 8 8 8", 'units: "nm" "nm" "nm"'], encoding="gzip"),
        nrrd_bytes(ARRAY, ["byte skip: -1"]),
    ]


def _nhdr() -> list[bytes]:
    head = "NRRD0004\ntype: uint8\ndimension: 3\nsizes: 7 6 5\nencoding: raw\n"
    names = ("beside.raw", OUTSIDE, "LIST", "s%02d.raw 1 5 1", "sub/../beside.raw")
    return [f"{head}data file: {name}\n\n".encode() for name in names]


def _nifti() -> list[bytes]:
    return [
        nifti_bytes(ARRAY, (1, 1, 1)),
        nifti_bytes(ARRAY.astype(np.int16), (2, 1, 1), order=">", slope=2.0, qform=1),
    ]


def _mrc() -> list[bytes]:
    return [
        mrc_bytes(ARRAY.astype(np.int16), (10, 10, 10)),
        mrc_bytes(ARRAY, (10, 10, 10), (1, 2, 3), order=">", extended=64, imod=1),
    ]


def _tiff() -> list[bytes]:
    import tifffile

    contents = [
        tiff_bytes(ARRAY),
        tiff_bytes(ARRAY.astype(np.uint16), order="<", tile=16),
        tiff_bytes(ARRAY, rows=2),
    ]
    for keys in ({"imagej": True}, {"compression": "zlib"}, {"bigtiff": True}, {"ome": True}):
        file = io.BytesIO()
        tifffile.imwrite(file, ARRAY, **keys)
        contents.append(file.getvalue())
    return contents


def _hdf5() -> list[bytes]:
    import h5py

    contents = []
    for keys in ({}, {"chunks": (2, 3, 3), "compression": "gzip"}):
        file = io.BytesIO()
        with h5py.File(file, "w") as opened:
            made = opened.create_dataset("v", data=ARRAY, **keys)
            made.attrs["resolution"] = [8.0, 8.0, 8.0]
        contents.append(file.getvalue())
    return contents


def _lif() -> list[bytes]:
    return [lif_bytes({"a": ARRAY[None, None]}), lif_bytes({"a": ARRAY[None, :, None]})]


def _nd2() -> list[bytes]:
    frames = ARRAY[None, :, None]
    return [nd2_bytes(frames), nd2_bytes(frames, packed=True)]


def _ims() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        return [write_ims(Path(folder) / "a.ims", ARRAY[None, None]).read_bytes()]


def _dicom() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        written = write_dicom(Path(folder), ARRAY[:2], intercept=-7)
        return [path.read_bytes() for path in sorted(written.iterdir())]


def _picture(format: str) -> Callable[[], list[bytes]]:
    def make() -> list[bytes]:
        from PIL import Image

        contents = []
        for array in (ARRAY[0], ARRAY[0].astype(np.uint16) if format == "PNG" else ARRAY[1]):
            file = io.BytesIO()
            Image.fromarray(array).save(file, format=format)
            contents.append(file.getvalue())
        return contents

    return make


# -------------------------------------------------------------------------- the state of a job


@cache
def _job() -> Any:
    return resolved()


def _receipts() -> list[bytes]:
    chunks = _job().plan.chunks
    sound = receipt(0, np.ones((1, *chunks.core_box(0).shape), np.float32), grid=chunks)
    receipts = (sound, receipt(0, grid=chunks))
    of_job = [each.model_copy(update={"fingerprint": _job().fingerprint}) for each in receipts]
    return [each.model_dump_json().encode() for each in of_job]


def _quarantine_records() -> list[bytes]:
    box = {"start": [0, 0, 0], "stop": [16, 16, 16]}
    record = {
        "chunk": 0,
        "box": box,
        "input_box": box,
        "stage": "infer",
        "cause": "NonFiniteError: 3 voxels",
        "attempts": 1,
        "launch": "one",
        "fingerprint": _job().fingerprint,
    }
    return [json.dumps(record).encode()]


def _entry(kind: str, read: Callable[[Any], object], seeds: Callable[[], list[bytes]]) -> Parser:
    """A record of chunk 0 in a state folder."""

    def parse(content: bytes, folder: Path) -> object:
        from beam_inference.job.state import State

        path = folder / kind / _job().fingerprint[:16] / "000000000" / "000000000000.json"
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
        return repr(read(State(f"file://{folder}").of(_job())))[:1000]

    return Parser(kind, seeds, parse)


def _parse_owners(content: bytes, folder: Path) -> object:
    from beam_inference.job.ownership import check_owner, owner_of
    from beam_inference.job.state import State
    from beam_inference.volumes.kvstores import LOCAL

    (folder / "_beam_inference").mkdir()
    (folder / "_beam_inference" / "owners.json").write_bytes(content)
    owner = owner_of(_job(), State(f"file://{folder}/_beam_inference"))
    check_owner(f"file://{folder}", owner, LOCAL)
    return None


def _owners() -> list[bytes]:
    box = {"start": [0, 0, 0], "stop": [16, 16, 16]}
    owner = {"fingerprint": _job().fingerprint, "roi": box, "state_url": None}
    return [json.dumps({"owners": [owner]}).encode()]


def _provenance() -> list[bytes]:
    from beam_inference.config.job_file import parse_job
    from beam_inference.launch.prepare import prepare

    with tempfile.TemporaryDirectory() as name:
        write_volume(Path(name) / "in", ARRAY)
        prepare(parse_job(job_values("in", "out"), Path(name)))
        return [(Path(name) / "out" / "provenance").read_bytes()]


def _parse_provenance(content: bytes, folder: Path) -> object:
    from beam_inference.cli.provenance import ShowOptions, show
    from beam_inference.launch.reproduction import Consent, find_jobs
    from beam_inference.volumes.kvstores import LOCAL

    for name, sound in _files("precomputed").items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(sound)
    (folder / "provenance").write_bytes(content)
    show(ShowOptions(str(folder), json=False))
    jobs = find_jobs(f"file://{folder}", {}, LOCAL)
    for job in jobs:
        job.check_consent(Consent())
    return [job.job.fingerprint for job in jobs]


def _parse_resolved_job(content: bytes, folder: Path) -> object:
    from beam_inference.job.state import State

    (folder / "job.json").write_bytes(content)
    job = State(f"file://{folder}").load_job()
    return None if job is None else (job.fingerprint, job.plan.chunks.count)


def _parse_launches(content: bytes, folder: Path) -> object:
    from beam_inference.job.state import State

    (folder / "launches").mkdir()
    started, _, summary = content.partition(b"\n\n")
    (folder / "launches" / "one.started").write_bytes(started)
    (folder / "launches" / "one.json").write_bytes(summary)
    return State(f"file://{folder}").read_launches()


def _answers() -> list[bytes]:
    findings = {
        "engine": "torch",
        "memory_format": "contiguous",
        "batch_size": 2,
        "fitting_batch_size": 1,
        "working_set_bytes": 9,
        "seconds": 0.5,
        "low": -1.0,
        "high": 2.0,
        "prediction_bounds": [4.0],
        "warnings": ["slow"],
    }
    choice = {"host": "a", "device": "cpu", "description": {"engine": "torch"}}
    refusal = {"host": "a", "kind": "EngineError", "message": "no such engine"}
    return [json.dumps(each).encode() for each in (choice | {"findings": findings}, refusal)]


def _parse_answer(content: bytes, folder: Path) -> object:
    from beam_inference.job.state import State
    from beam_inference.launch.network_question import read_answer

    (folder / "launches").mkdir()
    (folder / "launches" / "one.answer").write_bytes(content)
    return read_answer(State(f"file://{folder}"), "one")


def _parse_shards(content: bytes, folder: Path) -> object:
    from beam_inference.job.state import State

    (folder / "shards.json").write_bytes(content)
    return State(f"file://{folder}").read_shard_count()


_SIGN = (
    b'{"beat":1,"launch":"a","host":"h","pid":1,"engine":"torch","device":"cpu","versions":"1",'
    b'"chunks":3,"seconds":1.5}'
)


def _parse_crew(content: bytes, folder: Path) -> object:
    from beam_inference.job.state import State

    crew = State(f"file://{folder}").of(_job()).crew()
    assert crew.claim("infer", 4, 0, "a")
    crew.agree_on_length(4)
    (folder / "workers").mkdir()
    (folder / "workers" / "a.json").write_bytes(content)
    for path in folder.rglob("*.json"):
        path.write_bytes(content)
    found = crew.find_claim("infer", 4, 0)
    if found is not None and "/" in found.worker:
        raise AssertionError("a claim names another file")
    return crew.agree_on_length(4), crew.read_signs()


def _parse_chunks(content: bytes, folder: Path) -> object:
    from beam_inference.job.chunk_choice import choose_chunks

    (folder / "chunks").write_bytes(content)
    job = _job()
    chunks = choose_chunks([f"file://{folder}/chunks"], job)
    if not all(0 <= chunk < job.plan.chunks.count for chunk in chunks):
        raise AssertionError("named chunks that the job does not have")
    return None


def _parse_names(content: bytes, folder: Path) -> object:
    from urllib.parse import unquote

    from beam_inference.volumes.kvstores import LOCAL
    from beam_inference.volumes.remote_names import list_remote_files

    (folder / "names.txt").write_bytes(content)
    for url in list_remote_files(f"file://{folder}/names.txt", LOCAL):
        place = Path(unquote(url.removeprefix("file://")))
        if ".." in place.parts or not place.is_relative_to(folder) or place == folder:
            raise AssertionError(f"{url!a} lies outside of the list's folder")
    return None


def _parse_thresholds(content: bytes, folder: Path) -> object:
    from beam_inference.segmentation.series import read_thresholds
    from beam_inference.volumes.kvstores import LOCAL

    (folder / "thresholds.json").write_bytes(content)
    thresholds = read_thresholds(folder.as_uri(), LOCAL)
    assert thresholds
    assert all(map(math.isfinite, thresholds))
    return thresholds


def _evaluations() -> list[bytes]:
    box = {"start": [0, 0, 0], "stop": [2, 3, 4]}
    volume = {
        "output": "file:///out",
        "scale": 0,
        "channel": 0,
        "labels": "gs://b/labels",
        "labels_scale": 0,
        "places": [{"box": box, "judged": 24, "wrong": 3}],
        "judged": 24,
    }
    series = {
        "best": {"variation_of_information": 150.0},
        "thresholds": [{"threshold": 150.0, **volume}],
    }
    return [json.dumps(each).encode() for each in (volume, series)]


def _parse_evaluation(content: bytes, folder: Path) -> object:
    from beam_inference.evaluation.boxes import load_evaluation

    (folder / "evaluation.json").write_bytes(content)
    evaluation = load_evaluation(folder / "evaluation.json")
    assert all(place.box.box.size > 0 for place in evaluation.places)
    return evaluation


def _boxes_records() -> list[bytes]:
    box = {"start": [0, 0, 0], "stop": [2, 3, 4]}
    record = {
        "volume": {
            "image": "file:///em",
            "scale": 0,
            "labels": "file:///labels",
            "labels_scale": 0,
            "name": "here",
        },
        "split": {"block_shape": [8, 8, 8]},
        "format": "tiff",
        "boxes": [
            {
                "name": "box_0001",
                "core": box,
                "box": box,
                "judged": 24,
                "wrong": 3,
                "labels_sha256": "00",
            }
        ],
    }
    return [json.dumps(record).encode()]


def _parse_boxes_record(content: bytes, folder: Path) -> object:
    from beam_inference.evaluation.boxes import box_path, load_boxes

    (folder / "boxes.json").write_bytes(content)
    record = load_boxes(folder)
    for box in record.boxes:
        assert box_path(folder / box.name, "labels", record.format).parent.parent == folder
    return record


def _parse_levels(content: bytes, folder: Path) -> object:
    from beam_inference.config.network import Network
    from beam_inference.config.normalize import Contrast, Standard
    from beam_inference.operators.level_steps import definite_normalization
    from beam_inference.volumes.kvstores import LOCAL
    from beam_inference.volumes.opening import open_volume

    write_volume(folder / "v", ARRAY)
    (folder / "levels.json").write_bytes(content)
    volume = open_volume(str(folder / "v"))
    answers = []
    refusal: BeamInferenceError | None = None
    url = f"file://{folder}/levels.json"
    box = {"levels": url, "of": "nonzero_box"}
    network = {
        "path": "identity",
        "normalize": [
            {"clip": box | {"low": 0.01, "high": 0.99}},
            {"standard": box | {"ddof": 1}},
            {"rescale": {"levels": url, "low": 0.01, "high": 0.99}},
        ],
    }
    of_nonzero = network | {"normalize": [{"standard": {"levels": url, "of": "nonzero"}}]}
    inside = {"levels": url, "of": "object"}
    of_object = network | {
        "normalize": [{"rescale": inside | {"low": 0.01, "high": 0.99}}, {"standard": inside}]
    }
    for wanted in (
        Network.model_validate(network).normalize,
        Network.model_validate(of_object).normalize,
        Network.model_validate(of_nonzero).normalize,
        Contrast(levels=url),
        Contrast(levels=url, by="section"),
        Standard(levels=url, to="standard"),
        Standard(levels=url, to="standard", by="section"),
    ):
        try:
            answers.append(definite_normalization(wanted, [volume], LOCAL))
        except ConfigError as error:
            refusal = error
    if refusal is not None:
        raise refusal
    return answers


def _levels() -> list[bytes]:
    channel = {
        "number": 100,
        "values": [1, 100, 208],
        "mean": 104.5,
        "std": 60.6,
        "upto": [[1, -103.5, 10712.25], [50, -2600.0, 182000.0], [100, 0.0, 367236.0]],
    }
    levels = {
        "input": "",
        "dtype": "uint8",
        "start": 0,
        "quantiles": [0.01, 0.5, 0.99],
        "volume": [1, 100, 208],
        "sections": [[1, 20, 40]] * 5,
        "mean": 104.5,
        "std": 60.6,
        "section_moments": [[20.0, 12.0]] * 5,
        "channels": [channel],
        "nonzero": {"start": [0, 0, 0], "stop": [1, 2, 3], "channels": [channel]},
        "object": {"channels": [channel], "holes_sha256": "0" * 64},
        "without_zeros": [channel],
    }
    return [json.dumps(levels).encode(), json.dumps(levels | {"section_moments": None}).encode()]


def _parse_holes(content: bytes, folder: Path) -> object:
    """The index of an object's holes and the bits of its first piece, after a blank line."""
    from beam_inference.volumes.holes import open_holes, piece_name
    from beam_inference.volumes.kvstores import LOCAL

    index, _, bits = content.partition(b"\n\n")
    (folder / "index.json").write_bytes(index)
    (folder / piece_name(0)).write_bytes(bits)
    holes = open_holes(folder.as_uri(), hashlib.sha256(index).hexdigest(), LOCAL)
    box = _small_box(holes.bounds, 1)
    if box is None:
        return None
    inside = np.zeros(box.shape, bool)
    holes.fill(inside, box, 10.0)
    return inside


def _holes() -> list[bytes]:
    from beam_inference.volumes.holes import compress_bits, pack_bits

    bits = pack_bits(ARRAY[1:3, 2:5, 1:6] % 3 > 0)
    piece = {"start": [1, 2, 1], "stop": [3, 5, 6], "sha256": hashlib.sha256(bits).hexdigest()}
    index = {
        "start": [0, 0, 0],
        "stop": [5, 6, 7],
        "piece_shape": [3, 6, 7],
        "pieces": {"0": piece},
    }
    return [json.dumps(index).encode() + b"\n\n" + compress_bits(bits)]


@dataclass(frozen=True)
class _Copy:
    """A stage of one chunk."""

    name: str = "copy"
    count: int = 1

    def make_worker(self) -> Callable[[int], None]:
        return lambda _: None


def _parse_stage_records(content: bytes, folder: Path) -> object:
    """A description, a record that a chunk is done, and one of its failure, on lines apart."""
    from beam_inference.job.stage_job import StageJob
    from beam_inference.job.stage_records import StageRecords
    from beam_inference.volumes.kvstores import LOCAL

    job = StageJob("convert", {"a": 1}, f"file://{folder}", LOCAL, (_Copy(),), "one")
    parts = [*content.split(b"\n\n"), b"", b""]
    records = folder / job.folder / "copy"
    for path, text in zip(
        (
            folder / "convert" / "job.json",
            records / "done" / "000000000" / "000000000000.json",
            records / "failed" / "000000000" / "000000000000.json",
        ),
        parts[:3],
        strict=True,
    ):
        if text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
    runner = StageRecords(job)
    runner.begin()
    runner.earlier_job()
    return runner.has_begun(), runner.chunk_counter()(), runner.failures()


def _stage_records() -> list[bytes]:
    from beam_inference.job.stage_job import StageJob
    from beam_inference.volumes.kvstores import LOCAL

    job = StageJob("convert", {"a": 1}, "file:///", LOCAL, (_Copy(),), "one")
    description = json.dumps({"fingerprint": job.fingerprint, "a": 1})
    known = job.names_of(_Copy()) | {"chunk": 0}
    failed = json.dumps(known | {"cause": "no"})
    return [f"{description}\n\n{done}\n\n{failed}".encode() for done in ("", json.dumps(known))]


# --------------------------------------------------------------------------------- networks


def _parse_cache_entry(content: bytes, folder: Path) -> object:
    """An entry that was kept, which is believed only as it was written."""
    from beam_inference.engines.cache import Cache

    kept = Cache(folder / "cache")
    kept.write("trial", {"a": 1}, b"found")
    (path,) = (folder / "cache").iterdir()
    path.write_bytes(content)
    return kept.read("trial", {"a": 1})


def _cache_entries() -> list[bytes]:
    from beam_inference.engines.cache import Cache

    with tempfile.TemporaryDirectory() as folder:
        Cache(Path(folder) / "cache").write("trial", {"a": 1}, b"found")
        (path,) = (Path(folder) / "cache").iterdir()
        return [path.read_bytes()]


@cache
def _network() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv3d(1, 1, 1), torch.nn.ReLU())


@cache
def _torchscript() -> bytes:
    import torch

    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(_network(), torch.zeros(1, 1, 2, 2, 2))  # type: ignore[no-untyped-call]
        torch.jit.save(traced, file)
    return file.getvalue()


@cache
def _exported() -> bytes:
    import torch

    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(_network(), (torch.zeros(1, 1, 2, 2, 2),)), file)
    return file.getvalue()


@cache
def _saved_weights() -> bytes:
    import torch

    file = io.BytesIO()
    torch.save(_network().state_dict(), file)
    return file.getvalue()


def _safetensors() -> list[bytes]:
    import safetensors.torch

    return [safetensors.torch.save(_network().state_dict())]


def _parse_network(suffix: str) -> Callable[[bytes, Path], object]:
    def parse(content: bytes, folder: Path) -> object:
        from beam_inference.config.network import Network
        from beam_inference.models.loading import load_network

        (folder / f"net{suffix}").write_bytes(content)
        load_network(Network(path=str(folder / f"net{suffix}"), output_channels=1))
        return None

    return parse


def _parse_program(content: bytes, folder: Path) -> object:
    """Put a program into a sound archive, which PyTorch is then to read."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(_exported())) as sound, zipfile.ZipFile(file, "w") as made:
        for member in sound.infolist():
            is_program = member.filename.endswith("models/model.json")
            made.writestr(member, content if is_program else sound.read(member))
    return _parse_network(".pt2")(file.getvalue(), folder)


def _program() -> list[bytes]:
    with zipfile.ZipFile(io.BytesIO(_exported())) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith("models/model.json")]
        return [archive.read(name)]


def _parse_weights(suffix: str) -> Callable[[bytes, Path], object]:
    def parse(content: bytes, folder: Path) -> object:
        import copy

        from beam_inference.models.weights import load_weights

        (folder / f"w{suffix}").write_bytes(content)
        load_weights(copy.deepcopy(_network()), folder / f"w{suffix}", allow_pickle=False)
        return None

    return parse


def _onnx() -> list[bytes]:
    from onnx import TensorProto, helper

    tensor = helper.make_tensor("w", TensorProto.FLOAT, [1], [1.0])
    outer = helper.make_tensor("u", TensorProto.FLOAT, [1], [1.0])
    outer.data_location = TensorProto.EXTERNAL
    outer.external_data.add(key="location", value=OUTSIDE)
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    node = helper.make_node("Add", ["x", "w"], ["y"])
    graphs = [helper.make_graph([node], "g", [value], [result], [each]) for each in (tensor, outer)]
    return [helper.make_model(graph).SerializeToString() for graph in graphs]


def _parse_onnx(content: bytes, folder: Path) -> object:
    """Whether the check says the same as the package onnx: weights in other files are refused."""
    from google.protobuf.message import DecodeError
    from onnx import ModelProto, TensorProto, external_data_helper

    from beam_inference.models.onnx_file import check_self_contained

    (folder / "net.onnx").write_bytes(content)
    check_self_contained(folder / "net.onnx")
    model = ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError:
        return None
    for tensor in external_data_helper._get_all_tensors(model):
        if tensor.data_location == TensorProto.EXTERNAL or tensor.external_data:
            raise AssertionError("weights in another file pass")
    return None


def _parse_openvino(content: bytes, folder: Path) -> object:
    from beam_inference.models.openvino_file import check_network

    (folder / "net.xml").write_bytes(content)
    check_network(folder / "net.xml")
    return None


# --------------------------------------------------------------------- packages of networks


def _package(
    name: str,
    make: Callable[[Path], object],
    file: str,
    more_seeds: Callable[[], list[bytes]] = list,
    *words: bytes,
) -> Parser:
    """A package of which one file is what is tried, and the others are sound.

    Args:
        name: of the parser.
        make: writes a package into a folder.
        file: the file in it that is tried.
        more_seeds: contents of that file beside the sound one.
        words: texts that are worth putting into it.
    """

    @cache
    def files() -> dict[str, bytes]:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "p"
            make(folder)
            return {
                str(path.relative_to(folder)): path.read_bytes()
                for path in folder.rglob("*")
                if path.is_file()
            }

    def parse(content: bytes, folder: Path) -> object:
        from beam_inference.launch.new_job import describe_package
        from beam_inference.launch.package_trial import try_package
        from beam_inference.models.packages import open_package

        for each, sound in files().items():
            (folder / "p" / each).parent.mkdir(parents=True, exist_ok=True)
            (folder / "p" / each).write_bytes(content if each == file else sound)
        values = describe_package(str(folder / "p"), None).recipe.values
        yaml.safe_dump(values)
        with open_package(folder / "p") as package:
            has_example = package.network.sample() is not None
            package.network.load(is_trusted=False)
        if has_example:
            try_package(str(folder / "p"), None)
        return values

    return Parser(name, lambda: [files()[file], *more_seeds()], parse, words)


def _bioimageio_descriptions() -> list[bytes]:
    scale = {"id": "scale_linear", "kwargs": {"gain": 2.0, "offset": 1.0}}
    range_ = {"name": "scale_range", "kwargs": {"mode": "per_sample", "axes": "yx"}}
    written = {"pytorch_state_dict": {"source": "weights.pt", "architecture": "a.py:make"}}
    contents = [
        bioimageio_packages.described(preprocessing=[scale], postprocessing=[{"id": "sigmoid"}]),
        bioimageio_packages.described(dims=3, weights=written),
        bioimageio_packages.described_04(preprocessing=[range_]),
    ]
    return [yaml.safe_dump(content).encode() for content in contents]


def _make_nnunet(folder: Path) -> object:
    return nnunet_folders.make_folder(folder)


def _cellmap_descriptions() -> list[bytes]:
    flat = {"input_shape": [32, 32], "output_shape": [32, 32], "input_voxel_size": [4, 4]}
    return [json.dumps(cellmap_packages.described(**flat)).encode()]


def _parse_hub_address(content: bytes, folder: Path) -> object:
    from beam_inference.models.hugging_face import SCHEME, parse_address

    repository = parse_address(f"{SCHEME}{content.decode(errors='surrogateescape')}")
    if not set(repository.name + (repository.revision or "")) <= _LETTERS_OF_ADDRESSES:
        raise AssertionError("an address holds more than names")
    if ".." in repository.name.split("/"):
        raise AssertionError("an address leads elsewhere")
    return repository


_LETTERS_OF_ADDRESSES = set(string.ascii_letters + string.digits + "._-/")


# -------------------------------------------------------------------------------- trainings


@cache
def _training() -> tuple[dict[str, Any], bytes]:
    """What a training file says, and the checkpoint of that training after its only step."""
    from beam_inference.training.checkpoint import CHECKPOINT
    from beam_inference.training.config import parse_training
    from beam_inference.training.trainer import train

    folder = Path(tempfile.mkdtemp())  # a checkpoint is of volumes that lie where they lay
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    y, x = np.indices((24, 24))
    labels = np.broadcast_to((1 + y // 6 * 8 + x // 6) % 5, (16, 24, 24)).astype(np.uint32)
    write_volume(folder / "labels", labels)
    write_volume(folder / "em", (labels * 40).astype(np.uint8))
    values = {
        "volumes": [{"image": str(folder / "em"), "labels": str(folder / "labels")}],
        "output": "trained",
        "patch_shape": [4, 8, 8],
        "split": {"block_shape": [8, 24, 24], "validation": 0, "test": 0},
        "target": {"kind": "affinities"},
        "network": {"residual_unet": {"widths": [2, 2]}},
        "steps": 1,
        "batch_size": 1,
        "device": "cpu",
        "ema": 0.9,
    }
    train(parse_training(values, folder))
    return values, (folder / "trained" / CHECKPOINT).read_bytes()


def _parse_checkpoint(content: bytes, folder: Path) -> object:
    """Go on with a training from a checkpoint; if that is sound, nothing is left to do."""
    from beam_inference.training.checkpoint import CHECKPOINT
    from beam_inference.training.config import parse_training
    from beam_inference.training.trainer import train

    (folder / "trained").mkdir()
    (folder / "trained" / CHECKPOINT).write_bytes(content)
    outcome = train(parse_training(_training()[0], folder))
    if outcome.steps_done:
        raise AssertionError("a checkpoint that was not written then is gone on with")
    return outcome.steps_done


# --------------------------------------------------------------------------- URLs and messages

_TEMPLATES = (
    "s3://{text}:{secret}@bucket/x",
    "https://key:{secret}@{text}/x",
    "https://host/{text}?token={secret}",
    "https://host/x?X-Amz-Signature={secret}&{text}",
    "https://host/x#{text}&access_token={secret}",
    "https://host/x%3Ftoken%3D{secret}%26{text}",
    "https://host/x%253Fpassword%253D{secret}",
    "{text} Authorization: Bearer {secret}",
    "{text} password={secret}",
)


def _parse_url(content: bytes, folder: Path) -> object:
    """The first byte picks a place for the secret, the rest is text around it."""
    from beam_inference.foreign_text import clean_text, holds_credentials, shorten_value

    text = "".join(
        letter
        for letter in content[1:].decode(errors="ignore")
        if letter.isprintable() and letter not in " /?#&@:\\"
    )
    template = _TEMPLATES[(content or b"\0")[0] % len(_TEMPLATES)]
    url = template.format(text=text, secret=SECRET)
    cleaned = clean_text(url)
    if SECRET in cleaned or SECRET in shorten_value([url]) or SECRET in shorten_value({"a": url}):
        raise AssertionError(f"a message would repeat the secret of {url!a}")
    if clean_text(cleaned) != cleaned:
        raise AssertionError(f"what is clean is not: {cleaned!a}")
    if url.partition(":")[0] in ("s3", "https") and not holds_credentials(url):
        raise AssertionError(f"{url!a} is said to hold no credentials")
    return None


def _parse_text(content: bytes, folder: Path) -> object:
    from beam_inference.foreign_text import clean_text, describe_error, shorten_text, shorten_value

    text = content.decode(errors="surrogateescape")
    cleaned = clean_text(text)
    if clean_text(cleaned) != cleaned:
        raise AssertionError("what is clean is not")
    messages = (cleaned, describe_error(ValueError(text)), shorten_text(text), shorten_value(text))
    for message in messages:
        message.encode()
        if any(each in message for each in "\x00\x1b\r\x9b\u202e"):
            raise AssertionError("a message has control characters")
    return None


# ------------------------------------------------------------------------------------- table


def _fixed(*contents: bytes) -> Callable[[], list[bytes]]:
    return lambda: list(contents)


PARSERS: Sequence[Parser] = (
    Parser("job-file", _job_texts, _parse_job, (b"!!", b"&a", b"*a", b"<<", b".inf", b"[[[[")),
    Parser("steps-file", _steps_texts, _parse_steps, (b"--help", b"steps:", b"report ", b"'")),
    Parser("job-file-with-a-secret", _job_texts, _parse_job_with_secret, (b"input:", b"path:")),
    Parser(
        "set",
        _fixed(b"inference.device=cpu", b"output.block_shape=[8, 8, 8]\nroi.start=1x2x3", b"a.=--"),
        _parse_overrides,
        (b"inference.", b"postprocess", b"=", b"storage.s3."),
    ),
    Parser("training-file", _training_texts, _parse_training, (b"!!", b"kind:", b".inf", b"[[[[")),
    Parser(
        "prices",
        _fixed(b"worker_hour: 0.90\ninterruptions_per_hour: 0.05\n", b"gib_month: .inf\n"),
        _parse_prices,
    ),
    _volume("info", "precomputed"),
    _further_input("info", "precomputed"),
    _further_input("zarr.json", "ome_zarr"),
    _volume("zarr.json", "zarr3"),
    _volume(".zarray", "zarr2"),
    _volume(".zattrs", "zarr2"),
    _volume("attributes.json", "n5"),
    _volume("zarr.json", "ome_zarr"),
    _volume(".zattrs", "ome_zarr_0.4"),
    *map(_packed, _PACKERS),
    _source(".nrrd", _nrrd, b"data file: ", OUTSIDE.encode(), b"byte skip: ", b"kinds: "),
    _source(".nhdr", _nhdr, b"data file: ", OUTSIDE.encode(), b"byte skip: "),
    _source(".npy", _npy, b"'descr'", b"'shape'", b"'|O'", b"(1000000, 1000000, 1000000)"),
    _source(".npz", _npz, b"PK\x01\x02", b"PK\x05\x06"),
    _source(".nii", _nifti),
    _source(".nii.gz", lambda: [gzip.compress(each) for each in _nifti()]),
    _source(".mrc", _mrc, b"MAP "),
    _source(".mrc.bz2", lambda: [bz2.compress(each) for each in _mrc()]),
    _source(".tif", _tiff),
    _source(".h5", _hdf5, OUTSIDE.encode()),
    _source(".czi", lambda: [LIBCZI.read_bytes()], b"ZISRAWSUBBLOCK", b"ZISRAWDIRECTORY", b"DV"),
    _source(".lif", _lif, b"N\0u\0m\0b\0e\0r\0O\0f\0E\0l\0e\0m\0e\0n\0t\0s\0"),
    _source(".nd2", _nd2, b"ImageDataSeq|0!", b"ND2 CHUNK MAP SIGNATURE 0000001!"),
    _source(".ims", _ims, b"ResolutionLevel 0", b"TimePoint 0", b"Channel 0"),
    _source(".dcm", _dicom, b"DICM", b"1.2.840.10008.1.2.1.99", b"1.2.840.10008.1.2.4.90"),
    _source(".png", _picture("PNG"), b"IHDR", b"IDAT", b"IEND"),
    _source(".jpg", _picture("JPEG")),
    _entry(
        "receipts",
        lambda state: (list(state.scan_receipts([0])), state.tally_receipts(1)),
        _receipts,
    ),
    _entry("sums", lambda state: list(state.scan_sums([0])), _receipts),
    _entry("quarantine", lambda state: list(state.scan_quarantine([0])), _quarantine_records),
    Parser("owners.json", _owners, _parse_owners),
    Parser(
        "provenance",
        _provenance,
        _parse_provenance,
        (b'"processing"', b'"beam_inference"', b'"own"', b"../", b"\\u2026/", b"file.py:name"),
    ),
    Parser("job.json", lambda: [resolved().model_dump_json().encode()], _parse_resolved_job),
    Parser(
        "launches",
        _fixed(b'2026-01-01T00:00:00+00:00 node\n\n{"done": 1, "skipped": 0, "quarantined": 0}'),
        _parse_launches,
    ),
    Parser("answers", _answers, _parse_answer),
    Parser(
        "crew",
        _fixed(b'{"worker":"a-1"}', b'{"length":4}', _SIGN),
        _parse_crew,
        (b'"../job"', b"1e999", b"-1"),
    ),
    Parser("shards", _fixed(b'{"shards":7}', b'{"shards":1e99}'), _parse_shards),
    Parser(
        "chunks-file",
        lambda: [b"1\n2\n99\n", *_quarantine_records()],
        _parse_chunks,
        (b'{"chunk": 1, "fingerprint": "f"}', b"1e999", b"true"),
    ),
    Parser(
        "names.txt",
        _fixed(b"names.txt\nz000.png\nz001.png\n", "\ufeffa b.tif\r\n./c.tif".encode()),
        _parse_names,
        (b"../", b"/etc/passwd", b"%2e%2e/", b"http://host/a.png"),
    ),
    Parser("stage-records", _stage_records, _parse_stage_records),
    Parser(
        "thresholds.json",
        _fixed(b'{"thresholds": [0.25, 150]}'),
        _parse_thresholds,
        (b"1e999", b"null", b'"x"'),
    ),
    Parser("evaluation", _evaluations, _parse_evaluation, (b'"best"', b'"thresholds"', b"../")),
    Parser("boxes.json", _boxes_records, _parse_boxes_record, (b"../", b"box_0001", b"1e999")),
    Parser("levels", _levels, _parse_levels),
    Parser("holes", _holes, _parse_holes, (b'"pieces"', b'"0"', b"1e999", b"\n\n")),
    Parser("cache", _cache_entries, _parse_cache_entry, (b'"sha256"', b"\n")),
    Parser("torchscript", lambda: [_torchscript()], _parse_network(".pt"), (b"PK\x01\x02",)),
    Parser("pt2", lambda: [_exported()], _parse_network(".pt2"), (b"PK\x01\x02", b".so")),
    Parser("pt2-program", _program, _parse_program, (b"torch.ops.aten.", b"use_pickle")),
    Parser("weights", lambda: [_saved_weights()], _parse_weights(".pt"), (b"PK\x01\x02",)),
    Parser("safetensors", _safetensors, _parse_weights(".safetensors"), (b'"data_offsets"',)),
    Parser("onnx", _onnx, _parse_onnx, (b"location", OUTSIDE.encode())),
    Parser(
        "openvino",
        _fixed(b'<?xml version="1.0"?><net name="a" version="11"><layers/></net>'),
        _parse_openvino,
        (b"<!DOCTYPE", b"<!ENTITY a SYSTEM '../outside.raw'>", b"&a;"),
    ),
    _package(
        "bioimageio",
        bioimageio_packages.make_package,
        "bioimageio.yaml",
        _bioimageio_descriptions,
        b"!!python/name:os.system",
        b"../outside.raw",
        b"/etc/passwd",
        b"https://localhost:1/w.pt",
    ),
    _package(
        "bioimageio-example",
        bioimageio_packages.make_package,
        "test_input.npy",
        _npy,
        b"'|O'",
        b"(1000000, 1000000, 1000000)",
    ),
    _package(
        "monai-config",
        monai_bundles.make_bundle,
        "configs/inference.json",
        list,
        b"$import os",
        b"$__import__('os').system('true')",
        b"@bundle_root",
        b'"_target_"',
        b"%../outside.raw",
    ),
    _package("monai-metadata", monai_bundles.make_bundle, "configs/metadata.json"),
    _package("nnunet-plans", _make_nnunet, "plans.json", list, b"torch.nn.modules.", b"os.system"),
    _package("nnunet-dataset", _make_nnunet, "dataset.json"),
    _package("nnunet-checkpoint", _make_nnunet, "fold_0/checkpoint_final.pth", list, b"PK\x01\x02"),
    _package("cellmap", cellmap_packages.make_package, "metadata.json", _cellmap_descriptions),
    Parser(
        "hub-address",
        _fixed(
            b"org/repo", b"org/repo@main", b"org/re.po@0123456789abcdef0123456789abcdef01234567"
        ),
        _parse_hub_address,
        (b"../", b"@", b"%2e"),
    ),
    Parser("training-checkpoint", lambda: [_training()[1]], _parse_checkpoint),
    Parser("url", _fixed(*(bytes([n]) + b"host%41%3a" for n in range(9))), _parse_url, (b"%25",)),
    Parser("foreign-text", _fixed(b"s3://a:b@c token=1\x1b[0m \xe2\x80\xae"), _parse_text),
)
"""Every parser, in the order of a table."""


def parser_of(name: str) -> Parser:
    """The parser of a name."""
    return next(parser for parser in PARSERS if parser.name == name)
