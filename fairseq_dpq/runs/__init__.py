"""Runs lists of commands: starts, watches, resumes, locks. The sweep, the demo and the reproduction
of the paper's tables are such lists."""
