"""Which token tables `--dpq-embeddings` selects, in a model and in a checkpoint.

A table is given as the list of its module paths: a shared table has several. This module does not
import fairseq, so that the tools can use it alone."""

from __future__ import annotations

from typing import Sequence

from fairseq_dpq.config import DPQConfigError

Paths = Sequence[str]

# Output layers by the last part of their path, and how each is tied to its token table.
TIED_BY = {
    "output_projection": "--share-decoder-input-output-embed",
    "fc_out": "--share-decoder-input-output-embed",
    "fc3": "--share-input-output-embed",
    "lm_head": "--untie-weights-roberta left out",
    "embed_out": "--share-encoder-input-output-embed",
}


def in_decoder(path: str) -> bool:
    """Whether a path is in a decoder: `decoder.embed_tokens`, `decoders.de.embed_tokens`."""
    return any(part.startswith("decoder") for part in path.split("."))


def decoder_only(paths: Paths) -> bool:
    """Whether a table belongs to decoders only, and not also to an encoder."""
    return all(in_decoder(path) for path in paths)


def choose(tables: Sequence[Paths], wanted: str, flag: str) -> list[int]:
    """The indices of the chosen tables; `flag` is the name of the option in errors."""
    wanted = wanted.strip()
    everything = list(range(len(tables)))
    if wanted == "all":
        return everything
    if wanted == "input":
        return [i for i in everything if not decoder_only(tables[i])] or everything
    if wanted == "decoder":
        chosen = [i for i in everything if any(in_decoder(path) for path in tables[i])]
        if not chosen:
            raise DPQConfigError(
                f"{flag} {wanted}: this model has no decoder table; it has "
                + ", ".join(paths[0] for paths in tables)
            )
        return chosen
    chosen = []
    for path in (part.strip() for part in wanted.split(",")):
        match = next((i for i in everything if path in tables[i]), None)
        if match is None:
            raise DPQConfigError(
                f"{flag} {wanted}: no token table at {path!r}; choose input, decoder, all, or one "
                "of " + ", ".join(p for paths in tables for p in paths)
            )
        if match not in chosen:
            chosen.append(match)
    return chosen
