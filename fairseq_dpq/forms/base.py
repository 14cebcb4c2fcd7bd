"""What a stored form of a table has to provide: lookup, its bytes, its tensors, its description."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, ClassVar, Dict, Mapping, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_dpq.forms.packing import code_bits, code_dtype, unpack_codes
from fairseq_dpq.training.codes import code_usage
from fairseq_dpq.training.initialization import Trained, real_rows

Settings = Dict[str, Any]
Tensors = Mapping[str, Tensor]
Say = Callable[[str, Any], str]  # how an error names a setting and its value
T = TypeVar("T", bound="Form")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class FormOption(NamedTuple):
    """A setting of a form that fairseq-dpq-quantize takes."""

    keyword: str  # of the constructor and of `from_table`
    flag: str  # one of the plugin's, or the form's own
    default: Any
    help: str = ""  # of a flag of its own


class Layout(NamedTuple):
    """What a tensor of a stored form must be."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    optional: bool = False


class CompactRequest(NamedTuple):
    """What is asked of the inference form of a trained table."""

    embedding_dim: int
    padding_idx: int | None
    dtype: torch.dtype  # of its numbers
    packed: bool


class Parts(NamedTuple):
    """Rows that are parts side by side, one row of `values` for each code."""

    values: Tensor  # (rows, d / D)
    sizes: list[int]  # number of codes of each group
    shared: bool  # whether all groups use the same rows


class Improvement(NamedTuple):
    """Settings that would lose less of a table."""

    settings: Settings  # what changes
    error: float  # squared, as a share of the table's squared norm
    ratio: float  # compression ratio by the formula


def below(path: str, tensors: Tensors) -> dict[str, Tensor]:
    """The tensors below a path, by what follows it in their names."""
    return {k[len(path) + 1 :]: t for k, t in tensors.items() if k.startswith(f"{path}.")}


class Form(nn.Module):
    """A table for inference. A subclass has a `kind` and what raises NotImplementedError here; it
    takes the three arguments of `nn.Embedding` and its `settings()` as keywords."""

    __jit_unused_properties__ = (
        *("weight", "nbytes", "saved_nbytes", "code_sizes"),
        *("serves_logits", "corrects_logits"),
    )

    kind: ClassVar[str]
    # The tensor of its state_dict that no training form has
    signature_tensor: ClassVar[str]
    options: ClassVar[tuple[FormOption, ...]]
    # Rows are computed, not picked: with rounded tensors they are not the rounded rows.
    computes_rows: ClassVar[bool] = False
    # Whether `from_table` takes how rows are used: `weight`, `metric` and `corrected`.
    takes_use: ClassVar[bool] = False
    if TYPE_CHECKING:  # TorchScript reads annotations where a form of another package is defined
        _fast: Any
        codes: Tensor  # of forms with codes
    _fast = None  # prepared for its buffers, with pointers to their memory
    # Tensors that follow the dtype of a model; None: all that have no integers.
    model_dtype: ClassVar[tuple[str, ...] | None] = None
    setting_types: ClassVar[dict[str, type]]  # of `settings()`

    def __init_subclass__(cls) -> None:
        cls.__annotations__ = {}  # TorchScript of torch 1.12 fails where they are strings

    def __init__(
        self,
        num_embeddings: int | None = None,
        embedding_dim: int = 0,
        padding_idx: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if num_embeddings is not None:  # a constructor of a subclass calls this one without
            self._set_size(num_embeddings, embedding_dim, padding_idx)
            self.build({"dtype": dtype, "device": device}, **settings)

    def build(self, make: Settings, **settings: Any) -> None:
        """Register buffers for settings; `make` are the dtype of numbers and the device."""
        raise NotImplementedError

    def _set_size(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None) -> None:
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(
                f"padding_idx={padding_idx}: must be within the {num_embeddings} rows of the table"
            )
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings

    @classmethod
    @torch.no_grad()
    def from_table(
        cls: type[T],
        table: Tensor,
        padding_idx: int | None = None,
        *,
        seed: int = 0,
        progress: Callable[[int], None] | None = None,
        **settings: Any,
    ) -> T:
        """The form of a trained table (n, d), without further training; settings are `options`."""
        trained = Trained(table.detach(), real_rows(table, padding_idx), seed, progress)
        form = cls.of_table(trained, padding_idx, **settings)
        if progress is not None and cls.work(settings) == 1:
            progress(1)
        return form

    @classmethod
    def of_table(cls: type[T], trained: Trained, padding_idx: int | None, **settings: Any) -> T:
        """What `from_table` makes; reports the steps of its `work`, if those are several."""
        raise NotImplementedError

    @classmethod
    def from_learned(cls, tensors: Tensors, request: CompactRequest) -> Form:
        """The form of what a method has learned, its `learned()` tensors. Only for forms that some
        method names among its `forms`."""
        raise NotImplementedError

    @classmethod
    def check(cls, embedding_dim: int, say: Say, **settings: Any) -> None:
        """Raise ValueError for settings that cannot work; `say` names one for the reader."""

    @classmethod
    def require(cls, embedding_dim: int, **settings: Any) -> None:
        """`check`, with settings named as Python has them."""
        cls.check(embedding_dim, lambda name, value: f"{name}={value}", **settings)

    @classmethod
    def layout(cls, n: int, d: int, settings: Settings, found: Tensors) -> dict[str, Layout]:
        """What its tensors must be; `found` are those that are there. ValueError for settings that
        cannot be. Nothing may be allocated by sizes that no tensor has confirmed."""
        raise NotImplementedError

    @classmethod
    def check_contents(cls, d: int, settings: Settings, tensors: Tensors) -> None:
        """Raise ValueError for tensors of the right layout that hold impossible numbers."""

    @classmethod
    def work(cls, settings: Settings) -> int:
        """Steps that `from_table` reports to `progress`."""
        return 1

    def settings(self) -> Settings:
        """Keywords of the constructor, as a record or a file keeps them: plain JSON."""
        return {name: getattr(self, name) for name in self.setting_types}

    def formula_bits(self) -> int:
        """Bits by the formula of its kind."""
        raise NotImplementedError

    @property
    def saved_nbytes(self) -> int:
        """Bytes of the tensors of its state_dict."""
        kept = [b for k, b in self._buffers.items() if k not in self._non_persistent_buffers_set]
        parts = [m for m in self.modules() if isinstance(m, Form) and m is not self]
        own = sum(b.numel() * b.element_size() for b in kept if b is not None)
        return own + sum(part.saved_nbytes for part in parts)

    def bits_per_symbol(self) -> int:
        """Bits that one more row would take."""
        raise NotImplementedError

    def describe(self) -> str:
        """What sets its size, in a few words, for logs and tables."""
        raise NotImplementedError

    def export_tensors(self) -> dict[str, Tensor]:
        """Its tensors for a file outside fairseq."""
        return {name: tensor.detach().contiguous() for name, tensor in self.state_dict().items()}

    @classmethod
    def from_tensors(
        cls, n: int, d: int, padding_idx: int | None, settings: Settings, tensors: Tensors
    ) -> Form:
        """From `settings()` and `export_tensors()`; large tensors are not copied."""
        dtype = next((t.dtype for t in tensors.values() if t.is_floating_point()), None)
        module = cls(1, d, None, dtype=dtype, **settings)  # one row, replaced at once
        for name, tensor in tensors.items():
            setattr(module, name, tensor)
        module._set_size(n, d, padding_idx)
        return module.eval()

    def shrunk(self) -> Form:
        """The same rows in fewer bytes, where something in it is not used."""
        return self

    def with_rows(self, rows: Tensor) -> Form:
        """The same table with these rows (m, d) after its own, as near as the form can come."""
        raise ValueError(
            f"a {self.kind} table takes no new rows; add them to the full model, then compress it"
        )

    @property
    def code_sizes(self) -> list[int]:
        """The number of codes of each group; empty for a form without codes."""
        return []

    def unpacked_codes(self) -> Tensor | None:
        """Codes (n, D) in one or two bytes each; None for a form without codes."""
        return self._unpacked(self.codes) if self.code_sizes else None

    def codes_in_use(self) -> dict[str, Tensor] | None:
        """`code_usage` of a form with codes, else None."""
        sizes = self.code_sizes
        if not sizes:
            return None
        return code_usage(self.codes, max(sizes), self.padding_idx, self._unpacked)

    def _unpacked(self, codes: Tensor) -> Tensor:
        """Some rows of `codes`, a buffer of forms with codes, in one or two bytes a code."""
        if not getattr(self, "packed", True):
            return codes
        sizes = self.code_sizes
        return unpack_codes(codes, [code_bits(size) for size in sizes], code_dtype(max(sizes)))

    def parts(self) -> Parts | None:
        """What rows are put together from, if they are parts side by side."""
        return None

    def notes(self) -> list[str]:
        """What its settings cost that a reader may not expect, one line each."""
        return []

    def improvement(self, table: Tensor, seed: int = 0) -> Improvement | None:
        """Settings that would lose less of the table that it was made of, if it can tell."""
        return None

    @property
    def serves_logits(self) -> bool:
        """Whether `logits` needs no dense table here, and is at least as fast as a product."""
        return False

    @property
    def corrects_logits(self) -> bool:
        """Whether `logits` are more than a product with the table."""
        return False

    def logits(self, h: Tensor) -> Tensor:
        """h (..., d) times the transposed table: (..., n), in h's dtype."""
        return F.linear(h, self.dense().to(h.dtype))

    @property
    def weight(self) -> Tensor:
        """The dense table, rebuilt at each call: for a tied output layer."""
        return self.dense()

    def dense(self) -> Tensor:
        """The table (n, d) that this form stands for."""
        buffer = next(iter(self.buffers()))
        return self(torch.arange(self.num_embeddings, device=buffer.device))

    @property
    def nbytes(self) -> int:
        """Bytes that this module holds in memory."""
        return sum(b.numel() * b.element_size() for b in self.buffers())

    def compression_ratio(self) -> float:
        """Bytes of the full float32 table over the bytes that are saved."""
        return 4 * self.num_embeddings * self.embedding_dim / self.saved_nbytes

    def _kept_dtypes(self) -> list[tuple[nn.Module, str]]:
        """Modules and names of the tensors that keep their dtype, whatever that of the model is."""
        return []

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._fast = None
        kept = [(module, name, getattr(module, name)) for module, name in self._kept_dtypes()]
        super()._apply(*args, **kwargs)
        for module, name, tensor in kept:
            setattr(module, name, tensor.to(getattr(module, name).device))
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fast": None}

    def extra_repr(self) -> str:
        pad = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        packed = ", packed" if getattr(self, "packed", False) else ""
        words = f"{self.describe()}{packed}, CR={self.compression_ratio():.1f}"
        return f"{self.num_embeddings}, {self.embedding_dim}{pad}, {words}"
