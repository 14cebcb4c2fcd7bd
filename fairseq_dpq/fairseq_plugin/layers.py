"""The two table forms as fairseq modules, and output layers that share a table."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_dpq.config import DPQConfigError
from fairseq_dpq.forms import FORMS
from fairseq_dpq.forms.base import Form
from fairseq_dpq.kept import Built, TableCache
from fairseq_dpq.layer import DPQEmbedding
from fairseq_dpq.methods.base import MethodOptions, TableUse
from fairseq_dpq.output import StoredWeight
from fairseq_dpq.tracing import is_tracing
from fairseq_dpq.training.codebook import RegularizerTerm
from fairseq_dpq.training.trackers import TrackerSet

logger = logging.getLogger("fairseq_dpq")


class _LoadsInFairseq:
    """Loading in fairseq's manner, for both forms.

    Some models (bart) read `<name>.weight` of the state dict to learn the vocabulary's size before
    they load it. They get an empty stand-in, which is taken out again before it could be loaded.
    """

    num_embeddings: int

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        state_dict.setdefault(f"{name}.weight", torch.empty(self.num_embeddings, 0))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict.pop(prefix + "weight", None)
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]


class FairseqDPQEmbedding(_LoadsInFairseq, DPQEmbedding):
    """A DPQ table inside a fairseq model; a full table that is loaded into it becomes its start."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, option_files=False, **kwargs)
        self.defer_updates = True  # statistics follow each update, not each micro-batch
        # The options as they were given, while the length of the training is not known.
        self.open_schedule: tuple[MethodOptions, TableUse] | None = None

    def forward(self, indices: Tensor) -> Tensor:
        out = super().forward(indices)
        watched = self.method.regularized and self._frozen_codes is None  # not in generation
        if watched and not self.training and not torch.is_grad_enabled():
            self._note_regularizer(indices.reshape(-1), out)
        return out

    def set_schedule(self, config: MethodOptions, started: bool) -> None:
        """Options with another length of the warm-up and of the ramp, before the first update;
        `started` if a trained table has made the warm-up needless."""
        self.config = config
        shapes = self.method.shapes(config, self.num_embeddings, self.embedding_dim)
        self.trackers = TrackerSet(self.method.trackers(config, shapes))
        for tracker in self.trackers:
            if tracker.always:
                tracker.reset(self.codebook(), started)

    def _note_regularizer(self, tokens: Tensor, out: Tensor) -> None:
        """Keep the regulariser of a validation batch for the log; it enters no loss."""
        out = out.reshape(tokens.numel(), -1).float()
        if self.ignored is not None:
            real = tokens != self.ignored
            tokens, out = tokens[real], out[real]
        if tokens.numel():
            error = (out - F.embedding(tokens, self.query).float()).pow(2).sum()
            self.regularizers.waiting.append(RegularizerTerm(error, error, out.numel()))

    @property
    def weight(self) -> Tensor:
        """The table for a tied output layer."""
        table = super().weight
        return table if is_tracing() else as_of_full_model(table)

    def make_generation_fast_(self, **kwargs: Any) -> None:
        self.freeze()  # fairseq calls its own eval() after this, which keeps the codes

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        full = state_dict.get(f"{name}.weight")
        if any(f"{name}.{form.signature_tensor}" in state_dict for form in FORMS.values()):
            raise DPQConfigError(
                f"{name} is compact in this checkpoint: what training needs is gone. Restore the "
                "training checkpoint it was made from"
            )
        if f"{name}.query" in state_dict:
            self._adapt_state(state_dict, f"{name}.")
        elif full is not None and full.shape == (self.num_embeddings, self.embedding_dim):
            instead = " instead of a warm-up" if self.schedule_counts()[1] else ""
            text = f"k-means of the full table in the checkpoint is the start{instead}"
            logger.info(f"{name}: {text}")
            start = self._start_state(full)
            state_dict.update({f"{name}.{key}": tensor for key, tensor in start.items()})
        super().upgrade_state_dict_named(state_dict, name)

    def _adapt_state(self, state_dict: dict[str, Tensor], prefix: str) -> None:
        """Start what options add that the checkpoint was trained without, drop what they left out.

        `check_restore` has seen to it that the user wants it, and that the shapes are the same.
        """
        own = [key for key in state_dict if key.startswith(prefix)]
        saved = {key[len(prefix) :]: state_dict.pop(key) for key in own}
        state = {key: buffer.clone() for key, buffer in self.named_buffers()}
        book = replace(self.codebook(), tensors={**self.codebook().tensors, **saved, **state})
        for tracker in self.trackers:
            tracker.adopt(saved, book)
        for key in saved.keys() & {*self.parts, *state}:
            state_dict[prefix + key] = saved[key]

    def _start_state(self, full: Tensor) -> dict[str, Tensor]:
        """The state that starts near a full table, by k-means."""
        c = self.config
        size = self.num_embeddings, self.embedding_dim, self.padding_idx
        layer = DPQEmbedding(*size, option_files=False, **c.keywords())
        for name in self.method.constants(c):  # codes or a guide that were read from a file
            getattr(layer, name).data.copy_(getattr(self, name))
        try:
            layer.start_from_table(full.float())
        except ValueError as error:
            raise DPQConfigError(f"a full table in the checkpoint: {error}") from error
        return layer.state_dict()


class _FairseqForm(_LoadsInFairseq):
    """A stored form inside a fairseq model.

    For generation the dense table is kept from the first time that a tied output layer asks for
    `weight`: decoding asks once for every token. It belongs to no state_dict, pickle or copy.
    A form that serves logits itself has none, unless the exact product is asked for.
    """

    exact_logits = False
    _dense: TableCache | None = None

    def make_generation_fast_(self, **kwargs: Any) -> None:
        self._dense = TableCache()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        if self._dense is not None:  # new tensors may lie where the old ones did
            self._dense.drop()
        return super()._apply(*args, **kwargs)  # type: ignore[misc]

    @property
    def weight(self) -> Tensor | StoredWeight:
        """The dense table, for a tied output layer, or what stands for it."""
        form: Any = self
        if form.corrects_logits:  # which no dense table does
            return StoredWeight(form)
        if is_tracing() or any(buffer.requires_grad for buffer in form.buffers()):
            return form.dense()
        if form.serves_logits and not self.exact_logits:
            return StoredWeight(form)
        if self._dense is None:
            return as_of_full_model(form.dense())
        # Not an inference tensor, which could not be used once that mode is over.
        with torch.inference_mode(False), torch.no_grad():
            built = self._dense.get(form.buffers(), lambda: Built(form.dense()))
        return as_of_full_model(built.rows)

    def __prepare_scriptable__(self) -> nn.Module:
        """TorchScript gets the layer without what only fairseq needs."""
        cls = FORMS[type(self).kind]  # type: ignore[attr-defined]
        plain = cls.__new__(cls)
        plain.__dict__ = {k: v for k, v in self.__dict__.items() if k != "_dense"}
        return plain


def as_of_full_model(table: Tensor) -> Tensor:
    """The table, marked as the weight of a full model is: it requires a gradient.

    torch.matmul asks for that mark. Without it, the product with a decoder's output, whose rows are
    not in order, becomes one product per hypothesis, and each of them reads the whole table.
    """
    foreign = table.is_inference() and not torch.is_inference_mode_enabled()
    if torch.is_grad_enabled() or table.requires_grad or foreign or not table.is_floating_point():
        return table
    return table.detach().requires_grad_()


@functools.lru_cache(maxsize=None)
def form_class(kind: str) -> type[Form]:
    """The class of a stored form inside a fairseq model."""
    plain = FORMS[kind]
    made: Any = type(f"Fairseq{plain.__name__}", (_FairseqForm, plain), {"__module__": __name__})
    return made


def __getattr__(name: str) -> Any:
    """The classes of `form_class`: pickle finds them by name."""
    for kind, plain in FORMS.items():
        if name == f"Fairseq{plain.__name__}":
            return form_class(kind)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def tie_output(output: nn.Module, parameter: str, table: nn.Module) -> None:
    """Let an output layer read `parameter` from a table at each call, instead of its own tensor.

    The stock layers (nn.Linear, roberta's head) read `self.weight` in forward, so a property of
    that name is all they need; their state_dict no longer has it.
    """
    cls = type(output)

    def get_table(self: Any) -> Tensor | StoredWeight:
        return self.__dict__["_dpq_table"][0].weight

    def load(self: Any, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict.pop(prefix + parameter, None)  # of a full checkpoint: the table's own copy
        cls._load_from_state_dict(self, state_dict, prefix, *args)

    def prepare_scriptable(self: Any) -> nn.Module:
        """TorchScript gets the stock layer, with the table spelled out."""
        plain = cls.__new__(cls)
        plain.__dict__ = {k: v for k, v in self.__dict__.items() if k != "_dpq_table"}
        plain._parameters = dict(self._parameters)
        weight = get_table(self).detach()
        plain._parameters[parameter] = nn.Parameter(weight, requires_grad=False)
        return plain

    if isinstance(table, DPQEmbedding):
        table.serves_output = True
    del output._parameters[parameter]
    # In a tuple, so that the table is not registered as a child of the output layer too.
    output.__dict__["_dpq_table"] = (table,)
    output.__class__ = type(
        cls.__name__,
        (cls,),
        {
            parameter: property(get_table),
            "_load_from_state_dict": load,
            "__prepare_scriptable__": prepare_scriptable,
            "__module__": cls.__module__,
        },
    )
