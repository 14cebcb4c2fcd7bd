"""The loop of fairseq-train, one update at a time: several runs can take turns in one process."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Iterator, Sequence

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


class FairseqRun:
    """The body of fairseq-train's loop over updates, with its trainer, iterators and metrics."""

    def __init__(self, argv: list[str]) -> None:
        """`argv`: the arguments of fairseq-train, but for those that every benchmark has."""
        from fairseq import options, tasks
        from fairseq.dataclass.utils import convert_namespace_to_omegaconf
        from fairseq.trainer import Trainer

        argv = [*argv, "--user-dir", user_dir(), "--cpu", "--no-save", "--disable-validation"]
        argv += ["--log-format", "simple", "--log-interval", "100"]
        with patched_argv(["fairseq-train", *argv]):
            parser = options.get_training_parser()
            self.cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, argv))
        torch.manual_seed(1)
        self.task = tasks.setup_task(self.cfg.task)
        model = self.task.build_model(self.cfg.model)
        criterion = self.task.build_criterion(self.cfg.criterion)
        self.trainer = Trainer(self.cfg, self.task, model, criterion)
        self.epoch_itr = self.trainer.get_train_iterator(epoch=1)
        self._begin()

    def _begin(self) -> None:
        from fairseq.data import iterators
        from fairseq.logging import progress_bar

        itr = iterators.GroupedIterator(self.epoch_itr.next_epoch_itr(), 1)
        self.progress = iter(
            progress_bar.progress_bar(
                itr, log_format="simple", log_interval=100, epoch=self.epoch_itr.epoch
            )
        )
        self.trainer.begin_epoch(self.epoch_itr.epoch)

    def step(self) -> int:
        """One update; the number of tokens it saw."""
        from fairseq.logging import metrics
        from fairseq_cli.train import validate_and_save

        try:
            samples = next(self.progress)
        except StopIteration:
            self._begin()
            samples = next(self.progress)
        with metrics.aggregate("train"), metrics.aggregate("train_inner"):
            self.trainer.train_step(samples)
        if self.trainer.get_num_updates() % 100 == 0:
            metrics.get_smoothed_values("train_inner")
            metrics.reset_meters("train_inner")
        validate_and_save(self.cfg, self.trainer, self.task, self.epoch_itr, ["valid"], False)
        return int(samples[0]["ntokens"])


def make_corpus(
    folder: Path, split: str, languages: Sequence[str], types: int, lengths: Sequence[int]
) -> None:
    """A binarised text, or a parallel one, with lines of these lengths. The words follow Zipf's
    law."""
    from fairseq.data import Dictionary, indexed_dataset

    generator = torch.Generator().manual_seed(1)
    weights = 1.0 / torch.arange(1, types - 3, dtype=torch.float)
    pair = f".{'-'.join(languages)}" if languages else ""
    for lang in languages or [""]:
        dictionary = Dictionary()
        for i in range(types - 4):
            dictionary.add_symbol(f"w{i}", n=types - i)
        ending = f".{lang}" if lang else ""
        dictionary.save(str(folder / f"dict{ending}.txt"))
        stem = str(folder / f"{split}{pair}{ending}")
        builder = indexed_dataset.make_builder(f"{stem}.bin", impl="mmap", vocab_size=types)
        draw = torch.multinomial(weights, sum(lengths), replacement=True, generator=generator)
        for words in (draw + 4).split(list(lengths)):
            builder.add_item(torch.cat([words, torch.tensor([dictionary.eos()])]).int())
        builder.finalize(f"{stem}.idx")


@contextlib.contextmanager
def patched_argv(argv: list[str]) -> Iterator[None]:
    """Stand-in for sys.argv while fairseq parses."""
    old, sys.argv = sys.argv, argv
    try:
        yield
    finally:
        sys.argv = old


def user_dir() -> str:
    """The directory of the package that is imported."""
    import fairseq_dpq

    return str(Path(fairseq_dpq.__file__).parent)
