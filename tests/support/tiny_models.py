"""Tiny random targets and draft heads: seconds to build, peaked enough that greedy has no near-ties."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from support.heads import eagle3_config, layer_shapes, write_model
from torch import Tensor, nn

VOCAB = 24
HIDDEN = 32
LAYERS = 4
WINDOW = 6
NEAR_TIE = 1e-4
"""Logits closer than this may change places where another processor rounds them; float32 errs by about 1e-6."""

SIZES = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": LAYERS}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
EXPERTS = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ROPE |= {"original_max_position_embeddings": 64}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
GPT_OSS = {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "swiglu_limit": 1.0}
GPT_OSS |= {"sliding_window": WINDOW, "rope_parameters": {**YARN_ROPE, "rope_theta": 10000.0, "truncate": False}}


def tiny_target(kind: str, seed: int = 0, **overrides: Any) -> nn.Module:
    """A random causal LM in fp32: "llama", "qwen2" (mixed windows), "qwen3", "mistral" (window in all layers), or
    "qwen3moe" and "gptoss", all of whose layers have experts."""
    import transformers

    torch.manual_seed(seed)
    sizes = {**SIZES, **overrides}
    types = ["full_attention", "sliding_attention"] * (sizes["num_hidden_layers"] // 2)
    name, more = {
        "llama": ("Llama", {}),
        "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": types}),
        "qwen3": ("Qwen3", {"head_dim": 16}),
        "mistral": ("Mistral", {"sliding_window": WINDOW}),
        "qwen3moe": ("Qwen3Moe", EXPERTS),
        "gptoss": ("GptOss", GPT_OSS),
    }[kind]
    config = getattr(transformers, f"{name}Config")(**{**more, **sizes})
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    widen(model.named_parameters())
    for path, parameter in model.named_parameters() if kind == "gptoss" else ():
        if path.endswith(("bias", "sinks")):
            nn.init.normal_(parameter, std=0.5)
    return model.eval()


def widen(parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Draw matrices wide enough that next tokens are decided clearly; norms stay near one."""
    with torch.no_grad():
        for name, parameter in parameters:
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5 * (3.0 if "head" in name else 1.5))
            elif "norm" in name:
                nn.init.normal_(parameter, mean=1.0, std=0.1)


def write_head(folder, kind="eagle3", seed=1, draft_ids=None, taps=3, vocab=VOCAB, hidden=HIDDEN, extra=None, **config):
    """Write a random head as its authors would: ``draft_ids`` gives it an LM head and a map, in that order."""
    is_eagle3, rows = kind == "eagle3", len(draft_ids or range(vocab))
    layer = "midlayer." if is_eagle3 else "layers.0."
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, (taps if is_eagle3 else 2) * hidden)}
    shapes |= layer_shapes(layer, 2 * hidden if is_eagle3 else hidden, hidden=hidden)
    norms = [f"{layer}{name}" for name in ("post_attention_layernorm", "input_layernorm", "hidden_norm")] + ["norm"]
    shapes |= {f"{name}.weight": (hidden,) for name in (norms if is_eagle3 else norms[:1])}
    if not is_eagle3:
        shapes["fc.bias"] = (hidden,)
    for name in "qkv" if config.get("attention_bias") else "":
        shapes[f"{layer}self_attn.{name}_proj.bias"] = shapes[f"{layer}self_attn.{name}_proj.weight"][:1]
    if draft_ids:
        shapes["lm_head.weight"] = (rows, hidden)
    torch.manual_seed(seed)
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    widen(tensors.items())
    for name, tensor in tensors.items():
        if name.endswith("bias"):
            nn.init.normal_(tensor, std=0.3)
    tensors |= extra or {}
    if draft_ids:
        tensors["d2t"] = torch.tensor(draft_ids) - torch.arange(rows)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, torch.tensor(draft_ids), True)
    sizes = {"vocab_size": vocab, "draft_vocab_size": rows if is_eagle3 else ..., "hidden_size": hidden}
    sizes["architectures"] = ["LlamaForCausalLMEagle3" if is_eagle3 else "LlamaForCausalLMEagle"]
    settings = eagle3_config(torch.float32, **sizes, max_position_embeddings=256)
    return write_model(folder, settings | config, tensors)


def random_prompts(lengths: list[int], seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]


def plain_greedy(model: nn.Module, prompt: list[int], max_new_tokens: int, eos: int | None = 2) -> list[int]:
    """Return what transformers' own generate gives: new tokens only, each of them chosen clearly."""
    ids = torch.tensor([prompt])
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "eos_token_id": eos}
    options |= {"pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)  # type: ignore[operator]
    largest = torch.cat(output.logits).topk(2).values
    assert -largest.diff().max() > NEAR_TIE, "a near-tie: another seed would make a better test"
    return output.sequences[0, len(prompt) :].tolist()


def write_pair(folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Write a tiny target with tokenizer and chat template, and a full-vocabulary head for it: (target, head)."""
    from support.small_tokenizers import byte_level_bpe, write_folder

    tokenizer = byte_level_bpe(360, ["<|im_start|>", "<|im_end|>"])
    vocab = tokenizer.get_vocab_size()
    end = tokenizer.token_to_id("<|im_end|>")
    # Else transformers before 5 takes Llama's tokenizer for a Llama model and puts a token of its own in front.
    target = write_folder(folder / "target", tokenizer, tokenizer_class="PreTrainedTokenizerFast")
    target = folder / "target" if target is None else Path(target)
    model = tiny_target("llama", seed, vocab_size=vocab, eos_token_id=end, bos_token_id=end, pad_token_id=end)
    model.generation_config.eos_token_id = end
    model.save_pretrained(target)
    return target, write_head(folder / "head", vocab=vocab)
