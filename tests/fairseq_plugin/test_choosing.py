"""Which tables `--dpq-embeddings` means, by their module paths."""

from __future__ import annotations

import pytest
from torch import nn

from fairseq_dpq import DPQConfigError
from fairseq_dpq.fairseq_plugin.options import choose, decoder_only, in_decoder
from fairseq_dpq.model import EmbeddingTable

SEPARATE = [["encoder.embed_tokens"], ["decoder.embed_tokens"]]
SHARED = [["encoder.embed_tokens", "decoder.embed_tokens"]]
LANGUAGE_MODEL = [["decoder.embed_tokens"]]
MANY = [["models.en-de.encoder.embed_tokens"], ["models.en-de.decoders.de.embed_tokens"]]


def tables(paths: list[list[str]]) -> list[EmbeddingTable]:
    return [EmbeddingTable({path: nn.Identity() for path in some}, None) for some in paths]


@pytest.mark.parametrize(
    ("paths", "wanted", "chosen"),
    [
        (SEPARATE, "input", [0]),
        (SEPARATE, "decoder", [1]),
        (SEPARATE, "all", [0, 1]),
        (SEPARATE, " decoder.embed_tokens , encoder.embed_tokens", [1, 0]),
        (SHARED, "input", [0]),
        (SHARED, "decoder", [0]),
        (SHARED, "decoder.embed_tokens,encoder.embed_tokens", [0]),
        (LANGUAGE_MODEL, "input", [0]),
        (MANY, "input", [0]),
        (MANY, "decoder", [1]),
    ],
)
def test_choose(paths: list, wanted: str, chosen: list[int]) -> None:
    assert [found.paths for found in choose(tables(paths), wanted)] == [paths[i] for i in chosen]


def test_a_shared_table_is_not_the_decoders_alone() -> None:
    assert in_decoder("decoders.de.embed_tokens") and not in_decoder("encoder.embed_tokens")
    assert [decoder_only(paths) for paths in (*SEPARATE, *SHARED)] == [False, True, False]


def test_errors_name_the_flag_and_the_tables() -> None:
    with pytest.raises(
        DPQConfigError, match=r"--dpq-embeddings decoder: .*it has encoder\.embed_tok"
    ):
        choose(tables(SEPARATE[:1]), "decoder")
    with pytest.raises(DPQConfigError, match=r"at 'x'; .* encoder\.embed_tokens, decoder\.embed_"):
        choose(tables(SEPARATE), "x")
    with pytest.raises(DPQConfigError, match=r"--dpq-embeddings input: .*it has none"):
        choose([], "input")
