"""Patches of how fairseq loads checkpoints, and the list of what one may hold."""

from __future__ import annotations

from typing import Any

import torch

from fairseq_dpq.marker import plain_globals


def safe_globals() -> list[Any]:
    """What a fairseq checkpoint may hold besides tensors: the allow-list for weights_only loading.

    Entries are classes, or pairs (object, name in the file) where old files use an older name.
    `apply` adds them to torch's own list. All are plain containers: none can run code from the
    file.
    """
    import omegaconf
    from fairseq.distributed import utils as distributed_utils
    from fairseq.logging import meters

    items = plain_globals()
    # Rank 0 sends its checkpoint to the other ranks as OmegaConf objects, not as plain dicts.
    items += [omegaconf.DictConfig, omegaconf.ListConfig, distributed_utils._TensorPlaceholder]
    items += [omegaconf.base.ContainerMetadata, omegaconf.base.Metadata]
    nodes = "Any", "Boolean", "Bytes", "Enum", "Float", "Integer", "Path", "String"
    items += [getattr(omegaconf, n + "Node") for n in nodes if hasattr(omegaconf, n + "Node")]
    # Checkpoints older than fairseq 0.9 contain meters, under the module's old name.
    for meter in (meters.AverageMeter, meters.StopwatchMeter, meters.TimeMeter):
        items += [meter, (meter, f"fairseq.meters.{meter.__name__}")]
    return items


def checkpoint_loading() -> bool:
    """torch >= 2.6 loads with weights_only=True, which refuses fairseq's own checkpoints.

    Without it generate, interactive, validate, eval-lm, hub and resume fail with `Unsupported
    global: argparse.Namespace`. With several workers, resuming fails on rank 1 with `Unsupported
    global: omegaconf.dictconfig.DictConfig`, and rank 0 only sees a closed connection. The
    protection stays on: each class is allowed by name.
    """
    register = getattr(torch.serialization, "add_safe_globals", None)
    if register is None:  # torch < 2.4 has neither the allow-list nor that default
        return False
    items = safe_globals()
    if not _renames_allowed():
        items = [i for i in items if not isinstance(i, tuple)]
    known = torch.serialization.get_safe_globals()
    register([i for i in items if i not in known])
    return any(i not in known for i in items)


def _renames_allowed() -> bool:
    """torch 2.4 and 2.5 have the allow-list, but do not accept (object, name) pairs in it."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 6)
