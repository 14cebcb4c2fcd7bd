"""fairseq-dpq-quantize: k-means of full tables, then fairseq's own commands on the result."""

from __future__ import annotations

import json
import re
import shlex
from fractions import Fraction

import pytest
import torch

from fairseq_dpq.cli import compact, quantize
from fairseq_dpq.files.checkpoint import Checkpoint
from fairseq_dpq.files.record import RECORD_KEY
from helpers.tool_runs import TF, score, train
from helpers.toy_checkpoints import PATH, load, make_layer, make_state


def _full(path, table: torch.Tensor, **more: torch.Tensor):
    state = make_state(make_layer())
    delattr(state["cfg"]["model"], RECORD_KEY)
    state["model"] = {f"{PATH}.weight": table, **more}
    torch.save(state, path)
    return path


def _facts(capsys, *argv) -> dict:
    capsys.readouterr()
    assert quantize.main([*map(str, argv), "--json", "--debug"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("shared", [False, True])
def test_a_table_of_few_parts_is_kept_exactly(tmp_path, capsys, shared) -> None:
    """Rows made of 4 parts for each of 3 groups: k-means with K = 4 (or 12, shared) finds them."""
    torch.manual_seed(0)
    parts = torch.randn(3, 4, 2)
    rows = parts[torch.arange(3).expand(200, 3), torch.randint(4, (200, 3))].reshape(200, 6)
    source, target = _full(tmp_path / "full.pt", rows), tmp_path / "out.pt"
    flags = ["--dpq-K", 12, "--dpq-share-subspaces"] if shared else ["--dpq-K", 4]
    facts = _facts(capsys, source, target, *flags, "--dpq-D", 3)
    (table,) = facts["embeddings"]
    assert table["relative_error"] < 1e-12
    assert table["bits_per_symbol"] == (12 if shared else 6)
    checkpoint = Checkpoint.load(target)
    module = checkpoint.form(PATH)
    assert torch.allclose(module.dense(), rows, atol=1e-6)
    assert checkpoint.dpq_record().stage == "compact" and checkpoint.dpq_record().source == str(
        source
    )


def test_default_groups_and_a_table_that_grows(tmp_path, capsys) -> None:
    """D as in fairseq-train; 33 rows are not worth 32 values per group."""
    torch.manual_seed(0)
    source, target = _full(tmp_path / "full.pt", torch.randn(33, 32)), tmp_path / "out.pt"
    assert quantize.main([str(source), str(target), "--dpq-K", "32", "--debug"]) == 0
    text = capsys.readouterr().out
    assert "K=32, D=16" in text
    odd = _full(tmp_path / "odd.pt", torch.randn(33, 24))
    (table,) = _facts(capsys, odd, tmp_path / "out24.pt", "--dpq-K", 32)["embeddings"]
    assert table["D"] == 12
    assert f"{PATH}: larger than the full table; take a smaller --dpq-D" in text
    assert quantize.main([str(source), str(target), "--dpq-K", "2", "--dpq-D", "4", "--force"]) == 0
    assert "larger" not in capsys.readouterr().out


def test_error_falls_with_K_and_seeds_repeat(tmp_path, capsys) -> None:
    torch.manual_seed(1)
    table = torch.randn(500, 8)
    table[1] = 0
    source = _full(tmp_path / "full.pt", table)
    errors = []
    for K in (2, 8, 32):
        target = tmp_path / f"{K}.pt"
        facts = _facts(capsys, source, target, "--dpq-K", K, "--dpq-D", 4)
        errors.append(facts["embeddings"][0]["relative_error"])
        checkpoint = Checkpoint.load(target)
        module = checkpoint.form(PATH)
        assert module.padding_idx == 1
        difference = (module.dense() - table).pow(2).sum() / table.pow(2).sum()
        assert errors[-1] == pytest.approx(float(difference), rel=1e-4)
    # 2 dimensions of a normal distribution: about 0.68, 0.2 and 0.05 of the variance are left
    assert errors[0] < 0.75 and errors[1] < 0.3 and errors[2] < 0.08
    again = _facts(capsys, source, tmp_path / "again.pt", "--dpq-K", 32, "--dpq-D", 4)
    assert again["embeddings"][0]["relative_error"] == errors[-1]
    a, b = load(tmp_path / "32.pt")["model"], load(tmp_path / "again.pt")["model"]
    assert all(torch.equal(a[key], b[key]) for key in a)
    other = _facts(capsys, source, tmp_path / "other.pt", "--dpq-K", 32, "--dpq-D", 4, "--seed", 1)
    assert other["embeddings"][0]["relative_error"] != errors[-1]


def test_which_tables(tmp_path, capsys) -> None:
    torch.manual_seed(2)
    enc, dec = torch.randn(40, 8), torch.randn(50, 8)
    more = {
        "decoder.embed_tokens.weight": dec,
        "decoder.output_projection.weight": dec.clone(),  # tied, but torn apart by a GPU
        "encoder.embed_positions.weight": torch.randn(40, 8),
        "decoder.fc.weight": torch.randn(50, 8),
    }
    source = _full(tmp_path / "full.pt", enc, **more)
    state = load(source)
    state["cfg"]["model"].share_decoder_input_output_embed = True
    torch.save(state, source)

    def paths(*flags) -> dict[str, list[str]]:
        facts = _facts(
            capsys, source, tmp_path / "o.pt", "--dpq-K", 4, "--dpq-D", 2, "--force", *flags
        )
        return {table["path"]: table["tied_outputs"] for table in facts["embeddings"]}

    assert paths() == {PATH: []}
    left = load(tmp_path / "o.pt")["model"]
    assert torch.equal(left["decoder.embed_tokens.weight"], dec)
    tied = {"decoder.embed_tokens": ["decoder.output_projection"]}
    assert paths("--embeddings", "decoder") == tied
    assert paths("--dpq-embeddings", "all", "--dpq-decoder-K", 8) == {PATH: [], **tied}
    model = load(tmp_path / "o.pt")["model"]
    assert {"encoder.embed_positions.weight", "decoder.fc.weight"} < set(model)
    assert not {f"{PATH}.weight", "decoder.output_projection.weight"} & set(model)
    assert model["decoder.embed_tokens.values"].shape[0] == 16
    argv = [str(source), str(tmp_path / "x.pt"), "--dpq-K", "4", "--dpq-D"]
    for flags, text in {
        "2 --embeddings a.b": "no token table at 'a.b'; it has encoder.embed_tokens",
        "3": "encoder.embed_tokens: --dpq-D 3 does not divide the embedding size 8; try 2 or 4",
        "2 --dpq-method vq": "--dpq-method is for training: it needs --trainable",
    }.items():
        assert quantize.main([*argv, *flags.split()]) == 2
        assert text in capsys.readouterr().err
    for flags, text in {
        "--form tiers --ratio 0.5": "encoder.embed_tokens: --ratio 0.5: must be above 1; try 10",
        "--form scalar --bits 9": "encoder.embed_tokens: --bits 9: must be from 2 to 8",
        "--ratio 12": "--ratio needs --form tiers",
        "--form tiers --ratio 0": "--ratio 0.0: must be above 1; try 10",
        "--form tiers --ratio inf": "ratio inf: 0 bytes leave no room for codes",
        "--form scalar --bits 0": "--bits 0: must be from 2 to 8",
        "--form low_rank": "--dpq-rank is missing",
        "--form tiers --tokens 9": "--tokens needs --calibrate",
        "--dpq-K 8 --tokens 9": "--tokens needs --calibrate",
        "--trainable --dpq-K 8 --ratio 3": "--ratio goes without --trainable",
        "--trainable --dpq-K 8 --calibrate x": "--calibrate goes without --trainable",
        "--trainable --dpq-K 8 --dpq-method vq --dpq-value-gradient 0.1": "--dpq-value-gradient "
        "0.1 has no effect with --dpq-schedule warmup",
        "--trainable --dpq-K 8 --dpq-schedule paper": "schedule paper, and what needs it, is for a",
    }.items():
        assert quantize.main([*argv[:2], *flags.split()]) == 2
        assert text in capsys.readouterr().err
    argv[0] = str(tmp_path / "o.pt")
    assert quantize.main([*argv, "2"]) == 2
    assert "has DPQ tables already" in capsys.readouterr().err


def test_says_what_is_left_full_and_what_the_whole_model_saves(tmp_path, capsys) -> None:
    torch.manual_seed(3)
    more = {
        "decoder.embed_tokens.weight": torch.randn(500, 8),
        "decoder.output_projection.weight": torch.randn(500, 8),
        "decoder.fc.weight": torch.randn(50, 8),
    }
    source, target = _full(tmp_path / "full.pt", torch.randn(500, 8), **more), tmp_path / "o.pt"
    assert quantize.main([str(source), str(target), "--dpq-K", "32", "--dpq-D", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    small = 500 * 3 + 4 * 32 * 8  # 20 bits take 3 bytes a row
    rest = 2 * 16_000 + 1600
    sizes = {"before": source.stat().st_size, "after": target.stat().st_size}
    for line in (
        "left full: decoder.embed_tokens.weight, 16,000 bytes: a full table: not among "
        "--dpq-embeddings",
        "left full: decoder.output_projection.weight, 16,000 bytes: an output layer with weights "
        "of its own",
        f"embeddings  16,000 ->  {small:,} bytes, {16_000 / small:.2f}x smaller (32.3 % of the "
        "model)",
        f"model       {16_000 + rest:,} -> {small + rest:,} bytes, 1.37x smaller (without "
        "optimiser state)",
        f"file        {sizes['before']:,} -> {sizes['after']:,} bytes, "
        f"{sizes['before'] / sizes['after']:.2f}x smaller",
    ):
        assert line in lines
    assert lines[-1] == f"{target} (compact form): a model 1.37x smaller"
    assert not any("warning" in line for line in lines)


def test_a_high_error_is_a_warning_with_a_better_D(tmp_path, capsys) -> None:
    """16 normal numbers at once lose most; at the D that the warning names, what it says."""
    torch.manual_seed(4)
    table = torch.randn(600, 64)
    source, target = _full(tmp_path / "full.pt", table), tmp_path / "o.pt"
    argv = [str(source), str(target), "--force", "--dpq-K", "16"]
    assert quantize.main([*argv, "--dpq-D", "4"]) == 0
    warning = re.search(
        r"^warning: encoder.embed_tokens loses (\S+) % of its squared norm; --dpq-D (\d+) would "
        r"lose about (\S+) % \(compression ratio (\S+)\)$",
        capsys.readouterr().out,
        re.MULTILINE,
    )
    assert warning is not None
    lost, better, promised, ratio = map(float, warning.groups())
    assert lost > 60 and better == 32
    (table_facts,) = _facts(capsys, *argv, "--dpq-D", int(better))["embeddings"]
    assert 100 * table_facts["relative_error"] == pytest.approx(promised, abs=1)
    assert table_facts["formula_cr"] == pytest.approx(ratio, abs=0.05)
    assert table_facts["better"] is None
    rank = [*argv[:3], "--form", "low_rank", "--dpq-rank", "8"]
    assert quantize.main(rank) == 0
    assert "; a larger --dpq-rank loses less" in capsys.readouterr().out


@pytest.mark.parametrize("shared", [[], ["--dpq-share-subspaces"]])
def test_trainable_vq_starts_no_worse_than_plain_product_quantisation(
    tmp_path, capsys, shared
) -> None:
    torch.manual_seed(5)
    table = torch.randn(700, 16) * torch.rand(700, 1)
    table[1] = 0
    source = _full(tmp_path / "full.pt", table)
    flags = ["--dpq-K", 16, "--dpq-D", 4, "--force", *shared]
    errors = []
    for more in ([], ["--trainable", "--dpq-method", "vq"]):
        facts = _facts(capsys, source, tmp_path / "o.pt", *flags, *more)
        errors.append(facts["embeddings"][0]["relative_error"])
    assert errors[1] <= errors[0] * (1 + 1e-6)


def test_trainable_distils_from_the_table_of_the_same_name(tmp_path, capsys) -> None:
    """The full checkpoint has other tensors of that shape."""
    torch.manual_seed(5)
    table, target = torch.randn(40, 8), tmp_path / "start.pt"
    more = {"decoder.embed_tokens.weight": torch.randn(40, 8)}
    source = _full(tmp_path / "full.pt", table, **more)
    flags = "--dpq-K 4 --dpq-D 2 --trainable --dpq-method kd_codes --dpq-distill-from"
    _facts(capsys, source, target, *flags.split(), source)
    assert torch.equal(load(target)["model"][f"{PATH}.guide"], table)


def test_trust_goes_for_what_is_written_too(tmp_path, capsys) -> None:
    source, target = _full(tmp_path / "full.pt", torch.randn(40, 8)), tmp_path / "out.pt"
    torch.save({**load(source), "task_state": {"share": Fraction(1, 3)}}, source)
    argv = [str(source), str(target), "--dpq-K", "4", "--dpq-D", "2"]
    assert quantize.main(argv) == 2
    refusal = f"{source} was refused: its pickle wants fractions.Fraction"
    assert refusal in capsys.readouterr().err and not target.exists()
    assert quantize.main([*argv, "--trust"]) == 0, capsys.readouterr().err
    assert load(target)["task_state"] == {"share": Fraction(1, 3)}


def test_fairseq_generates_and_fine_tunes(joined, tmp_path, capsys) -> None:
    """With a code for every symbol nothing is lost: the same hypotheses as the full model."""
    full = train(joined, tmp_path / "full", TF + " --share-all-embeddings")
    n = load(full)["model"]["encoder.embed_tokens.weight"].shape[0]
    exact = tmp_path / "exact.pt"
    facts = _facts(capsys, full, exact, "--embeddings", "all", "--dpq-K", n, "--dpq-D", 1)
    (table,) = facts["embeddings"]
    assert table["aliases"] == ["decoder.embed_tokens"]
    assert table["tied_outputs"] == ["decoder.output_projection"]
    assert table["relative_error"] == 0
    ours, theirs = (score("generate", joined, path, 5) for path in (exact, full))
    for a, b in zip(ours, theirs):
        # torch multiplies by a tied Parameter in another order than by a table: the last digit
        if a.startswith("H-"):
            (name, value, text), (name_b, value_b, text_b) = a.split("\t"), b.split("\t")
            assert (name, text) == (name_b, text_b)
            assert float(value) == pytest.approx(float(value_b), abs=1e-5)

    start = tmp_path / "start.pt"
    dpq = "--dpq-K 8 --dpq-D 16 --dpq-embeddings all"
    _facts(capsys, full, start, *shlex.split(dpq), "--trainable")
    layer = Checkpoint.load(start).layer("encoder.embed_tokens")
    with torch.no_grad():
        rows = layer(torch.arange(n))
    table = load(full)["model"]["encoder.embed_tokens.weight"]
    assert float((rows - table)[2:].pow(2).sum() / table[2:].pow(2).sum()) < 0.25
    flags = f"{TF} --share-all-embeddings {dpq} --finetune-from-model {start} --lr 1e-9"
    tuned = train(joined, tmp_path / "tuned", flags)
    for name in ("query", "values"):  # keys follow the queries of the words that occur
        key = f"encoder.embed_tokens.{name}"
        assert torch.allclose(load(tuned)["model"][key], load(start)["model"][key], atol=1e-5)
    assert compact.main([str(tuned), str(tmp_path / "tuned.pt")]) == 0
