"""The text classifier of the paper: the mean of a document's word vectors, then two dense layers.
`--arch text_classifier`, with `--task text_classification`."""

# No `from __future__ import annotations`: fairseq reads the dataclass field types at run time.

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Tuple

import torch
from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import FairseqEncoder, FairseqEncoderModel, register_model
from torch import Tensor, nn

from fairseq_dpq.config import DPQConfigError
from fairseq_dpq.fairseq_plugin.models.batch_norm import BatchNorm

POOLING = ChoiceEnum(["mean", "mean_max"])
HEAD = "sentence_classification_head"  # the default of --criterion sentence_prediction


@dataclass
class TextClassifierConfig(FairseqDataclass):
    encoder_embed_dim: int = field(default=300, metadata={"help": "embedding size d"})
    hidden_size: int = field(default=300, metadata={"help": "units of the hidden layer"})
    dropout: float = field(default=0.0, metadata={"help": "dropout before each dense layer"})
    pooling: POOLING = field(  # type: ignore[valid-type]
        default="mean",
        metadata={"help": "mean: the mean of the word vectors; mean_max: and their maximum"},
    )


class WordVectorPooling(FairseqEncoder):
    """Word vectors of a document, pooled. A document without words has the zero vector.

    Each distinct word of a batch is looked up once, which saves most of the work on long documents.
    The statistics of a DPQ table therefore count distinct words, not tokens.
    """

    def __init__(self, cfg: TextClassifierConfig, dictionary: Dictionary) -> None:
        super().__init__(dictionary)
        self.pad = dictionary.pad()
        d = cfg.encoder_embed_dim
        self.embed_tokens = nn.Embedding(len(dictionary), d, padding_idx=self.pad)
        nn.init.xavier_uniform_(self.embed_tokens.weight)
        with torch.no_grad():
            self.embed_tokens.weight[self.pad].zero_()
        self.with_maximum = str(cfg.pooling) == "mean_max"
        self.size = 2 * d if self.with_maximum else d

    def forward(self, src_tokens: Tensor, src_lengths: Optional[Tensor] = None) -> Tensor:
        words = src_tokens.ne(self.pad)  # (documents, length)
        distinct, place = torch.unique(src_tokens, return_inverse=True)
        vectors = self.embed_tokens(distinct).float()  # (distinct words, d)
        share = words / words.sum(1, keepdim=True).clamp_min(1)
        weights = vectors.new_zeros(src_tokens.shape[0], len(distinct))
        mean = weights.scatter_add(1, place, share.float()) @ vectors
        if not self.with_maximum:
            return mean
        own = vectors[place].masked_fill(~words.unsqueeze(-1), -torch.inf)  # (documents, length, d)
        maximum = own.amax(1).masked_fill(~words.any(1, keepdim=True), 0)
        return torch.cat([mean, maximum], dim=1)

    def max_positions(self) -> int:
        """A mean has no maximum length."""
        return int(1e9)


class DenseLayers(nn.Module):
    """Batch norm, ReLU, dense, batch norm, ReLU, dense: (documents, size) to (documents, C)."""

    def __init__(self, size: int, hidden: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = BatchNorm(size)
        self.dense1 = nn.Linear(size, hidden)
        self.norm2 = BatchNorm(hidden)
        self.dense2 = nn.Linear(hidden, classes)
        self.dropout = nn.Dropout(dropout)
        for dense in (self.dense1, self.dense2):
            nn.init.xavier_uniform_(dense.weight)
            nn.init.zeros_(dense.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x).to(self.dense1.weight.dtype)
        x = self.dense1(self.dropout(torch.relu(x)))
        return self.dense2(self.dropout(torch.relu(self.norm2(x))))


@register_model("text_classifier", dataclass=TextClassifierConfig)
class TextClassifier(FairseqEncoderModel):
    """`--arch text_classifier`. Its head has the name that `--criterion sentence_prediction` looks
    for; criteria such as cross_entropy use it too."""

    def __init__(self, encoder: WordVectorPooling, head: DenseLayers) -> None:
        super().__init__(encoder)
        self.classification_heads = nn.ModuleDict({HEAD: head})

    @classmethod
    def build_model(cls, cfg: TextClassifierConfig, task: Any) -> "TextClassifier":
        classes = getattr(task, "classes", None)
        if classes is None:
            raise DPQConfigError(
                "--arch text_classifier needs labels; use it with --task text_classification"
            )
        for name in ("encoder_embed_dim", "hidden_size"):
            if getattr(cfg, name) < 1:
                flag = "--" + name.replace("_", "-")
                raise DPQConfigError(f"{flag} {getattr(cfg, name)}: must be 1 or more; try 300")
        encoder = WordVectorPooling(cfg, task.source_dictionary)
        head = DenseLayers(encoder.size, cfg.hidden_size, len(classes), cfg.dropout)
        return cls(encoder, head)

    def forward(  # type: ignore[override]
        self,
        src_tokens: Tensor,
        src_lengths: Optional[Tensor] = None,
        features_only: bool = False,
        classification_head_name: str = HEAD,
    ) -> Tuple[Tensor, Dict[str, Any]]:
        """Logits (documents, C). The other arguments are those of `sentence_prediction`."""
        pooled = self.encoder(src_tokens, src_lengths)
        return self.classification_heads[classification_head_name](pooled), {}

    def get_normalized_probs(
        self, net_output: Any, log_probs: bool, sample: Optional[Dict[str, Any]] = None
    ) -> Tensor:
        logits = net_output[0].float()
        return logits.log_softmax(-1) if log_probs else logits.softmax(-1)

    def get_targets(self, sample: Dict[str, Any], net_output: List[Any]) -> Tensor:
        return sample["target"]
