"""Hugging Face models save and load compressed tables by their own `save_pretrained` and
`from_pretrained`: a quantizer, registered with transformers. Needs `fairseq-dpq[transformers]`."""

from __future__ import annotations

import functools
import json
import re
from typing import Any, Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, auto
from transformers.utils.quantization_config import QuantizationConfigMixin

from fairseq_dpq.any_model import saving
from fairseq_dpq.files.errors import naming, printable
from fairseq_dpq.files.memory import check_crc32
from fairseq_dpq.files.record import Table, TablesRecord
from fairseq_dpq.forms.base import Form, below
from fairseq_dpq.forms.fitting import shown
from fairseq_dpq.layer import DPQEmbedding
from fairseq_dpq.model import EmbeddingTable, ScaledEmbedding, placed, put, set_module

NAME = "fairseq_dpq"
_AS_STORED = torch.float64  # of a stand-in for a tensor that keeps its dtype; no table has it


class CompactConfig(QuantizationConfigMixin):
    """What `config.json` says of tables, compressed or in training: their record, and their
    tensors' names."""

    def __init__(
        self,
        tables: dict[str, Any] | None = None,
        tensors: dict[str, list[str]] | None = None,
        quant_method: str = NAME,
        **unknown: Any,
    ) -> None:
        for name in unknown:
            raise ValueError(printable(f"the quantization_config has the unknown entry {name}"))
        self.quant_method: Any = quant_method
        self.tables, self.tensors = tables or {}, tensors or {}

    @classmethod
    def of(cls, model: nn.Module) -> tuple[CompactConfig, dict[str, Tensor]]:
        """That of a model's tables, and their tensors."""
        record, tensors = saving.saved_tables(model)
        names = {path: list(below(path, tensors)) for path in record.tables}
        return cls(json.loads(record.to_json()), names), tensors


class _StandIn(nn.Module):
    """Where a table or an output layer will be: buffers to load, and a bias."""

    def __init__(self, table: Table, names: Iterable[str] = (), bias: Any = None) -> None:
        super().__init__()
        # What takes the dtype of the model; None: all. Statistics of training stay float32, values
        # of tiers float16.
        follows: Any = None
        if names:
            follows = (
                table.form_class()[0].model_dtype if table.form else saving.training_shapes(table)
            )
        for name in names:
            dtype = None if follows is None or name in follows else _AS_STORED
            module: nn.Module = self
            *parts, last = name.split(".")
            for part in parts:  # a form that is made of forms
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_buffer(last, torch.empty(0, dtype=dtype))
        self.register_parameter("bias", bias)
        # Some models initialise their tables by name. What has this flag they leave alone.
        self.weight = torch.empty(table.num_embeddings, table.embedding_dim, device="meta")
        self.weight._is_hf_initialized = True  # type: ignore[attr-defined]


class CompactQuantizer(HfQuantizer):
    """Puts stand-ins where tables will be, and builds those once their tensors are loaded."""

    requires_calibration = True  # `compress` makes the tables, not from_pretrained
    # Other weights can be trained, and tables in training form; a compressed model compiles.
    is_trainable = is_qat_trainable = is_compileable = True  # type: ignore[assignment]
    quantization_config: CompactConfig

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        config = self.quantization_config
        self._waiting: list[tuple[EmbeddingTable, Table, nn.Module]] = []
        with naming("the quantization_config of the model", saving.SavedModelError):
            record = TablesRecord.from_json(json.dumps(config.tables))
            for path, table in record.tables.items():
                found = _claimed(model, path, table)
                stand_in = _StandIn(table, _names(config.tensors, path))
                for other in found.paths:
                    set_module(model, other, stand_in if other == found.path else _StandIn(table))
                for other, layer in found.tied.items():
                    found.tied[other] = _StandIn(table, bias=layer._parameters["bias"])
                    set_module(model, other, found.tied[other])
                _untie(model, [*found.paths, *found.tied])
                self._waiting.append((found, table, stand_in))

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        for found, table, stand_in in self._waiting:
            tensors = {k: t for k, t in stand_in.named_buffers() if t.device.type != "meta"}
            with naming(found.path, saving.SavedModelError):
                # Numbers may have been cast to the dtype that was asked for.
                whole = {k: t for k, t in tensors.items() if not t.is_floating_point()}
                if table.form:
                    check_crc32(whole, {name: table.checksums.get(name) for name in whole})
                made = (
                    table.build_form(tensors) if table.form else saving.build_layer(table, tensors)
                )
            put(model, found, made.to(next(iter(tensors.values())).device))
        self._waiting = []
        attach(model)  # with the paths of this model

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> torch.dtype | None:
        """None: as it is stored."""
        return None if dtype == _AS_STORED else super().get_new_dtype(converter, param, dtype)

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What `save_pretrained` writes; it asks for this before it writes the config."""
        self.quantization_config, tensors = CompactConfig.of(model)
        _describe(model, self.quantization_config)
        return {**tensors, **saving.other_tensors(model)}, {}

    def is_serializable(self) -> bool:
        return True


def attach(model: nn.Module) -> None:
    """Give each Hugging Face model with such tables its quantizer, so that `save_pretrained` works.

    The model at hand may be one, or contain some, as sentence encoders do.
    """
    seen: set[int] = set()
    for module in model.modules():  # a model comes before the models in it
        if not isinstance(module, PreTrainedModel) or not placed(module, (Form, DPQEmbedding)):
            continue
        config, _ = CompactConfig.of(module)
        module.hf_quantizer = CompactQuantizer(config, pre_quantized=True)
        if isinstance(_input_table(module), (Form, DPQEmbedding)):
            module.resize_token_embeddings = functools.partial(_resize, module)
        if id(module) not in seen:
            _describe(module, config)
            for found in placed(module, (Form, DPQEmbedding)):
                _untie(module, [*found.paths, *found.tied])
        seen.update(id(inner) for inner in module.modules())


def _describe(model: Any, config: CompactConfig) -> None:
    """Put it into the config of a model; models inside have none, until they are saved alone."""
    for inner in model.modules():
        if isinstance(inner, PreTrainedModel):
            inner.config.__dict__.pop("quantization_config", None)
    model.config.quantization_config = config


def _names(tensors: Any, path: str) -> list[str]:
    """The names of a table's tensors; ValueError if they cannot be."""
    names = tensors.get(path) if isinstance(tensors, dict) else None
    if not isinstance(names, list) or not all(
        isinstance(name, str) and re.fullmatch(r"\w+(\.\w+)*", name) for name in names
    ):
        raise ValueError(f"tensors: expected the names of those of {path}, found {shown(names)}")
    return names


def _resize(
    model: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, **_: Any
) -> Any:
    """Takes the place of `resize_token_embeddings` of a model whose input table is compressed."""
    table = _input_table(model)
    rows = table.num_embeddings
    wanted = rows if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of:
        wanted += -wanted % pad_to_multiple_of
    if wanted == rows:
        return model.get_input_embeddings()
    grows = wanted > rows and isinstance(table, Form)
    how = f"call fairseq_dpq.add_rows(model, {wanted - rows}), or " if grows else ""
    raise ValueError(
        f"the table of {rows} rows is compressed: {how}resize the full model to {wanted} rows, "
        "then compress it"
    )


def follow_growth(model: nn.Module, table: Form, old: int) -> None:
    """Let Hugging Face models whose input table has grown know of its new rows."""
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) or _input_table(module) is not table:
            continue
        config: Any = module.config.get_text_config()
        for name in ("vocab_size", "decoder_vocab_size"):
            for holder in (config, module):
                if getattr(holder, name, None) == old:
                    setattr(holder, name, table.num_embeddings)
        head: Any = module.get_output_embeddings()
        if isinstance(head, nn.Linear) and head.out_features == old:  # it is not tied
            module.set_output_embeddings(module._get_resized_lm_head(head, table.num_embeddings))
        resize = getattr(module, "_resize_final_logits_bias", None)
        if resize is not None:
            resize(table.num_embeddings)


def _input_table(model: Any) -> Any:
    try:
        found = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):  # a model without tokens
        return None
    return found.table if isinstance(found, ScaledEmbedding) else found


def _untie(model: Any, paths: list[str]) -> None:
    """The table itself is shared now: transformers has no weights left to tie."""
    weights = {f"{path}.weight" for path in paths}
    for prefix, module in model.named_modules():
        if not isinstance(module, PreTrainedModel):
            continue
        own = {w[len(prefix) + 1 :] if prefix else w for w in weights if w.startswith(prefix)}
        for name in ("all_tied_weights_keys", "_tied_weights_keys"):
            keys = getattr(module, name, None)
            if isinstance(keys, dict):
                setattr(module, name, {k: v for k, v in keys.items() if k not in own})


def _claimed(model: Any, path: str, table: Table) -> EmbeddingTable:
    """The modules that a saved table belongs to; its paths may lack the prefix of a head that this
    model has, or the other way round. Weights are not tied yet at this point: the record and the
    model's own list of tied weights say which will be."""
    prefix = f"{model.base_model_prefix}."
    modules = dict(model.named_modules(remove_duplicate=False))

    def moved(path: str) -> str:
        other = path[len(prefix) :] if path.startswith(prefix) else prefix + path
        return other if path not in modules and other in modules else path

    first, *others = map(moved, (path, *table.aliases, *table.tied))
    pairs = getattr(model, "all_tied_weights_keys", None) or {}
    own = {f"{name}.weight" for name in (first, *others)}
    listed = [k[:-7] for pair in pairs.items() if set(pair) & own for k in pair]
    found = EmbeddingTable({}, None)
    for name in dict.fromkeys([first, *others, *listed]):
        module = modules.get(name)
        if module is None and name != first:
            continue  # the model has no such head
        weight = getattr(module, "weight", None)
        if not isinstance(module, (nn.Embedding, nn.Linear)) or not isinstance(weight, Tensor):
            raise ValueError(f"the model has no embedding table or output layer {name}")
        shape = (table.num_embeddings, table.embedding_dim)
        if tuple(weight.shape) != shape:
            raise ValueError(f"{name} is {tuple(weight.shape)} in the model, {shape} as saved")
        if isinstance(module, nn.Embedding):
            found.add(name, module)
        else:
            found.tied[name] = module
    return found


if NAME not in auto.AUTO_QUANTIZER_MAPPING:  # it may be imported twice
    auto.register_quantization_config(NAME)(CompactConfig)
    auto.register_quantizer(NAME)(CompactQuantizer)
