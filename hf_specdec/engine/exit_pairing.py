"""A target that drafts with its own first layers: whether it can, and their side of one call."""

from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.cache.spec_cache import SpecCache
from hf_specdec.engine.call import Call
from hf_specdec.errors import ConfigError, UnsupportedModelError
from hf_specdec.forward.networks.exit_runner import OWN_CACHE, ExitRunner
from hf_specdec.forward.networks.layer_cut import check_forwards, layers_of, path_to_layers

SMALLER = "Pass a smaller model with the same tokenizer as assistant_model."


def check_exit(call: Call, layers: int) -> None:
    """Refuse a call whose model cannot be left after `layers` layers, as far as that can be seen without trying.

    Raises:
        ConfigError: it has an encoder, fewer layers, none that can be told from its other parts, a forward on the
            instance that a copy cannot have, or states besides keys and values; or the caller gives it states to attend
            to.
    """
    model, name = call.model, type(call.model).__name__
    if model.config.is_encoder_decoder:
        rule = f"must be unset for an encoder-decoder such as {name}"
        raise ConfigError("exit_layer", rule, layers, "Pass a smaller encoder-decoder as assistant_model.")
    for given in compat.given_states(model, call.model_kwargs):
        remedy = "Pass a smaller model as assistant_model, or choose another method."
        raise ConfigError("exit_layer", f"must be unset with {given}", layers, remedy)
    try:
        path = call.facts.of(path_to_layers, model)
        check_forwards(model, path)
        most = len(layers_of(model, path)) - 1
    except UnsupportedModelError as error:
        what = str(error).split(", so that")[0]
        raise ConfigError("exit_layer", f"must be unset where {what}", layers, SMALLER) from error
    if layers > most:
        rule = f"must be from 1 to {most}, one less than the layers of {name}"
        raise ConfigError("exit_layer", rule, layers, "A quarter of the layers is a start.")
    if not call.facts.of(_keeps_keys_alone, model):
        rule = f"must be unset for {name}, whose cache holds more than keys and values"
        raise ConfigError("exit_layer", rule, layers, OWN_CACHE)
    if isinstance(call.cache, compat.DynamicCache) and not SpecCache.takes(call.cache):
        rule = f"must be unset with this {type(call.cache).__name__}, which may hold more than keys and values"
        raise ConfigError("exit_layer", rule, layers, OWN_CACHE)


def _keeps_keys_alone(model: PreTrainedModel) -> bool:
    """Returns whether the model's cache holds keys and values, and nothing besides them."""
    cache = compat.fresh_cache(model).get(compat.CACHE)
    return cache is not None and SpecCache.adopt(cache) is not None


def exit_runner_of(call: Call, layers: int, *, takes_trees: bool) -> ExitRunner:
    """The target's first layers, ready to draft for the call."""
    return ExitRunner(
        call.model,
        layers,
        num_rows=len(call.input_ids),
        takes_trees=takes_trees,
        device=call.input_ids.device,
        facts=call.facts,
    )
