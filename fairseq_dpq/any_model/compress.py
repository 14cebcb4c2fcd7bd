"""`compress`, `compact` and `add_rows`: the embedding tables of any model, small in place."""

from __future__ import annotations

import difflib
import inspect
import sys
from dataclasses import fields
from typing import Any, Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from fairseq_dpq.any_model.calibration import Counts, Knowledge, Use, given_counts
from fairseq_dpq.any_model.calibration import calibrate as run_calibration
from fairseq_dpq.any_model.report import (
    Lost,
    Peer,
    Report,
    TableReport,
    compare,
    judge,
    model_bytes,
)
from fairseq_dpq.forms import FORMS, first_form
from fairseq_dpq.forms.base import Form, Settings
from fairseq_dpq.forms.choosing_tiers import check_tiers
from fairseq_dpq.forms.tiers import TieredEmbedding
from fairseq_dpq.layer import DPQEmbedding
from fairseq_dpq.methods.base import DEFAULT_METHOD, METHODS, TableUse, checked_options
from fairseq_dpq.model import EmbeddingTable, Which, choose, find_tables, placed, put
from fairseq_dpq.sizes import DEFAULT_K, default_D
from fairseq_dpq.training.kmeans import ITERATIONS

Progress = Callable[[str, int], Callable[[int], Any]]  # (what, steps) -> report of steps done
MIN_ROWS = 5000
# Measured on SmolLM2-135M (docs/real-models.md): perplexity at most 4 % higher on three texts.
DEFAULT_RATIO = 8.0
CALIBRATED_RATIO = 12.0


def compress(
    model: nn.Module,
    K: int | None = None,
    D: int | None = None,
    method: str | None = None,
    *,
    target_ratio: float | None = None,
    calibrate: Iterable[Any] | None = None,
    counts: Counts | None = None,
    tiers: Sequence[Sequence[int]] | None = None,
    which: Which = None,
    trainable: bool = False,
    min_rows: int = MIN_ROWS,
    seed: int = 0,
    progress: bool | Progress = False,
    **options: Any,
) -> Report:
    """Replace the embedding tables of a model by compressed ones, in place.

    By default each table is stored in tiers: rows that are used often get more bits. With
    `trainable` each becomes a `DPQEmbedding` instead; train the model, then call `compact`.

    A table that several modules share stays shared. An `nn.Linear` that shares a table's weight
    stays tied to it: it becomes a `CodesLinear`, which computes logits from the codes.

    Args:
        K: Number of codes in each group, for product codes without tiers.
        D: Number of groups; divides the embedding size. Default: half of the embedding size.
        method: `tiers` (default), `vq`, `sx` or `low_rank`; without `trainable` also any stored
            form, e.g. `scalar`. Default with K, D or `trainable`: `sx`.
        target_ratio: How many times smaller the tables get, for tiers. Default: 12 with
            `calibrate`, else 8.
        calibrate: Batches of text like that which the model will read: token tensors, tuples or
            mappings of what the model takes. 10,000 tokens or more, of all kinds of text.
        counts: How often each id occurs (n,), or a mapping of them by the path of a table.
        tiers: Rows, K and D of each tier, instead of `target_ratio`; (rows, 1, 1) stores one row
            for all of them.
        which: Tables to compress: a path or pattern (`"encoder.*"`), several of them, or a function
            of path and module. Default: all tables with at least `min_rows` rows.
        seed: Seed of k-means.
        progress: True for a progress bar, or a function that makes one.
        options: Settings of the form (`bits=4`), or with `trainable` of the method
            (docs/options.md).
    """
    if method is None:
        plain = trainable or K is not None or D is not None
        method = DEFAULT_METHOD if plain else TieredEmbedding.kind
    tiered = method == TieredEmbedding.kind
    if tiers is not None and target_ratio is not None:
        raise ValueError("give tiers or target_ratio, not both")
    sizes = {"K": K, "D": D}
    given: Settings = {**{k: v for k, v in sizes.items() if v is not None}, **options}
    for_tiers: Settings = {"target_ratio": target_ratio, "tiers": tiers}
    for_tiers.update(calibrate=calibrate, counts=counts)
    _check_arguments(model, method, trainable, given, for_tiers)
    if tiered:
        ratio = DEFAULT_RATIO if calibrate is None else CALIBRATED_RATIO
        given = {"ratio": ratio if target_ratio is None else target_ratio}
    chosen, left = _tables(model, which, min_rows)
    # Errors of settings come before any work.
    settings = [_settings(found, method, trainable, given, tiers) for found in chosen]
    counted = given_counts(chosen, counts)
    uses: list[Use | None] = [None if one is None else Use(one) for one in counted]
    if calibrate is not None:
        uses = list(run_calibration(model, chosen, calibrate, counted))
    bars = _bar if progress is True else progress or None
    before = model_bytes(model)
    rows, made = [], []
    for found, own, use in zip(chosen, settings, uses):
        assert found.weight is not None
        known, weight = knowledge(found, use), found.weight
        if trainable:
            table: Any = make_layer(found, {"method": method, **own}, seed, bars)
            if not weight.requires_grad:
                table.requires_grad_(False)
            form = table.compact(packed=True)
        else:
            form = table = make_form(found, _form(method), own, known, seed, bars).to(weight.dtype)
        full, lost = weight.numel() * weight.element_size(), judge(weight, form, known)
        rows.append(_row(found, form, full, lost, compare(weight, known)))
        made.append(table)
    for found, table in zip(chosen, made):
        put(model, found, table)
    tell_transformers(model)
    return Report(tuple(rows), before, left, tiered and calibrate is None and counts is None)


def compact(model: nn.Module, *, progress: bool | Progress = False) -> Report:
    """Replace the training tables of a model by their inference form, in place."""
    tables = placed(model, DPQEmbedding)
    if not tables:
        raise ValueError(
            "the model has no table in training form; use compress(..., trainable=True)"
        )
    bars = _bar if progress is True else progress or None
    before = model_bytes(model)
    rows = []
    for found in tables:
        layer: DPQEmbedding = found.module
        steps = None if bars is None else bars(f"compact {found.path}", layer.num_embeddings)
        form = layer.compact(packed=True, progress=steps)
        full = layer.num_embeddings * layer.embedding_dim * layer.query.element_size()
        before += full - sum(x.numel() * x.element_size() for x in layer.state_dict().values())
        rows.append(_row(found, form, full, None))
        put(model, found, form)
    tell_transformers(model)
    return Report(tuple(rows), before)


@torch.no_grad()
def add_rows(model: nn.Module, rows: int | Tensor, which: str | None = None) -> int:
    """Add rows to a compressed table, in place; its number of rows afterwards.

    The new rows are stored as the others are: product codes take the nearest value of each group.
    Output layers that are tied to the table get as many new outputs, with a bias of zero.

    Args:
        rows: The new rows (m, d), or their number: each is then the mean of the table.
        which: Path of the table; needed if the model has several compressed ones.
    """
    found = _one_of(placed(model, Form), which)
    form: Form = found.module
    old = form.num_embeddings
    if isinstance(rows, int):
        if rows < 1:
            raise ValueError(f"rows={rows}: give 1 or more; rows cannot be removed")
        rows = form.dense().float().mean(0, keepdim=True).expand(rows, -1)
    if rows.dim() != 2 or rows.shape[1] != form.embedding_dim:
        shape = tuple(rows.shape)
        raise ValueError(f"rows has shape {shape}; give (number, {form.embedding_dim})")
    if not bool(torch.isfinite(rows).all()):
        raise ValueError("rows holds NaN or infinite numbers")
    grown = form.with_rows(rows)
    for layer in found.tied.values():
        _grow_bias(model, layer, len(rows))
    put(model, found, grown)
    tell_transformers(model, grown, old)
    return grown.num_embeddings


# Arguments: all are checked before the first table is built ---------------------------------------


def _check_arguments(
    model: Any, method: str, trainable: bool, given: Settings, for_tiers: Settings
) -> None:
    """Raise ValueError for arguments that do not go together, or are not what they must be.

    `given` are settings of the method or form.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: expected an nn.Module, found {model!r:.60}")
    for name in ("K", "D"):
        if type(given.get(name, 0)) is not int:
            raise ValueError(f"{_say(name, given[name])}: must be a whole number")
    ratio = for_tiers["target_ratio"]
    if ratio is not None and not isinstance(ratio, (int, float)):
        raise ValueError(f"{_say('target_ratio', ratio)}: must be a number")
    names = METHODS if trainable else {**METHODS, **FORMS}
    if method not in names:
        raise ValueError(f"method={method!r}: choose one of {', '.join(names)}")
    tiered = method == TieredEmbedding.kind
    asked = [name for name, value in for_tiers.items() if value is not None]
    if asked and not tiered:
        others = [*[name for name in ("K", "D") if name in given], *["trainable"] * trainable]
        leave = " and ".join(others or ["method"])
        raise ValueError(f"{asked[0]} is for tiers (method='tiers'); leave {leave} out")
    if method in METHODS and METHODS[method].switch == "rank" and "rank" not in given:
        raise ValueError(
            f"{_say('method', method)} needs a rank: rank=N makes a table of d columns d / N times "
            "smaller"
        )
    if trainable:
        return  # the method's options say what they are
    takes = list(for_tiers) if tiered else [option.keyword for option in _form(method).options]
    for name, value in given.items():
        if name not in takes:
            raise ValueError(
                f"{_say(name, value)} has no effect with {_say('method', method)}, which takes "
                f"{', '.join(takes)}{_meant(name, takes)}"
            )


def _meant(name: str, known: Iterable[str]) -> str:
    """A question after an option in the wrong case, or nearly right: `k=32`, `targetratio=12`."""
    names = {k.lower(): k for k in (*known, *inspect.signature(compress).parameters) if k != name}
    close = difflib.get_close_matches(name.lower(), names, 1, 0.8)
    return f"; did you mean {names[close[0]]}?" if close else ""


def _say(name: str, value: Any) -> str:
    return f"{name}={value!r}"


def _say_setting(name: str, value: Any) -> str:
    return _say("target_ratio" if name == "ratio" else name, value)


def _form(method: str) -> type[Form]:
    return first_form(METHODS[method].forms if method in METHODS else [method])


def _tables(
    model: nn.Module, which: Which, min_rows: int
) -> tuple[list[EmbeddingTable], dict[str, str]]:
    try:
        return choose(find_tables(model), which, min_rows)
    except ValueError as problem:
        done = ", ".join(found.path for found in placed(model, (Form, DPQEmbedding)))
        hint = f"; compressed before: {done}. Load the full model to compress it in another way"
        raise ValueError(f"{problem}{hint if done else ''}") from None


def _settings(
    found: EmbeddingTable, method: str, trainable: bool, given: Settings, tiers: Any = None
) -> Settings:
    """The settings of one table: defaults, and those that are given; ValueError for what cannot
    be."""
    weight, modules = found.weight, found.modules.values()
    assert weight is not None
    d = weight.shape[1]
    start: Settings = {"K": DEFAULT_K, "D": default_D(d, close=True)}
    try:
        if trainable:
            takes = {f.name for f in fields(METHODS[method].options)}
            if not METHODS[method].splits_rows:
                del start["D"]
            own = {name: value for name, value in start.items() if name in takes}
            if any(getattr(module, "sparse", False) for module in modules):
                own["sparse"] = True
            own.update(given)
            checked_options(method, own, TableUse(d, trained=True))
            if any(getattr(module, "scale_grad_by_freq", False) for module in modules):
                raise ValueError("scale_grad_by_freq=True has no training form; set it to False")
        else:
            own = {option.keyword: option.default for option in _form(method).options}
            own.update({name: value for name, value in start.items() if name in own})
            own.update(given)
            _form(method).check(d, _say_setting, **own)
            if tiers is not None:
                own.update(tiers=check_tiers(tiers, *weight.shape))
        check_weight(weight)
    except ValueError as error:
        raise type(error)(f"{found.path}: {error}") from error
    return own


def check_weight(weight: Tensor) -> None:
    if weight.device.type == "meta":
        raise ValueError("the table is on the meta device; load its weights first")
    if not all(bool(torch.isfinite(part).all()) for part in weight.split(1 << 13)):
        raise ValueError("the table holds NaN or infinite numbers")


# Tables -------------------------------------------------------------------------------------------


def knowledge(found: EmbeddingTable, use: Use | None) -> Knowledge:
    """What the use of a table says of it."""
    assert found.weight is not None
    tied = next(iter(found.tied.values()), None)
    bias = None if tied is None else tied._parameters.get("bias")
    return Knowledge(found.weight, bias, tied is not None, use, len(found.readers))


def make_form(
    found: EmbeddingTable,
    form: type[Form],
    settings: Settings,
    known: Knowledge,
    seed: int = 0,
    bars: Progress | None = None,
) -> Form:
    """A table in a stored form, by what is known of its use where the form takes that."""
    assert found.weight is not None
    full, corrected = found.weight.detach(), form.takes_use and known.share is not None
    weights = known.weights if corrected else known.weights[:1]
    steps = _steps(bars, found, len(weights) * form.work(settings))
    made: list[tuple[Any, Form]] = []  # how far the outputs are off, if that is known
    for weight in weights:
        use = {"weight": weight, "metric": known.metric, "corrected": corrected}
        how = {**settings, **use} if form.takes_use else settings
        table = form.from_table(full, found.padding_idx, seed=seed, progress=steps, **how)
        made.append((known.correct(table, full) if corrected else None, table))
    known.divergence, table = min(made, key=lambda one: one[0])
    return table


def make_layer(
    found: EmbeddingTable,
    settings: Settings,
    seed: int = 0,
    bars: Progress | None = None,
    path: str = "",
) -> DPQEmbedding:
    """A table in its training form, which starts near it; `settings` are method and options,
    `path` is as `DPQEmbedding.from_pretrained` takes it."""
    assert found.weight is not None
    full, steps = found.weight.detach(), _steps(bars, found, ITERATIONS)
    how: Settings = {"seed": seed, "progress": steps, "path": path, **settings}
    return DPQEmbedding.from_pretrained(full, found.padding_idx, **how)


def _one_of(tables: list[EmbeddingTable], which: str | None) -> EmbeddingTable:
    listed = ", ".join(path for found in tables for path in found.paths)
    if not tables:
        raise ValueError("the model has no compressed table; resize its full table instead")
    if which is None and len(tables) > 1:
        raise ValueError(f"the model has several compressed tables: give which, one of {listed}")
    for found in tables:
        if which is None or which in found.paths:
            return found
    raise ValueError(f"which={which!r}: the model has {listed}")


def _grow_bias(model: nn.Module, layer: Any, more: int) -> None:
    """Zeros for new outputs, wherever the bias is used."""
    bias = layer.bias
    if bias is None:
        return
    grown = nn.Parameter(torch.cat([bias, bias.new_zeros(more)]), bias.requires_grad)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is bias:
                module._parameters[name] = grown


# Report and progress ------------------------------------------------------------------------------


def _row(
    found: EmbeddingTable, form: Form, before: int, lost: Lost | None, peers: tuple[Peer, ...] = ()
) -> TableReport:
    size, words = (form.num_embeddings, form.embedding_dim), f"{form.kind} {form.describe()}"
    others = (tuple(found.paths[1:]), tuple(found.tied))
    return TableReport(found.path, *size, words, before, form.saved_nbytes, lost, peers, *others)


def _steps(bars: Progress | None, found: EmbeddingTable, steps: int) -> Callable[[int], Any] | None:
    bar = None if bars is None else bars(f"compress {found.path}", steps)
    return None if bar is None else lambda step: bar(1)


def _bar(what: str, steps: int) -> Callable[[int], Any]:
    """A progress bar on stderr."""
    from tqdm import tqdm

    return tqdm(total=steps, desc=what, leave=False).update


def tell_transformers(model: nn.Module, grown: Form | None = None, old: int = 0) -> None:
    """Hugging Face models save themselves, and follow a table that has `grown` from its `old` rows;
    a program without transformers does not import it."""
    if "transformers" in sys.modules:
        from fairseq_dpq.any_model.huggingface import attach, follow_growth

        if grown is not None:
            follow_growth(model, grown, old)
        attach(model)
