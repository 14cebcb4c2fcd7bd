"""The flags: on every task, in the help, checked before data is read, and off by default."""

from __future__ import annotations

import pytest
import torch

from fairseq_dpq.config import DPQConfigError, flag
from fairseq_dpq.fairseq_plugin import options
from fairseq_dpq.fairseq_plugin.configs import read_record
from fairseq_dpq.fairseq_plugin.options import PluginOptions, flag_fields
from helpers import fsq
from helpers.plugin_runs import LM, RUN, TRANSFORMER, last, train


def test_every_task_has_every_option() -> None:
    import argparse

    from fairseq.tasks import TASK_REGISTRY

    without_dataclass = 0
    for name, task in TASK_REGISTRY.items():
        parser = argparse.ArgumentParser(allow_abbrev=False)
        try:
            task.add_args(parser)
        except argparse.ArgumentError:
            pytest.fail(f"{name}: clash of options")
        flags = {flag for action in parser._actions for flag in action.option_strings}
        missing = {"--" + key.replace("_", "-") for key in options.config_keys()} - flags
        assert not missing, f"{name} lacks {missing}"
        without_dataclass += getattr(task, "__dataclass", None) is None
    assert len(TASK_REGISTRY) > 20 and without_dataclass > 5


def test_help_and_defaults_come_from_the_dataclass() -> None:
    import argparse

    from fairseq.tasks.translation import TranslationTask

    parser = argparse.ArgumentParser(allow_abbrev=False)
    TranslationTask.add_args(parser)
    text = "".join(parser.format_help().split())  # lines are broken within flags too
    for field in flag_fields():
        assert flag(field.name) in text
        assert "".join(field.metadata["help"].split()) in text
    args = parser.parse_args(
        ["data", "--dpq-K", "7", "--dpq-commitment", "1", "--dpq-method", "vq"]
    )
    read = options.read_options(args)
    assert (read.method, read.given) == ("vq", {"K": 7, "commitment": 1.0})
    assert options.read_options(parser.parse_args(["data"])) == PluginOptions()


def test_help_of_fairseq_train_shows_every_option() -> None:
    done = fsq.run(["fairseq-train", "data", "--user-dir", fsq.USER_DIR, "--help"])
    for field in flag_fields():
        assert f"  {flag(field.name)}" in done.stdout


def test_an_invalid_option_is_a_one_line_error(corpus, tmp_path) -> None:
    argv = [corpus, "--user-dir", fsq.USER_DIR, *TRANSFORMER, *RUN, "--save-dir", tmp_path]
    argv += ["--dpq-K", "8", "--dpq-D", "5"]
    done = fsq.run(["fairseq-train", *argv], ok=False)
    line = "fairseq_dpq: error: --dpq-D 5 does not divide --encoder-embed-dim 32; try 4 or 8"
    assert done.stderr.splitlines()[-1] == line and "Traceback" not in done.stderr
    done = fsq.run(["fairseq-train", *argv], ok=False, env={"FAIRSEQ_DPQ_DEBUG": "1"})
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("wrong", ["--dpq-k", "--dpq-d", "--dpq-decoder-k"])
def test_a_flag_in_the_wrong_case_names_the_right_one(wrong, tmp_path, capsys) -> None:
    right = wrong[:-1] + wrong[-1].upper()
    with pytest.raises(SystemExit):
        train(tmp_path, tmp_path / "ck", *TRANSFORMER, dpq=f"{wrong} 8")
    assert f"error: argument {wrong}: did you mean {right}?" in capsys.readouterr().err


def test_options_survive_a_round_trip_through_a_config() -> None:
    given = {"K": 5, "D": 4, "share_subspaces": True, "schedule": "paper", "tau": 0.5}
    chosen = PluginOptions(embeddings="all", given=given)
    assert options.read_options(chosen.to_keys()) == chosen


@pytest.mark.parametrize(
    ("dpq", "message"),
    [
        ("--dpq-K 1", r"--dpq-K 1: must be from 2 to 32768; try 32"),
        ("--dpq-K 8 --dpq-tau 0", r"--dpq-tau 0.0: must be above 0"),
        (
            "--dpq-K 8 --dpq-schedule paper --dpq-warmup-updates 5",
            r"--dpq-warmup-updates 5 has no effect with --dpq-schedule paper; use .* warmup$",
        ),
        (
            "--dpq-K 8 --dpq-ema-decay 0.9",
            r"--dpq-ema-decay 0.9 has no effect with.* use --dpq-method vq",
        ),
        (
            "--dpq-K 8 --dpq-regularizer-weight 1",
            r"--dpq-regularizer-weight 1.0 has no effect with --dpq-method sx; use .* vq",
        ),
        ("--dpq-D 8", r"--dpq-D 8 has no effect without --dpq-K"),
        (
            "--dpq-method low_rank",
            r"low_rank has no effect without --dpq-rank: .* add --dpq-rank 32",
        ),
        ("--dpq-K 8 --dpq-decoder-K 1", r"--dpq-decoder-K 1: must be from 2"),
        ("--dpq-K 8 --dpq-full-start 0.5", r"--dpq-full-start 0.5 is for full tables; leave it"),
        ("--dpq-full-start 0", r"--dpq-full-start 0.0: must be above 0; try 0.5"),
    ],
)
def test_illegal_options_stop_before_data_is_read(dpq: str, message: str, tmp_path) -> None:
    nowhere = tmp_path / "no-data"  # would be FileNotFoundError if data were read
    with pytest.raises(DPQConfigError, match=message):
        train(nowhere, tmp_path / "ck", "-s", "src", "-t", "tgt", *TRANSFORMER, dpq=dpq)


def test_a_D_that_does_not_divide_names_the_model_flag(corpus, tmp_path) -> None:
    message = r"--dpq-D 5 does not divide --encoder-embed-dim 32; try 4 or 8"
    with pytest.raises(DPQConfigError, match=message):
        train(corpus, tmp_path, *TRANSFORMER, dpq="--dpq-K 8 --dpq-D 5")
    message = r"--dpq-decoder-D 6 does not divide --decoder-embed-dim 32"
    with pytest.raises(DPQConfigError, match=message):
        dpq = "--dpq-K 8 --dpq-D 4 --dpq-decoder-D 6 --dpq-embeddings all"
        train(corpus, tmp_path, *TRANSFORMER, dpq=dpq)


def test_a_D_that_is_left_out_is_in_the_record_and_kept(corpus, tmp_path) -> None:
    """A quarter of 24. A resumed run takes the record's D."""
    flags = [*TRANSFORMER, "--encoder-embed-dim", "24", "--decoder-embed-dim", "24"]
    log = train(corpus, tmp_path, *flags, updates=8, dpq="--dpq-K 8")  # with a warm-up
    assert "DPQ sx K=8 D=6" in log
    (table,) = read_record(last(tmp_path)["cfg"]["model"]).tables.values()
    assert (table.options["D"], table.embedding_dim) == (6, 24)
    train(corpus, tmp_path, *flags, updates=9, dpq="--dpq-K 8")
    assert last(tmp_path)["optimizer_history"][-1]["num_updates"] == 9


def test_a_language_models_size_flag_is_named(lm, tmp_path) -> None:
    flags = ["--task", "language_modeling", "--arch", "transformer_lm", "--decoder-layers", "1"]
    flags += ["--tokens-per-sample", "20", "--batch-size", "8"]
    flags += ["--decoder-embed-dim", "32", "--decoder-attention-heads", "2"]
    message = r"--dpq-D 48 does not divide --decoder-input-dim 512"
    with pytest.raises(DPQConfigError, match=message):
        train(lm, tmp_path, *flags, dpq="--dpq-K 8 --dpq-D 48")
    message = r"--dpq-D 48 does not divide --decoder-embed-dim 32"
    with pytest.raises(DPQConfigError, match=message):
        train(lm, tmp_path, *flags, "--decoder-input-dim", "32", dpq="--dpq-K 8 --dpq-D 48")


@pytest.mark.parametrize("shared", [False, True])
def test_a_decoders_K_without_a_decoders_table(corpus, joined, tmp_path, shared) -> None:
    message = (
        r"--dpq-decoder-K 5 has no effect: .*DPQ .encoder.embed_tokens. .*--dpq-embeddings all"
    )
    dpq = "--dpq-K 8 --dpq-D 4 --dpq-decoder-K 5"
    flags = [*TRANSFORMER, "--share-all-embeddings"] if shared else TRANSFORMER
    with pytest.raises(DPQConfigError, match=message):
        train(joined if shared else corpus, tmp_path, *flags, dpq=dpq)


def test_decoder_has_its_own_K_and_D(corpus, tmp_path) -> None:
    dpq = "--dpq-K 8 --dpq-D 4 --dpq-decoder-K 5 --dpq-decoder-D 16 --dpq-embeddings all"
    log = train(corpus, tmp_path, *TRANSFORMER, updates=1, dpq=dpq)
    model = last(tmp_path)["model"]
    assert model["encoder.embed_tokens.values"].shape == (4, 8, 8)
    assert model["decoder.embed_tokens.values"].shape == (16, 5, 2)
    assert "encoder.embed_tokens: 64 x 32 -> DPQ sx K=8 D=4; compression ratio" in log
    assert "decoder.embed_tokens: K=5 takes 3 bits a code, as K=8 does; K=4 takes 2" in log
    assert "encoder.embed_tokens: K=8" not in log


@pytest.mark.parametrize("data", ["corpus", "lm"])
def test_fully_sharded_is_refused(request, tmp_path, data) -> None:
    from fairseq import models, tasks
    from fairseq import options as fairseq_options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    flags = TRANSFORMER if data == "corpus" else LM
    argv = [str(request.getfixturevalue(data)), *flags, "--ddp-backend", "fully_sharded"]
    argv += ["--dpq-K", "8", "--dpq-D", "4"]
    parser = fairseq_options.get_training_parser()
    cfg = convert_namespace_to_omegaconf(fairseq_options.parse_args_and_arch(parser, argv))
    with pytest.raises(DPQConfigError, match=r"fully_sharded.*pytorch_ddp or legacy_ddp"):
        models.build_model(cfg.model, tasks.setup_task(cfg.task))


@pytest.mark.parametrize(
    ("flags", "dpq", "message"),
    [
        (
            "",
            "--dpq-embeddings decoder.embed_words",
            r"no token table at 'decoder.embed_words'.*"
            r"encoder.embed_tokens",
        ),
        ("", "--dpq-embeddings encoder.embed_positions", r"no token table at"),
    ],
)
def test_unknown_tables_are_refused_by_name(corpus, tmp_path, flags, dpq, message) -> None:
    with pytest.raises(DPQConfigError, match=message):
        train(corpus, tmp_path, *TRANSFORMER, *flags.split(), dpq="--dpq-K 8 --dpq-D 4 " + dpq)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--adaptive-input --adaptive-input-cutoff 20,40",
            r"is of type AdaptiveInput: .*--adaptive-in",
        ),
        (
            "--character-embeddings --character-embedding-dim 4 --character-filters [(1,16)]",
            r"is of type CharacterTokenEmbedder: .*--character-embeddings",
        ),
    ],
)
def test_other_embedders_are_refused_by_name(lm, tmp_path, flags, message) -> None:
    with pytest.raises(DPQConfigError, match=message):
        train(lm, tmp_path, *LM, *flags.split(), dpq="--dpq-K 8 --dpq-D 4")


def test_position_embeddings_are_not_replaced(lm, tmp_path) -> None:
    flags = [*LM, "--decoder-learned-pos"]
    train(lm, tmp_path, *flags, updates=1, dpq="--dpq-K 8 --dpq-D 4 --dpq-embeddings all")
    model = last(tmp_path)["model"]
    assert "decoder.embed_positions.weight" in model and "decoder.embed_tokens.query" in model


def test_off_is_stock_fairseq_bit_for_bit(corpus, tmp_path) -> None:
    argv = [corpus, *TRANSFORMER, *RUN, "--max-update", "4", "--seed", "7"]
    for name, extra in (("stock", []), ("plugin", ["--user-dir", fsq.USER_DIR, "--dpq-K", "0"])):
        fsq.run(["fairseq-train", *argv, "--save-dir", tmp_path / name, *extra])
    a, b = last(tmp_path / "stock")["model"], last(tmp_path / "plugin")["model"]
    assert a.keys() == b.keys()
    # fairseq 0.12.2 saves a tensor that it never initialises.
    assert all(torch.equal(a[key], b[key]) for key in a if not key.endswith("_float_tensor"))


def test_a_full_table_may_start_smaller(corpus, tmp_path) -> None:
    tables = {}
    for factor in ("1", "0.5"):
        dpq = f"--dpq-full-start {factor} --lr 1e-30 --seed 5"
        dpq += " --dpq-embeddings decoder" if factor == "0.5" else ""
        log = train(corpus, tmp_path / factor, *TRANSFORMER, updates=1, dpq=dpq)
        tables[factor] = last(tmp_path / factor)["model"]
    assert "decoder.embed_tokens: a full table that starts at 0.5 of its size" in log
    for key, factor in (("decoder", 0.5), ("encoder", 1.0)):
        path = f"{key}.embed_tokens.weight"
        torch.testing.assert_close(tables["0.5"][path], factor * tables["1"][path])


def test_installed_name_works_from_any_directory(corpus, tmp_path) -> None:
    argv = [corpus, *TRANSFORMER, *RUN, "--max-update", "1", "--save-dir", tmp_path / "ck"]
    argv += ["--dpq-K", "4", "--dpq-D", "4"]
    done = fsq.run(["fairseq-train", *argv, "--user-dir", fsq.USER_DIR], cwd=tmp_path)
    assert "DPQ sx K=4 D=4" in done.stdout + done.stderr


def test_a_task_registered_later_has_the_options() -> None:
    from fairseq.tasks import TASK_REGISTRY, register_task
    from fairseq.tasks.translation import TranslationConfig, TranslationTask

    @register_task("late_task_for_options", dataclass=TranslationConfig)
    class LateTaskForOptions(TranslationTask):
        pass

    import argparse

    parser = argparse.ArgumentParser(allow_abbrev=False)
    TASK_REGISTRY["late_task_for_options"].add_args(parser)
    assert parser.parse_args(["data", "--dpq-K", "3"]).dpq_K == 3
