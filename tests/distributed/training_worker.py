"""One process of a training: trains every kind of draft and writes what came of it.

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

from hf_specdec.tools.train import (
    DFlashTraining,
    DraftTraining,
    HeadTraining,
    Training,
    train_draft,
)
from tests.training.conftest import PROMPTS, WordNumbers

__all__ = ["KINDS", "NUM_HELD_OUT", "trained"]

NUM_HELD_OUT = 1  # shards: one of two processes has none
SETTINGS: dict[str, Any] = {
    "num_texts": 12,
    "texts_per_shard": 4,
    "prompt_tokens": 4,
    "new_tokens": 12,
    "temperatures": (0.0,),
    "batch_size": 2,
    "rollout_steps": 3,
    "epochs": 2.0,
    "eval_every": 2,
    "held_out": 0.1,
}
KINDS: dict[str, Training] = {
    "head": HeadTraining(**SETTINGS),
    "dflash": DFlashTraining(**SETTINGS, block_size=4),
    "draft": DraftTraining(**SETTINGS),
}


def trained(folder: Path, kind: str) -> dict[str, Any]:
    """What a training says of itself."""
    config = KINDS[kind]
    target = LlamaForCausalLM.from_pretrained(folder / "target").eval()
    report = train_draft(target, WordNumbers(), PROMPTS[:12], folder / kind, config, show_progress=False)
    return dataclasses.asdict(report)


def main(folder: Path) -> None:
    os.environ["ACCELERATE_USE_CPU"] = "1"
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    results = {kind: trained(folder, kind) for kind in KINDS}
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
