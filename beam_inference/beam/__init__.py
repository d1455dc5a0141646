"""Apache Beam: transforms, stages of volume tools, flags of runners, and what runs a pipeline."""
