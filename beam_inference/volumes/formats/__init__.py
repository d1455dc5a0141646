"""Formats of volumes, one module for each kind of metadata."""
