"""Writes what deepbet makes of a head, and where its networks lie: ``python ... FOLDER``.

FOLDER has the image as ``image.npy``, as deepbet turns it: X, Y, Z of a canonical NIfTI.
"""

import json
import sys
from pathlib import Path

import numpy as np
from deepbet.bet import BrainExtraction
from deepbet.utils import DATA_PATH

folder = Path(sys.argv[1])
extraction = BrainExtraction(no_gpu=True)
image = np.load(folder / "image.npy").astype(np.float32)
probability = extraction.run_model(image.copy())
np.savez(folder / "mask.npz", probability=probability)
box = [[part.start, part.stop] for part in extraction.bbox]
(folder / "deepbet.json").write_text(json.dumps({"box": box, "models": f"{DATA_PATH}/models"}))
