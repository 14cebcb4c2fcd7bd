"""examples/any_model: the script for sentence encoders runs to its end on a small one."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from helpers import fsq

transformers = pytest.importorskip("transformers")
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "any_model"


@pytest.mark.slow
def test_encoder_from_the_first_table_to_the_trained_one(tmp_path: Path) -> None:
    words = sorted(set(re.findall(r"\w+", (FOLDER / "pairs.tsv").read_text().lower())))
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *words]
    pieces += [f"rare{i}" for i in range(5000 - len(pieces))]  # smaller tables are left alone
    (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "full")
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=len(pieces), hidden_size=384, **sizes)
    transformers.BertModel(config).save_pretrained(tmp_path / "full")
    argv = ["--model", tmp_path / "full", "--out", tmp_path / "out", "--updates", "2"]
    done = fsq.run([sys.executable, FOLDER / "minilm.py", *argv])
    found = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert len(found) == 11 and all(result["ratio"] > 1 for result in found.values())
    assert found["scalar, 8 bits"]["cosine"] > 0.999 > found["K=32, D=96, 2 updates"]["cosine"]
    assert done.stdout.count("| K=32, D=96, 2 updates |") == 2  # when measured, and in the table
    assert (tmp_path / "out" / "minilm_32_96" / "model.safetensors").exists()
    argv[1] = tmp_path / "another"
    (tmp_path / "full").rename(argv[1])
    again = fsq.run([sys.executable, FOLDER / "minilm.py", *argv], ok=False)
    assert "is of other settings; choose another" in again.stderr
