"""One process of a training, which writes what came of it.

python -m tests.distributed.forked tests.distributed.training_worker FOLDER
"""

import dataclasses
import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM
from transformers.utils import logging

from tests.training.conftest import PROMPTS, train

__all__ = ["trained"]


def trained(folder: Path) -> dict[str, Any]:
    """Report of a training."""
    target = LlamaForCausalLM.from_pretrained(folder / "target").eval()
    return dataclasses.asdict(train(target, folder / "head", PROMPTS[:12], max_steps=4, eval_steps=2))


def main(folder: Path) -> None:
    os.environ["ACCELERATE_USE_CPU"] = "1"
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(trained(folder)))
    dist.barrier()
    dist.destroy_process_group()
