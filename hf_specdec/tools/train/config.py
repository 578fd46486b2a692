"""Settings of `train_draft`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.config import check_at_least, check_positive

MAX_SEED = (1 << 62) - 1  # numbers of texts and epochs are added
MAX_EPOCHS = 1_000_000
TEXT_TOKENS = 64  # of a prompt cut from a text


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_layers(layer_ids: Sequence[int] | None, *, first: int) -> None:
    """Raise unless these are numbers of hidden states from `first` on, if they are given."""
    if layer_ids is None:
        return
    if not isinstance(layer_ids, list | tuple):
        rule, remedy = "must be a tuple of layers", "Write (2, 9, 16), for example."
        raise ConfigError("layer_ids", rule, layer_ids, remedy)
    for layer in layer_ids:
        check_at_least("layer_ids", layer, first, "Leave it out for a low, a middle and a high layer.")


def _check_decay(step_decay: float) -> None:
    if not _is_number(step_decay) or not 0.0 <= step_decay < math.inf:
        raise ConfigError("step_decay", "must be a number from 0.0 on", step_decay, "The default is 0.8.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Training of a draft of any kind, on texts that the target writes.

    Args:
        num_texts (`int`, *optional*, defaults to `4000`):
            Texts that the target writes; prompts are used again where there are fewer.
        prompt_tokens (`int` or `tuple[int, ...]`, *optional*):
            Tokens of a prompt; longer prompts and text files are cut into pieces of this length. Of several lengths
            each shard takes the next: a draft drafts best at lengths that it has seen. Chats are never cut: longer ones
            are left out. `None` is 64 for texts and 512 for chats.
        new_tokens (`int`, *optional*, defaults to `128`):
            Tokens that the target writes after each prompt.
        temperatures (`tuple[float, ...]`, *optional*, defaults to `(0.0, 0.7)`):
            The shards' temperatures, in turn; 0 writes greedily.
        epochs (`float`, *optional*, defaults to `8.0`):
            Most passes over the texts.
        minutes (`float`, *optional*):
            Most minutes of training, those before an interruption counted; the learning rate ends with them.
        batch_size (`int`, *optional*, defaults to `8`):
            Texts a step, of one process; at most `texts_per_shard`.
        rollout_steps (`int`, *optional*, defaults to `4`):
            Drafted tokens of the chains that acceptance is measured on.
        learning_rate (`float`, *optional*):
            Of Muon and AdamW, at its peak. `None` is 0.4 / hidden_size: 1e-4 at 4,096, the order of magnitude of
            published heads.
        held_out (`float`, *optional*, defaults to `0.05`):
            Share of the texts that acceptance is measured on.
        patience (`int`, *optional*, defaults to `4`):
            Training ends when held-out acceptance has not risen at this many measurements in a row.
        eval_every (`int`, *optional*, defaults to `100`):
            Steps between two measurements, after each of which the state is saved.
        texts_per_shard (`int`, *optional*, defaults to `64`):
            Texts that are written together and kept in one file.
        mixed_precision (`str`, *optional*, defaults to `"no"`):
            accelerate's: `"no"`, `"bf16"` or `"fp16"`.
        seed (`int`, *optional*, defaults to `0`):
            Of everything that is drawn.
    """

    kind: ClassVar[str]  # what is trained, as `hf-specdec train --kind` names it
    # fields that the texts depend on, and of a subclass those that the draft's shape does
    of_texts: ClassVar[tuple[str, ...]] = (
        "num_texts",
        "prompt_tokens",
        "new_tokens",
        "temperatures",
        "texts_per_shard",
        "held_out",
        "seed",
    )

    num_texts: int = 4000
    prompt_tokens: int | tuple[int, ...] | None = None
    new_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 0.7)
    epochs: float = 8.0
    minutes: float | None = None
    batch_size: int = 8
    rollout_steps: int = 4
    learning_rate: float | None = None
    held_out: float = 0.05
    patience: int = 4
    eval_every: int = 100
    texts_per_shard: int = 64
    mixed_precision: str = "no"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("new_tokens", "batch_size", "rollout_steps", "eval_every", "texts_per_shard"):
            check_positive(name, getattr(self, name), "Leave it out for the default.")
        if not self.prompt_lengths:
            raise ConfigError("prompt_tokens", "must hold one length at least", self.prompt_tokens, "Use 64.")
        for length in self.prompt_lengths:
            check_positive("prompt_tokens", length, "Leave it out for the default.")
        if self.batch_size > self.texts_per_shard:
            rule = f"must be at most texts_per_shard, {self.texts_per_shard}, since a step reads one shard"
            raise ConfigError("batch_size", rule, self.batch_size, "Use fewer texts a step, or larger shards.")
        check_at_least("seed", self.seed, 0, "Usual values are small.", most=MAX_SEED)
        check_at_least("patience", self.patience, 1, "Use a large number to never stop early.")
        remedy = f"A file holds {self.texts_per_shard} texts, and one file at least is held out."
        check_at_least("num_texts", self.num_texts, 2 * self.texts_per_shard, remedy)
        drawn = self.temperatures if isinstance(self.temperatures, list | tuple) else ()
        if not drawn or not all(_is_number(t) and 0.0 <= t < math.inf for t in drawn):
            remedy = "Write (0.0, 0.7), for example; 0.0 is greedy."
            raise ConfigError("temperatures", "must be a tuple of numbers from 0.0 on", self.temperatures, remedy)
        for name in ("epochs", "minutes", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and value > 0.0):
                raise ConfigError(name, "must be above 0", value, "Leave it out for the default.")
        if self.learning_rate == math.inf:
            raise ConfigError("learning_rate", "must be finite", self.learning_rate, "Leave it out for the default.")
        if self.epochs > MAX_EPOCHS:
            remedy = "Time ends a training too: see minutes."
            raise ConfigError("epochs", f"must be at most {MAX_EPOCHS:,}", self.epochs, remedy)
        if not _is_number(self.held_out) or not 0.0 < self.held_out <= 0.5:
            remedy = "A twentieth is enough."
            raise ConfigError("held_out", "must be a share above 0.0 and up to 0.5", self.held_out, remedy)
        if self.mixed_precision not in ("no", "bf16", "fp16"):
            rule, remedy = 'must be "no", "bf16" or "fp16"', "See accelerate's mixed precision."
            raise ConfigError("mixed_precision", rule, self.mixed_precision, remedy)

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        """`prompt_tokens` of texts, as a tuple where it is one number too."""
        if self.prompt_tokens is None:
            return (TEXT_TOKENS,)
        return self.prompt_tokens if isinstance(self.prompt_tokens, tuple) else (self.prompt_tokens,)

    def temperature_of(self, shard: int) -> float:
        """At which the texts of a shard are written."""
        return self.temperatures[shard % len(self.temperatures)]

    def prompt_length_of(self, shard: int) -> int:
        """Tokens of a shard's prompts; every length meets every temperature."""
        return self.prompt_lengths[shard // len(self.temperatures) % len(self.prompt_lengths)]

    @property
    def num_shards(self) -> int:
        """Files of texts."""
        return -(-self.num_texts // self.texts_per_shard)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one process that go over the texts once."""
        return (self.num_shards - self.num_held_out_shards) * self.texts_per_shard // self.batch_size

    @property
    def num_held_out_shards(self) -> int:
        """The first shards; where there are enough, so many that every temperature and length is measured alike."""
        wanted = max(1, round(self.num_shards * self.held_out))
        cycle = len(self.temperatures) * len(self.prompt_lengths)
        rounded = -(-wanted // cycle) * cycle
        return min(rounded, max(1, self.num_shards // 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTraining(Training):
    """Training of an EAGLE-3 head. So many `rollout_steps` of each position are trained (training-time test).

    Args:
        layer_ids (`tuple[int, ...]`, *optional*):
            Hidden states that the head reads, as `output_hidden_states` numbers them. `None` takes a low, a middle and
            a high one.
        draft_vocab_size (`int`, *optional*):
            Tokens that the head can draft, the most frequent ones of the texts. `None` is all of the target's, at most
            32,000.
        step_decay (`float`, *optional*, defaults to `0.8`):
            Weight of a draft step's loss over that of the step before it.

    The other fields are those of `Training`.
    """

    kind: ClassVar[str] = "head"
    of_texts: ClassVar[tuple[str, ...]] = (*Training.of_texts, "draft_vocab_size")

    layer_ids: tuple[int, ...] | None = None
    draft_vocab_size: int | None = None
    step_decay: float = 0.8

    def __post_init__(self) -> None:
        Training.__post_init__(self)
        _check_layers(self.layer_ids, first=0)
        if self.draft_vocab_size is not None:
            check_positive("draft_vocab_size", self.draft_vocab_size, "Leave it out for all tokens.")
        _check_decay(self.step_decay)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTraining(Training):
    """Distillation of a draft model.

    Args:
        draft_layers (`int`, *optional*):
            Layers of the draft, which begins as the target's first ones with its embeddings, norm and head. `None`
            takes a quarter of the target's.

    The other fields are those of `Training`.
    """

    kind: ClassVar[str] = "draft"
    of_texts: ClassVar[tuple[str, ...]] = (*Training.of_texts, "draft_layers")

    draft_layers: int | None = None

    def __post_init__(self) -> None:
        Training.__post_init__(self)
        if self.draft_layers is not None:
            check_positive("draft_layers", self.draft_layers, "A quarter of the target's layers is the default.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashTraining(Training):
    """Training of a DFlash head, or with a `markov_rank` of a DSpark head.

    Args:
        layer_ids (`tuple[int, ...]`, *optional*):
            Hidden states that the head reads, as `output_hidden_states` numbers them, from 1 on. `None` takes a low, a
            middle and a high one.
        draft_layers (`int`, *optional*):
            Layers of the head. `None` takes one for six of the target's, at most 5.
        block_size (`int`, *optional*):
            Tokens of a block, the last token of the text among them: a DFlash head drafts one less. `None` is 8.
        markov_rank (`int`, *optional*):
            Width of what a DSpark head adds to the logits by the token before; `None` or 0 trains a DFlash head.
            Published heads have 256.
        blocks_per_text (`int`, *optional*, defaults to `16`):
            Blocks of each text in a step.
        step_decay (`float`, *optional*, defaults to `0.8`):
            Weight of a place's loss over that of the place before.

    The other fields are those of `Training`; `rollout_steps` are measured alone, and at most what a block drafts.
    """

    kind: ClassVar[str] = "dflash"
    of_texts: ClassVar[tuple[str, ...]] = (*Training.of_texts, "draft_layers", "block_size", "markov_rank")

    layer_ids: tuple[int, ...] | None = None
    draft_layers: int | None = None
    block_size: int | None = None
    markov_rank: int | None = None
    blocks_per_text: int = 16
    step_decay: float = 0.8

    def __post_init__(self) -> None:
        Training.__post_init__(self)
        _check_layers(self.layer_ids, first=1)
        if self.draft_layers is not None:
            check_positive("draft_layers", self.draft_layers, "Leave it out for one of six of the target's.")
        check_positive("blocks_per_text", self.blocks_per_text, "Leave it out for the default.")
        if self.block_size is not None:
            check_at_least("block_size", self.block_size, 2, "Published heads have 8 or 16.")
        if self.markov_rank is not None:
            check_at_least("markov_rank", self.markov_rank, 0, "Published heads have 256.")
        _check_decay(self.step_decay)
        if self.block_size is not None:
            self.check_steps(self.block_size - (not self.markov_rank))

    def check_steps(self, num_drafted: int) -> None:
        """Raise unless chains of `rollout_steps` fit a block that drafts so many tokens."""
        if self.rollout_steps > num_drafted:
            rule = f"must be at most {num_drafted}, what a block drafts"
            raise ConfigError("rollout_steps", rule, self.rollout_steps, "Use larger blocks, or measure less.")
