"""The command: its report in numbers, its errors in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from fairseq_dpq.cli import compact
from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.files.record import RECORD_KEY
from helpers.toy_checkpoints import PATH, edit_record, load, make_layer, save_toy

ROOT = Path(__file__).resolve().parents[2]


def _facts(capsys, *argv) -> dict:
    assert compact.main([*map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_report_in_numbers(tmp_path, capsys) -> None:
    layer = make_layer(n=1000, d=16, K=8, D=4)
    source, target = save_toy(tmp_path / "in.pt", layer), tmp_path / "out.pt"
    facts = _facts(capsys, source, target)
    (table,) = facts["embeddings"]
    assert table["full_bytes"] == 64_000
    assert table["formula_bytes"] == 1000 * 4 * 3 / 8 + 4 * 8 * 16  # 2012
    assert table["compact_bytes"] == 1000 * 2 + 4 * 8 * 16  # 12 bits take 2 bytes a row
    assert table["formula_cr"] == pytest.approx(64_000 / 2012)
    assert table["measured_cr"] == pytest.approx(64_000 / 2512)
    assert table["bits_per_symbol"] == 12
    # query, keys, values, mean, variance, updates
    assert (
        table["training_bytes"] == 64_000 + 2 * 512 + 2 * 4 * 32 + layer.norm_updates.element_size()
    )
    real = [i for i in range(1000) if i != 1]  # padding uses no code
    used = sorted(len(layer.codes()[real, j].unique()) for j in range(4))
    assert table["used_codes"] == {"min": used[0], "median": used[2], "max": used[3]}
    # All else that the model holds: one tied pair, positions, a version
    rest = 4 * 16 * 8 + 4 * 20 * 4 + 4
    assert facts["sizes"] == {
        "embeddings": {"before": 64_000, "after": 2512, "ratio": 64_000 / 2512},
        "model": {
            "before": 64_000 + rest,
            "after": 2512 + rest,
            "ratio": (64_000 + rest) / (2512 + rest),
        },
        "file": {
            "before": source.stat().st_size,
            "after": target.stat().st_size,
            "ratio": source.stat().st_size / target.stat().st_size,
        },
    }
    assert facts["dropped"] == {"query": 64_000, "optimizer": 128_000}
    assert [item["name"] for item in facts["left_alone"]] == ["decoder.embed_positions.weight"]
    assert facts["verified"] is True

    assert compact.main([str(source), str(target), "--force", "--no-verify"]) == 0
    shown = capsys.readouterr().out
    for text in ("1000 x 16", "sx K=8 D=4", "2,512", "31.81", "25.48"):
        assert text in shown
    before, after = source.stat().st_size, target.stat().st_size
    lines = shown.splitlines()
    at = lines.index("embeddings   64,000 -> 2,512 bytes, 25.48x smaller (98.7 % of the model)")
    assert lines[at + 1 : at + 3] == [
        "model        64,836 -> 3,348 bytes, 19.37x smaller (without optimiser state)",
        f"file        {before:,} -> {after:,} bytes, {before / after:.2f}x smaller (without 64,000 "
        "of queries and 128,000 of optimiser state)",
    ]
    assert lines[-1] == f"{target}: a model 19.37x smaller; not verified"
    assert "also decoder.embed_tokens, tied to decoder.output_projection" in shown
    assert "positions, not tokens" in shown and "not verified" in shown


def test_full_tables_that_share_bytes_are_named_as_tied(tmp_path, capsys) -> None:
    source = save_toy(tmp_path / "in.pt", make_layer())
    state = load(source)
    table = torch.ones(30, 8)
    own = torch.ones(30, 8)  # equal, yet stored for itself
    state["model"].update(
        {"other.embed_tokens.weight": table, "other.output_projection.weight": table}
    )
    state["model"]["third.output_projection.weight"] = own
    torch.save(state, source)
    why = {i["name"]: i["why"] for i in _facts(capsys, source, tmp_path / "out.pt")["left_alone"]}
    assert why["other.embed_tokens.weight"].startswith("a full table")
    assert (
        why["other.output_projection.weight"] == "tied, the same bytes as other.embed_tokens.weight"
    )
    assert why["third.output_projection.weight"] == "an output layer with weights of its own"


def _without_dpq(state: dict) -> None:
    delattr(state["cfg"]["model"], RECORD_KEY)


def _newer(state: dict) -> None:
    record = json.loads(getattr(state["cfg"]["model"], RECORD_KEY))
    record["version"] = 4
    setattr(state["cfg"]["model"], RECORD_KEY, json.dumps(record))


def _damaged_record(state: dict) -> None:
    setattr(state["cfg"]["model"], RECORD_KEY, "{")


def _unknown_option(state: dict) -> None:
    edit_record(state, lambda record: record["tables"][PATH]["options"].update(surprise=1))


def _nan(state: dict) -> None:
    state["model"][f"{PATH}.query"][7, 3] = float("nan")


def _infinite(state: dict) -> None:
    state["model"][f"{PATH}.values"][0, 1, 2] = float("inf")


def _missing(state: dict) -> None:
    del state["model"][f"{PATH}.keys"]


def _shape(state: dict) -> None:
    state["model"][f"{PATH}.query"] = torch.zeros(3, 12)


BAD = {
    _without_dpq: "has no DPQ table: it was trained without --dpq-K",
    _newer: "its format is version 4, written by",
    _damaged_record: "dpq_tables record: Expecting",
    _unknown_option: "surprise",
    _nan: "query holds NaN or infinite numbers (1 of them",
    _infinite: "values holds NaN or infinite numbers",
    _missing: "encoder.embed_tokens: keys is missing",
    _shape: "size mismatch for query: expected (60, 12), found (3, 12)",
}


@pytest.mark.parametrize("spoil", BAD, ids=lambda f: f.__name__.strip("_"))
def test_bad_input_is_one_line_and_code_2(tmp_path, capsys, spoil) -> None:
    source, target = save_toy(tmp_path / "in.pt"), tmp_path / "out.pt"
    state = load(source)
    spoil(state)
    torch.save(state, source)
    assert compact.main([str(source), str(target)]) == 2
    said = capsys.readouterr()
    assert BAD[spoil] in said.err and str(source) in said.err
    assert said.err.startswith("fairseq-dpq-compact: error: ") and said.err.count("\n") == 1
    assert said.out == "" and not target.exists()
    with pytest.raises(CheckpointError):
        compact.main([str(source), str(target), "--debug"])


def test_compact_already(tmp_path, capsys) -> None:
    source, target = save_toy(tmp_path / "in.pt"), tmp_path / "out.pt"
    assert compact.main([str(source), str(target)]) == 0
    capsys.readouterr()
    assert compact.main([str(target), str(tmp_path / "again.pt")]) == 2
    assert f"{target} is compact already (made of {source})" in capsys.readouterr().err


def test_trust_goes_for_what_is_written_too(tmp_path, capsys) -> None:
    """A class that is no plain data travels with the task's state, into the new file as well."""
    source, target = tmp_path / "in.pt", tmp_path / "out.pt"
    save_toy(source, task_state={"share": Fraction(1, 3)})
    assert compact.main([str(source), str(target)]) == 2
    refusal = f"{source} was refused: its pickle wants fractions.Fraction"
    assert refusal in capsys.readouterr().err and not target.exists()
    assert compact.main([str(source), str(target), "--trust"]) == 0, capsys.readouterr().err
    assert load(target)["task_state"] == {"share": Fraction(1, 3)}


def test_options_stand_anywhere_and_output_is_needed(tmp_path, capsys) -> None:
    a, b = (save_toy(tmp_path / f"{i}.pt", make_layer(seed=i)) for i in range(2))
    facts = _facts(capsys, a, b, "--average", tmp_path / "out.pt")
    assert facts["input"] == [str(a), str(b)]
    assert compact.main([str(a)]) == 2
    assert "give the name of the output too" in capsys.readouterr().err


def test_script_of_a_checkout(tmp_path) -> None:
    """The wrapper in scripts/, in a process of its own: exit codes and streams."""
    source, target = save_toy(tmp_path / "in.pt"), tmp_path / "out.pt"
    command = [sys.executable, str(ROOT / "scripts" / "compact_checkpoint.py"), str(source)]
    target.touch()
    done = subprocess.run([*command, str(target)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines()[-1].endswith(f"{target} exists; use --force to replace it")
    assert "Traceback" not in done.stderr


def test_half_leaves_the_buffer_that_fairseq_never_sets(tmp_path) -> None:
    source, target = save_toy(tmp_path / "in.pt"), tmp_path / "out.pt"
    state = load(source)
    key = "encoder.embed_positions._float_tensor"
    state["model"][key] = torch.tensor([3e38])
    torch.save(state, source)
    assert compact.main([str(source), str(target), "--half"]) == 0
    model = load(target)["model"]
    assert model[key].dtype == torch.float32 and model[key].item() == torch.tensor(3e38).item()
    assert model["decoder.embed_positions.weight"].dtype == torch.float16
