"""The job file as models: what a user may write, and what is refused before anything is opened."""
