from pathlib import Path

import pytest
from helpers import job_values, write_job

from beam_inference.config.factories import factory_parts
from beam_inference.config.job import JobConfig
from beam_inference.config.job_file import absolute_path, parse_job
from beam_inference.config.volumes import Pyramid
from beam_inference.errors import ConfigError
from beam_inference.launch.job_files import load_job


def test_a_path_may_begin_in_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    jobs = Path("/jobs")
    assert absolute_path("~/em", jobs) == absolute_path("~/em", "gs://b/jobs") == "/home/me/em"
    assert absolute_path("~em", jobs) == "/jobs/~em"
    assert absolute_path("./~/em", jobs) == "/jobs/~/em"
    assert absolute_path("~root", "gs://b/jobs") == "gs://b/jobs/~root"


def load(tmp_path, overrides=(), **sections):
    return load_job(
        write_job(tmp_path / "job.yaml", job_values("in", "out", **sections)), overrides
    )


def test_paths_are_relative_to_the_job_files_folder(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    job = load(
        tmp_path,
        model={"path": "nets/unet.py:unet", "weights": "nets/w.pt"},
        job={"state_path": "state"},
    )
    assert job.input.path == f"file://{tmp_path}/in"
    assert job.output.path == f"file://{tmp_path}/out"
    assert job.model.path == f"{tmp_path}/nets/unet.py:unet"
    assert job.model.weights == f"{tmp_path}/nets/w.pt"
    assert job.job.state_path == f"file://{tmp_path}/state"


def test_urls_modules_and_identity_stay_as_they_are(tmp_path):
    job = load(tmp_path, input={"path": "gs://bucket/em"}, model={"path": "package.module:factory"})
    assert job.input.path == "gs://bucket/em"
    assert job.model.path == "package.module:factory"
    assert load(tmp_path).model.path == "identity"


def test_overrides_are_yaml_and_may_add_sections(tmp_path):
    job = load(
        tmp_path,
        [
            "inference.batch_size=4",
            "roi.start=[0, 0, 0]",
            "roi.stop=4x5x6",
            "job.resume=false",
            "model.activation=sigmoid",
        ],
    )
    assert job.inference.batch_size == 4
    assert job.roi.stop == (4, 5, 6)
    assert job.job.resume is False
    assert job.model.activation == "sigmoid"


def test_an_override_fills_an_empty_section(tmp_path):
    values = job_values("in", "out") | {"roi": None}
    job = load_job(write_job(tmp_path / "job.yaml", values), ["roi.start=0x0x0", "roi.stop=4x5x6"])
    assert job.roi.stop == (4, 5, 6)


def test_local_paths_are_quoted_in_urls(tmp_path):
    (tmp_path / "per%20cent #1?").mkdir()
    job = load_job(write_job(tmp_path / "per%20cent #1?" / "job.yaml", job_values("in", "out")))
    assert job.input.path == f"file://{tmp_path}/per%2520cent%20%231%3F/in"


def test_the_schema_accepts_what_the_parser_accepts():
    schema = JobConfig.model_json_schema()["$defs"]["Inference"]["properties"]["chunk_shape"]
    auto, shape = schema["oneOf"]
    assert auto["const"] == "auto"
    assert [branch["type"] for branch in shape["anyOf"]] == ["array", "string"]


def test_the_job_is_frozen(tmp_path):
    with pytest.raises(ValueError, match="frozen"):
        load(tmp_path).inference.batch_size = 3


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("package.module:factory", ("package.module", "factory")),
        ("/a b/net.py:make_net", ("/a b/net.py", "make_net")),
        ("/a/net.pt", None),
        ("identity", None),
    ],
)
def test_factory_paths(path, parts):
    assert factory_parts(path) == parts


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"inference": {"patch_shap": [1, 2, 3]}},
            r"inference.patch_shap: unknown key; did you mean 'patch_shape'\?",
        ),
        ({"inptu": {}}, r"inptu: unknown key; did you mean 'input'\?"),
        (
            {"model": {"normalize": {"scale": 1, "ofset": 2}}},
            r"model.normalize.ofset: unknown key; did you mean 'offset'",
        ),
        (
            {"roi": {"start": [0, 0, 0], "stop": [1, 1, 1], "contxt": [1, 1, 1]}},
            r"roi.contxt: .* 'context'",
        ),
        ({"model": {"normalize": "unity"}}, "model.normalize: 'unity' is not one of none, unit"),
        ({"inference": {"patch_shape": [8, 16]}}, "inference.patch_shape.2: missing"),
        ({"inference": {"batch_size": True}}, "inference.batch_size: .*integer; found True"),
        (
            {"inference": {"chunk_shape": [10**20, 1, 1]}},
            "inference.chunk_shape.0: .*less than or equal",
        ),
        ({"input": {"channel": -1}}, "input.channel.0: .*greater than or equal to 0; found -1"),
        ({"model": {"normalize": None}}, "model.normalize: None is not one of none, unit"),
        ({"model": {"normalize": {"scale": "x"}}}, "model.normalize.scale: .*number.*; found 'x'"),
        (
            {"inference": {"patch_shape": [8, 16, 0]}},
            "inference.patch_shape.2: .*greater than 0; found 0",
        ),
        (
            {"inference": {"patch_overlap": [8, 8, 8]}},
            r"patch_overlap \[8, 8, 8\] must be smaller than patch_shape",
        ),
        ({"inference": {"batch_size": "many"}}, "inference.batch_size: .*integer.*; found 'many'"),
        ({"inference": {"chunk_crop_margin": [1, 1, 1]}}, "only with seams: crop"),
        ({"inference": {"precision": "tf32"}}, "tf32 exists only on CUDA"),
        ({"output": {"dtype": "uint8"}}, "output.value_range is needed"),
        ({"output": {"value_range": [0, 1]}}, "no effect with dtype: float32"),
        ({"output": {"dtype": "uint8", "value_range": [1, 0]}}, "low < high"),
        (
            {"output": {"format": "tiff"}},
            "output.format: 'tiff' is not among the installed formats: n5, ome_zarr, ",
        ),
        ({"output": {"dtype": "int16", "value_range": [0, 1]}}, "not read by Neuroglancer"),
        ({"input": {"fill_value": 3}}, "no effect with fill: reflect"),
        ({"input": {"spec": {"driver": "zarr"}}}, "either path or spec"),
        ({"roi": {"start": [0, 0, 5], "stop": [4, 4, 5]}}, "must lie beyond start"),
        ({"model": {"weights": "w.pt"}}, "weights go with a factory"),
        ({"model": {"output_channels": 3}}, "identity needs as many output_channels"),
        ({"model": {"dims": 2}}, "its first number must be 1"),
        ({"model": {"batch_norm": "batch"}}, "needs inference.batch_size: 1"),
        ({"model": {"sha256": "abc"}}, "64 lower-case hexadecimal"),
        ({"output": None}, "output: missing"),
        (
            {"output": {"pyramid": True, "format": "zarr3"}},
            "no place for .* write one of ome_zarr, ome_zarr_0.4, precomputed",
        ),
        (
            {"output": {"pyramid": "yes"}},
            "output.pyramid: write true, or a mapping with levels, factor, method; found 'yes'",
        ),
        (
            {"output": {"pyramid": {"level": 3}}},
            r"output.pyramid.level: unknown key; did you mean 'levels'\?",
        ),
        (
            {"output": {"pyramid": {"levels": 0}}},
            "output.pyramid.levels: .*greater than 0; found 0",
        ),
        (
            {"output": {"pyramid": {"factor": [1, 1, 1]}}},
            "output.pyramid: .*makes no smaller volume",
        ),
        (
            {"output": {"pyramid": {"method": "max"}}},
            "output.pyramid.method: .*'mean' or 'mode'; found 'max'",
        ),
        (
            {"output": {"pyramid": True, "bounds": {"start": [0, 0, 0], "stop": [1, 1, 1]}}},
            "output: pyramid makes scales of the whole volume",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path, sections, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, **sections)


def test_a_pyramid_is_true_false_or_says_what_it_is(tmp_path):
    assert load(tmp_path).output.pyramid is None
    assert load(tmp_path, output={"pyramid": False}).output.pyramid is None
    assert load(tmp_path, output={"pyramid": True}).output.pyramid == Pyramid()
    asked = load(
        tmp_path,
        ["output.pyramid.factor=1x2x2"],
        output={"pyramid": {"levels": 3, "method": "mode"}},
    )
    assert asked.output.pyramid == Pyramid(levels=3, factor=(1, 2, 2), method="mode")
    assert JobConfig.model_validate_json(asked.model_dump_json()) == asked


def test_all_faults_are_told_at_once(tmp_path):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, inference={"batch_size": 0, "sems": "crop"}, output={"dtype": "uint9"})
    assert all(word in str(error.value) for word in ("batch_size", "sems", "uint9"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "not valid YAML"),
        ("- 1\n- 2\n", "expected a mapping with the keys input, inputs, output"),
        ("", "expected a mapping"),
        ("input: {path: a}\ninput: {path: b}\n", r"'input' is given twice \(line 2\)"),
    ],
)
def test_what_is_no_job_file(tmp_path, text, message):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_job(path)


def test_an_absent_file_and_a_bad_override(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the job file .*No such file"):
        load_job(tmp_path / "nope.yaml")
    with pytest.raises(ConfigError, match="takes key.key=value"):
        load(tmp_path, ["inference.device"])
    with pytest.raises(ConfigError, match="does not lead to a key"):
        load(tmp_path, ["inference.device.kind=cpu"])


def test_a_job_without_a_file(tmp_path):
    job = parse_job(job_values("in", "out"), tmp_path)
    assert isinstance(job, JobConfig)
    assert job.output.path == f"file://{tmp_path}/out"
