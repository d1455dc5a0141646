"""The demo: tissue segmentation of a brain MRI template, on data that nilearn's wheel carries."""
