"""Train the demo's tissue network on the MNI152 template and measure it on held-out slices.

Run it from anywhere with beam-inference, torch, safetensors and nilearn installed:

    python examples/tissue/train.py

All arrays and coordinates are in the order (z, y, x).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.utils import convert_conv3d_weight_memory_format

from beam_inference.demo.mni import load_t1, load_tissue_maps
from beam_inference.demo.tissue import CLASSES, DOWNSAMPLING, tissue_network

HERE = Path(__file__).resolve().parent
WEIGHTS = HERE.parents[1] / "beam_inference" / "demo" / "tissue.safetensors"

# The coronal slices y on which the network is judged. The band is behind the centre of the brain
# and crosses cortex, cerebellum, ventricles and the splenium. It cannot be a band of sagittal
# slices: the template is exactly left-right symmetric, so its mirror image would be trained on.
HELD_OUT = (80, 104)
# Slices on each side of the band that are not trained on either: the radius of the network's
# receptive field, so a held-out result depends on no voxel that training has seen.
GUARD = 16

# Crops are smaller than the patches of the demo so that more different ones fit, and so that a
# larger share of voxels lies near a side, where the network has to cope with cut-off surroundings.
CROP = (32, 48, 48)
BATCH = 4
PEAK_LEARNING_RATE = 4e-3
# The share of crops placed anywhere at all, which teaches that empty space is "other". The rest
# are placed over brain.
ANYWHERE = 0.1


def main() -> None:
    """Train, save the weights, and print and save the Dice on the held-out slices."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1000, help="optimiser steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=WEIGHTS, help="weights file to write")
    arguments = parser.parse_args()

    # One thread makes the result repeatable, and is the faster choice where other programs share
    # the cores: the backward convolutions of several threads wait for each other by spinning.
    torch.set_num_threads(1)
    image = np.asarray(load_t1() / 255, dtype=np.float32)
    grey, white = load_tissue_maps()
    other = np.clip(1 - grey - white, 0, 1)
    target = np.stack([other, grey, white], dtype=np.float32)

    started = time.monotonic()
    network = train(image, target, arguments.steps, arguments.seed)
    seconds = time.monotonic() - started
    # save_file would make the file readable by its owner only, even inside a built wheel.
    arguments.out.write_bytes(safetensors.torch.save(network.state_dict()))

    dice = held_out_dice(network, image, target)
    report = {
        "dice": {name: round(dice[name], 4) for name in CLASSES[1:]},
        "steps": arguments.steps,
        "seed": arguments.seed,
        "seconds": round(seconds, 1),
        "torch": torch.__version__,
        "held_out": {"axis": "y", "start": HELD_OUT[0], "stop": HELD_OUT[1], "guard": GUARD},
    }
    text = json.dumps(report, indent=2) + "\n"
    print(text, end="")
    (HERE / "dice.json").write_text(text)


def train(
    image: NDArray[np.float32], target: NDArray[np.float32], steps: int, seed: int
) -> nn.Module:
    """A network trained on crops of ``image`` (Z, Y, X) and ``target`` (class, Z, Y, X)."""
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    sides = trainable_sides(image)
    # Drawing a brain voxel first makes each side of the band weigh as much as its share of brain.
    offsets = [np.array([0, start, 0]) for start, _ in sides]
    brain = [
        np.argwhere(image[:, start:stop] > 0) + offset
        for (start, stop), offset in zip(sides, offsets, strict=True)
    ]
    share = np.array([len(voxels) for voxels in brain]) / sum(len(voxels) for voxels in brain)

    # This layout makes the convolutions nearly twice as fast on a CPU.
    network = tissue_network()
    convert_conv3d_weight_memory_format(network, torch.channels_last_3d)
    optimiser = torch.optim.Adam(network.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, PEAK_LEARNING_RATE, steps)
    for step in range(steps):
        images = []
        targets = []
        for _ in range(BATCH):
            side = random.choice(len(sides), p=share)
            low = offsets[side]
            end = (image.shape[0], sides[side][1], image.shape[2])
            high = np.subtract(end, CROP, dtype=np.int64)
            corner = random.integers(low, high, endpoint=True)
            if random.random() >= ANYWHERE:
                voxel = brain[side][random.integers(len(brain[side]))]
                corner = np.clip(voxel - random.integers(0, CROP), low, high)
            crop = tuple(slice(c, c + size) for c, size in zip(corner, CROP, strict=True))
            images.append(augment(image[crop], random)[None])
            targets.append(target[(slice(None), *crop)])
        logits = network(torch.from_numpy(np.stack(images)))
        # Cross entropy against the probability maps themselves: they say how unsure the boundary
        # voxels are, which labels would hide.
        loss = nn.functional.cross_entropy(logits, torch.from_numpy(np.stack(targets)))
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}/{steps}: loss {loss.item():.4f}", flush=True)
    convert_conv3d_weight_memory_format(network, torch.contiguous_format)
    return network.eval()


def trainable_sides(image: NDArray[np.float32]) -> list[tuple[int, int]]:
    """The ranges of y behind and in front of the held-out band and its guard."""
    return [(0, HELD_OUT[0] - GUARD), (HELD_OUT[1] + GUARD, image.shape[1])]


def augment(image: NDArray[np.float32], random: np.random.Generator) -> NDArray[np.float32]:
    """The image with a random contrast, brightness and noise, still within [0, 1].

    There are no flips: left-right the template equals its mirror image, so they would add nothing,
    and a brain upside down or back to front is not an image the network will ever meet.
    """
    changed = image ** random.uniform(0.9, 1.1) * random.uniform(0.95, 1.05)
    changed += random.normal(0, random.uniform(0, 0.01), image.shape)
    return np.asarray(np.clip(changed, 0, 1), dtype=np.float32)


def held_out_dice(
    network: nn.Module, image: NDArray[np.float32], target: NDArray[np.float32]
) -> dict[str, float]:
    """Dice of each class in the held-out slices, the largest class of each voxel on both sides."""
    start = HELD_OUT[0] - GUARD
    stop = HELD_OUT[1] + GUARD
    slab = image[:, start:stop]
    padding = [(0, -size % DOWNSAMPLING) for size in slab.shape]
    with torch.inference_mode():
        logits = network(torch.from_numpy(np.pad(slab, padding))[None, None])[0]
    unpadded = logits[(slice(None), *(slice(size) for size in slab.shape))]
    found = unpadded.argmax(0).numpy()[:, GUARD:-GUARD]
    truth = target[:, :, HELD_OUT[0] : HELD_OUT[1]].argmax(0)
    return {
        name: float(
            2
            * ((found == label) & (truth == label)).sum()
            / ((found == label).sum() + (truth == label).sum())
        )
        for label, name in enumerate(CLASSES)
    }


if __name__ == "__main__":
    main()
