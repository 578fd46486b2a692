"""The model card of a trained head: data, steps and measured acceptance, held out."""

from pathlib import Path

from hf_specdec.methods.eagle3.network import Eagle3Head
from hf_specdec.training.config import HeadTraining
from hf_specdec.training.report import HeadReport

__all__ = ["write_card"]

CARD = """---
library_name: hf_specdec
tags: [speculative-decoding, eagle3, speculators]
{base_model}---

# EAGLE-3 draft head for {target}

Drafts tokens from the target's hidden states {layers}. {size:.2f} million parameters, {vocab} of the target's
{full_vocab} tokens. The files are in the speculators format.

```python
import hf_specdec

head = hf_specdec.AutoDraftHead.from_pretrained("path/to/this/folder")
model.generate(**inputs, spec_method="eagle3", assistant_model=head)
```

## Data

{texts} texts that the target wrote at temperatures {temperatures}, up to {new_tokens} tokens each, after {prompts}.
{held_out} of them are held out.

## Training

{steps} steps of {batch} texts ({minutes:.1f} minutes); the weights are those after step {best}. {rollout} draft steps
of every position are trained (training-time test), each step's loss weighing {decay:g} of the one before; the labels
are the target's distributions.

## Held-out acceptance

Chains of {rollout} drafted tokens on the held-out texts: the share of positions at which the first drafted token is the
text's next one, the first two are, and so on, and the tokens that a verify step brings on the mean.

| temperature of the texts | positions | {columns} | tokens per step |
|---|---|{rules}|---|
{rows}
"""


def write_card(
    folder: Path, report: HeadReport, config: HeadTraining, head: Eagle3Head, *, num_prompts: int | None
) -> None:
    """Write `folder`/README.md.

    Args:
        num_prompts: prompts that were given; `None` where the target wrote from its first token on.
    """
    shape = head.config
    rows = [
        f"| {m.temperature:g} | {m.num_positions} | {' | '.join(f'{rate:.3f}' for rate in m.rates)} | "
        f"{m.tokens_per_step:.2f} |"
        for m in report.measured
    ]
    is_hub_name = shape.target_name is not None and not Path(shape.target_name).is_absolute()
    text = CARD.format(
        base_model=f"base_model: {shape.target_name}\n" if is_hub_name else "",
        target=shape.target_name if is_hub_name else " ".join(shape.target_architectures),
        layers=", ".join(map(str, shape.layer_ids or ())),
        size=sum(weight.numel() for weight in head.parameters()) / 1e6,
        vocab=f"{shape.draft_vocab_size:,}",
        full_vocab=f"{shape.vocab_size:,}",
        texts=f"{config.num_shards * config.texts_per_shard:,}",
        temperatures=" and ".join(f"{value:g}" for value in config.temperatures),
        new_tokens=config.new_tokens,
        prompts="its first token" if num_prompts is None else f"pieces of {num_prompts:,} prompts",
        held_out=f"{config.num_held_out_shards * config.texts_per_shard:,}",
        steps=f"{report.num_steps:,}",
        batch=config.batch_size,
        minutes=report.minutes,
        best=f"{report.best_step:,}",
        rollout=config.rollout_steps,
        decay=config.step_decay,
        columns=" | ".join(f"first {place + 1}" for place in range(config.rollout_steps)),
        rules="|".join(["---"] * config.rollout_steps),
        rows="\n".join(rows),
    )
    (folder / "README.md").write_text(text, "utf-8")
