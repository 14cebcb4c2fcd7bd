"""Stored forms in a fairseq model: what its tied output layer gets."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_dpq.any_model.distill import _in_training
from fairseq_dpq.fairseq_plugin.layers import form_class


class _Tied(nn.Module):
    """As fairseq's decoders: the weight of the table is asked for in every step."""

    def __init__(self) -> None:
        super().__init__()
        rows = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
        self.table: Any = form_class("tiers").from_table(rows, tiers=[(10, 4, 4), (30, 2, 2)])
        self.table.correction = torch.linspace(-2, 2, 40).half()

    def forward(self, h: Tensor) -> Tensor:
        return F.linear(h, self.table.weight)


def _trained(model: _Tied, h: Tensor) -> Tensor:
    """As `distill` runs it."""
    with _in_training(model, [model.table], False):
        out: Tensor = model(h)
        assert out.requires_grad
        return out.detach()


def _exact(model: _Tied, h: Tensor) -> Tensor:
    """As with --exact-logits, which means the dense table where there is no correction."""
    model.table.exact_logits = True
    return model(h)


WAYS: dict[str, Callable[[_Tied, Tensor], Tensor]] = {
    "trained": _trained,
    "exact": _exact,
    "jit": lambda model, h: torch.jit.trace(model, (h,))(h),
    "export": lambda model, h: torch.export.export(model, (h,)).module()(h),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("way", WAYS)
def test_the_correction_of_logits_is_never_lost(way: str) -> None:
    if way == "export" and not hasattr(torch, "export"):
        pytest.skip("this torch has no torch.export")
    model, h = _Tied().eval(), torch.randn(3, 8, generator=torch.Generator().manual_seed(2))
    form = model.table
    expected = F.linear(h, form.dense()) + form.correction.float()
    torch.testing.assert_close(WAYS[way](model, h), expected)
