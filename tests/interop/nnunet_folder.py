"""What nnU-Net's own predictor makes of results folders: ``python nnunet_folder.py FOLDER``.

FOLDER has ``model``, the results folder, and ``image.npz`` with the image (C, Z, Y, X) and its
voxel size, ZYX, in millimetres. Writes ``result.npz`` with the labels and logits, as the tool gives
them and with its arrays in half precision made float32.
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
    """Labels (Z, Y, X) of an image, its logits, and the logits at its own voxels.

    Logits are (classes, Z, Y, X), of the box to which nnU-Net crops.
    """
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
        answers = predictor.configuration_manager.resampling_fn_probabilities(
            logits,
            properties["shape_after_cropping_and_before_resampling"],
            predictor.configuration_manager.spacing,
            properties["spacing"],
        )
    labels = predictor.predict_single_npy_array(image, {"spacing": spacing.tolist()})
    return labels, logits.numpy(), np.asarray(answers)


def main(folder):
    """Predict the image twice."""
    labels, logits, _ = predict(folder)
    predict_from_raw_data.torch = FloatTorch()
    predict_from_raw_data.compute_gaussian = partial(
        predict_from_raw_data.compute_gaussian, dtype=torch.float32
    )
    float_labels, float_logits, float_answers = predict(folder)
    np.savez(
        folder / "result.npz",
        labels=labels,
        logits=logits,
        float_labels=float_labels,
        float_logits=float_logits,
        float_answers=float_answers,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
