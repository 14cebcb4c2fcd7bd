"""RoBERTa with the head of extractive question answering: `--arch roberta_qa`.
Each piece gets two logits: that the answer starts there, and that it ends there."""

from __future__ import annotations

from typing import Any

from fairseq.models import register_model, register_model_architecture
from fairseq.models.roberta import RobertaModel
from fairseq.models.roberta.model import base_architecture
from torch import Tensor, nn


@register_model("roberta_qa")
class RobertaForQuestionAnswering(RobertaModel):
    """A RobertaModel whose output is (batch, length, 2): start and end logits.

    A pre-trained checkpoint without the head loads too: the head then keeps its initial values.
    """

    def __init__(self, args: Any, encoder: Any) -> None:
        super().__init__(args, encoder)
        self.span_head = nn.Linear(args.encoder_embed_dim, 2)
        nn.init.normal_(self.span_head.weight, std=0.02)
        nn.init.zeros_(self.span_head.bias)

    def forward(self, src_tokens: Tensor, **kwargs: Any) -> tuple[Tensor, Any]:
        kwargs["features_only"] = True
        features, extra = super().forward(src_tokens, **kwargs)
        return self.span_head(features), extra

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        super().upgrade_state_dict_named(state_dict, name)
        prefix = f"{name}." if name else ""
        for key, tensor in self.span_head.state_dict().items():
            state_dict.setdefault(f"{prefix}span_head.{key}", tensor)


@register_model_architecture("roberta_qa", "roberta_qa")
def roberta_qa(args: Any) -> None:
    """The sizes of RoBERTa base."""
    base_architecture(args)
