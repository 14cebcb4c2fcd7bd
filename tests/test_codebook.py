"""The codebook's tensors, as a forward pass takes them."""

from __future__ import annotations

import torch

from fairseq_dpq.codebook import Codebook


def test_float_copies_only_when_asked() -> None:
    keys, values = torch.randn(1, 4, 2), torch.randn(1, 4, 3)
    book = Codebook(torch.randn(5, 2), keys, values)
    same = book.float()
    assert same[0] is keys and same[1] is values
    copied = book.float(copy=True)
    values.zero_()
    assert copied[1].any() and torch.equal(copied[0], keys)


def test_float_widens_half_precision() -> None:
    half = torch.tensor([[[0.1, 0.2]]], dtype=torch.float16)
    keys, values = Codebook(half[0], half, half).float()
    assert keys.dtype == values.dtype == torch.float32
    assert keys[0, 0, 0].item() == 0.0999755859375  # 0.1 in float16
