"""Connected components of volumes of any size, exact across chunks."""
