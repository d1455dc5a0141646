import numpy as np
import pytest

from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.worker.chunk_input import ChunkInput

BOX = BoundingBox((1, 2, 3), (3, 5, 7))


def test_an_input_is_uploaded_once_until_it_is_freed():
    array = np.zeros((1, *BOX.shape))
    uploads = []

    def upload():
        uploads.append(array)
        return array.copy()

    chunk_input = ChunkInput(array, BOX, upload)
    assert not uploads
    assert chunk_input.on_device() is chunk_input.on_device()
    assert len(uploads) == 1
    chunk_input.free_device_arrays()
    chunk_input.on_device()
    assert len(uploads) == 2


def test_a_failed_upload_is_done_again():
    answers = [MemoryError("no room"), "array"]

    def upload():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    chunk_input = ChunkInput(np.zeros((1, *BOX.shape)), BOX, upload)
    with pytest.raises(MemoryError):
        chunk_input.on_device()
    assert chunk_input.on_device() == "array"


def test_an_array_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"shape \(9, 9, 9\), the input box \(2, 3, 4\)"):
        ChunkInput(np.zeros((1, 9, 9, 9)), BOX, lambda: None)
