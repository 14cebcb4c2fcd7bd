"""What a model reads: how often each row of a table is used, and what a tied output layer sees.

From text (`calibrate`), from counts, or from the order of ids alone.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple, Sequence, Union

import torch
from torch import Tensor, nn

from fairseq_dpq.forms.base import Form
from fairseq_dpq.forms.choosing_tiers import id_order
from fairseq_dpq.model import EmbeddingTable, ScaledEmbedding

Counts = Union[Tensor, Mapping[str, Tensor]]
_STATES = 8192  # hidden states that are kept
_JUDGED = 4096  # of these, those whose output distribution is computed; fewer for large tables
_PRODUCTS = 1 << 37  # of a state and a table that this may take
_NUMBERS = 1 << 23  # logits held at once
# torch 1 shows a hook what is given by position only
_HOOK: dict[str, Any] = {} if torch.__version__ < "2" else {"with_kwargs": True}
_FEW = 0.1  # types seen, as a share of the rows: fewer deserve a warning


class _Rule(NamedTuple):
    """What use makes of a table of one kind."""

    prior: float  # share of the order of ids among what is known of use
    powers: tuple[float, ...]  # of use; of several, the outputs of the model decide
    plain: float = 1.0  # share of the plain square in the metric of errors


# Chosen on SmolLM2's first test texts, on Multi30k's valid set (an encoder reads the table, too)
# and on the training half of MRPC (rare words say more of a text than of its next word). The root
# of use is for models that are nearly sure of each word, as those of translation: a rare word that
# they read as another one costs as much as a frequent one.
_TIED = _Rule(0.1, (1.0, 0.5), 0.1)
_TIED_TO_ENCODER, _UNTIED = _Rule(0.1, (0.5,), 0.5), _Rule(0.3, (0.35,))


@dataclass
class Use:
    """How a table is used."""

    counts: Tensor | None = None  # (n,)
    states: list[Tensor] = field(default_factory=list)  # inputs of the tied output layer, (m, d)
    stride: int = 1  # one state of so many is kept
    kept: int = 0
    broken: int = 0  # states with NaN or infinite numbers, which are left out

    def add_ids(self, ids: Tensor) -> None:
        """Count these rows."""
        if self.counts is not None:
            self.counts += torch.bincount(ids.reshape(-1).cpu(), minlength=len(self.counts))

    def add_states(self, h: Tensor) -> None:
        """Keep some of these states; fewer of each batch the more there are."""
        rows = h.reshape(-1, h.shape[-1])[:: self.stride].float().cpu()
        finite = torch.isfinite(rows).all(1)
        self.broken += len(rows) - int(finite.sum())
        rows = rows[finite]
        self.states.append(rows)
        self.kept += len(rows)
        if self.kept > 2 * _STATES:
            self.states = [torch.cat(self.states)[::2]]
            self.stride, self.kept = 2 * self.stride, len(self.states[0])

    def hidden(self) -> Tensor | None:
        """The states, (m, d), or None for a table without a tied output."""
        if not self.states:
            return None
        states = torch.cat(self.states)
        return states[:: -(-len(states) // _STATES)]


class Knowledge:
    """What use says of a table (n, d): the weight of its rows, and what errors cost.

    `tied`: an output layer shares the table. `readers`: how many modules look rows up in it; an
    encoder and a decoder are two.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, tied: bool, use: Use | None, readers: int = 1
    ) -> None:
        n, d = weight.shape
        rule = _UNTIED if not tied else _TIED if readers < 2 else _TIED_TO_ENCODER
        self.metric: Tensor | None = None
        self.share: Tensor | None = None  # (n,) probability of each row as output
        self._states: Tensor | None = None
        self.weights: list[Tensor | None] = [None]  # (n,) each, by the powers that are tried
        self.few = 0  # types, if they were few
        self.divergence: float | None = None  # of the outputs of the compressed table (KL)
        if use is None or use.counts is None or not bool(use.counts.any()):
            return
        device = weight.device
        uses = [(use.counts.float() / use.counts.sum()).to(device)]
        types = int((use.counts > 0).sum())
        self.few = types if types < _FEW * n else 0
        # Text of another kind uses other rows: no row is without weight.
        prior = id_order(n, n / 50).to(device)
        hidden = use.hidden()
        if hidden is not None and len(hidden) > 1:
            hidden = hidden.to(device)
            mean = hidden.mean(0)
            spread = (hidden - mean).t() @ (hidden - mean) / len(hidden)
            spread = spread * (d / spread.trace().clamp_min(1e-30))
            self.metric = (1 - rule.plain) * spread + rule.plain * torch.eye(d, device=device)
            judged = min(_JUDGED, max(256, _PRODUCTS // weight.numel()))
            self._states = hidden[:: -(-len(hidden) // judged)]
            self.bias = None if bias is None else bias.detach().float()
            self.share, _ = self._probabilities(weight.detach().float())
            uses.append(self.share)
        known = [(1 - rule.prior) * x + rule.prior * prior for x in uses]
        powers = rule.powers if self.share is not None else rule.powers[:1]
        for i, p in enumerate(powers):
            shares = torch.stack([x.pow(p) / x.pow(p).sum() for x in known])
            self.weights[i:] = [shares.mean(0)]

    def _probabilities(self, table: Tensor, form: Form | None = None) -> tuple[Tensor, float]:
        """The mean probability of each row (n,) as the output of a table, or of a `form` of it, and
        the mean divergence (KL) of the form's outputs from the table's."""
        assert self._states is not None
        total, divergence = torch.zeros(len(table), device=table.device), 0.0
        for h in self._states.split(max(1, _NUMBERS // len(table))):
            known = nn.functional.linear(h, table, self.bias).log_softmax(1)
            share = known.exp()
            if form is not None:
                logits = form.logits(h)
                found = (logits if self.bias is None else logits + self.bias).log_softmax(1)
                apart = torch.where(share > 0, known - found, 0)  # a bias of -inf: never there
                divergence += float((share * apart).sum())
                share = found.exp()
            total += share.sum(0)
        return total / len(self._states), divergence / len(self._states)

    @torch.no_grad()
    def correct(self, form: Form, table: Tensor) -> float:
        """Correct the logits of a form of a table, so that each row is as probable as it was in the
        mean; the divergence that is left."""
        assert self.share is not None
        table = table.detach().float()
        found, _ = self._probabilities(table, form)
        least = 0.015 / len(table)  # of rows that are too rare to tell
        form.correction = ((self.share + least) / (found + least)).log().half()
        _, left = self._probabilities(table, form)
        return math.inf if math.isnan(left) else left


@torch.no_grad()
def calibrate(
    model: nn.Module,
    tables: Sequence[EmbeddingTable],
    batches: Iterable[Any],
    counted: Sequence[Tensor | None] = (),
) -> list[Use]:
    """Run a model on batches, without gradients, and follow how its tables are used. Where rows are
    `counted` already, those counts stand.

    A batch is what the model takes: a tensor, a tuple of arguments, or a mapping of named ones.
    Where it has an `attention_mask`, positions that are masked do not count.
    """
    uses = [Use(torch.zeros(found.module.num_embeddings)) for found in tables]
    mask: list[Tensor | None] = [None]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    seen = 0
    with _following(tables, uses, mask), evaluating(model):
        for seen, batch in enumerate(batches, 1):
            batch = _moved(batch, device)
            known = batch.get("attention_mask") if isinstance(batch, Mapping) else None
            mask[0] = known.bool() if isinstance(known, Tensor) else None
            try:
                run_batch(model, batch)
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
                raise ValueError(
                    f"calibrate: the model does not take batch {seen} ({str(error)[:200]}); give "
                    "what it takes: token tensors (batch, length), tuples or mappings of arguments"
                ) from error
    if not seen:
        raise ValueError("calibrate has no batches; give token tensors as the model takes them")
    if any(use.broken and not use.kept for use in uses):
        raise ValueError("calibrate: the model computes NaN or infinite numbers on these batches")
    for use, given in zip(uses, counted):
        use.counts = use.counts if given is None else given
    return uses


@contextlib.contextmanager
def _following(
    tables: Sequence[EmbeddingTable], uses: Sequence[Use], mask: list[Tensor | None]
) -> Iterator[None]:
    with contextlib.ExitStack() as hooks:

        def follow(module: nn.Module, note: Callable[[Tensor], None], columns: int) -> None:
            def hook(module: nn.Module, args: Any, kwargs: Any = None) -> None:
                given, known = args[0] if args else (kwargs or {}).get("input"), mask[0]
                if isinstance(given, Tensor):
                    shape = given.shape[: given.dim() - columns]
                    note(given[known] if known is not None and known.shape == shape else given)

            hooks.callback(module.register_forward_pre_hook(hook, **_HOOK).remove)

        for found, use in zip(tables, uses):
            for module in {id(m): m for m in found.modules.values()}.values():
                inner = module.table if isinstance(module, ScaledEmbedding) else module
                follow(inner, use.add_ids, 0)
            for layer in found.tied.values():
                follow(layer, use.add_states, 1)
        yield


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode; afterwards each module is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def run_batch(model: nn.Module, batch: Any) -> Any:
    """The outputs of a model for a tensor, a tuple of arguments, or a mapping of named ones."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: _moved(value, device) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(_moved(value, device) for value in batch)
    return batch


def given_counts(tables: Sequence[EmbeddingTable], counts: Counts | None) -> list[Tensor | None]:
    """The counts of each table's rows: those of a table alone, or by path."""
    if counts is None:
        return [None] * len(tables)
    if isinstance(counts, Mapping):
        known = [path for found in tables for path in found.paths]
        for path in set(counts) - set(known):
            raise ValueError(f"counts: the model has no table {path}; it has {', '.join(known)}")
        listed = [next((counts[p] for p in found.paths if p in counts), None) for found in tables]
    elif len({found.module.num_embeddings for found in tables}) > 1:
        raise ValueError("counts: the tables have different numbers of rows; give counts by path")
    else:
        listed = [torch.as_tensor(counts)] * len(tables)
    for found, one in zip(tables, listed):
        rows = found.module.num_embeddings
        if one is not None and tuple(one.shape) != (rows,):
            raise ValueError(f"counts of {found.path}: expected {rows}, found {tuple(one.shape)}")
        if one is not None and not bool((torch.isfinite(one.float()) & (one >= 0)).all()):
            raise ValueError(f"counts of {found.path}: must not be negative")
    return [None if one is None else one.float() for one in listed]
