"""Test that files and slices in object stores are converted as those of this machine are."""

import gzip
import io
import math
import pickle
import tempfile
import uuid
import zlib

import h5py
import numpy as np
import pytest
import tifffile
from fakes.gcs import GcsStandIn
from fakes.s3 import KEYS, S3StandIn
from fakes.web_files import WebFiles, Zeros
from foreign_files import mrc_bytes, nifti_bytes, nrrd_bytes
from helpers import read_volume
from hypothesis import given, settings
from hypothesis import strategies as st
from instrument_files import lif_bytes, write_dicom, write_ims
from PIL import Image
from source_volumes import assert_holds, random_array

from beam_inference.cli.main import main
from beam_inference.config.storage import Storage
from beam_inference.conversion.convert import convert
from beam_inference.conversion.find_source import find_source
from beam_inference.conversion.raw_array import RawLayout
from beam_inference.errors import ConfigError, PermanentReadError, VolumeError, WorkerFault
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.volumes.kvstores import LOCAL, open_kvstore
from beam_inference.volumes.remote_files import PART_BYTES, find_remote_file

PROCESSES = ("--direct_running_mode=multi_processing", "--direct_num_workers=2")


def put(files):
    """Write files into a store of their own in memory; the URL of its folder."""
    folder = f"memory://{uuid.uuid4().hex}"
    for name, content in files.items():
        open_kvstore(folder).write(name, content).result()
    return folder


def source_of(url, dataset=None, scale=0, storage=LOCAL):
    """The source at a URL, as a worker gets it."""
    return pickle.loads(pickle.dumps(find_source(url, dataset, scale, storage)))


def content_of(save):
    """The bytes that a function writes into a file."""
    file = io.BytesIO()
    save(file)
    return file.getvalue()


def hdf5_bytes(array, **options):
    def save(file):
        with h5py.File(file, "w") as hdf5:
            hdf5.create_dataset("volumes/raw", data=array, **options)

    return content_of(save)


ARRAY = random_array("uint16", (5, 40, 30))
FILES = {
    "a.npy": content_of(lambda file: np.save(file, ARRAY)),
    "turned.npy": content_of(lambda file: np.save(file, np.asfortranarray(ARRAY))),
    "a.npz": content_of(lambda file: np.savez_compressed(file, v=ARRAY)),
    "a.nii": nifti_bytes(ARRAY, (1, 1, 1)),
    "a.nii.gz": gzip.compress(nifti_bytes(ARRAY, (1, 1, 1))),
    "a.mrc": mrc_bytes(ARRAY, (1, 1, 1)),
    "a.nrrd": nrrd_bytes(ARRAY, []),
    "packed.nrrd": nrrd_bytes(ARRAY, [], encoding="gzip"),
    "a.tif": content_of(lambda file: tifffile.imwrite(file, ARRAY)),
    "scattered.tif": content_of(lambda file: tifffile.imwrite(file, ARRAY, contiguous=False)),
    "strips.tif": content_of(
        lambda file: tifffile.imwrite(file, ARRAY, rowsperstrip=7, compression="zlib")
    ),
    "tiles.tif": content_of(
        lambda file: tifffile.imwrite(file, ARRAY, tile=(16, 16), compression="zlib")
    ),
    "a.h5": hdf5_bytes(ARRAY, chunks=(2, 16, 16), compression="gzip"),
}


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder for temporary files, empty at first."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize("name", FILES)
def test_a_file_in_a_store_is_what_it_is_here(tmp_path, name):
    (tmp_path / name).write_bytes(FILES[name])
    here = find_source(str(tmp_path / name), None, 0, LOCAL)
    source = source_of(f"{put({name: FILES[name]})}/{name}")
    assert_holds(source, ARRAY, here.info.voxel_size_nm)
    assert source.info.notes == here.info.notes


@pytest.mark.slow
def test_a_file_of_an_instrument_is_fetched(tmp_path):
    array = random_array("uint16", (3, 20, 30))
    write_ims(tmp_path / "a.ims", array[None, None])
    url = f"{put({'a b.ims': (tmp_path / 'a.ims').read_bytes()})}/a%20b.ims"
    here = find_source(str(tmp_path / "a.ims"), None, 0, LOCAL)
    assert_holds(source_of(url), here.open()(here.info.bounds), here.info.voxel_size_nm)


@settings(max_examples=60)
@given(st.data())
def test_windows_of_raw_arrays_are_those_of_memory_maps(data):
    axes = data.draw(st.permutations("CZYX").map("".join))
    shape = data.draw(st.tuples(*[st.integers(1, n) for n in (3, 40, 60, 80)]))
    dtype = data.draw(st.sampled_from(["|u1", "<u2", ">f4"]))
    offset = data.draw(st.integers(0, 9))
    layout = RawLayout(dtype, shape, axes, offset)
    content = np.random.default_rng(0).integers(0, 99, layout.stop, np.uint8).tobytes()
    extent = dict(zip(axes, shape, strict=True))
    start = [data.draw(st.integers(0, extent[axis] - 1)) for axis in "ZYX"]
    stop = [data.draw(st.integers(a + 1, extent[b])) for a, b in zip(start, "ZYX", strict=True)]
    box = BoundingBox(zyx.triple(start), zyx.triple(stop))
    remote = find_remote_file(f"{put({'a': content})}/a", LOCAL)
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        expected = layout.read(file.name, box)
    found = layout.read_parts(remote, box)
    assert found.dtype == expected.dtype
    assert found.tobytes() == expected.tobytes()


def test_large_windows_take_few_requests_and_little_more_than_their_bytes():
    array = random_array("uint8", (24, 1000, 1000))
    with WebFiles({"/a.npy": content_of(lambda file: np.save(file, array))}) as web:
        source = source_of(f"{web.url}/a.npy")
        assert source.info.grain == (2, 1000, 1000)
        read = source.open()
        web.sent.clear()
        web.answers.clear()
        box = BoundingBox((3, 0, 0), (20, 1000, 1000))
        np.testing.assert_array_equal(read(box)[0], array[3:20])
        assert web.sent["/a.npy"] == box.size
        assert web.answers["/a.npy"] == math.ceil(box.size / (PART_BYTES // 10**6 * 10**6))
        web.sent.clear()
        np.testing.assert_array_equal(
            read(BoundingBox((0, 400, 0), (24, 600, 1000)))[0], array[:, 400:600]
        )
        assert web.sent["/a.npy"] == 24 * 200 * 1000


def test_files_that_are_damaged_or_cut_off_are_refused():
    cut = {name: FILES[name][:-10] for name in ("a.npy", "a.nii", "a.mrc", "a.nrrd", "a.npz")}
    folder = put(cut | {"b.h5": FILES["a.h5"][:2000], "b.tif": b"II nonsense"})
    for name, message in [
        *((name, "was cut off") for name in ("a.npy", "a.nii", "a.mrc", "a.nrrd")),
        ("a.npz", f"{folder}/a.npz is not an .npz archive"),
        ("b.h5", f"{folder}/b.h5 cannot be read as HDF5"),
        ("b.tif", f"{folder}/b.tif cannot be read as TIFF"),
        ("c.npy", f"there is nothing at {folder}/c.npy"),
    ]:
        with pytest.raises(VolumeError, match=message):
            source_of(f"{folder}/{name}")
    for wrong in ({"dataset": "x"}, {"scale": 1}):
        with pytest.raises(ConfigError, match="has no"):
            source_of(f"{put({'a.npy': FILES['a.npy']})}/a.npy", **wrong)


def test_a_file_that_is_replaced_meanwhile_is_not_mixed():
    folder = put({"a.npy": FILES["a.npy"]})
    source = source_of(f"{folder}/a.npy")
    identity = source.identity
    read = source.open()
    open_kvstore(folder).write("a.npy", FILES["a.npy"][:-1] + b"x").result()
    with pytest.raises(WorkerFault, match="a.npy was changed since"):
        read(source.info.bounds)
    assert source_of(f"{folder}/a.npy").identity != identity


def test_a_header_names_files_of_its_own_folder_only():
    head = nrrd_bytes(ARRAY, ["data file: {}"]).partition(b"\n\n")[0].decode()
    names = {
        "a.nhdr": "beside me.raw",
        "b.nhdr": "../a.raw",
        "c.nhdr": "/etc/passwd",
        "d.nhdr": "sub/../a.raw",
        "e.nhdr": "absent.raw",
        "f.nhdr": "http://host/a.raw",
    }
    folder = put(
        {name: f"{head.format(other)}\n\n".encode() for name, other in names.items()}
        | {"beside me.raw": ARRAY.tobytes()}
    )
    assert_holds(source_of(f"{folder}/a.nhdr"), ARRAY)
    for name in "bcdf":
        with pytest.raises(VolumeError, match="may lead out of its folder"):
            source_of(f"{folder}/{name}.nhdr")
    with pytest.raises(VolumeError, match=r"there is nothing at memory.*absent\.raw"):
        source_of(f"{folder}/e.nhdr")


def lif_of(array):
    return lif_bytes({"a": array[None, None]})


@pytest.mark.slow
def test_copies_are_shared_and_removed(temporary):
    folder = put({"a.lif": lif_of(ARRAY), "b.lif": lif_of(ARRAY[::-1])})
    source = source_of(f"{folder}/a.lif")
    read = source.open()
    assert len(list(temporary.iterdir())) == 1  # launch and worker share it in one process
    np.testing.assert_array_equal(read(source.info.bounds)[0], ARRAY)
    source_of(f"{folder}/b.lif")  # takes the place of the one that is kept
    assert len(list(temporary.iterdir())) == 2
    del read
    assert len(list(temporary.iterdir())) == 1


def test_a_copy_that_has_no_room_is_refused_before_it_is_made(temporary):
    with (
        WebFiles({"/a.lif": Zeros(2**48)}) as web,
        pytest.raises(VolumeError, match=r"a\.lif has 256 TiB.*Set TMPDIR"),
    ):
        source_of(f"{web.url}/a.lif")
    assert web.sent["/a.lif"] < 2**20
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("options", [{"chunks": (8, 64, 64), "compression": "gzip"}, {}])
def test_windows_of_hdf5_are_read_by_ranges(temporary, options):
    array = random_array("uint16", (64, 256, 256))
    content = hdf5_bytes(array, **options)
    with WebFiles({"/a.h5": content}) as web:
        source = source_of(f"{web.url}/a.h5:volumes/raw")
        assert web.sent["/a.h5"] < len(content) / 8
        read = source.open()
        for box in (
            BoundingBox((8, 0, 0), (16, 256, 256)),
            BoundingBox((17, 64, 0), (18, 130, 99)),
        ):
            web.sent.clear()
            web.answers.clear()
            window = (slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
            np.testing.assert_array_equal(read(box)[0], array[tuple(window)])
            # 8 deep chunks of 64 x 64 voxels for the second box
            assert web.sent["/a.h5"] < max(2 * box.size, 4 * 8 * 64 * 64) * 2 + 2**17
            assert web.answers["/a.h5"] < 24
        assert_holds(source, array)
    assert not list(temporary.iterdir())


def save_hdf5(fill):
    def save(file):
        with h5py.File(file, "w") as hdf5:
            fill(hdf5)

    return content_of(save)


def virtual_dataset(*sources):
    """Fills a file with a dataset "v" that is put together from "x" of files."""

    def fill(hdf5):
        hdf5["x"] = ARRAY
        layout = h5py.VirtualLayout((len(sources) * len(ARRAY), *ARRAY.shape[1:]), ARRAY.dtype)
        for number, name in enumerate(sources):
            layout[number * len(ARRAY) : (number + 1) * len(ARRAY)] = h5py.VirtualSource(
                name, "x", ARRAY.shape
            )
        hdf5.create_virtual_dataset("v", layout)

    return fill


def test_links_and_parts_of_hdf5_lead_to_files_beside_only(tmp_path):
    (tmp_path / "here.h5").write_bytes(save_hdf5(lambda hdf5: hdf5.create_dataset("x", data=[7])))

    def links(hdf5):
        hdf5["near"] = ARRAY
        hdf5["far"] = h5py.ExternalLink("/etc/other.h5", "x")
        hdf5["local"] = h5py.ExternalLink(str(tmp_path / "here.h5"), "x")
        hdf5["beside"] = h5py.ExternalLink("a.h5", "volumes/raw")
        hdf5["absent"] = h5py.ExternalLink("c.h5", "x")
        raw = [(str(tmp_path / "here.h5"), 0, 27000)]
        hdf5.create_dataset("outside", (5, 60, 90), "u1", external=raw)

    folder = put(
        {
            "b.h5": save_hdf5(links),
            "a.h5": FILES["a.h5"],
            "inside.h5": save_hdf5(virtual_dataset(".", ".")),
            "other.h5": save_hdf5(virtual_dataset(".", "a.h5")),
        }
    )
    for name in ("b.h5:near", "b.h5:beside"):
        assert_holds(source_of(f"{folder}/{name}"), ARRAY)
    assert_holds(source_of(f"{folder}/inside.h5:v"), np.concatenate([ARRAY, ARRAY]))
    for name, message in [
        ("b.h5:far", "may lead out of its folder"),
        ("b.h5:local", "may lead out of its folder"),
        ("b.h5:absent", "there is nothing at"),
        ("b.h5:outside", "a file without a format, which is not read in its place"),
        ("other.h5:v", r"put together from a\.h5, another file.*Copy both"),
    ]:
        with pytest.raises(VolumeError, match=message):
            source_of(f"{folder}/{name}")


def test_an_hdf5_file_that_is_replaced_meanwhile_is_not_mixed():
    content = hdf5_bytes(random_array("uint8", (16, 256, 256)))
    folder = put({"a.h5": content})
    source = source_of(f"{folder}/a.h5:volumes/raw")
    read = source.open()
    open_kvstore(folder).write("a.h5", content + b"x").result()
    with pytest.raises(WorkerFault, match=r"a\.h5 was changed since"):
        read(source.info.bounds)


def test_a_chunk_of_hdf5_that_is_cut_off_or_too_short_is_told():
    def fill(hdf5):
        dataset = hdf5.create_dataset("x", ARRAY.shape, "u2", chunks=(1, 40, 30))
        dataset[...] = ARRAY
        short = hdf5.create_dataset("y", ARRAY.shape, "u2", chunks=(1, 40, 30), compression="gzip")
        short[...] = ARRAY
        short.id.write_direct_chunk((2, 0, 0), zlib.compress(ARRAY[2].tobytes()[:-2]))

    source = source_of(f"{put({'a.h5': save_hdf5(fill)})}/a.h5:y")
    read = source.open()
    first = BoundingBox((0, 0, 0), (2, 40, 30))
    np.testing.assert_array_equal(read(first)[0], ARRAY[:2])
    with pytest.raises(PermanentReadError, match=r"chunk at \(2, 0, 0\) holds 2,398 bytes"):
        read(source.info.bounds)
    np.testing.assert_array_equal(read(first)[0], ARRAY[:2])


def slices_of(array, kind, pattern="s{}"):
    def save(plane):
        image = Image.fromarray(plane)
        return content_of(lambda file: image.save(file, kind))

    return {f"{pattern.format(z)}.{kind}": save(plane) for z, plane in enumerate(array)}


@pytest.mark.parametrize("kind", ["png", "tiff"])
def test_slices_in_a_store(kind):
    array = random_array("uint16", (12, 20, 30))
    folder = put(slices_of(array, kind) | {"notes.txt": b"no slice", "deep/s99.png": b"not read"})
    for url in (folder, f"{folder}/", f"{folder}/*.{kind}"):
        source = source_of(url)
        assert_holds(source, array)
        assert source.info.grain == (1, 20, 30)
        assert source.info.notes == ()
    assert_holds(source_of(f"{folder}/s1?.{kind}"), array[10:])
    assert_holds(source_of(f"{folder}/s3.{kind}"), array[3:4])


def test_slices_in_a_store_are_checked_as_those_here():
    array = random_array("uint8", (5, 20, 30))
    files = slices_of(array, "png")
    folder = put(files)
    source = source_of(f"{folder}/*.png")
    identity = source.identity
    open_kvstore(folder).write("s3.png", slices_of(array[::-1], "png")["s0.png"]).result()
    assert source_of(f"{folder}/*.png").identity != identity
    read = source.open()
    np.testing.assert_array_equal(read(BoundingBox((0, 0, 0), (3, 20, 30)))[0], array[:3])
    with pytest.raises(WorkerFault, match="s3.png was changed since"):
        read(BoundingBox((2, 0, 0), (5, 20, 30)))
    open_kvstore(folder).write("s3.png", None).result()
    with pytest.raises(WorkerFault, match="not those that were there"):
        source.open()
    assert "slices are missing" in source_of(f"{folder}/*.png").info.notes[0]
    other = files | {"s9.png": slices_of(array[:, :5], "png")["s0.png"]}
    with pytest.raises(VolumeError, match="5 × 30"):
        source_of(put(other))
    with pytest.raises(VolumeError, match="matches no slices"):
        source_of(f"{put({'a.txt': b'x'})}/*.png")
    cut = put(files | {"s2.png": files["s2.png"][:-60]})
    read = source_of(cut).open()
    with pytest.raises(PermanentReadError, match=f"cannot read {cut}/s2.png"):
        read(BoundingBox((0, 0, 0), (5, 20, 30)))
    large = source_of(put(files | {"s2.png": files["s2.png"] + bytes(2**24 + 1200)}))
    with pytest.raises(PermanentReadError, match="s2.png has more than"):
        large.open()(large.info.bounds)


def test_slices_are_in_the_order_of_their_names_as_they_read():
    """In URLs a space is ``%20``, whose digits would come before those of the number."""
    array = random_array("uint8", (6, 20, 30))
    pictures = slices_of(array, "png").values()
    names = [f"t µ {number}.png" for number in ("07", "08", "9", "10", "11", "12")]
    source = source_of(put(dict(zip(names, pictures, strict=True))))
    assert_holds(source, array)
    assert source.info.notes == ()
    gap = dict(zip((f"s {z}.png" for z in (8, 9, 11, 12, 13, 14)), pictures, strict=True))
    (note,) = source_of(put(gap)).info.notes
    assert note.endswith("move up: 10; the order of the slices is s 8.png … s 14.png")
    with pytest.raises(VolumeError, match=r"two slices have one number: s 05\.png and s 5\.png"):
        source_of(put(dict(zip(("s 5.png", "s 05.png", "s 6.png"), pictures, strict=False))))


def on_the_web(files):
    """A web server of files in the folder "em"."""
    return WebFiles({f"/em/{name}": content for name, content in files.items()})


@pytest.mark.parametrize("kind", ["png", "tiff"])
def test_slices_on_a_web_server_are_named_by_a_range_or_a_list(kind):
    array = random_array("uint16", (12, 20, 30))
    files = slices_of(array, kind, "s{:03d}")
    names = "\n".join(["names.txt", *sorted(files)]).encode()  # as ls lists them
    with on_the_web(files | {"names.txt": names}) as web:
        for name in (f"s{{000..011}}.{kind}", "names.txt"):
            source = source_of(f"{web.url}/em/{name}")
            assert_holds(source, array)
            assert source.info.notes == ()
        part = source_of(f"{web.url}/em/s{{005..007}}.{kind}")
        web.answers.clear()
        part.open()(part.info.bounds)
        assert set(web.answers) == {f"/em/s{z:03d}.{kind}" for z in (5, 6, 7)}


@pytest.mark.parametrize("kind", ["png", "tiff"])
@pytest.mark.parametrize("shape", [(20, 31), (21, 30), (20, 29), (10, 30)])
def test_a_slice_that_became_another_picture_is_refused(kind, shape):
    """Also where what a server states does not change with it."""
    files = slices_of(random_array("uint8", (3, 20, 30)), kind)
    served = {f"/em/{name}": content for name, content in files.items()}
    with WebFiles(served) as web:
        source = source_of(f"{web.url}/em/s{{0..2}}.{kind}")
        read = source.open()
        read(source.info.bounds)
        other = slices_of(random_array("uint8", (1, *shape)), kind)
        served[f"/em/s1.{kind}"] = other[f"s0.{kind}"]
        with pytest.raises(PermanentReadError, match="is another picture than when its header"):
            read(source.info.bounds)


def test_slices_that_are_not_there_are_refused_or_told():
    array = random_array("uint8", (9, 20, 30))
    files = slices_of(array, "png")
    del files["s4.png"]
    with on_the_web(files | {"names.txt": "\n".join(files).encode()}) as web:
        with pytest.raises(VolumeError, match=r"there is nothing at .*/em/s4\.png"):
            source_of(f"{web.url}/em/s{{0..8}}.png")
        source = source_of(f"{web.url}/em/names.txt")
        assert "slices are missing, and those behind them move up: 4" in source.info.notes[0]
        for name in ("*.png", "", "s"):
            with pytest.raises(VolumeError, match="Web servers do not list their files"):
                source_of(f"{web.url}/em/{name}")
        with pytest.raises(VolumeError, match=r"there is nothing at .*/em/s0$"):
            source_of(f"{web.url}/em/s{{0..3}}")
        with pytest.raises(ConfigError, match="has no datasets"):
            source_of(f"{web.url}/em/names.txt", dataset="x")


def test_a_list_that_is_changed_is_noticed():
    array = random_array("uint8", (3, 20, 30))
    files = slices_of(array, "png")
    folder = put(files | {"names.txt": "\n".join(files).encode()})
    source = source_of(f"{folder}/names.txt")
    open_kvstore(folder).write("names.txt", b"s0.png\ns1.png").result()
    with pytest.raises(WorkerFault, match="not those that were there at the launch"):
        source.open()


def dicom_files(folder, array, **options):
    written = write_dicom(folder, array, **options)
    return {path.name: path.read_bytes() for path in sorted(written.iterdir())}


def test_series_of_dicom_in_stores_and_on_web_servers(tmp_path):
    array = random_array("uint16", (6, 20, 30))
    files = dicom_files(tmp_path / "ct", array, intercept=-7)
    plain = {f"IM{n}": content for n, content in enumerate(files.values())}
    names = "\n".join(files).encode()
    here = find_source(str(tmp_path / "ct"), None, 0, LOCAL)
    folder = put(files | {"notes.txt": b"no picture", "DICOMDIR": b"x"})
    other = put(plain)
    with on_the_web(files | plain | {"names.txt": names}) as web:
        for url in (
            f"{web.url}/em/names.txt",
            f"{web.url}/em/IM{{0..5}}",
            folder,
            f"{folder}/*.dcm",
            other,
            f"{other}/IM?",
        ):
            source = source_of(url)
            assert source.info == here.info
            assert_holds(source, array.astype(np.float32) - 7, (2e6, 5e5, 5e5))


def test_a_slice_of_dicom_that_is_replaced_or_damaged_is_noticed(tmp_path):
    files = dicom_files(tmp_path / "ct", random_array("uint8", (4, 20, 30)))
    folder = put(files)
    source = source_of(folder)
    name = next(iter(files))
    open_kvstore(folder).write(name, files[name] + b"x").result()
    with pytest.raises(WorkerFault, match=f"{name} was changed since"):
        source.open()(source.info.bounds)
    assert source_of(folder).identity != source.identity
    last = "1_024.dcm"  # whose place is that of the highest number
    cut = put(files | {last: files[last][:-300]})
    with pytest.raises(VolumeError, match=f"{cut}/{last} has 300 bytes of pixels"):
        source_of(cut)
    nonsense = put({name: b"nonsense" * 40})
    with pytest.raises(VolumeError, match=f"{nonsense}/{name} cannot be read as DICOM"):
        source_of(f"{nonsense}/{name}")
    with pytest.raises(VolumeError, match="is no DICOM file"):
        source_of(f"{put({'IM0.dcm': files[name], 'IM1.dcm': bytes(200)})}/IM{{0..1}}.dcm")


def test_a_file_of_many_frames_is_read_in_parts(tmp_path):
    array = random_array("uint16", (20, 200, 300))
    content = multiframe_dicom(tmp_path, array)
    with on_the_web({"a.dcm": content}) as web:
        source = source_of(f"{web.url}/em/a.dcm")
        web.sent.clear()
        part = BoundingBox((3, 0, 0), (6, 200, 300))
        np.testing.assert_array_equal(source.open()(part)[0], array[3:6])
        assert web.sent["/em/a.dcm"] < len(content) / 2
        assert_holds(source, array, (2e6, 5e5, 5e5))


def multiframe_dicom(folder, array):
    """A file of many frames without positions."""
    import pydicom

    path = next(iter(sorted(write_dicom(folder / "one", array[:1]).iterdir())))
    data = pydicom.dcmread(path)
    data.NumberOfFrames = len(array)
    data.PixelData = array.tobytes()
    del data.ImagePositionPatient
    data.save_as(path)
    return path.read_bytes()


def test_credentials_in_the_url_of_a_file_are_not_repeated(tmp_path, capsys):
    for name in ("a.npy?token=planted", "z{0..3}.png?token=planted", "a.npy?token=planted&x.txt"):
        url = f"https://host/{name}"
        assert main(["convert", url, str(tmp_path / "out"), "--voxel-size=8,8,8"]) == 2
        told = "".join(capsys.readouterr())
        assert "holds credentials" in told
        assert "planted" not in told


@pytest.mark.slow
def test_a_bucket_that_fails_now_and_then(tmp_path, monkeypatch, capsys):
    array = random_array("uint8", (40, 100, 90))
    with GcsStandIn("data", fail_rate=0.1, latency=0.002, seed=1) as gcs:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.url)
        gcs.put("data", "in/a.npy", content_of(lambda file: np.save(file, array)))
        for name, content in slices_of(array, "png").items():
            gcs.put("data", f"s/{name}", content)
        gcs.put("data", "in/a.h5", hdf5_bytes(array))
        for number, source in enumerate(["in/a.npy", "s/*.png", "in/a.h5:volumes/raw"]):
            words = [f"gs://data/{source}", "gs://data/out", "--voxel-size=8,8,8", "--overwrite"]
            assert main(["convert", *words]) == 0, source
            told = "".join(capsys.readouterr())
            assert "MiB of voxels in memory" in told
            copy = f"{tmp_path}/{number}.npy"
            assert main(["convert", "gs://data/out", copy, "--drop=voxel-size"]) == 0
            np.testing.assert_array_equal(np.load(copy), array)
        assert sum(gcs.failures.values()) > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["s", "a.h5", "a.nii.gz", "a.tif"])
def test_workers_in_processes_of_their_own_read_files_of_s3(tmp_path, monkeypatch, name):
    for variable, value in KEYS.items():
        monkeypatch.setenv(variable, value)
    array = random_array("uint16", (70, 130, 120))
    files = {
        "s": slices_of(array, "png", "s/s{}"),
        "a.h5": {"a.h5": hdf5_bytes(array)},
        "a.nii.gz": {"a.nii.gz": gzip.compress(nifti_bytes(array, (1, 1, 1)))},
        "a.tif": {
            "a.tif": content_of(lambda file: tifffile.imwrite(file, array, compression="zlib"))
        },
    }[name]
    with S3StandIn(["data"], fail_rate=0.02, latency=0.002) as s3:
        client = s3.client()
        for key, content in files.items():
            client.put_object(Bucket="data", Key=key, Body=content)
        settings = {"endpoint": s3.url, "region": "us-east-1", "credentials": "environment"}
        result = convert(
            f"s3://data/{name}",
            str(tmp_path / "out"),
            voxel_size_nm=(8, 8, 8),
            block_shape=(16, 64, 64),
            window_bytes=2**19,
            storage=Storage.model_validate({"s3": settings}),
            flags=PROCESSES,
        )
    assert result.outcome.is_complete
    assert result.outcome.chunks > 2
    np.testing.assert_array_equal(read_volume(tmp_path / "out")[0], array)


def test_the_python_function_takes_settings_of_stores(tmp_path):
    with GcsStandIn("data") as gcs:
        storage = Storage.model_validate({"gcs": {"endpoint": gcs.url}})
        gcs.put("data", "a.npy", FILES["a.npy"])
        result = convert(
            "gs://data/a.npy", str(tmp_path / "a.nrrd"), voxel_size_nm=(8, 8, 8), storage=storage
        )
    assert result.exit_code == 0
    assert_holds(find_source(str(tmp_path / "a.nrrd"), None, 0, LOCAL), ARRAY, (8, 8, 8))
