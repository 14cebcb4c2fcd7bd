"""Data sets of the paper: download, check, clean and binarise.

One module per data set, each run as ``python -m experiments.datasets.NAME``.
"""
