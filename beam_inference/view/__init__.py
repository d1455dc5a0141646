"""A look at volumes in Neuroglancer: what it is to show, and the server that gives it local volumes."""
