"""Compact form against training form: every row, every byte, every flag."""

from __future__ import annotations

import argparse
import math

import pytest
import torch

from fairseq_dpq.cli import compact
from fairseq_dpq.fairseq_plugin.configs import read_record
from fairseq_dpq.files import compaction, writer
from fairseq_dpq.files.checkpoint import Checkpoint, stored_bytes
from fairseq_dpq.files.compaction import verify
from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.marker import KEY
from helpers.toy_checkpoints import ALIAS, PATH, load, make_layer, save_toy

OPTIONS = {
    "sx": {},
    "sx shared": {"share_subspaces": True},
    "sx nearest K=5": {"schedule": "warmup", "K": 5},
    "sx K=300": {"K": 300, "n": 500},
    "sx D=1": {"D": 1},
    "vq": {"method": "vq", "schedule": "warmup"},
    "vq shared": {"method": "vq", "share_subspaces": True, "reseed_after": 9},
    "vq no padding": {"method": "vq", "pad": None},
    "one row": {"n": 1, "pad": 0},
}


def _rows(path) -> torch.Tensor:
    """All rows of a compact checkpoint."""
    return Checkpoint.load(path).form(PATH).dense()


def _table_bytes(path) -> int:
    model = load(path)["model"]
    return stored_bytes([t for key, t in model.items() if key.startswith((PATH, ALIAS))])


@pytest.mark.parametrize("shrink", [False, True], ids=["", "shrunk"])
@pytest.mark.parametrize("name", OPTIONS)
def test_rows_are_those_of_evaluation(tmp_path, name, shrink) -> None:
    layer = make_layer(**OPTIONS[name])
    source, target = save_toy(tmp_path / "in.pt", layer), tmp_path / "out.pt"
    flags = ["--lossless-shrink"] if shrink else []
    assert compact.main([str(source), str(target), *flags, "--debug"]) == 0
    n, d = layer.num_embeddings, layer.embedding_dim
    with torch.no_grad():
        assert torch.equal(_rows(target), layer(torch.arange(n)))
    c = layer.config
    formula = n * c.D * math.ceil(math.log2(c.K)) / 8
    formula += 4 * c.K * d / (c.D if c.share_subspaces else 1)
    assert _table_bytes(target) <= formula + n + 4096
    state = load(target)
    kept = {key for key in state["model"] if key.startswith((PATH, ALIAS))}
    names = {"codes", "values"}
    if f"{PATH}.sizes" in kept:
        assert shrink
        names.add("sizes")
    assert kept == {f"{path}.{x}" for path in (PATH, ALIAS) for x in names}
    record = read_record(state["cfg"]["model"])
    assert (record.stage, record.source) == ("compact", str(source))


def test_bytes_at_the_size_of_wmt19(tmp_path) -> None:
    """32,000 x 512, K=32, D=128: 80 bytes of codes a row and 32 x 512 values, to the byte."""
    layer = make_layer(n=32_000, d=512, K=32, D=128)
    source, target = save_toy(tmp_path / "in.pt", layer), tmp_path / "out.pt"
    assert compact.main([str(source), str(target), "--no-verify"]) == 0
    formula = 32_000 * 80 + 4 * 32 * 512
    assert _table_bytes(target) == formula
    # the file: the rest of the toy takes 1,000 bytes or so, and torch's zip its headers
    assert target.stat().st_size <= 1.02 * formula


def test_everything_else_stays_and_training_goes(tmp_path) -> None:
    layer = make_layer()
    big = torch.randn(1000)
    source = save_toy(tmp_path / "in.pt", layer)
    state = load(source)
    state["model"]["decoder.view"] = big[10:20]  # torch.save would write all of `big`
    state["model"]["decoder.count"] = torch.tensor(3)
    torch.save(state, source)
    target = tmp_path / "out.pt"
    assert compact.main([str(source), str(target)]) == 0
    new = load(target)
    for key, tensor in state["model"].items():
        if not key.startswith((PATH, ALIAS)):
            assert (
                torch.equal(new["model"][key], tensor) and new["model"][key].dtype == tensor.dtype
            )
    fc = [new["model"][f"{side}.fc.weight"].data_ptr() for side in ("encoder", "decoder")]
    assert fc[0] == fc[1]
    assert stored_bytes(new["model"]["decoder.view"]) == 40
    assert set(new) == {*state, KEY} - {"last_optimizer_state", "criterion"}
    assert new["optimizer_history"][-1]["num_updates"] == 7
    # the file's own objects are not written to
    checkpoint = Checkpoint.load(source)
    compaction.compact_state(checkpoint, source=str(source))
    assert read_record(checkpoint.model_cfg).stage == "training"


def test_shrink_drops_what_no_symbol_uses(tmp_path) -> None:
    """Codes set by hand: group 0 uses 2 of 8 codes (1 bit), group 1 one (0 bits), group 2 all."""
    layer = make_layer(n=50, d=6, D=3, K=8, method="vq", schedule="warmup")
    wanted = torch.stack(
        [torch.arange(50) % 2 * 5 + 1, torch.full((50,), 3), torch.arange(50) % 8], 1
    )
    with torch.no_grad():
        layer.values.copy_(torch.arange(48.0).view(3, 8, 2))
        rows = layer.values[torch.arange(3).expand(50, 3), wanted]
        layer.query.copy_(rows.view(50, 6))
    source, target = save_toy(tmp_path / "in.pt", layer), tmp_path / "out.pt"
    assert compact.main([str(source), str(target), "--lossless-shrink"]) == 0
    model = load(target)["model"]
    assert model[f"{PATH}.sizes"].tolist() == [2, 1, 8]
    assert tuple(model[f"{PATH}.values"].shape) == (11, 2)
    assert tuple(model[f"{PATH}.codes"].shape) == (50, 1)  # 1 + 0 + 3 bits
    row = 7  # codes 6, 3, 7 -> 1, 0, 7: bit 0, no bit, bits 1 to 3
    assert int(model[f"{PATH}.codes"][row]) == 1 + 7 * 2
    expected = rows.view(50, 6).clone()
    expected[1] = 0  # padding
    assert torch.equal(_rows(target), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_smaller_values_are_the_rounded_ones(tmp_path, dtype) -> None:
    layer = make_layer()
    source, target = save_toy(tmp_path / "in.pt", layer), tmp_path / "out.pt"
    assert compact.main([str(source), str(target), "--values-dtype", dtype, "--half"]) == 0
    with torch.no_grad():
        expected = layer(torch.arange(60)).to(compaction.DTYPES[dtype])
    assert torch.equal(_rows(target), expected)
    model = load(target)["model"]
    assert model[f"{PATH}.values"].dtype == compaction.DTYPES[dtype]
    assert model["encoder.fc.weight"].dtype == torch.float16
    assert model["encoder.fc.weight"].data_ptr() == model["decoder.fc.weight"].data_ptr()
    assert model["decoder.version"].item() == 3


def test_numbers_too_large_for_half_are_refused(tmp_path, capsys) -> None:
    layer = make_layer()
    layer.values.data[0, 0, 0] = 1e5
    source = save_toy(tmp_path / "in.pt", layer)
    flags = ["--values-dtype", "float16"]
    assert compact.main([str(source), str(tmp_path / "out.pt"), *flags]) == 2
    assert "reaches 100000, beyond --values-dtype float16's 65504" in capsys.readouterr().err
    assert compact.main([str(source), str(tmp_path / "out.pt"), "--values-dtype", "bfloat16"]) == 0


def test_configs_of_every_form(tmp_path) -> None:
    """A dict (dataclass models, hydra) and the `args` of old checkpoints."""
    source, target = save_toy(tmp_path / "in.pt"), tmp_path / "out.pt"
    state = load(source)
    namespace = state["cfg"]["model"]
    torch.save({**state, "cfg": {"model": vars(namespace), "task": {}}}, source)
    assert compact.main([str(source), str(target)]) == 0
    assert read_record(load(target)["cfg"]["model"]).stage == "compact"
    torch.save({**state, "cfg": None, "args": argparse.Namespace(**vars(namespace))}, source)
    assert compact.main([str(source), str(target), "--force"]) == 0
    state = load(target)
    assert read_record(state["cfg"]["model"]).stage == "compact" and state["args"] is None


def test_verification_sees_one_wrong_bit(tmp_path, monkeypatch, capsys) -> None:
    source, target = save_toy(tmp_path / "in.pt"), tmp_path / "out.pt"
    assert compact.main([str(source), str(target)]) == 0
    state = load(target)

    def check(text: str, **changes: torch.Tensor) -> None:
        wrong = {**state, "model": {**state["model"], **changes}}
        torch.save(wrong, tmp_path / "wrong.pt")
        with pytest.raises(CheckpointError, match=text):
            verify(Checkpoint.load(source), tmp_path / "wrong.pt")

    values = state["model"][f"{PATH}.values"].clone()
    values.view(torch.int32)[3, 1] ^= 1  # the last bit of one value
    own, alias = {f"{PATH}.values": values}, {f"{ALIAS}.values": values}
    check("values does not match its checksum", **own, **alias)
    check("decoder.embed_tokens.values is not encoder.embed_tokens.values", **alias)
    check("decoder.version differs", **{"decoder.version": torch.tensor([4.0])})
    codes = state["model"][f"{PATH}.codes"].clone()
    codes[5] ^= 1
    check("codes does not match its checksum", **{f"{x}.codes": codes for x in (PATH, ALIAS)})
    verify(Checkpoint.load(source), target)

    def spoil(state, file) -> None:
        state["model"][f"{PATH}.values"] += 1
        torch.save(state, file)

    monkeypatch.setattr(writer, "save_state", spoil)
    target.unlink()
    assert compact.main([str(source), str(target)]) == 2
    assert "verification failed" in capsys.readouterr().err and not target.exists()
