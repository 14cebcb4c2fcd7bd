"""Fixtures of the data tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.data_server import Server


@pytest.fixture
def server() -> Iterator[Server]:
    instance = Server()
    yield instance
    instance.http.shutdown()
    instance.http.server_close()
