"""fairseq-hydra-train with the plugin loaded before the configuration is composed: fairseq imports
`common.user_dir` only afterwards, too late for new keys."""

from __future__ import annotations

import sys

from fairseq_dpq.cli.common import missing_extra
from fairseq_dpq.fairseq_plugin.plugin import same_logging


def cli_main() -> None:
    """Run fairseq-hydra-train; that this module was imported has loaded the plugin already."""
    try:
        with same_logging():
            from fairseq_cli.hydra_train import cli_main as hydra_train
    except ModuleNotFoundError as error:
        if not missing_extra(error):
            raise
        print(f"fairseq-dpq-hydra-train: error: {missing_extra(error)}", file=sys.stderr)
        sys.exit(2)
    hydra_train()


if __name__ == "__main__":
    cli_main()
