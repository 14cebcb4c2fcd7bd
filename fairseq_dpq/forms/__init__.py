"""How a table is stored for inference: one file for each form, listed here by kind."""

from __future__ import annotations

from typing import Sequence, Type, TypeVar

from fairseq_dpq.forms import operators  # noqa: F401, registers them with torch
from fairseq_dpq.forms.additive_codes import AdditiveEmbedding
from fairseq_dpq.forms.base import Form
from fairseq_dpq.forms.low_rank import LowRankEmbedding
from fairseq_dpq.forms.product_codes import CompactEmbedding
from fairseq_dpq.forms.scalar import ScalarEmbedding
from fairseq_dpq.forms.tiers import TieredEmbedding
from fairseq_dpq.registry import Registry, check_complete

FORMS: Registry[type[Form]] = Registry("form")
DEFAULT_FORM = CompactEmbedding.kind
F = TypeVar("F", bound=Type[Form])


def register_form(form: F) -> F:
    """Let files, commands and models know a form by its `kind`; a decorator of its class."""
    check_complete(form, Form, optional=("from_learned",))  # only where a method names its kind
    FORMS.add(form.kind, form)
    return form


def first_form(kinds: Sequence[str]) -> type[Form]:
    """The form to take out of those that can hold a table, by the order of their names."""
    for kind in kinds:
        if kind in FORMS:
            return FORMS[kind]
    raise ValueError(f"no form {' or '.join(kinds)} is known; there are {', '.join(FORMS)}")


_OWN = (CompactEmbedding, ScalarEmbedding, LowRankEmbedding, AdditiveEmbedding, TieredEmbedding)
for _form in _OWN:
    register_form(_form)
