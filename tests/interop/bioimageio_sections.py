"""What bioimageio.core makes of a stack by sections: ``python bioimageio_sections.py FOLDER``.

FOLDER has the package ``model`` and ``image.npy``, a stack (Z, Y, X). Writes ``result.npy``, the
first channel of the output, float32 (Z, Y, X).
"""

import sys
from pathlib import Path

import numpy as np
from bioimageio.core import Sample, Tensor, create_prediction_pipeline, load_model_description


def main(folder):
    """Predict each section, in blocks, as a sample of its own."""
    file = folder / "model" / "bioimageio.yaml"
    model = load_model_description(file, perform_io_checks=False)
    pipeline = create_prediction_pipeline(model, weights_format="torchscript")
    image = np.load(folder / "image.npy", mmap_mode="r")
    result = np.lib.format.open_memmap(
        folder / "result.npy", "w+", dtype=np.float32, shape=image.shape
    )
    for number, section in enumerate(image):
        array = np.asarray(section, np.float32)[None, None]
        tensor = Tensor.from_numpy(array, dims=("batch", "channel", "y", "x"))
        sample = Sample(members={model.inputs[0].id: tensor}, stat={}, id=None)
        answer = pipeline.predict_sample_with_blocking(sample)
        result[number] = np.asarray(answer.members[model.outputs[0].id].data)[0, 0]
    result.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
