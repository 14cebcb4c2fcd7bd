"""Optimiser and learning-rate schedule of the paper that fairseq lacks: SM3 and quadratic warm-up.
Importing this package registers both (`--optimizer sm3`, `--lr-scheduler quadratic_warmup`)."""

from .quadratic_warmup import QuadraticWarmupSchedule
from .sm3 import SM3, FairseqSM3

__all__ = ["SM3", "FairseqSM3", "QuadraticWarmupSchedule"]
