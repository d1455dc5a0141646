"""Run in igneous's environment: a pyramid of a precomputed volume, each level from the one below, as .npy files.

Arguments: the volume's folder; a factor such as 2,2,1 (x, y, z) for each level.
"""

import sys

import numpy as np
from cloudvolume import CloudVolume
from igneous.task_creation import create_downsampling_tasks
from taskqueue import LocalTaskQueue

folder, *factors = sys.argv[1:]
for mip, factor in enumerate(factors):
    tasks = create_downsampling_tasks(
        f"file://{folder}",
        mip=mip,
        num_mips=1,
        factor=tuple(map(int, factor.split(","))),
        fill_missing=True,
        compress=False,
    )
    queue = LocalTaskQueue(parallel=1, progress=False)
    queue.insert(tasks)
    queue.execute()
    volume = CloudVolume(f"file://{folder}", mip=mip + 1, fill_missing=True, progress=False)
    np.save(f"{folder}/level-{mip + 1}.npy", np.asarray(volume[:]).T)  # (channel, z, y, x)
    print(mip + 1, *volume.bounds.minpt[::-1], *volume.resolution[::-1])
