"""The Zaremba LSTM language model: its equations, its sizes, and the state it carries."""

from __future__ import annotations

import logging
from argparse import Namespace

import pytest
import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from torch import Tensor

from fairseq_dpq.fairseq_plugin.tasks.lstm_lm import (
    ZarembaLSTMConfig,
    ZarembaLSTMDecoder,
    ZarembaLSTMLanguageModel,
)


def _dictionary(words: int = 20) -> Dictionary:
    dictionary = Dictionary()
    for i in range(words):
        dictionary.add_symbol(f"w{i}")
    return dictionary


def _model(seed: int = 1, **options: object) -> ZarembaLSTMLanguageModel:
    torch.manual_seed(seed)
    settings = {"decoder_embed_dim": 6, "decoder_hidden_size": 8, "init_range": 0.5, **options}
    cfg = ZarembaLSTMConfig(**settings)  # type: ignore[arg-type]
    return ZarembaLSTMLanguageModel(ZarembaLSTMDecoder(cfg, _dictionary()))


def _tokens(lanes: int, steps: int) -> Tensor:
    return torch.randint(4, 24, (lanes, steps), generator=torch.Generator().manual_seed(5))


def _reference(decoder: ZarembaLSTMDecoder, tokens: Tensor) -> Tensor:
    """Zaremba et al. (2014), equations of section 3, step by step, from zero state."""
    layers = decoder.lstm.num_layers
    hidden = [torch.zeros(tokens.size(0), decoder.lstm.hidden_size) for _ in range(layers)]
    cell = [h.clone() for h in hidden]
    logits = []
    for t in range(tokens.size(1)):
        below = decoder.embed_tokens.weight[tokens[:, t]]
        for k in range(layers):
            weights = [getattr(decoder.lstm, f"{n}_l{k}") for n in ("weight_ih", "weight_hh")]
            biases = [getattr(decoder.lstm, f"{n}_l{k}") for n in ("bias_ih", "bias_hh")]
            gates = below @ weights[0].T + biases[0] + hidden[k] @ weights[1].T + biases[1]
            i, f, g, o = gates.chunk(4, dim=1)
            cell[k] = f.sigmoid() * cell[k] + i.sigmoid() * g.tanh()
            hidden[k] = o.sigmoid() * cell[k].tanh()
            below = hidden[k]
        logits.append(below @ decoder.output_projection.weight.T + decoder.output_projection.bias)
    return torch.stack(logits, dim=1)


def test_equations_and_carried_state_equal_one_long_forward() -> None:
    model = _model().eval()
    tokens = _tokens(3, 17)
    expected = _reference(model.decoder, tokens)
    with torch.no_grad():
        whole, _ = model(tokens)
        parts = [model(tokens[:, s : s + 5], segment=s // 5)[0] for s in range(0, 17, 5)]
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=0, atol=1e-6)
    cold, _ = model(tokens[:, 5:10])
    assert (cold - expected[:, 5:10]).abs().max() > 1e-2  # the state does matter


def test_gradient_stops_at_the_segment_boundary() -> None:
    model = _model().train()
    tokens = _tokens(3, 8)
    model(tokens[:, :4], segment=0)[0].sum().backward()
    model.zero_grad()
    logits, _ = model(tokens[:, 4:], segment=1)
    F.cross_entropy(logits.reshape(-1, 24), tokens[:, 4:].reshape(-1)).backward()
    seen = {name: p.grad.clone() for name, p in model.named_parameters()}

    lstm, embed, out = (
        model.decoder.lstm,
        model.decoder.embed_tokens,
        model.decoder.output_projection,
    )
    model.zero_grad()
    _, (hidden, cell) = lstm(embed(tokens[:, :4]).transpose(0, 1))
    x, _ = lstm(embed(tokens[:, 4:]).transpose(0, 1), (hidden.detach(), cell.detach()))
    F.cross_entropy(out(x.transpose(0, 1)).reshape(-1, 24), tokens[:, 4:].reshape(-1)).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(seen[name], p.grad, rtol=0, atol=1e-7, msg=name)


def test_training_and_evaluation_lanes_do_not_mix() -> None:
    model = _model()
    tokens = _tokens(2, 12)
    expected = _reference(model.decoder, tokens).detach()
    model.train()
    first, _ = model(tokens[:, :4], segment=0)
    model.eval()
    with torch.no_grad():
        for i in range(3):  # other tokens, another number of lanes
            model(_tokens(5, 9)[:, i * 3 : i * 3 + 3], segment=i)
    model.train()
    second, _ = model(tokens[:, 4:8], segment=1)
    torch.testing.assert_close(torch.cat([first, second], 1), expected[:, :8], rtol=0, atol=1e-6)
    # The same segment again, as after a loss-scale overflow, starts where it started before.
    again, _ = model(tokens[:, 4:8], segment=1)
    assert torch.equal(again, second)
    third, _ = model(tokens[:, 8:], segment=2)
    torch.testing.assert_close(third, expected[:, 8:], rtol=0, atol=1e-6)
    # So do all segments of an update, with --update-freq 2.
    again = [model(tokens[:, 4 * i : 4 * i + 4], segment=i)[0] for i in (1, 2)]
    assert torch.equal(again[0], second) and torch.equal(again[1], third)
    model.decoder.set_carried_state(None)
    assert model.decoder.carried_state() is None


def test_a_gap_starts_from_zeros_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = _model().eval()
    tokens = _tokens(2, 4)
    cold, _ = model(tokens)
    model(tokens, segment=0)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(model(tokens, segment=7)[0], cold)
        assert torch.equal(model(_tokens(3, 4)[:2], segment=9)[0], model(_tokens(3, 4)[:2])[0])
    assert "segment 7 starts from zeros" in caplog.text
    assert "segment 9 starts from zeros" in caplog.text


def test_saved_state_continues_any_of_its_lanes() -> None:
    tokens = _tokens(4, 10)
    one, other = _model().train(), _model().train()
    one(tokens[:, :5], segment=0)
    segment, state = one.decoder.carried_state()
    assert (segment, tuple(state.shape)) == (0, (4, 4, 8))  # (hidden, cell) x layers, lanes, units
    other.decoder.set_carried_state((segment, state[:, 1:3]))  # two of the four lanes
    expected = one(tokens[:, 5:], segment=1)[0]
    torch.testing.assert_close(
        other(tokens[1:3, 5:], segment=1)[0], expected[1:3], rtol=0, atol=1e-6
    )


def test_checkpoint_holds_parameters_alone() -> None:
    model = _model().train()
    model(_tokens(2, 3), segment=0)
    names = {name for name, _ in model.named_parameters()}
    assert set(model.state_dict()) == names
    assert len(names) == 1 + 8 + 2  # embedding, two layers of four, softmax weight and bias


def test_step_by_step_generation_equals_the_whole() -> None:
    model = _model().eval()
    tokens = _tokens(3, 6)
    incremental: dict = {}
    with torch.no_grad():
        for t in range(3):
            model.decoder(tokens[:, : t + 1], incremental_state=incremental)
        order = torch.tensor([2, 0, 0])  # beam search permutes the batch
        model.decoder.reorder_incremental_state(incremental, order)
        tokens = tokens[order]
        steps = [
            model.decoder(tokens[:, : t + 1], incremental_state=incremental)[0] for t in (3, 4, 5)
        ]
    expected = _reference(model.decoder, tokens)[:, 3:]
    torch.testing.assert_close(torch.cat(steps, dim=1), expected, rtol=0, atol=1e-6)


def test_tied_output() -> None:
    model = _model(decoder_embed_dim=8, share_decoder_input_output_embed=True)
    assert model.decoder.output_projection.weight is model.decoder.embed_tokens.weight
    tied, untied = (
        sum(p.numel() for p in m.parameters()) for m in (model, _model(decoder_embed_dim=8))
    )
    assert untied - tied == 24 * 8
    with pytest.raises(ValueError, match="--decoder-embed-dim 6 equal to --decoder-hidden-size 8"):
        _model(share_decoder_input_output_embed=True)


def test_dropout_on_embedding_between_layers_and_before_softmax() -> None:
    model = _model(dropout=0.25).train()
    assert model.decoder.lstm.dropout == model.decoder.dropout.p == 0.25
    seen: list[float] = []
    for module in (model.decoder.lstm, model.decoder.output_projection):
        module.register_forward_pre_hook(lambda _, x: seen.append((x[0] == 0).float().mean()))
    model(_tokens(40, 50), segment=0)
    assert len(seen) == 2
    assert all(0.2 < v < 0.3 for v in seen)


@pytest.mark.parametrize(
    ("size", "units", "dropout", "init", "parameters"),
    [
        # 10,002 types: n d + 2 (4 d (d + d) + 8 d) + n d + n
        ("small", 200, 0.0, 0.1, 4_654_002),
        ("medium", 650, 0.5, 0.05, 19_783_002),
        ("large", 1500, 0.65, 0.04, 66_040_002),
    ],
)
def test_sizes(size: str, units: int, dropout: float, init: float, parameters: int) -> None:
    name = f"zaremba_lstm_lm_{size}"
    assert ARCH_MODEL_REGISTRY[name] is ZarembaLSTMLanguageModel
    args = Namespace(dropout=0.3) if size == "large" else Namespace()
    ARCH_CONFIG_REGISTRY[name](args)
    assert args.decoder_embed_dim == args.decoder_hidden_size == units
    assert args.decoder_layers == 2
    assert args.dropout == (0.3 if size == "large" else dropout)  # a flag given stays
    assert args.init_range == init
    args.share_decoder_input_output_embed = False
    decoder = ZarembaLSTMDecoder(args, _dictionary(9_998))
    assert sum(p.numel() for p in decoder.parameters()) == parameters
    for p in decoder.parameters():
        assert 0.97 * init < p.max() <= init
        assert -init <= p.min() < -0.97 * init
    assert not decoder.embed_tokens.weight[decoder.dictionary.pad()].any()
