"""Open OME-Zarr volumes by the models of their specification: ``python ome_models.py FOLDER …``.

Run by the Python of requirements.txt. Prints a line of JSON for each folder: the names of its axes,
and the units of those in space.
"""

import json
import sys

import zarr
from ome_zarr_models import open_ome_zarr

for folder in sys.argv[1:]:
    image = open_ome_zarr(zarr.open_group(folder, mode="r"))
    attributes = getattr(image.attributes, "ome", image.attributes)
    axes = attributes.multiscales[0].axes
    units = [axis.unit for axis in axes if axis.type == "space"]
    print(json.dumps({"axes": [axis.name for axis in axes], "units": units}))
