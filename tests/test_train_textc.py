"""Recipes of text classification: commands parsed as fairseq would, ratios beside the paper's."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from fairseq_dpq.fairseq_plugin.options import read_options
from helpers import fsq

ROOT = Path(__file__).resolve().parent.parent
PAPER = {  # rows of the table; CR of SX, of VQ, of low rank 10x and 20x
    "ag_news": (69_322, 19.3, 24.0, 10.4, 21.4),
    "yahoo_answers": (477_522, 48.2, 19.2, 10.2, 21.5),
    "dbpedia": (612_530, 24.1, 38.5, 10.3, 21.3),
    "yelp_polarity": (246_739, 38.5, 24.0, 10.4, 21.5),
    "yelp_full": (268_414, 48.2, 24.1, 10.3, 21.4),
}


def parse(recipe: str, method: str) -> Any:
    clean = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "WORKERS")}
    done = subprocess.run(
        ["sh", str(ROOT / "scripts" / "train.sh"), recipe, method, "--cpu"],
        env={**clean, "PYTHON": sys.executable, "DRY_RUN": "1"},
        text=True,
        capture_output=True,
        check=True,
    )
    words = shlex.split(done.stdout)
    words[words.index("--user-dir") + 1] = fsq.USER_DIR
    argv, sys.argv = sys.argv, words  # --user-dir is read from there
    try:
        args = options.parse_args_and_arch(options.get_training_parser(), words[1:])
        return convert_namespace_to_omegaconf(args)
    finally:
        sys.argv = argv


@pytest.mark.parametrize("recipe", PAPER)
def test_ratios_are_near_those_of_the_paper(recipe: str) -> None:
    n, *ratios = PAPER[recipe]
    for method, expected in zip(("sx", "vq", "low_rank10", "low_rank20"), ratios):
        cfg = parse(recipe, method)
        config = read_options(cfg.task).of_table(decoder=False)
        found = config.compression_ratio(n, cfg.model.encoder_embed_dim)
        assert abs(found - expected) < 0.25, (recipe, method, found)


def test_settings_are_those_of_the_paper() -> None:
    cfg = parse("csv_files", "full")
    model = cfg.model
    assert model._name == "text_classifier" and str(model.pooling) == "mean"
    assert (model.encoder_embed_dim, model.hidden_size, model.dropout) == (300, 300, 0.0)
    assert (cfg.dataset.batch_size, cfg.optimization.max_update) == (64, 5000)
    assert (cfg.optimizer._name, cfg.optimizer.lr) == ("lazy_adam", [0.001])
    assert cfg.checkpoint.best_checkpoint_metric == "accuracy"
    assert cfg.checkpoint.maximize_best_checkpoint_metric and not cfg.task.dpq_K
