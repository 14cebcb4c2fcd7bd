"""Generation with a compact table and a tied output layer: logits come from the codes. With
exact logits the dense table is kept from its first use on, and nowhere else."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_dpq import native
from fairseq_dpq.cli import compact
from helpers.tool_runs import TF, train
from helpers.toy_checkpoints import load

pytestmark = pytest.mark.slow

TOKENS = torch.arange(4, 24).view(2, 10)
LENGTHS = torch.tensor([10, 10])


@pytest.fixture(scope="module")
def small(corpus, tmp_path_factory) -> Path:
    """A compact model: a table for the encoder, and one that is tied to the output."""
    folder = tmp_path_factory.mktemp("tied")
    flags = f"{TF} --share-decoder-input-output-embed --dpq-K 8 --dpq-D 8 --dpq-embeddings all"
    path = train(corpus, folder, flags)
    assert compact.main([str(path), str(folder / "small.pt")]) == 0
    return folder / "small.pt"


def _model(path: Path, exact: bool = True) -> Any:
    from fairseq import checkpoint_utils

    changes = {"dpq_exact_logits": exact}
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)], changes)
    return model


def _scores(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS, LENGTHS, TOKENS)[0]


def _generate(model: Any) -> list:
    from fairseq.data import Dictionary
    from fairseq.sequence_generator import SequenceGenerator

    words = Dictionary()
    for i in range(model.decoder.embed_tokens.num_embeddings - len(words)):
        words.add_symbol(f"w{i}")
    generator = SequenceGenerator([model], words, beam_size=3, max_len_b=12, min_len=8)
    net_input = {"src_tokens": TOKENS, "src_lengths": LENGTHS}
    found = generator.generate([model], {"net_input": net_input})
    return [[(h["tokens"].tolist(), h["score"].item()) for h in sentence] for sentence in found]


def test_one_dense_table_for_all_steps(small, monkeypatch) -> None:
    from fairseq_dpq import CompactEmbedding

    built = []
    dense = CompactEmbedding.dense

    def count(self: Any) -> torch.Tensor:
        built.append(self)
        return dense(self)

    monkeypatch.setattr(CompactEmbedding, "dense", count)
    model = _model(small).eval()
    table, output = model.decoder.embed_tokens, model.decoder.output_projection
    scores, sentences = _scores(model), _generate(model)
    assert len(built) > 8  # one for each step, at least
    assert output.weight is not output.weight
    model.train()  # fairseq prepares before it calls eval()
    model.make_generation_fast_(beamable_mm_beam_size=None, need_attn=False)
    built.clear()
    model.encoder(TOKENS, LENGTHS)
    assert not built  # only when somebody asks for it
    assert torch.equal(_scores(model), scores) and _generate(model) == sentences
    assert built == [table]
    assert output.weight is output.weight and torch.equal(output.weight, dense(table))


def test_changes_reach_the_kept_table(small) -> None:
    model = _model(small)
    model.make_generation_fast_()
    table, output = model.decoder.embed_tokens, model.decoder.output_projection
    first = output.weight
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    state["decoder.embed_tokens.values"] *= 2
    model.load_state_dict(state)
    assert torch.equal(output.weight, 2 * first) and first[4:].any()
    model.half()
    assert output.weight.dtype == torch.float16 and torch.equal(output.weight, (2 * first).half())
    table.values.requires_grad_()
    output.weight.sum().backward()
    assert table.values.grad is not None


def test_kept_nowhere_else(small) -> None:
    model = _model(small)
    keys = list(model.state_dict())
    before = len(pickle.dumps(model.decoder.embed_tokens))
    bytes_before = model.decoder.embed_tokens.nbytes
    model.make_generation_fast_()
    scores = _scores(model)
    table = model.decoder.embed_tokens
    kept = table._dense._built.rows
    assert model.encoder.embed_tokens._dense._built is None
    assert list(model.state_dict()) == keys and set(keys) == set(load(small)["model"])
    assert table.nbytes == bytes_before and not any(b is kept for b in model.buffers())
    again = pickle.loads(pickle.dumps(table))
    assert len(pickle.dumps(table)) < before + 200
    other = copy.deepcopy(table)
    for twin in (again, other):
        assert twin._dense._built is None and torch.equal(twin.weight, table.weight)
    assert table._dense._built.rows is kept  # copies leave it alone
    assert torch.equal(_scores(copy.deepcopy(model)), scores)


def test_after_inference_mode_and_in_torchscript(small) -> None:
    model = _model(small)
    model.make_generation_fast_()
    with torch.inference_mode():
        scores = model(TOKENS, LENGTHS, TOKENS)[0].clone()
    x = torch.ones(32, requires_grad=True)
    F.linear(x, model.decoder.output_projection.weight).sum().backward()
    assert x.grad is not None and x.grad.any()
    table = model.decoder.embed_tokens
    sizes = []
    for kept in (table._dense, None):
        table._dense = kept
        buffer = io.BytesIO()
        torch.jit.save(torch.jit.script(table), buffer)
        sizes.append(len(buffer.getvalue()))
        buffer.seek(0)
        assert torch.equal(torch.jit.load(buffer)(TOKENS), table(TOKENS))
    table_bytes = 4 * 32 * table.num_embeddings
    assert abs(sizes[0] - sizes[1]) < table_bytes / 10
    if hasattr(torch, "_nested_tensor_from_mask_left_aligned"):  # fairseq's transformer names it
        scripted = torch.jit.script(model)
        # TorchScript fuses other operations of the stock model, with roundings of its own.
        torch.testing.assert_close(scripted(TOKENS, LENGTHS, TOKENS)[0], scores)


class Products(TorchDispatchMode):
    """Counts the matrix products with a table of so many rows."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n, self.names = n, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "mm" in func.__name__ and out.shape[-1] == self.n:
            self.names.append(func.__name__.split(".")[0])
        return out


@pytest.mark.skipif(torch.__version__ < "2", reason="modes of torch 1 are made in another way")
def test_one_product_with_the_table_for_all_hypotheses(small) -> None:
    training = small.with_name("checkpoint_last.pt")
    for path, prepared in ((small, False), (small, True), (training, False), (training, True)):
        model = _model(path).eval()
        if prepared:
            model.make_generation_fast_()
        table, output = model.decoder.embed_tokens, model.decoder.output_projection
        h = torch.randn(1, 5, 32).transpose(0, 1)  # as a decoder returns it
        with torch.no_grad(), Products(table.num_embeddings) as products:
            found = output(h)
        assert products.names == ["mm"]
        with torch.no_grad():
            assert torch.equal(found, F.linear(h, torch.nn.Parameter(output.weight)))
            assert output.weight.requires_grad
        if path == small:
            assert not output.weight.requires_grad  # no gradient of a table that is not trained


def test_logits_from_codes_without_a_dense_table(small, monkeypatch) -> None:
    from fairseq_dpq import CompactEmbedding

    if not native.available():
        pytest.skip("the native library is not built: PyTorch multiplies by the dense table")
    model = _model(small).eval()
    model.make_generation_fast_()
    scores, sentences = _scores(model), _generate(model)

    def refuse(self: Any) -> torch.Tensor:
        raise AssertionError("a dense table was built")

    monkeypatch.setattr(CompactEmbedding, "dense", refuse)
    for prepared in (False, True):
        model = _model(small, exact=False).eval()
        if prepared:
            model.make_generation_fast_()
        found = _scores(model)
        assert torch.allclose(found, scores, atol=1e-4) and not torch.equal(found, scores)
        for ours, theirs in zip(_generate(model), sentences):
            assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
            assert all(abs(a - b) < 1e-4 for (_, a), (_, b) in zip(ours, theirs))
        kept = model.decoder.embed_tokens._dense
        assert kept is None or kept._built is None
    assert len(copy.deepcopy(model).decoder.output_projection.weight) == scores.shape[-1]


def test_the_file_says_which_logits(small, tmp_path) -> None:
    """By default those of the codes; --exact-logits and --model-overrides change that."""
    from fairseq import checkpoint_utils

    exact = tmp_path / "exact.pt"
    trained = str(small.with_name("checkpoint_last.pt"))
    assert compact.main([trained, str(exact), "--exact-logits"]) == 0
    for path, changes, want in (
        (small, {}, False),
        (exact, {}, True),
        (small, {"dpq_exact_logits": True}, True),
        (exact, {"dpq_exact_logits": False}, False),
    ):
        (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)], changes)
        assert model.decoder.embed_tokens.exact_logits is want
        dense = isinstance(model.decoder.output_projection.weight, torch.Tensor)
        assert dense is (want or not native.available())
