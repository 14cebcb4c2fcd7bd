"""Files that are no good, and files that mean harm."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from fairseq_dpq.cli import compact, export, quantize
from fairseq_dpq.files import loading
from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.files.loading import load_checkpoint
from helpers import report_files
from helpers.toy_checkpoints import load, make_layer, make_state, save_toy


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path, function=os.mkdir) -> None:
        self.path, self.function = str(path), function

    def __reduce__(self):
        return self.function, (self.path,)


@pytest.fixture(params=["weights_only", "restricted"])
def way(request, monkeypatch) -> str:
    """Both ways of safe loading: that of torch >= 2.6, and ours for older versions."""
    if request.param == "restricted":
        monkeypatch.setattr(loading, "_TORCH", min(loading._TORCH, (1, 13)))
    return request.param


def test_a_checkpoint_comes_back_whole(tmp_path, way) -> None:
    path = save_toy(tmp_path / "a.pt")
    state, want = load_checkpoint(path), load(path)
    assert list(state) == list(want)
    assert vars(state["cfg"]["model"]) == vars(want["cfg"]["model"])
    assert all(torch.equal(state["model"][key], t) for key, t in want["model"].items())
    assert all(state["model"][key].dtype == t.dtype for key, t in want["model"].items())


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("place", ["top", "cfg", "model"])
def test_a_malicious_pickle_does_not_run(tmp_path, way, zipped, place) -> None:
    marker = tmp_path / "marker"
    state = make_state(make_layer())
    {"top": state, "cfg": vars(state["cfg"]["model"]), "model": state["model"]}[place]["x"] = Touch(
        marker
    )
    path = tmp_path / "evil.pt"
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"wants (posix|nt)\.mkdir.*--trust") as error:
        load_checkpoint(path)
    assert not marker.exists()
    assert "\n" not in str(error.value)
    if place != "model":
        load_checkpoint(path, trust=True)
        assert marker.exists()  # the pickle would have worked


@pytest.mark.parametrize("function", [eval, exec, os.system, getattr, torch.load])
def test_the_refusal_names_what_was_wanted(tmp_path, way, function) -> None:
    path = tmp_path / "evil.pt"
    torch.save({"model": Touch(tmp_path / "x", function)}, path)
    with pytest.raises(CheckpointError, match=rf"wants [\w.]*{function.__name__},"):
        load_checkpoint(path)


def test_truncated_at_any_length(tmp_path, way) -> None:
    whole = save_toy(tmp_path / "a.pt").read_bytes()
    part = tmp_path / "part.pt"
    for length in [5, 100, len(whole) // 2, len(whole) - 30, len(whole) - 1]:
        part.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"part\.pt is truncated"):
            load_checkpoint(part)


def _plain_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "hello")


@pytest.mark.parametrize(
    ("write", "text"),
    [
        (lambda p: p.write_bytes(b""), "is empty"),
        (lambda p: p.write_text("hello, this is no checkpoint\n"), "not a PyTorch checkpoint"),
        (lambda p: p.write_bytes(pickle.dumps([1, 2])), "not a PyTorch checkpoint"),
        (lambda p: p.mkdir(), "is a directory"),
        (lambda p: None, "cannot read .*No such file"),
        (_plain_zip, "another zip file"),
        (lambda p: torch.save(torch.zeros(3), p), "has no 'model' entry"),
        (lambda p: torch.save({"model": {"a": torch.zeros(3)}}, p), "neither 'cfg' nor 'args'"),
        (lambda p: torch.save({"model": {"a": 3}, "cfg": {"b": 1}}, p), "no table of tensors"),
    ],
)
def test_not_a_checkpoint(tmp_path, way, write, text) -> None:
    path = tmp_path / "x.pt"
    write(path)
    with pytest.raises(CheckpointError, match=text) as error:
        load_checkpoint(path)
    assert "\n" not in str(error.value)


def test_a_zip_file_of_several_disks(tmp_path) -> None:
    """Python's own test for a zip file raises here."""
    record = b"PK\x06\x06" + struct.pack("<Q", 44) + bytes(44)
    locator = b"PK\x06\x07" + struct.pack("<LQL", 0, 104, 2)
    end = b"PK\x05\x06" + b"\xff" * 16 + bytes(2)
    path = tmp_path / "many.pt"
    path.write_bytes(b"PK\x03\x04" + bytes(100) + record + locator + end)
    with pytest.raises(CheckpointError, match=r"is damaged|is truncated"):
        load_checkpoint(path)


def test_loading_leaves_the_allow_list_as_it_was(tmp_path) -> None:
    path = save_toy(tmp_path / "a.pt")
    torch_knows = getattr(torch.serialization, "get_safe_globals", list)
    before = set(map(str, torch_knows()))
    load_checkpoint(path)
    assert set(map(str, torch_knows())) == before


def _flip(part: bytearray) -> bytearray:
    part[len(part) // 2] ^= 64
    return part


@pytest.mark.parametrize(
    "damage", [_flip, lambda p: bytearray(len(p)), lambda p: p[1:] + p[:1]], ids=["flip", "0", "1"]
)
@pytest.mark.parametrize("kind", ["trained", "full"])
def test_damaged_weights_are_named_before_anything_is_written(
    tmp_path, capsys, damage, kind
) -> None:
    """Bytes of a weight flipped, zeroed or shifted; torch itself loads such a file."""
    source, target = tmp_path / "in.pt", tmp_path / "out"
    if kind == "trained":
        save_toy(source)
    else:
        report_files.full(source, torch.randn(60, 12))
    with zipfile.ZipFile(source) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
        part = archive.read(largest)
    data = bytearray(source.read_bytes())
    at = data.index(part)
    data[at : at + len(part)] = damage(bytearray(part))
    source.write_bytes(data)
    load(source)
    commands = {"trained": [compact.main, export.main], "full": [quantize.main]}[kind]
    for main in commands:
        flags = ["--dpq-K", "8", "--dpq-D", "4"] if main is quantize.main else []
        assert main([str(source), str(target), *flags]) == 2
        said = capsys.readouterr().err
        name = largest.filename.split("/", 1)[1]
        assert f"{source} is damaged: {name} does not match its checksum" in said
        assert said.count("\n") == 1 and not target.exists()


@pytest.mark.parametrize("change", [-3, 3, 64])
def test_an_entry_of_another_size_is_named(tmp_path, way, change) -> None:
    """With checksums that fit: a mapped file would give bytes of the next entry for numbers."""
    source, bad = save_toy(tmp_path / "source.pt"), tmp_path / "bad.pt"
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(bad, "w") as new:
        for info in old.infolist():
            data = old.read(info)
            if info.filename.endswith("/data/0"):
                data = data[:change] if change < 0 else bytes(change) + data
            new.writestr(info.filename, data)
    with pytest.raises(CheckpointError, match=r"bad.pt is damaged: data/0 has \d+ bytes, expected"):
        load_checkpoint(bad)


def test_a_file_without_checksums_loads(tmp_path) -> None:
    options = pytest.importorskip("torch.serialization")
    if not hasattr(options, "set_crc32_options"):
        pytest.skip("this torch always computes them")
    before = options.get_crc32_options()
    options.set_crc32_options(False)
    try:
        path = save_toy(tmp_path / "a.pt")
    finally:
        options.set_crc32_options(before)
    assert load_checkpoint(path)["model"].keys() == load(path)["model"].keys()


@pytest.mark.parametrize("value", ["${oc.env:SECRET_TOKEN}", ["a", "${oc.env:SECRET_TOKEN}"]])
def test_the_environment_does_not_leak(tmp_path, capsys, monkeypatch, value) -> None:
    """fairseq resolves what it finds in `args` when it upgrades them."""
    monkeypatch.setenv("SECRET_TOKEN", "hush-hush")
    source, target = tmp_path / "in.pt", tmp_path / "out.pt"
    report_files.full(source, torch.randn(60, 12))
    names = {"arch": "transformer_lm", "task": "language_modeling", "criterion": "cross_entropy"}
    args = Namespace(**names, optimizer="adam", lr=[0.1], tokens_per_sample=16, data=value)
    torch.save({**load(source), "cfg": None, "args": args}, source)
    assert quantize.main([str(source), str(target), "--dpq-K", "8", "--dpq-D", "4"]) == 2
    said = capsys.readouterr()
    assert "data in its args is an interpolation" in said.err and not target.exists()
    assert "hush-hush" not in said.err + said.out
