"""Every name of transformers, accelerate and torch that is private or may move, by theme, each with its reason.

Nothing else in the package imports a private name of theirs, or asks what a release has. Tried with transformers 5.23
and 5.24.
"""

from transformers import LogitsProcessor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionAndStaticSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    QuantizedCache,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)
from transformers.utils import ModelOutput

from hf_specdec.compat.attention import (
    attention_implementation,
    drop_empty_layer_types,
    knows_windows,
    mask_config,
    mask_function_of,
    masks_for_forward,
    register_mask_function,
    set_attention_implementation,
)
from hf_specdec.compat.caches import (
    CACHE,
    CACHE_ARGUMENTS,
    STATIC_NAMES,
    VALUES_KEEP_DTYPE,
    attends_to_images,
    cache_name,
    cached_length,
    can_reorder,
    crop_to,
    decoding_cache,
    holds_states,
    is_users_own,
    passed_cache,
    passed_states,
    record_as,
    recorded,
    replaced_attributes,
    sees_images,
    under_new_name,
)
from hf_specdec.compat.compiling import (
    Unguarded,
    compile_settings,
    compiled,
    forbids_compiling,
    is_traced_for_us,
    mark_step_begin,
    num_compiled,
    without_guards,
)
from hf_specdec.compat.devices import (
    computes_halves,
    execution_device,
    has_tiles,
    input_device,
    is_dispatched,
    load_factor,
    mark_dynamic,
    mark_static_address,
)
from hf_specdec.compat.generation import (
    Encoded,
    assisted_decoding,
    attends_only,
    end_tokens,
    fresh_cache,
    has_foreign_inputs,
    has_own_cache,
    has_own_input_preparation,
    has_own_loop,
    merged_criteria,
    own_positions,
    pad_token_id,
    prefill,
    prompt_length,
    sample,
    unbounded_layers,
    updated_kwargs,
)
from hf_specdec.compat.models import (
    OF_PROMPTS,
    adds_virtual_tokens,
    bare_embeddings,
    batch_dim_of_states,
    counts_image_positions,
    counts_padding_out,
    generation_model,
    has_virtual_tokens,
    innermost_decoder,
    input_embeddings,
    is_compiled,
    is_recurrent,
    max_positions,
    num_decoder_layers,
    num_embeddings,
    num_weights,
    private_config,
    readable_padding,
    reads_prompts,
    rounds_tokens_together,
    takes_cache,
    takes_encoder_outputs,
    takes_position_ids,
    takes_positions,
    text_config,
    uncompiled,
    virtual_tokens_fault,
)
from hf_specdec.compat.modules import has_own_functions, is_dispatch_traced, modules_of
from hf_specdec.compat.settings import (
    is_assistants_call,
    keep_own_settings,
    leave_own_settings,
    without_defaults,
    without_settings,
)

PROCESSORS_MODULE = LogitsProcessor.__module__  # of transformers' own logits processors
