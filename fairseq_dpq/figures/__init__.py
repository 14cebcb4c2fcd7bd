"""Figures of the tools, drawn with matplotlib: PNG, and SVG that follows the reader's theme."""
