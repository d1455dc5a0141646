"""Job files of several volumes: rows, tables, and what is refused."""

import pytest
from helpers import job_values

from beam_inference.config.cohort import job_schema, parse_cohort, parse_table, rows_of_list
from beam_inference.errors import ConfigError


def cohort_of(tmp_path, rows, overrides=(), **sections):
    values = job_values("in", "out/{name}", **({"job": {"state_path": "state"}} | sections))
    return parse_cohort(values, rows_of_list(rows, "job.yaml"), tmp_path, "job.yaml", overrides)


def test_each_row_is_a_job_with_a_state_of_its_own(tmp_path):
    rows = [
        "scans/a.ome.zarr",
        {
            "name": "b",
            "input": {"path": "b", "channel": 0},
            "output": {"dtype": "uint8", "value_range": [0, 1]},
            "roi": {"start": [0, 0, 0], "stop": [8, 8, 8]},
            "mask": "masks/{name}",
            "model": {"normalize": "unit"},
            "model.voxel_size_nm": [40, 4, 4],
        },
    ]
    cohort = cohort_of(tmp_path, rows, ["inference.batch_size=1"])
    assert list(cohort.volumes) == ["a", "b"]
    assert cohort.state_url == f"file://{tmp_path}/state"
    a, b = cohort.volumes.values()
    assert a.input.path == f"file://{tmp_path}/scans/a.ome.zarr"
    assert a.output.path == f"file://{tmp_path}/out/a"
    assert a.job.state_path == f"file://{tmp_path}/state/volumes/a"
    assert (a.output.dtype, b.output.dtype) == ("float32", "uint8")
    assert b.input.channel == [0]
    assert b.mask.path == f"file://{tmp_path}/masks/b"
    assert b.roi.stop == (8, 8, 8)
    assert (b.model.voxel_size_nm, a.model.voxel_size_nm) == ((40, 4, 4), None)
    assert a.inference == b.inference
    assert a.inference.batch_size == 1
    assert cohort.of("b") is b


def test_a_table_has_a_column_for_each_key():
    table = (
        "name,input,output,roi,voxel_size_nm,mask,input.channel\n"
        'x,in/x,out/x,"0:8, 1:9,2:10","[40, 4, 4]",,\n'
        "\n"
        "y,in/y,,,,m/y,2\n"
    )
    x, y = parse_table(table, "t.csv")
    assert x == {
        "name": "x",
        "input": "in/x",
        "output": "out/x",
        "roi": {"start": [0, 1, 2], "stop": [8, 9, 10]},
        "voxel_size_nm": [40, 4, 4],
    }
    assert y == {"name": "y", "input": "in/y", "mask": "m/y", "input.channel": 2}


def test_volumes_may_share_an_input(tmp_path):
    rows = [{"name": name, "input": "in"} for name in "abc"]
    assert len(cohort_of(tmp_path, rows).volumes) == 3


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "lists no volume"),
        ([{"output": "x"}], "row 1: give a name, or the path of its input"),
        ([{"name": "a/b", "input": "x"}], "letters, digits"),
        (["x/a", "y/a"], "two volumes are called a"),
        ([3], "expected the path of an input, or a mapping"),
        ([{"input": "a", "inference": {}}], "volume a: inference is no key that a volume may have"),
        ([{"input": "a", "model": {"path": "n"}}], "model is no key that a volume may have"),
        ([{"input": "a", "model.path": "n"}], r"model\.path is no key that a volume may have"),
        ([{"input": "a", "roi": 3}], "volume a is not a valid job"),
        ([{"input": "a", "output": "o"}, {"input": "b", "output": "o/b"}], "a and b|b and a"),
        ([{"input": "a", "output": "b"}, {"input": "b"}], "volumes a and b both use"),
        ([{"input": "a", "output": {"pyramid": True}}], "output.pyramid is for jobs of one volume"),
    ],
)
def test_what_is_refused(tmp_path, rows, message):
    with pytest.raises(ConfigError, match=message):
        cohort_of(tmp_path, rows)


@pytest.mark.parametrize("name", ["link", "sub/../a", "file://{folder}/%61"])
@pytest.mark.parametrize("section", ["output", "outputs.second.path"])
def test_no_volume_writes_into_what_another_reads_by_another_name(tmp_path, name, section):
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    rows = [{"input": "a"}, {"input": "b", section: name.format(folder=tmp_path)}]
    with pytest.raises(ConfigError, match="the volumes [ab] and [ab] both use"):
        cohort_of(tmp_path, rows)


def test_no_volume_writes_into_the_mask_of_another(tmp_path):
    rows = [{"input": "a", "mask": "tissue"}, {"input": "b", "output": "tissue/b"}]
    with pytest.raises(ConfigError, match="both use .*tissue"):
        cohort_of(tmp_path, rows)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"job": {}}, "job.state_path is missing"),
        ({"inference": {"precision": "int8", "engine": "openvino"}}, "precision: int8 is calibrat"),
        ({"inference": {"mixed_devices": True}}, "mixed_devices is for jobs of one volume"),
        ({"inference": {"partition": [1, 1, 2]}}, "partition is for jobs of one volume"),
    ],
)
def test_what_a_job_of_several_volumes_cannot_have(tmp_path, sections, message):
    with pytest.raises(ConfigError, match=message):
        cohort_of(tmp_path, ["a"], **sections)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("", "is empty"),
        ("input,input\na,b\n", "two columns"),
        ("input,output\na\n", "row 2: 1 cells, the header has 2"),
        ('input\n"a\n', "is no CSV"),
        ("input,roi\na,0:3\n", "roi: expected z0:z1,y0:y1,x0:x1; found 0:3"),
        (f'input,roi\na,"0:{"9" * 5000},0:1,0:1"\n', "roi: expected z0:z1,y0:y1,x0:x1"),
        ("input,input.channel\na,[\n", r"row 2: input\.channel"),
    ],
)
def test_tables_that_are_none(table, message):
    with pytest.raises(ConfigError, match=message):
        parse_table(table, "t.csv")


def test_an_unknown_volume_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="no such volume; did you mean 'scan1'"):
        cohort_of(tmp_path, ["scan1"]).of("scan2")


def test_the_schema_accepts_either_kind_of_job_file(tmp_path):
    from jsonschema import Draft202012Validator

    validator = Draft202012Validator(job_schema())
    values = job_values("in", "out")
    assert validator.is_valid(values)
    del values["input"], values["output"]
    assert not validator.is_valid(values)
    assert validator.is_valid({**values, "volumes": "cohort.csv"})
    assert validator.is_valid({**values, "volumes": ["a", {"input": "b"}]})
    assert validator.is_valid({"steps": {"a": values, "b": "levels em --to em.json"}})
    assert not validator.is_valid({"steps": ["levels em --to em.json"]})
