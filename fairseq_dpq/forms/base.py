"""What a stored form of a table has to provide: lookup, its bytes, its tensors, its description."""

from __future__ import annotations

import zlib
from typing import Any, Callable, ClassVar, Dict, Mapping, NamedTuple

import torch
from torch import Tensor, nn

from fairseq_dpq.memory import memory_of

CRC_BITS = 32
Settings = Dict[str, Any]
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


class Wanted(NamedTuple):
    """What is asked of the inference form of a trained table."""

    embedding_dim: int
    padding_idx: int | None
    dtype: torch.dtype | None  # of its numbers; None: as they are
    packed: bool


class Form(nn.Module):
    """A table for inference. A subclass has a `kind`, a constructor that takes the three arguments
    of `nn.Embedding` and its `settings()` as keywords, and what raises NotImplementedError here."""

    __jit_unused_properties__ = ("weight", "nbytes", "saved_nbytes")

    kind: ClassVar[str]
    mark: ClassVar[str]  # the tensor of its state_dict that no training form has
    options: ClassVar[tuple[FormOption, ...]]
    # Tensors of its state_dict that hold packed bits: averaging checkpoints would destroy them.
    packed_tensors: ClassVar[tuple[str, ...]] = ()
    # Rows are computed, not picked: with rounded tensors they are not the rounded rows.
    computes_rows: ClassVar[bool] = False
    _fast: Any = None  # prepared for its buffers, with pointers to their memory
    as_stored: ClassVar[Settings] = {}  # keywords that keep its tensors in their stored bytes
    setting_types: ClassVar[dict[str, type]]  # of `settings()`

    def _set_size(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None) -> None:
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(
                f"padding_idx={padding_idx}: must be within the {num_embeddings} rows of the table"
            )
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings

    @classmethod
    def from_table(
        cls,
        table: Tensor,
        padding_idx: int | None = None,
        *,
        seed: int = 0,
        progress: Callable[[int], None] | None = None,
        **settings: Any,
    ) -> Form:
        """The form of a trained table (n, d), without further training."""
        raise NotImplementedError

    @classmethod
    def check(cls, embedding_dim: int, say: Callable[[str, Any], str], **settings: Any) -> None:
        """Raise ValueError for settings that cannot work; `say` names one for the reader."""

    @classmethod
    def layout(
        cls, num_embeddings: int, embedding_dim: int, settings: Settings, found: Mapping[str, Any]
    ) -> dict[str, Layout]:
        """What its tensors must be; `found` are those that are there. ValueError for settings that
        cannot be. Nothing may be allocated by sizes that no tensor has confirmed."""
        raise NotImplementedError

    @classmethod
    def check_contents(
        cls, embedding_dim: int, settings: Settings, tensors: Mapping[str, Tensor]
    ) -> None:
        """Raise ValueError for tensors of the right layout that hold impossible numbers."""

    @classmethod
    def work(cls, settings: Settings) -> int:
        """Steps that `from_table` reports to `progress`."""
        return 1

    def settings(self) -> Settings:
        """Keywords of the constructor, as a record or a file keeps them: plain JSON."""
        raise NotImplementedError

    def formula_bits(self) -> int:
        """Bits by the formula of its kind."""
        raise NotImplementedError

    @property
    def saved_nbytes(self) -> int:
        """Bytes of the tensors of its state_dict."""
        raise NotImplementedError

    def bits_per_symbol(self) -> int:
        """Bits that one more row would take."""
        raise NotImplementedError

    def describe(self) -> str:
        """What sets its size, in a few words, for logs and tables."""
        raise NotImplementedError

    def export_tensors(self) -> dict[str, Tensor]:
        """Its tensors for a file outside fairseq."""
        return {name: tensor.contiguous() for name, tensor in self.state_dict().items()}

    @classmethod
    def from_tensors(
        cls,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None,
        settings: Settings,
        tensors: Mapping[str, Tensor],
    ) -> Form:
        """From `settings()` and `export_tensors()`, without a copy of large tensors if it can."""
        raise NotImplementedError

    def verify(self) -> None:
        """Read and check what opening a file has left unread; ValueError if it is damaged."""

    def shrunk(self) -> Form:
        """The same rows in fewer bytes, where something in it is not used."""
        return self

    def codes_in_use(self) -> dict[str, Tensor] | None:
        """`code_usage` of a form with codes, else None."""
        return None

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

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._fast = None
        return super()._apply(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fast": None}

    def extra_repr(self) -> str:
        text = f"{self.num_embeddings}, {self.embedding_dim}"
        if self.padding_idx is not None:
            text += f", padding_idx={self.padding_idx}"
        packed = ", packed" if getattr(self, "packed", False) else ""
        return f"{text}, {self.describe()}{packed}, CR={self.compression_ratio():.1f}"


def crc32_bits(tensor: Tensor) -> Tensor:
    """The CRC-32 of a tensor's bytes as 32 booleans, lowest bit first.

    As booleans, because averaging checkpoints, which would turn codes into noise, stops at a
    boolean with an error.
    """
    rows = tensor.detach().cpu().contiguous()  # kept by name while its memory is read
    crc = zlib.crc32(memory_of(rows))
    return torch.tensor([crc >> bit & 1 for bit in range(CRC_BITS)], dtype=torch.bool)


def wrong_shape(key: str, found: Tensor, shape: tuple[int, ...]) -> str:
    """What to say of a tensor that does not fit."""
    return (
        f"size mismatch for {key}: the checkpoint has {tuple(found.shape)}, this model needs "
        f"{shape}"
    )


class ChecksummedForm(Form):
    """Its state_dict has a checksum of each packed tensor, and loading looks at it."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.packed_tensors:
            destination[f"{prefix}{name}_crc32"] = crc32_bits(getattr(self, name))

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        errors = lists[-1]
        for name in self.packed_tensors:
            stored = state_dict.pop(f"{prefix}{name}_crc32", None)
            packed, own = state_dict.get(prefix + name), getattr(self, name)
            if packed is not None and packed.shape != own.shape:
                errors.append(wrong_shape(prefix + name, packed, tuple(own.shape)))
                return
            checked = stored is not None and packed is not None
            if checked and stored.tolist() != crc32_bits(packed).tolist():
                errors.append(f"{prefix}{name} do not match their checksum: the file is damaged")
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *lists)
