"""The attack of helpers/forging.py with fixed seeds: every family, some dozen cases of each."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from fairseq_dpq.fairseq_plugin.configs import get_option
from helpers.forging import Attack

FAMILIES = {
    "export_header": 150,
    "export_data": 100,
    "export_json": 150,
    "bytes": 60,
    "refit_zip": 12,
    "refit_table": 8,
    "refit_export": 40,
    "refit_model": 60,
    "record": 80,
    "tensors": 60,
    "codes": 12,
    "state": 50,
    "names": 25,
    "pickles": 25,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("family", FAMILIES)
def test_one_line_or_the_right_result(family: str, folder: Path) -> None:
    place = folder / family
    place.mkdir()
    attack = Attack(place, seed=len(family))
    for _ in range(FAMILIES[family]):
        attack.run(family)


def test_every_family_is_attacked(folder: Path) -> None:
    assert list(Attack(folder, 0).families) == list(FAMILIES)


@pytest.mark.parametrize("cfg", [None, True, 3, 0.5, "checkpoint", ["data"]])
def test_a_config_that_is_none_has_no_options(cfg: object) -> None:
    assert get_option(cfg, "checkpoint") is None
    assert get_option({"task": cfg}, "task") == cfg
    assert get_option(Namespace(task=cfg), "task") == cfg
