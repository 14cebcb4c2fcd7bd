"""How a table is learned: one file for each method, listed here by name."""

from __future__ import annotations

from fairseq_dpq.methods.base import Method
from fairseq_dpq.methods.fixed_codes import FixedCodes
from fairseq_dpq.methods.kd_codes import KDCodes
from fairseq_dpq.methods.low_rank import LowRank
from fairseq_dpq.methods.random_codes import RandomCodes
from fairseq_dpq.methods.sx import SX
from fairseq_dpq.methods.vq import VQ

METHODS: dict[str, Method] = {
    m.name: m for m in (SX(), VQ(), LowRank(), RandomCodes(), KDCodes(), FixedCodes())
}
