"""Extractive question answering, SQuAD 1.1 and 2.0: `--task squad --criterion squad_span --arch
roberta_qa`.
An input is `<s> question </s> </s> part of the context </s>`; long contexts have several parts."""

# No `from __future__ import annotations`: fairseq reads the dataclass field types at run time.

import logging
from dataclasses import dataclass, field
from typing import Any, Dict, List, Tuple

import numpy as np
import torch
import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.data import Dictionary, data_utils
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.models import register_model, register_model_architecture
from fairseq.models.roberta import RobertaModel
from fairseq.models.roberta.model import base_architecture
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II, MISSING
from torch import Tensor, nn

from fairseq_dpq.config import DPQConfigError

from .examples import Examples, FolderTask

logger = logging.getLogger(__name__)
SPECIALS = 4  # <s>, </s> after the question, </s> before and after the context


def window_starts(length: int, room: int, stride: int) -> List[int]:
    """First pieces of the parts of a context of `length` pieces, `room` in each."""
    step = min(room, stride)
    return list(range(0, max(length - room, 0) + step, step))


@dataclass
class SquadConfig(FairseqDataclass):
    data: str = field(default=MISSING, metadata={"help": "path to data directory"})
    tokens_per_sample: int = field(
        default=384, metadata={"help": "longest input: question, part of the context and specials"}
    )
    doc_stride: int = field(
        default=128, metadata={"help": "pieces between the starts of two parts of a context"}
    )
    query_length: int = field(
        default=64, metadata={"help": "longest question in pieces; the rest is cut off"}
    )
    seed: int = II("common.seed")


class SquadDataset(Examples):
    """The windows of a split; `questions` and `contexts` end in `eos`, which is left out.

    `spans` has the first and last piece of each answer in its context, or (-1, -1). A window that
    does not show the whole answer has the target (0, 0): the position of `<s>`.
    """

    def __init__(
        self,
        questions: Any,
        contexts: Any,
        spans: np.ndarray,
        dictionary: Dictionary,
        cfg: SquadConfig,
        shuffle: bool,
    ) -> None:
        self.questions, self.contexts, self.spans = questions, contexts, spans
        self.bos, self.eos = dictionary.bos(), dictionary.eos()
        self.cfg, self.shuffle = cfg, shuffle
        self.windows: List[Tuple[int, int, int]] = []  # example, first piece, pieces of the context
        sizes = []
        for example, (length, total) in enumerate(zip(questions.sizes - 1, contexts.sizes - 1)):
            taken = SPECIALS + min(int(length), cfg.query_length)
            room = cfg.tokens_per_sample - taken
            for first in window_starts(int(total), room, cfg.doc_stride):
                shown = min(room, int(total) - first)
                self.windows.append((example, first, shown))
                sizes.append(taken + shown)
        super().__init__(sizes, dictionary.pad())

    def __getitem__(self, index: int) -> Dict[str, Any]:
        """An input; `context` is the place and the length of the context in it."""
        example, first, shown = self.windows[index]
        question = self.questions[example][:-1][: self.cfg.query_length]
        context = self.contexts[example][:-1][first : first + shown]
        eos = question.new_tensor([self.eos])
        parts = [question.new_tensor([self.bos]), question, eos, eos, context, eos]
        place = SPECIALS - 1 + len(question)
        start, end = (int(piece) - first for piece in self.spans[example])
        inside = start >= 0 and end < shown
        return {
            "id": index,
            "tokens": torch.cat(parts).long(),
            "target": [start + place, end + place] if inside else [0, 0],
            "context": (place, shown),
        }

    def ordered_indices(self) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self))
        with data_utils.numpy_seed(self.cfg.seed):
            return np.random.permutation(len(self))


@register_task("squad", dataclass=SquadConfig)
class SquadTask(FolderTask):
    """Fine-tune a pre-trained model of `--task masked_lm` to find answers.

    The data folder is made by scripts/prepare.sh squad1 or squad2; fairseq-dpq-squad predicts.
    """

    def __init__(self, cfg: SquadConfig, **kwargs: Any) -> None:
        super().__init__(cfg, **kwargs)
        room = cfg.tokens_per_sample - cfg.query_length - SPECIALS
        if min(cfg.doc_stride, cfg.query_length, room) < 1:
            raise DPQConfigError(
                f"--doc-stride {cfg.doc_stride} --query-length {cfg.query_length} "
                f"--tokens-per-sample {cfg.tokens_per_sample}: all must be positive, and the last "
                f"leave room for a context beside the question and {SPECIALS} specials"
            )
        self.dictionary = self.read_dictionary("question")
        self.dictionary.add_symbol("<mask>")  # as masked_lm has it, which pre-trained the table

    def max_positions(self) -> int:
        return int(self.cfg.tokens_per_sample)

    def load_dataset(self, split: str, epoch: int = 1, **kwargs: Any) -> None:
        questions, contexts = (
            self.read_split(part, split, self.dictionary) for part in ("question", "context")
        )
        spans = np.loadtxt(self.path(f"{split}.spans"), dtype=np.int64, ndmin=2)
        if not len(questions) == len(contexts) == len(spans):
            raise DPQConfigError(
                f"{self.cfg.data}: {split} has {len(questions)} questions, {len(contexts)} "
                f"contexts and {len(spans)} answers; prepare it again"
            )
        dataset = SquadDataset(
            questions, contexts, spans, self.dictionary, self.cfg, split.startswith("train")
        )
        logger.info("%s: %d questions, %d windows", split, len(spans), len(dataset))
        self.datasets[split] = dataset

    def build_model(self, cfg: Any, *args: Any, **kwargs: Any) -> Any:
        model = super().build_model(cfg, *args, **kwargs)
        if not hasattr(model, "span_head"):
            raise DPQConfigError(
                f"{type(model).__name__} has no head for spans; with --task squad use "
                "--arch roberta_qa"
            )
        if model.max_positions() < self.cfg.tokens_per_sample:
            raise DPQConfigError(
                f"--tokens-per-sample {self.cfg.tokens_per_sample} is more than the model's "
                f"--max-positions {model.max_positions()}; give that or less"
            )
        return model


@register_model("roberta_qa")
class RobertaForQuestionAnswering(RobertaModel):
    """RoBERTa with the head of extractive question answering, `--arch roberta_qa`: its output is
    (batch, length, 2), the logits that the answer starts at a piece, and that it ends there.

    A pre-trained checkpoint without the head loads too: the head then keeps its initial values.
    """

    def __init__(self, args: Any, encoder: Any) -> None:
        super().__init__(args, encoder)
        self.span_head = nn.Linear(args.encoder_embed_dim, 2)
        nn.init.normal_(self.span_head.weight, std=0.02)
        nn.init.zeros_(self.span_head.bias)

    def forward(self, src_tokens: Tensor, **kwargs: Any) -> Tuple[Tensor, Any]:
        kwargs["features_only"] = True
        features, extra = super().forward(src_tokens, **kwargs)
        return self.span_head(features), extra

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> None:
        super().upgrade_state_dict_named(state_dict, name)
        prefix = f"{name}." if name else ""
        for key, tensor in self.span_head.state_dict().items():
            state_dict.setdefault(f"{prefix}span_head.{key}", tensor)


register_model_architecture("roberta_qa", "roberta_qa")(base_architecture)


def span_logits(model: Any, sample: Dict[str, Any], pad: int) -> Tensor:
    """(batch, length, 2) in float32; padding is minus infinity."""
    logits, _ = model(**sample["net_input"])
    padding = sample["net_input"]["src_tokens"].eq(pad)
    masked: Tensor = logits.float().masked_fill(padding.unsqueeze(-1), float("-inf"))
    return masked


@register_criterion("squad_span")
class SquadSpanCriterion(FairseqCriterion):
    """Mean of the cross-entropies of start and end; `accuracy` counts windows with both right."""

    def __init__(self, task: FairseqTask) -> None:
        super().__init__(task)
        self.pad = task.source_dictionary.pad()

    def forward(
        self, model: Any, sample: Dict[str, Any], reduce: bool = True
    ) -> Tuple[Tensor, int, Dict[str, Any]]:
        logits = span_logits(model, sample, self.pad)
        target = sample["target"]
        losses = F.cross_entropy(logits, target, reduction="none").mean(dim=1)  # (batch,)
        loss = losses.sum() if reduce else losses
        right = logits.detach().argmax(dim=1).eq(target).all(dim=1).sum()
        log = {
            "loss": loss.detach(),
            "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"],
            "sample_size": sample["nsentences"],
            "ncorrect": right,
        }
        return loss, sample["nsentences"], log

    @classmethod
    def reduce_metrics(cls, logging_outputs: List[Dict[str, Any]]) -> None:
        names = ("loss", "ncorrect", "sample_size")
        loss, right, size = (sum(log.get(name, 0) for log in logging_outputs) for name in names)
        metrics.log_scalar("loss", loss / size / np.log(2), size, round=3)
        metrics.log_scalar("accuracy", 100.0 * right / size, size, round=1)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True
