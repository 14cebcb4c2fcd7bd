"""Hugging Face models save and load compressed tables by their own `save_pretrained` and
`from_pretrained`: a quantizer, registered with transformers. Needs `fairseq-dpq[transformers]`."""

from __future__ import annotations

import json
from typing import Any, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from fairseq_dpq.any_model.finding import Found, put, set_module
from fairseq_dpq.any_model.saving import build_form, compact_state
from fairseq_dpq.record import Table, TablesRecord

NAME = "fairseq_dpq"


class CompactConfig(QuantizationConfigMixin):
    """What `config.json` says of compressed tables: their record, and their tensors' names."""

    def __init__(
        self,
        tables: dict[str, Any] | None = None,
        tensors: dict[str, list[str]] | None = None,
        quant_method: str = NAME,
    ) -> None:
        self.quant_method: Any = quant_method
        self.tables = tables or {}
        self.tensors = tensors or {}

    def describe(self, model: nn.Module) -> TablesRecord:
        """Make it that of a model's compressed tables."""
        record, tensors = compact_state(model)
        self.tables = json.loads(record.to_json())
        self.tensors = {
            path: [key[len(path) + 1 :] for key in tensors if key.startswith(f"{path}.")]
            for path in record.tables
        }
        return record


class _StandIn(nn.Module):
    """Where a table or an output layer will be: buffers to load, and a bias."""

    def __init__(self, table: Table, names: Sequence[str] = (), bias: Any = None) -> None:
        super().__init__()
        for name in names:
            self.register_buffer(name, torch.empty(0))
        self.register_parameter("bias", bias)
        # Some models initialise their tables by name. What has this flag they leave alone.
        self.weight = torch.empty(table.num_embeddings, table.embedding_dim, device="meta")
        self.weight._is_hf_initialized = True  # type: ignore[attr-defined]


class CompactQuantizer(HfQuantizer):
    """Puts stand-ins where compressed tables will be, and builds those once tensors are loaded."""

    requires_calibration = True  # `compress` makes the tables, not from_pretrained
    quantization_config: CompactConfig

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        config = self.quantization_config
        record = TablesRecord.from_json(json.dumps(config.tables))
        self._waiting: list[tuple[Found, Table, nn.Module]] = []
        for saved_path, table in record.tables.items():
            path = _moved(saved_path, table, model)
            found = _claimed(model, path, table)
            stand_in = _StandIn(table, config.tensors.get(saved_path, []))
            for other in found.paths:
                set_module(model, other, stand_in if other == path else _StandIn(table))
            for other, layer in found.tied.items():
                found.tied[other] = _StandIn(table, bias=layer._parameters["bias"])
                set_module(model, other, found.tied[other])
            _untie(model, [*found.paths, *found.tied])
            self._waiting.append((found, table, stand_in))

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        for found, table, stand_in in self._waiting:
            tensors = {k: t for k, t in stand_in.named_buffers() if t.device.type != "meta"}
            try:
                form = build_form(table, tensors)
            except ValueError as error:
                raise ValueError(f"{found.path}: {error}") from error
            put(model, found, form.to(next(iter(tensors.values())).device))
        self._waiting = []
        self.quantization_config.describe(model)  # with the paths of this model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        return compact_state(model)[1], {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # the other weights are

    @property
    def is_compileable(self) -> bool:
        return True


def register() -> None:
    """Make the quantizer known to transformers; safe to call again."""
    if NAME not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(NAME)(CompactConfig)
        register_quantizer(NAME)(CompactQuantizer)


def attach(model: nn.Module) -> None:
    """Give a compressed Hugging Face model its quantizer, so that `save_pretrained` works."""
    if not isinstance(model, PreTrainedModel):
        return
    register()
    config = CompactConfig()
    record = config.describe(model)
    model.config.quantization_config = config
    model.hf_quantizer = CompactQuantizer(config, pre_quantized=True)
    for path, table in record.tables.items():
        _untie(model, [path, *table.aliases, *table.tied])


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


def _claimed(model: Any, path: str, table: Table) -> Found:
    """The modules that a saved table belongs to. Weights are not tied yet at this point: the record
    and the model's own list of tied weights say which will be."""
    modules = dict(model.named_modules(remove_duplicate=False))
    pairs = getattr(model, "all_tied_weights_keys", None) or {}
    own = [f"{name}.weight" for name in (path, *table.aliases, *table.tied)]
    listed = [k for pair in pairs.items() if set(pair) & set(own) for k in pair]
    found = Found({}, None)
    for name in dict.fromkeys([path, *table.aliases, *table.tied, *(k[:-7] for k in listed)]):
        module = modules.get(name)
        if module is None and name != path:
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


def _moved(path: str, table: Table, model: Any) -> str:
    """The path in this model, whose head the saved one may lack, or the other way round; those of
    aliases and output layers are changed in the record."""
    prefix = f"{model.base_model_prefix}."
    modules = dict(model.named_modules(remove_duplicate=False))

    def moved(path: str) -> str:
        other = path[len(prefix) :] if path.startswith(prefix) else prefix + path
        return other if path not in modules and other in modules else path

    table.aliases = [moved(other) for other in table.aliases]
    table.tied = [moved(other) for other in table.tied]
    return moved(path)
