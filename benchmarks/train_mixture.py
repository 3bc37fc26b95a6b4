"""Train a small mixture of experts and a head for it, and compare its drafted answers with plain ones.

    python -m benchmarks.train_mixture --save FOLDER [--family gpt-oss] [--seconds 60] [--out FILE]
    python -m benchmarks.train_mixture --saved FOLDER [--out FILE]     # compare again

No small mixture with real text is to be had as a package. So the MLP of each layer of SmolLM2 becomes eight experts,
copies with noise, two of which a token goes to, in the form of Qwen3-MoE: what its norms of q and k divide away is in
their gains again, in the mean. Or, with ``--family gpt-oss``, in the form of that, in bf16: the clamped SwiGLU gives
what SmolLM2's does, sinks begin small, and every other layer learns to see 128 tokens only. The target is trained for
``--seconds`` to predict text that SmolLM2 wrote (default: the shipped chats), and balances its experts. Then a head, at
first the built-in one, is trained as long as that on the target's own distributions over the text, as EAGLE-3 trains
(arXiv:2503.01840): each pass after the first takes the head's outputs in the place of the target's features, and looks
back on their keys. FOLDER gets ``target`` and ``head``.

Compared are, with ``speculative=False`` of each prompt alone, answers alone and in 16 slots, over a chain and a tree,
greedy and sampled; and in float32 on the CPU greedy ones with transformers' own. Exit status 1 where a token differs.
"""

from __future__ import annotations

import gzip
import json
import math
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from eagle_slim.convert.heads.taps import default_taps
from eagle_slim.convert.sources.builtin import embedded_head
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.compare.prompts import load_prompts
from eagle_slim.runtime.drafter.rope import apply_rotary, rotary_embedding
from eagle_slim.runtime.settings import TreeConfig
from eagle_slim.runtime.target.wrapper import TargetModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.shared.command import Command, show, whole_from, write
from benchmarks.shared.timing import machine

CHATS = Path(__file__).parents[1] / "convert" / "default" / "self_chat.jsonl.gz"
PROMPTS = Path(__file__).with_name("prompts.jsonl")
EXPERTS, TOP_K, NOISE, BALANCE = 8, 2, 0.1, 0.01
"""``NOISE``: of a copied weight, beside its deviation; ``BALANCE``: weight of the loss that evens out experts."""
FAMILIES = ("qwen3-moe", "gpt-oss")
SINK = -4.0
"""Score of a sink at first, at which it takes little."""
LENGTH, BATCH = 512, 32
RATES = {"target": 6e-4, "head": 3e-4}
PASSES, PASS_WEIGHT = 4, 0.8
"""Of the head in training, and the weight of each in the loss over that of the one before."""
TREES = (TreeConfig(2, 1, 4), TreeConfig(5, 10, 60))
SAMPLED: Mapping[str, Any] = {"temperature": 0.8, "top_p": 0.9}


def read_chats(tokenizer: Any, path: Path) -> Tensor:
    """Encode chats, ``messages`` in JSON lines, one after the other: int64 [sequences, LENGTH]."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        chats = [json.loads(line)["messages"] for line in lines]
    texts = tokenizer.apply_chat_template(chats, tokenize=False)
    ids = [token for each in tokenizer(texts, add_special_tokens=False)["input_ids"] for token in each]
    return torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)


@torch.no_grad()
def mixture_of(base: Any, tokens: Tensor, family: str = "qwen3-moe") -> Any:
    """Build a mixture of `FAMILIES` from a Llama; ``tokens`` [sequences, length] show how large its q and k are."""
    from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    old = base.config
    same = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "rope_parameters"),
        *("bos_token_id", "eos_token_id", "pad_token_id"),
    )
    sizes = {name: getattr(old, name) for name in same} | {
        "head_dim": old.hidden_size // old.num_attention_heads,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "router_aux_loss_coef": BALANCE,
    }
    with base.device:
        if family == "gpt-oss":
            model: Any = GptOssForCausalLM._from_config(GptOssConfig(**sizes), dtype=base.dtype)
        else:
            more = {"moe_intermediate_size": old.intermediate_size, "norm_topk_prob": True}
            model = Qwen3MoeForCausalLM._from_config(Qwen3MoeConfig(**sizes | more), dtype=base.dtype)
    model.load_state_dict(base.state_dict(), strict=False)
    if family == "gpt-oss":
        for layer, copied in zip(model.model.layers, base.model.layers, strict=True):
            layer.self_attn.sinks.fill_(SINK)
            mlp, experts = copied.mlp, layer.mlp.experts
            # ``(up + 1) * gate * sigmoid(alpha * gate)``, with gates and ups in turn.
            both = torch.stack((mlp.gate_proj.weight / experts.alpha, mlp.up_proj.weight), 1).flatten(0, 1)
            experts.gate_up_proj_bias[:, 1::2] = -1
            _put_copies(experts.gate_up_proj, both.t())
            _put_copies(experts.down_proj, mlp.down_proj.weight.t() * experts.alpha)
        return model
    for layer, copied, sizes_of in zip(model.model.layers, base.model.layers, _head_sizes(base, tokens), strict=True):
        for norm, size in zip((layer.self_attn.q_norm, layer.self_attn.k_norm), sizes_of, strict=True):
            norm.weight.fill_(size)
        mlp = copied.mlp
        _put_copies(layer.mlp.experts.gate_up_proj, torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)))
        _put_copies(layer.mlp.experts.down_proj, mlp.down_proj.weight)
    return model


def _head_sizes(base: Any, tokens: Tensor) -> list[list[float]]:
    """Return the root mean square of each layer's q and k."""
    projections = [(layer.self_attn.q_proj, layer.self_attn.k_proj) for layer in base.model.layers]
    sizes: dict[nn.Module, Tensor] = {}
    with ExitStack() as hooks:
        for projection in [each for pair in projections for each in pair]:
            hook = projection.register_forward_hook(lambda own, _, out: sizes.update({own: out.float().pow(2).mean()}))
            hooks.callback(hook.remove)
        base(tokens)
    return [[float(sizes[each].sqrt()) for each in pair] for pair in projections]


def _put_copies(experts: Tensor, weight: Tensor) -> None:
    experts.copy_(weight + torch.randn_like(experts) * weight.std() * NOISE)


def batches(tokens: Tensor, seconds: float, device: torch.device) -> Iterator[tuple[float, Tensor]]:
    """Yield batches of shuffled sequences until the time is over, each with the share of it that has passed."""
    started, draw = time.perf_counter(), torch.Generator().manual_seed(0)
    while True:
        for chosen in torch.randperm(len(tokens), generator=draw).split(BATCH):
            share = (time.perf_counter() - started) / seconds
            if share >= 1:
                return
            yield share, tokens[chosen].to(device)


def train(
    parameters: Sequence[Tensor], rate: float, losses: Callable[[Tensor], Tensor], steps: Iterator[tuple[float, Tensor]]
) -> list[list[float]]:
    """Train; ``losses`` returns of a batch a vector whose first number is made smaller. Returns some of these."""
    # In float32: small steps of a parameter in bfloat16 would be rounded away.
    masters = [each.detach().float() for each in parameters]
    optimiser = torch.optim.AdamW(masters, lr=rate, betas=(0.9, 0.95), fused=True)
    noted: list[Tensor] = []
    for share, batch in steps:
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, 20 * share + 0.05) * (0.55 + 0.45 * math.cos(math.pi * share))
        found = losses(batch)
        found[0].backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for master, each in zip(masters, parameters, strict=True):
            master.grad, each.grad = None if each.grad is None else each.grad.float(), None
        optimiser.step()
        torch._foreach_copy_([each.data for each in parameters], masters)
        noted.append(found.detach())
        # So that the host is never far ahead of what the time allows.
        if len(noted) > 2:
            noted[-3].tolist()
    every = max(1, len(noted) // 20)
    return [each.tolist() for each in [*noted[::every], noted[-1]]]


def target_losses(model: Any, tokens: Tensor) -> Tensor:
    """Return the loss of the next tokens and balance, then balance alone (1: even)."""
    found = model(tokens, labels=tokens, output_router_logits=True, use_cache=False)
    return torch.stack((found.loss, found.aux_loss / TOP_K))


class TrainedHead:
    """The layer of an EAGLE-3 head for sequences side by side; ``tensors`` as `HeadWeights` names them."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.heads, self.kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
        self.eps = float(config["rms_norm_eps"])
        self.rotary = rotary_embedding(config, next(iter(tensors.values())).device)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Multiply by a weight."""
        return F.linear(x, self.tensors[f"{name}.weight"])

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Apply an RMSNorm."""
        return F.rms_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], self.eps)

    def project(self, x: Tensor, name: str, heads: int, first: int | None = None) -> Tensor:
        """Return [batch, heads, rows, head_dim], rotated as at positions from ``first`` on unless that is None."""
        out: Tensor = self.linear(x, f"self_attn.{name}_proj").unflatten(-1, (heads, -1)).transpose(1, 2)
        if first is not None:
            angles = torch.arange(first, first + x.shape[1], device=x.device)[None]
            out = apply_rotary(out, *self.rotary.at(angles))
        return out.repeat_interleave(self.heads // heads, 1)

    def __call__(self, hidden: Tensor, embedded: Tensor, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Run a pass over rows; ``seen``: keys and values of the passes before, to which its own are added.

        A row looks back on the rows of the first pass up to its own, and on its own in the passes after.
        """
        x = torch.cat((self.norm(embedded, "input_layernorm"), self.norm(hidden, "hidden_norm")), -1)
        at = len(seen)
        q = self.project(x, "q", self.heads, at)
        seen.append((self.project(x, "k", self.kv_heads, at), self.project(x, "v", self.kv_heads)))
        (keys, values), *own = seen
        rows = x.shape[1]
        future = torch.ones((rows, rows), dtype=torch.bool, device=x.device).triu(1)
        scores = [(q @ keys.transpose(2, 3)).masked_fill(future, -math.inf)]
        scores += [(q * key).sum(-1, keepdim=True) for key, _ in own]
        shares = (torch.cat(scores, -1).float() * q.shape[-1] ** -0.5).softmax(-1).to(x.dtype)
        attended = shares[..., :rows] @ values
        for place, (_, value) in enumerate(own):
            attended = attended + shares[..., rows + place, None] * value
        hidden = hidden + self.linear(attended.transpose(1, 2).flatten(2), "self_attn.o_proj")
        x = self.norm(hidden, "post_attention_layernorm")
        gated = F.silu(self.linear(x, "mlp.gate_proj")) * self.linear(x, "mlp.up_proj")
        return hidden + self.linear(gated, "mlp.down_proj")


def head_losses(head: TrainedHead, model: Any, taps: Sequence[int], tokens: Tensor) -> Tensor:
    """Return the loss of all passes, then of each how often its best token is the target's."""
    with torch.no_grad():
        found = model(tokens, output_hidden_states=True, use_cache=False)
        wanted = found.logits.softmax(-1)
    features = torch.cat([found.hidden_states[tap] for tap in taps], -1)
    rows, embedding = tokens.shape[1] - PASSES, model.get_input_embeddings().weight.detach()
    hidden = head.linear(features[:, :rows], "fc")
    seen: list[tuple[Tensor, Tensor]] = []
    loss, agreeing = torch.zeros((), device=tokens.device), []
    for number in range(PASSES):
        # Row t has the feature of token t and the embedding of the one after, and predicts the next.
        ahead = slice(number + 1, number + 1 + rows)
        hidden = head(hidden, F.embedding(tokens[:, ahead], embedding), seen)
        logits = F.linear(head.norm(hidden, "norm"), embedding).float()
        loss = loss + PASS_WEIGHT**number * F.cross_entropy(
            logits.flatten(0, 1), wanted[:, ahead].flatten(0, 1).float()
        )
        agreeing.append((logits.argmax(-1) == wanted[:, ahead].argmax(-1)).float().mean())
    return torch.stack((loss, *agreeing))


def make(folder: Path, corpus: Path, seconds: int, family: str, device: torch.device) -> dict[str, Any]:
    """Train target and head, and write them."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    opened = SpeculativeModel.from_pretrained(device=device, dtype=dtype)
    base, tokenizer = cast("Any", opened.target.model), cast("Any", opened.tokenizer)
    tokens = read_chats(tokenizer, corpus)
    model = mixture_of(base, tokens[:BATCH].to(device), family).train()
    steps = partial(batches, tokens, seconds, device)
    found: dict[str, Any] = {"tokens": tokens.numel(), "seconds": seconds}
    found["target"] = train([*model.parameters()], RATES["target"], partial(target_losses, model), steps())
    model.eval().requires_grad_(False)
    config = json.loads((embedded_head() / "config.json").read_text())
    stored = load_file(embedded_head() / "model.safetensors")
    names = {name: name.removeprefix("midlayer.") for name in stored}
    head = TrainedHead(config, {names[name]: each.to(device, dtype).requires_grad_() for name, each in stored.items()})
    taps = default_taps(len(model.model.layers))
    found["head"] = train([*head.tensors.values()], RATES["head"], partial(head_losses, head, model, taps), steps())
    model.to(torch.bfloat16).save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    (folder / "head").mkdir(exist_ok=True)
    shutil.copy(embedded_head() / "config.json", folder / "head")
    trained = {name: head.tensors[names[name]].detach().bfloat16().cpu() for name in stored}
    save_file(trained, folder / "head" / "model.safetensors")
    return found


def compare(folder: Path, device: torch.device, new_tokens: int, most: int) -> Iterator[dict[str, Any]]:
    """Compare answers to the first ``most`` prompts: drafted with plain ones, by tree and rules."""
    model = SpeculativeModel.from_pretrained(folder / "target", folder / "head", device=device)
    prompts = [model.encode_chat(each.turns[0]) for each in load_prompts(PROMPTS)[:most]]
    for rules in ({}, SAMPLED):
        options: dict[str, Any] = {"max_new_tokens": new_tokens, **rules}
        seeds = [*range(len(prompts))] if rules else [None] * len(prompts)
        plain = [
            list(model.generate(each, speculative=False, seed=seed, **options).token_ids[0])
            for each, seed in zip(prompts, seeds, strict=True)
        ]
        for tree in TREES:
            drafting = model.with_tree(tree)
            # All kernels are compiled side by side.
            for count in (1, len(prompts)):
                drafting.warmup(count, LENGTH, max_slots=16, **rules)
            alone = [drafting.generate(each, seed=seed, **options) for each, seed in zip(prompts, seeds, strict=True)]
            beside = drafting.generate(prompts, seed=seeds if rules else None, max_slots=16, **options)
            for name, found in (("alone", [list(each.token_ids[0]) for each in alone]), ("16 slots", beside.token_ids)):
                differing = sum(list(mine) != other for mine, other in zip(found, plain, strict=True))
                outputs = alone if name == "alone" else [beside]
                lengths = sum((Counter(each.stats.accepted_lengths) for each in outputs), Counter[int]())
                accepted = sum(length * count for length, count in lengths.items()) / lengths.total()
                yield {"rules": dict(rules), "nodes": tree.total_tokens, "slots": name, "differing": differing} | {
                    "tokens": sum(map(len, found)),
                    "accepted": accepted,
                    "path": beside.stats.path,
                }


def compare_on_cpu(folder: Path, new_tokens: int, most: int) -> dict[str, Any]:
    """Compare greedy answers of our own forward in float32 on the CPU with those of transformers' class."""
    opened = SpeculativeModel.from_pretrained(folder / "target", folder / "head", device="cpu", dtype=torch.float32)
    # By itself a model on a CPU runs in transformers' forward.
    target = TargetModel(opened.target.model, opened.target.tap_layers, "fused")
    model = SpeculativeModel(target, opened.drafter, opened.tokenizer).with_tree(TREES[0])
    prompts = [model.encode_chat(each.turns[0]) for each in load_prompts(PROMPTS)[:most]]
    differing = tokens = 0
    for prompt in prompts:
        options: dict[str, Any] = {"max_new_tokens": new_tokens}
        ids = torch.tensor([prompt])
        theirs = opened.target.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)
        wanted = theirs[0, len(prompt) :].tolist()
        for speculative in (False, True):
            found = list(model.generate(prompt, speculative=speculative, **options).token_ids[0])
            differing += found != wanted
            tokens += len(found)
    return {"on": "cpu", "beside": "transformers", "tokens": tokens, "differing": differing}


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    command = Command("train_mixture", __doc__)
    command.add_argument("--corpus", type=Path, default=CHATS, help="chats in JSON lines, packed by gzip")
    command.add_argument("--family", choices=FAMILIES, default=FAMILIES[0], help="what is trained")
    command.add_argument("--seconds", type=whole_from(1), default=60, help="of training the target, then the head")
    folder = command.add_mutually_exclusive_group(required=True)
    folder.add_argument("--save", type=Path, help="train, and write target and head into this folder")
    folder.add_argument("--saved", type=Path, help="compare what was written into this folder")
    command.add_argument("--new", type=whole_from(2), default=128, help="new tokens of a prompt")
    command.add_argument("--prompts", type=whole_from(1), default=32, help="most prompts")
    args = command.parse_args(argv)
    device = command.gpu()
    result: dict[str, Any] = {"machine": machine(device), "rows": []}

    def note(row: dict[str, Any]) -> None:
        result["rows"].append(row)
        show(row)
        write(result, args.out)

    if args.save is not None:
        result |= make(args.save, args.corpus, args.seconds, args.family, device)
        show({name: value for name, value in result.items() if name != "rows"})
        write(result, args.out)
        torch.cuda.empty_cache()
    written = args.save or args.saved
    with ProcessPoolExecutor(1, get_context("spawn")) as beside:
        on_cpu = beside.submit(compare_on_cpu, written, args.new // 2, min(args.prompts, 8))
        for row in compare(written, device, args.new, args.prompts):
            note(row)
        note(on_cpu.result())
    sys.exit(1 if any(row["differing"] for row in result["rows"]) else 0)


if __name__ == "__main__":
    main()
