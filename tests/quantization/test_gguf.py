"""Checkpoints whose configuration and weights are in one GGUF file."""

from types import SimpleNamespace

import pytest
import torch
import transformers as tf

import hf_specdec
from hf_specdec.compat.loading import dequantized_gguf, without_progress_bars
from hf_specdec.kernels.packed import Packed
from hf_specdec.kernels.quantization.weights import num_parameters
from hf_specdec.loading.checkpoints import tokenizers
from tests.helpers.support import PROMPT
from tests.kernels.layer_cases import has_core

VOCAB, HIDDEN, HEADS, KV_HEADS = 128, 64, 4, 2
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 256,
}
LLAMA = {
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
LFM2 = {
    **{name: LLAMA[name] for name in LLAMA if "self_attn" in name or "model." in name},
    "model.embedding_norm": "token_embd_norm",
    "operator_norm": "attn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
}


@pytest.fixture(scope="module")
def gguf_folder(tmp_path_factory):
    """A folder with one GGUF file: a random Llama of one layer, its matrices in Q8_0."""
    config = tf.LlamaConfig(**SIZES, num_hidden_layers=1)
    return written(tmp_path_factory.mktemp("gguf"), "llama", config, LLAMA, heads=KV_HEADS, eps=config.rms_norm_eps)


@pytest.fixture
def packed_folder(tmp_path, monkeypatch):
    """A folder with one GGUF file whose matrices transformers keeps in Q8_0: it finds a kernel, in torch, for them."""
    kernels = pytest.importorskip("transformers.integrations.gguf.kernels")
    dequant = pytest.importorskip("transformers.integrations.gguf.dequant")

    def mul_mat_vec(blocks, x, kind, num_rows):
        return x @ dequant.dequantize(blocks, kind, x.dtype).reshape(num_rows, -1).T

    parts = dict.fromkeys(("dequantize", "get_rows", "mul_mat_id"))
    module = SimpleNamespace(mul_mat_vec=mul_mat_vec, GEMV_TYPES=frozenset(dequant.GGML_BLOCK), **parts)
    monkeypatch.setattr(kernels, "_gguf_kernel", kernels.GgufKernel(module))
    layers = ["conv", "full_attention", "conv"]
    config = tf.Lfm2Config(**SIZES, num_hidden_layers=3, layer_types=layers, block_auto_adjust_ff_dim=False)
    heads = [KV_HEADS if layer == "full_attention" else 0 for layer in layers]
    return written(tmp_path, "lfm2", config, LFM2, heads=heads, eps=config.norm_eps)


def written(folder, architecture, config, names, *, heads, eps, kinds=("Q8_0",)):
    """`folder` with the file of a random model.

    Args:
        names: llama.cpp's name for each part of a weight's.
        heads: key/value heads, of each layer where they differ.
        kinds: formats that its matrices have in turns.
    """
    gguf = pytest.importorskip("gguf")
    torch.manual_seed(0)
    weights = tf.AutoModelForCausalLM.from_config(config).state_dict()
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_shortconv_l_cache(getattr(config, "conv_L_cache", 0))
    writer.add_vocab_size(VOCAB)
    writer.add_token_list([f"t{token}" for token in range(VOCAB)])
    for number, (name, weight) in enumerate(weights.items()):
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue  # its embedding's
        for old, new in names.items():
            name = name.replace(old, new)
        is_kernel = weight.ndim == 3  # of a convolution
        values = (weight.squeeze(1) if is_kernel else weight).numpy()
        kind = gguf.GGMLQuantizationType[kinds[number % len(kinds)]]
        if values.ndim == 2 and not is_kernel:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


@has_core
@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_stay_packed_on_a_cpu(tmp_path, is_tied):
    """In each format that the core has, and widened in others; with the rows that transformers puts elsewhere."""
    config = tf.LlamaConfig(**SIZES, num_hidden_layers=2, tie_word_embeddings=is_tied)
    kinds = ("Q8_0", "Q4_0", "Q4_1", "Q5_1")
    written(tmp_path, "llama", config, LLAMA, heads=KV_HEADS, eps=config.rms_norm_eps, kinds=kinds)
    packed = hf_specdec.AutoModelForCausalLM.from_pretrained(tmp_path / "model.gguf")
    widened = hf_specdec.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model.gguf", precision="fp32", dequantize=True
    )
    layers = [module for module in packed.modules() if isinstance(module, Packed)]
    others = [module for module in packed.modules() if type(module) in (torch.nn.Linear, torch.nn.Embedding)]
    assert {layer.kind.name for layer in layers} == {"Q8_0", "Q4_0", "Q4_1"}
    assert 0 < len(others) < len(layers), "those in Q5_1"
    assert (packed.lm_head.weight is packed.model.embed_tokens.weight) == is_tied
    assert packed.dtype == torch.bfloat16
    assert num_parameters(packed) == num_parameters(widened)
    with torch.no_grad():
        ours, exact = packed(PROMPT).logits.float(), widened(PROMPT).logits
    assert (ours - exact).norm() < 0.02 * exact.norm()
    call = {"max_new_tokens": 12, "do_sample": False}
    plain = packed.generate(PROMPT, **call)
    assert torch.equal(packed.generate(PROMPT, **call, spec_method="auto", spec_config={"num_nodes": 8}), plain)


def test_only_gguf_files_are_dequantised():
    with pytest.raises(hf_specdec.ConfigError, match="must be False for what is no GGUF file"):
        hf_specdec.AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("draft"), dequantize=True)


@pytest.mark.extras
@pytest.mark.parametrize("precision", [None, "fp32"])
def test_a_folder_needs_no_config_json(gguf_folder, precision):
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(
        gguf_folder, gguf_file="model.gguf", precision=precision, dequantize=True
    )
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


@pytest.mark.extras
@pytest.mark.parametrize("num_nodes", [5, 12])  # transformers multiplies more than eight tokens by unpacked weights
def test_trees_over_weights_that_stay_packed(packed_folder, num_nodes):
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(
        packed_folder / "model.gguf", attn_implementation="sdpa", quantization_config=tf.GgufConfig()
    )
    assert {weight.dtype for name, weight in model.named_parameters() if "proj" in name} == {torch.uint8}
    call = {"max_new_tokens": 32, "do_sample": False, "return_dict_in_generate": True}
    plain = model.generate(PROMPT, **call).sequences
    for method, config in (("auto", {"num_nodes": num_nodes}), ("prompt_lookup", {"max_draft_len": num_nodes})):
        ours = model.generate(PROMPT, **call, spec_method=method, spec_config=config)
        assert torch.equal(ours.sequences, plain)
        assert ours.spec_stats.num_accepted_tokens


@pytest.mark.extras
def test_packed_weights_are_counted_unpacked(packed_folder):
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(
        packed_folder / "model.gguf", quantization_config=tf.GgufConfig()
    )
    assert num_parameters(model) == tf.AutoModelForCausalLM.from_config(model.config).num_parameters()
    experts = tf.integrations.gguf.utils.GgufExperts(2, 64, 32, gate_up_type=8, down_type=8, act_fn=None)  # Q8_0
    assert num_parameters(experts) == 2 * 3 * 64 * 32


def test_the_tokenizer_comes_out_of_the_file(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    calls = []
    monkeypatch.setattr(
        tokenizers.AutoTokenizer, "from_pretrained", lambda path, **inputs: calls.append((path, inputs))
    )
    tokenizers.load_tokenizer(tmp_path / "model.gguf")
    tokenizers.load_tokenizer("a/model.gguf")  # a name on the hub, or a folder
    assert calls == [(str(tmp_path), {"gguf_file": "model.gguf"}), ("a/model.gguf", {})]


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(hf_specdec.CheckpointError, match=r"`gguf_file` must be a file of .* no 'model.gguf' in it"):
        hf_specdec.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")


def test_a_file_that_was_cut_off_is_said_to_be(gguf_folder, tmp_path):
    """As an unfinished download is: within the header, the names or the weights."""
    content = (gguf_folder / "model.gguf").read_bytes()
    for size in (3, 100, 2000, len(content) - 1000):
        (tmp_path / "model.gguf").write_bytes(content[:size])
        with pytest.raises(hf_specdec.CheckpointError, match="could not be read as GGUF.*Is the download complete?"):
            hf_specdec.AutoModelForCausalLM.from_pretrained(tmp_path / "model.gguf")


@pytest.mark.parametrize("precision", ["fp8", "int8", "nf4"])
def test_weights_that_are_packed_already_are_not_quantised(gguf_folder, precision):
    with pytest.raises(hf_specdec.ConfigError, match=f"`precision` must be 'auto', .* a GGUF file.*'{precision}'"):
        hf_specdec.AutoModelForCausalLM.from_pretrained(gguf_folder / "model.gguf", precision=precision)


def test_what_transformers_does_not_find_in_a_folder_is_hinted_at(tmp_path):
    for name, hint in {"model.gguf": "Name the file", "model.GGUF": r"must end in \.gguf"}.items():
        folder = tmp_path / name[-4:]
        folder.mkdir()
        (folder / name).write_bytes(b"GGUF")
        path = folder if name == "model.gguf" else folder / name
        with pytest.raises(hf_specdec.CheckpointError, match=hint):
            hf_specdec.AutoModelForCausalLM.from_pretrained(path)


def test_a_draft_in_a_file_has_the_file_s_tokenizer(tmp_path, tokenizer, monkeypatch):
    """Compared with the target's, as that of a folder is."""
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    other = SimpleNamespace()
    monkeypatch.setattr(tokenizers.AutoTokenizer, "from_pretrained", lambda path, **inputs: other)
    for is_alike in (True, False):
        monkeypatch.setattr(tokenizers, "share_token_ids", lambda first, second, is_alike=is_alike: is_alike)
        loaded = tokenizers.load_foreign_tokenizer(tmp_path / "model.gguf", tokenizer)
        assert loaded is (None if is_alike else other)


def test_a_conversion_of_ours_shows_no_progress_bar(gguf_folder, capsys):
    def load():
        tf.AutoModelForCausalLM.from_pretrained(gguf_folder, gguf_file="model.gguf", **dequantized_gguf())

    with without_progress_bars():
        load()
    assert "tensors" not in capsys.readouterr().err
    load()
    assert "tensors" in capsys.readouterr().err
