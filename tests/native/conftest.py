"""Fixtures of the tests of the native library."""

from __future__ import annotations

import os
from typing import Iterator

import pytest
import torch

# Triton reads it when it is imported. With TRITON_INTERPRET=0 its kernels are tested on a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
