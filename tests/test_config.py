"""Options: what is refused, in which words; sizes by the paper's formula."""

from __future__ import annotations

import dataclasses

import pytest

from fairseq_dpq import DPQConfig, DPQConfigError, DPQEmbedding
from fairseq_dpq.config import PluginConfig
from fairseq_dpq.methods import METHODS


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
        ({"distance": "l1"}, "distance='l1': choose one of dot, euclidean, cosine"),
        (
            {"method": "vq", "distance": "cosine"},
            "distance='cosine': vq compares by euclidean distance only; leave it out, or use "
            "method='sx'",
        ),
        (
            {"method": "vq", "key_dim": 8},
            "key_dim=8: the keys of vq are its values, of size 32 (embedding size / D); leave it "
            "out, or use method='sx'",
        ),
        ({"key_dim": 0}, "key_dim=0: must be 1 or more, or left out"),
        ({"tau": 0.0}, "tau=0.0: must be above 0; try 1.0"),
        ({"tau": float("nan")}, "tau=nan: must be above 0; try 1.0"),
        ({"method": "vq", "reg_weight": -1.0}, "reg_weight=-1.0: must not be negative; try 1.0"),
        ({"method": "vq", "commitment": -0.5}, "commitment=-0.5: must not be negative; try 0.5"),
        (
            {"commitment": 0.5},
            "commitment=0.5 has no effect with method='sx'; use method='vq'",
        ),
        (
            {"method": "vq", "ema_decay": 1.0},
            "ema_decay=1.0: must be in [0, 1); try 0.99, or 0 for off",
        ),
        ({"ema_decay": 0.9}, "ema_decay=0.9 has no effect with method='sx'; use method='vq'"),
        ({"reg_weight": 2.0}, "reg_weight=2.0 has no effect with method='sx'; use method='vq'"),
        ({"reg_weight": 1.0}, "reg_weight=1.0 has no effect with method='sx'; use method='vq'"),
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
            {"rotation_trick": True},
            "rotation_trick=True has no effect with method='sx'; use method='vq'",
        ),
        ({"kmeans_init": -1}, "kmeans_init=-1: must be 0 (off) or a number of updates"),
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
        DPQEmbedding(10, 0)
    with pytest.raises(TypeError, match="centroids"):
        DPQEmbedding(10, 512, centroids=3)


def test_what_looks_odd_but_is_right() -> None:
    DPQConfig(method="vq", distance="euclidean", key_dim=32).validate(512)  # what vq has anyway
    DPQConfig(K=2, D=512).validate(512)
    assert DPQEmbedding(10, 32, -1, D=4).padding_idx == 9


def test_a_caller_may_word_its_own_errors() -> None:
    def say(name: str, value: object) -> str:
        return f"--dpq-{name} {value}"

    with pytest.raises(DPQConfigError) as error:
        DPQConfig(D=48).validate(512, say, "--encoder-embed-dim")
    assert str(error.value) == "--dpq-D 48 does not divide --encoder-embed-dim 512; try 32 or 64"


def test_formula_sizes_by_hand() -> None:
    # 32k x 512, K = 32, D = 128: 128 * 5 bits a row and 32 * 512 values
    config = DPQConfig(K=32, D=128)
    assert config.compact_bits(32000, 512) == 32000 * 640 + 32 * 32 * 512
    assert config.compression_ratio(32000, 512) == 32 * 512 * 32000 / (20480000 + 524288)
    shared = DPQConfig(K=32, D=128, share_subspaces=True)
    assert shared.compact_bits(32000, 512) == 32000 * 640 + 32 * 32 * 4
    # K = 5 takes 3 bits
    assert DPQConfig(K=5, D=2).compact_bits(10, 4) == 10 * 2 * 3 + 32 * 5 * 4
    assert DPQEmbedding(10, 4, K=5, D=2).compression_ratio() == 32 * 40 / 700


def test_defaults_follow_the_method() -> None:
    sx, vq = METHODS["sx"], METHODS["vq"]
    assert sx.distance(DPQConfig()).name == "dot"
    assert vq.distance(DPQConfig(method="vq")).name == "euclidean"
    assert sx.shapes(DPQConfig(D=4), 10, 32)["keys"] == (4, 32, 8)
    assert sx.shapes(DPQConfig(D=4, key_dim=3), 10, 32)["keys"] == (4, 32, 3)


def test_plugin_options_include_the_layers() -> None:
    layer = {field.name for field in dataclasses.fields(DPQConfig)}
    plugin = PluginConfig(K=8, D=4, decoder_K=16, tau=0.5)
    assert set(plugin.layer_options()) == layer
    assert plugin.table_config(decoder=False) == DPQConfig(K=8, D=4, tau=0.5)
    assert plugin.table_config(decoder=True) == DPQConfig(K=16, D=4, tau=0.5)
    assert not PluginConfig().enabled and plugin.enabled
    assert all(field.metadata["help"] for field in dataclasses.fields(PluginConfig))


def test_D_that_is_left_out_divides_the_embedding_size() -> None:
    assert DPQConfig().D is None
    assert DPQEmbedding(10, 512).config.D == 16
    layer = DPQEmbedding(10, 200, K=8)
    assert layer.config.D == 20 and tuple(layer.values.shape) == (20, 8, 10)
    assert tuple(layer.eval().codes().shape) == (10, 20)
    # 20 codes of 3 bits a row and 8 * 200 values
    assert DPQConfig(K=8).compact_bits(10, 200) == 10 * 60 + 32 * 8 * 200
    assert DPQConfig(method="low_rank", rank=2).resolved(embedding_dim=200).D is None
    with pytest.raises(DPQConfigError, match="D=16 does not divide embedding_dim=200"):
        DPQEmbedding(10, 200, D=16)
