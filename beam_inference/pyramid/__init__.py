"""Multiscale pyramids: coarser scales of a volume, and thumbnails."""
