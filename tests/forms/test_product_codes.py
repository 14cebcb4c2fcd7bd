"""CompactEmbedding: bit for bit the training form, in memory and from a state_dict, in TorchScript,
torch.export and torch.compile; bytes that it really holds."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import zlib

import pytest
import torch
from torch import nn

from fairseq_dpq import CompactEmbedding, DPQEmbedding
from fairseq_dpq.files.memory import memory_of, tensor_crc32
from fairseq_dpq.files.writer import write_form
from fairseq_dpq.forms.packing import row_bytes
from helpers.layers import METHODS, make, train

KS = (3, 5, 12, 100, 256, 300)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal as bits: unlike torch.equal, 0.0 is not -0.0."""
    return a.dtype == b.dtype and torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("method,schedule", METHODS)
def test_all_forms_agree_bit_for_bit(method: str, schedule: str, shared: bool) -> None:
    n, d = 60, 12
    for K in KS if schedule == "paper" else (12, 300):
        for D in (1, 2, 3, 4, 6, 12):
            layer = make(
                n,
                d,
                K=K,
                D=D,
                method=method,
                schedule=schedule,
                share_subspaces=shared,
            )
            train(layer, steps=2).eval()
            tokens = torch.randint(n, (3, 5))
            tokens[0, 0] = layer.padding_idx
            with torch.no_grad():
                out = layer(tokens)
                plain, packed = layer.compact(), layer.compact(packed=True)
                table = plain.dense()
                assert same_bits(layer(torch.arange(n)), table)  # all at once, or ...
                for token in (0, 1, 37):  # ... each alone
                    assert same_bits(layer(torch.tensor(token)), table[token])
                assert same_bits(layer.weight, table)
            assert same_bits(layer(tokens).detach(), out)  # with gradients too
            assert same_bits(plain(tokens), out)
            assert same_bits(packed(tokens), out)
            assert same_bits(packed.dense(), table)
            assert same_bits(table[tokens], out)
            assert same_bits(plain.weight, table)
            other = CompactEmbedding(n, d, 1, K=K, D=D, share_subspaces=shared, packed=True)
            other.load_state_dict(plain.state_dict())
            assert same_bits(other(tokens), out)
            # codes are the numbers that the values are picked by
            codes = plain.unpacked_codes().long()
            assert torch.equal(packed.unpacked_codes().long(), codes)
            assert codes.max() < K and not codes[1].any()
            rows = torch.stack(
                [layer.values[0 if shared else j, codes[:, j]] for j in range(D)], 1
            ).detach()
            rows[1] = 0
            assert same_bits(rows.reshape(n, d), table)


def test_more_training_gives_another_table() -> None:
    """The forms agree after training because they were computed anew, not because nothing moves."""
    layer = train(make()).eval()
    before = layer.compact().dense()
    train(layer).eval()
    after = layer.compact().dense()
    assert not torch.equal(before, after)
    with torch.no_grad():
        assert torch.equal(layer(torch.arange(50)), after)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("D", [1, 3, 6, 12, 24])  # rows of 24, 8, 4, 2 and 1 values
def test_values_in_any_dtype(D: int, dtype: torch.dtype, packed: bool) -> None:
    layer = make(D=D).eval()
    compact = layer.compact(dtype=dtype, packed=packed)
    tokens = torch.randint(50, (4, 5))
    with torch.no_grad():
        wanted = layer(tokens).to(dtype)
        assert compact(tokens).dtype == dtype and torch.equal(compact(tokens), wanted)
        assert torch.equal(layer.compact(packed=packed).to(dtype)(tokens), wanted)
    assert layer.values.dtype == torch.float32
    other = CompactEmbedding(50, 24, 1, K=8, D=D, dtype=dtype)
    other.load_state_dict(compact.state_dict())
    assert torch.equal(other(tokens), wanted)


def test_compact_is_apart_from_its_layer() -> None:
    layer = make().eval()
    compact = layer.compact()
    before = compact.dense()
    with torch.no_grad():
        layer.values.zero_()
    assert torch.equal(compact.dense(), before) and before.any()
    assert list(compact.parameters()) == []


# Sizes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("K,D", [(32, 8), (5, 3), (300, 4), (256, 24)])
def test_bytes(K: int, D: int, shared: bool) -> None:
    n, d = 1000, 24
    layer = make(n, d, K=K, D=D, share_subspaces=shared, padding_idx=None)
    plain, packed = layer.compact(), layer.compact(packed=True)
    bits = (K - 1).bit_length()
    rows = K * (1 if shared or D == 1 else D)
    code_bytes, value_bytes = n * -(-D * bits // 8), rows * (d // D) * 4
    state = plain.state_dict()
    assert tuple(state["codes"].shape) == (n, -(-D * bits // 8))
    assert state["codes"].dtype == torch.uint8
    assert tuple(state["values"].shape) == (rows, d // D)
    for form in (plain, packed):
        saved = sum(t.numel() * t.element_size() for t in form.state_dict().values())
        assert form.saved_nbytes == saved
        assert code_bytes + value_bytes <= saved <= code_bytes + value_bytes + 64
        held = sum(b.numel() * b.element_size() for b in form.buffers())
        assert form.nbytes == held
    assert plain.nbytes == n * D * (1 if K <= 256 else 2) + value_bytes + 4 * D
    assert packed.nbytes == code_bytes + value_bytes + 4 * D + 5 * 4 * D  # offsets and a plan
    assert plain.compression_ratio() == 4 * n * d / plain.saved_nbytes
    # by the formula and as saved: they differ by the last byte of each row and a header
    formula = layer.config.compact_bits(n, d) / 8
    assert formula <= plain.saved_nbytes <= formula + n + 64
    assert repr(packed).startswith(f"CompactEmbedding({n}, {d}, K={K}, D={D}")
    # half-precision values
    half = layer.compact(dtype=torch.float16)
    assert plain.saved_nbytes - half.saved_nbytes == value_bytes // 2
    # nothing large that is not counted
    buffer = io.BytesIO()
    torch.save(state, buffer)
    assert len(buffer.getvalue()) < plain.saved_nbytes + 4096


def test_padding_row_is_not_saved() -> None:
    with_pad, without = make(K=8).compact(), make(K=8, padding_idx=None).compact()
    assert with_pad.state_dict()["values"].shape == without.state_dict()["values"].shape
    assert with_pad.nbytes - without.nbytes == 4 * 6  # one row of zeros in memory


# state_dict -------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_state_dict_round_trip_inside_a_model(packed: bool) -> None:
    layer = train(make(K=12)).eval()

    def model(embedding: nn.Module) -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(embedding, nn.Linear(24, 2))

    one = model(layer.compact(packed=packed))
    other = model(CompactEmbedding(50, 24, 1, K=2, D=4, packed=not packed))  # K comes from the file
    buffer = io.BytesIO()
    torch.save(one.state_dict(), buffer)
    buffer.seek(0)
    result = other.load_state_dict(torch.load(buffer))
    assert not result.missing_keys and not result.unexpected_keys
    tokens = torch.randint(50, (2, 7))
    assert torch.equal(one(tokens), other(tokens))
    assert other[0].sizes == [12] * 4
    assert torch.equal(copy.deepcopy(other)(tokens), one(tokens))


def test_state_dict_errors() -> None:
    compact = make().compact()
    state = compact.state_dict()
    other = CompactEmbedding(51, 24, 1, K=8, D=4)
    with pytest.raises(
        RuntimeError, match=r"codes: size mismatch, found \(50, 2\).*needs \(51, 2\)"
    ):
        other.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'Missing key.*"values"'):
        compact.load_state_dict({"codes": state["codes"]})
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"query"'):
        compact.load_state_dict({**state, "query": torch.zeros(1)})


@pytest.mark.skipif(torch.__version__.startswith("1."), reason="needs torch 2.1 or later")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_assigning_to_a_table_on_meta(packed: bool, dtype: torch.dtype) -> None:
    compact = make().compact(packed=True).shrunk()
    state = {k: t.to(dtype) if k == "values" else t for k, t in compact.state_dict().items()}
    other = CompactEmbedding(50, 24, 1, K=8, D=4, packed=packed, device="meta")
    other.load_state_dict(state, assign=True)
    assert {b.device.type for b in other.buffers()} == {"cpu"} and other.values.dtype == dtype
    assert torch.equal(other.dense(), compact.dense().to(dtype))
    assert (other.codes.data_ptr() == state["codes"].data_ptr()) == packed


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="D=5 does not divide embedding_dim=24"):
        CompactEmbedding(50, 24, K=8, D=5)
    with pytest.raises(ValueError, match="padding_idx=50: must be within the 50 rows"):
        CompactEmbedding(50, 24, 50, K=8, D=4)
    with pytest.raises(ValueError, match=r"sizes=\[3, 4\]: give the number of codes of each of 4"):
        CompactEmbedding(50, 24, K=8, D=4, sizes=[3, 4])
    with pytest.raises(ValueError, match="need sizes"):
        CompactEmbedding.from_codes(torch.zeros(3, 2), torch.zeros(4, 2), 4)


# Without numpy ----------------------------------------------------------------------------------

ALONE = """
import sys
sys.modules["numpy"] = None  # as where it is not installed
sys.modules["fairseq"] = None
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "fairseq" else find(name, *rest)
import io, torch
from fairseq_dpq import CompactEmbedding, DPQEmbedding
from fairseq_dpq.files.reader import read_symbols

torch.manual_seed(0)
layer = DPQEmbedding(300, 24, 1, K=12, D=4)
layer(torch.arange(300)).sum().backward()
layer.eval()
tokens = torch.tensor([[0, 1, 2], [297, 298, 299]])
with torch.no_grad():
    expected = layer(tokens)
buffer = io.BytesIO()
torch.save(layer.compact().state_dict(), buffer)
buffer.seek(0)
other = CompactEmbedding(300, 24, 1, K=12, D=4)
other.load_state_dict(torch.load(buffer))
assert torch.equal(other(tokens), expected)
table = CompactEmbedding.from_file(sys.argv[1])
print(table(torch.tensor([3])).sum().item(), read_symbols(sys.argv[1])[3:6])
"""


def test_without_numpy(tmp_path) -> None:
    """The layer, its compact form, saving, loading and exported files need torch alone."""
    compact = make().compact()
    symbols = ["<s>", "<pad>", "</s>", "<unk>", "\u00e9\u2028", *(f"w{i}" for i in range(45))]
    path = tmp_path / "table.safetensors"
    write_form(path, compact, "table", symbols)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ALONE, str(path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    number, rest = done.stdout.strip().split(" ", 1)
    assert float(number) == compact(torch.tensor([3])).sum().item()
    assert rest == str(["<unk>", "\u00e9\u2028", "w0"])


def test_checksum_is_that_of_the_bytes() -> None:
    g = torch.Generator().manual_seed(0)
    for rows in (0, 1, 3000):
        codes = torch.randint(256, (rows, 7), dtype=torch.uint8, generator=g)
        for part in (codes, codes[::2], codes[:, 1:4]):  # the last two have gaps in memory
            head = zlib.crc32(f"torch.uint8 {tuple(part.shape)}".encode())
            assert tensor_crc32(part) == zlib.crc32(bytes(part.reshape(-1).tolist()), head)
    with pytest.raises(ValueError, match="contiguous"):
        memory_of(codes[:, 1:4])


# Groups with their own numbers of codes -----------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sizes", [[1, 1, 1], [1, 7, 2], [300, 1, 5], [4, 4, 4], [1, 1, 2]])
def test_groups_of_different_sizes(sizes: list, packed: bool) -> None:
    g = torch.Generator().manual_seed(0)
    n, pad = 40, 6
    codes = torch.stack([torch.randint(size, (n,), generator=g) for size in sizes], 1)
    values = torch.randn(sum(sizes), 5, generator=g)
    start = [sum(sizes[:j]) for j in range(3)]
    wanted = torch.cat([values[start[j] + codes[:, j]] for j in range(3)], 1)
    wanted[pad] = 0
    compact = CompactEmbedding.from_codes(codes, values, 15, pad, sizes=sizes, packed=packed)
    assert torch.equal(compact.dense(), wanted)
    assert torch.equal(torch.jit.script(compact)(torch.arange(n)), wanted)
    other = CompactEmbedding(n, 15, pad, K=9, D=3, packed=not packed)
    other.load_state_dict(compact.state_dict())
    assert other.sizes == sizes and torch.equal(other.dense(), wanted)
    bits = [(size - 1).bit_length() for size in sizes]
    assert compact.state_dict()["codes"].shape == (n, row_bytes(bits))
    saved = sum(t.numel() * t.element_size() for t in compact.state_dict().values())
    assert compact.saved_nbytes == saved
    with pytest.raises(IndexError):
        compact(torch.tensor([n]))


# Compilers --------------------------------------------------------------------------------------

FORMS = [
    {"K": 8, "D": 4},
    {"K": 300, "D": 6, "share_subspaces": True},
    {"K": 12, "D": 24, "padding_idx": None},
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", FORMS, ids=lambda o: f"K{o['K']}")
def test_torchscript(options: dict, packed: bool) -> None:
    layer = train(make(**options)).eval()
    compact = layer.compact(packed=packed)
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(compact), buffer)
    buffer.seek(0)
    scripted = torch.jit.load(buffer)
    for shape in ((), (3,), (2, 5), (0, 4)):
        tokens = torch.randint(50, shape)
        assert torch.equal(scripted(tokens), compact(tokens))
        assert torch.equal(scripted(tokens.int()), compact(tokens))


@pytest.mark.skipif(not hasattr(torch, "export"), reason="this torch has no torch.export")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", FORMS, ids=lambda o: f"K{o['K']}")
def test_export(options: dict, packed: bool) -> None:
    compact = train(make(**options)).eval().compact(packed=packed)
    batch = torch.export.Dim("batch", min=2, max=100)
    program = torch.export.export(
        compact, (torch.randint(50, (4, 5)),), dynamic_shapes=({0: batch},)
    )
    for rows in (2, 9):
        tokens = torch.randint(50, (rows, 5))
        assert torch.equal(program.module()(tokens), compact(tokens))


@pytest.mark.skipif(not hasattr(torch, "compile"), reason="this torch has no torch.compile")
@pytest.mark.parametrize("packed", [False, True])
def test_compile(packed: bool) -> None:
    compact = train(make()).eval().compact(packed=packed)
    torch._dynamo.reset()
    # the graph in full, without the C++ compiler behind it: that is torch's own affair
    compiled = torch.compile(compact, fullgraph=True, backend="aot_eager")
    for shape in ((3,), (2, 5)):
        tokens = torch.randint(50, shape)
        assert torch.equal(compiled(tokens), compact(tokens))


def test_rows_of_one_element_take_no_detour_in_a_graph_that_wants_gradients() -> None:
    """Values that a user fine-tunes: the fast path, which autograd cannot follow, stands back."""
    compact = make(D=12).compact()
    compact.values.requires_grad_()
    compact(torch.tensor([3, 4])).sum().backward()
    assert compact.values.grad.sum() == 2 * 24


def test_from_a_layer_of_one_group() -> None:
    layer = DPQEmbedding(20, 6, K=4, D=1, share_subspaces=True).eval()
    compact = layer.compact()
    with torch.no_grad():
        assert torch.equal(compact.dense(), layer.weight)
    other = CompactEmbedding(20, 6, K=4, D=1, share_subspaces=True)
    other.load_state_dict(compact.state_dict())
    assert torch.equal(other.dense(), compact.dense())
