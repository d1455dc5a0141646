"""Measure networks of 8-bit integers against the same networks in float32, both by OpenVINO.

``python -m benchmarks.int8`` takes the networks of the tests with real volumes (from
``../shared/data``), and the residual U-Net with random weights. It calibrates each on eight
patches, as a launch does, and compares it on six others: time, values, decisions, and bits for
other batches and threads. It does so with all instructions of the processor, and again without some
of them (``ONEDNN_MAX_CPU_ISA``), which shows what another processor would compute, and about what
integers would save there. Writes ``benchmarks/results/int8.json``.

Time is that of the processor for one thread, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from beam_inference.config.job import JobConfig
from beam_inference.config.job_file import parse_job
from beam_inference.engines.loading import load_predictor, load_reference, quantize_network
from beam_inference.engines.predictor import Predictor
from beam_inference.engines.trial import TOLERANCES
from beam_inference.residual_unet import ResidualUNet
from benchmarks.measure import machine, ratio_of_pairs

Array = NDArray[np.float32]

NETWORKS = Path(__file__).parents[1] / "tests" / "networks"
DATA = Path(__file__).parents[2] / "shared" / "data"
RESULTS = Path(__file__).parent / "results" / "int8.json"
ALL = "all"
INSTRUCTIONS = (ALL, "AVX512_CORE", "AVX2_VNNI", "AVX2")
"""Instructions that OpenVINO may use: all that there are, or those of oneDNN's name."""
CALIBRATION_PATCHES = 8
TEST_PATCHES = 6
ROUNDS = 9
FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8")


def unet() -> torch.nn.Module:
    """The residual U-Net with its default widths and random weights."""
    torch.manual_seed(0)
    return ResidualUNet(output_channels=3)


@cache
def fib25() -> Array:
    """FIB-25, from 0 to 1."""
    return _unit(np.load(DATA / "fib25_medulla_train2_image.npy"))


@cache
def clefts() -> Array:
    """A sample of mouse cortex, from 0 to 1."""
    import h5py

    with h5py.File(DATA / "seunglab_synapse" / "sample1_input.h5") as file:
        return _unit(file["main"][:])


@cache
def brain() -> Array:
    """A head, from 0 to 1 between two of its quantiles."""
    import nibabel

    image: Any = nibabel.load(DATA / "mri_meshnet" / "t1_crop.nii.gz")
    array = np.asarray(image.dataobj)
    low, high = np.quantile(array, (0.02, 0.98))
    values: Array = np.clip((array - low) / (high - low + 1e-3), 0, 1).astype(np.float32)
    return values


def _unit(array: NDArray[np.uint8]) -> Array:
    values: Array = array.astype(np.float32) / np.float32(255)
    return values


@dataclass(frozen=True, slots=True)
class Subject:
    """A network and what it is measured on.

    Attributes:
        volume: returns what its patches are cut out of.
        patch: shape of a patch.
        model: keys of the job's section ``model``.
        decide: makes decisions of its values (N, C, Z, Y, X), as its users do.
    """

    volume: Callable[[], Array]
    patch: tuple[int, int, int]
    model: dict[str, Any]
    decide: Callable[[Array], NDArray[np.bool_]]


def _cleft_network(batch_norm: str) -> Subject:
    model = {
        "path": f"{NETWORKS / 'synapse_unet.py'}:synapse_unet",
        "weights": str(DATA / "seunglab_synapse" / "mip1_d2_1175k.chkpt"),
        "activation": "sigmoid",
        "batch_norm": batch_norm,
    }
    return Subject(clefts, (18, 96, 96), model, lambda values: values > np.float32(0.25))


SUBJECTS = {
    "FIB-25 affinities (instance norm)": Subject(
        fib25,
        (20, 48, 48),
        {
            "path": f"{NETWORKS / 'fib25.py'}:fib25_network",
            "weights": str(NETWORKS / "fib25.safetensors"),
            "activation": "sigmoid",
            "output_channels": 3,
        },
        lambda values: values < np.float32(0.95),
    ),
    "synaptic clefts (`batch_norm: batch`)": _cleft_network("batch"),
    "synaptic clefts (`batch_norm: running`)": _cleft_network("running"),
    "MeshNet, tissues of a head": Subject(
        brain,
        (64, 64, 64),
        {
            "path": f"{NETWORKS / 'meshnet.py'}:meshnet",
            "weights": str(DATA / "mri_meshnet" / "model.pth"),
            "activation": "softmax",
            "output_channels": 3,
        },
        lambda values: values.argmax(1) != np.intp(0),
    ),
    "residual U-Net, random weights": Subject(
        fib25,
        (16, 96, 96),
        {"path": f"{__file__}:unet", "activation": "sigmoid", "output_channels": 3},
        lambda values: values > np.float32(0.5),
    ),
}


def job(subject: Subject, batch_size: int = 1, threads: int = 1) -> JobConfig:
    """A job with a network of integers."""
    values = {
        "input": {"path": "in"},
        "output": {"path": "out", "dtype": "float32", "block_shape": [16, 16, 16]},
        "model": subject.model,
        "inference": {
            "patch_shape": list(subject.patch),
            "chunk_shape": [16, 16, 16],
            "device": "cpu",
            "engine": "openvino",
            "precision": "int8",
            "threads": threads,
            "batch_size": batch_size,
        },
    }
    return parse_job(values, Path("/nowhere"))


def patches(subject: Subject, count: int, seed: int) -> list[Array]:
    """Patches of a volume at random places, (1, Z, Y, X)."""
    random = np.random.default_rng(seed)
    volume = subject.volume()
    limits = [side - length + 1 for side, length in zip(volume.shape, subject.patch, strict=True)]
    starts = [[int(random.integers(limit)) for limit in limits] for _ in range(count)]
    return [
        volume[tuple(slice(a, a + n) for a, n in zip(start, subject.patch, strict=True))][None]
        for start in starts
    ]


def answer(predictor: Predictor, batch: Array) -> Array:
    """What a network answers to a batch."""
    with predictor.device.session():
        values = predictor.predict(predictor.device.upload(batch.copy()))
        return np.array(predictor.device.download(values)())


def time_in_turn(int8: Predictor, plain: Predictor, batch: Array) -> dict[str, float]:
    """The ratio of the processor's times of two networks, run in turn."""

    def seconds(predictor: Predictor) -> float:
        start = time.process_time()
        answer(predictor, batch)
        return time.process_time() - start

    pairs = [(seconds(int8), seconds(plain)) for _ in range(ROUNDS + 1)]
    return ratio_of_pairs(pairs[1:])


def compare(subject: Subject, int8: Predictor, plain: Predictor) -> dict[str, Any]:
    """Values and decisions of both networks on patches that were not calibrated on."""
    tests = patches(subject, TEST_PATCHES, seed=2)
    ours = np.concatenate([answer(int8, patch[None]) for patch in tests])
    theirs = np.concatenate([answer(plain, patch[None]) for patch in tests])
    errors = np.abs(ours - theirs, dtype=np.float64)
    decisions = subject.decide(ours)
    expected = subject.decide(theirs)
    both = 2 * np.count_nonzero(decisions & expected)
    return {
        "root mean square": [float(np.sqrt(np.mean(np.square(error)))) for error in errors],
        "99.9th percentile": float(np.quantile(errors, 0.999)),
        "largest": float(errors.max()),
        "largest value": float(np.abs(theirs).max()),
        "other decisions": float(np.mean(decisions != expected)),
        "overlap of decisions": both / max(1, decisions.sum() + expected.sum()),
        "decided": float(expected.mean()),
    }


def hash_bits(subject: Subject, quantized: bytes) -> list[str]:
    """Hashes of a patch's values in batches of 1, 2 and 4, and with two threads: one, if equal."""
    patch = patches(subject, 1, seed=2)[0]
    hashes = set()
    sizes = (1,) if subject.model.get("batch_norm") == "batch" else (1, 2, 4)
    for batch_size, threads in [*((size, 1) for size in sizes), (1, 2)]:
        config = job(subject, batch_size, threads)
        predictor = load_predictor(config.model, config.inference, quantized=quantized)
        values = answer(predictor, np.stack([patch] * batch_size))
        hashes |= {hashlib.sha256(each.tobytes()).hexdigest()[:16] for each in values}
    return sorted(hashes)


def measure(subject: Subject) -> dict[str, Any]:
    """Measure one network, with the instructions that this process may use."""
    config = job(subject)
    samples = patches(subject, CALIBRATION_PATCHES, seed=1)
    start = time.process_time()
    quantized = quantize_network(config.model, config.inference, samples)
    seconds = time.process_time() - start
    again = quantize_network(config.model, config.inference, samples)
    int8 = load_predictor(config.model, config.inference, quantized=quantized)
    inference = config.inference.model_copy(update={"precision": "float32"})
    plain = load_predictor(config.model, inference)
    reference = load_reference(config.model, config.inference)
    assert reference is not None
    batch = patches(subject, 1, seed=2)[0][None]
    return {
        "int8 / float32": time_in_turn(int8, plain, batch),
        "calibration seconds": round(seconds, 1),
        "network": hashlib.sha256(quantized).hexdigest()[:16],
        "same network again": quantized == again,
        "bits": hash_bits(subject, quantized),
        **compare(subject, int8, reference),
    }


def measure_with(instructions: str) -> dict[str, Any]:
    """Measure every network in a process that may use these instructions only."""
    environment = dict(os.environ)
    if instructions != ALL:
        environment["ONEDNN_MAX_CPU_ISA"] = instructions
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.int8", "--measure"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    rows: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return rows


def _flags() -> list[str]:
    """Those instructions of the processor that matter here."""
    text = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    words = next(line for line in text.splitlines() if line.startswith("flags")).split()
    return [flag for flag in FLAGS if flag in words]


def main() -> None:
    """Measure, and write the result; or measure in this process, and print it."""
    parser = argparse.ArgumentParser(description="measure networks of 8-bit integers")
    parser.add_argument("--measure", action="store_true", help="measure in this process, and print")
    if parser.parse_args().measure:
        print(json.dumps({name: measure(subject) for name, subject in SUBJECTS.items()}))
        return
    rows = {instructions: measure_with(instructions) for instructions in INSTRUCTIONS}
    result = {
        "machine": machine("torch", "openvino", "nncf") | {"instructions": _flags()},
        "allowed": TOLERANCES["int8"],
        "rows": rows,
    }
    print(json.dumps(result, indent=1))
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
