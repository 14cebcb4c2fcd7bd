"""What the page searches: packed data that gives back codes, values and neighbours."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy
import pytest
import torch

from fairseq_dpq.forms.packing import unpack_codes
from fairseq_dpq.report import words
from fairseq_dpq.report.models import Model, load_model
from helpers.report_files import exported, full


def _bytes(text: str, dtype: str) -> numpy.ndarray:
    return numpy.frombuffer(base64.b64decode(text), dtype=dtype)


def _model(path: Path, n: int, D: int, K: int, symbols: bool = True, width: int = 2) -> Model:
    torch.manual_seed(0)
    codes = torch.randint(0, K, (n, D), dtype=torch.int16)
    names = [f"s{i}" for i in range(n)] if symbols else None
    values = torch.randn(D, K, width)
    return load_model(exported(path, codes, values, names, 1), path.stem, {})


@pytest.mark.parametrize(("D", "K"), [(3, 5), (1, 300), (4, 2)])
def test_codes_and_values_come_back(tmp_path: Path, D: int, K: int) -> None:
    model = _model(tmp_path / "m.safetensors", 50, D, K)
    data = words.search_data([model])
    (entry,) = data["tables"][0]["models"]
    packed = torch.from_numpy(_bytes(entry["codes"], "u1").copy()).view(50, -1)
    codes = unpack_codes(packed, entry["bits"], torch.int16)
    assert torch.equal(codes, model.tables[0].codes.to(torch.int16))
    values = _bytes(entry["values"], "<f4").reshape(-1, entry["width"])
    assert numpy.array_equal(values, model.tables[0].parts.values.numpy())
    assert entry["padding"] == 1 and data["vocabularies"][0]["symbols"][7] == "s7"


def test_models_of_one_dictionary_share_it(tmp_path: Path) -> None:
    one, two = (_model(tmp_path / f"{name}.safetensors", 20, 2, 4) for name in "ab")
    other = _model(tmp_path / "c.safetensors", 21, 2, 4)
    data = words.search_data([one, two, other])
    assert [entry["vocabulary"] for entry in data["tables"][0]["models"]] == [0, 0, 1]


def test_neighbours_of_a_full_table_are_worked_out(tmp_path: Path, monkeypatch) -> None:
    table = torch.tensor([[1.0, 0], [0, 0], [1, 1], [0, 1], [1, 0.1]])
    model = load_model(full(tmp_path / "f.pt", table), "f", {})
    (entry,) = words.search_data([model], k=2)["tables"][0]["models"]
    ids = _bytes(entry["neighbours"]["ids"], "<i4").reshape(-1, 2)
    cosines = _bytes(entry["neighbours"]["cosines"], "<i2").reshape(-1, 2) / 32767
    assert ids[0].tolist() == [4, 2]
    assert cosines[0].tolist() == pytest.approx([1 / 1.01**0.5, 0.5**0.5], abs=1e-4)
    assert "codes" not in entry and entry["neighbours"]["rows"] == 5


def test_large_values_are_replaced_by_neighbours(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(words, "_VALUES", 10)
    model = _model(tmp_path / "m.safetensors", 30, 2, 8)
    (entry,) = words.search_data([model])["tables"][0]["models"]
    assert "values" not in entry and entry["neighbours"]["rows"] == 30 and entry["codes"]


def test_more_symbols_than_the_page_takes(tmp_path: Path, monkeypatch) -> None:
    model = _model(tmp_path / "m.safetensors", 2000, 16, 32)
    monkeypatch.setattr(words, "LIMIT", 1500)
    data = words.search_data([model])
    assert data["vocabularies"][0] == {
        "total": 2000,
        "rows": 1500,
        "symbols": [f"s{i}" for i in range(1500)],
    }
    monkeypatch.setattr(words, "BUDGET", 20_000)
    data = words.search_data([model])
    rows = data["vocabularies"][0]["rows"]
    assert 100 < rows < 1000
    assert sum(len(str(value)) for value in data["tables"][0]["models"][0].values()) < 20_000


def test_unprintable_symbols_are_escaped(tmp_path: Path) -> None:
    codes, values = torch.zeros(3, 1, dtype=torch.uint8), torch.ones(1, 2, 1)
    names = ["\u202eevil", "a\x00b", "שלום"]
    model = load_model(exported(tmp_path / "m.safetensors", codes, values, names), "m", {})
    (listed,) = words.search_data([model])["vocabularies"]
    assert listed["symbols"] == ["\\u202eevil", "a\\x00b", "שלום"]
