"""A page about a job that has run, or runs: what it made, how it went, and what it cost.

Data flows one way: ``facts`` reads the state folder, ``measures``, ``chunk_map``, ``slices`` and
    ``seam_profile`` make values of it, ``figures`` draws them, ``page`` puts all into one file of
    HTML. Whatever the size of the job, some thousand receipts and a few cut-outs are read.
"""
