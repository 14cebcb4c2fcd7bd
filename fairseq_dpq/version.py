"""The version, in one place: read by setup.py without importing the package
and written into the files that the tools produce."""

__version__ = "1.1.0"
