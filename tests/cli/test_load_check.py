"""A file that fairseq cannot load is not called verified."""

from __future__ import annotations

import json

import torch

from fairseq_dpq.cli import compact, quantize
from helpers.tool_runs import TLM, train
from helpers.toy_checkpoints import load, save_toy


def test_the_written_file_is_loaded_as_fairseq_will(lm, tmp_path, capsys) -> None:
    flags = TLM + "--share-decoder-input-output-embed --dpq-K 8 --dpq-D 8"
    trained, small = train(lm, tmp_path, flags), tmp_path / "small.pt"
    capsys.readouterr()
    assert compact.main([str(trained), str(small), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loaded_in_fairseq"] is True

    state = load(trained)
    del state["model"]["decoder.layers.0.fc1.weight"]
    torch.save(state, tmp_path / "part.pt")
    assert compact.main([str(tmp_path / "part.pt"), str(tmp_path / "out.pt")]) == 2
    said = capsys.readouterr().err
    assert "verification failed: fairseq cannot load the file" in said and said.count("\n") == 1
    assert "decoder.layers.0.fc1.weight" in said and not (tmp_path / "out.pt").exists()

    state["cfg"]["task"]["data"] = str(tmp_path / "elsewhere")
    torch.save(state, tmp_path / "part.pt")
    assert compact.main([str(tmp_path / "part.pt"), str(tmp_path / "out.pt")]) == 0
    said = capsys.readouterr().out
    assert "bit for bit" in said and "fairseq loads it" not in said


def test_so_is_a_quantised_one(lm, tmp_path, capsys) -> None:
    trained, target = train(lm, tmp_path, TLM), tmp_path / "out.pt"
    flags = ["--dpq-K", "8", "--dpq-D", "8"]
    assert quantize.main([str(trained), str(target), *flags]) == 0
    state = load(trained)
    state["model"]["decoder.layers.0.surprise"] = torch.zeros(3)
    torch.save(state, trained)
    capsys.readouterr()
    assert quantize.main([str(trained), str(target), *flags, "--force"]) == 2
    assert "decoder.layers.0.surprise" in capsys.readouterr().err


def test_a_model_whose_data_are_not_here(tmp_path, capsys) -> None:
    source = save_toy(tmp_path / "in.pt")
    assert compact.main([str(source), str(tmp_path / "out.pt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loaded_in_fairseq"] is False
