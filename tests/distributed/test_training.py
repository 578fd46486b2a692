"""Training in two processes: they share the work, and neither waits for the other where there is less of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.distributed.launch import launch_forked
from tests.distributed.training_worker import KINDS, NUM_HELD_OUT, trained


def make_target(folder: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=40, num_key_value_heads=2, bos_token_id=1, eos_token_id=None, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "target")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two")
    make_target(folder)
    done = launch_forked("tests.distributed.training_worker", str(folder), timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_without_held_out_texts_trains_on(kind: str, results: list[Any], tmp_path: Path) -> None:
    """Both processes measure the same, over as many positions as one process would."""
    assert KINDS[kind].num_held_out_shards == NUM_HELD_OUT
    one, other = ({**result[kind], "minutes": 0, "loss": 0} for result in results)
    assert one == other
    assert one["num_steps"] > 0
    make_target(tmp_path)
    alone = trained(tmp_path, kind)
    assert [found["num_positions"] for found in alone["measured"]] == [
        found["num_positions"] for found in one["measured"]
    ]
