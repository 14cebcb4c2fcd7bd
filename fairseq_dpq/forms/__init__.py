"""How a table is stored for inference: one file for each form, listed here by kind."""

from __future__ import annotations

from fairseq_dpq.forms.additive_codes import AdditiveEmbedding
from fairseq_dpq.forms.base import Form
from fairseq_dpq.forms.low_rank import LowRankEmbedding
from fairseq_dpq.forms.product_codes import CompactEmbedding
from fairseq_dpq.forms.scalar import ScalarEmbedding

FORMS: dict[str, type[Form]] = {
    f.kind: f for f in (CompactEmbedding, ScalarEmbedding, LowRankEmbedding, AdditiveEmbedding)
}
