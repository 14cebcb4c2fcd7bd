"""The native library: lookup, logits, codes and packing in C, with PyTorch as the reference."""

from fairseq_dpq.native.buffers import Buffers, products
from fairseq_dpq.native.functions import (
    centroid_sums,
    codes,
    first_centroids,
    nearest,
    pack,
    softmax_gradients,
    takes_gradients,
    unpack,
)
from fairseq_dpq.native.library import available, describe
from fairseq_dpq.native.table import VALUE_TYPES, Table, Tiers, table

__all__ = [
    "VALUE_TYPES",
    "Buffers",
    "Table",
    "Tiers",
    "available",
    "centroid_sums",
    "codes",
    "describe",
    "first_centroids",
    "nearest",
    "pack",
    "products",
    "softmax_gradients",
    "table",
    "takes_gradients",
    "unpack",
]
