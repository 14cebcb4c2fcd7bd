"""scripts/reproduce.sh: the commands of each row, what is run again and what is not, the table."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from experiments import results
from experiments.reproduce import run
from experiments.reproduce.rows import CPU, METRICS, TABLES
from experiments.reproduce.run import Plan, ratios, slug
from experiments.results import provenance
from fairseq_dpq.runs.folder import RunsError

ROOT = Path(__file__).resolve().parent.parent
OUT = Path("out")


def commands(table: str, *rows: str, scale: str = "paper", **more) -> dict[str, list[str]]:
    jobs = Plan(TABLES[table], scale, OUT, **more).jobs(rows)
    return {job.name: job.commands() for job in jobs}


def test_a_row_that_starts_from_the_full_table_brings_it_along() -> None:
    assert commands("T4", "ptb_small/shu17") == {
        "ptb_small/full": [
            "SAVE_DIR=out/ptb_small/full scripts/train.sh ptb_small full",
            "scripts/score.sh ptb_small out/ptb_small/full/checkpoint_best.pt",
        ],
        "ptb_small/shu17": [
            "fairseq-dpq-quantize out/ptb_small/full/checkpoint_best.pt "
            "out/ptb_small/full/additive.pt --form additive_codes --dpq-K 32 --dpq-D 32 --force",
            "fairseq-dpq-export out/ptb_small/full/additive.pt "
            "out/ptb_small/full/codes.safetensors --force",
            "SAVE_DIR=out/ptb_small/shu17 scripts/train.sh ptb_small shu17 --dpq-codes "
            "out/ptb_small/full/codes.safetensors",
            "fairseq-dpq-compact out/ptb_small/shu17/checkpoint_best.pt "
            "out/ptb_small/shu17/compact.pt --force --json",
            "scripts/score.sh ptb_small out/ptb_small/shu17/compact.pt",
        ],
    }


def test_scales_and_further_flags() -> None:
    found = commands("T5", "pq-k-128", scale="cpu", more=("--seed", "2"), subset="valid")
    assert list(found) == ["ptb_small/full", "ptb_small/pq-k-128"]
    assert found["ptb_small/full"][0] == (
        "SAVE_DIR=out/ptb_small/full scripts/train.sh ptb_small full --cpu --max-epoch 4 --seed 2"
    )
    quantize, score = found["ptb_small/pq-k-128"]
    assert "--dpq-K 128 --dpq-D 100 --force --json" in quantize
    assert score.endswith("compact.pt --gen-subset valid")
    paper = commands("T5", "pq-k-128")
    assert "--dpq-K 128 --dpq-D 325" in paper["ptb_medium/pq-k-128"][0]
    bert = commands("T7", "glue_cola/dpq-sx")
    assert list(bert) == ["bert_base/dpq-sx", "glue_cola/dpq-sx"]
    assert "PRETRAINED=out/bert_base/dpq-sx/checkpoint_best.pt" in bert["glue_cola/dpq-sx"][0]
    tuned = commands("T7", "squad2/full", "glue_cola/full", subset="dev")
    assert tuned["squad2/full"][-1].endswith("checkpoint_last.pt --subset dev")
    assert tuned["glue_cola/full"][-1].endswith("checkpoint_last.pt --valid-subset dev")
    assert tuned["bert_base/full"][-1].endswith("checkpoint_best.pt --valid-subset dev")
    before, tuning = Plan(TABLES["T7"], "cpu", OUT).jobs(["glue_cola/full"])
    assert before.name == "bert_small/full" and tuning.after == (before.name,)
    # Two columns a group, whatever the width is.
    name = "pq-k-32-groups-of-2"
    assert "--dpq-K 32 --dpq-D 256" in commands("T8", name)[f"wmt19/{name}"][0]
    assert "--dpq-K 32 --dpq-D 64" in commands("T8", name, scale="cpu")[f"multi30k/{name}"][0]


def test_wrong_names(capsys) -> None:
    with pytest.raises(SystemExit):
        run.main(["T2"])
    assert "invalid choice: 'T2'" in capsys.readouterr().err
    assert run.main(["t4", "--dry-run"]) == 0
    with pytest.raises(
        RunsError, match="no row of this table has a name with nothing at --scale paper; it has"
    ):
        commands("T5", "nothing")
    with pytest.raises(RunsError, match="a name with nothing at"):
        commands("T5", "full", "nothing")
    assert slug("Chen'18+") == "chen18-plus" and slug("PQ K=64") == "pq-k-64"


def test_every_row_has_a_recipe_and_a_figure() -> None:
    counts = {name: len(table.rows) for name, table in TABLES.items()}
    assert counts == {"T3": 30, "T4": 21, "T5": 11, "T6": 30, "T7": 12, "T8": 8}
    clean = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "WORKERS")}
    seen = set()
    for table in TABLES.values():
        for row in table.rows:
            assert (row.metric or table.metric) in METRICS
            assert row.paper is not None or row.label == "random codes"
            if row.recipe in CPU:
                for recipe in (row.recipe, CPU[row.recipe][0]):
                    seen.add((recipe, row.method))
    for recipe, method in sorted(seen):
        if (ROOT / "recipes" / f"{recipe}.conf").exists():
            done = subprocess.run(
                ["sh", "scripts/train.sh", recipe, method, "--cpu"],
                cwd=ROOT,
                env={**clean, "DRY_RUN": "1", "PYTHON": "false"},
                text=True,
                capture_output=True,
            )
            assert done.returncode == 0, done.stderr


def test_ratios_over_all_tables() -> None:
    rows = [
        {"full_bytes": 800, "formula_bytes": 10.0, "compact_bytes": 20},
        {"full_bytes": 200, "formula_bytes": 40.0, "compact_bytes": 80},
    ]
    assert ratios({"embeddings": rows}) == (20.0, 10.0)


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A folder whose scripts count their calls: the second training fails in the middle once."""
    (tmp_path / "scripts").mkdir()
    train = 'echo "$@" >>trained; [ "$2" = full ] || [ -e second ] || '
    train += "{ : >second; echo no data; exit 3; }\n"
    (tmp_path / "scripts" / "train.sh").write_text("#!/bin/sh\n" + train)
    score = '#!/bin/sh\necho note >&2; echo "{\\"perplexity\\": 117.25}"\n'
    (tmp_path / "scripts" / "score.sh").write_text(score)
    for script in (tmp_path / "scripts").iterdir():
        script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_rows_are_run_once_and_resumed_after_a_failure(checkout, capsys) -> None:
    argv = ["T5", "--rows", "small/full", "small/dpq-sx", "--out", "o", "--subset", "valid"]
    assert run.main([*argv, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "# ptb_small/full\nSAVE_DIR=o/ptb_small/full scripts/train.sh ptb_small full" in printed
    assert not (checkout / "o").exists()

    assert run.main(argv) == 1
    errors = capsys.readouterr().err
    assert "ptb_small/dpq-sx: FAILED, train: exit code 3: no data" in errors
    data = json.loads((checkout / "o" / "T5.json").read_text())
    ours = {row["name"]: row["score"] for row in data["rows"]}
    assert ours["ptb_small/full"] == 117.25 and ours["ptb_small/dpq-sx"] is None
    assert len(ours) == 11

    # Training goes on; the full table is done. There is no checkpoint to compact here.
    assert run.main(argv) == 1
    assert (checkout / "trained").read_text().split("\n")[:3] == [
        "ptb_small full --cpu --max-epoch 4",
        "ptb_small sx --cpu --max-epoch 4",
        "ptb_small sx --cpu --max-epoch 4",
    ]
    page = (checkout / "o" / "T5.md").read_text()
    assert "| ptb_small | full | perplexity | 83.4 | 1.0 | 117.25 | 1.0 | 1.0 |" in page
    assert "The paper's results beside ptb_small are those of ptb_medium." in page

    assert run.main([*argv, "--", "--max-epoch", "1"]) == 2
    assert "o/ptb_small/full was made by other commands" in capsys.readouterr().err
    # This one has failed before it had a checkpoint: other flags may mend it.
    alone = ["T5", "--rows", "small/dpq-sx", "--out", "o", "--", "--max-epoch", "1"]
    assert run.main(alone) == 1


def test_results_are_recorded_and_replaced(checkout, capsys, monkeypatch) -> None:
    folder = checkout / "results"
    folder.mkdir()
    for name in ("not_run", "asides"):
        (folder / f"{name}.json").write_text("[]")
    monkeypatch.setattr(results, "HERE", folder)
    monkeypatch.setattr(results, "PAGE", checkout / "results.md")
    argv = ["T4", "--scale", "paper", "--rows", "ptb_small/full", "--out", "o", "--record"]
    more = ["--subset", "valid", "--", "--seed=0"]
    for score in ("117.25", "116.5"):  # the second time as after another training
        script = checkout / "scripts" / "score.sh"
        script.write_text(script.read_text().replace("117.25", score))
        assert run.main([*argv, "ours", *more]) == 0
        data = json.loads((folder / "ours.json").read_text())
        (row,) = data["rows"]
        assert (row["model"], row["data"], row["seeds"]) == ("full", "ptb_small", [0])
        assert (row["valid"], row["paper"], row["ratio"]) == (float(score), 114.5, 1)
        assert data["command"].endswith("T4 --scale paper --subset valid -- --seed=0")
        assert data["machine"] and row["date"] == data["date"] == provenance()["date"]
        page = (checkout / "results.md").read_text()
        assert f" | 0 | {score} |" in page
        assert f"| ptb_small, full | full | perplexity | 114.5 | {score} (valid) |" in page
        (checkout / "o" / "ptb_small" / "full" / "result.json").unlink()
    assert run.main([*argv, "not_run", "--subset", "valid", "--dry-run"]) == 2
    assert "--record not_run: " in (error := capsys.readouterr().err) and "other results" in error
    with pytest.raises(SystemExit):
        run.main([*argv, "../ours", *more])
    assert "'../ours' is not made of letters, digits and _" in capsys.readouterr().err
    # The recipe's own split would be unknown, and the page has one command for a file.
    assert run.main([*argv, "ours", "--", "--seed=0"]) == 2
    assert "add --subset valid or --subset test" in capsys.readouterr().err
    for other in (["--subset", "test"], ["--subset", "valid", "--", "--seed=8"]):
        assert run.main([*argv, "ours", *other]) == 2
        error = capsys.readouterr().err
        assert "has the results of 'scripts/reproduce.sh T4 --scale paper --subset valid" in error
    assert run.main(["T4", "--dry-run", "--", "--seed", "one"]) == 2
    assert "error: --seed one: must be a whole number" in capsys.readouterr().err
    assert run.main(["T3", "--record", "ours", "--subset", "test"]) == 2
    assert "these rows have several metrics (BLEU, accuracy, perp" in capsys.readouterr().err


def test_a_machine_without_git_has_results_too(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance()["commit"] == "unknown"


def test_a_whole_name_means_that_row_alone() -> None:
    assert list(commands("T4", "ptb_small/chen18")) == ["ptb_small/chen18"]
    assert list(commands("T4", "small/chen18")) == [
        "ptb_small/chen18",
        "ptb_small/full",
        "ptb_small/chen18-plus",
    ]


@pytest.mark.parametrize("text", ["", "{", '{"status": "done"}'])
def test_a_damaged_result_is_made_again(checkout, capsys, text: str) -> None:
    argv = ["T5", "--rows", "small/full", "--out", "o"]
    assert run.main(argv) == 0
    result = checkout / "o" / "ptb_small" / "full" / "result.json"
    result.write_text(text)
    capsys.readouterr()
    assert run.main([*argv, "--dry-run"]) == 0
    assert "# ptb_small/full\n" in capsys.readouterr().out
    assert run.main(argv) == 0
    assert json.loads(result.read_text())["score"] == 117.25


def test_out_that_is_a_file_is_one_line(checkout, capsys) -> None:
    (checkout / "o").write_text("thesis")
    assert run.main(["T5", "--rows", "small/full", "--out", "o"]) == 2
    error = capsys.readouterr().err
    assert error == "scripts/reproduce.sh: error: --out o is not a folder; give a folder\n"
