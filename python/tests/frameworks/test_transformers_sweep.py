"""Every causal language model that transformers has and that can be made small: on a pack it is right, or it is refused."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import weft
import weft.transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from small_models import models, packing_of, tokens, worst

pytestmark = pytest.mark.long

# What makes a model small, in all the words that configs have for it.
SIZES = {
    61: ("vocab_size", "vocab_size_per_layer_input"),
    32: ("hidden_size", "n_embd", "d_model", "embed_dim"),
    40: ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff"),
    2: ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_key_value_heads", "num_experts_per_tok", "eos_token_id"),
    4: ("num_attention_heads", "n_head", "num_heads", "n_heads", "num_experts", "num_local_experts", "n_routed_experts",
        "moe_num_experts", "sliding_window"),
    8: ("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "hidden_size_per_layer_input"),
    16: ("q_lora_rank", "kv_lora_rank"),
    24: ("moe_intermediate_size", "shared_expert_intermediate_size"),
    64: ("max_position_embeddings", "n_positions", "n_ctx"),
    1: ("n_group", "topk_group", "first_k_dense_replace", "bos_token_id"),
    0.0: ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "dropout", "hidden_dropout", "hidden_dropout_prob",
          "attention_probs_dropout_prob", "activation_dropout"),
    0.1: ("initializer_range",),
    None: ("pad_token_id",),
}
LEAST = 80  # models that must come out right, so that a sweep which makes none is seen
found = {}


def settable(kind, usual, name):
    try:
        return hasattr(usual, name) and not isinstance(getattr(kind, name, None), property)
    except AttributeError:  # differs from layer to layer
        return False


def small_config(name):
    kind = transformers.CONFIG_MAPPING[name]
    usual = kind()
    if any(part.endswith("_config") and getattr(usual, part) is not None for part in vars(usual)):
        pytest.skip("made of several models")
    given = {word: size for size, words in SIZES.items() for word in words if settable(kind, usual, word)}
    if hasattr(usual, "is_decoder"):
        given["is_decoder"] = True
    if hasattr(usual, "kv_lora_rank"):
        given["num_key_value_heads"] = 4
        given.pop("head_dim", None)
    types = settable(kind, usual, "layer_types") and usual.layer_types
    if types:
        given["layer_types"] = (list(dict.fromkeys(types)) * 2)[:max(2, len(set(types)))]
        given["num_hidden_layers"] = len(given["layer_types"])
    return kind(**given)


@pytest.mark.parametrize("name", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_right_or_refused(name):
    packing, ids = packing_of("zigzag"), tokens(47)
    try:
        eager, ours = (model.eval() for model in models(small_config(name)))
        with torch.no_grad():
            want = torch.cat([eager(x[None], use_cache=False).logits[0] for x in ids.split(packing.lengths_q.tolist()) if len(x)])
    except Exception as e:  # of transformers alone: other sizes are wanted
        pytest.skip(f"not made small: {type(e).__name__}")
    try:
        with weft.transformers.packed(packing), torch.no_grad():
            got = ours(**weft.transformers.inputs(ids, packing, labels=False), use_cache=False).logits[0]
    except weft.Error:
        return
    except AttributeError as e:
        assert "a mask of Weft has no" in str(e)
        return
    found[name] = worst(got, want)
    assert found[name] < 2e-5


def test_many_were_right():
    if len(found) < LEAST:
        pytest.fail(f"{len(found)} models were compared: {sorted(found)}")
    print(len(found), "models, worst", max(found.items(), key=lambda x: x[1]))
