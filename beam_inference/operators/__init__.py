"""What may be done to a chunk's values before and after the network."""
