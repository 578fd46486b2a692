"""The model card of a trained draft: data, steps and measured acceptance, held out."""

from pathlib import Path

from transformers import PreTrainedModel

from hf_specdec.errors import counted
from hf_specdec.methods.dflash.network import DFlashHead
from hf_specdec.methods.eagle3.network import Eagle3Head
from hf_specdec.tools.train.config import DFlashTraining, DraftTraining, HeadTraining, Training
from hf_specdec.tools.train.report import HeadReport

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
USE_DFLASH = USE_HEAD.replace("eagle3", "dflash")
USE_DRAFT = """from transformers import AutoModelForCausalLM

draft = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
model.generate(**inputs, spec_method="draft_model", assistant_model=draft)"""


def write_head_card(
    folder: Path, report: HeadReport, config: HeadTraining, head: Eagle3Head, *, num_prompts: int | None
) -> None:
    """Write `folder`/README.md of a head.

    Args:
        num_prompts: prompts that were given; `None` where the target wrote from its first token on.
    """
    shape = head.config
    size = sum(weight.numel() for weight in head.parameters()) / 1e6
    layers = ", ".join(map(str, shape.layer_ids or ()))
    fields = {
        "library": "hf_specdec",
        "tags": "speculative-decoding, eagle3, speculators",
        "title": "EAGLE-3 draft head",
        "what": f"Drafts tokens from the target's hidden states {layers}. {size:.2f} million parameters, "
        f"{shape.draft_vocab_size:,} of the target's\n{shape.vocab_size:,} tokens. The files are in the speculators "
        "format.",
        "use": USE_HEAD,
        "how": f"{config.rollout_steps} draft steps\nof every position are trained (training-time test), each step's "
        f"loss weighing {config.step_decay:g} of the one before; the labels\nare the target's distributions.",
    }
    _write(folder, report, config, shape.target_name, " ".join(shape.target_architectures), num_prompts, fields)


def write_dflash_card(
    folder: Path,
    report: HeadReport,
    config: DFlashTraining,
    head: DFlashHead,
    target: PreTrainedModel,
    *,
    num_prompts: int | None,
) -> None:
    """Write `folder`/README.md of a DFlash or DSpark head.

    Args:
        num_prompts: prompts that were given; `None` where the target wrote from its first token on.
    """
    shape = head.config
    title = "DSpark head" if shape.markov_rank else "DFlash 2 head" if shape.selector_rank else "DFlash head"
    embeddings, output = head.embed_tokens, head.lm_head
    own = [name for name, module in (("embeddings", embeddings), ("output head", output)) if module is not None]
    ends = f"it has {' and '.join(own)} of its own, which were not trained" if own else "embeddings and output head"
    ends += "" if own else " are the target's"
    size = sum(weight.numel() for weight in head.parameters()) / 1e6
    layers = ", ".join(map(str, shape.layer_ids))
    fields = {
        "library": "hf_specdec",
        "tags": "speculative-decoding, " + title.split()[0].lower(),
        "title": title,
        "what": f"Drafts blocks of {counted(head.num_drafted, 'token')} from the target's hidden states {layers}. "
        f"{counted(head.num_layers, 'layer')},\n{size:.2f} million parameters; {ends}.\n" + _origin(head),
        "use": USE_DFLASH,
        "how": f"{counted(config.blocks_per_text, 'block')}\nof every text are trained in a step, each place's loss "
        f"weighing {config.step_decay:g} of the one before; the labels are the\ntarget's distributions.",
    }
    name = str(target.config.name_or_path) or None
    _write(folder, report, config, name, type(target).__name__, num_prompts, fields)


def _origin(head: DFlashHead) -> str:
    """Form of its files, and the head that it began with."""
    mask = " The mask has an embedding of its own in mask_embedding.pt." if head.mask_embedding is not None else ""
    if head.published is None:
        return f"The files are in the form of the method's authors.{mask}"
    name = Path(head.name_or_path).name or "another head"
    return f"It began as {name}, and its files are in the same form.{mask}"


def write_draft_card(
    folder: Path,
    report: HeadReport,
    config: DraftTraining,
    draft: PreTrainedModel,
    target: PreTrainedModel,
    *,
    num_prompts: int | None,
) -> None:
    """Write `folder`/README.md of a distilled draft model.

    Args:
        num_prompts: prompts that were given; `None` where the target wrote from its first token on.
    """
    layers = draft.config.get_text_config(decoder=True).num_hidden_layers
    fields = {
        "library": "transformers",
        "tags": "speculative-decoding",
        "title": "Draft model",
        "what": f"A {type(draft).__name__} of {counted(layers, 'layer')} and "
        f"{draft.num_parameters() / 1e6:.2f} million parameters with the target's tokenizer, distilled from it.",
        "use": USE_DRAFT,
        "how": "It began as\nthe target's first layers with its embeddings, norm and head; the labels are the target's "
        "distributions.",
    }
    name = str(target.config.name_or_path) or None
    _write(folder, report, config, name, type(target).__name__, num_prompts, fields)


def _write(
    folder: Path,
    report: HeadReport,
    config: Training,
    target_name: str | None,
    architecture: str,
    num_prompts: int | None,
    fields: dict[str, str],
) -> None:
    rows = [
        f"| {m.temperature:g} | {m.num_positions} | {' | '.join(f'{rate:.3f}' for rate in m.rates)} | "
        f"{m.tokens_per_step:.2f} |"
        for m in report.measured
    ]
    is_hub_name = target_name is not None and not Path(target_name).exists()
    text = CARD.format(
        base_model=f"base_model: {target_name}\n" if is_hub_name else "",
        target=target_name if is_hub_name else architecture,
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
        **fields,
    )
    (folder / "README.md").write_text(text, "utf-8")
