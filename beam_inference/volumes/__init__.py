"""Volumes: voxels in stores, as they are found, opened, read and written."""
