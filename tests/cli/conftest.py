"""Toy corpora, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers import fsq
from helpers.documents import make_documents


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    return fsq.make_corpus(tmp_path_factory.mktemp("pair"), n_lines=80, n_valid=16, n_test=17)


@pytest.fixture(scope="session")
def joined(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("joined")
    return fsq.make_corpus(root, n_lines=80, n_valid=16, n_test=17, joined=True)


@pytest.fixture(scope="session")
def lm(tmp_path_factory) -> Path:
    return fsq.make_lm_corpus(tmp_path_factory.mktemp("mono"), n_lines=80, n_valid=16, n_test=17)


@pytest.fixture(scope="session")
def documents(tmp_path_factory) -> Path:
    return make_documents(tmp_path_factory.mktemp("documents"))
