"""Every argument of every native function: a wrong shape, dtype, layout or device is an error or
left to PyTorch, never a read or write outside of a tensor."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from torch import Tensor

from fairseq_dpq import CompactEmbedding, native

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")

CODES: dict[str, Any] = {
    "query": torch.randn(9, 4, 3),
    "keys": torch.randn(4, 6, 3),
    "distance": "euclidean",
    "mean": torch.randn(4, 6),
    "scale": torch.rand(4, 6),
}
GRADIENTS: dict[str, Any] = {
    "features": torch.randn(9, 4, 3),
    "direction": torch.randn(4, 6, 3),
    "offset": torch.randn(4, 6),
    "values": torch.randn(4, 6, 5),
    "codes": torch.randint(6, (9, 4)),
    "grad": torch.randn(9, 4, 5),
}
PACK: dict[str, Any] = {"codes": torch.randint(4, (9, 3)), "bits": [2, 2, 2], "row_bytes": 1}
UNPACK: dict[str, Any] = {
    "packed": torch.zeros(9, 1, dtype=torch.uint8),
    "bits": [2, 2, 2],
    "dtype": torch.uint8,
}
TABLE: dict[str, Any] = {
    "codes": torch.zeros(9, 3, dtype=torch.uint8),
    "values": torch.randn(12, 5),
    "sizes": [4, 4, 4],
    "shared": False,
    "packed": False,
    "padding_idx": None,
}
NEAREST: dict[str, Any] = {"points": torch.randn(9, 4, 3), "centroids": torch.randn(4, 6, 3)}
SUMS: dict[str, Any] = {
    "points": torch.randn(9, 4, 3),
    "codes": torch.randint(6, (9, 4)),
    "K": 6,
    "weights": torch.rand(9),
}
FIRST: dict[str, Any] = {"points": torch.randn(9, 4, 3), "draws": torch.rand(4, 6)}
CALLS: dict[str, tuple[Callable, dict[str, Any]]] = {
    "codes": (native.codes, CODES),
    "softmax_gradients": (native.softmax_gradients, GRADIENTS),
    "pack": (native.pack, PACK),
    "unpack": (native.unpack, UNPACK),
    "table": (lambda **parts: native.table(native.Buffers(**parts)), TABLE),
    "nearest": (native.nearest, NEAREST),
    "centroid_sums": (native.centroid_sums, SUMS),
    "first_centroids": (native.first_centroids, FIRST),
}


def tensor_arguments() -> list[tuple[str, str]]:
    pairs = [(call, name) for call, (_, given) in CALLS.items() for name in given]
    return [(call, name) for call, name in pairs if isinstance(CALLS[call][1][name], Tensor)]


def other_shapes(tensor: Tensor) -> list[Tensor]:
    """The tensor with each dimension longer, shorter, one or none, and with more or fewer."""
    changed = [tensor[0], tensor.unsqueeze(0), tensor.flatten()]
    for i, size in enumerate(tensor.shape):
        for length in {size + 1, size - 1, 1, 0}:
            rest = list(tensor.shape)
            rest[i] = length
            changed.append(torch.zeros(rest, dtype=tensor.dtype))
    return [other for other in changed if other.shape != tensor.shape]


# What still fits: all groups may share their keys, and a table may have any number of rows.
FITS = {
    ("codes", "query"): lambda t: t.shape[1:] == (4, 3),
    ("codes", "keys"): lambda t: t.shape in ((4, 6, 3), (1, 6, 3)),
    ("nearest", "points"): lambda t: t.shape[1:] == (4, 3),
    ("nearest", "centroids"): lambda t: t.dim() == 3 and len(t) in (1, 4) and t.shape[2] == 3,
    ("centroid_sums", "points"): lambda t: t.dim() == 3 and t.shape[:2] == (9, 4),
    ("first_centroids", "points"): lambda t: t.dim() == 3 and t.shape[1] == 4 and len(t) > 0,
    ("first_centroids", "draws"): lambda t: t.dim() == 2 and t.shape[0] == 4,
    ("pack", "codes"): lambda t: t.dim() == 2 and t.shape[1] == 3,
    ("unpack", "packed"): lambda t: t.dim() == 2 and t.shape[1] >= 1,
    ("table", "codes"): lambda t: t.dim() == 2 and t.shape[1] == 3,
    ("table", "values"): lambda t: t.dim() == 2 and t.shape[0] >= 12,
}


@pytest.mark.parametrize("call,name", tensor_arguments())
def test_a_wrong_shape_is_an_error(call: str, name: str) -> None:
    function, given = CALLS[call]
    assert function(**given) is not None
    fits = FITS.get((call, name), lambda t: False)
    for changed in other_shapes(given[name]):
        if not fits(changed):
            with pytest.raises(ValueError, match=r"must be|must have|need|give one|cannot hold"):
                function(**{**given, name: changed})


def without_storage(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    getattr(changed, "untyped_storage", changed.storage)().resize_(0)
    return changed


class Wrapped(Tensor):
    """A tensor of another class, which may keep its numbers elsewhere."""


LEFT_TO_PYTORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "freed": without_storage,
    "subclass": lambda t: t.as_subclass(Wrapped),
}


@pytest.mark.parametrize("change", LEFT_TO_PYTORCH)
@pytest.mark.parametrize("call,name", tensor_arguments())
def test_memory_that_cannot_be_read_is_left_to_pytorch(call: str, name: str, change: str) -> None:
    function, given = CALLS[call]
    assert function(**{**given, name: LEFT_TO_PYTORCH[change](given[name])}) is None


def results(found: Any) -> list[Tensor]:
    if isinstance(found, native.Table):
        return [found.lookup(torch.arange(9)), found.logits(torch.ones(2, 15))]
    return list(found) if isinstance(found, tuple) else [found]


@pytest.mark.parametrize("call,name", [pair for pair in tensor_arguments() if pair[0] != "table"])
def test_strides_do_not_matter(call: str, name: str) -> None:
    function, given = CALLS[call]
    tensor = given[name]
    turned = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    every_second = torch.stack([tensor, torch.zeros_like(tensor)], -1)[..., 0]
    backwards = tensor.flip(0)[torch.arange(len(tensor) - 1, -1, -1)]
    for changed in (turned, every_second, backwards):
        found = results(function(**{**given, name: changed}))
        assert all(map(torch.equal, found, results(function(**given))))


def test_tables_need_contiguous_tensors() -> None:
    for name in ("codes", "values"):
        turned = TABLE[name].t().contiguous().t()
        assert native.table(native.Buffers(**{**TABLE, name: turned})) is None


def _real(dtype: torch.dtype) -> bool:
    return torch.empty(0, dtype=dtype).is_floating_point()


DTYPES = [torch.float64, torch.float16, torch.int32, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("call,name", tensor_arguments())
def test_another_dtype_is_served_rightly_or_not_at_all(
    call: str, name: str, dtype: torch.dtype
) -> None:
    function, given = CALLS[call]
    if call == "codes" or (name in ("points", "centroids", "weights", "draws") and _real(dtype)):
        if dtype is torch.complex64:
            with pytest.raises(ValueError, match=f"{name} is complex"):
                function(**{**given, name: given[name].to(dtype)})
            return
        changed = given[name].to(dtype)
        found = results(function(**{**given, name: changed}))
        other = results(function(**{**given, name: changed.float()}))
        assert all(map(torch.equal, found, other))
    elif (call, name, dtype) == ("table", "values", torch.float16):
        found = function(**{**given, name: given[name].half()})
        assert torch.equal(found.lookup(torch.tensor([0]))[0, :5], given[name][0].half())
    else:
        assert function(**{**given, name: given[name].to(dtype)}) is None


@pytest.mark.parametrize(
    "call,name,value,message",
    [
        ("codes", "distance", "manhattan", "choose one of dot, euclidean"),
        ("codes", "mean", None, "mean and scale go together"),
        ("codes", "scale", None, "mean and scale go together"),
        ("codes", "scale", torch.rand(1, 6), "scale has shape"),
        ("centroid_sums", "K", 0, "K=0 must be from 1"),
        ("centroid_sums", "K", 1 << 15 | 1, "K=32769 must be from 1"),
        ("centroid_sums", "codes", torch.full((9, 4), 6), "row 0 has a code that is not below K=6"),
        ("centroid_sums", "codes", torch.full((9, 4), -1), "row 0 has a code"),
        ("pack", "bits", [2, 2], "bits has 2 widths for 3 groups"),
        ("pack", "bits", [2, -1, 2], "a width of -1"),
        ("pack", "bits", [2, 256, 2], "cannot hold 260 bits"),
        ("pack", "row_bytes", 0, "rows of 0 bytes cannot hold 6 bits"),
        ("unpack", "bits", [-2, 2, 2], "a width of -2"),
        ("unpack", "bits", [2] * 5, "rows of 1 bytes cannot hold 10 bits"),
        ("table", "sizes", [], "sizes"),
        ("table", "sizes", [4, 0, 4], "sizes"),
        ("table", "sizes", [4, 4], "need 2"),
        ("table", "sizes", [4, 4, 5], "values have 12 rows; the groups' codes need 13"),
        ("table", "packed", True, "need 1"),
        ("table", "padding_idx", 9, "padding_idx=9"),
        ("table", "padding_idx", -1, "padding_idx=-1"),
    ],
)
def test_other_arguments(call: str, name: str, value: Any, message: str) -> None:
    function, given = CALLS[call]
    with pytest.raises(ValueError, match=message):
        function(**{**given, name: value})


def test_codes_that_a_byte_cannot_hold() -> None:
    packed = torch.zeros(9, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match="do not fit into one byte"):
        native.unpack(packed, [9], torch.uint8)
    assert native.unpack(packed, [16], torch.int16) is None


@pytest.mark.skipif(not hasattr(torch.device, "__enter__"), reason="needs torch 2")
def test_a_default_device_does_not_reach_the_library() -> None:
    for call, (function, given) in CALLS.items():
        if call != "table":
            with torch.device("meta"):
                found = results(function(**given))
            assert all(map(torch.equal, found, results(function(**given))))


@pytest.mark.parametrize("change", ["meta", "subclass", "sparse"])
def test_indices_and_h_that_cannot_be_read(change: str) -> None:
    table = native.table(native.Buffers(**TABLE))
    assert isinstance(table, native.Table)
    changed = LEFT_TO_PYTORCH[change]
    assert table.lookup(changed(torch.tensor([1, 2]))) is None
    assert table.logits(changed(torch.ones(2, 15))) is None


def test_indices_and_h_of_other_shapes_and_types() -> None:
    table = native.table(native.Buffers(**TABLE))
    assert isinstance(table, native.Table)
    with pytest.raises(ValueError, match="no memory"):
        table.lookup(without_storage(torch.tensor([1, 2])))
    assert table.logits(without_storage(torch.ones(2, 15))) is None
    assert table.logits(torch.ones(())) is None
    assert table.logits(torch.ones(2, 14)) is None and table.logits(torch.ones(30)) is None
    assert table.logits(torch._neg_view(torch.ones(15))) is None
    for dtype in (torch.int16, torch.uint8, torch.bool, torch.float32):
        assert table.lookup(torch.ones(2).to(dtype)) is None
    for dtype in (torch.int64, torch.float64, torch.complex64):
        assert table.logits(torch.ones(2, 15).to(dtype)) is None
    found = table.lookup(torch.tensor(3))
    assert found is not None and found.shape == (15,)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bad", [-1, 6, 256, 1 << 16])
def test_from_codes_refuses_codes_that_a_group_does_not_have(bad: int, packed: bool) -> None:
    codes = torch.randint(6, (40_000, 4))
    codes[33_000, 2] = bad
    message = f"codes: row 33000 has code {bad} in group 2, which has 6 codes"
    with pytest.raises(ValueError, match=message):
        CompactEmbedding.from_codes(codes, torch.randn(4, 6, 2), 8, packed=packed)
