"""What nnU-Net's own predictor makes of results folders: ``python nnunet_folder.py FOLDER``.

FOLDER has one folder for each case: ``model``, the results folder, and ``image.npz`` with the image
(C, Z, Y, X) and its voxel size, ZYX, in millimetres. Writes to each the labels and logits, as the
tool gives them and with its arrays in half precision made float32.
"""

import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch

for variable in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
    os.environ[variable] = sys.argv[1]

from nnunet_logits import FloatTorch  # noqa: E402 - beside this file
from nnunetv2.inference import (  # noqa: E402 - it looks for its folders when it is imported
    predict_from_raw_data,
)
from nnunetv2.preprocessing.preprocessors.default_preprocessor import (  # noqa: E402
    DefaultPreprocessor,
)


def predict(folder):
    """Labels (Z, Y, X) and logits (classes, Z, Y, X) of an image."""
    predictor = predict_from_raw_data.nnUNetPredictor(
        perform_everything_on_device=False, device=torch.device("cpu"), allow_tqdm=False
    )
    predictor.initialize_from_trained_model_folder(str(folder / "model"), None)
    with np.load(folder / "image.npz") as file:
        image, spacing = file["image"], file["spacing"]
    properties = {"spacing": spacing.tolist()}
    data, _, properties = DefaultPreprocessor(verbose=False).run_case_npy(
        image,
        None,
        properties,
        predictor.plans_manager,
        predictor.configuration_manager,
        predictor.dataset_json,
    )
    with torch.inference_mode():
        logits = predictor.predict_logits_from_preprocessed_data(torch.from_numpy(data)).float()
    labels = predictor.predict_single_npy_array(image, {"spacing": spacing.tolist()})
    return labels, logits.numpy()


def main(top):
    """Predict each case."""
    gaussian = predict_from_raw_data.compute_gaussian
    for folder in sorted(path.parent for path in top.glob("*/image.npz")):
        labels, logits = predict(folder)
        predict_from_raw_data.torch = FloatTorch()
        predict_from_raw_data.compute_gaussian = partial(gaussian, dtype=torch.float32)
        float_labels, float_logits = predict(folder)
        predict_from_raw_data.torch = torch
        predict_from_raw_data.compute_gaussian = gaussian
        np.savez(
            folder / "result.npz",
            labels=labels,
            logits=logits,
            float_labels=float_labels,
            float_logits=float_logits,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
