"""Everything before the first chunk, and the run of a job as a whole."""
