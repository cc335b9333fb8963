"""The GPT example driven by a config file, with fastnorm added as one callback in it.

python examples/lightning_cli/main.py fit --config examples/lightning_cli/config.yaml
"""

import sys
from pathlib import Path

# The other examples are scripts in the folder above, not an installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from corpus import TextData  # noqa: E402
from gpt_module import GPTModule  # noqa: E402
from harness import quiet_lightning  # noqa: E402
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI  # noqa: E402


class GPTCLI(LightningCLI):
    """Options that model and data share are given once, under `data`."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.context", "model.context")
        parser.link_arguments("data.steps", "model.steps")


if __name__ == "__main__":
    quiet_lightning()
    GPTCLI(GPTModule, TextData, save_config_callback=None)
