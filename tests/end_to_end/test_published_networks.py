"""Published networks through ``run``: the synaptic-cleft U-Net and MeshNet."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import job_values, read_volume, write_job, write_volume

from beam_inference.cli.main import main

NETWORKS = Path(__file__).parents[1] / "networks"
CLEFT_WEIGHTS = "mip1_d2_1175k.chkpt"


def load_sample(folder, number):
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / f"sample{number}_input.h5") as file:
        return file["main"][:]


def run_cleft(tmp_path, array, weights, mode):
    """The whole sample as one patch, as its authors run it."""
    write_volume(tmp_path / "in", array, voxel_size_nm=(40.0, 7.16, 7.16))
    job = job_values(
        "in",
        "out",
        model={
            "path": f"{NETWORKS / 'synapse_unet.py'}:synapse_unet",
            "weights": str(weights),
            "activation": "sigmoid",
            "normalize": "unit",
            "batch_norm": mode,
            "voxel_size_nm": [40, 7.16, 7.16],
        },
        inference={
            "patch_shape": [18, 192, 192],
            "patch_overlap": [0, 0, 0],
            "chunk_shape": [32, 192, 192],
            "batch_size": 1,
        },
    )
    assert main(["run", str(write_job(tmp_path / "job.yaml", job))]) == 0
    return read_volume(tmp_path / "out")[0]


def assert_equal_as_stored(found, expected):
    """Check values against expected ones that were rounded to float16 when stored.

    A float16 stands for all values within half a step of it (1.2e-4 at 0.5 and beyond), so the
    difference that counts is the one beyond that. It is held to a tenth of the 1e-4 that is asked
    for.
    """
    half_a_step = np.spacing(expected).astype(np.float64) / 2
    beyond = np.abs(found - expected.astype(np.float64)) - half_a_step
    assert beyond.max() <= 1e-5


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("number", "mode"),
    [
        (1, "running"),
        pytest.param(1, "batch", marks=pytest.mark.slow),
        pytest.param(2, "batch", marks=pytest.mark.slow),
    ],
)
def test_the_cleft_network_reproduces_its_stored_results(shared_data, tmp_path, number, mode):
    folder = shared_data / "seunglab_synapse"
    expected = np.load(folder / f"sample{number}_expected.npz")[
        "running" if mode == "running" else "batchstat"
    ]
    found = run_cleft(tmp_path, load_sample(folder, number), folder / CLEFT_WEIGHTS, mode)
    assert_equal_as_stored(found, expected)


@pytest.mark.slow
@pytest.mark.timeout(400)  # two jobs, each of which passes the whole sample seven times
def test_the_second_samples_running_result_was_stored_after_the_statistics_had_moved(
    shared_data, tmp_path, monkeypatch
):
    """One pass over sample 1 in training mode (momentum 0.001) reproduces the stored values.

    Without it they are 1e-3 off.
    """
    folder = shared_data / "seunglab_synapse"
    expected = np.load(folder / "sample2_expected.npz")["running"]
    published = run_cleft(
        tmp_path / "published", load_sample(folder, 2), folder / CLEFT_WEIGHTS, "running"
    )
    assert 1e-4 < np.abs(published - expected).max() < 2e-3

    monkeypatch.syspath_prepend(str(NETWORKS.parent))
    from networks.synapse_unet import synapse_unet

    network = synapse_unet()
    network.load_state_dict(
        torch.load(folder / CLEFT_WEIGHTS, weights_only=True, map_location="cpu")
    )
    for layer in network.modules():
        if isinstance(layer, torch.nn.BatchNorm3d):
            layer.track_running_stats = True
            layer.momentum = 0.001
    network.train()
    with torch.no_grad():
        network(torch.from_numpy(load_sample(folder, 1)[None, None].astype(np.float32) / 255))
    torch.save(network.state_dict(), tmp_path / "moved.pt")
    found = run_cleft(tmp_path / "moved", load_sample(folder, 2), tmp_path / "moved.pt", "running")
    assert_equal_as_stored(found, expected)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_clefts_are_found_only_with_batch_statistics(shared_data, tmp_path):
    """What the job must state, because it decides whether synapses are found at all."""
    folder = shared_data / "seunglab_synapse"
    voxels = {}
    for mode in ("running", "batch"):
        found = run_cleft(tmp_path / mode, load_sample(folder, 2), folder / CLEFT_WEIGHTS, mode)
        voxels[mode] = int((found > 0.25).sum())
    assert voxels["batch"] > 5 * voxels["running"]


ROI = {"start": [100, 100, 110], "stop": [132, 132, 142]}


@pytest.fixture(scope="session")
def brain(shared_data, tmp_path_factory):
    """The T1 volume (z, y, x) on disk, its normalisation, and MeshNet's logits of all of it."""
    nibabel = pytest.importorskip("nibabel")
    folder = shared_data / "mri_meshnet"
    array = np.ascontiguousarray(
        np.asarray(nibabel.load(folder / "t1_crop.nii.gz").dataobj).T
    ).astype(np.uint8)
    place = tmp_path_factory.mktemp("brain") / "t1"
    write_volume(place, array, block_shape=(64, 64, 64), voxel_size_nm=(1e6, 1e6, 1e6))
    low, high = np.quantile(array, [0.02, 0.98])
    scale = float(1 / (high - low + 1e-3))
    return place, array, {"scale": scale, "offset": float(-low * scale), "clip": [0, 1]}


def whole_forward(array, normalize, weights):
    """MeshNet's logits of all 256³ voxels, computed layer by layer in slabs of planes.

    A single call would take some 90 GB.
    """
    import sys

    sys.path.insert(0, str(NETWORKS.parent))
    from networks.meshnet import meshnet
    from safetensors.torch import load_file

    network = meshnet().eval()
    network.load_state_dict(load_file(weights))
    values = np.clip(
        array.astype(np.float32) * np.float32(normalize["scale"]) + np.float32(normalize["offset"]),
        0,
        1,
    )
    tensor = torch.from_numpy(values)[None, None]
    with torch.inference_mode():
        for layer in network.modules():
            if isinstance(layer, torch.nn.Conv3d):
                tensor = _convolved_in_slabs(layer, tensor)
                if layer.out_channels != 3:
                    tensor = tensor.relu_()
    return tensor[0].numpy()


def _convolved_in_slabs(layer, tensor, planes=32):
    reach = layer.dilation[0] * (layer.kernel_size[0] // 2)
    padded = torch.nn.functional.pad(tensor, (0, 0, 0, 0, reach, reach))
    slabs = [
        torch.nn.functional.conv3d(
            padded[:, :, z : z + planes + 2 * reach],
            layer.weight,
            layer.bias,
            padding=(0, *layer.padding[1:]),
            dilation=layer.dilation,
        )
        for z in range(0, tensor.shape[2], planes)
    ]
    return torch.cat(slabs, 2)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_meshnet_with_its_whole_reach_as_crop_margin_equals_the_whole_volume(
    brain, shared_data, tmp_path, capsys
):
    place, array, normalize = brain
    weights = shared_data / "mri_meshnet" / "model.pth"
    whole = whole_forward(array, normalize, weights)
    region = tuple(slice(a, b) for a, b in zip(ROI["start"], ROI["stop"], strict=True))
    differences = {}
    for margin in (46, 45):
        job = job_values(
            place,
            tmp_path / f"out{margin}",
            output={"block_shape": [16, 16, 32]},
            model={
                "path": f"{NETWORKS / 'meshnet.py'}:meshnet",
                "weights": str(weights),
                "output_channels": 3,
                "normalize": normalize,
                "crop_margin": [margin] * 3,
            },
            inference={
                "patch_shape": [16, 16, 32],
                "patch_overlap": [0, 0, 0],
                "chunk_shape": [16, 32, 32],
                "batch_size": 1,
            },
            roi=ROI,
        )
        assert main(["run", str(write_job(tmp_path / f"job{margin}.yaml", job))]) == 0
        found = read_volume(tmp_path / f"out{margin}")
        differences[margin] = float(np.abs(found - whole[(slice(None), *region)]).max())
    with capsys.disabled():
        print(f"\nMeshNet against its whole-volume forward: {differences}")
    assert differences[46] <= 1e-4
    assert differences[45] > 1e-2
