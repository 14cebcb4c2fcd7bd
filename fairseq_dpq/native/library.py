"""Finds and loads the native library; without it, everything works in PyTorch, more slowly."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fairseq_dpq.native import build

logger = logging.getLogger("fairseq_dpq")

BAD_TABLE = -(1 << 63)
NO_MEMORY = BAD_TABLE + 1

_POINTER, _INT64, _INT32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_SIGNATURES: dict[str, list[Any]] = {
    "dpq_prepare": [_POINTER],
    "dpq_lookup": [_POINTER, _POINTER, _INT64, _INT32, _POINTER, _INT32],
    "dpq_lookup_tiers": [_POINTER, _POINTER, _INT64, _INT32, _POINTER, _INT32],
    "dpq_logits": [_POINTER, _POINTER, _INT64, _POINTER, _INT64, _INT32],
    "dpq_codes": [_POINTER, _INT32],
    "dpq_softmax_gradients": [_POINTER, _INT32],
    "dpq_nearest": [_POINTER, _INT32],
    "dpq_sums": [_POINTER, _INT32],
    "dpq_first_centroids": [_POINTER, _INT32],
    "dpq_pack": [_POINTER, _INT32, _INT64, _INT64, _POINTER, _INT64, _POINTER, _INT32],
    "dpq_unpack": [_POINTER, _INT64, _INT64, _POINTER, _INT64, _POINTER, _INT32, _INT32],
}


def _struct(*parts: tuple[Any, str]) -> Any:
    """A struct of dpq.h: types in its order, each with the names of its fields."""
    fields = [(name, kind) for kind, names in parts for name in names.split()]
    return type("Struct", (ctypes.Structure,), {"_fields_": fields})


TableStruct = _struct(
    (_POINTER, "codes values first last bits"),
    (_INT64, "n D row_bytes value_rows size padding"),
    (_INT32, "code_bytes value_type"),
    (_INT64, "step"),
    (_INT32, "width checked largest smallest"),
)
TiersStruct = _struct(
    (_POINTER, "tables first slot"), (_INT64, "n padding"), (_INT32, "count widened")
)
QueryStruct = _struct(
    (_POINTER, "query keys mean scale out"),
    (_INT64, "tokens stride D key_dim G K stat_groups"),
    (_INT32, "distance out_bytes"),
)
SoftmaxStruct = _struct(
    (_POINTER, "features direction offset values codes grad"),
    (_POINTER, "grad_features grad_direction grad_offset grad_values"),
    (_INT64, "rows stride D features_size G K size"),
)
ClustersStruct = _struct(
    (_POINTER, "points centroids weights codes error sums mass draws first"),
    (_INT64, "n stride group_stride D size G K"),
    (_INT32, "code_bytes"),
)


@functools.lru_cache(maxsize=None)
def load() -> Any:
    """The library, or None; why not is logged once. FAIRSEQ_DPQ_NATIVE=0 turns it off."""
    if os.environ.get("FAIRSEQ_DPQ_NATIVE", "1") == "0":
        return None
    path = Path(__file__).resolve().parent / build.NAME
    try:
        if not path.exists():
            raise OSError("it is not built")
        library = ctypes.CDLL(str(path))
        library.dpq_source_hash.restype = ctypes.c_char_p
        library.dpq_variant.restype = ctypes.c_char_p
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _INT64
        if library.dpq_source_hash().decode() != build.source_hash():
            raise OSError("it does not match its sources; install the package again to rebuild it")
    except (OSError, AttributeError) as error:
        logger.info(f"no native library, so that PyTorch is used, which is slower: {error}")
        return None
    return library


@functools.lru_cache(maxsize=None)
def gpu(device: Any) -> Any:
    """The Triton kernels (gpu.py) for a device, or None, where PyTorch serves: that is the default.
    FAIRSEQ_DPQ_TRITON=1 turns the kernels on; `benchmarks/gpu.py` verifies and measures them."""
    if os.environ.get("FAIRSEQ_DPQ_TRITON", "0") != "1":
        return None
    if find_spec("triton") is None:
        logger.warning("FAIRSEQ_DPQ_TRITON=1, but triton is not installed: PyTorch is used")
        return None
    try:
        from fairseq_dpq.native import gpu as kernels

        kernels.check(device)
    except Exception as error:  # of drivers, compilers and Triton: whatever it is, PyTorch serves
        logger.warning(f"Triton kernels do not run on {device}, PyTorch is used: {error}")
        return None
    return kernels


def available() -> bool:
    """Whether the library is built, loads and is not turned off."""
    return load() is not None


# torch.compile calls it once and takes the answer as given. The decorator that sets this mark,
# torch.compiler.assume_constant_result, imports the whole compiler: a second, and 70 MB.
available._dynamo_marked_constant = True  # type: ignore[attr-defined]


def describe() -> str:
    """One line about the library, for `inspect` and bug reports."""
    if available():
        return f"native library: {load().dpq_variant().decode()}"
    if os.environ.get("FAIRSEQ_DPQ_NATIVE", "1") == "0":
        return "native library: turned off by FAIRSEQ_DPQ_NATIVE=0"
    return "native library: not available, PyTorch is used"
