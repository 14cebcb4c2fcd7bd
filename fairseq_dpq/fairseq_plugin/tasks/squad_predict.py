"""Answers of a trained model to the questions of a prepared split of SQuAD."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

import torch

from fairseq_dpq.fairseq_plugin.tasks.squad import span_logits
from fairseq_dpq.fairseq_plugin.tasks.squad_answers import Answer, Window, n_best, null_odds


@dataclass(frozen=True)
class Prediction:
    """The n best spans of a question, and how much the null answer scores above the best."""

    id: str
    answers: list[Answer]
    odds: float
    golds: list[str]

    def text(self, threshold: float | None) -> str:
        """The answer; with a threshold, none where the null answer is that much better."""
        if not self.answers or (threshold is not None and self.odds > threshold):
            return ""
        return self.answers[0].text


def read_examples(path: Path) -> Iterator[dict[str, Any]]:
    """The questions of a split, in its order."""
    with open(path, encoding="utf-8", newline="\n") as stream:
        for line in stream:
            yield json.loads(line)


@torch.no_grad()
def _windows(model: Any, dataset: Any, batch_size: int, device: torch.device) -> Iterator[Window]:
    """The logits of every window of a split, in its order."""
    for start in range(0, len(dataset), batch_size):
        items = [dataset[i] for i in range(start, min(start + batch_size, len(dataset)))]
        batch = dataset.collater(items)
        batch["net_input"] = {k: v.to(device) for k, v in batch["net_input"].items()}
        logits = span_logits(model, batch, dataset.pad).cpu()  # (batch, length, 2)
        for row, (place, shown) in enumerate(batch["context"].tolist()):
            part = logits[row, place : place + shown]
            yield Window(
                first=dataset.windows[start + row][1],
                starts=part[:, 0].tolist(),
                ends=part[:, 1].tolist(),
                null=float(logits[row, 0].sum()),
            )


def predict(
    model: Any,
    task: Any,
    subset: str = "valid",
    n: int = 20,
    longest: int = 30,
    batch_size: int = 16,
    device: str = "cpu",
) -> Iterator[Prediction]:
    """Answers to all questions of a split of the task's data."""
    where = torch.device(device)
    model = model.to(where).eval()
    task.load_dataset(subset)
    dataset = task.dataset(subset)
    found = _windows(model, dataset, batch_size, where)
    number = 0
    for example, item in enumerate(read_examples(Path(task.cfg.data) / f"{subset}.examples.jsonl")):
        windows = []
        while number < len(dataset) and dataset.windows[number][0] == example:
            windows.append(next(found))
            number += 1
        answers = n_best(item["context"], item["offsets"], windows, n, longest)
        yield Prediction(item["id"], answers, null_odds(windows, answers), item["answers"])
