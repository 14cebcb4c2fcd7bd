"""Which K and D to take: what each pair would store."""

from __future__ import annotations

from fairseq_dpq.forms.base import CRC_BITS
from fairseq_dpq.forms.packing import code_bits, row_bytes


def stored_bytes(n: int, d: int, K: int, D: int, shared: bool = False) -> int:
    """Bytes of a compact table: packed codes, 32-bit values, the checksum."""
    values = 4 * K * (d // D if shared else d)
    return n * row_bytes([code_bits(K)] * D) + values + CRC_BITS
