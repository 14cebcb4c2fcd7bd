"""What a method of learning a table has to provide, and the options that all methods have.

A method holds no tensors: it is given the table's codebook and its own options. `keyed.py` has what
those that compare queries with keys share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Callable, ClassVar, Generic, Mapping, NamedTuple, TypeVar

from torch import Tensor

from fairseq_dpq.config import DPQConfigError, Format, check_fields, format_option, option
from fairseq_dpq.registry import Registry, check_complete
from fairseq_dpq.sizes import DEFAULT_K, MAX_K, default_D, division_problem
from fairseq_dpq.training.codebook import Codebook, TrainOutput
from fairseq_dpq.training.codes import look_up
from fairseq_dpq.training.initialization import Trained
from fairseq_dpq.training.trackers import Shapes, Tracker

START = 0.02  # deviation of queries and keys at the start

Need = Callable[[bool, str, str], None]  # (holds, option, what would be right)


class TableUse(NamedTuple):
    """What is known of a table when the options that were left open get their values."""

    embedding_dim: int
    tied: bool = False  # an output layer shares it
    max_update: int = 0  # length of the training, 0 if it is not known
    trained: bool = False  # it starts from a trained table


@dataclass
class MethodOptions:
    """Options of one table. Each method has a subclass with its own: `config.option` fields."""

    method: ClassVar[Method[Any]]  # set by `register_method`

    sparse: bool = option(
        False,
        "sparse gradient of the query matrix, as nn.Embedding(sparse=True) has it; no flag, "
        "because fairseq's trainer and optimisers only take dense gradients",
        flag=False,
    )

    def validate(
        self,
        embedding_dim: int | None = None,
        format: Format = format_option,
        dim_name: str = "embedding_dim",
    ) -> None:
        """Raise `DPQConfigError` for what cannot work; `format` words an option for the reader."""

        def need(ok: bool, name: str, what: str) -> None:
            if not ok:
                raise DPQConfigError(f"{format(name, getattr(self, name))}: {what}")

        check_fields(self, format)
        D = getattr(self, "D", None)
        if self.method.splits_rows and D is not None and embedding_dim is not None:
            problem = division_problem(D, embedding_dim)
            if problem:
                dim = format_option(dim_name, embedding_dim)
                dim = dim.replace("=", " ") if dim.startswith("-") else dim
                raise DPQConfigError(f"{format('D', D)} does not divide {dim}; {problem}")
        self.method.validate(self, embedding_dim, need)

    def resolved(self: O, use: TableUse) -> O:
        """The options with a value for each that was left open, as the method has it."""
        own = self.method.defaults(self, use)
        return replace(self, **{k: v for k, v in own.items() if getattr(self, k) is None})

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of `DPQEmbedding`, and what a record keeps."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"method": self.method.name, **own}

    def compact_bits(self, num_embeddings: int, embedding_dim: int) -> int:
        """Bits of the inference form by the paper's formula: codes and 32-bit values."""
        return self.method.bits(
            self.resolved(TableUse(embedding_dim)), num_embeddings, embedding_dim
        )

    def compression_ratio(self, num_embeddings: int, embedding_dim: int) -> float:
        """Bits of the full 32-bit table over bits of the inference form."""
        full = 32 * num_embeddings * embedding_dim
        return full / self.compact_bits(num_embeddings, embedding_dim)

    def sizes(self) -> list[str]:
        """The options that set its size, `K=32`; a flag by its name."""
        given = [(name, getattr(self, name)) for name in self.method.sized_by]
        return [name if value is True else f"{name}={value}" for name, value in given if value]

    def describe(self) -> str:
        """Method and size in a few words, for logs and tables."""
        return " ".join([self.method.name, *self.sizes()])


@dataclass
class CodeOptions(MethodOptions):
    """Of a method with codes."""

    K: int = option(
        None,
        f"number of codes in each group (default: {DEFAULT_K})",
        valid=lambda K: 2 <= K <= MAX_K,
        right=f"must be from 2 to {MAX_K}; try {DEFAULT_K}",
        shapes=True,
    )
    D: int = option(
        None,
        "number of groups; divides the embedding size (default: a quarter of it, half of it where "
        "an output layer shares the table, or the divisor nearest to that; 32 for kd_codes and "
        "fixed_codes)",
        valid=lambda D: D >= 1,
        right="must be 1 or more; try 16",
        shapes=True,
    )


@dataclass
class ProductOptions(CodeOptions):
    """Of a method with product codes."""

    share_subspaces: bool = option(
        False, "all groups share one set of keys and values (smaller still)", shapes=True
    )


O = TypeVar("O", bound=MethodOptions)
CO = TypeVar("CO", bound=CodeOptions)
PO = TypeVar("PO", bound=ProductOptions)


class Method(Generic[O]):
    """How a table's rows are learned. What raises NotImplementedError here, a method provides."""

    name: ClassVar[str]
    summary: ClassVar[str]  # a few words for the help text
    options: ClassVar[type[MethodOptions]]
    # Options that logs and tables name; the first must be given, and turns the plugin on.
    sized_by: ClassVar[tuple[str, ...]] = ("K", "D")
    regularized = False  # whether its loss has a term of its own
    forms: ClassVar[tuple[str, ...]] = ("product_codes",)  # kinds that can hold it, best first
    stored: ClassVar[tuple[str, ...]] = ("values",)  # parameters that those keep, for the size

    @property
    def switch(self) -> str:
        """The option that must be given."""
        return self.sized_by[0]

    @property
    def has_codes(self) -> bool:
        return issubclass(self.options, CodeOptions)

    @property
    def splits_rows(self) -> bool:
        """Whether D groups share the columns of a row among them."""
        return issubclass(self.options, ProductOptions)

    # Options ------------------------------------------------------------------------------------

    def validate(self, c: O, embedding_dim: int | None, need: Need) -> None:
        """What the fields of its options do not say; `need` raises the error."""

    def defaults(self, c: O, use: TableUse) -> dict[str, Any]:
        """Values of the options that the user may leave open (None)."""
        if not self.has_codes:
            return {}
        return {"K": DEFAULT_K, "D": default_D(use.embedding_dim, close=use.tied)}

    def describe_start(self, c: O) -> str:
        """What the first updates do, for the log; empty if there is nothing to say."""
        return ""

    def collapse_hints(self, c: O) -> list[tuple[str, Any]]:
        """Options with a value that help when codes collapse."""
        return []

    # Tensors and their start --------------------------------------------------------------------

    def shapes(self, c: O, num_embeddings: int, embedding_dim: int) -> Shapes:
        """Its parameters: `query` (rows, size) and `values`, then its own."""
        raise NotImplementedError

    def constants(self, c: O) -> tuple[str, ...]:
        """Parameters that no gradient moves."""
        return ()

    def trackers(self, c: O, shapes: Shapes) -> list[Tracker]:
        """What it follows during training."""
        return []

    def initialize(self, parameters: Mapping[str, Tensor], c: O, tied: bool) -> None:
        """Set the starting values that matter to learning; the others come from the table.
        `tied` if an output layer shares the table."""

    def first_statistics(self, book: Codebook, c: O, real: Tensor) -> None:
        """Set the running statistics for the first batch, which has none before it."""

    def load_option_files(self, book: Codebook, c: O, path: str) -> None:
        """Read the files that its options name into a new table, at `path` of its model."""

    def start_from_table(self, book: Codebook, c: O, trained: Trained) -> None:
        """Set the codebook so that its rows come near a trained table (n, d); also at the end of a
        warm-up, when that table is the queries."""
        raise NotImplementedError

    # Rows ---------------------------------------------------------------------------------------

    def codes(self, rows: Tensor, book: Codebook, c: O) -> Tensor:
        """The codes (tokens, D) of query rows (tokens, size) in evaluation; D is 0 if none."""
        raise NotImplementedError

    def rebuild(self, rows: Tensor, codes: Tensor, book: Codebook, c: O) -> Tensor:
        """Embeddings (tokens, d) of given codes, with the gradient where one is wanted."""
        raise NotImplementedError

    def train(self, rows: Tensor, book: Codebook, c: O) -> TrainOutput:
        """Embeddings of query rows in training, with the method's gradient; those of evaluation,
        unless a method has others."""
        codes = self.codes(rows, book, c)
        out = self.rebuild(rows, codes, book, c)
        return self.observe(rows, codes, book, c)._replace(rows=out)

    def observe(self, rows: Tensor, codes: Tensor, book: Codebook, c: O) -> TrainOutput:
        """What statistics and the regulariser take from a batch whose codes are known."""
        return TrainOutput(rows, codes=codes)

    def trains_on_eval_codes(self, c: O) -> bool:
        """Whether one table of the rows that `rebuild` gives may serve all lookups and the output
        layer of an update."""
        return False

    # Inference ----------------------------------------------------------------------------------

    def learned(self, book: Codebook, c: O, codes: Tensor | None) -> dict[str, Tensor]:
        """What inference needs, by the names that its `forms` take; `codes` (n, D) if any."""
        raise NotImplementedError

    def bits(self, c: Any, num_embeddings: int, embedding_dim: int) -> int:
        """Bits of the inference form by the paper's formula: codes, and numbers of 32 bits."""
        shapes = self.shapes(c, num_embeddings, embedding_dim)
        numbers = sum(math.prod(shapes[name]) for name in self.stored if name in shapes)
        codes = num_embeddings * c.D * (c.K - 1).bit_length() if self.has_codes else 0
        return codes + 32 * numbers


class ProductMethod(Method[PO]):
    """Rows put together from D parts, one of K values each: product codes."""

    sized_by = ("K", "D", "share_subspaces")

    def shapes(self, c: PO, num_embeddings: int, embedding_dim: int) -> Shapes:
        groups = 1 if c.share_subspaces else c.D
        values = (groups, c.K, embedding_dim // c.D)
        return {"query": (num_embeddings, embedding_dim), "values": values}

    def rebuild(self, rows: Tensor, codes: Tensor, book: Codebook, c: PO) -> Tensor:
        return look_up(book.values.float(), codes).flatten(1)

    def learned(self, book: Codebook, c: PO, codes: Tensor | None) -> dict[str, Tensor]:
        assert codes is not None
        return {"codes": codes, "values": book.values.detach()}


# The registry -------------------------------------------------------------------------------------

METHODS: Registry[Method[Any]] = Registry("method")
DEFAULT_METHOD = "sx"  # needs no term in the loss
M = TypeVar("M", bound="type[Method[Any]]")


def register_method(cls: M) -> M:
    """Make a method known by its name; a decorator. Its options become flags and keywords."""
    check_complete(cls, Method)
    known = all_options(METHODS._items)
    for f in fields(cls.options):
        other = known.get(f.name)
        if other is not None and (other.type, other.default) != (f.type, f.default):
            raise ValueError(
                f"option {f.name!r} of method {cls.name!r} differs from that of another method; "
                "give it another name"
            )
    if "method" in vars(cls.options):
        raise ValueError(f"the options of method {cls.name!r} belong to another one; subclass them")
    METHODS.add(cls.name, cls())
    cls.options.method = METHODS._items[cls.name]
    return cls


def all_options(methods: Mapping[str, Method[Any]] = METHODS) -> dict[str, Any]:
    """The fields of all methods, by name."""
    return {f.name: f for method in methods.values() for f in fields(method.options)}


def takers(name: str) -> list[str]:
    """The methods that have an option."""
    return [m.name for m in METHODS.values() if name in {f.name for f in fields(m.options)}]


def make_options(
    method: str, given: Mapping[str, Any], format: Format = format_option
) -> MethodOptions:
    """The options of a method; one that it does not have is an error."""
    if method not in METHODS:
        raise DPQConfigError(f"{format('method', method)}: choose one of {', '.join(METHODS)}")
    cls = METHODS[method].options
    names = [f.name for f in fields(cls)]
    for name, value in given.items():
        if name in names:
            continue
        owners = takers(name)
        if not owners:
            meant = [n for n in names if n.lower() == name.lower()]
            hint = f"did you mean {meant[0]}?" if meant else f"{method} takes {', '.join(names)}"
            raise DPQConfigError(f"{format(name, value)}: there is no such option; {hint}")
        raise DPQConfigError(
            f"{format(name, value)} has no effect with {format('method', method)}; use "
            + " or ".join(format("method", owner) for owner in owners)
        )
    return cls(**given)


def checked_options(method: str, given: Mapping[str, Any], use: TableUse) -> MethodOptions:
    """The options of a method, valid and with a value for each."""
    config = make_options(method, given)
    config.validate(use.embedding_dim)
    config = config.resolved(use)
    config.validate(use.embedding_dim)
    return config
