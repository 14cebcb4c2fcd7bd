"""save_compact and load_compact: equal outputs, ties, mapped tensors; damage told in one line."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from fairseq_dpq import SavedModelError, compress, load_compact, save_compact
from fairseq_dpq.any_model import saving
from fairseq_dpq.files.record import TablesRecord
from helpers.any_model import ROWS, SIZE, Toy, some_ids, toy


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    model = toy()
    compress(model, K=8, min_rows=100)
    save_compact(model, folder)
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def test_round_trip(tmp_path: Path) -> None:
    model, ids = toy(), some_ids()
    report = compress(model, K=8, min_rows=100)
    written = save_compact(model, tmp_path / "new" / "folder")
    (file,) = (tmp_path / "new" / "folder").iterdir()
    assert file.name == "model.safetensors" and written == file.stat().st_size
    assert report.model_after < written < report.model_after + 6000  # names, record, checksums
    other = Toy().eval()  # other numbers than the first
    loaded = load_compact(tmp_path / "new" / "folder", other)
    assert loaded is other and torch.equal(other(ids), model(ids))
    assert other.output.table is other.token and other.first is other.second is other.same
    assert other.position.weight.requires_grad and not other.training
    assert sum(p.numel() for p in other.parameters()) == sum(p.numel() for p in model.parameters())
    save_compact(other, tmp_path / "new" / "folder")  # onto the files that it is mapped from
    assert torch.equal(other(ids), model(ids))
    assert torch.equal(load_compact(tmp_path / "new" / "folder", toy())(ids), model(ids))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
@pytest.mark.skipif(torch.__version__.startswith("1."), reason="safetensors copies there")
def test_codes_and_weights_stay_in_the_file(saved: Path) -> None:
    model = load_compact(saved, Toy())
    ranges = [
        [int(x, 16) for x in line.split(" ")[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(saved / "model.safetensors"))
    ]
    for tensor in (model.token.codes, model.bag.weight):
        assert any(low <= tensor.data_ptr() < high for low, high in ranges)
    with torch.no_grad():
        model.bag.weight.zero_()  # private to this process
    assert float(load_compact(saved, Toy()).bag.weight.abs().sum()) > 0


@pytest.mark.parametrize("settings", [{"method": "scalar", "bits": 5}, {"method": "low_rank"}])
def test_other_forms(tmp_path: Path, settings: dict[str, Any]) -> None:
    model, ids = toy(), some_ids()
    compress(model, min_rows=100, **{"rank": 4} if "bits" not in settings else {}, **settings)
    save_compact(model, tmp_path)
    assert torch.equal(load_compact(tmp_path, toy())(ids), model(ids))


@pytest.mark.skipif(torch.__version__.startswith("1."), reason="needs torch 2.1 or later")
def test_other_dtypes_and_the_meta_device(tmp_path: Path) -> None:
    model, ids = toy().half(), some_ids()
    model.register_buffer("steps", torch.tensor(2**40))
    compress(model, K=8, min_rows=100)
    save_compact(model, tmp_path)
    with torch.device("meta"):
        fresh = nn.Module.__new__(Toy)
        nn.Module.__init__(fresh)
        for name, size in (("token", ROWS), ("first", 500), ("position", 50)):
            setattr(fresh, name, nn.Embedding(size, SIZE))
        fresh.second, fresh.same = nn.Embedding(500, SIZE), fresh.first
        fresh.second.weight = fresh.first.weight
        fresh.bag = nn.EmbeddingBag(700, SIZE)
        fresh.output = nn.Linear(SIZE, ROWS)
        fresh.output.weight = fresh.token.weight
        fresh.register_buffer("steps", torch.tensor(0))
    load_compact(tmp_path, fresh)
    assert fresh.token(ids).dtype == torch.float16 and int(fresh.steps) == 2**40
    assert torch.equal(fresh(ids), model(ids))


class Heads(nn.Module):
    """A bias with two names, and a small table that stays full, tied to its output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(60, 8)
        self.small = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20)
        self.head.weight = self.small.weight
        self.bias = nn.Parameter(torch.randn(20))
        self.head.bias = self.bias


def test_what_else_is_shared_stays_shared(tmp_path: Path) -> None:
    model = Heads()
    compress(model, K=4, which="token")
    save_compact(model, tmp_path)
    other = load_compact(tmp_path, Heads())
    assert other.head.weight is other.small.weight and other.head.bias is other.bias
    assert torch.equal(other.bias, model.bias) and torch.equal(
        other.small.weight, model.small.weight
    )
    other.small = nn.Embedding(20, 8)  # no longer tied
    lone = Heads()
    lone.head = nn.Linear(8, 20)
    with pytest.raises(SavedModelError, match=r"head\.weight is missing"):
        load_compact(tmp_path, lone)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(SavedModelError, match=r"no compressed table; call compress\(model\) first"):
        save_compact(toy(), tmp_path)
    model = toy()
    compress(model, K=4, min_rows=100, trainable=True)
    with pytest.raises(SavedModelError, match=r"call compact\(model\) first"):
        save_compact(model, tmp_path)
    for value, why in ((torch.zeros(2, dtype=torch.complex64), "complex64 cannot be saved"),):
        model = toy()
        compress(model, K=4, min_rows=100)
        model.register_buffer("extra", value)
        with pytest.raises(SavedModelError, match=f"extra: torch.{why}"):
            save_compact(model, tmp_path)
    assert list(tmp_path.iterdir()) == []


def _smaller() -> nn.Module:
    model = Toy()
    model.token = nn.Embedding(ROWS - 1, SIZE)
    return model


def _untied() -> nn.Module:
    model = Toy()
    model.output = nn.Linear(SIZE, ROWS)
    return model


def _unshared() -> nn.Module:
    model = Toy()
    model.second = nn.Embedding(500, SIZE)
    return model


def _without() -> nn.Module:
    model = Toy()
    del model.bag
    return model


def _renamed() -> nn.Module:
    model = Toy()
    model.words = model.token
    del model.token
    return model


def _rounded() -> nn.Module:
    model = Toy()
    weight = model.position.weight.to(torch.int8)
    model.position.weight = nn.Parameter(weight, requires_grad=False)
    return model


def _wider() -> nn.Module:
    model = Toy()
    model.position = nn.Embedding(51, SIZE)
    return model


@pytest.mark.parametrize(
    "make,why",
    [
        (_smaller, "token is 599 x 16 in the model, 600 x 16 as saved"),
        (_untied, "token is tied to nothing in the model, output as saved"),
        (_unshared, "first is shared with same in the model, second and same as saved"),
        (_without, "the model has no bag.weight"),
        (_renamed, "the model has no embedding table token; it has first, "),
        (_rounded, "position.weight is torch.int8 in the model, torch.float32 as saved"),
        (_wider, r"position.weight has shape \(51, 16\) in the model, \(50, 16\) as saved"),
    ],
)
def test_another_model_is_refused_and_left_alone(
    saved: Path, make: Callable[[], nn.Module], why: str
) -> None:
    model = make()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(SavedModelError, match=why) as caught:
        load_compact(saved, model)
    assert "\n" not in str(caught.value)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(before[k], after[k]) for k in after)


def _recorded(folder: Path, record: Any) -> None:
    """Give a saved model another record, with checksums that fit."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, not a dict
    meta = saving.metadata("Toy", {"kind": "model", "record": record}, tensors)
    (folder / "model.safetensors").unlink()
    save_file(tensors, str(folder / "model.safetensors"), meta)


def test_missing_and_foreign_files(copied: Path) -> None:
    with pytest.raises(SavedModelError, match=r"has no model\.safetensors: not a saved model"):
        load_compact(copied / "nowhere", Toy())
    (copied / "model.safetensors").write_bytes(b"no")
    with pytest.raises(SavedModelError, match="is not a safetensors file"):
        load_compact(copied, Toy())


def _nested(depth: int) -> Any:
    out: Any = []
    for _ in range(depth):
        out = [out]
    return out


@pytest.mark.parametrize(
    "record,why",
    [
        ({}, "'version' is missing"),
        (_nested(400), "expected dict"),
        (None, "expected dict, found None"),
        ("{}", "expected dict, found '{}'"),
        ({"version": 99}, "format is version 99"),
    ],
)
def test_hostile_records(copied: Path, record: Any, why: str) -> None:
    _recorded(copied, record)
    with pytest.raises(SavedModelError, match=why) as caught:
        load_compact(copied, Toy())
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_forged_record_is_compared_with_the_tensors(copied: Path) -> None:
    """With checksums that fit, what it claims must still fit the tensors."""
    config = saving.read_tensors(copied / "model.safetensors").config
    record = TablesRecord.from_json(json.dumps(config["record"]))
    record.tables["token"].form["share_subspaces"] = True
    text = record.to_json()
    assert TablesRecord.from_json(text).tables["token"].form["share_subspaces"]
    _recorded(copied, json.loads(text))
    with pytest.raises(SavedModelError, match="token: size mismatch for values"):
        load_compact(copied, Toy())


def test_the_file_is_safetensors(saved: Path) -> None:
    """Their library reads what ours writes."""
    model = load_compact(saved, Toy())
    with safe_open(saved / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("bag.weight"), model.bag.weight)
        assert torch.equal(file.get_tensor("token.codes"), model.token.codes)


@pytest.mark.skipif(os.name != "posix", reason="needs file modes")
def test_modes_follow_the_umask(tmp_path: Path) -> None:
    model = toy()
    compress(model, K=4, min_rows=100)
    for mask, mode in ((0o022, 0o644), (0o027, 0o640)):
        before = os.umask(mask)
        try:
            save_compact(model, tmp_path / oct(mask))
        finally:
            os.umask(before)
        file = tmp_path / oct(mask) / "model.safetensors"
        assert file.stat().st_mode & 0o777 == mode


_KILLED = """
import os, random, signal, sys, time
import torch
from fairseq_dpq import compress, load_compact, save_compact
from helpers.any_model import some_ids, toy

folder, kills = sys.argv[1], int(sys.argv[2])
rng, models = random.Random(0), []
for K in (4, 8):
    models.append(toy())
    compress(models[-1], K=K, min_rows=100)
right = [model(some_ids()) for model in models]
start = time.time()
save_compact(models[0], folder)
took, litter, done = time.time() - start, 0, 0
while done < kills or not litter and done < 40 * kills:
    before = set(os.listdir(folder))
    child = os.fork()
    if not child:
        while True:
            for model in models:
                save_compact(model, folder)
    aimed = done % 2  # when a new file is there that is being written
    end = time.time() + (5 if aimed else 4 * took * rng.random())
    while time.time() < end and not (aimed and set(os.listdir(folder)) - before):
        time.sleep(1e-5)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    litter, done = litter + bool(set(os.listdir(folder)) - before), done + 1
    out = load_compact(folder, toy())(some_ids())
    assert any(torch.equal(out, one) for one in right)
save_compact(models[0], folder)
print(litter, *os.listdir(folder))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_while_saving(tmp_path: Path) -> None:
    """One of the two models loads after each kill, and the next save removes what is left.

    Every other kill waits for a file that is being written, until at least one has hit.
    """
    tests = str(Path(__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, tests]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", _KILLED, str(tmp_path), "10"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    litter, *files = done.stdout.split()
    assert int(litter) > 0, "no kill came while a file was written"
    assert files == ["model.safetensors"]


def test_damaged_bytes_are_noticed(copied: Path) -> None:
    """A flipped bit anywhere in the files: an error in one line, or nothing has changed."""
    rng, ids = random.Random(0), some_ids()
    right = load_compact(copied, Toy())(ids)
    wrong = 0
    file = copied / "model.safetensors"
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for i in range(90):
        damaged = bytearray(whole)
        damaged[rng.randrange(header if i % 3 == 0 else len(whole))] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        try:
            found = load_compact(copied, Toy())(ids)
        except SavedModelError as error:
            assert "\n" not in str(error)
            wrong += 1
        else:
            assert torch.equal(found, right)
    for length in (0, 7, 100, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(SavedModelError):
            load_compact(copied, Toy())
    assert wrong > 80
