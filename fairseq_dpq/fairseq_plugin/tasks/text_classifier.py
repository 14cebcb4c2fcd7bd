"""The text classifier of the paper: the mean of a document's word vectors, then two dense layers.
`--arch text_classifier`, with `--task text_classification`."""

# No `from __future__ import annotations`: fairseq reads the dataclass field types at run time.

from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Optional, Tuple

import torch
import torch.distributed as dist
from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import FairseqEncoder, FairseqEncoderModel, register_model
from torch import Tensor, nn

from fairseq_dpq.config import DPQConfigError

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
        nn.init.zeros_(self.embed_tokens.weight[self.pad])
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


class BatchNorm(nn.Module):
    """Normalises (documents, size) by the batch in training, by running statistics in evaluation,
    which are the same with any number of workers. nn.BatchNorm1d keeps those of one worker, and its
    last micro-batch counts most.

    `step()`, after each update, lets the running statistics follow the micro-batches of all
    workers since the last call. A batch of one document is allowed: it normalises to zero.
    """

    running_mean: Tensor
    running_var: Tensor
    updates: Tensor

    def __init__(self, size: int, eps: float = 1e-3, momentum: float = 0.99) -> None:
        super().__init__()
        self.eps = eps
        self.momentum = momentum
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.register_buffer("running_mean", torch.zeros(size))
        self.register_buffer("running_var", torch.ones(size))
        # A float, because weight averaging (EMA, averaged checkpoints) takes no integers.
        self.register_buffer("updates", torch.zeros(()))
        self._sums: Optional[Tensor] = None  # (2, size + 1): sums of x and of x^2, and their count

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        if self.training:
            mean, var = h.mean(0), h.var(0, unbiased=False)
            self._collect(len(h), mean.detach().double(), var.detach().double())
        else:
            mean, var = self.running_mean, self.running_var
        scale = self.weight.float() * torch.rsqrt(var + self.eps)
        return ((h - mean) * scale + self.bias.float()).to(x.dtype)

    def _collect(self, count: int, mean: Tensor, var: Tensor) -> None:
        sums = torch.stack([mean, var + mean * mean]) * count
        sums = torch.cat([sums, sums.new_full((2, 1), count)], dim=1)
        self._sums = sums if self._sums is None else self._sums + sums

    @torch.no_grad()
    def step(self) -> None:
        """Let the running statistics follow; all workers call it alike."""
        if self._sums is None:
            self._sums = self.running_mean.new_zeros(2, len(self.bias) + 1).double()
        sums, self._sums = self._sums, None
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums)
        count = sums[0, -1]
        if not count:
            return
        mean, square = sums[:, :-1] / count
        var = (square - mean * mean).clamp_min(0)
        self.updates += 1
        # A plain average at first, so that the initial 0 and 1 leave no trace.
        rate = max(1 / float(self.updates), 1 - self.momentum)
        self.running_mean += (rate * (mean - self.running_mean)).float()
        self.running_var += (rate * (var - self.running_var)).float()

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> "BatchNorm":
        super()._apply(fn, *args, **kwargs)
        # Running statistics stay float32: they move in steps too small for half precision.
        for name, buffer in self.named_buffers():
            setattr(self, name, buffer.float())
        self._sums = None
        return self


def step_all(model: nn.Module) -> None:
    """Let the statistics of every such layer of a model follow an update."""
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.step()


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
        self.args = None  # fairseq 0.12.2's sentence_prediction looks into it
        self.classification_heads = nn.ModuleDict({HEAD: head})

    @classmethod
    def build_model(cls, cfg: TextClassifierConfig, task: Any) -> "TextClassifier":
        classes = getattr(task, "classes", None)
        if classes is None:
            raise DPQConfigError(
                "--arch text_classifier needs labels; use it with --task text_classification"
            )
        if min(cfg.encoder_embed_dim, cfg.hidden_size) < 1:
            raise DPQConfigError("--encoder-embed-dim and --hidden-size must be 1 or more; try 300")
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
