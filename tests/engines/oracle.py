"""An oracle target and EAGLE heads for it, whose drafts are all accepted exactly when an engine reads everything right.

The target maps every token to a fixed next token (a permutation made of cycles of 16), so its greedy output is known
beforehand. The heads compute the same permutation. Every token has a code of +-1 in ``[hidden]``; the successor's code
is a fixed shuffle ``R`` of the token's own, so ``code(next(x)) = R code(x)`` and the step is linear. One draft is right
only if all of these are:

* **rows, map and order**: the LM-head row of ``y`` is the code of its predecessor, so any mix-up of rows and ids
  proposes other tokens;
* **taps**: every target layer adds 1 to a marker coordinate, and ``fc`` adds noise unless each tap carries exactly the
  marker of its layer;
* **hidden state and embedding**: the head outputs ``e + 4 (R f - e)`` with ``e`` the embedding's code (through an
  attention that looks at its own position) and ``f`` the feature's, so a draft survives only if the two agree;
* **attention and MLP**: the MLP doubles the output that the next step's residual takes away again;
* **norms of q and k**, where the head has any: without them the attention looks at all positions alike;
* **biases**, where the head has any: each takes away what another adds, or stands for a weight.

All weights are small integers or powers of two, exact in bf16 and fp16. Nothing is random beyond a fixed seed.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from support.heads import write_json, write_model

VOCAB = 2048
HIDDEN = 512
HEADS = 8
LAYERS = 8
CYCLE = 16
CONST, MARKER = 0, 1
"""Coordinates that are +1 in every code; layers write the marker into the second."""
DEFAULT_TAPS = (2, LAYERS // 2, LAYERS - 3)
BOS, EOS = 0, 1
DISAGREEMENT = 4.0


def _shuffle() -> torch.Tensor:
    """``R`` as an index [hidden]: ``code(next(x)) = code(x)[R]``; coordinate cycles of 16, the first 16 fixed."""
    index = torch.arange(HIDDEN)
    index[CYCLE:] = index[CYCLE:].view(-1, CYCLE).roll(1, dims=1).flatten()
    return index


def _tokens_by_cycle() -> torch.Tensor:
    """[cycles, 16]: the tokens of each cycle in the order they follow one another, scattered over the vocabulary."""
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(11)).view(-1, CYCLE)


def next_tokens() -> torch.Tensor:
    """int64 [vocab]: the target's greedy next token of each token."""
    cycles = _tokens_by_cycle()
    follow = torch.empty(VOCAB, dtype=torch.int64)
    follow[cycles] = cycles.roll(-1, dims=1)
    return follow


def codes() -> torch.Tensor:
    """float32 [vocab, hidden] of +-1, with ``codes[next(x)] == codes[x][R]``."""
    cycles = _tokens_by_cycle()
    generator = torch.Generator().manual_seed(12)
    code = torch.randint(0, 2, (len(cycles), HIDDEN), generator=generator).float() * 2 - 1
    code[:, CONST] = code[:, MARKER] = 1
    table = torch.empty(VOCAB, HIDDEN)
    shuffle = _shuffle()
    for position in range(CYCLE):
        table[cycles[:, position]] = code
        code = code[:, shuffle]
    return table


def predecessor_codes() -> torch.Tensor:
    """float32 [vocab, hidden]: row ``y`` is the code of the token before ``y``, the LM head of the oracle."""
    rows = torch.empty(VOCAB, HIDDEN)
    rows[next_tokens()] = codes()
    return rows


def ranked_ids() -> list[int]:
    """All ids, whole cycles after one another: any prefix of 16 n ids is closed under the permutation."""
    return _tokens_by_cycle().flatten().tolist()


def prompt(cycle: int, start: int = 0, length: int = 6) -> list[int]:
    """A prompt of ``length`` tokens that follows cycle number ``cycle`` (0 is the most frequent)."""
    ids = _tokens_by_cycle()[cycle]
    return [int(ids[(start + i) % CYCLE]) for i in range(length)]


def continuation(prompt_ids: Sequence[int], tokens: int) -> list[int]:
    """What the target generates greedily after ``prompt_ids``."""
    follow, ids = next_tokens(), [prompt_ids[-1]]
    for _ in range(tokens):
        ids.append(int(follow[ids[-1]]))
    return ids[1:]


def _rms_after(layer: int) -> float:
    """Root mean square of the hidden state that enters ``layer``: ones everywhere, the marker at 1 + layer."""
    return ((HIDDEN - 1 + (1 + layer) ** 2) / HIDDEN) ** 0.5


def build_target(folder: Path) -> Path:
    """Write the oracle target as a Hugging Face Llama folder with a word-level tokenizer of the same vocabulary."""
    noise = torch.Generator().manual_seed(13)
    tensors = {"model.embed_tokens.weight": codes(), "lm_head.weight": predecessor_codes()}
    final_norm = torch.full((HIDDEN,), _rms_after(LAYERS))
    final_norm[MARKER] /= 1 + LAYERS
    tensors["model.norm.weight"] = final_norm
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        for matrix in ("q_proj", "k_proj"):
            rows = HIDDEN if matrix == "q_proj" else HIDDEN // 2
            tensors[f"{name}self_attn.{matrix}.weight"] = 0.02 * torch.randn(rows, HIDDEN, generator=noise)
        # Whatever attention looks at, the value is the constant coordinate: every position gains the same marker.
        value, output = torch.zeros(HIDDEN // 2, HIDDEN), torch.zeros(HIDDEN, HIDDEN)
        value[0, CONST] = output[MARKER, 0] = 1
        tensors |= {f"{name}self_attn.v_proj.weight": value, f"{name}self_attn.o_proj.weight": output}
        for matrix in ("gate_proj", "up_proj"):
            tensors[f"{name}mlp.{matrix}.weight"] = 0.02 * torch.randn(HIDDEN, HIDDEN, generator=noise)
        tensors[f"{name}mlp.down_proj.weight"] = torch.zeros(HIDDEN, HIDDEN)
        norm = torch.ones(HIDDEN)
        norm[CONST] = _rms_after(layer)
        tensors[f"{name}input_layernorm.weight"] = norm
        tensors[f"{name}post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    config = _common_config(torch.bfloat16) | {"architectures": ["LlamaForCausalLM"]}
    config |= {"num_hidden_layers": LAYERS, "num_key_value_heads": HEADS // 2}
    write_model(folder, config, {name: tensor.bfloat16() for name, tensor in tensors.items()})
    write_json(folder / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS})
    _write_tokenizer(folder)
    return folder


def eagle3_tensors(taps: Sequence[int] = DEFAULT_TAPS, sign: float = -1.0) -> dict[str, torch.Tensor]:
    """The oracle EAGLE-3 head over the full vocabulary, canonical names, float32.

    With ``sign`` -1 the final norm flips the output and the rows are flipped too, so that the *target's* LM-head rows
    would always propose the wrong token: only a head with its own rows drafts right. +1 is for a head that takes the
    target's rows.
    """
    shuffle = _shuffle()
    identity = torch.eye(HIDDEN)
    rotation = identity[shuffle]
    noise = torch.randint(0, 2, (HIDDEN,), generator=torch.Generator().manual_seed(14)).float() * 2 - 1

    feature = identity.clone()
    feature[MARKER] = 0
    feature[MARKER, CONST] = 1
    fc = torch.cat([0.5 * feature, 0.5 * feature, feature], dim=1)
    for index, layer in enumerate(taps):
        fc[:, index * HIDDEN + MARKER] += 4 * noise
        fc[:, index * HIDDEN + CONST] -= 4 * noise * (1 + layer)

    gate = torch.zeros(HIDDEN, HIDDEN)
    gate[:, CONST] = 8
    embedding_part = torch.cat([4 * identity, torch.zeros(HIDDEN, HIDDEN)], dim=1)
    value = torch.cat([(1 - DISAGREEMENT) * identity, DISAGREEMENT * rotation - 2 * identity], dim=1)
    layer = {"self_attn.q": embedding_part, "self_attn.k": embedding_part.clone(), "self_attn.v": value}
    layer |= {"self_attn.o": identity.clone(), "mlp.gate": gate, "mlp.up": identity / 8, "mlp.down": identity.clone()}
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    return {
        "fc.weight": fc,
        **{f"midlayer.{name}_proj.weight": tensor for name, tensor in layer.items()},
        **{f"midlayer.{name}.weight": torch.ones(HIDDEN) for name in norms},
        "norm.weight": torch.full((HIDDEN,), sign),
        "lm_head.weight": sign * predecessor_codes(),
    }


def with_biases(tensors: dict[str, torch.Tensor], layer: str) -> dict[str, torch.Tensor]:
    shift = 8 * torch.randint(1, 3, (HIDDEN,), generator=torch.Generator().manual_seed(15)).float()
    biases = {"self_attn.q": torch.zeros(HIDDEN), "self_attn.k": torch.zeros(HIDDEN), "self_attn.v": shift}
    names = ("self_attn.v", "self_attn.o", "mlp.gate")
    changed = {name: tensors[f"{layer}{name}_proj.weight"].clone() for name in names}
    if changed["mlp.gate"].any():
        # The constant coordinate, 1 in the embedding and -1 in the values, takes away what the biases add.
        changed["self_attn.v"][:, CONST] -= shift
        changed["self_attn.o"][:, CONST] += shift
        # silu(8) * (x / 8 + 1 / 4) - 2 is x in bf16; the 8 comes from the bias instead of the constant coordinate.
        changed["mlp.gate"].zero_()
        biases |= {"self_attn.o": shift, "mlp.up": torch.full((HIDDEN,), 0.25), "mlp.down": torch.full((HIDDEN,), -2.0)}
    else:
        # A layer that adds nothing: silu(8) * 1 + 8 is 16 in bf16, which the attention takes away before.
        changed["self_attn.o"] = changed["mlp.down"] = torch.eye(HIDDEN)
        biases |= {"self_attn.o": -shift - 16, "mlp.up": torch.ones(HIDDEN), "mlp.down": torch.full((HIDDEN,), 8.0)}
    biases["mlp.gate"] = torch.full((HIDDEN,), 8.0)
    return (
        tensors
        | {f"{layer}{name}_proj.weight": tensor for name, tensor in changed.items()}
        | {f"{layer}{name}_proj.bias": tensor for name, tensor in biases.items()}
    )


def with_head_norms(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same EAGLE-3 head with norms of q and k, which make the same of projections of a sixteenth."""
    changed = {}
    for name in "qk":
        changed[f"midlayer.self_attn.{name}_proj.weight"] = tensors[f"midlayer.self_attn.{name}_proj.weight"] / 16
        changed[f"midlayer.self_attn.{name}_norm.weight"] = torch.full((HIDDEN // HEADS,), 4.0)
    return tensors | changed


def with_tap_norms(tensors: dict[str, torch.Tensor], taps: Sequence[int], is_each: bool) -> dict[str, torch.Tensor]:
    """The same EAGLE-3 head with norms before ``fc``, of each tap or of all, which double what it halves."""
    gains = [torch.full((HIDDEN,), 2 * _rms_after(layer)) for layer in taps]
    norms = {f"fc_norm.{index}.weight": gain for index, gain in enumerate(gains)}
    if not is_each:
        norms = {"input_norm.weight": torch.cat(gains).square().mean().sqrt().expand(len(gains) * HIDDEN).clone()}
    return tensors | norms | {"fc.weight": tensors["fc.weight"] / 2}


def build_eagle3_head(
    folder, ids=None, taps=None, own_lm_head=True, is_biased=False, has_trained_embedding=False, norms=None
):
    """Write an EAGLE-3 head: full vocabulary (``ids=None``) or over ``ids``, in their order, as some trainers spell it.

    ``taps`` writes a top-level ``eagle_aux_hidden_state_layer_ids``; without it the head is made for the default taps
    and the config is silent, as most public heads are. ``norms``: "of heads", "fc_norm", "norm_before_fc".
    """
    tensors = eagle3_tensors(taps or DEFAULT_TAPS, sign=-1.0 if own_lm_head else 1.0)
    if is_biased:
        tensors = with_biases(tensors, "midlayer.")
    if norms == "of heads":
        tensors = with_head_norms(tensors)
    elif norms is not None:
        tensors = with_tap_norms(tensors, taps or DEFAULT_TAPS, is_each=norms == "fc_norm")
    if has_trained_embedding:
        # The other way round, and read so: with the target's it drafts wrongly.
        tensors["embed_tokens.weight"] = -codes()
        for name in ("q", "k", "v"):
            tensors[f"midlayer.self_attn.{name}_proj.weight"][:, :HIDDEN] *= -1
    if not own_lm_head:
        del tensors["lm_head.weight"]
    draft_vocab = VOCAB
    if ids is not None:
        draft_vocab = len(ids)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][list(ids)]
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    if ids is not None:
        tensors["d2t"] = (torch.tensor(ids) - torch.arange(draft_vocab)).int()
    config = _common_config(torch.bfloat16) | {"architectures": ["LlamaForCausalLMEagle3"]}
    config |= {"num_hidden_layers": 1, "num_key_value_heads": HEADS, "attention_bias": is_biased, "mlp_bias": is_biased}
    config["draft_vocab_size"] = draft_vocab if own_lm_head else None
    if has_trained_embedding:
        config["embed_requires_grad"] = True
    config |= {} if norms in (None, "of heads") else {norms: True}
    if taps is not None:
        config["eagle_aux_hidden_state_layer_ids"] = list(taps)
    return write_model(folder, config, tensors)


def build_eagle1_head(folder: Path, is_biased: bool = False) -> Path:
    """Write an EAGLE-1/2 head: its ``fc`` does the whole step, the decoder layer adds nothing; no ``fc.bias``.

    Of biases its config.json says nothing, which is left to the conversion.
    """
    identity = torch.eye(HIDDEN)
    fc = torch.cat([(1 - DISAGREEMENT) * identity, DISAGREEMENT * identity[_shuffle()]], dim=1)
    zeros = torch.zeros(HIDDEN, HIDDEN)
    tensors = {"fc.weight": fc, "layers.0.post_attention_layernorm.weight": torch.ones(HIDDEN)}
    tensors |= {f"layers.0.self_attn.{name}_proj.weight": zeros for name in "qkvo"}
    tensors |= {f"layers.0.mlp.{name}_proj.weight": zeros for name in ("gate", "up", "down")}
    if is_biased:
        tensors = with_biases(tensors, "layers.0.")
    config = _common_config(torch.bfloat16) | {"architectures": ["LlamaForCausalLM"], "bias": True}
    config |= {"num_hidden_layers": 1, "num_key_value_heads": HEADS}
    config |= {"attention_bias": None, "mlp_bias": None} if is_biased else {}
    return write_model(folder, config, {name: tensor.bfloat16() for name, tensor in tensors.items()})


def build_dflash(folder: Path, mapped: int | None = None) -> Path:
    """Write a DFlash draft that proposes the successor of the last token, so that one drafted token is always right.

    The hidden states of the target are not used (`fc` is zero), and attention is uniform (`q_norm` is zero): a masked
    slot finds, besides itself, the last token, whose code is amplified. float32, for a projection that takes the mask's
    own code away. ``mapped``: ids of an LM head of its own, in speculators' form; else in z-lab's, with the target's.
    """
    mask = ranked_ids()[-1]
    code, zeros, eye = codes()[mask], torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)
    tensors = {"fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN)}
    layer = "layers.0."
    tensors |= {f"{layer}self_attn.{name}_proj.weight": zeros.clone() for name in "qk"}
    tensors[f"{layer}self_attn.v_proj.weight"] = eye - code.outer(code) / HIDDEN
    tensors[f"{layer}self_attn.o_proj.weight"] = 4096 * eye
    tensors |= {f"{layer}self_attn.{name}_norm.weight": torch.zeros(HIDDEN // HEADS) for name in "qk"}
    tensors |= {f"{layer}mlp.{name}_proj.weight": torch.zeros(64, HIDDEN) for name in ("gate", "up")}
    tensors[f"{layer}mlp.down_proj.weight"] = torch.zeros(HIDDEN, 64)
    norms = ("hidden_norm", "norm", f"{layer}input_layernorm", f"{layer}post_attention_layernorm")
    tensors |= {f"{name}.weight": torch.ones(HIDDEN) for name in norms}
    inner = _common_config(torch.float32) | {"model_type": "qwen3", "intermediate_size": 64}
    inner |= {"num_hidden_layers": 1, "num_key_value_heads": HEADS}
    outer: dict[str, object] = {"block_size": 2}
    if mapped is not None:
        ids = torch.tensor(ranked_ids()[:mapped]).sort().values
        tensors |= {"lm_head.weight": predecessor_codes()[ids], "d2t": ids - torch.arange(mapped)}
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
        outer |= {"architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash"}
        outer |= {"draft_vocab_size": mapped, "mask_token_id": mask}
        verifier = {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]}
        how: dict[str, object] = {"default_proposal_method": "greedy"}
        how["proposal_methods"] = [{"proposal_type": "greedy", "speculative_tokens": 1}]
        outer["speculators_config"] = {"algorithm": "dflash", **how, "verifier": verifier}
        outer |= {"aux_hidden_state_layer_ids": [2, 4, 5], "transformer_layer_config": inner}
    else:
        outer |= {**inner, "architectures": ["DFlashDraftModel"]}
        outer["dflash_config"] = {"mask_token_id": mask, "target_layer_ids": [1, 3, 4]}
    return write_model(folder, outer, tensors)


def _common_config(dtype: torch.dtype) -> dict[str, object]:
    config: dict[str, object] = {"model_type": "llama", "torch_dtype": str(dtype).removeprefix("torch.")}
    config |= {"vocab_size": VOCAB, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": EOS}
    config |= {"hidden_size": HIDDEN, "intermediate_size": HIDDEN, "hidden_act": "silu", "rms_norm_eps": 1e-6}
    config |= {"num_attention_heads": HEADS, "head_dim": HIDDEN // HEADS, "rope_theta": 10000.0, "rope_scaling": None}
    config |= dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings"), False)
    return config | {"max_position_embeddings": 1024}


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words = ["<s>", "</s>", *(f"w{i}" for i in range(2, VOCAB))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Each word with its space, so that parts of a text are what they are in the whole.
    tokenizer.decoder = decoders.Replace("w", " w")
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    write_json(folder / "tokenizer_config.json", config)
