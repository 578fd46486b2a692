"""The model card of a trained draft: data, steps and measured acceptance, held out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from hf_specdec.errors import counted
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.tools.train.loop import HeadReport
from hf_specdec.tools.train.student import Student

CARD = """---
library_name: {library}
tags: [{tags}]
{base_model}---

# {title} for {target}

{what}

```python
{use}
```

## Data

{texts} texts that the target wrote at temperatures {temperatures}, up to {new_tokens} each, after {prompts}.
{held_out} of them are held out.

## Training

{steps} of {batch} ({minutes:.1f} minutes); the weights are those after step {best}. {how}

## Held-out acceptance

Chains of {rollout} on the held-out texts: the share of positions at which the first drafted token is the
text's next one, the first two are, and so on, and the tokens that a verify step brings on the mean. Drafted are the
likeliest tokens; a sampled call drafts those that its sampler will draw, of which more are accepted as a rule.

| temperature of the texts | positions | {columns} | tokens per step |
|---|---|{rules}|---|
{rows}
"""
USE_HEAD = """import hf_specdec

head = hf_specdec.AutoDraftHead.from_pretrained("path/to/this/folder")
model.generate(**inputs, spec_method="eagle3", assistant_model=head)"""
USE_DRAFT = """from transformers import AutoModelForCausalLM

draft = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
model.generate(**inputs, spec_method="draft_model", assistant_model=draft)"""


def layers_and_size(head: DraftHead, layer_ids: Sequence[int]) -> tuple[str, str]:
    """Hidden states that a head reads, and its millions of parameters, in words."""
    return ", ".join(map(str, layer_ids)), f"{sum(weight.numel() for weight in head.parameters()) / 1e6:.2f}"


def write_card(
    folder: Path, report: HeadReport, student: Student[Any, Any], draft: nn.Module, num_prompts: int | None
) -> None:
    """Write `folder`/README.md of a draft.

    Args:
        num_prompts: prompts that were given; `None` where the target wrote from its first token on.
    """
    config, target = student.config, student.target
    name = str(target.config.name_or_path)
    is_hub_name = bool(name) and not Path(name).exists()
    rows = [
        f"| {m.temperature:g} | {m.num_positions} | {' | '.join(f'{rate:.3f}' for rate in m.rates)} | "
        f"{m.tokens_per_step:.2f} |"
        for m in report.measured
    ]
    text = CARD.format(
        base_model=f"base_model: {name}\n" if is_hub_name else "",
        target=name if is_hub_name else type(target).__name__,
        texts=f"{config.num_shards * config.texts_per_shard:,}",
        temperatures=" and ".join(f"{value:g}" for value in config.temperatures),
        new_tokens=counted(config.new_tokens, "token"),
        prompts="its first token" if num_prompts is None else f"pieces of {counted(num_prompts, 'prompt')}",
        held_out=f"{config.num_held_out_shards * config.texts_per_shard:,}",
        steps=counted(report.num_steps, "step"),
        batch=counted(config.batch_size, "text"),
        minutes=report.minutes,
        best=f"{report.best_step:,}",
        rollout=counted(config.rollout_steps, "drafted token"),
        columns=" | ".join(f"first {place + 1}" for place in range(config.rollout_steps)),
        rules="|".join(["---"] * config.rollout_steps),
        rows="\n".join(rows),
        **student.card(draft),
    )
    (folder / "README.md").write_text(text, "utf-8")
