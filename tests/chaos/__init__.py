"""Jobs that are disturbed at random until they are complete; see docs/guarantees.md.

``make chaos SECONDS=3600 SEED=7`` runs rounds for that time. Each round takes one command and a
crew that runs it (a launcher, two at once, worker processes, shards, a Dask cluster, launches that
join them), brings one misfortune a second upon them, launches again whatever ended, and then
requires what an undisturbed run makes.
"""
