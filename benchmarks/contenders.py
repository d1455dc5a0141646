"""Run one tool on one volume with one network: ``python contenders.py TOOL NETWORK THREADS``.

Run by ``benchmarks.peers``, with the python of this project for "beam-inference", and with that of
the peers for the others. All do the same patches of 16×128×128 at an overlap of a quarter, and make
three float32 channels: 36 of them with a network, 153 of a volume four times as deep without one.
NETWORK is "null", which repeats its input, or "unet", the residual U-Net and a sigmoid (chunkflow
refuses values above 1) in PyTorch's eager mode; "unet-openvino" and "null-uint8", whose result is
uint8, are for ours only. The tools "job" and "chunkflow job" do the volume in eight chunks with
margins, from a precomputed volume on disk to one of uint8. Prints JSON: seconds of each run after
the first, and the peak of memory beyond what is held between them.

Each tool is given the volume in memory, float32 in 0 … 1; ours is given it as uint8, as it is
stored, and normalises.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

# this file is run by name, also where nothing is installed
sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.measure import peak_bytes, work_of

PATCH = (16, 128, 128)
OVERLAP = (4, 32, 32)
SHAPE = (52, 320, 320)
CHANNELS = 3
DEEP = (208, 320, 320)
"""What is done with the null network: as deep, against a patch, as chunks of real jobs."""

PATCHES = 36
DEEP_PATCHES = 153
CHUNK = tuple(json.loads(os.environ.get("CONTENDER_CHUNK", "[26, 160, 160]")))
UNET = Path(__file__).parents[1] / "beam_inference" / "residual_unet.py"
Run = Callable[[], Any]
Array = np.ndarray[Any, np.dtype[np.uint8]]


def unet() -> torch.nn.Module:
    """The residual U-Net, from its file: the package need not be installed."""
    spec = importlib.util.spec_from_file_location("residual_unet", UNET)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    return torch.nn.Sequential(
        module.ResidualUNet(output_channels=CHANNELS), torch.nn.Sigmoid()
    ).eval()


class Null(torch.nn.Module):
    """Repeats its one channel."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """(N, 1, Z, Y, X) to (N, CHANNELS, Z, Y, X)."""
        return batch.repeat(1, CHANNELS, 1, 1, 1)


def network_of(name: str) -> torch.nn.Module:
    return Null() if name.startswith("null") else unet()


def beam_inference(name: str, threads: int, volume: Array) -> Run:
    from beam_inference.engines.openvino import openvino_forward
    from beam_inference.engines.protocol import AS_COMPUTED, Encoding
    from beam_inference.engines.torch_forward import torch_predictor
    from beam_inference.environment import use_one_heap
    from beam_inference.geometry.bounding_box import BoundingBox
    from beam_inference.geometry.plan import make_plan
    from beam_inference.operators.normalize import unit
    from beam_inference.worker.chunk_inference import ChunkInference

    use_one_heap()
    box = BoundingBox((0, 0, 0), volume.shape)
    plan = make_plan(
        volume=box,
        roi=box,
        context=(0, 0, 0),
        patch_shape=PATCH,
        patch_overlap=OVERLAP,
        chunk_shape=volume.shape,
        crop_margin=(0, 0, 0),
        strategy="recompute",
        chunk_crop_margin=(0, 0, 0),
        block_shape=volume.shape,
    )
    work = plan.work(0)
    network: Any = network_of(name)
    if name == "unet-openvino":
        network = openvino_forward(network, (1, 1, *PATCH), threads)
    predictor = torch_predictor(network, torch.device("cpu"), threads=threads)
    cutout = volume[None]
    normalize = unit(cutout.dtype)
    encoding = Encoding(np.dtype(np.uint8), (0.0, 1.0)) if name == "null-uint8" else AS_COMPUTED

    def run() -> Array:
        inference = ChunkInference(predictor, normalize, CHANNELS, 1, 1.0)
        chunk_input = inference.start_upload(cutout, work.input_box)
        return inference.infer(chunk_input, work, encoding).core

    return run


def monai(name: str, _: int, volume: Array) -> Run:
    from monai.inferers import SlidingWindowInferer

    network = network_of(name)
    array = torch.from_numpy(volume / np.float32(255))[None, None]
    inferer = SlidingWindowInferer(roi_size=PATCH, sw_batch_size=1, overlap=0.25, mode="gaussian")

    def run() -> Any:
        with torch.inference_mode():
            return inferer(array, network)

    return run


def nnunet(name: str, _: int, volume: Array) -> Run:
    os.environ |= {
        key: tempfile.gettempdir()
        for key in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results")
    }
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    predictor = nnUNetPredictor(
        tile_step_size=0.75,
        use_gaussian=True,
        use_mirroring=False,
        perform_everything_on_device=False,
        device=torch.device("cpu"),
        allow_tqdm=False,
    )
    predictor.network = network_of(name)
    predictor.configuration_manager = SimpleNamespace(patch_size=PATCH)
    predictor.label_manager = SimpleNamespace(num_segmentation_heads=CHANNELS)
    array = torch.from_numpy(volume / np.float32(255))[None]

    def run() -> Any:
        with torch.inference_mode():
            return predictor.predict_sliding_window_return_logits(array)

    return run


def torchio(name: str, _: int, volume: Array) -> Run:
    import torchio as tio

    network = network_of(name)
    subject = tio.Subject(
        image=tio.ScalarImage(tensor=torch.from_numpy(volume / np.float32(255))[None])
    )

    def run() -> Any:
        sampler = tio.inference.GridSampler(subject, PATCH, OVERLAP)
        aggregator = tio.inference.GridAggregator(sampler, overlap_mode="hann")
        loader = tio.SubjectsLoader(sampler, batch_size=1)
        with torch.inference_mode():
            for batch in loader:
                aggregator.add_batch(network(batch["image"][tio.DATA]), batch[tio.LOCATION])
        return aggregator.get_output_tensor()

    return run


def chunkflow(name: str, _: int, volume: Array) -> Run:
    from chunkflow.chunk import Chunk

    inferencer = chunkflow_inferencer(name)
    chunk = Chunk(volume / np.float32(255))
    return lambda: inferencer(chunk)


def chunkflow_inferencer(name: str) -> Any:
    from chunkflow.flow.divid_conquer.inferencer import Inferencer

    model = weights = ""
    folder = Path(tempfile.mkdtemp())
    if name == "unet":
        model = str(folder / "model.py")
        weights = str(folder / "weights.pt")
        Path(model).write_text(
            f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
            "from benchmarks.contenders import unet\n\nInstantiatedModel = unet()\n"
        )
        torch.save(unet().state_dict(), weights)
    return Inferencer(
        model,
        weights,
        input_patch_size=PATCH,
        output_patch_overlap=OVERLAP,
        num_output_channels=CHANNELS,
        framework="identity" if name == "null" else "pytorch",
        batch_size=1,
    )


def job(seams: str, threads: int, volume: Array) -> Run:
    """Run ours, from its first chunk on, by OpenVINO; ``seams`` stands for the network's name."""
    from beam_inference.config.formats import OutputSpec
    from beam_inference.config.job_file import parse_job
    from beam_inference.geometry.bounding_box import BoundingBox
    from beam_inference.launch.run_job import run_job
    from beam_inference.volumes.outputs import create_output

    folder = Path(tempfile.mkdtemp())
    box = BoundingBox((0, 0, 0), volume.shape)
    spec = OutputSpec(
        f"file://{folder}/in", "precomputed", "uint8", 1, box, (26, 80, 80), (8.0, 8.0, 8.0)
    )
    create_output(spec).write(box, volume[None])
    values: dict[str, dict[str, object]] = {
        "input": {"path": str(folder / "in")},
        "output": {"dtype": "uint8", "value_range": [0, 1], "block_shape": [26, 80, 80]},
        "model": {"path": f"{__file__}:unet", "output_channels": CHANNELS, "normalize": "unit"},
        "inference": {
            "patch_shape": list(PATCH),
            "patch_overlap": list(OVERLAP),
            "chunk_shape": list(CHUNK),
            "seams": seams,
            "device": "cpu",
            "engine": "openvino",
            "threads": threads,
        },
    }

    def run() -> float:
        values["output"]["path"] = tempfile.mkdtemp(dir=folder) + "/out"
        outcome = run_job(parse_job(values, folder))
        ended = time.time()
        assert outcome.exit_code == 0, outcome
        first, *_ = work_of(f"file://{values['output']['path']}")
        return ended - first

    return run


def chunkflow_job(_: str, __: int, volume: Array) -> Run:
    """Run chunkflow on each chunk grown by the overlap, crop and write, as its commands do."""
    from chunkflow.chunk import Chunk
    from cloudvolume import CloudVolume  # type: ignore[import-untyped]

    inferencer: Any = chunkflow_inferencer("unet")
    folder = tempfile.mkdtemp()

    def stored(name: str, channels: int) -> Any:
        info = CloudVolume.create_new_info(
            channels,
            "image",
            "uint8",
            "raw",
            (8, 8, 8),
            (0, 0, 0),
            volume.shape[::-1],
            chunk_size=CHUNK[::-1],
        )
        at = CloudVolume(f"file://{folder}/{name}", info=info, progress=False, compress=True)
        at.commit_info()
        return at

    source = stored("in", 1)
    source[:, :, :] = np.asarray(volume).T[..., None]

    def run() -> None:
        target = stored(Path(tempfile.mktemp()).name, CHANNELS)
        floats = np.empty((CHANNELS, *volume.shape), np.float32)
        for start in product(*(range(0, n, c) for n, c in zip(volume.shape, CHUNK, strict=True))):
            stop = [min(a + c, n) for a, c, n in zip(start, CHUNK, volume.shape, strict=True)]
            low = [max(a - o, 0) for a, o in zip(start, OVERLAP, strict=True)]
            high = [min(b + o, n) for b, o, n in zip(stop, OVERLAP, volume.shape, strict=True)]
            cutout = source[low[2] : high[2], low[1] : high[1], low[0] : high[0]][..., 0].T
            result = np.asarray(
                inferencer(Chunk(np.ascontiguousarray(cutout) / np.float32(255))).array
            )
            z, y, x = (slice(a - b, c - b) for a, b, c in zip(start, low, stop, strict=True))
            floats[:, start[0] : stop[0], start[1] : stop[1], start[2] : stop[2]] = result[
                :, z, y, x
            ]
            core = np.clip(np.rint(result[:, z, y, x] * 255), 0, 255).astype(np.uint8)
            target[start[2] : stop[2], start[1] : stop[1], start[0] : stop[0]] = core.T
        if "CONTENDER_OUTPUT" in os.environ:  # as it is before rounding
            np.save(os.environ["CONTENDER_OUTPUT"], floats)

    return run


TOOLS: dict[str, Callable[[str, int, Array], Run]] = {
    "beam-inference": beam_inference,
    "MONAI": monai,
    "nnU-Net": nnunet,
    "torchio": torchio,
    "chunkflow": chunkflow,
    "job": job,
    "chunkflow job": chunkflow_job,
}


def main(tool: str, network: str, threads: str, repeats: str) -> None:
    """Run a tool, and print its figures as the last line."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(int(threads))
    given = os.environ.get("CONTENDER_VOLUME")
    shape = DEEP if network.startswith("null") else SHAPE
    volume = (
        np.load(given)
        if given
        else np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    )
    run = TOOLS[tool](network, int(threads), volume)
    seconds = []
    run()  # libraries load what they need, and make their threads
    if "beam_inference" in sys.modules:
        from beam_inference import arrays

        arrays.give_back()  # else the peak would be counted from what the first run has left

    def timed() -> None:
        for _ in range(int(repeats)):
            start = time.perf_counter()
            told = run()  # a job tells its seconds, without its start-up
            seconds.append(told if isinstance(told, float) else time.perf_counter() - start)
            del told  # a result of its own is not held while the next one is made

    peak = peak_bytes(timed)
    print(json.dumps({"seconds": seconds, "peak_bytes": peak}))


if __name__ == "__main__":
    main(*sys.argv[1:])
