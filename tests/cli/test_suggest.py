"""fairseq-dpq-inspect with a target: the K and D of a full checkpoint or of a training command."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from fairseq_dpq.cli import inspect, suggest
from fairseq_dpq.files.record import RECORD_KEY
from fairseq_dpq.sweeps.results import Result
from helpers import fsq
from helpers.plugin_runs import TRANSFORMER
from helpers.toy_checkpoints import PATH, make_layer, make_state, save_toy


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """1000 x 16, whose rows have 4 groups of 8 different values: K = 8, D = 4 loses nothing."""
    state = make_state(make_layer())
    delattr(state["cfg"]["model"], RECORD_KEY)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 8, 4, generator=generator)
    codes = torch.randint(8, (1000, 4), generator=generator)
    table = values[torch.arange(4), codes].reshape(1000, 16)
    state["model"] = {f"{PATH}.weight": table}
    torch.save(state, tmp_path / "full.pt")
    return tmp_path / "full.pt"


def _choices(capsys, *argv: object) -> dict:
    assert inspect.main([*map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_planted_K_and_D_come_first(full: Path, capsys) -> None:
    """Ratio 25 is 2560 bytes: 2 bytes a row, 512 of values and 32 of the checksum fit."""
    facts = _choices(capsys, full, "--target-ratio", 25)
    assert facts["tables"] == [{"path": PATH, "num_embeddings": 1000, "embedding_dim": 16}]
    first = facts["choices"][0]
    assert (first["K"], first["D"], first["bytes"]) == (8, 4, 2000 + 512)
    assert first["error"] < 1e-6 and first["flags"] == "--dpq-K 8 --dpq-D 4"
    assert first["reason"] == "4 codes of 3 bits: the smallest error of k-means"
    assert all(c["bytes"] <= 2560 and c["ratio"] >= 25 for c in facts["choices"])
    same = _choices(capsys, full, "--target-bytes", "2.56K")
    assert same == facts


def test_text_has_flags_to_paste(full: Path, capsys) -> None:
    assert inspect.main([str(full), "--target-ratio", "25"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"{PATH}: 1000 x 16", "full: 64,000 bytes"]
    assert lines[3].split()[:7] == ["--dpq-K", "8", "--dpq-D", "4", "2,512", "25.5", "12"]


def test_several_ratios_without_a_target(full: Path, capsys) -> None:
    facts = _choices(capsys, full, "--suggest")
    ratios = [c["ratio"] for c in facts["choices"]]
    assert len(ratios) == 3 and ratios[0] >= 10 and ratios[1] >= 20 and ratios[2] >= 50
    assert facts["choices"][1]["reason"].startswith("ratio 20: ")


def test_a_sweep_has_the_first_word(full: Path, tmp_path: Path, capsys) -> None:
    runs = [
        Result("a", "sx", 4, 8, scores={"ppl": 6.0}),
        Result("b", "vq", 4, 8, scores={"ppl": 5.0}),
        Result("c", "sx", 8, 4, scores={"ppl": 5.5}),
        Result("d", "sx", 2, 4, scores={"ppl": 4.0}),  # leaves half of the bytes unused
    ]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(asdict(r)) + "\n" for r in runs))
    facts = _choices(capsys, full, "--target-ratio", 25, "--sweep", tmp_path)
    assert [(c["K"], c["D"]) for c in facts["choices"][:2]] == [(4, 8), (8, 4)]
    assert facts["choices"][0]["reason"] == "best in the sweep: ppl 5 with vq"


def test_errors(full: Path, tmp_path: Path, capsys) -> None:
    for argv, message in (
        ([full, "--target-ratio", "5000"], "no K and D reach 12 bytes; the smallest is 1,0"),
        ([full, full, "--target-ratio", "5"], "give one checkpoint, or one command after --"),
        ([full, "--target-ratio", "-1"], "--target-ratio -1: must be above 1; try 30"),
        ([full, "--suggest", "--sweep", tmp_path], "is not the --out of a sweep"),
        ([save_toy(tmp_path / "dpq.pt"), "--suggest"], "has DPQ tables already"),
        (["--target-ratio", "5", "--", "ls"], "give a fairseq-train command, not ls"),
        ([], "give a checkpoint, or a command after --"),
    ):
        assert inspect.main([str(word) for word in argv]) == 2, argv
        assert message in capsys.readouterr().err
    sizes = {"2M": 2_000_000, "500K": 500_000, "1.5Gi": 3 * 2**29, "10 kB": 10_000, "7": 7}
    assert {text: suggest.parse_bytes(text) for text in sizes} == sizes
    for text in ("0", "x", "2T", "1..5"):
        with pytest.raises(Exception, match="is not a number of bytes"):
            suggest.parse_bytes(text)


def test_tables_of_a_training_command(corpus: Path, capsys) -> None:
    """As fairseq builds them: both tables with --dpq-embeddings all, without data or training."""
    words = ["--", "fairseq-train", corpus, "--user-dir", fsq.USER_DIR, *TRANSFORMER]
    rows = [
        len((corpus / f"dict.{side}.txt").read_text().splitlines()) + 4 for side in ("src", "tgt")
    ]
    facts = _choices_of_command(capsys, "--target-ratio", 4, *words)
    assert [t["num_embeddings"] for t in facts["tables"]] == rows[:1]
    best = facts["choices"][0]
    assert best["error"] is None and best["ratio"] >= 4 and 32 % best["D"] == 0
    both = _choices_of_command(
        capsys, "--target-ratio", 4, *words, "--dpq-K", 3, "--dpq-embeddings", "all"
    )
    assert [t["num_embeddings"] for t in both["tables"]] == rows
    assert both["full_bytes"] == 4 * 32 * sum(rows)


def _choices_of_command(capsys, *argv: object) -> dict:
    assert inspect.main(["--json", *map(str, argv)]) == 0
    return json.loads(capsys.readouterr().out)
