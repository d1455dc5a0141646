"""Entries on how a volume was made stand in its metadata, beside what others have written there."""

import json

import numpy as np
import pytest
from helpers import read_volume, write_volume
from hypothesis import given
from hypothesis import strategies as st

from beam_inference.config.formats import OutputSpec, get_format, installed_formats
from beam_inference.errors import VolumeError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.volumes.kvstores import LOCAL
from beam_inference.volumes.outputs import create_output, open_output
from beam_inference.volumes.provenance import (
    KEY,
    change_provenance,
    in_attributes,
    read_provenance,
)

FORMATS = ("precomputed", "zarr2", "zarr3", "n5", "ome_zarr", "ome_zarr_0.4")
ARRAY = np.arange(20 * 30 * 40, dtype=np.uint8).reshape(20, 30, 40)
ENTRY = {"made_by": "beam-inference run", "sources": ["../in"], "box": None}
FOREIGN = {
    "precomputed": {
        "description": "a fly",
        "owners": ["a@b.org"],
        "sources": ["gs://b/em"],
        "processing": [{"method": {"task": "TransferTask"}, "by": "a@b.org"}],
        "note": 1,
    }
}


def file_of(format, folder):
    return folder / get_format(format).provenance.file


def add(url, *entries):
    change_provenance(url, LOCAL, lambda before: [*before, *entries])


def spec_of(url, format):
    return OutputSpec(
        url=url,
        format=format,
        dtype="uint8",
        channels=1,
        bounds=BoundingBox((0, 0, 0), (8, 8, 8)),
        block_shape=(8, 8, 8),
        voxel_size_nm=(1.0, 1.0, 1.0),
    )


def write_foreign(format, folder):
    """Something of others in the file that holds entries; how it looks."""
    path = file_of(format, folder)
    if format in FOREIGN:
        path.write_text(json.dumps(FOREIGN[format]))
        return FOREIGN[format]
    content = json.loads(path.read_text())
    attributes = content.setdefault("attributes", {}) if path.name == "zarr.json" else content
    attributes["of_others"] = {"a": [1, None]}
    path.write_text(json.dumps(content))
    return content


def test_every_format_of_ours_has_a_place():
    assert {each.name for each in installed_formats() if each.provenance} == set(FORMATS)


@pytest.mark.parametrize("format", FORMATS)
class TestFormats:
    def test_entries_read_back_and_the_voxels_stay(self, format, tmp_path):
        url = write_volume(tmp_path / "out", ARRAY, format=format)
        assert read_provenance(url) == []
        add(url, ENTRY)
        add(url, {**ENTRY, "version": "2"})
        assert read_provenance(url) == [ENTRY, {**ENTRY, "version": "2"}]
        np.testing.assert_array_equal(read_volume(url)[0], ARRAY)

    def test_what_others_have_written_stays(self, format, tmp_path):
        url = write_volume(tmp_path / "out", ARRAY, format=format)
        before = write_foreign(format, tmp_path / "out")
        add(url, ENTRY)
        assert read_provenance(url) == [ENTRY]
        change_provenance(url, LOCAL, lambda _: [])
        after = json.loads(file_of(format, tmp_path / "out").read_text())
        if "attributes" in after:
            assert after["attributes"].pop(KEY) == []
        elif format != "precomputed":
            assert after.pop(KEY) == []
        assert after == before

    def test_entries_and_others_survive_that_the_output_is_created_again(self, format, tmp_path):
        spec = spec_of(f"file://{tmp_path}/out", format)
        create_output(spec)
        before = write_foreign(format, tmp_path / "out")
        add(spec.url, ENTRY)
        create_output(spec)
        assert open_output(spec) is not None
        assert read_provenance(spec.url) == [ENTRY]
        text = file_of(format, tmp_path / "out").read_text()
        assert ("of_others" in text) == ("of_others" in json.dumps(before))

    def test_an_unchanged_list_is_not_written(self, format, tmp_path):
        url = write_volume(tmp_path / "out", ARRAY, format=format)
        add(url, ENTRY)
        path = file_of(format, tmp_path / "out")
        before = path.stat()
        add(url)
        assert path.stat().st_mtime_ns == before.st_mtime_ns

    @pytest.mark.parametrize("wrong", [{"a": 1}, [1], "text", [[]], 3])
    def test_something_else_in_its_place_is_refused_and_stays(self, format, wrong, tmp_path):
        url = write_volume(tmp_path / "out", ARRAY, format=format)
        path = file_of(format, tmp_path / "out")
        content = json.loads(path.read_text()) if path.exists() else {}
        if format == "precomputed":
            content["processing"] = wrong
        elif path.name == "zarr.json":
            content.setdefault("attributes", {})[KEY] = wrong
        else:
            content[KEY] = wrong
        path.write_text(json.dumps(content))
        for action in (lambda: read_provenance(url), lambda: add(url, ENTRY)):
            with pytest.raises(VolumeError, match=f"{path.name} cannot be understood: its"):
                action()
        assert json.loads(path.read_text()) == content


def test_our_sources_go_with_our_entries_and_others_stay(tmp_path):
    url = write_volume(tmp_path / "out", ARRAY)
    (tmp_path / "out/provenance").write_text(json.dumps(FOREIGN["precomputed"]))
    add(url, ENTRY, {**ENTRY, "sources": ["../mask", "../in", 3]}, {"sources": 1})
    content = json.loads((tmp_path / "out/provenance").read_text())
    assert content["sources"] == ["gs://b/em", "../in", "../mask"]
    assert [step["by"] for step in content["processing"]] == ["a@b.org", *["beam-inference"] * 3]
    change_provenance(url, LOCAL, lambda entries: entries[:1])
    content = json.loads((tmp_path / "out/provenance").read_text())
    assert content["sources"] == ["gs://b/em", "../in"]
    assert content["owners"] == ["a@b.org"]


def test_a_file_that_is_no_json_is_refused_and_stays(tmp_path):
    url = write_volume(tmp_path / "out", ARRAY)
    (tmp_path / "out/provenance").write_text("{'json5': 1}")
    with pytest.raises(VolumeError, match="provenance is not valid JSON.* mend it, or remove it"):
        read_provenance(url)
    with pytest.raises(VolumeError, match="provenance is gone, or holds no JSON object"):
        add(url, ENTRY)
    assert (tmp_path / "out/provenance").read_text() == "{'json5': 1}"


def test_an_abyss_of_values_is_refused(tmp_path):
    url = write_volume(tmp_path / "out", ARRAY, format="zarr2")
    deep = "[" * 400 + "]" * 400
    path = tmp_path / "out/.zattrs"
    path.write_text(path.read_text()[:-1] + f', "{KEY}": [{{"a": {deep}}}]}}')
    with pytest.raises(VolumeError, match="nested on more than 32 levels"):
        read_provenance(url)


def test_no_volume_has_no_entries(tmp_path):
    with pytest.raises(VolumeError, match="there is no volume at"):
        read_provenance(f"file://{tmp_path}/nothing")


def test_entries_lie_in_a_store_of_objects_too():
    for format in FORMATS:
        spec = spec_of(f"memory://provenance/{format}", format)
        create_output(spec)
        add(spec.url, ENTRY)
        add(spec.url, {**ENTRY, "version": "2"})
        assert len(read_provenance(spec.url)) == 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
ENTRIES = st.lists(st.dictionaries(st.text(), JSON), max_size=3)


@given(st.dictionaries(st.text().filter(lambda key: key != KEY), JSON), ENTRIES, ENTRIES)
def test_attributes_keep_whatever_else_they_hold(others, first, second):
    place = in_attributes("file", "attributes")
    content = {"attributes": others, "x": 1}
    content = place.with_entries(place.with_entries(content, first), second)
    assert place.entries(content) == second
    del content["attributes"][KEY]
    assert content == {"attributes": others, "x": 1}


@pytest.mark.slow
@given(
    st.fixed_dictionaries({}, optional={"owners": JSON, "sources": st.lists(st.text()), "x": JSON}),
    ENTRIES,
    ENTRIES,
)
def test_the_file_provenance_keeps_whatever_else_it_holds(others, first, second):
    place = get_format("precomputed").provenance
    step = {"method": "by hand", "by": "me"}
    content = {**others, "processing": [step]}
    content = place.with_entries(place.with_entries(content, first), second)
    assert place.entries(content) == second
    assert content["processing"][0] == step
    for key in {"owners", "x"} & set(others):
        assert content[key] == others[key]
