"""The registry's entry of a loop that drafts nothing."""

from hf_specdec.methods.common.drafter import BaseDrafter
from hf_specdec.methods.common.entry import DrafterContext, Method
from hf_specdec.methods.plain.config import PlainConfig
from hf_specdec.methods.plain.drafter import PlainDrafter


def _make(config: PlainConfig, context: DrafterContext) -> BaseDrafter:
    return PlainDrafter()


METHOD = Method(
    name="plain",
    config_class=PlainConfig,
    summary="this package's loop with nothing drafted",
    make=_make,
)
