"""Judging: how well a volume agrees with labels, exact across chunks."""
