"""CompactEmbedding with the native library: the same bits, whatever becomes of its tensors."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from typing import Any, Callable

import pytest
import torch

from fairseq_dpq import CompactEmbedding, native
from helpers.native_cases import by_pytorch, no_library
from helpers.toy_checkpoints import load

needs_library = pytest.mark.skipif(not native.available(), reason="the native library is not built")


def form_of(seed: int, packed: bool = False, n: int = 40, K: int = 12) -> CompactEmbedding:
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(K, (n, 8), generator=g)
    values = torch.randn(8, K, 4, generator=g)
    return CompactEmbedding.from_codes(codes, values, 32, 1, packed=packed)


def smaller_buffers(form: CompactEmbedding) -> CompactEmbedding:
    """The tensors of a smaller table in place of its own."""
    other = form_of(3, form.packed, n=20, K=9)
    form._allocate(other.sizes, None, None)
    form.codes, form.values = other.codes, other.values
    return form


def fewer_rows(form: CompactEmbedding) -> CompactEmbedding:
    """Another tensor at the same address."""
    form.codes = form.codes[:20]
    return form


def load_smaller(form: CompactEmbedding) -> CompactEmbedding:
    form.load_state_dict(form_of(4, n=40, K=5).state_dict())
    return form


def through_pickle(form: CompactEmbedding) -> CompactEmbedding:
    return pickle.loads(pickle.dumps(form))


def through_save(form: CompactEmbedding) -> CompactEmbedding:
    buffer = io.BytesIO()
    torch.save(form, buffer)
    buffer.seek(0)
    return load(buffer)


def other_memory(form: CompactEmbedding) -> CompactEmbedding:
    """Buffers that stay the same objects and get other memory."""
    form.values.data = form.values.half()
    form.codes.set_(form.codes.flip(0))
    return form


def other_padding(form: CompactEmbedding) -> CompactEmbedding:
    form.padding_idx = 3
    return form


CHANGES: list[Callable[[CompactEmbedding], CompactEmbedding]] = [
    smaller_buffers,
    fewer_rows,
    load_smaller,
    through_pickle,
    through_save,
    other_memory,
    other_padding,
    copy.copy,
    copy.deepcopy,
    lambda form: form.half(),
    lambda form: form.to(torch.bfloat16),
    lambda form: form.double(),
]


@needs_library
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("change", range(len(CHANGES)))
def test_what_is_looked_up_is_what_the_buffers_hold(change: int, packed: bool) -> None:
    form = form_of(0, packed)
    form(torch.arange(40))  # the library has pointers to the first buffers
    first = form.native_table()
    assert first is not None
    changed = CHANGES[change](form)
    every = torch.arange(changed.codes.shape[0])
    expected = by_pytorch(changed, every)
    for _ in range(2):
        found = changed(every)
        assert found.dtype == changed.values.dtype and torch.equal(found, expected)
        with pytest.raises(IndexError):
            changed(every + 1)
    assert changed.native_table() is not first
    assert (changed.native_table() is None) == (changed.values.dtype == torch.float64)


@needs_library
def test_the_library_keeps_the_memory_that_it_reads() -> None:
    form = form_of(0)
    every = torch.arange(40)
    expected = form(every)
    table = form.native_table()
    assert table is not None
    form.codes, form.values = torch.zeros(1, 8, dtype=torch.uint8), torch.zeros(1, 4)
    torch.full((1000, 8), 255, dtype=torch.uint8)  # would take the place of freed codes
    found = table.lookup(every)
    assert found is not None and torch.equal(found, expected)


@needs_library
def test_values_that_are_trained_get_their_gradient() -> None:
    form = form_of(0)
    form(torch.arange(3))
    form.values.requires_grad_()
    form(torch.tensor([2, 2, 1])).sum().backward()
    assert form.values.grad is not None
    assert form.values.grad.sum() == 2 * 32 + 32  # two rows of the table, and the row of padding


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("library", [contextlib.nullcontext, no_library])
def test_an_id_out_of_range_is_an_index_error(library: Any, packed: bool) -> None:
    form = form_of(0, packed)
    for ids in ([40], [-1], [0, 1, 40], [-1] * 30, [0] * 30 + [40]):
        for dtype in (torch.int64, torch.int32):
            with library(), pytest.raises(IndexError):
                form(torch.tensor(ids, dtype=dtype))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("library", [contextlib.nullcontext, no_library])
def test_few_ids_have_the_bits_of_many(library: Any, packed: bool) -> None:
    form = form_of(0, packed)
    with library():
        every = form(torch.arange(40))
        assert not every[1].any() and every[0].all()
        for i in range(40):
            assert torch.equal(form(torch.tensor(i)), every[i])
        for count in (0, 2, 16, 17):
            ids = torch.arange(count).view(2, -1) if count % 2 == 0 else torch.arange(count)
            assert torch.equal(form(ids), every[ids])
        if hasattr(torch, "vmap"):
            batched = torch.vmap(form)(torch.arange(6).view(3, 2))
            assert torch.equal(batched, every[:6].view(3, 2, 32))
