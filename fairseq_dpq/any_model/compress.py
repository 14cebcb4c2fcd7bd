"""`compress` and `compact`: the embedding tables of any model, small in place."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import sys
from dataclasses import fields
from typing import Any, Callable, Iterable, Iterator, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from fairseq_dpq.any_model.calibration import Counts, Knowledge, Use, given_counts
from fairseq_dpq.any_model.calibration import calibrate as run_calibration
from fairseq_dpq.any_model.judging import Lost, Peer, compare, judge
from fairseq_dpq.any_model.report import Report, TableReport, model_bytes
from fairseq_dpq.forms import FORMS, first_form
from fairseq_dpq.forms.base import Form, Settings
from fairseq_dpq.forms.choosing_tiers import check_tiers
from fairseq_dpq.forms.tiers import TieredEmbedding
from fairseq_dpq.layer import DPQEmbedding
from fairseq_dpq.methods import DEFAULT_METHOD, METHODS, make_options
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
    _check_types(model, K, D, target_ratio)
    given = {"K": K, "D": D, "method": method, "trainable": trainable or None}
    if method is None:
        plain = trainable or K is not None or D is not None
        method = DEFAULT_METHOD if plain else TieredEmbedding.kind
    names = METHODS if trainable else {**METHODS, **FORMS}
    if method not in names:
        raise ValueError(f"method={method!r}: choose one of {', '.join(names)}")
    tiered = method == TieredEmbedding.kind
    asked = {"target_ratio": target_ratio, "calibrate": calibrate, "counts": counts, "tiers": tiers}
    for name, value in asked.items():
        if value is not None and not tiered:
            others = " and ".join(key for key, value in given.items() if value is not None)
            raise ValueError(f"{name} is for tiers (method='tiers'); leave {others} out")
    if method in METHODS and METHODS[method].switch == "rank" and "rank" not in options:
        raise ValueError(
            f"{_say('method', method)} needs a rank: rank=N makes a table of d columns d / N times "
            "smaller"
        )
    if tiers is not None and target_ratio is not None:
        raise ValueError("give tiers or target_ratio, not both")
    try:
        chosen, left = choose(find_tables(model), which, min_rows)
    except ValueError as problem:
        done = ", ".join(found.path for found in placed(model, (Form, DPQEmbedding)))
        hint = f"; compressed before: {done}. Load the full model to compress it in another way"
        raise ValueError(f"{problem}{hint if done else ''}") from None
    uses: list[Use | None] = [None] * len(chosen)
    if tiered:
        if "ratio" in options:
            raise ValueError("ratio: did you mean target_ratio?")
        ratio = DEFAULT_RATIO if calibrate is None else CALIBRATED_RATIO
        ratio = ratio if target_ratio is None else target_ratio
        plans = [_tiered_plan(found, ratio, tiers, options) for found in chosen]
    else:
        make = _training_plan if trainable else _stored_plan
        plans = [make(found, DEFAULT_K if K is None else K, D, method, options) for found in chosen]
    # Errors of settings come before any work.
    if counts is not None:
        uses = given_counts(chosen, counts)
    if calibrate is not None:
        uses = _merged(run_calibration(model, chosen, calibrate), uses)
    bars = _bar if progress is True else progress or None
    before = model_bytes(model)
    rows, made = [], []
    for found, plan, use in zip(chosen, plans, uses):
        assert found.weight is not None
        known = knowledge(found, use)
        table, form = plan(seed, bars, known)
        lost = judge(found.weight, form, known)
        full = found.weight.numel() * found.weight.element_size()
        rows.append(_row(found, form, full, lost, compare(found.weight, known)))
        made.append(table)
    for found, table in zip(chosen, made):
        put(model, found, table)
    _tell_transformers(model)
    return _report(rows, before, left, tiered and calibrate is None and counts is None)


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
    _tell_transformers(model)
    return _report(rows, before, {})


# Plans: settings are checked for all tables before the first is built -----------------------------

Plan = Callable[[int, Optional[Progress], Knowledge], Tuple[nn.Module, Form]]


def _tiered_plan(
    found: EmbeddingTable,
    ratio: float,
    tiers: Sequence[Sequence[int]] | None,
    options: dict[str, Any],
) -> Plan:
    """How to make the tiers of a table."""
    weight = found.weight
    assert weight is not None
    if options:
        name, value = next(iter(options.items()))
        raise ValueError(
            f"{_say(name, value)} has no effect with tiers, which take target_ratio and tiers"
            + _meant(name, ("K", "D"))
        )
    with _naming(found):
        TieredEmbedding.check(
            weight.shape[1], lambda _, value: f"target_ratio={value}", ratio=ratio
        )
        if tiers is not None:
            check_tiers(tiers, *weight.shape)
        check_weight(weight)

    def make(seed: int, bars: Progress | None, known: Knowledge) -> tuple[nn.Module, Form]:
        settings: Settings = {"ratio": ratio, "tiers": tiers}
        form = make_form(found, TieredEmbedding, settings, known, seed, bars)
        return form, form

    return make


def _stored_plan(
    found: EmbeddingTable, K: int, D: int | None, method: str, options: dict[str, Any]
) -> Plan:
    """How to make the stored form of a table by `method`."""
    form = first_form(METHODS[method].forms if method in METHODS else [method])
    weight = found.weight
    assert weight is not None
    settings = {option.keyword: option.default for option in form.options}
    given = {**({} if D is None else {"D": D}), **options}
    for name, value in given.items():
        if name not in settings:
            raise ValueError(
                f"{_say(name, value)} has no effect with {_say('method', method)}, which takes "
                + ", ".join(settings)
                + _meant(name, settings)
            )
    if "K" in settings:
        settings["K"] = K
    if "D" in settings:
        settings["D"] = default_D(weight.shape[1], close=True)
    settings.update(given)
    with _naming(found):
        form.check(weight.shape[1], _say, **settings)
        check_weight(weight)

    def make(seed: int, bars: Progress | None, known: Knowledge) -> tuple[nn.Module, Form]:
        table = make_form(found, form, settings, known, seed, bars).to(weight.dtype)
        return table, table

    return make


def _training_plan(
    found: EmbeddingTable, K: int, D: int | None, method: str, options: dict[str, Any]
) -> Plan:
    """How to make the training form of a table."""
    weight = found.weight
    assert weight is not None
    takes = {f.name for f in fields(METHODS[method].options)}
    settings: dict[str, Any] = {"K": K} if "K" in takes else {}
    if D is not None:
        settings["D"] = D
    elif "D" in takes and METHODS[method].splits_rows:
        settings["D"] = default_D(weight.shape[1], close=True)
    settings.update(options)
    modules = found.modules.values()
    if any(getattr(module, "sparse", False) for module in modules):
        settings.setdefault("sparse", True)
    with _naming(found):
        make_options(method, settings).validate(weight.shape[1])
        check_weight(weight)
        if any(getattr(module, "scale_grad_by_freq", False) for module in modules):
            raise ValueError("scale_grad_by_freq=True has no training form; set it to False")

    def make(seed: int, bars: Progress | None, known: Knowledge) -> tuple[nn.Module, Form]:
        layer = make_layer(found, {"method": method, **settings}, seed, bars)
        if not weight.requires_grad:
            layer.requires_grad_(False)
        return layer, layer.compact(packed=True)

    return make


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
    if form.takes_use:
        use = {"weight": known.weight, "metric": known.metric, "corrected": corrected}
        settings = {**settings, **use}
    steps = _steps(bars, found, form.work(settings))
    table = form.from_table(full, found.padding_idx, seed=seed, progress=steps, **settings)
    if corrected:
        known.correct(table, full)
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


def _say(name: str, value: Any) -> str:
    return f"{name}={value!r}"


def _meant(name: str, known: Iterable[str]) -> str:
    """A question after an option in the wrong case, or nearly right: `k=32`, `targetratio=12`."""
    names = {k.lower(): k for k in (*known, *inspect.signature(compress).parameters)}
    close = difflib.get_close_matches(name.lower(), names, 1, 0.8)
    return f"; did you mean {names[close[0]]}?" if close else ""


def _check_types(model: Any, K: Any, D: Any, target_ratio: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: expected an nn.Module, found {model!r:.60}")
    for name, value in (("K", K), ("D", D)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{_say(name, value)}: must be a whole number")
    if target_ratio is not None and not isinstance(target_ratio, (int, float)):
        raise ValueError(f"{_say('target_ratio', target_ratio)}: must be a number")


@contextlib.contextmanager
def _naming(found: EmbeddingTable) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise type(error)(f"{found.path}: {error}") from error


def check_weight(weight: Tensor) -> None:
    if weight.device.type == "meta":
        raise ValueError("the table is on the meta device; load its weights first")
    if not all(bool(torch.isfinite(part).all()) for part in weight.split(1 << 13)):
        raise ValueError("the table holds NaN or infinite numbers")


# Report and progress ------------------------------------------------------------------------------


def _merged(uses: list[Use], counts: list[Use | None]) -> list[Use | None]:
    """What a calibration has seen, with counts where those are given."""
    for use, given in zip(uses, counts):
        if given is not None:
            use.counts = given.counts
    return list(uses)


def _row(
    found: EmbeddingTable, form: Form, before: int, lost: Lost | None, peers: tuple[Peer, ...] = ()
) -> TableReport:
    return TableReport(
        path=found.path,
        num_embeddings=form.num_embeddings,
        embedding_dim=form.embedding_dim,
        description=f"{form.kind} {form.describe()}",
        before=before,
        after=form.saved_nbytes,
        lost=lost,
        peers=peers,
        aliases=tuple(found.paths[1:]),
        tied=tuple(found.tied),
    )


def _report(
    rows: list[TableReport], before: int, left: dict[str, str], uncalibrated: bool = False
) -> Report:
    after = before - sum(row.before for row in rows) + sum(row.after for row in rows)
    return Report(tuple(rows), before, after, left, uncalibrated)


def _steps(bars: Progress | None, found: EmbeddingTable, steps: int) -> Callable[[int], Any] | None:
    bar = None if bars is None else bars(f"compress {found.path}", steps)
    return None if bar is None else lambda step: bar(1)


def _bar(what: str, steps: int) -> Callable[[int], Any]:
    """A progress bar on stderr."""
    from tqdm import tqdm

    return tqdm(total=steps, desc=what, leave=False).update


def _tell_transformers(model: nn.Module) -> None:
    """Hugging Face models save themselves; a program without transformers does not import it."""
    if "transformers" in sys.modules:
        from fairseq_dpq.any_model.huggingface import attach

        attach(model)
