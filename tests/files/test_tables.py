"""Which layers of a file share a table: by memory, else by equal numbers and the model's flags."""

from __future__ import annotations

import pytest
import torch

from fairseq_dpq.files.tables import token_tables

OUTPUTS = ["decoder.fc3", "decoder.output_projection"]


@pytest.mark.parametrize(
    ("flags", "tied"),
    [
        ({}, []),
        ({"share_decoder_input_output_embed": True}, OUTPUTS),
        ({"share_encoder_input_output_embed": True}, []),
        ({"share_input_output_embed": True}, OUTPUTS),
        ({"share_all_embeddings": True}, [*OUTPUTS, "encoder.embed_tokens"]),
    ],
)
def test_flags_tell_a_tie_from_tables_that_are_equal(flags: dict, tied: list[str]) -> None:
    table = torch.randn(6, 4)
    own, others = "decoder.embed_tokens", [*OUTPUTS, "encoder.embed_tokens"]
    weights = {f"{name}.weight": table.clone() for name in [own, *others]}

    def shared() -> list[str]:
        (found,) = (f for f in token_tables(weights, flags) if own in f.paths)
        return sorted({*found.paths, *found.tied} - {own})

    assert shared() == tied
    assert (len(token_tables(weights, flags)) == 1) == ("share_all_embeddings" in flags)
    weights["decoder.fc3.weight"][0, 0] += 1
    assert shared() == [name for name in tied if name != "decoder.fc3"]
    weights["encoder.embed_tokens.weight"] = weights["decoder.embed_tokens.weight"]
    assert len(token_tables(weights, flags)) == 1  # one memory, whatever the flags
