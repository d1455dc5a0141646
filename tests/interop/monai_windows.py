"""Results of MONAI's sliding window: ``python monai_windows.py FOLDER``, with MONAI installed."""

import sys
from pathlib import Path

import numpy as np
import torch
from monai.inferers import SlidingWindowInferer

WINDOW = (16, 24, 16)
CASES = [
    # image, weights, overlap, padding
    ((40, 50, 60), "gaussian", 0.25, "constant"),
    ((40, 50, 60), "constant", 0.5, "constant"),
    ((33, 47, 61), "gaussian", 0.625, "constant"),
    ((33, 47, 61), "constant", 0.25, "constant"),
    ((10, 20, 40), "gaussian", 0.5, "constant"),
    ((10, 20, 9), "constant", 0.25, "reflect"),
    ((11, 50, 9), "gaussian", 0.5, "replicate"),
]


class Ramps(torch.nn.Module):
    """Two channels that depend on the place in the window, so that no weight is without effect."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Values times a ramp, and its square."""
        z = torch.linspace(1.0, 2.0, batch.shape[2])
        y = torch.linspace(1.0, 3.0, batch.shape[3])
        x = torch.linspace(2.0, 1.0, batch.shape[4])
        ramp = z[:, None, None] * y[:, None] * x
        return torch.cat([batch * ramp, batch * ramp * ramp], 1)


def main(folder):
    """Write the network, and each case's image and result."""
    network = Ramps()
    torch.jit.script(network).save(str(folder / "ramps.pt"))
    for number, (shape, mode, overlap, padding) in enumerate(CASES):
        image = np.random.default_rng(number).random(shape, dtype=np.float32)
        inferer = SlidingWindowInferer(WINDOW, 1, overlap, mode=mode, padding_mode=padding)
        with torch.inference_mode():
            result = inferer(torch.from_numpy(image)[None, None], network)[0].numpy()
        np.savez(folder / f"{number}.npz", image=image, result=result)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
