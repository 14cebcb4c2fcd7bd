"""fairseq-hydra-train with the plugin loaded before the configuration is composed: fairseq imports
`common.user_dir` only afterwards, too late for new keys."""

from __future__ import annotations


def cli_main() -> None:
    """Run fairseq-hydra-train; that this module was imported has loaded the plugin already."""
    from fairseq_cli.hydra_train import cli_main as hydra_train

    hydra_train()


if __name__ == "__main__":
    cli_main()
