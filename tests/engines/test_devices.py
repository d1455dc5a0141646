"""What holds on every device: the CPU, and the GPU of this machine (``gpu``)."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import job_values, plan_of, read_volume, toy, write_job
from oracles.chunks import infer_once
from torch import nn

from beam_inference.cli.main import main
from beam_inference.engines import devices
from beam_inference.engines.augmented import augment, symmetries
from beam_inference.engines.batch_norm_folding import fold_batch_norm
from beam_inference.engines.devices import device_memory, find_accelerator
from beam_inference.engines.protocol import AS_COMPUTED, Encoding
from beam_inference.engines.speed import fastest_batch_size
from beam_inference.engines.torch_forward import torch_forward, torch_predictor
from beam_inference.errors import DeviceOutOfMemory
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.operators.normalize import unit
from beam_inference.operators.quantize import quantize
from beam_inference.worker.chunk_inference import ChunkInference
from beam_inference.worker.chunk_input import ChunkInput

BOX = BoundingBox((0, 0, 0), (20, 40, 48))
DTYPES = ("uint8", "uint16", "int16", "float32")
UINT8 = Encoding(np.dtype("uint8"), (0.0, 1.0))


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cpu":
        return torch.device("cpu")
    accelerator = find_accelerator()
    assert accelerator is not None, "tests marked gpu need a GPU that PyTorch sees"
    return torch.device(accelerator)


def network(device):
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 2, (1, 3, 3), padding=(0, 1, 1))
    )
    return layers.eval().to(device)


def plan(chunk=(20, 40, 48)):
    return plan_of(BOX, (8, 16, 16), (3, 5, 4), chunk)


def volume():
    return np.random.default_rng(0).integers(0, 256, (1, *BOX.shape), dtype=np.uint8)


def inferred(predictor, chunk=(20, 40, 48), encoding=AS_COMPUTED, batch_size=2):
    """The whole volume, chunk by chunk; and the batch size in the end."""
    geometry = plan(chunk)
    array = volume()
    result = np.zeros((2, *BOX.shape), encoding.dtype)
    for index in range(geometry.chunks.count):
        work = geometry.work(index)
        cutout = array[(slice(None), *work.input_box.slices_in(BOX))]
        found = infer_once(
            cutout,
            work,
            predictor,
            2,
            batch_size,
            encoding,
            normalize=unit(array.dtype),
            bound=1.0,
        )
        result[(slice(None), *work.core_box.slices_in(BOX))] = found.core
    return result, found.batch_size


def oracle(forward):
    """All patches of the lattice, weighted in float64, divided by the sum of the weights."""
    lattice = plan().lattice
    array = volume()
    total = np.zeros((2, *BOX.shape))
    weights = np.zeros(BOX.shape)
    d = [2 * (np.arange(n) + 0.5) / n - 1 for n in lattice.patch_shape]
    z, y, x = (np.exp(-1 / (1 - each**2)) for each in d)
    bump = z[:, None, None] * y[:, None] * x
    for k in np.ndindex(*(axis.count for axis in lattice.axes)):
        here = lattice.patch_box(k).slices_in(BOX)
        patch = torch.from_numpy(array[(slice(None), *here)][None].astype(np.float32) / 255)
        with torch.inference_mode():
            total[(slice(None), *here)] += forward(patch)[0].numpy() * bump
        weights[here] += bump
    return total / weights


def test_the_result_is_the_formulas_and_the_same_for_all_chunk_shapes(device):
    predictor = torch_predictor(network(device), device)
    whole, _ = inferred(predictor)
    np.testing.assert_allclose(whole, oracle(network(torch.device("cpu"))), atol=1e-5)
    for chunk in ((7, 40, 48), (20, 11, 17)):
        np.testing.assert_array_equal(inferred(predictor, chunk)[0], whole)


def test_values_are_encoded_there_as_here(device):
    predictor = torch_predictor(network(device), device, activation="sigmoid")
    floats, _ = inferred(predictor)
    np.testing.assert_array_equal(
        inferred(predictor, encoding=UINT8)[0], quantize(floats.copy(), *UINT8)
    )


def test_a_batch_that_is_too_large_is_halved(device):
    layers = network(device)

    def forward(batch):
        if len(batch) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return layers(batch)

    found, batch_size = inferred(torch_predictor(forward, device), batch_size=8)
    assert batch_size == 2
    np.testing.assert_array_equal(found, inferred(torch_predictor(layers, device), batch_size=2)[0])
    assert (
        fastest_batch_size(
            torch_predictor(forward, device),
            volume()[:, :8, :16, :16],
            unit(np.dtype("uint8")),
            bool,
        )
        <= 2
    )


def test_one_patch_that_is_too_large_is_said(device):
    def forward(batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(DeviceOutOfMemory, match="a batch of one patch"):
        inferred(torch_predictor(forward, device))


def test_augmentation_is_the_mean_over_the_flips_and_transposes(device):
    layers = network(torch.device("cpu"))

    def mean(batch):
        answers = []
        for transpose in (False, True):
            for axes in ((), (3,), (4,), (3, 4)):
                mapped = (batch.swapaxes(3, 4) if transpose else batch).flip(axes)
                answer = layers(mapped.contiguous()).flip(axes)
                answers.append(answer.swapaxes(3, 4) if transpose else answer)
        return torch.stack(answers).mean(0)

    plain = torch_predictor(network(device), device)
    forward = augment(plain.predict, plain.device, symmetries("yx", transpose=True), [None, None])
    predictor = replace(plain, predict=forward)
    np.testing.assert_allclose(inferred(predictor)[0], oracle(mean), atol=1e-5)


@pytest.mark.parametrize(
    "layout", [torch.contiguous_format, torch.channels_last_3d], ids=["contiguous", "channels"]
)
def test_layouts_and_folded_norms_answer_alike(device, layout):
    layers = network(device)
    layers.insert(1, nn.BatchNorm3d(4).to(device).eval())
    layers[1].running_mean += 0.3
    expected, _ = inferred(torch_predictor(layers, device))
    simpler = fold_batch_norm(layers, (1, 1, 8, 16, 16), device)
    assert simpler is not layers
    found, _ = inferred(torch_predictor(simpler, device, memory_format=layout))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_folding_does_not_depend_on_what_was_computed_before(device):
    """As TF32 would have it: it is a flag of the process, which a session sets and leaves."""
    layers = network(device)
    layers.insert(1, nn.BatchNorm3d(4).to(device).eval())
    first = fold_batch_norm(layers, (1, 1, 8, 16, 16), device)
    inferred(torch_predictor(layers, device))
    second = fold_batch_norm(layers, (1, 1, 8, 16, 16), device)
    assert first is not layers
    assert second is not layers


@pytest.mark.parametrize("precision", ["bfloat16", pytest.param("float16", marks=pytest.mark.gpu)])
def test_half_precision_is_near(device, precision):
    full, _ = inferred(torch_predictor(network(device), device))
    half, _ = inferred(torch_predictor(network(device), device, precision=precision))
    assert half.dtype == np.float32
    assert 0 < np.abs(half - full).max() < 0.02


@pytest.mark.parametrize("seams", [pytest.param("recompute", marks=pytest.mark.slow), "exchange"])
def test_a_job_runs_on_it_to_the_same_bits_twice(device, seams, volume_in, tmp_path):
    found = []
    for name in ("one", "two"):
        values = job_values(
            volume_in,
            tmp_path / name,
            model=toy("conv") | {"output_channels": 2},
            inference={"device": device.type, "seams": seams},
        )
        job = str(write_job(tmp_path / f"{name}.yaml", values))
        assert main(["run", job]) == 0
        assert main(["verify", job, "--deep"]) == 0
        found.append(read_volume(tmp_path / name))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("is_short_of_memory", [False, True])
def test_what_is_uploaded_ahead_by_another_thread_arrives_whole(device, is_short_of_memory):
    """While the device computes, one after the other, through the same pinned memory."""
    predictor = torch_predictor(network(device), device)
    random = np.random.default_rng(1)
    rows = 20 if device.type == "cpu" else 200
    arrays = [
        random.integers(0, 200, (2, 30, rows, 50 * k)).astype(dtype)
        for k in (4, 1, 9)
        for dtype in DTYPES
    ]
    busy = torch.ones(1000, 1000, device=device)
    with ThreadPoolExecutor(1) as readers, predictor.device.session():
        upcoming = readers.submit(predictor.device.begin_upload, arrays[0])
        for k, array in enumerate(arrays):
            arrived = upcoming.result()
            if k + 1 < len(arrays):
                upcoming = readers.submit(predictor.device.begin_upload, arrays[k + 1])
            if is_short_of_memory and k == 5:
                predictor.device.make_room()
            for _ in range(0 if device.type == "cpu" else 20):  # a CPU would be waited for
                busy = (busy @ busy).tanh()
            found = predictor.device.download(arrived().float())()
            np.testing.assert_array_equal(found, array.astype(np.float32))


def test_a_cutout_on_its_way_gives_what_one_at_hand_does(device):
    predictor = torch_predictor(network(device), device)
    work = plan().work(0)
    array = volume()
    inference = ChunkInference(predictor, unit(array.dtype), 2, 2, 1.0)
    plain = ChunkInput(array, work.input_box, lambda: predictor.device.upload(array))
    with ThreadPoolExecutor(1) as readers:
        sent = readers.submit(inference.start_upload, array, work.input_box).result()
    np.testing.assert_array_equal(
        inference.infer(sent, work).core, inference.infer(plain, work).core
    )


def test_the_memory_of_a_device_that_is_absent_is_not_asked_for(monkeypatch):
    monkeypatch.setattr(devices, "find_accelerator", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda number: (1, 10 + number))
    assert device_memory("cuda") == device_memory("cuda:0") == 10
    assert device_memory("cuda:1") is None


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
@pytest.mark.parametrize("shape", [(2, 3, 6, 6), (3, 1, 5, 7), (1, 9, 9, 9)])
def test_the_place_of_a_patch_in_its_batch_changes_no_bit_of_an_activation(activation, shape):
    """CPUs compute the last values of an array otherwise than those before."""
    forward = torch_forward(lambda batch: batch, "cpu", activation=activation)
    batch = torch.from_numpy(np.random.default_rng(0).normal(0, 9, (40, *shape)).astype("f4"))
    alone = torch.cat([forward(patch[None]) for patch in batch])
    for size in (2, 3, 7):
        together = torch.cat([forward(part) for part in batch.split(size)])
        assert together.numpy().tobytes() == alone.numpy().tobytes()
    turned = torch.cat([forward(part.flip(0)).flip(0) for part in batch.split(4)])
    assert turned.numpy().tobytes() == alone.numpy().tobytes()
