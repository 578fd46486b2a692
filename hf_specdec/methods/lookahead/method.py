"""The registry's entry of lookahead."""

from hf_specdec.methods.common.drafter import BaseDrafter
from hf_specdec.methods.common.method import DrafterContext, Method
from hf_specdec.methods.lookahead.config import LookaheadConfig
from hf_specdec.methods.lookahead.drafter import LookaheadDrafter


def _make(config: LookaheadConfig, context: DrafterContext) -> BaseDrafter:
    return LookaheadDrafter(config)


LOOKAHEAD = Method(
    name="lookahead",
    config_class=LookaheadConfig,
    config_arguments=("lookahead_config",),
    summary="collects n-grams from a window of guesses about the text to come",
    make=_make,
    needs_tree=True,
)
