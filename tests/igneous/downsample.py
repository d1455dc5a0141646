"""Run in igneous's environment: a pyramid of a precomputed volume, and its levels as .npy files.

Arguments: the volume's folder, the factor as 2,2,1 (x, y, z), the number of levels.
"""

import sys

import numpy as np
from cloudvolume import CloudVolume
from igneous.task_creation import create_downsampling_tasks
from taskqueue import LocalTaskQueue

folder = sys.argv[1]
factor = tuple(map(int, sys.argv[2].split(",")))
count = int(sys.argv[3])
tasks = create_downsampling_tasks(
    f"file://{folder}", num_mips=count, factor=factor, fill_missing=True, compress=False
)
queue = LocalTaskQueue(parallel=1, progress=False)
queue.insert(tasks)
queue.execute()
for mip in range(1, count + 1):
    volume = CloudVolume(f"file://{folder}", mip=mip, fill_missing=True, progress=False)
    np.save(f"{folder}/level-{mip}.npy", np.asarray(volume[:]).T)  # (channel, z, y, x)
    print(mip, *volume.bounds.minpt[::-1], *volume.resolution[::-1])
