"""Settings of `train_head` that are no `transformers.TrainingArguments`."""

from dataclasses import dataclass

from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.config import check_at_least, check_positive

MOST = 100.0  # temperature or weight


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTraining:
    """Texts and shape of an EAGLE-3 head, and its loss.

    Args:
        num_texts (`int`, *optional*, defaults to `4000`):
            Most prompts, chats or texts that are used. Without any, the target writes so many texts.
        max_length (`int`, *optional*, defaults to `1024`):
            Most tokens of a text. Longer texts are cut; prompts that leave no room for `max_new_tokens` are left out.
        max_new_tokens (`int`, *optional*, defaults to `128`):
            Most tokens that the target writes after a prompt.
        temperatures (`tuple[float, ...]`, *optional*, defaults to `(0.0, 0.7)`):
            Temperatures of the texts that the target writes, in turn; 0 writes greedily.
        regenerate (`bool`, *optional*, defaults to `False`):
            Whether the target writes answers of its own in place of those in the chats.
        layer_ids (`tuple[int, ...]`, *optional*):
            Hidden states that the head reads, as `output_hidden_states` numbers them. `None` takes a low, a middle and
            a high one.
        draft_vocab_size (`int`, *optional*):
            Tokens that the head can draft, the most frequent ones of the texts. `None` is all of the target's, at most
            32,000.
        rollout_steps (`int`, *optional*, defaults to `4`):
            Draft steps of each position that are trained (training-time test) and measured.
        step_decay (`float`, *optional*, defaults to `0.8`):
            Weight of a draft step's loss over that of the step before it.
        held_out (`float`, *optional*, defaults to `0.05`):
            Share of the prompts, chats or texts on which acceptance is measured.
        patience (`int`, *optional*, defaults to `4`):
            Measurements in a row without a gain after which training ends.

    Source: https://arxiv.org/abs/2503.01840.
    """

    num_texts: int = 4000
    max_length: int = 1024
    max_new_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 0.7)
    regenerate: bool = False
    layer_ids: tuple[int, ...] | None = None
    draft_vocab_size: int | None = None
    rollout_steps: int = 4
    step_decay: float = 0.8
    held_out: float = 0.05
    patience: int = 4

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "rollout_steps", "patience"):
            check_positive(name, getattr(self, name), "Leave it out for the default.")
        check_at_least("num_texts", self.num_texts, 2, "One text at least is learned and one held out.")
        check_at_least("max_length", self.max_length, self.max_new_tokens + 1, "Use more, or fewer max_new_tokens.")
        if self.draft_vocab_size is not None:
            check_positive("draft_vocab_size", self.draft_vocab_size, "Leave it out for all tokens.")
        for layer in self.layer_ids or ():
            check_at_least("layer_ids", layer, 0, "Leave it out for a low, a middle and a high layer.")
        if not isinstance(self.temperatures, tuple) or not self.temperatures:
            remedy = "Write (0.0, 0.7), for example; 0.0 is greedy."
            raise ConfigError("temperatures", "must be a tuple of numbers from 0.0 on", self.temperatures, remedy)
        for temperature in self.temperatures:
            _check_between("temperatures", temperature, 0.0, MOST, "Usual values are 0.0 to 1.0.")
        _check_between("step_decay", self.step_decay, 0.0, MOST, "The default is 0.8.")
        _check_between("held_out", self.held_out, 0.0, 0.5, "A twentieth is enough.")


def _check_between(name: str, value: object, least: float, most: float, remedy: str) -> None:
    """Raise unless a value is a number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ConfigError(name, f"must be a number from {least} to {most}", value, remedy)
