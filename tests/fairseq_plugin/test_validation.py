"""Claims of a file that its tensors do not bear out: one line, exit 2, in fairseq's loading too."""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Any, Callable

import pytest
import torch
from omegaconf import OmegaConf

from fairseq_dpq.cli import compact, export, inspect
from fairseq_dpq.config import DPQConfigError
from fairseq_dpq.fairseq_plugin.configs import read_record
from fairseq_dpq.fairseq_plugin.hooks import forget_gone_options
from fairseq_dpq.fairseq_plugin.validation import check_state
from fairseq_dpq.files.record import _say_gone
from helpers.toy_checkpoints import ALIAS, PATH, edit_record, load, make_layer, save_toy


def _table(**claims: Any) -> Callable[[dict], None]:
    def edit(state: dict) -> None:
        edit_record(state, lambda record: record["tables"][PATH].update(claims))

    return edit


def _option(**claims: Any) -> Callable[[dict], None]:
    def edit(state: dict) -> None:
        edit_record(state, lambda record: record["tables"][PATH]["options"].update(claims))

    return edit


def _tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict], None]:
    def edit(state: dict) -> None:
        new = change(state["model"][f"{PATH}.{name}"])
        for path in (PATH, ALIAS):
            state["model"][f"{path}.{name}"] = new

    return edit


BAD: dict[str, tuple[Callable[[dict], None], str]] = {
    "dim": (_table(embedding_dim=10**12 + 1), "embedding_dim=1000000000001: must be from 1 to"),
    "dim is text": (_table(embedding_dim="12"), "embedding_dim: expected int, found '12'"),
    "rows": (_table(num_embeddings=2**31), "expected (2147483648, 12), found (60, 12)"),
    "D": (_option(D=10**6), "D=1000000 does not divide embedding_dim=12"),
    "D is null": (_option(D=None), "D: expected int, found None"),
    "key_dim": (_option(key_dim=10**9), "options has the unknown entry 'key_dim'"),
    "K is true": (_option(K=True), "K: expected int, found True"),
    "norm_var": (_tensor("norm_var", torch.Tensor.double), "found torch.float64"),
    "norm_mean": (_tensor("norm_mean", lambda t: t[:1].clone()), "expected (4, 8), found (1, 8)"),
    "keys": (_tensor("keys", lambda t: t[:, :, :1].clone()), "expected (4, 8, 3), found (4, 8, 1)"),
    "expanded": (_tensor("query", lambda t: t[:1].clone().expand(60, 12)), "an expanded tensor"),
    "huge": (_tensor("query", lambda t: t[:1, :1].clone().expand(2**31, 12)), "cannot hold that"),
    "other layer": (_table(aliases=["encoder.fc"]), "encoder.fc is not the name of a token table"),
    "own table": (_table(aliases=["x.embed_tokens"]), "x.embed_tokens, another name of it"),
    "no alias": (_table(aliases=[]), "decoder.embed_tokens: is a DPQ table that the record"),
    "tied": (_table(tied=["encoder.fc"]), "encoder.fc, tied to it in the record, has a weight"),
    "newline": (_table(aliases=["a\nb.embed_tokens"]), r"a\nb.embed_tokens, another name"),
    "escape": (_table(aliases=["\x1b[31m"]), r"\x1b[31m is not the name"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused_in_one_line(tmp_path, capsys, name) -> None:
    edit, text = BAD[name]
    source = save_toy(tmp_path / "in.pt", make_layer())
    state = load(source)
    edit(state)
    torch.save(state, source)
    start = time.monotonic()
    for main, more in ((compact.main, ["out.pt"]), (inspect.main, []), (export.main, ["o.st"])):
        assert main([str(source), *(str(tmp_path / x) for x in more)]) == 2
        said = capsys.readouterr().err
        assert text in said and said.count("\n") == 1 and "\x1b" not in said
    assert time.monotonic() - start < 10
    if name != "huge":
        with pytest.raises(DPQConfigError):
            check_state(load(source), "in.pt")
    check_state(load(save_toy(tmp_path / "good.pt")), "good.pt")


def test_an_option_that_the_file_does_not_know_has_its_default(tmp_path) -> None:
    """A method may get options after a checkpoint was written."""
    source = save_toy(tmp_path / "in.pt", make_layer())
    state = load(source)
    edit_record(state, lambda record: record["tables"][PATH]["options"].pop("reseed_after"))
    torch.save(state, source)
    record = read_record(load(source)["cfg"]["model"])
    assert record is not None and record.tables[PATH].options["reseed_after"] == 0
    assert compact.main([str(source), str(tmp_path / "out.pt")]) == 0


@pytest.mark.parametrize("value", [False, True])
def test_an_option_that_is_gone(tmp_path, caplog, value) -> None:
    """`rotation_trick` of 1.0.0 matters only to a training that had it on."""
    source, out = save_toy(tmp_path / "in.pt", make_layer()), tmp_path / "out.pt"
    assert compact.main([str(source), str(out)]) == 0
    for path in (source, out):
        caplog.clear()
        _say_gone.cache_clear()
        state = load(path)
        edit_record(state, lambda raw: raw["tables"][PATH]["options"].update(rotation_trick=value))
        torch.save(state, path)
        assert inspect.main([str(path)]) == 0
        warned = caplog.text.count("--dpq-rotation-trick of version 1.0.0 is gone")
        assert warned == (value and path == source)  # once, however many tables and reads


def test_flags_of_other_versions_are_dropped_unresolved() -> None:
    """What a file interpolates is not looked up, in whatever form its config is."""
    kept = {"data": "here", "dpq_K": 8}
    own = {**kept, "dpq_gone": "${nope}", "dpq_rotation_trick": "${oc.env:NOPE}"}
    for cfg in (dict(own), OmegaConf.create(own), Namespace(**own)):
        forget_gone_options({"cfg": {"task": cfg, "model": "text"}})
        assert (vars(cfg) if isinstance(cfg, Namespace) else cfg) == kept
    forget_gone_options({"args": None})


def test_an_optimiser_state_that_contains_itself(tmp_path) -> None:
    knot: dict = {}
    knot["state"] = [knot]
    source = save_toy(tmp_path / "in.pt", last_optimizer_state=knot)
    assert inspect.main([str(source)]) == 0
    assert compact.main([str(source), str(tmp_path / "out.pt")]) == 0


def test_many_groups_take_no_time(tmp_path) -> None:
    """Work grows with the number of groups, not with its square."""
    layer = make_layer(n=3, d=20_000, K=2, D=20_000)
    source = save_toy(tmp_path / "in.pt", layer)
    assert compact.main([str(source), str(tmp_path / "out.pt")]) == 0
