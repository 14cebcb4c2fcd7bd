#!/usr/bin/env python3
"""fairseq-dpq-compact for a checkout that is not installed: python scripts/compact_checkpoint.py
IN.pt OUT.pt"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fairseq_dpq.cli.compact import main

if __name__ == "__main__":
    sys.exit(main())
