"""Train the network of ``fib25.py`` and write its weights as a safetensors file.

Run from the repository root: ``python -m tests.networks.train_fib25``.

Data: FIB-SEM of the Drosophila medulla at 10 nm, 250x250x250 voxels, by Janelia FlyEM (HHMI), from
github.com/janelia-flyem/neuroproof_examples (training_sample2), under the Creative Commons
Attribution text in that repository. Two files are read from the data folder, both in z,y,x order:
``fib25_medulla_train2_image.npy`` (uint8) and ``fib25_medulla_train2_labels.npz`` (0: unlabelled).

Planes from z = 200 on are held out, and the figures printed at the end are of that slab.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from .fib25 import fib25_network

_HERE = Path(__file__).resolve().parent
_HELD_OUT_Z = 200
_SIDE = 40
_PEAK_RATE = 1e-2
_BASE_RATE = 0.95  # about one pair of neighbours in twenty straddles a boundary


def affinities(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Targets and mask, both (3,Z-1,Y-1,X-1) float32, from labels (Z,Y,X).

    The first plane along each axis serves as predecessor only. The target is 1 where a voxel and
    its predecessor carry one label, the mask is 0 where either of them is unlabelled.
    """
    centre = labels[1:, 1:, 1:]
    before = (labels[:-1, 1:, 1:], labels[1:, :-1, 1:], labels[1:, 1:, :-1])
    target = torch.stack([centre == other for other in before])
    mask = torch.stack([(centre > 0) & (other > 0) for other in before])
    return target.float(), mask.float()


def draw(
    image: NDArray[np.uint8], labels: NDArray[np.int32], rng: np.random.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """A random patch (1,1,S,S,S) of (Z,Y,X) arrays with its targets and mask (1,3,S,S,S).

    The voxels are isotropic, so any permutation and reversal of the axes is as good a sample.
    """
    corner = [int(rng.integers(0, size - _SIDE)) for size in image.shape]
    box = tuple(slice(start, start + _SIDE + 1) for start in corner)
    order = rng.permutation(3)
    flips = tuple(axis for axis in range(3) if rng.random() < 0.5)
    patch = np.flip(image[box].transpose(order), flips)[1:, 1:, 1:]
    target, mask = affinities(
        torch.from_numpy(np.ascontiguousarray(np.flip(labels[box].transpose(order), flips)))
    )
    grey = torch.from_numpy(patch.astype(np.float32) / 255)
    return grey[None, None], target[None], mask[None]


def area_under_curve(scores: Tensor, positive: Tensor) -> float:
    """The chance that a positive scores above a negative, from 1-D scores and booleans."""
    ranks = torch.empty(len(scores), dtype=torch.float64)
    ranks[scores.argsort()] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    hits = int(positive.sum())
    misses = len(scores) - hits
    return float((ranks[positive].sum() - hits * (hits + 1) / 2) / (hits * misses))


def report(network: nn.Module, image: NDArray[np.uint8], labels: NDArray[np.int32]) -> None:
    """Print accuracy and AUC per channel on (Z,Y,X) arrays of even sides.

    Most pairs are connected, so the accuracy is also given with both classes weighing the same and
    the base rate for threshold, where guessing gets one half. Two baselines stand beside
    them: the accuracy of calling every pair connected and the AUC of the grey value itself,
    membranes being dark.
    """
    grey = torch.from_numpy(image.astype(np.float32) / 255)
    with torch.inference_mode():
        logits = network(grey[None, None])[0, :, 1:, 1:, 1:]
    target, mask = affinities(torch.from_numpy(labels))
    for channel, axis in enumerate("zyx"):
        known = mask[channel] > 0
        positive = target[channel][known] > 0
        scores = logits[channel][known]
        accuracy = float(((scores > 0) == positive).float().mean())
        constant = float(positive.float().mean())
        area = area_under_curve(scores, positive)
        plain = area_under_curve(grey[1:, 1:, 1:][known], positive)
        joined = scores.sigmoid() > _BASE_RATE
        balanced = float(joined[positive].float().mean() + (~joined)[~positive].float().mean()) / 2
        print(
            f"{axis}: accuracy {accuracy:.4f} (all connected {constant:.4f}), "
            f"balanced {balanced:.4f}, AUC {area:.4f} (grey value {plain:.4f})"
        )


def main() -> None:
    """Train on the planes below z = 200, write the weights, print the held-out figures."""
    parser = argparse.ArgumentParser(description="Train the FIB-25 affinity network.")
    parser.add_argument("--data", type=Path, default=_HERE.parents[2] / "shared" / "data")
    parser.add_argument("--out", type=Path, default=_HERE / "fib25.safetensors")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    image = np.load(options.data / "fib25_medulla_train2_image.npy")
    with np.load(options.data / "fib25_medulla_train2_labels.npz") as archive:
        labels = archive["labels"].astype(np.int32)
    train = slice(0, _HELD_OUT_Z)

    # One thread adds in one order, so that a seed gives the same weights every time.
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    rng = np.random.default_rng(options.seed)
    network = fib25_network()
    optimiser = torch.optim.AdamW(network.parameters(), lr=_PEAK_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, max_lr=_PEAK_RATE, total_steps=options.steps, pct_start=0.1
    )
    started = time.perf_counter()
    running = 0.0
    for step in range(1, options.steps + 1):
        grey, target, mask = draw(image[train], labels[train], rng)
        losses = F.binary_cross_entropy_with_logits(network(grey), target, reduction="none")
        loss = (losses * mask).sum() / mask.sum()
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        schedule.step()
        running += loss.item()
        if step % 50 == 0:
            print(
                f"step {step}: loss {running / 50:.4f}, {time.perf_counter() - started:.0f} s",
                flush=True,
            )
            running = 0.0

    save_file(network.eval().state_dict(), options.out)
    report(network, image[_HELD_OUT_Z:], labels[_HELD_OUT_Z:])


if __name__ == "__main__":
    main()
