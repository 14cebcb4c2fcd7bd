"""Differentiable product quantisation of embedding tables, for PyTorch and fairseq.

The layer needs torch alone; where fairseq is installed, importing this package registers the
plugin with it, which is what `fairseq-train --user-dir fairseq_dpq` does.
"""

from importlib.util import find_spec

from fairseq_dpq.compact import CompactEmbedding
from fairseq_dpq.config import DPQConfig, DPQConfigError
from fairseq_dpq.embedding import DPQEmbedding, code_usage, collect_regularizer, dpq_modules
from fairseq_dpq.version import __version__

__all__ = [
    "CompactEmbedding",
    "DPQConfig",
    "DPQConfigError",
    "DPQEmbedding",
    "__version__",
    "code_usage",
    "collect_regularizer",
    "dpq_modules",
]

if find_spec("fairseq") is not None:
    from fairseq_dpq import plugin

    plugin.register()
