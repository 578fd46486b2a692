"""Checkpoints whose configuration and weights are in one GGUF file."""

import pytest
import torch
import transformers as tf

import hf_specdec
from hf_specdec.loading.checkpoints import tokenizers
from tests.helpers.support import PROMPT

VOCAB, HIDDEN, HEADS, KV_HEADS = 128, 64, 4, 2


@pytest.fixture(scope="module")
def gguf_folder(tmp_path_factory):
    """A folder with one GGUF file: a random Llama of one layer, its matrices in Q8_0."""
    gguf = pytest.importorskip("gguf")
    folder = tmp_path_factory.mktemp("gguf")
    torch.manual_seed(0)
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 256}
    config = tf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=HIDDEN, num_hidden_layers=1, **sizes
    )
    weights = tf.LlamaForCausalLM(config).state_dict()
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(VOCAB)
    writer.add_token_list([f"t{token}" for token in range(VOCAB)])
    for name, weight in zip(gguf_names(weights), weights.values(), strict=True):
        values, kind = weight.numpy(), gguf.GGMLQuantizationType.Q8_0
        if weight.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


def gguf_names(weights):
    """llama.cpp's names of a Llama's weights."""
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers.": "blk.",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attn_norm",
    }
    for name in weights:
        for old, new in names.items():
            name = name.replace(old, new)
        yield name


@pytest.mark.extras
@pytest.mark.parametrize("precision", [None, "fp32"])
def test_a_folder_needs_no_config_json(gguf_folder, precision):
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(gguf_folder, gguf_file="model.gguf", precision=precision)
    plain = tf.AutoModelForCausalLM.from_pretrained(gguf_folder, gguf_file="model.gguf")
    call = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    ours = model.generate(PROMPT, **call, spec_method="auto", spec_config={"num_nodes": 8})
    assert ours.sequences.tolist() == plain.generate(PROMPT, **call).sequences.tolist()
    assert ours.spec_stats.num_draft_tokens


@pytest.mark.extras
def test_the_path_of_a_file_is_enough(gguf_folder):
    """As people load GGUF: `--model model.gguf`."""
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(gguf_folder / "model.gguf", precision="fp32")
    folder = hf_specdec.AutoModelForCausalLM.from_pretrained(gguf_folder, gguf_file="model.gguf", precision="fp32")
    call = {"max_new_tokens": 12, "do_sample": False, "spec_method": "auto"}
    assert model.generate(PROMPT, **call).tolist() == folder.generate(PROMPT, **call).tolist()


def test_the_tokenizer_comes_out_of_the_file(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    calls = []
    monkeypatch.setattr(tokenizers.AutoTokenizer, "from_pretrained", lambda path, **given: calls.append((path, given)))
    tokenizers.load_tokenizer(tmp_path / "model.gguf")
    tokenizers.load_tokenizer("a/model.gguf")  # a name on the hub, or a folder
    assert calls == [(str(tmp_path), {"gguf_file": "model.gguf"}), ("a/model.gguf", {})]


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(hf_specdec.CheckpointError, match=r"`gguf_file` must be a file of .* no 'model.gguf' in it"):
        hf_specdec.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
