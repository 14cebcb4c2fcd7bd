"""Optimisers and learning-rate schedule of the paper that fairseq lacks: SM3, LazyAdam, quadratic
warm-up. Importing this package registers `--optimizer sm3`, `--optimizer lazy_adam` and
`--lr-scheduler quadratic_warmup`."""

from .lazy_adam import FairseqLazyAdam, LazyAdam
from .quadratic_warmup import QuadraticWarmupSchedule
from .sm3 import SM3, FairseqSM3

__all__ = ["SM3", "FairseqLazyAdam", "FairseqSM3", "LazyAdam", "QuadraticWarmupSchedule"]
