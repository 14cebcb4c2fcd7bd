"""A table in tiers, each a form of its own: the rows that are used most have the most bits."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, ClassVar, Sequence

import torch
from torch import Tensor, nn

from fairseq_dpq import native
from fairseq_dpq.forms import quantization
from fairseq_dpq.forms.base import Form, FormOption, Layout, Say, Settings, Tensors, below
from fairseq_dpq.forms.choosing_tiers import Tier, check_tiers, choose_tiers, id_order
from fairseq_dpq.forms.packing import check_range
from fairseq_dpq.forms.product_codes import CompactEmbedding
from fairseq_dpq.tracing import is_tracing
from fairseq_dpq.training.initialization import Trained

_WORK = 100  # steps that are reported
_ROWS = 1 << 13  # rows handled at once


class TieredEmbedding(Form):
    """Looks rows up as nn.Embedding does. Row i is in the tier `tier_of[i]`, after the rows of that
    tier that come before it; without `tier_of` the tiers follow each other.

    `tiers` lists rows, K and D of each tier: product codes whose values are float16, whatever the
    dtype of the model. K = D = d is 8 bits a number with K = 256; the rows of a tier with K = 1 are
    all the same and have no codes. `correction` (n,) is added to the logits of a tied output.
    """

    kind = "tiers"
    takes_use = True
    signature_tensor = "tiers.0.codes"
    model_dtype = ("like",)
    options = (FormOption("ratio", "--ratio", 10.0, "how many times smaller the table gets"),)
    setting_types: ClassVar[dict[str, type]] = {"tiers": list, "in_order": bool}

    if TYPE_CHECKING:  # TorchScript cannot read annotations that are strings
        like: Tensor
        tier_of: Tensor | None
        correction: Tensor | None
        slot: Tensor
        bounds: Tensor
        tiers: Any  # of CompactEmbedding

    def build(  # type: ignore[override]
        self,
        make: Settings,
        *,
        tiers: Sequence[Sequence[int]],
        in_order: bool = False,
        corrected: bool = False,
    ) -> None:
        n, d, device = self.num_embeddings, self.embedding_dim, make["device"]
        listed = check_tiers(tiers, n, d)
        # It follows the dtype of the model, which rows have; values do not.
        self.register_buffer("like", torch.zeros(1, **make))
        self.register_buffer("tier_of", None if in_order else _one_after_the_other(listed, device))
        how: Settings = {"dtype": torch.float16, "device": device}
        self.register_buffer("correction", torch.zeros(n, **how) if corrected else None)
        self.tiers = nn.ModuleList(
            CompactEmbedding(1 if K == 1 else rows, d, None, K=K, D=D, packed=True, **how)
            for rows, K, D in listed
        )
        self._set_tiers(listed)

    def _set_tiers(self, listed: list[Tier]) -> None:
        """Set what follows from the tiers, and from the tier of each row."""
        self._fast = None
        self.sizes = listed
        self.shared = [K == 1 for _, K, _ in listed]
        self.first = [0, *itertools.accumulate(rows for rows, _, _ in listed)]
        device = self.like.device
        bounds = torch.tensor(self.first[1:-1], dtype=torch.int64, device=device)
        self.register_buffer("bounds", bounds, persistent=False)
        slot = torch.empty(0, dtype=torch.int32, device=device)
        if self.tier_of is not None:
            # The place of each row if those of a tier are put together, in order.
            place = torch.sort(self.tier_of, stable=True).indices
            slot = torch.empty(len(place), dtype=torch.int32, device=device)
            slot[place] = torch.arange(len(place), dtype=torch.int32, device=device)
        self.register_buffer("slot", slot, persistent=False)

    @classmethod
    def of_table(  # type: ignore[override]
        cls,
        trained: Trained,
        padding_idx: int | None,
        ratio: float = 10.0,
        tiers: Sequence[Sequence[int]] | None = None,
        weight: Tensor | None = None,
        metric: Tensor | None = None,
        corrected: bool = False,
    ) -> TieredEmbedding:
        """The tiers that lose the least at a compression ratio, or those that are given.

        Args:
            weight: How much each row is used (n,). Default: the order of ids stands for it.
            metric: What an error e of a row costs, e' M e (d, d). Default: its square.
            corrected: Whether 16 bits a row are needed for the correction of logits.
        """
        (n, d), table = trained.table.shape, trained.table
        in_order = weight is None
        weight = id_order(n).to(table.device) if weight is None else weight.float()
        if padding_idx is not None:
            weight = weight.clone()
            weight[padding_idx] = 0
        center = quantization.weighted_mean(table, weight / weight.sum())
        cost = torch.empty(n, device=table.device)
        for rows, part in zip(cost.split(_ROWS), table.split(_ROWS)):
            apart = part.float() - center
            rows.copy_((apart * (apart if metric is None else apart @ metric)).sum(1))
        cost = cost * weight
        order = torch.arange(n, device=table.device)
        if not in_order:
            order = torch.sort(cost, descending=True, stable=True).indices
            in_order = bool((order[1:] > order[:-1]).all())
        if tiers is None:
            some = table[:: max(1, n // _ROWS)].float() - center
            gain = (
                1.0
                if metric is None
                else quantization.metric_gain(metric, some.t() @ some / len(some))
            )
            beside = (0 if in_order else n) + (2 * n if corrected else 0)
            budget = int(4 * n * d / ratio) - beside
            if budget < 1:
                left = f"{max(budget, 0)} bytes leave no room for codes; try a lower ratio"
                raise ValueError(f"ratio {ratio:g}: {left}")
            tiers = choose_tiers(cost[order], d, budget, gain)
        listed = check_tiers(tiers, n, d)
        if len(listed) == 1:
            in_order = True
            order = torch.arange(n, device=table.device)
        made = cls(n, d, None, tiers=listed, in_order=in_order, dtype=table.dtype)
        report = quantization.rescaled(trained.progress, _WORK, sum(2 * D for _, _, D in listed))
        for i, (rows, K, D) in enumerate(listed):
            own = order[made.first[i] : made.first[i] + rows].sort().values
            if made.tier_of is not None:
                made.tier_of[own.cpu()] = i
            known = weight[own]
            if K == 1:
                share = known if bool(known.sum() > 0) else torch.ones_like(known)
                share = share / share.sum()
                values = quantization.weighted_mean(table, share, own).half().view(1, 1, d)
                codes = torch.zeros(1, 1, dtype=torch.uint8, device=table.device)
                report(2)
            else:
                how: Settings = {"weight": known, "metric": metric, "seed": trained.seed}
                codes, values = quantization.quantize_in_metric(
                    table, K, D, own, progress=report, **how
                )
            made.tiers[i] = CompactEmbedding.from_codes(codes, values, d, packed=True)
        made._set_size(n, d, padding_idx)
        made._set_tiers(listed)
        return made.to(table.device)

    @classmethod
    def check(cls, embedding_dim: int, say: Say, **settings: Any) -> None:
        ratio = settings.get("ratio", 10.0)
        if not ratio > 1:
            raise ValueError(f"{say('ratio', ratio)}: must be above 1; try 10")

    @classmethod
    def work(cls, settings: Settings) -> int:
        return _WORK

    @classmethod
    def layout(cls, n: int, d: int, settings: Settings, found: Tensors) -> dict[str, Layout]:
        out = {"like": Layout((1,))}
        for i, (rows, K, D) in enumerate(check_tiers(settings["tiers"], n, d)):
            kept = {"K": K, "D": D, "share_subspaces": False}
            stored = CompactEmbedding.layout(
                1 if K == 1 else rows, d, kept, below(f"tiers.{i}", found)
            )
            if stored["values"].shape[0] != K * D:
                raise ValueError(f"tiers.{i}: expected {K * D} values for K={K} and D={D}")
            out.update({f"tiers.{i}.{name}": one for name, one in stored.items()})
        if not settings["in_order"]:
            out["tier_of"] = Layout((n,), (torch.uint8,))
        out["correction"] = Layout((n,), optional=True)
        return out

    @classmethod
    def check_contents(cls, d: int, settings: Settings, tensors: Tensors) -> None:
        for i, (_, K, D) in enumerate(settings["tiers"]):
            check_range(f"tiers.{i}.codes", tensors[f"tiers.{i}.codes"], [K] * D)
        if "tier_of" in tensors:
            rows = torch.bincount(tensors["tier_of"], minlength=len(settings["tiers"])).tolist()
            if rows != [tier[0] for tier in settings["tiers"]]:
                raise ValueError(f"tier_of: the tiers have {rows} rows")

    @classmethod
    def from_tensors(
        cls, n: int, d: int, padding_idx: int | None, settings: Settings, tensors: Tensors
    ) -> TieredEmbedding:
        listed = check_tiers(settings["tiers"], n, d)
        small = [(1, K, D) for _, K, D in listed]  # no n rows by a claim alone
        made = cls(len(small), d, None, tiers=small, in_order=True)
        made._set_size(n, d, padding_idx)
        made.like, made.tier_of = tensors["like"], tensors.get("tier_of")
        correction = tensors.get("correction")
        made.correction = None if correction is None else correction.half()
        for i, (rows, K, D) in enumerate(listed):
            own = below(f"tiers.{i}", tensors)
            own["values"] = own["values"].half()
            part: Settings = {"K": K, "D": D, "share_subspaces": False}
            size = (1 if K == 1 else rows, d, None)
            made.tiers[i] = CompactEmbedding.from_tensors(*size, part, own)
        made._set_tiers(listed)
        return made.eval()

    def forward(self, indices: Tensor) -> Tensor:
        if not torch.jit.is_scripting():
            fast = self._library()
            found = None if fast is None else fast.lookup(indices)
            if found is not None:
                dtype = self._buffers["like"].dtype  # type: ignore[union-attr]
                return found if found.dtype is dtype else found.to(dtype)
        flat = indices.reshape(-1)
        slot = flat if self.tier_of is None else self.slot.index_select(0, flat)
        slot = slot.to(torch.int64)
        if torch.jit.is_scripting() or is_tracing():
            out = self._in_graph(slot)
        else:
            out = self._by_tier(slot)
        if self.padding_idx is not None:
            out = out.masked_fill((flat == self.padding_idx).unsqueeze(-1), 0.0)
        return out.to(self.like.dtype).view(indices.shape + (self.embedding_dim,))  # noqa: RUF005

    def _library(self) -> native.Tiers | None:
        """These tiers as the native library takes them, or None where PyTorch must serve."""
        if is_tracing():
            return None
        wide = self._buffers["like"].dtype is torch.float32  # type: ignore[union-attr]
        fast, dtype = self._fast, torch.float32 if wide else torch.float16
        # Not by their names as attributes: for one id that takes longer than its row.
        listed: Any = self._modules["tiers"]
        buffers = [tier._buffers for tier in listed._modules.values()]
        if fast is None or fast.dtype is not dtype or not fast.serves(buffers):
            tables = [tier.native_table() for tier in self.tiers]
            trained = any(tier.values.requires_grad for tier in self.tiers)
            if trained or not all(isinstance(table, native.Table) for table in tables):
                return None
            slot = None if self.tier_of is None else self.slot
            fast = native.Tiers(tables, self.first, slot, self.padding_idx, dtype)
            self._fast = fast
        return fast

    def _by_tier(self, slot: Tensor) -> Tensor:
        if not len(slot):
            return slot.new_empty(0, self.embedding_dim, dtype=torch.float16)
        if self.tier_of is None:
            low, high = map(int, torch.aminmax(slot))
            if low < 0 or high >= self.num_embeddings:
                raise IndexError(f"ids {low} to {high}: the table has {self.num_embeddings} rows")
        ordered, places = torch.sort(slot)  # tier after tier
        ends = torch.searchsorted(ordered, self.bounds).tolist()
        parts = []
        for i, (start, end) in enumerate(zip([0, *ends], [*ends, len(slot)])):
            if start < end:
                own = ordered[start:end] - self.first[i]
                parts.append(self.tiers[i](torch.zeros_like(own) if self.shared[i] else own))
        out = parts[0].new_empty(len(slot), self.embedding_dim)
        return out.index_copy_(0, places, torch.cat(parts) if len(parts) > 1 else parts[0])

    def _in_graph(self, slot: Tensor) -> Tensor:
        """Each tier looks all rows up: a graph has no sizes that depend on ids."""
        out = torch.zeros(1, self.embedding_dim, dtype=torch.float16, device=slot.device)
        nothing = torch.zeros_like(slot)
        for i, tier in enumerate(self.tiers):
            inside = (slot >= self.first[i]) & (slot < self.first[i + 1])
            place = nothing
            if not self.shared[i]:
                place = torch.where(inside, slot - self.first[i], nothing)
            out = torch.where(inside.unsqueeze(-1), tier(place), out)
        return out

    @property
    def serves_logits(self) -> bool:
        return all(tier.serves_logits for tier in self.tiers)

    @property
    def corrects_logits(self) -> bool:
        return self.correction is not None

    def logits(self, h: Tensor) -> Tensor:
        """Logits of each tier from its codes, in the order of ids, plus the correction."""
        if torch.is_grad_enabled() and any(buffer.requires_grad for buffer in self.buffers()):
            shift = 0 if self.correction is None else self.correction.to(h.dtype)
            return super().logits(h) + shift  # one product is faster where values are trained
        fast = self._library()
        out = None if fast is None else fast.logits(h)
        if out is None:
            parts = []
            for i, tier in enumerate(self.tiers):
                part = tier.logits(h)
                rows = self.sizes[i][0]
                parts.append(part.expand(*part.shape[:-1], rows) if self.shared[i] else part)
            out = torch.cat(parts, -1)
        if self.tier_of is not None:
            out = out.index_select(-1, self.slot)
        if self.padding_idx is not None:
            out[..., self.padding_idx] = 0
        if self.correction is not None:
            out = out.add_(self.correction)
        return out.to(h.dtype)

    def with_rows(self, rows: Tensor) -> TieredEmbedding:
        """The new rows join the first tier, which has the most bits; their correction is zero."""
        old, more = self.num_embeddings, len(rows)
        tensors = self.export_tensors()
        if self.tier_of is None:
            tensors["tier_of"] = _one_after_the_other(self.sizes, self.like.device)
        for name in {"tier_of", "correction"} & set(tensors):
            tensors[name] = torch.cat([tensors[name], tensors[name].new_zeros(more)])
        first = self.tiers[0].with_rows(rows).export_tensors()
        tensors.update({f"tiers.0.{name}": tensor for name, tensor in first.items()})
        (count, K, D), *rest = self.sizes
        settings = {**self.settings(), "tiers": [(count + more, K, D), *rest], "in_order": False}
        size = (old + more, self.embedding_dim, self.padding_idx)
        return self.from_tensors(*size, settings, tensors)

    def settings(self) -> Settings:
        return {"tiers": [list(tier) for tier in self.sizes], "in_order": self.tier_of is None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def formula_bits(self) -> int:
        return 8 * self.saved_nbytes

    def bits_per_symbol(self) -> int:
        """Of the mean row."""
        return 8 * self.saved_nbytes // self.num_embeddings

    def describe(self) -> str:
        said = ("one row" if K == 1 else f"K={K} D={D}" for _, K, D in self.sizes)
        return "; ".join(f"{tier[0]}: {words}" for tier, words in zip(self.sizes, said))

    def export_tensors(self) -> dict[str, Tensor]:
        out = {"like": self.like, "tier_of": self.tier_of, "correction": self.correction}
        tensors = {name: t.contiguous() for name, t in out.items() if t is not None}
        for i, tier in enumerate(self.tiers):
            tensors.update({f"tiers.{i}.{k}": t for k, t in tier.export_tensors().items()})
        return tensors

    def _kept_dtypes(self) -> list[tuple[nn.Module, str]]:
        values: list[tuple[nn.Module, str]] = [(tier, "values") for tier in self.tiers]
        return values if self.correction is None else [*values, (self, "correction")]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        given = state_dict.get(f"{prefix}correction")
        if self.correction is None and given is not None and given.shape == (self.num_embeddings,):
            self.correction = torch.zeros_like(given, dtype=torch.float16, device=self.like.device)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self._set_tiers(self.sizes)


def _one_after_the_other(tiers: list[Tier], device: Any) -> Tensor:
    """The tier of each row (n,) where the tiers follow each other."""
    counts = torch.tensor([rows for rows, _, _ in tiers], device=device)
    return torch.arange(len(tiers), device=device).repeat_interleave(counts).to(torch.uint8)
