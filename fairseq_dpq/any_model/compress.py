"""`compress` and `compact`: the embedding tables of any model, small in place."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import fields
from typing import Any, Callable, Iterator, Optional, Tuple

import torch
from torch import Tensor, nn

from fairseq_dpq.any_model.finding import Found, Which, choose, find_tables, placed, put
from fairseq_dpq.any_model.report import Report, TableReport, model_bytes
from fairseq_dpq.config import DPQConfig
from fairseq_dpq.embedding import DPQEmbedding
from fairseq_dpq.forms import FORMS
from fairseq_dpq.forms.base import Form
from fairseq_dpq.forms.product_codes import CompactEmbedding
from fairseq_dpq.forms.quantization import reconstruction_error
from fairseq_dpq.kmeans import ITERATIONS
from fairseq_dpq.methods import METHODS
from fairseq_dpq.methods.vq import VQ
from fairseq_dpq.sizes import near_divisors

Progress = Callable[[str, int], Callable[[int], Any]]  # (what, steps) -> report of steps done
MIN_ROWS = 5000


def compress(
    model: nn.Module,
    K: int = 32,
    D: int | None = None,
    method: str = VQ.name,
    *,
    which: Which = None,
    trainable: bool = False,
    min_rows: int = MIN_ROWS,
    seed: int = 0,
    progress: bool | Progress = False,
    **options: Any,
) -> Report:
    """Replace the embedding tables of a model by compressed ones, in place.

    Without `trainable` each table is stored by its codes, found by k-means. With it, each becomes a
    `DPQEmbedding` that starts from the same codes; train the model, then call `compact`.

    A table that several modules share stays shared. An `nn.Linear` that shares a table's weight
    stays tied to it: it becomes a `CodesLinear`, which computes logits from the codes.

    Args:
        K: Number of codes in each group.
        D: Number of groups; divides the embedding size. Default: half of the embedding size.
        method: `vq`, `sx` or `low_rank`; without `trainable` also any stored form, e.g. `scalar`.
        which: Tables to compress: a path or pattern (`"encoder.*"`), several of them, or a function
            of path and module. Default: all tables with at least `min_rows` rows.
        seed: Seed of k-means.
        progress: True for a progress bar, or a function that makes one.
        options: Settings of the form (`bits=4`), or with `trainable` of `DPQConfig`.
    """
    names = METHODS if trainable else {**METHODS, **FORMS}
    if method not in names:
        raise ValueError(f"method={method!r}: choose one of {', '.join(names)}")
    chosen, left = choose(find_tables(model), which, min_rows)
    make = _training_plan if trainable else _stored_plan
    plans = [make(found, K, D, method, options) for found in chosen]  # errors before any work
    bars = _bar if progress is True else progress or None
    made = [plan(seed, bars) for plan in plans]
    before = model_bytes(model)
    rows = []
    for found, (table, form) in zip(chosen, made):
        weight, pad = found.weight, form.padding_idx
        assert weight is not None
        error = reconstruction_error(weight, form, pad)
        rows.append(_row(found, form, weight.numel() * weight.element_size(), error))
        put(model, found, table)
    report = _report(rows, before, left)
    if not trainable:
        _tell_transformers(model)
    return report


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
        steps = _steps(bars, f"compact {found.path}", layer.num_embeddings)
        form = layer.compact(packed=True, progress=steps)
        full = layer.num_embeddings * layer.embedding_dim * layer.query.element_size()
        before += full - sum(x.numel() * x.element_size() for x in layer.state_dict().values())
        rows.append(_row(found, form, full, None))
        put(model, found, form)
    _tell_transformers(model)
    return _report(rows, before, {})


# Plans: settings are checked for all tables before the first is built -----------------------------

Plan = Callable[[int, Optional[Progress]], Tuple[nn.Module, Form]]


def _stored_plan(found: Found, K: int, D: int | None, method: str, options: dict[str, Any]) -> Plan:
    """How to make the stored form of a table by `method`."""
    has_codes = method in METHODS and METHODS[method].has_codes
    form = CompactEmbedding if has_codes else FORMS[method]
    weight = found.weight
    assert weight is not None
    settings = {option.keyword: option.default for option in form.options}
    given = {**({} if D is None else {"D": D}), **options}
    for name, value in given.items():
        if name not in settings:
            raise ValueError(
                f"{_say(name, value)} has no effect with {_say('method', method)}, which takes "
                + ", ".join(settings)
            )
    if "K" in settings:
        settings["K"] = K
    if "D" in settings:
        settings["D"] = _groups(weight.shape[1])
    settings.update(given)
    with _naming(found):
        form.check(weight.shape[1], _say, **settings)
        _check_weight(weight)

    def make(seed: int, bars: Progress | None) -> tuple[nn.Module, Form]:
        steps = _steps(bars, f"compress {found.path}", form.work(settings))
        full = weight.detach()
        one = None if steps is None else lambda step: steps(1)
        table = form.from_table(full, found.padding_idx, seed=seed, progress=one, **settings)
        table = table.to(weight.dtype)
        return table, table

    return make


def _training_plan(
    found: Found, K: int, D: int | None, method: str, options: dict[str, Any]
) -> Plan:
    """How to make the training form of a table."""
    weight = found.weight
    assert weight is not None
    known = {f.name for f in fields(DPQConfig)}
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ValueError(f"{_say(unknown[0], options[unknown[0]])}: there is no such option")
    if D is None and "D" in METHODS[method].options:
        D = _groups(weight.shape[1])
    settings = {"K": K, "method": method, **({} if D is None else {"D": D}), **options}
    modules = found.modules.values()
    if any(getattr(module, "sparse", False) for module in modules):
        settings.setdefault("sparse", True)
    with _naming(found):
        DPQConfig(**settings).validate(weight.shape[1])
        _check_weight(weight)
        if any(getattr(module, "scale_grad_by_freq", False) for module in modules):
            raise ValueError("scale_grad_by_freq=True has no training form; set it to False")

    def make(seed: int, bars: Progress | None) -> tuple[nn.Module, Form]:
        steps = _steps(bars, f"compress {found.path}", ITERATIONS)
        one = None if steps is None else lambda step: steps(1)
        full, pad = weight.detach(), found.padding_idx
        layer = DPQEmbedding.from_pretrained(full, pad, seed=seed, progress=one, **settings)
        if not weight.requires_grad:
            layer.requires_grad_(False)
        return layer, layer.compact(packed=True)

    return make


def _say(name: str, value: Any) -> str:
    return f"{name}={value!r}"


def _groups(embedding_dim: int) -> int:
    """The default D: groups of two numbers, or near that."""
    half = max(1.0, embedding_dim / 2)
    near = near_divisors(embedding_dim, max(1, embedding_dim // 2))
    return min(near, key=lambda x: max(x / half, half / x))


@contextlib.contextmanager
def _naming(found: Found) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise type(error)(f"{found.path}: {error}") from error


def _check_weight(weight: Tensor) -> None:
    if weight.device.type == "meta":
        raise ValueError("the table is on the meta device; load its weights first")
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("the table holds NaN or infinite numbers")


# Report and progress ------------------------------------------------------------------------------


def _row(found: Found, form: Form, before: int, error: float | None) -> TableReport:
    return TableReport(
        path=found.path,
        num_embeddings=form.num_embeddings,
        embedding_dim=form.embedding_dim,
        description=f"{form.kind} {form.describe()}",
        before=before,
        after=form.saved_nbytes,
        error=error,
        aliases=tuple(found.paths[1:]),
        tied=tuple(found.tied),
    )


def _report(rows: list[TableReport], before: int, left: dict[str, str]) -> Report:
    after = before - sum(row.before for row in rows) + sum(row.after for row in rows)
    return Report(tuple(rows), before, after, left)


def _steps(bars: Progress | None, what: str, steps: int) -> Callable[[int], Any] | None:
    return None if bars is None else bars(what, steps)


def _bar(what: str, steps: int) -> Callable[[int], Any]:
    """A progress bar on stderr."""
    from tqdm import tqdm

    return tqdm(total=steps, desc=what, leave=False).update


def _tell_transformers(model: nn.Module) -> None:
    """A Hugging Face model can save itself; a program without transformers does not import it."""
    if "transformers" in sys.modules:
        from fairseq_dpq.any_model.huggingface import attach

        attach(model)
