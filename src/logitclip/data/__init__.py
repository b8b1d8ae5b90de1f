"""Datasets by name: see `dataset.py` for what one is, and one file for each family."""
