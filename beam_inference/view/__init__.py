"""Volumes in Neuroglancer: the state it shows, and the server that gives it local volumes."""
