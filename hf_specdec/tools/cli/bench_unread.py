"""Options that each measurement of `hf-specdec bench` reads: one that is given and not read is an error."""

from dataclasses import fields

from hf_specdec.errors import ConfigError
from hf_specdec.tools.bench.document import SPEEDS
from hf_specdec.tools.cli.bench_models import ModelsOptions
from hf_specdec.tools.cli.bench_options import KindOptions, PromptOptions, RunOptions

PLACE = ("model", "widen", "device", "device_map", "max_memory", "offload_folder", "threads")
TARGET = (*PLACE, "dtype", "attn_implementation")
PROMPTS = ("prompts", "limit", "limit_per_task", "random_tokens")
ROWS = ("row", "prompt_lookup_config", "lookahead_config", "draft_model_config")
READ = {
    "cost": (*TARGET, "context_length", "rounds", "seed"),
    "replay": ROWS,
    "many": (*TARGET, "draft_model", "draft_dtype", "head", *PROMPTS, "batch_size", *ROWS, "max_new_tokens"),
    "precisions": (*PLACE, *PROMPTS, *ROWS, "max_new_tokens", "rounds"),
    "drafting": (*TARGET, *PROMPTS, "context_length"),
    "steps": (*TARGET, "draft_model", "draft_dtype", *PROMPTS),
    "show": ("against",),
}  # by what is asked for, next to its own option and those of the output; speeds read all but `NOT_OF_SPEEDS`
NOT_OF_SPEEDS = ("context_length",)


def check_unread(kind: str, *groups: ModelsOptions | PromptOptions | RunOptions | KindOptions) -> None:
    """Raise for an option that was given and takes no part in what is asked for.

    Raises:
        ConfigError: names the option.
    """
    for group in groups:
        for option in fields(group):
            value = getattr(group, option.name)
            if value == option.default or _is_read(option.name, kind):
                continue
            name = f"--{option.name.replace('_', '-')}"
            if kind == SPEEDS:
                others = " or ".join(f"--{other}" for other, read in READ.items() if option.name in read)
                raise ConfigError(name, f"must come with {others}", value, "Leave it out.")
            raise ConfigError(name, f"must be left out with --{kind}", value, "It takes no part in that.")


def _is_read(option: str, kind: str) -> bool:
    return option not in NOT_OF_SPEEDS if kind == SPEEDS else option in (kind, *READ[kind])
