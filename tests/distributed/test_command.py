"""`--tp-plan auto`: the processes of a launch share a target, one of them speaks, and none outlives another."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from hf_specdec import embedded
from tests.cli.conftest import Run
from tests.distributed.launch import launch

SHORT = ("--max-new-tokens", "12", "--dtype", "fp32", "--threads", "1")
COMMAND = ("-m", "hf_specdec", "generate", "--model", "embedded", "--tp-plan", "auto", *SHORT)


@pytest.mark.wide
def test_one_process_speaks_and_says_what_one_process_alone_says(run: Run) -> None:
    how = ("def main(argv=None):\n", "--do-sample", "--seed", "5", "--draft-model-config", "[4]", "--json")
    done = launch(*COMMAND, *how)
    assert done.returncode == 0, done.stderr[-3000:]
    ours, alone = json.loads(done.stdout), json.loads(run("generate", *how, *SHORT).stdout)
    assert ours["token_ids"] == alone["token_ids"]


@pytest.mark.wide
def test_a_file_of_prompts_is_done_once(tmp_path: Path, run: Run) -> None:
    """All processes go through all prompts; one of them writes."""
    prompts, out, other = (tmp_path / name for name in ("prompts.jsonl", "out.jsonl", "alone.jsonl"))
    prompts.write_text('"def a():"\n"import os"\n{"text": "class A:"}\n')
    done = launch(*COMMAND, "--prompts-file", str(prompts), "--out", str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "" and not list(tmp_path.glob("out-rank*"))
    assert run("generate", *SHORT, "--prompts-file", str(prompts), "--out", str(other)).exit_code == 0
    assert texts(out) == texts(other)


def texts(path: Path) -> list[Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["token_ids"] for line in sorted(lines, key=lambda line: int(line["index"]))]


@pytest.mark.wide
def test_a_mistake_ends_all_processes_with_its_hint() -> None:
    done = launch(*COMMAND, "x", "--device-map", "auto")
    assert done.returncode != 0
    assert "`device_map` must be unset with tp_plan" in done.stderr
    assert done.stdout == ""


@pytest.mark.wide
def test_a_process_that_dies_takes_the_others_with_it(tmp_path: Path) -> None:
    """In the middle of a forward no one can be told; torchrun ends those who wait."""
    script = tmp_path / "dies.py"
    script.write_text(
        f"""
import os, hf_specdec, torch
model = hf_specdec.AutoModelForCausalLM.from_pretrained({embedded.path("target")!r}, tp_plan="auto")
model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, spec_method="prompt_lookup")
def die(*args):
    raise MemoryError("no room here")
if os.environ["RANK"] == "1":
    model.model.layers[2].register_forward_pre_hook(die)
model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, spec_method="prompt_lookup")
"""
    )
    began = time.monotonic()
    done = launch(str(script), timeout=240)
    assert done.returncode != 0
    assert "no room here" in done.stderr
    assert time.monotonic() - began < 200


@pytest.mark.parametrize(
    ("options", "field", "hint"),
    [
        (("--tp-plan", "auto"), "tp_plan", "torchrun --nproc-per-node 2"),
        (("--device-map", "somewhere"), "device_map", "Name one of them"),
    ],
)
def test_options_of_placement_that_do_not_go_together(
    run: Run, options: tuple[str, ...], field: str, hint: str
) -> None:
    done = run("generate", "x = 1", *SHORT, *options)
    assert done.exit_code == 2
    assert f"`{field}` must" in done.stderr
    assert hint in done.stderr


@pytest.mark.wide
def test_an_offloaded_target_gives_the_same_text(run: Run) -> None:
    how = ("def main(argv=None):\n", "--json", *SHORT, "--max-new-tokens", "5")
    offload = ("--device-map", "disk")
    ours, whole = (json.loads(run("generate", *how, *more).stdout) for more in (offload, ()))
    assert ours["token_ids"] == whole["token_ids"]
    facts = json.loads(run("info", "--json", "--dtype", "fp32", *offload).stdout)
    assert facts["model"]["devices"] == ["disk"]
