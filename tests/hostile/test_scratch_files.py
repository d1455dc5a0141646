"""Files and records between the stages of labels, exchanged or forged between two launches."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import read_volume, write_volume

from beam_inference.errors import StateError
from beam_inference.segmentation import component_stages, segment_stages
from beam_inference.segmentation.make_labels import components, segment
from beam_inference.segmentation.scratch import Scratch
from beam_inference.volumes.kvstores import LOCAL

pytestmark = pytest.mark.slow  # each starts a pipeline of ten stages, some three seconds

CHUNK = (8, 8, 8)
SHAPE = (8, 16, 16)
CHUNKS = 4


def make(kind, folder, out):
    if kind == "components":
        return components(
            str(folder / "image"), str(folder / out), threshold=200, chunk_shape=CHUNK
        )
    return segment(
        str(folder / "links"), str(folder / out), threshold=130, low=25, high=250, chunk_shape=CHUNK
    )


def stop(index):
    raise RuntimeError("stopped here")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """Volumes; labels of both kinds; and labels whose launch ended before they were painted."""
    folder = tmp_path_factory.mktemp("scratch_files")
    random = np.random.default_rng(0)
    coarse = random.integers(0, 256, (3, 4, 8, 8)).astype(np.uint8)
    links = coarse.repeat(2, 1).repeat(2, 2).repeat(2, 3)
    assert links.shape[1:] == SHAPE
    write_volume(folder / "links", links, block_shape=CHUNK)
    write_volume(folder / "image", links[0], block_shape=CHUNK)
    for kind, module, painting in (
        ("components", component_stages, "relabel"),
        ("segment", segment_stages, "paint"),
    ):
        assert make(kind, folder, f"{kind}_whole").outcome.is_complete
        for stage in (painting, "tabulate"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, stage, lambda *_: stop)
                assert not make(kind, folder, f"{kind}_{stage}").outcome.is_complete
    return folder


@pytest.fixture
def begun(workplace, tmp_path):
    """Copies labels that were begun to where they may be damaged; returns their scratch folder."""

    def copy(kind, stage):
        for name in ("image", "links"):
            shutil.copytree(workplace / name, tmp_path / name)
        # paths are part of what a job is, so that it goes on only where it began
        target = workplace / f"{kind}_{stage}"
        kept = tmp_path / "kept"
        shutil.copytree(target, kept)
        yield_to.append((kept, target))
        (scratch,) = (target / "_beam_inference" / f"{kind}_scratch").iterdir()
        return scratch

    yield_to: list[tuple[Path, Path]] = []
    yield copy
    for kept, target in yield_to:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(kept, target, symlinks=True)


def path_of(scratch, kind, index):
    return scratch / kind / "000000000" / f"{index:012d}"


def forge(folder, kind, index, **changed):
    """Write a file with all that it says of itself, and other arrays."""
    scratch = Scratch(folder.as_uri(), LOCAL)
    scratch.write(kind, index, **{**scratch.read(kind, index), **changed})


def causes(result):
    assert result.outcome.exit_code == 1
    return " ".join(result.outcome.failures)


@pytest.mark.parametrize("file", ["labels", "touching_ids", "faces", "touching"])
def test_files_of_two_chunks_that_were_exchanged_are_refused(workplace, begun, file):
    scratch = begun("components", "relabel")
    one, other = (path_of(scratch, file, index) for index in (0, 1))
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    with pytest.raises(StateError, match=f"{file}.* is damaged .*its content is not that of"):
        Scratch(scratch.as_uri(), LOCAL).read(file, 0)
    if file == "labels":
        assert "its content is not that of" in causes(
            make("components", workplace, target_of(scratch))
        )


def target_of(scratch):
    return scratch.parents[2].name


def blocks_of(volume):
    (folder,) = (path for path in volume.iterdir() if path.name[0].isdigit())
    return folder


@pytest.mark.parametrize(
    "labels",
    [
        np.full(CHUNK, 2_000_000_000, np.uint32),
        np.full(CHUNK, 500, np.uint32),
        np.zeros((1, 1, 1), np.uint32),
        np.zeros(CHUNK, np.float32),
    ],
    ids=["far", "near", "small", "floats"],
)
@pytest.mark.parametrize(("kind", "stage"), [("components", "relabel"), ("segment", "paint")])
def test_labels_beyond_what_loops_may_read_are_refused(workplace, begun, kind, stage, labels):
    scratch = begun(kind, stage)
    forge(scratch, "labels", 0, labels=labels)
    result = make(kind, workplace, target_of(scratch))
    assert "are not those that an earlier stage wrote" in causes(result)


@pytest.mark.parametrize(("kind", "stage"), [("components", "relabel"), ("segment", "paint")])
def test_records_of_another_stage_do_not_count(workplace, begun, kind, stage):
    scratch = begun(kind, stage)
    name = target_of(scratch)
    records = workplace / name / "_beam_inference" / kind / scratch.name
    for other in (stage, "tabulate", "clean"):
        shutil.rmtree(records / other, ignore_errors=True)
        shutil.copytree(records / "label", records / other)
    with pytest.raises(StateError, match="does not hold what its source gives"):
        make(kind, workplace, name)
    shutil.rmtree(records / stage)
    assert make(kind, workplace, name).outcome.is_complete
    np.testing.assert_array_equal(
        read_volume(workplace / name), read_volume(workplace / f"{kind}_whole")
    )


@pytest.mark.parametrize("damage", ["all", "one", "exchanged"])
@pytest.mark.parametrize("kind", ["components", "segment"])
def test_blocks_that_were_changed_before_the_table_are_noticed(workplace, begun, kind, damage):
    name = target_of(begun(kind, "tabulate"))
    folder = blocks_of(workplace / name)
    blocks = sorted(folder.iterdir())
    assert len(blocks) == CHUNKS
    if damage == "all":
        shutil.rmtree(folder)
    elif damage == "one":
        blocks[0].unlink()
    else:
        content = blocks[0].read_bytes()
        blocks[0].write_bytes(blocks[1].read_bytes())
        blocks[1].write_bytes(content)
    with pytest.raises(StateError, match="does not hold what its source gives"):
        make(kind, workplace, name)


def test_a_bit_of_the_records_of_the_table_that_flips_is_noticed(workplace, begun):
    scratch = begun("components", "tabulate")
    path = path_of(scratch, "rows", 0)
    content = bytearray(path.read_bytes())
    content[3] ^= 64
    path.write_bytes(content)
    assert "is damaged, or another one" in causes(make("components", workplace, target_of(scratch)))


@pytest.mark.parametrize("place", ["components", "scratch", "records"])
def test_no_link_between_the_output_and_a_file_is_followed(workplace, begun, tmp_path, place):
    scratch = begun("components", "relabel")
    name = target_of(scratch)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "000000.csv").write_text("precious")
    records = workplace / name / "_beam_inference" / "components" / scratch.name
    link = {
        "components": workplace / name / "components",
        "scratch": scratch / "labels" / "000000000",
        "records": records / "relabel" / "done" / "000000000",
    }[place]
    shutil.rmtree(link, ignore_errors=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside)
    if place == "scratch":
        shutil.rmtree(records / "label")
    try:
        result = make("components", workplace, name)
    except Exception as error:
        assert "is a link" in str(error)  # noqa: PT017 - some stages end the launch, others do not
    else:
        assert not result.outcome.is_complete
    assert [path.name for path in outside.iterdir()] == ["000000.csv"]
    assert (outside / "000000.csv").read_text() == "precious"


def test_a_record_says_of_which_stage_it_is(workplace):
    (path,) = (workplace / "components_whole/_beam_inference/components").glob(
        "*/relabel/done/*/000000000000.json"
    )
    assert json.loads(path.read_text())["stage"] == "relabel"
