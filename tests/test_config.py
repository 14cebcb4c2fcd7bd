"""Options: what is refused, in which words; sizes by the paper's formula."""

from __future__ import annotations

import pytest

from fairseq_dpq import DPQConfigError, DPQEmbedding
from fairseq_dpq.config import format_flag
from fairseq_dpq.fairseq_plugin.options import PluginOptions, flag_fields
from fairseq_dpq.methods import METHODS, make_options
from fairseq_dpq.methods.base import TableUse


@pytest.mark.parametrize(
    "options,message",
    [
        ({"D": 48}, "D=48 does not divide embedding_dim=512; try 32 or 64"),
        ({"D": 0}, "D=0: must be 1 or more; try 16"),
        ({"D": 1024}, "D=1024 does not divide embedding_dim=512; try 256 or 512"),
        ({"K": 1}, "K=1: must be from 2 to 32768; try 32"),
        ({"K": 32769}, "K=32769: must be from 2 to 32768; try 32"),
        ({"K": 8.0}, "K=8.0: must be from 2 to 32768; try 32"),
        ({"K": True}, "K=True: must be from 2 to 32768; try 32"),
        (
            {"method": "pq"},
            "method='pq': choose one of sx, vq, low_rank, random_codes, kd_codes, fixed_codes",
        ),
        ({"schedule": "late"}, "schedule='late': choose one of warmup, paper"),
        ({"tau": 0.0}, "tau=0.0: must be above 0; try 1.0"),
        ({"tau": float("nan")}, "tau=nan: must be above 0; try 1.0"),
        (
            {"method": "vq", "regularizer_weight": -1.0},
            "regularizer_weight=-1.0: must not be negative; try 0.005",
        ),
        ({"method": "vq", "commitment": -0.5}, "commitment=-0.5: must not be negative; try 0.5"),
        (
            {"commitment": 0.5},
            "commitment=0.5 has no effect with method='sx'; use method='vq'",
        ),
        (
            {"method": "vq", "ema_decay": 1.0},
            "ema_decay=1.0: must be between 0 and 1; try 0.99",
        ),
        ({"ema_decay": 0.9}, "ema_decay=0.9 has no effect with method='sx'; use method='vq'"),
        ({"sparse": 1}, "sparse=1: must be a bool"),
        (
            {"centroids": 3},
            "centroids=3: there is no such option; sx takes sparse, K, D, share_subspaces, "
            "schedule, warmup_updates, ramp_updates, reseed_after, tau",
        ),
        (
            {"method": "low_rank", "rank": 4, "share_subspaces": True},
            "share_subspaces=True has no effect with method='low_rank'; use method='sx' or "
            "method='vq' or method='random_codes'",
        ),
        (
            {"method": "low_rank"},
            "rank=0: method low_rank needs a rank of 1 or more; try 32",
        ),
        (
            {"method": "low_rank", "rank": 513},
            "rank=513: exceeds the embedding size 512",
        ),
        (
            {"value_gradient": 0.5},
            "value_gradient=0.5 has no effect with method='sx'; use method='vq'",
        ),
        ({"reseed_after": -1}, "reseed_after=-1: must be 0 (off) or a number of updates"),
    ],
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else "",
)
def test_refused_at_construction(options: dict, message: str) -> None:
    with pytest.raises(DPQConfigError) as error:
        DPQEmbedding(100, 512, **options)
    assert str(error.value) == message


@pytest.mark.parametrize("padding_idx", [100, -101])
def test_padding_idx_out_of_range(padding_idx: int) -> None:
    with pytest.raises(ValueError) as error:
        DPQEmbedding(100, 512, padding_idx)
    assert str(error.value) == (
        f"padding_idx={padding_idx}: must be within the 100 rows of the table, from -100 to 99"
    )


def test_sizes_of_the_table_itself() -> None:
    with pytest.raises(ValueError, match="num_embeddings=0: must be 1 or more"):
        DPQEmbedding(0, 512)
    with pytest.raises(ValueError, match="D=16 does not divide embedding_dim=0; try a positive"):
        DPQEmbedding(10, 0, D=16)


def test_what_looks_odd_but_is_right() -> None:
    make_options("sx", {"K": 2, "D": 512, "tau": 1}).validate(512)
    assert DPQEmbedding(10, 32, -1, D=4).padding_idx == 9


def test_a_caller_may_word_its_own_errors() -> None:
    with pytest.raises(DPQConfigError) as error:
        make_options("sx", {"D": 48}).validate(512, format_flag, "--encoder-embed-dim")
    assert str(error.value) == "--dpq-D 48 does not divide --encoder-embed-dim 512; try 32 or 64"


def test_formula_sizes_by_hand() -> None:
    # 32k x 512, K = 32, D = 128: 128 * 5 bits a row and 32 * 512 values
    config = make_options("sx", {"K": 32, "D": 128})
    assert config.compact_bits(32000, 512) == 32000 * 640 + 32 * 32 * 512
    assert config.compression_ratio(32000, 512) == 32 * 512 * 32000 / (20480000 + 524288)
    shared = make_options("vq", {"K": 32, "D": 128, "share_subspaces": True})
    assert shared.compact_bits(32000, 512) == 32000 * 640 + 32 * 32 * 4
    # K = 5 takes 3 bits
    assert make_options("sx", {"K": 5, "D": 2}).compact_bits(10, 4) == 10 * 2 * 3 + 32 * 5 * 4
    assert DPQEmbedding(10, 4, K=5, D=2).compression_ratio() == 32 * 40 / 700


def test_plugin_options_of_each_table() -> None:
    plugin = PluginOptions(decoder_K=16, given={"K": 8, "D": 4, "tau": 0.5})
    assert plugin.of_table(False) == make_options("sx", {"K": 8, "D": 4, "tau": 0.5})
    assert plugin.of_table(True) == make_options("sx", {"K": 16, "D": 4, "tau": 0.5})
    assert not PluginOptions().enabled and plugin.enabled
    assert PluginOptions(method="low_rank", given={"rank": 3}).enabled
    assert all(f.metadata["help"] for f in flag_fields())


def test_sizes_that_are_left_out() -> None:
    """A quarter of the embedding size, half of it if tied, as near as a divisor comes."""
    layer = DPQEmbedding(10, 200)
    assert (layer.config.K, layer.config.D) == (32, 50)
    assert tuple(layer.values.shape) == (50, 32, 4)
    tied = make_options("vq", {}).resolved(TableUse(200, tied=True))
    assert (tied.K, tied.D) == (32, 100)
    assert "D" not in make_options("low_rank", {"rank": 2}).keywords()
    assert make_options("kd_codes", {}).resolved(TableUse(200)).D == 32
    # 50 codes of 3 bits a row and 8 * 200 values
    assert make_options("sx", {"K": 8}).compact_bits(10, 200) == 10 * 150 + 32 * 8 * 200


def test_methods_with_one_name_or_one_option_twice_are_refused() -> None:
    from dataclasses import dataclass

    from fairseq_dpq.config import option
    from fairseq_dpq.methods.base import register_method
    from fairseq_dpq.methods.low_rank import LowRank, LowRankOptions

    @dataclass
    class Other(LowRankOptions):
        pass

    class Twice(LowRank):
        options = Other

    with pytest.raises(ValueError, match="there is already a method called 'low_rank'"):
        register_method(Twice)

    class Shares(LowRank):
        name = "shares"

    with pytest.raises(ValueError, match="options of method 'shares' belong to another one"):
        register_method(Shares)

    @dataclass
    class Clash(LowRankOptions):
        tau: int = option(3, "not that of sx")

    class Clashes(LowRank):
        name = "clashes"
        options = Clash

    with pytest.raises(ValueError, match="option 'tau' of method 'clashes' differs"):
        register_method(Clashes)
    assert {"shares", "clashes"}.isdisjoint(METHODS)
