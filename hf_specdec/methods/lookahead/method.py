"""The registry's entry of lookahead."""

from hf_specdec.methods.common.drafter import BaseDrafter
from hf_specdec.methods.common.entry import DrafterContext, Method, Source
from hf_specdec.methods.lookahead.config import LookaheadConfig
from hf_specdec.methods.lookahead.drafter import LookaheadDrafter


def _make(config: LookaheadConfig, context: DrafterContext) -> BaseDrafter:
    return LookaheadDrafter(config)


METHOD = Method(
    name="lookahead",
    config_class=LookaheadConfig,
    config_arguments=("lookahead_config",),
    summary="collects n-grams from a window of guesses about the text to come",
    make=_make,
    needs_tree=True,
    sources=(Source("window", "window", "found by lookahead's window of guesses", "W", "window"),),
)
