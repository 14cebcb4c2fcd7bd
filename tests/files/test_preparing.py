"""Averaging before compaction, never after; EMA weights."""

from __future__ import annotations

from collections import OrderedDict

import torch

from fairseq_dpq.cli import compact, inspect
from fairseq_dpq.files.checkpoint import Checkpoint
from fairseq_dpq.files.preparing import _mean, average
from fairseq_dpq.forms.product_codes import CompactEmbedding
from helpers.toy_checkpoints import PATH, load, make_layer, make_state, save_toy


def _fairseq_average(paths) -> OrderedDict:
    """What fairseq's scripts/average_checkpoints.py computes (the script is not in its wheel)."""
    total: OrderedDict = OrderedDict()
    for path in paths:
        for key, p in load(path)["model"].items():
            p = p.float() if p.dtype == torch.float16 else p
            total[key] = p.clone() if key not in total else total[key] + p
    for p in total.values():
        if p.is_floating_point():
            p.div_(len(paths))
        else:
            p //= len(paths)
    return total


def test_average_is_fairseqs(tmp_path) -> None:
    paths = [save_toy(tmp_path / f"{i}.pt", make_layer(seed=i)) for i in range(3)]
    expected = _fairseq_average(paths)
    got = average([Checkpoint.load(path) for path in paths]).weights
    assert list(got) == list(expected)
    assert all(torch.equal(got[key], expected[key]) for key in got)

    torch.save({**load(paths[0]), "model": expected}, tmp_path / "average.pt")
    assert compact.main([str(tmp_path / "average.pt"), str(tmp_path / "a.pt")]) == 0
    assert compact.main(["--average", *map(str, paths), str(tmp_path / "b.pt")]) == 0
    a, b = load(tmp_path / "a.pt")["model"], load(tmp_path / "b.pt")["model"]
    assert all(torch.equal(a[key], b[key]) for key in a)
    alone = compact.main([str(paths[0]), str(tmp_path / "c.pt")])
    assert alone == 0 and not torch.equal(
        load(tmp_path / "c.pt")["model"][f"{PATH}.codes"], a[f"{PATH}.codes"]
    )


def test_compact_checkpoints_are_not_averaged(tmp_path, capsys) -> None:
    paths = []
    for i in range(2):
        trained = save_toy(tmp_path / f"{i}.pt", make_layer(seed=i))
        paths.append(tmp_path / f"compact{i}.pt")
        assert compact.main([str(trained), str(paths[-1])]) == 0
    capsys.readouterr()
    assert compact.main(["--average", *map(str, paths), str(tmp_path / "out.pt")]) == 2
    said = capsys.readouterr().err
    assert "codes cannot be averaged; average the training checkpoints first" in said
    assert "TRAINED1.pt TRAINED2.pt OUT.pt --average" in said and said.count("\n") == 1

    # What fairseq's script makes of them does not load.
    torch.save({**load(paths[0]), "model": _fairseq_average(paths)}, tmp_path / "mixed.pt")
    assert inspect.main([str(tmp_path / "mixed.pt")]) == 2
    said = capsys.readouterr().err
    assert "or compact checkpoints were averaged" in said and said.count("\n") == 1


def test_several_inputs_need_a_decision(tmp_path, capsys) -> None:
    paths = [save_toy(tmp_path / f"{i}.pt", make_layer(seed=i)) for i in range(2)]
    assert compact.main([*map(str, paths), str(tmp_path / "out.pt")]) == 2
    assert "add --average" in capsys.readouterr().err
    other = save_toy(tmp_path / "other.pt", make_layer(K=4))
    assert compact.main(["--average", str(paths[0]), str(other), str(tmp_path / "o.pt")]) == 2
    assert "different DPQ tables or options" in capsys.readouterr().err


def test_ema_weights_take_the_place_of_the_last_ones(tmp_path, capsys) -> None:
    last, ema = make_layer(seed=1), make_layer(seed=2)
    extra = {"epoch": 3, "ema": make_state(ema)["model"]}
    source = save_toy(tmp_path / "in.pt", last, extra_state=extra)
    assert compact.main([str(source), str(tmp_path / "last.pt")]) == 0
    assert "left out: the EMA weights; --ema takes them" in capsys.readouterr().out
    assert compact.main([str(source), str(tmp_path / "ema.pt"), "--ema"]) == 0
    for name, layer in (("last", last), ("ema", ema)):
        module = CompactEmbedding(60, 12, 1, K=8, D=4)
        model = load(tmp_path / f"{name}.pt")["model"]
        part = {key[len(PATH) + 1 :]: t for key, t in model.items() if key.startswith(PATH)}
        module.load_state_dict(part)
        with torch.no_grad():
            assert torch.equal(module.dense(), layer(torch.arange(60)))
    plain = save_toy(tmp_path / "plain.pt", last)
    assert compact.main([str(plain), str(tmp_path / "x.pt"), "--ema"]) == 2
    assert "trained without --store-ema" in capsys.readouterr().err


def test_bfloat16_is_added_in_float32() -> None:
    """The codes 0 to 255 in bfloat16, three times: their sums have more digits than it holds."""
    codes = torch.arange(256).to(torch.bfloat16)
    assert torch.equal(_mean([codes, codes, codes]), codes)
    mean = _mean([codes, codes + 1, codes + 2])
    assert mean.dtype == torch.bfloat16 and torch.equal(mean[:250].float(), torch.arange(1.0, 251))
