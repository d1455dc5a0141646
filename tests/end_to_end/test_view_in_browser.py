"""What Neuroglancer shows is what is stored, voxel by voxel; skipped where there is no Chromium."""

import gzip
import json

import numpy as np
import pytest
import tensorstore as ts
from browser import chromium, microscope, served
from helpers import TOYS, job_values, read_volume, write_job, write_volume
from neuroglancer.segment_colors import hex_string_from_segment_id

from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.place import THIS_PROCESS
from beam_inference.job.records import QuarantineRecord
from beam_inference.job.state import State, default_state_url
from beam_inference.launch.job_files import load_job
from beam_inference.launch.planned_job import plan_job
from beam_inference.launch.prepare import resolve
from beam_inference.pyramid.multiscale import multiscale_volume
from beam_inference.pyramid.pyramid import plan_pyramid
from beam_inference.view.layers import view_of
from beam_inference.view.shaders import CLASS_COLORS
from beam_inference.volumes.kvstores import LOCAL
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.outputs import create_output

SHAPE = (20, 40, 50)
SIZE_NM = (40.0, 8.0, 4.0)
POSITIONS = [(0, 0, 0), (19, 39, 49), (7, 33, 20), (15, 3, 48)]


@pytest.fixture(scope="module")
def page():
    with chromium() as page:
        yield page


def random(dtype="uint8", shape=SHAPE):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=dtype)


def write(folder, array, spec):
    """Write (z, y, x) or (c, z, y, x) by a TensorStore spec; precomputed ones are xyzc."""
    spec = {**spec, "kvstore": {"driver": "file", "path": str(folder)}, "create": True}
    array = (
        array
        if spec["driver"] != "neuroglancer_precomputed"
        else array.reshape(-1, *SHAPE).transpose(3, 2, 1, 0)
    )
    store = ts.open(
        spec, dtype=array.dtype, shape=None if "scale_metadata" in spec else array.shape
    ).result()
    store.write(array).result()
    return f"file://{folder}"


def precomputed(**scale):
    scale = {
        "size": SHAPE[::-1],
        "resolution": SIZE_NM[::-1],
        "chunk_size": [16, 16, 16],
        "encoding": "raw",
        **scale,
    }
    return {
        "driver": "neuroglancer_precomputed",
        "scale_metadata": scale,
        "multiscale_metadata": {"num_channels": 1},
    }


SHARDED = {
    "@type": "neuroglancer_uint64_sharded_v1",
    **{"preshift_bits": 1, "minishard_bits": 2, "shard_bits": 1, "hash": "identity"},
    **{"minishard_index_encoding": "gzip", "data_encoding": "gzip"},
}
UNITS = {"dimension_units": [f"{size} nm" for size in SIZE_NM]}
NAMED = {"dimension_names": ["z", "y", "x"]}
SPECS = {
    "raw": precomputed(),
    "sharded": precomputed(sharding=SHARDED),
    "zarr3": {"driver": "zarr3", "metadata": NAMED, "schema": UNITS},
    "zarr3 sharded": {
        "driver": "zarr3",
        "metadata": NAMED,
        "schema": {
            **UNITS,
            "chunk_layout": {
                "read_chunk": {"shape": [8, 8, 8]},
                "write_chunk": {"shape": [16, 16, 16]},
            },
        },
    },
    "zarr2, no names, no units": {"driver": "zarr", "metadata": {"chunks": [8, 16, 16]}},
    "n5": {
        "driver": "n5",
        "metadata": {
            "blockSize": [16, 8, 8],
            "compression": {"type": "gzip"},
            "axes": ["x", "y", "z"],
            **{"units": ["nm", "nm", "nm"], "resolution": SIZE_NM[::-1]},
        },
    },
    "n5, no units": {
        "driver": "n5",
        "metadata": {"blockSize": [16, 8, 8], "compression": {"type": "raw"}},
    },
}


def closely(view):
    """Serves what the command would, to be looked at closely."""
    return served(view.folders, lambda base: microscope(view.state(base, 100)))


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind == "zarr3 sharded" else pytest.param(kind, marks=pytest.mark.slow)
        for kind in SPECS
    ],
)
def test_the_pixel_in_the_middle_is_the_voxel(page, tmp_path, kind):
    array = random()
    stored = array.T if "n5" in kind else array  # n5 lists its axes x first
    view = view_of(None, [write(tmp_path / "volume", stored, SPECS[kind])], patches=False)
    with closely(view) as url:
        page.open(url)
        assert [page.center(position) for position in POSITIONS] == [
            (array[p],) * 3 for p in POSITIONS
        ]
        assert page.complaints() == []
        assert page.layer_errors() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "format", ["precomputed", "zarr3", "zarr2", "n5", "ome_zarr", "ome_zarr_0.4"]
)
def test_three_channels_are_red_green_and_blue(page, tmp_path, format):
    array = random(shape=(3, *SHAPE))
    view = view_of(
        None,
        [write_volume(tmp_path / "volume", array, voxel_size_nm=SIZE_NM, format=format)],
        patches=False,
    )
    with closely(view) as url:
        page.open(url)
        assert [page.center((z, y, x)) for z, y, x in POSITIONS] == [
            tuple(array[:, z, y, x]) for z, y, x in POSITIONS
        ]
        assert (page.complaints(), page.layer_errors()) == ([], [])


@pytest.mark.slow
def test_of_further_axes_and_channels_in_blocks_of_their_own_the_first_is_shown(page, tmp_path):
    array = random(shape=(1, 3, *SHAPE))
    metadata = {
        "dimension_names": ["t", "c", "z", "y", "x"],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, 1, 8, 16, 16]}},
    }
    url = write(tmp_path / "volume", array, {"driver": "zarr3", "metadata": metadata})
    with closely(view_of(None, [url], patches=False)) as viewer:
        page.open(viewer)
        found = [page.center((z, y, x)) for z, y, x in POSITIONS]
        assert (page.complaints(), page.layer_errors()) == ([], [])
        # a slider leads to the others
        assert found == [(array[0, 0, z, y, x],) * 3 for z, y, x in POSITIONS]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["precomputed", "compressed", "zarr3"])
def test_a_label_has_the_colour_of_its_id(page, tmp_path, kind):
    array = random("uint64") + np.uint64(2**40) * random("uint64", SHAPE)
    spec = dict(SPECS["zarr3"]) if kind == "zarr3" else precomputed()
    if kind != "zarr3":
        spec["multiscale_metadata"] = {"num_channels": 1, "type": "segmentation"}
    if kind == "compressed":
        block = {"compressed_segmentation_block_size": [8, 8, 8]}
        spec["scale_metadata"] |= {"encoding": "compressed_segmentation", **block}
    view = view_of(None, [write(tmp_path / "labels", array, spec)], patches=False)
    with closely(view) as url:
        page.open(url)
        colors = [hex_string_from_segment_id(0, int(array[p])) for p in POSITIONS]
        assert [f"#{r:02x}{g:02x}{b:02x}" for r, g, b in map(page.center, POSITIONS)] == colors
        assert (page.complaints(), page.layer_errors()) == ([], [])


@pytest.mark.slow
def test_blocks_as_cloud_volume_writes_them_are_shown(page, tmp_path):
    array = random()
    url = write(tmp_path / "volume", array, precomputed())
    for block in (tmp_path / "volume").rglob("*-*_*-*_*-*"):
        block.with_name(f"{block.name}.gz").write_bytes(gzip.compress(block.read_bytes()))
        block.unlink()
    with closely(view_of(None, [url], patches=False)) as viewer:
        page.open(viewer)
        assert [page.center(position) for position in POSITIONS] == [
            (array[p],) * 3 for p in POSITIONS
        ]
        assert (page.complaints(), page.layer_errors()) == ([], [])


def with_levels(folder, format, start=(0, 0, 0)):
    """URL of a volume of three scales of odd sizes, with blocks smaller than any of them."""
    url = write_volume(
        folder,
        random(shape=(20, 141, 150)),
        start,
        block_shape=(16,) * 3,
        voxel_size_nm=(40, 4, 4),
        format=format,
    )
    pyramid = plan_pyramid(multiscale_volume(url, LOCAL), "mean", (1, 2, 2), 2)
    for stage in pyramid.stages:
        do = stage.make_worker()
        for index in range(stage.count):
            do(index)
    pyramid.volume.list_scales(pyramid.scales)
    return url


@pytest.mark.slow
@pytest.mark.parametrize("format", ["precomputed", "ome_zarr", "ome_zarr_0.4"])
def test_zoomed_out_the_pixel_in_the_middle_is_the_coarse_voxel(page, tmp_path, format):
    url = with_levels(tmp_path / "em", format, (3, -5, 2) if format == "precomputed" else (0, 0, 0))
    view = view_of(None, [url], patches=False)
    for scale, zoom in ((0, 0.02), (1, 2), (2, 4)):
        volume = open_volume(url, scale=scale)
        array = volume.read(volume.bounds)[0]
        start = volume.bounds.start
        some = [(0, 1, 1), (7, 4, 5), (19, 30, 31)]
        # Positions are voxels of the finest scale, of whose middle centre() makes a point.
        places = [[s + i for s, i in zip(start, p, strict=True)] for p in some]
        middles = [
            [i * f + (f - 1) / 2 for i, f in zip(p, (1, 2**scale, 2**scale), strict=True)]
            for p in places
        ]
        with served(
            view.folders, lambda base, zoom=zoom: microscope(view.state(base, 100), zoom)
        ) as viewer:
            page.open(viewer)
            assert [page.center(middle) for middle in middles] == [(array[p],) * 3 for p in some]
            assert (page.complaints(), page.layer_errors()) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize("translated", [True, False])
@pytest.mark.parametrize("format", ["ome_zarr", "ome_zarr_0.4"])
def test_of_a_group_the_scale_that_a_job_reads_lies_where_the_job_says(
    page, tmp_path, format, translated
):
    """Whatever translations its group has: other programs write none."""
    url = with_levels(tmp_path / "em", format)
    if not translated:
        file = tmp_path / "em" / ("zarr.json" if format == "ome_zarr" else ".zattrs")
        group = json.loads(file.read_text())
        (image,) = group.get("attributes", {}).get("ome", group)["multiscales"]
        for each in image["datasets"]:
            del each["coordinateTransformations"][1:]
        file.write_text(json.dumps(group))
    values = job_values(url, tmp_path / "out", input={"scale": 1})
    view = view_of(load_job(str(write_job(tmp_path / "job.yaml", values))), [], patches=False)
    volume = open_volume(url, scale=1)
    array = volume.read(volume.bounds)[0]
    some = [(0, 0, 0), (7, 33, 20), (19, 70, 74)]
    # pixels of a voxel, at least: at this zoom one of scale 1 has 50
    coarse_only = {"crossSectionRenderScale": 60}

    def state(base):
        found = microscope(view.state(base, 100))
        return {**found, "layers": [{**layer, **coarse_only} for layer in found["layers"]]}

    with served(view.folders, state) as viewer:
        page.open(viewer)
        assert [page.center(p) for p in some] == [(array[p],) * 3 for p in some]
        assert (page.complaints(), page.layer_errors()) == ([], [])


def over(below, color, alpha):
    """A colour, 0 to 1, drawn over a grey one, as bytes."""
    return tuple(255 * (alpha * part + (1 - alpha) * below) for part in color)


@pytest.mark.slow
@pytest.mark.parametrize(("activation", "channels"), [("sigmoid", 1), ("softmax", 3)])
def test_a_running_job_shows_what_is_done_over_its_input_and_what_is_quarantined(
    page, job, volume_in, tmp_path, activation, channels
):
    path = job(
        model={"path": f"{TOYS}:conv", "output_channels": channels, "activation": activation}
    )
    config = load_job(path)
    planned = plan_job(config)
    state = State(default_state_url(config))
    resolved = state.create_job(resolve(planned, THIS_PROCESS))
    core = resolved.plan.chunks.core_box(0)
    output = create_output(planned.output)
    written = np.random.default_rng(1).random((channels, *core.shape)).astype(np.float32) / channels
    output.write(core, written)
    box = resolved.plan.chunks.core_box(17)
    record = {
        "stage": "read",
        "cause": "torn",
        "attempts": 1,
        "launch": "a",
        "fingerprint": resolved.fingerprint,
    }
    state.of(resolved).write_quarantine(
        QuarantineRecord(chunk=17, box=box, input_box=box, **record)
    )
    view = view_of(config, [], patches=True)
    image = read_volume(volume_in)[0]
    # chunk 0; one that is not done
    inside = (5, 3, 7)
    missing = (30, 50, 30)
    z, y, x = (p - a for p, a in zip(inside, core.start, strict=True))
    with closely(view) as url:
        page.open(url)
        grey = {
            at: int(image[tuple(p - a for p, a in zip(at, (3, -5, 2), strict=True))])
            for at in (inside, missing)
        }
        values = written[:, z, y, x]
        if channels == 1:
            p = values[0]
            color = np.clip(np.array([0.4, -0.8, -2.0]) + np.array([1.6, 2.3, 3.0]) * p, 0, 1)
            alpha = p
        else:
            colors = [
                [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)] for text in CLASS_COLORS[:2]
            ]
            alpha = values[1] + values[2]
            color = (values[1] * np.array(colors[0]) + values[2] * np.array(colors[1])) / alpha
        assert page.center(inside) == pytest.approx(over(grey[inside] / 255, color, alpha), abs=1.5)
        assert page.center(missing) == (grey[missing],) * 3  # nothing over it
        assert (page.complaints(), page.layer_errors()) == ([], [])
    with served(view.folders, lambda base: {**view.state(base, 100), "layout": "xy"}) as url:
        page.open(url)
        # in the quarantined chunk, whose slices are tinted
        red, green, blue = page.center((39, 62, 43))
        assert red > green + 30
        assert green == blue
        assert (page.complaints(), page.layer_errors()) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "dtypes"),
    [
        ("precomputed", ("uint64", "uint8")),
        ("zarr2", ("int16", "float32")),
        ("ome_zarr", ("int8", "uint32")),
    ],
)
def test_masks_lie_where_the_job_looks_them_up(page, tmp_path, format, dtypes):
    """Masks differ from the input in voxel size, dtype and offset; each tints what it keeps."""
    write_volume(tmp_path / "in", random(shape=(24, 40, 40)), (4, 8, 8))
    start = (1, 2, 3) if format == "precomputed" else (0, 0, 0)
    kept = (np.random.default_rng(2).integers(0, 3, (9, 12, 20)) > 1).astype(dtypes[0])
    kept[kept > 0] = np.uint64(2**40) if dtypes[0] == "uint64" else -1
    write_volume(tmp_path / "kept", kept, start, voxel_size_nm=(30, 40, 20), format=format)
    left_out = np.random.default_rng(3).integers(0, 2, (48, 24, 48)).astype(dtypes[1])
    write_volume(tmp_path / "left_out", left_out, voxel_size_nm=(10, 20, 10), format=format)
    values = job_values(
        tmp_path / "in", tmp_path / "out", input={"mask": {"path": "left_out", "inverse": True}}
    )
    path = write_job(tmp_path / "job.yaml", values | {"mask": {"path": "kept"}})
    config = load_job(str(path))
    view = view_of(config, [], patches=False)
    planned = plan_job(config)
    kinds = {"#cc79a7": (204, 121, 167), "#009e73": (0, 158, 115)}
    masks = planned.masks

    def state(name):
        def of(base):
            layers = microscope(view.state(base, 100))
            return {
                **layers,
                "layers": [layer for layer in layers["layers"] if layer["name"] == name],
            }

        return of

    points = [
        (4, 8, 8),
        (11, 14, 13),
        (12, 12, 19),
        (13, 27, 20),
        (18, 23, 30),
        (26, 45, 41),
        (27, 47, 47),
    ]
    for name, color in (("input.mask", "#009e73"), ("mask", "#cc79a7")):
        keeps = [masks[name].keeps_any(BoundingBox(p, tuple(n + 1 for n in p))) for p in points]
        assert len(set(keeps)) == 2
        with served(view.folders, state(name)) as viewer:
            page.open(viewer)
            assert [page.center(p) for p in points] == [
                kinds[color] if keep else (0, 0, 0) for keep in keeps
            ]
            assert (page.complaints(), page.layer_errors()) == ([], [])


@pytest.mark.slow
def test_the_command_as_it_is_shows_something_at_once(page, tmp_path):
    """Not one setting of the state is changed, and no position is given."""
    url = write_volume(tmp_path / "volume", random(shape=(100, 100, 100)))
    view = view_of(None, [url], patches=False)
    with served(view.folders, lambda base: view.state(base, 100)) as viewer:
        page.open(viewer)
        picture = page.picture()
        height, width = picture.shape[:2]
        for y, x in ((0.25, 0.25), (0.25, 0.75), (0.75, 0.75)):  # the three slices
            around = picture[
                int((y - 0.1) * height) : int((y + 0.1) * height), int((x - 0.1) * width) :
            ][:, :100]
            assert around.std() > 20
        assert (page.complaints(), page.layer_errors()) == ([], [])
