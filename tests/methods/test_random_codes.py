"""random_codes: codes that stay, values that learn; and the files that methods read."""

from __future__ import annotations

from argparse import Namespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fairseq_dpq import DPQConfigError, DPQEmbedding
from fairseq_dpq.fairseq_plugin.options import make_plugin_options
from fairseq_dpq.fairseq_plugin.replace import replace_tables
from fairseq_dpq.files.writer import write_form
from fairseq_dpq.forms.low_rank import LowRankEmbedding
from fairseq_dpq.forms.product_codes import CompactEmbedding
from fairseq_dpq.methods.kd_codes import read_table
from fairseq_dpq.methods.stored_codes import read_codes

PAD, N, DIM, K, D = 1, 60, 8, 5, 4


def make(seed: int = 0, **options) -> DPQEmbedding:
    torch.manual_seed(seed)
    return DPQEmbedding(N, DIM, PAD, method="random_codes", K=K, D=D, **options)


@pytest.mark.parametrize("shared", [False, True])
def test_rows_gradient_and_compact_form(shared: bool) -> None:
    layer = make(share_subspaces=shared)
    codes, values = layer.codes().long(), layer.values.detach()
    wanted = torch.cat([values[0 if shared else j][codes[:, j]] for j in range(D)], 1)
    wanted[PAD] = 0
    ids = torch.arange(N)
    assert torch.equal(layer(ids).detach(), wanted) and torch.equal(layer.eval()(ids), wanted)
    layer.train()(torch.tensor([7])).sum().backward()
    hit = torch.zeros_like(values)
    for j in range(D):
        hit[0 if shared else j, codes[7, j]] += 1
    assert torch.equal(layer.values.grad, hit) and layer.query.grad is None
    form = layer.eval().compact(packed=True)
    assert isinstance(form, CompactEmbedding) and torch.equal(form(ids), wanted)
    rows = K if shared else K * D
    assert form.formula_bits() == N * D * 3 + 32 * rows * 2
    assert layer.compression_ratio() == 32 * N * DIM / form.formula_bits()


def test_codes_are_uniform_and_follow_the_seed() -> None:
    layer = make()
    assert torch.equal(layer.query, make().query) and not torch.equal(layer.query, make(1).query)
    counts = np.bincount(layer.codes()[2:].numpy().ravel(), minlength=K) / ((N - 2) * D)
    assert counts.shape == (K,) and counts.min() > 0.12 and counts.max() < 0.28
    layer.half()  # averaging and half precision keep them
    assert torch.equal(layer.codes(), make().codes())


def test_start_from_a_table_takes_means() -> None:
    torch.manual_seed(1)
    table = torch.randn(N, DIM)
    layer = DPQEmbedding.from_pretrained(table, PAD, method="random_codes", K=K, D=D)
    codes = layer.codes().long()
    mine = (codes[:, 2] == 3) & (torch.arange(N) != PAD)
    torch.testing.assert_close(layer.values[2, 3].detach(), table[mine, 4:6].mean(0))


def test_options_of_other_methods_are_refused() -> None:
    with pytest.raises(DPQConfigError, match=r"tau=1\.0 has no effect with method='random_codes'"):
        make(tau=1.0)
    with pytest.raises(DPQConfigError, match="D=3 does not divide"):
        DPQEmbedding(N, DIM, method="random_codes", K=4, D=3)


# Files --------------------------------------------------------------------------------------------


def write(form, path) -> str:
    write_form(path, form, "table", force=True)
    return str(path)


def test_codes_of_an_exported_table(tmp_path) -> None:
    layer = make()
    file = write(layer.eval().compact(), tmp_path / "codes.safetensors")
    assert torch.equal(read_codes(file, (N, D), K), layer.codes())
    other = DPQEmbedding(N, DIM, PAD, method="fixed_codes", K=K, D=D, codes=file)
    assert torch.equal(other.codes(), layer.codes())
    with pytest.raises(ValueError, match="has 4 codes for each of 60 rows; this table has 61 rows"):
        read_codes(file, (N + 1, D), K)
    with pytest.raises(ValueError, match="has the code 4; K is 4"):
        read_codes(file, (N, D), 4)
    with pytest.raises(ValueError, match="there is no file of codes"):
        read_codes(str(tmp_path / "none"), (N, D), K)
    plain = LowRankEmbedding.from_table(torch.randn(N, DIM), PAD, rank=2)
    file = write(plain, tmp_path / "low.safetensors")
    with pytest.raises(ValueError, match="holds a table of kind low_rank, which has no codes"):
        read_codes(file, (N, D), K)
    with pytest.raises(ValueError, match="method fixed_codes needs a file of codes"):
        DPQEmbedding(N, DIM, PAD, method="fixed_codes", K=K, D=D)


def test_a_start_from_vectors_follows_the_codes_of_a_file(tmp_path) -> None:
    """In fairseq as outside: the values are fitted to the codes that the table will have."""
    torch.manual_seed(1)
    file = write(make().eval().compact(), tmp_path / "codes.safetensors")
    model = nn.ModuleDict({"encoder": nn.ModuleDict({"embed_tokens": nn.Embedding(N, DIM, PAD)})})
    table = model["encoder"]["embed_tokens"].weight.detach().clone()
    how = {"method": "fixed_codes", "K": K, "D": D, "codes": file}
    replace_tables(model, Namespace(encoder_embed_path="vectors.txt"), make_plugin_options(how))
    wanted = DPQEmbedding.from_pretrained(table, PAD, **how)
    torch.testing.assert_close(model["encoder"]["embed_tokens"].eval().weight, wanted.eval().weight)


def test_table_of_a_full_checkpoint(tmp_path) -> None:
    table = torch.randn(N, DIM)
    path = str(tmp_path / "full.pt")
    torch.save({"model": {"decoder.embed_tokens.weight": table}}, path)
    assert torch.equal(read_table(path, "decoder.embed_tokens", (N, DIM)), table)
    layer = DPQEmbedding(N, DIM, PAD, method="kd_codes", K=K, D=D, distill_from=path)
    assert torch.equal(layer.guide, table)
    with pytest.raises(ValueError, match=r"has no full table encoder\.embed_tokens\.weight"):
        read_table(path, "encoder.embed_tokens", (N, DIM))
    with pytest.raises(ValueError, match=r"weight is \(60, 8\), this table is \(61, 8\)"):
        read_table(path, "decoder.embed_tokens", (N + 1, DIM))
    (tmp_path / "bad.pt").write_text("x")
    with pytest.raises(ValueError, match=r"bad\.pt is not a fairseq checkpoint"):
        read_table(str(tmp_path / "bad.pt"), "decoder.embed_tokens", (N, DIM))
    with pytest.raises(ValueError, match="there is no checkpoint"):
        read_table(str(tmp_path / "none.pt"), "decoder.embed_tokens", (N, DIM))


@pytest.mark.parametrize("kind", ["pt", "state_dict", "safetensors"])
def test_the_layer_reads_the_table_to_distil_from(tmp_path, kind: str) -> None:
    table, path = torch.randn(N, DIM), str(tmp_path / "table")
    if kind == "safetensors":
        save_file({"table": table, "other": torch.zeros(3)}, path)
    else:
        torch.save(table if kind == "pt" else {"table": table, "updates": 3}, path)
    how = {"method": "kd_codes", "K": K, "D": D}
    layer = DPQEmbedding(N, DIM, PAD, distill_from=path, **how)
    assert torch.equal(layer.guide, table)
    start = DPQEmbedding.from_pretrained(table, PAD, distill_from=path, **how)
    assert torch.equal(start.guide, table)
    with pytest.raises(ValueError, match=rf"{path} has 0 tensors of shape \(61, 8\); it takes one"):
        DPQEmbedding(N + 1, DIM, distill_from=path, **how)
    other = DPQEmbedding(N, DIM, PAD, distill_from="gone", option_files=False, **how)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.guide, table)


def test_a_missing_file_is_named_in_one_line() -> None:
    for method, option in (("kd_codes", "distill_from"), ("fixed_codes", "codes")):
        with pytest.raises(ValueError, match=r"there is no .* /nonexistent") as error:
            DPQEmbedding(100, 16, method=method, K=8, D=4, **{option: "/nonexistent"})
        assert "\n" not in str(error.value)
