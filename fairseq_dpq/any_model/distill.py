"""`distill`: bring a compressed model near the full one, by its hidden states and its outputs."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from fairseq_dpq.any_model.calibration import run_batch
from fairseq_dpq.files.writer import save_state, write_whole
from fairseq_dpq.forms.base import Form
from fairseq_dpq.kept import collect_regularizer
from fairseq_dpq.layer import DPQEmbedding
from fairseq_dpq.model import placed
from fairseq_dpq.output import CodesLinear

_RISE = 0.05  # share of the updates over which the rate rises; then it falls to 0


def distill(
    model: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Any],
    *,
    updates: int,
    lr: float = 0.01,
    hidden: float = 1.0,
    everything: bool = False,
    state: str | Path | None = None,
    save_every: int = 100,
    progress: bool = True,
) -> list[float]:
    """Train a compressed model to do what the full one does; the loss of each update.

    Compact tables keep their codes; their values are trained. Tables of `compress(...,
    trainable=True)` are trained whole; call `compact` afterwards. There is no dropout.

    Args:
        teacher: The full model, e.g. a `copy.deepcopy` of the model before `compress`.
        batches: What the models take: tensors, tuples, or dictionaries of arguments, as a
            DataLoader gives them. Positions whose `attention_mask` is 0 do not count. Read again
            from its start as often as needed.
        updates: Number of batches to train on.
        lr: Largest step of an update, as a share of a table's root mean square.
        hidden: Weight of the hidden states of all layers; that of the outputs is 1.
        everything: Train all weights, not only tables and the biases of tied output layers.
        state: A file to continue from if it is there; written every `save_every` updates.
    """
    tables = [found.module for found in placed(model, (Form, DPQEmbedding))]
    if not tables:
        raise ValueError("the model has no compressed table; call compress(model) first")
    if any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters()):
        raise ValueError("the model has 16-bit weights; call model.float() before distill")
    if updates < 1:
        raise ValueError(f"updates={updates}: give 1 or more")
    from tqdm import tqdm

    losses: list[float] = []
    with _in_training(model, tables, everything) as chosen, _in_training(teacher, [], False):
        optimizer = torch.optim.Adam([{"params": [p], "lr": lr * unit} for p, unit in chosen])
        schedule = LambdaLR(optimizer, lambda update: _rate(update / updates))
        parts = {"optimizer": optimizer, "schedule": schedule}
        layers = (table for table in tables if isinstance(table, DPQEmbedding))
        parts.update({f"layer{i}": layer for i, layer in enumerate(layers)})  # their statistics
        done = 0 if state is None else _load(Path(state), parts, chosen, updates)
        rounds = _rounds(batches, done, updates)
        bar = tqdm(rounds, "distill", updates, initial=done, disable=not progress)
        for batch in bar:
            with torch.no_grad():
                wanted = _run(teacher, batch)
            loss = _loss(_run(model, batch), wanted, hidden, batch)
            optimizer.zero_grad(set_to_none=True)
            (loss + collect_regularizer(model)).backward()
            optimizer.step()
            schedule.step()
            _keep_padding(tables)
            losses.append(float(loss.detach()))
            bar.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)
            done += 1
            if state is not None and (done % save_every == 0 or done == updates):
                _save(Path(state), parts, chosen, done, updates)
    return losses


def _rate(share: float) -> float:
    """Of the largest rate, after this share of the updates."""
    return min(1.0, (share + 1e-3) / _RISE) * 0.5 * (1 + math.cos(math.pi * share))


# What is trained ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _in_training(
    model: nn.Module, tables: list[Any], everything: bool
) -> Iterator[list[tuple[Tensor, float]]]:
    """The tensors to train, in float32, with the units of their rates. Afterwards the model is as
    it was but for their numbers."""
    flags = [(p, p.requires_grad) for p in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    # The numbers of forms, and of the forms that they are made of.
    parts = [m for table in tables if isinstance(table, Form) for m in table.modules()]
    found = [(m, n, b) for m in parts for n, b in m._buffers.items() if b is not None]
    kept: list[Any] = [x for x in found if x[2].is_floating_point() and x[2].numel() > 1]
    try:
        model.eval().requires_grad_(everything)
        chosen: list[Tensor] = []
        for table in tables:
            if not isinstance(table, Form):
                fixed = table.train().method.constants(table.config)
                named = table.named_parameters()
                chosen += [p.requires_grad_() for name, p in named if name not in fixed]
        for module, name, buffer in kept:
            chosen.append(buffer.detach().float().requires_grad_())
            module._buffers[name] = chosen[-1]
        outputs = [m for m in model.modules() if isinstance(m, CodesLinear) and tables]
        biases = [layer.bias.requires_grad_() for layer in outputs if layer.bias is not None]
        unique = {id(t): t for t in [*biases, *chosen, *(model.parameters() if everything else ())]}
        logits = [*biases, *(t for t in chosen if t.dim() == 1)]
        units = {id(t): 1.0 for t in logits}
        yield [(t, units.get(key) or _root_mean_square(t)) for key, t in unique.items()]
    finally:
        for module, name, buffer in kept:
            module._buffers[name] = module._buffers[name].detach().to(buffer.dtype)
        for parameter, flag in flags:
            parameter.requires_grad_(flag).grad = None
        for module, mode in modes:
            module.training = mode


def _root_mean_square(tensor: Tensor) -> float:
    return float(tensor.detach().float().pow(2).mean().sqrt().clamp_min(1e-3))


@torch.no_grad()
def _keep_padding(tables: list[Any]) -> None:
    """Product codes have a last row of values for padding: zeros."""
    for module in (module for table in tables for module in table.modules()):
        if hasattr(module, "value_rows"):
            module.values[module.value_rows :] = 0


# Losses -------------------------------------------------------------------------------------------


def _run(model: nn.Module, batch: Any) -> tuple[list[Tensor], Any]:
    """Hidden states and outputs. Layers are the members of each outermost ModuleList."""
    states: list[Tensor] = []

    def hook(module: nn.Module, args: Any, out: Any) -> None:
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if isinstance(first, Tensor) and first.is_floating_point():
            states.append(first)

    inside: set[int] = set()
    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            if not isinstance(module, (nn.ModuleList, Form)) or id(module) in inside:
                continue
            inside.update(id(inner) for inner in module.modules())
            if isinstance(module, nn.ModuleList):
                for layer in module:
                    hooks.callback(layer.register_forward_hook(hook).remove)
        return states, run_batch(model, batch)


def _loss(found: Any, wanted: Any, hidden: float, batch: Any) -> Tensor:
    """Divergence of the output distributions, or error of other outputs, and the mean error of the
    hidden states; errors are shares of what varies."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None

    def kept(tensor: Tensor) -> Tensor:  # rows (tokens, d) at positions that count
        if mask is None or mask.shape != tensor.shape[:-1]:
            return tensor.flatten(0, -2).float()
        return tensor[mask.bool()].float()

    def error(mine: Tensor, right: Tensor) -> Tensor:
        mine, right = kept(mine), kept(right)
        return (mine - right).pow(2).sum() / (right - right.mean(0)).pow(2).sum().clamp_min(1e-12)

    (mine, out), (theirs, right) = found, wanted
    if hasattr(out, "logits"):
        p, q = (kept(x.logits).log_softmax(-1) for x in (right, out))
        loss = F.kl_div(q, p, reduction="batchmean", log_target=True)
    else:
        loss = error(*(x if isinstance(x, Tensor) else x[0] for x in (out, right)))
    if len(mine) != len(theirs):
        raise ValueError(f"the model has {len(mine)} layers, the teacher {len(theirs)}")
    errors = [error(x, y) for x, y in zip(mine, theirs)]
    return loss + hidden * torch.stack(errors).mean() if errors and hidden else loss


# Batches and state --------------------------------------------------------------------------------


def _rounds(batches: Iterable[Any], done: int, updates: int) -> Iterator[Any]:
    """Batches number `done` to `updates`, from the start again where they end."""
    count = 0
    while count < updates:
        before = count
        for batch in batches:
            if count >= done:
                yield batch
            count += 1
            if count == updates:
                return
        if count == before:
            raise ValueError("batches is empty, or cannot be read twice; give a list or a loader")


def _save(path: Path, parts: dict[str, Any], chosen: list[Any], done: int, updates: int) -> None:
    state: dict[str, Any] = {name: part.state_dict() for name, part in parts.items()}
    state.update(done=done, updates=updates, trained=[tensor.detach() for tensor, _ in chosen])
    write_whole(path, lambda file: save_state(state, file), force=True)


@torch.no_grad()
def _load(path: Path, parts: dict[str, Any], chosen: list[Any], updates: int) -> int:
    """Updates that the file has seen; 0 if there is none."""
    if not path.exists():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    shapes = [tuple(tensor.shape) for tensor, _ in chosen]
    if state["updates"] != updates or [tuple(t.shape) for t in state["trained"]] != shapes:
        raise ValueError(f"{path} is of another model or number of updates; remove it")
    for name, part in parts.items():
        part.load_state_dict(state[name])
    for (tensor, _), saved in zip(chosen, state["trained"]):
        tensor.copy_(saved)
    return state["done"]
