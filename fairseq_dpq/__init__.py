"""Differentiable product quantisation of embedding tables, for PyTorch and fairseq.

The layer needs torch alone and does not import fairseq. The plugin registers itself when fairseq
imports `--user-dir fairseq_dpq`, or when the program itself imports fairseq, before or after.

Names are imported when they are first used, so that a command can answer before torch is loaded.
"""

import contextlib
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fairseq_dpq.fairseq_plugin.plugin import when_imported
from fairseq_dpq.version import __version__

if TYPE_CHECKING:  # for type checkers; `as` says that a name is public
    from fairseq_dpq.any_model.compress import add_rows as add_rows
    from fairseq_dpq.any_model.compress import compact as compact
    from fairseq_dpq.any_model.compress import compress as compress
    from fairseq_dpq.any_model.distill import distill as distill
    from fairseq_dpq.any_model.report import Report as Report
    from fairseq_dpq.any_model.saving import SavedModelError as SavedModelError
    from fairseq_dpq.any_model.saving import load_compact as load_compact
    from fairseq_dpq.any_model.saving import save_compact as save_compact
    from fairseq_dpq.config import DPQConfigError as DPQConfigError
    from fairseq_dpq.forms import register_form as register_form
    from fairseq_dpq.forms.base import Form as Form
    from fairseq_dpq.forms.base import FormOption as FormOption
    from fairseq_dpq.forms.base import Layout as Layout
    from fairseq_dpq.forms.product_codes import CompactEmbedding as CompactEmbedding
    from fairseq_dpq.forms.tiers import TieredEmbedding as TieredEmbedding
    from fairseq_dpq.kept import collect_regularizer as collect_regularizer
    from fairseq_dpq.layer import DPQEmbedding as DPQEmbedding
    from fairseq_dpq.layer import dpq_modules as dpq_modules
    from fairseq_dpq.methods import register_method as register_method
    from fairseq_dpq.output import CodesLinear as CodesLinear
    from fairseq_dpq.training.codes import code_usage as code_usage

# The public names by module; the same as above, for the interpreter.
_NAMES = {
    "any_model.compress": "add_rows compact compress",
    "any_model.distill": "distill",
    "any_model.report": "Report",
    "any_model.saving": "SavedModelError load_compact save_compact",
    "config": "DPQConfigError",
    "forms": "register_form",
    "forms.base": "Form FormOption Layout",
    "forms.product_codes": "CompactEmbedding",
    "forms.tiers": "TieredEmbedding",
    "layer": "DPQEmbedding dpq_modules",
    "methods": "register_method",
    "output": "CodesLinear",
    "kept": "collect_regularizer",
    "training.codes": "code_usage",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", "register_plugin", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value  # the next time it is found at once
    return value


def __dir__() -> "list[str]":
    return sorted({*globals(), *_HOMES})


def register_plugin() -> None:
    """Register the plugin with fairseq now; safe to call again."""
    from fairseq_dpq.fairseq_plugin.plugin import register

    register()


def _register_with_transformers() -> None:
    """Let `from_pretrained` load compressed models; not with a transformers that is too old."""
    with contextlib.suppress(ImportError):
        import_module("fairseq_dpq.any_model.huggingface")  # it may be what imports transformers


when_imported("fairseq", register_plugin)
when_imported("transformers.modeling_utils", _register_with_transformers)
if "torch" in sys.modules:  # a graph that is loaded next may have the package's operators in it
    import_module("fairseq_dpq.forms.operators")
