"""The embedding tables of a model: finds them and what shares their numbers, puts others there, and
ties output layers to those. What a table is, and how a layer is tied, a plugin can say."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from typing import Any, Callable, Hashable, NamedTuple, Sequence, Union

import torch
from torch import Tensor, nn

from fairseq_dpq.files.memory import identity
from fairseq_dpq.forms.base import FLOATS, Form
from fairseq_dpq.output import CodesLinear

IsTable = Callable[[str, nn.Module], bool]
Which = Union[None, str, Sequence[str], Callable[[str, nn.Module], bool]]


class Scale(NamedTuple):
    """What rows are multiplied by as they are looked up, as in mBART, NLLB and Gemma of Hugging
    Face."""

    number: float
    rounded: bool  # to the dtype of the rows first


class ScaledEmbedding(nn.Module):
    """Rows of a table times a number. `weight` is the table without that number, as a tied output
    layer uses it."""

    def __init__(self, table: nn.Module, scale: Scale) -> None:
        super().__init__()
        self.table: Any = table
        self.scale = scale

    @property
    def weight(self) -> Tensor:
        return self.table.weight

    def forward(self, indices: Tensor) -> Tensor:
        rows = self.table(indices)
        number, rounded = self.scale
        if rounded:
            return rows * torch.full((), number, dtype=rows.dtype, device=rows.device)
        return rows * number

    def extra_repr(self) -> str:
        return f"scale={self.scale.number:g}"


def scale_of(module: nn.Module) -> Scale | None:
    """The scale of a table that only multiplies its rows by one; None for any other."""
    if isinstance(module, ScaledEmbedding):
        return module.scale
    kept = getattr(module, "scalar_embed_scale", None)
    number = kept if kept is not None else getattr(module, "embed_scale", None)
    if not isinstance(module, nn.Embedding) or not isinstance(number, (int, float)):
        return None
    if _stock(module, nn.Embedding):
        return None
    scale = Scale(float(number), kept is not None)
    return scale if module.weight.device.type == "meta" or _only_scales(module, scale) else None


@torch.no_grad()
def _only_scales(module: nn.Embedding, scale: Scale) -> bool:
    """Whether the module computes what `ScaledEmbedding` would, by a few of its rows."""
    last = module.num_embeddings - 1
    rows = torch.tensor([[0, last // 2], [last // 3, last]], device=module.weight.device)
    plain = nn.Embedding.from_pretrained(module.weight)
    try:
        found = type(module).forward(module, rows)  # past its hooks
    except Exception:  # it takes other arguments, and may do anything with these
        return False
    return isinstance(found, Tensor) and torch.equal(found, ScaledEmbedding(plain, scale)(rows))


@dataclass
class EmbeddingTable:
    """One embedding table of a model: where it is, and what shares its numbers."""

    modules: dict[str, nn.Module]  # every path of it; the first one names it
    weight: Tensor | None
    # What looks rows up in it, whatever paths that has: the module above, and the table there
    readers: set[tuple[nn.Module, nn.Module]] = field(default_factory=set)
    # What else has its weight: path, module, name of the parameter
    sharing: list[tuple[str, nn.Module, str]] = field(default_factory=list)
    tied: dict[str, nn.Module] = field(default_factory=dict)  # those that are nn.Linear, by path
    scales: dict[str, Scale] = field(default_factory=dict)  # of paths where rows are scaled
    problem: str = ""  # why it cannot be compressed

    def add(self, path: str, module: nn.Module) -> None:
        """Note that the table is at this path, too."""
        self.modules[path] = module
        scale = scale_of(module)
        if scale is not None:
            self.scales[path] = scale

    @property
    def path(self) -> str:
        return next(iter(self.modules))

    @property
    def paths(self) -> list[str]:
        return list(self.modules)

    @property
    def module(self) -> Any:
        """The table itself."""
        first = self.modules[self.path]
        return first.table if isinstance(first, ScaledEmbedding) else first

    @property
    def padding_idx(self) -> int | None:
        """Its padding row, if that is zero. Other rows are kept, whatever they are used for."""
        for module in self.modules.values():
            pad = getattr(module, "padding_idx", None)
            if pad is not None and self.weight is not None and not bool(self.weight[pad].any()):
                return pad
        return None


def is_embedding(path: str, module: nn.Module) -> bool:
    """Whether a module is a table of PyTorch's own."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag))


def find_tables(model: nn.Module, is_table: IsTable = is_embedding) -> list[EmbeddingTable]:
    """The embedding tables of a model, in order, each once, with what shares their weights."""
    return tables_among(list(model.named_modules(remove_duplicate=False)), is_table)


def tables_among(
    named: Sequence[tuple[str, nn.Module]], is_table: IsTable = is_embedding
) -> list[EmbeddingTable]:
    """The same among modules by path, which need not be a model."""
    tables: dict[Hashable, EmbeddingTable] = {}
    modules = dict(named)
    for path, module in named:
        if is_table(path, module):
            weight = module._parameters.get("weight")
            key = id(module) if weight is None else identity(weight)
            found = tables.setdefault(key, EmbeddingTable({}, weight))
            found.add(path, module)
            found.readers.add((modules.get(path.rpartition(".")[0], module), module))
            found.problem = found.problem or _problem(path, module)
    seen: set[tuple[int, str]] = set()
    for path, module in named:
        for name, parameter in module._parameters.items():
            table = None if parameter is None else tables.get(identity(parameter))
            if table is None or path in table.modules or (id(module), name) in seen:
                continue
            seen.add((id(module), name))
            table.sharing.append((path, module, name))
            if isinstance(module, nn.Linear) and name == "weight" and _stock(module, nn.Linear):
                table.tied[path] = module
            else:
                table.problem = table.problem or (
                    f"its weight is also {path}.{name} of a {type(module).__name__}, which is "
                    "neither nn.Embedding nor nn.Linear"
                )
    return list(tables.values())


def _stock(module: nn.Module, cls: Any) -> bool:
    """Whether a module computes what its base class does."""
    return type(module).forward is cls.forward and "forward" not in module.__dict__


def _problem(path: str, module: nn.Module) -> str:
    """Why a table cannot be compressed; empty if it can."""
    kind = type(module).__name__
    if not path:
        return "it is the model itself; use CompactEmbedding.from_table(model.weight)"
    if isinstance(module, nn.EmbeddingBag):
        return f"{kind} sums the rows of a bag; only nn.Embedding can be compressed"
    if not _stock(module, nn.Embedding) and scale_of(module) is None:
        return f"{kind} has a forward of its own; only nn.Embedding can be compressed"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed from others (a parametrization)"
    if weight.dtype not in FLOATS:
        return f"{weight.dtype}: only float32, float16 and bfloat16 can be compressed"
    if module.max_norm is not None:
        return f"max_norm={module.max_norm} changes rows as they are looked up; set it to None"
    return ""


def choose(
    tables: Sequence[EmbeddingTable], which: Which, min_rows: int
) -> tuple[list[EmbeddingTable], dict[str, str]]:
    """The tables to compress, and by path why each of the others stays as it is.

    Without `which`, those of at least `min_rows` rows. ValueError if `which` names no table, or one
    that cannot be compressed.
    """
    chosen, left = [], {}
    patterns = [which] if isinstance(which, str) else which
    listed = [path for found in tables for path in found.paths]
    for found in tables:
        rows = found.module.num_embeddings
        if patterns is None:
            few = f"{rows} rows, fewer than min_rows={min_rows}" if rows < min_rows else ""
            why = found.problem or few
        else:
            if callable(patterns):
                taken = any(patterns(path, module) for path, module in found.modules.items())
            else:
                taken = any(fnmatch.filter(found.paths, pattern) for pattern in patterns)
            why = "" if taken else "not chosen"
        if why:
            left[found.path] = why
        elif found.problem:
            raise ValueError(f"{found.path} cannot be compressed: {found.problem}")
        else:
            chosen.append(found)
    if patterns is None and not chosen:
        reasons = "; ".join(f"{path or 'the module'}: {why}" for path, why in left.items())
        raise ValueError(f"nothing to compress: {reasons or 'the model has no embedding table'}")
    named = () if patterns is None or callable(patterns) else patterns
    unmatched = [pattern for pattern in named if not fnmatch.filter(listed, pattern)]
    if unmatched or not chosen:
        wanted = f" called {unmatched[0]}" if unmatched else " that `which` chooses"
        it_has = ", ".join(listed) or "no embedding table"
        raise ValueError(f"the model has no embedding table{wanted}; it has {it_has}")
    return chosen, left


def put(
    model: nn.Module,
    found: EmbeddingTable,
    table: nn.Module,
    tie: Callable[[nn.Module, str, nn.Module], None] | None = None,
) -> None:
    """Put a table where the found one is, and tie its output layers to the new one: each nn.Linear
    becomes a CodesLinear, or `tie` is called with each module that shares the weight, the name
    of the parameter there, and the new table."""
    wrapped: dict[int, nn.Module] = {}
    for path, old in found.modules.items():
        scale = found.scales.get(path)
        if id(old) not in wrapped:
            wrapped[id(old)] = table if scale is None else ScaledEmbedding(table, scale)
            wrapped[id(old)].train(old.training)
            _keep_hooks(old, wrapped[id(old)])
        set_module(model, path, wrapped[id(old)])
    if tie is not None:
        for _, module, name in found.sharing:
            tie(module, name, table)
        return
    for old in found.tied.values():
        layer = CodesLinear(table, old._parameters["bias"]).train(old.training)
        _keep_hooks(old, layer)
        for path, module in list(model.named_modules(remove_duplicate=False)):
            if module is old:
                set_module(model, path, layer)


def _keep_hooks(old: nn.Module, new: nn.Module) -> None:
    for name, hooks in vars(old).items():
        if name.startswith(("_forward_", "_backward_")) and isinstance(hooks, dict):
            getattr(new, name, {}).update(hooks)


def set_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module at a path."""
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module


def placed(model: nn.Module, kind: Any) -> list[EmbeddingTable]:
    """The tables of a class, or of several, that `put` has placed, each once, in order."""
    tables: dict[int, EmbeddingTable] = {}
    outputs: dict[CodesLinear, str] = {}
    inside = ""  # of what holds a table; a form may be made of forms
    for path, module in model.named_modules(remove_duplicate=False):
        if inside and path.startswith(inside):
            continue
        holds = isinstance(module, (Form, CodesLinear, ScaledEmbedding))
        inside = f"{path}." if holds else ""
        table = module.table if isinstance(module, ScaledEmbedding) else module
        if isinstance(module, CodesLinear):
            outputs.setdefault(module, path)
        elif isinstance(table, kind):
            tables.setdefault(id(table), EmbeddingTable({}, None)).add(path, module)
    for layer, path in outputs.items():
        if id(layer.table) in tables:
            tables[id(layer.table)].tied[path] = layer
    return list(tables.values())
