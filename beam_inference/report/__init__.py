"""HTML page about a job that has run, or runs: its result, its course and its cost.

Data flow one way: ``facts`` reads the state folder; ``measures``, ``chunk_map``, ``slices`` and
``seam_profile`` compute values from it; ``volume_figures`` and ``time_figures`` draw them; and
``page`` puts all into one HTML file. Whatever the size of the job, some thousand receipts and a few
cut-outs are read.
"""
