"""The demo: tissue segmentation of a brain MRI template, on data that nilearn's wheel carries.

It takes the same path as a user's job: a volume on disk, a job file, ``run``, ``verify --deep``.
Then it draws what came out. One averaged brain, a network of minutes: a demonstration, not for
clinical use.
"""
