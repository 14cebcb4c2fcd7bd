"""Data sets, the demo and the paper's tables: for a checkout, not in the wheel."""
