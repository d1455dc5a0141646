"""Volumes of any common format in, volumes out: sources, targets, and the chunks between them."""
