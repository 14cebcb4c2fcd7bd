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


class TableStruct(ctypes.Structure):
    """dpq_table of dpq.h."""

    _fields_ = [
        *[(name, _POINTER) for name in ("codes", "values", "first", "last", "bits")],
        *[(name, _INT64) for name in ("n", "D", "row_bytes", "value_rows", "size", "padding")],
        *[(name, _INT32) for name in ("code_bytes", "value_type")],
        ("step", _INT64),
        *[(name, _INT32) for name in ("width", "checked", "largest", "smallest")],
    ]


class TiersStruct(ctypes.Structure):
    """dpq_tiers of dpq.h."""

    _fields_ = [
        *[(name, _POINTER) for name in ("tables", "first", "slot")],
        *[(name, _INT64) for name in ("n", "padding")],
        *[(name, _INT32) for name in ("count", "widened")],
    ]


class QueryStruct(ctypes.Structure):
    """dpq_query of dpq.h."""

    _fields_ = [
        *[(name, _POINTER) for name in ("query", "keys", "mean", "scale", "out")],
        *[(name, _INT64) for name in ("tokens", "stride", "D", "key_dim", "G", "K")],
        ("stat_groups", _INT64),
        *[(name, _INT32) for name in ("distance", "out_bytes")],
    ]


class SoftmaxStruct(ctypes.Structure):
    """dpq_softmax of dpq.h."""

    _fields_ = [
        *[(name, _POINTER) for name in ("features", "direction", "offset", "values", "codes")],
        *[(name, _POINTER) for name in ("grad", "grad_features", "grad_direction")],
        *[(name, _POINTER) for name in ("grad_offset", "grad_values")],
        *[(name, _INT64) for name in ("rows", "stride", "D", "features_size", "G", "K", "size")],
    ]


class ClustersStruct(ctypes.Structure):
    """dpq_clusters of dpq.h."""

    _fields_ = [
        *[(name, _POINTER) for name in ("points", "centroids", "weights", "codes")],
        *[(name, _POINTER) for name in ("error", "sums", "mass", "draws", "first")],
        *[(name, _INT64) for name in ("n", "stride", "group_stride", "D", "size", "G", "K")],
        ("code_bytes", _INT32),
    ]


@functools.lru_cache(maxsize=None)
def load() -> Any:
    """The library, or None; why not is logged once. FAIRSEQ_DPQ_NATIVE=0 turns it off."""
    if os.environ.get("FAIRSEQ_DPQ_NATIVE", "1") == "0":
        return None
    path = Path(__file__).resolve().parent / build.NAME
    if not path.exists():
        logger.info("the native library is not built: lookups use PyTorch, which is slower")
        return None
    try:
        library = ctypes.CDLL(str(path))
        library.dpq_source_hash.restype = ctypes.c_char_p
        library.dpq_variant.restype = ctypes.c_char_p
        found = library.dpq_source_hash().decode()
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _INT64
    except (OSError, AttributeError) as error:
        logger.info(f"the native library does not load, PyTorch is used: {error}")
        return None
    if found != build.source_hash():
        logger.info(
            "the native library does not match its sources, PyTorch is used; "
            "install the package again to rebuild it"
        )
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


def describe() -> str:
    """One line about the library, for `inspect` and bug reports."""
    library = load()
    if library is not None:
        return f"native library: {library.dpq_variant().decode()}"
    if os.environ.get("FAIRSEQ_DPQ_NATIVE", "1") == "0":
        return "native library: turned off by FAIRSEQ_DPQ_NATIVE=0"
    return "native library: not available, PyTorch is used"
