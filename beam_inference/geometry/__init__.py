"""Geometry: boxes, grids, the patch lattice, blend weights and the plan of a job. NumPy only."""
