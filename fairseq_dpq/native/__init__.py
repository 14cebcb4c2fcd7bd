"""The native library: lookup, logits, codes and packing in C, with PyTorch as the reference."""

from fairseq_dpq.native.functions import codes, pack, softmax_gradients, takes_gradients, unpack
from fairseq_dpq.native.library import describe, load
from fairseq_dpq.native.table import Table, table

__all__ = [
    "Table",
    "available",
    "codes",
    "describe",
    "pack",
    "softmax_gradients",
    "table",
    "takes_gradients",
    "unpack",
]


def available() -> bool:
    """Whether the native library is built, loads and is not turned off."""
    return load() is not None
