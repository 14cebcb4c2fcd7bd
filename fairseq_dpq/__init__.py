"""Differentiable product quantisation of embedding tables, for PyTorch and fairseq.

The layer needs torch alone and does not import fairseq. The plugin registers itself when fairseq
imports `--user-dir fairseq_dpq`, or when the program itself imports fairseq, before or after.
"""

from fairseq_dpq import operators  # noqa: F401, registers them with torch
from fairseq_dpq.any_model.compress import compact, compress
from fairseq_dpq.any_model.report import Report
from fairseq_dpq.any_model.saving import SavedModelError, load_compact, save_compact
from fairseq_dpq.codes import code_usage
from fairseq_dpq.config import DPQConfig, DPQConfigError
from fairseq_dpq.embedding import DPQEmbedding, dpq_modules
from fairseq_dpq.fairseq_plugin.on_import import when_fairseq_is_imported
from fairseq_dpq.forms.product_codes import CompactEmbedding
from fairseq_dpq.output import CodesLinear
from fairseq_dpq.regularizer import collect_regularizer
from fairseq_dpq.version import __version__

__all__ = [
    "CodesLinear",
    "CompactEmbedding",
    "DPQConfig",
    "DPQConfigError",
    "DPQEmbedding",
    "Report",
    "SavedModelError",
    "__version__",
    "code_usage",
    "collect_regularizer",
    "compact",
    "compress",
    "dpq_modules",
    "load_compact",
    "register_plugin",
    "register_with_transformers",
    "save_compact",
]


def register_plugin() -> None:
    """Register the plugin with fairseq now; safe to call again."""
    from fairseq_dpq.fairseq_plugin.plugin import register

    register()


def register_with_transformers() -> None:
    """Let `from_pretrained` of Hugging Face transformers load compressed models."""
    from fairseq_dpq.any_model import huggingface

    huggingface.register()


when_fairseq_is_imported(register_plugin)
