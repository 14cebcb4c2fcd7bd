"""The three lines of every tool, and the outlook on what stays full."""

from __future__ import annotations

from fairseq_dpq.size_report import Change, Left, outlook, size_lines


def test_the_embeddings_then_the_model_then_the_file() -> None:
    """What was once called 3.1x smaller: most of it was the optimiser's state."""
    lines = size_lines(
        Change(4_000_000, 1_400_000), Change(131_700_000, 129_100_000), Change(395, 129), "note"
    )
    assert lines == [
        "embeddings    4,000,000 ->   1,400,000 bytes, 2.86x smaller (3.0 % of the model)",
        "model       131,700,000 -> 129,100,000 bytes, 1.02x smaller (without optimiser state)",
        "file                395 ->         129 bytes, 3.06x smaller (note)",
    ]


def test_a_file_that_stays_and_one_that_grows() -> None:
    assert size_lines(Change(100, 200), None, Change(1000, 1000)) == [
        "embeddings    100 ->   200 bytes, 2.00x larger",
        "file        1,000 bytes",
    ]


def test_outlook_is_cumulative() -> None:
    left = [Left("b", 300, 30, "--this"), Left("c", 300, 0, "--that")]
    assert outlook(Change(1000, 730), left) == [
        "b stays full (30.0 % of the model); with --this the model would be 2.17x smaller",
        "c stays full (30.0 % of the model); with --that the model would be 6.25x smaller",
    ]
