"""How a table is learned: one file for each method, listed here."""

from fairseq_dpq.methods.base import (
    DEFAULT_METHOD,
    METHODS,
    Method,
    MethodOptions,
    make_options,
    register_method,
)
from fairseq_dpq.methods.kd_codes import KDCodes
from fairseq_dpq.methods.low_rank import LowRank
from fairseq_dpq.methods.stored_codes import FixedCodes, RandomCodes
from fairseq_dpq.methods.sx import SX
from fairseq_dpq.methods.vq import VQ

__all__ = [
    "DEFAULT_METHOD",
    "METHODS",
    "Method",
    "MethodOptions",
    "make_options",
    "register_method",
]

for method in (SX, VQ, LowRank, RandomCodes, KDCodes, FixedCodes):
    register_method(method)
