"""A small stand-in for the interface of SafeAILab's EAGLE: objects with its names and shapes, none of its code.

What the patches rely on, and what they must leave alone: `EaModel` with its four generation methods, whose loops call
four functions of this module; a base model with upstream's KV cache; heads of both kinds that draft
with ``topK_genrate``. Drafting is the definition of the tree in plain loops, every node from its whole path.
"""

import random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.logits_process import LogitsProcessorList, TemperatureLogitsWarper
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MIDDLE, LAYERS, POSITIONS = 48, 16, 2, 1, 8, 32, 3, 128
LIKELY = 8


CONFIG = SimpleNamespace(hidden_act="silu", rms_norm_eps=1e-5, hidden_size=HIDDEN, intermediate_size=MIDDLE)
CONFIG.num_attention_heads, CONFIG.num_key_value_heads, CONFIG.mlp_bias = HEADS, KV_HEADS, False


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dim, self.base = HEAD_DIM, 10000.0

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None] / self.base ** (torch.arange(0, self.dim, 2).float() / self.dim)
        cos, sin = angles.cos(), angles.sin()
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.config = CONFIG
        self.num_heads, self.num_key_value_heads, self.head_dim = HEADS, KV_HEADS, HEAD_DIM
        self.q_proj = nn.Linear(width, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(width, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(width, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.rotary_emb = Rotary()

    def project(self, x: Tensor) -> list[Tensor]:
        """[seq, width] to q, k, v [heads, seq, head_dim]."""
        return [f(x).view(len(x), -1, HEAD_DIM).transpose(0, 1) for f in (self.q_proj, self.k_proj, self.v_proj)]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
        scores = q @ k.transpose(1, 2) * HEAD_DIM**-0.5 + bias
        return self.o_proj((scores.float().softmax(-1).to(q.dtype) @ v).transpose(0, 1).flatten(1))


class Block(nn.Module):
    """A decoder layer of the base model or a head; EAGLE-1/2 heads have no ``input_layernorm``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.self_attn = Attention(2 * HIDDEN if kind == "eagle3" else HIDDEN)
        self.mlp = LlamaMLP(CONFIG)
        self.post_attention_layernorm = LlamaRMSNorm(HIDDEN, 1e-5)
        if kind != "eagle":
            self.input_layernorm = LlamaRMSNorm(HIDDEN, 1e-5)
        if kind == "eagle3":
            self.hidden_norm = LlamaRMSNorm(HIDDEN, 1e-5)


class Head(nn.Module):
    def __init__(self, kind: str, draft_vocab: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.depth, self.top_k, self.total_tokens = 2, 3, 7
        if kind == "eagle3":
            self.config = SimpleNamespace(vocab_size=VOCAB, draft_vocab_size=draft_vocab)
            self.midlayer, self.norm = Block(kind), LlamaRMSNorm(HIDDEN, 1e-5)
            self.fc = nn.Linear(3 * HIDDEN, HIDDEN, bias=False)
            self.lm_head = nn.Linear(HIDDEN, draft_vocab, bias=False)
            if draft_vocab != VOCAB:
                ids = torch.cat((torch.arange(LIKELY), torch.randperm(VOCAB - LIKELY)[: draft_vocab - LIKELY] + LIKELY))
                self.register_buffer("d2t", ids.sort().values - torch.arange(draft_vocab))
        else:
            self.layers = nn.ModuleList([Block(kind)])
            self.fc = nn.Linear(2 * HIDDEN, HIDDEN)

    def reset_kv(self) -> None:
        self.stable_kv = None

    def _run(self, x: Tensor, hidden: Tensor, positions: Tensor, past: Any, bias: Tensor) -> tuple[Tensor, Any]:
        if hasattr(self, "midlayer"):
            block, residual = self.midlayer, hidden
            inputs = torch.cat((block.input_layernorm(x), block.hidden_norm(hidden)), -1)
        else:
            block = self.layers[0]
            residual = inputs = self.fc(torch.cat((x, hidden), -1))
        q, k, v = block.self_attn.project(inputs)
        q, k = (block.self_attn.rotary_emb(each, positions) for each in (q, k))
        k, v = (torch.cat((before, new), 1) for before, new in zip(past, (k, v), strict=True)) if past else (k, v)
        hidden = residual + block.self_attn.attend(q, k, v, bias)
        return hidden + block.mlp(block.post_attention_layernorm(hidden)), (k, v)

    def _children(self, output: Tensor, head: nn.Module) -> list[tuple[float, int]]:
        """The best ``top_k`` of a node: log-probability and target id, best first."""
        logits = self.lm_head(self.norm(output)) if hasattr(self, "midlayer") else head(output)
        best = logits.log_softmax(-1).topk(self.top_k)
        shift = self.d2t[best.indices] if hasattr(self, "d2t") else 0
        return list(zip(best.values.tolist(), (best.indices + shift).tolist(), strict=True))

    @torch.no_grad()
    def topK_genrate(self, hidden_states, input_ids, head, logits_processor):  # noqa: N802  # as upstream
        past = None if getattr(self, "stable_kv", None) is None else [each[0] for each in self.stable_kv[0]]
        begin, end = 0 if past is None else past[0].shape[1], input_ids.shape[1] - 1
        hidden = hidden_states[0]
        if hasattr(self, "midlayer"):
            hidden = self.fc(hidden)
        seen = torch.arange(begin, end)[:, None] >= torch.arange(end)
        bias = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
        embedded, positions = self.embed_tokens(input_ids[0, 1 + begin :]), torch.arange(begin, end)
        outputs, past = self._run(embedded, hidden, positions, past, bias)
        self.stable_kv = (tuple(each[None] for each in past),)
        # A candidate: score, token, the candidate it is a child of.
        candidates = [(score, token, -1) for score, token in self._children(outputs[-1], head)]
        level, states = list(range(self.top_k)), {-1: (outputs[-1], past)}
        for depth in range(self.depth):
            new = []
            for at in level:
                score, token, parent = candidates[at]
                before, kv = states[parent]
                embedded = self.embed_tokens(torch.tensor([token]))
                output, kv = self._run(embedded, before[None], torch.tensor([end + depth]), kv, torch.zeros(1))
                states[at] = (output[0], kv)
                new += [(score + logp, child, at) for logp, child in self._children(output[0], head)]
            first = len(candidates)
            candidates += new
            level = sorted(range(first, len(candidates)), key=lambda at: (-candidates[at][0], at))[: self.top_k]
        best = sorted(range(len(candidates)), key=lambda at: (-candidates[at][0], at))[: self.total_tokens]
        nodes = [-1, *sorted(best)]
        tokens = [int(input_ids[0, -1]), *(candidates[at][1] for at in nodes[1:])]
        paths = [[0]]
        for at in nodes[1:]:
            paths.append([*paths[nodes.index(candidates[at][2])], len(paths)])
        mask = torch.zeros(1, 1, len(nodes), len(nodes))
        for node, path in enumerate(paths):
            mask[0, 0, node, path] = 1
        leaves = [path for node, path in enumerate(paths) if not any(node in other[:-1] for other in paths)]
        width = max(map(len, paths))
        rows = [[*path, *[-1] * (width - len(path))] for path in leaves]
        if logits_processor is not None:
            rows.sort(key=lambda row: [node if node >= 0 else len(nodes) + 5 for node in row])
        depths = torch.tensor([len(path) - 1 for path in paths])
        return torch.tensor([tokens]), torch.tensor(rows), mask, depths


class KVCache:
    def __init__(self, data: Tensor, current_length: Tensor) -> None:
        self.data, self.current_length = data, current_length

    def cat(self, new: Tensor) -> Tensor:
        begin = int(self.current_length)
        self.data[:, :, begin : begin + new.shape[2]] = new
        self.current_length += new.shape[2]
        return self.data[:, :, : begin + new.shape[2]]


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.norm = nn.Embedding(VOCAB, HIDDEN), LlamaRMSNorm(HIDDEN, 1e-5)
        self.layers = nn.ModuleList([Block("base") for _ in range(LAYERS)])
        self.tree_mask: Tensor | None = None

    def forward(self, input_ids: Tensor, past_key_values: Any, position_ids: Tensor | None = None, **_: Any) -> Any:
        past, new = int(past_key_values[0][0].current_length), input_ids.shape[1]
        positions = torch.arange(past, past + new)[None] if position_ids is None else position_ids
        x = self.embed_tokens(input_ids)[0]
        seen = torch.arange(past, past + new)[:, None] >= torch.arange(past + new)
        if self.tree_mask is not None:
            seen[:, -new:] &= self.tree_mask[0, 0] != 0
        bias, taps = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min), []
        for block, (keys, values) in zip(self.layers, past_key_values, strict=True):
            taps.append(x[None])
            q, k, v = block.self_attn.project(block.input_layernorm(x))
            q, k = (block.self_attn.rotary_emb(each, positions[0]) for each in (q, k))
            x = x + block.self_attn.attend(q, keys.cat(k[None])[0], values.cat(v[None])[0], bias)
            x = x + block.mlp(block.post_attention_layernorm(x))
        return {0: self.norm(x)[None], "hidden_states": tuple(taps)}


class LlamaForCausalLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = CONFIG
        self.model, self.lm_head = Decoder(), nn.Linear(HIDDEN, VOCAB, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, past_key_values: Any) -> Any:
        return SimpleNamespace(logits=self.lm_head(self.model(input_ids, past_key_values)[0]))


def initialize_past_key_values(max_length: int) -> tuple[Any, list[Tensor], Tensor]:
    data = torch.zeros(2 * LAYERS, 1, KV_HEADS, max_length, HEAD_DIM)
    lengths = torch.zeros(2 * LAYERS, dtype=torch.long)
    caches = [KVCache(data[i], lengths[i]) for i in range(2 * LAYERS)]
    return [caches[i : i + 2] for i in range(0, 2 * LAYERS, 2)], [data], lengths


def initialize_tree(input_ids: Tensor, model: Any, past_key_values: Any, logits_processor: Any) -> tuple[Any, ...]:
    outputs, logits, hidden = model(input_ids, past_key_values=past_key_values, output_orig=True)
    token = _next(logits[0, -1], logits_processor)
    if model.use_eagle3:
        hidden = torch.cat(outputs["hidden_states"], -1)
    ids = torch.cat((input_ids, token[None]), 1)
    return *model.ea_layer.topK_genrate(hidden, ids, model.base_model.lm_head, logits_processor), logits, hidden, token


def _next(logits: Tensor, logits_processor: Any) -> Tensor:
    if logits_processor is None:
        return logits.argmax()[None]
    return torch.multinomial(torch.softmax(logits_processor(None, logits[None])[0], 0), 1)


def tree_decoding(model, tokens, past_key_values, positions, input_ids, retrieve_indices):
    outputs, logits, hidden = model(
        tokens, past_key_values=past_key_values, output_orig=True, position_ids=(positions + input_ids.shape[1])[None]
    )
    if model.use_eagle3:
        hidden = torch.cat(outputs["hidden_states"], -1)
    return logits[0, retrieve_indices], hidden, outputs


def evaluate_posterior(logits: Tensor, candidates: Tensor, logits_processor: Any) -> tuple[Any, int, Tensor]:
    """Walk down the candidates; sampled, each different child in turn is taken with its share of what is left."""
    row, count = 0, 1
    while True:
        if logits_processor is None:
            probabilities = logits[row, count - 1]
            wanted = int(probabilities.argmax())
        else:
            probabilities = torch.softmax(logits_processor(None, logits[row, count - 1][None])[0], 0)
            wanted = None
        matching = (candidates[:, :count] == candidates[row, :count]).all(1).nonzero()[:, 0].tolist()
        tried: set[int] = set()
        for other in matching if count < candidates.shape[1] else []:
            child = int(candidates[other, count])
            if child < 0 or child in tried:
                continue
            tried.add(child)
            if child == wanted or (wanted is None and random.random() <= probabilities[child]):
                row, count = other, count + 1
                break
            if wanted is None:
                probabilities[child] = 0
                probabilities = probabilities / probabilities.sum()
        else:
            return torch.tensor(row), count - 1, probabilities


def update_inference_inputs(
    input_ids: Tensor,
    candidates: Tensor,
    best_candidate: Tensor,
    accept_length: int,
    retrieve_indices: Tensor,
    logits_processor: Any,
    new_token: int,
    past_key_values_data_list: list[Tensor],
    current_length_data: Tensor,
    model: Any,
    hidden_state_new: Tensor,
    sample_p: Tensor,
) -> tuple[Any, ...]:
    length, path = input_ids.shape[1], retrieve_indices[best_candidate, : accept_length + 1]
    input_ids = torch.cat((input_ids, candidates[best_candidate, : accept_length + 1][None]), 1)
    for data in past_key_values_data_list:
        data[..., length : length + len(path), :] = data[..., length + path, :]
    current_length_data.fill_(length + len(path))
    token = sample_p.argmax()[None] if logits_processor is None else torch.multinomial(sample_p, 1)
    tree = model.ea_layer.topK_genrate(
        hidden_state_new[:, path],
        input_ids=torch.cat((input_ids, token[None]), 1),
        head=model.base_model.lm_head,
        logits_processor=logits_processor,
    )
    return input_ids, *tree, new_token + len(path), None, token


class EaModel(nn.Module):
    """Random and tiny; a few tokens are likely in target and head alike, so that drafts are accepted."""

    def __init__(self, kind: str = "eagle3", draft_vocab: int = VOCAB) -> None:
        super().__init__()
        self.use_eagle3 = kind == "eagle3"
        self.base_model, self.ea_layer = LlamaForCausalLM(), Head(kind, draft_vocab)
        self.base_model_name_or_path = "stand-in"
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2 and "embed" not in name:
                    nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
                if "norm" in name:
                    nn.init.normal_(parameter, mean=1.0, std=0.1)
                if name.endswith("lm_head.weight"):
                    parameter[LIKELY:] *= 0.2
                    parameter[:LIKELY] *= 2

    def forward(self, input_ids: Tensor, past_key_values: Any, output_orig: bool = False, **options: Any) -> Any:
        outputs = self.base_model.model(input_ids, past_key_values=past_key_values, **options)
        return (outputs, self.base_model.lm_head(outputs[0]), outputs[0]) if output_orig else (outputs, outputs[0])

    def _begin(self, input_ids: Tensor, temperature: float) -> Any:
        self.ea_layer.reset_kv()
        self.base_model.model.tree_mask = None
        self.past_key_values, self.past_key_values_data, lengths = initialize_past_key_values(POSITIONS)
        self.current_length_data = lengths
        return None if temperature == 0 else self.processor(temperature)

    def processor(self, temperature: float) -> Any:
        return LogitsProcessorList([TemperatureLogitsWarper(temperature)])

    @torch.no_grad()
    def ea_generate(self, input_ids, temperature=0.0, max_new_tokens=20, max_length=POSITIONS):
        processor = self._begin(input_ids, temperature)
        begin, new_token = input_ids.shape[1], 0
        tokens, paths, mask, positions, *_ = initialize_tree(input_ids, self, self.past_key_values, processor)
        while input_ids.shape[1] <= min(max_length, begin + max_new_tokens):
            self.base_model.model.tree_mask = mask
            logits, hidden, _ = tree_decoding(self, tokens, self.past_key_values, positions, input_ids, paths)
            candidates = torch.cat((tokens, torch.full((1, 1), -1)), 1)[0, paths]
            best, count, sample_p = evaluate_posterior(logits, candidates, processor)
            caches = self.past_key_values_data, self.current_length_data
            found = candidates, best, count, paths, processor, new_token, *caches, self, hidden, sample_p
            input_ids, tokens, paths, mask, positions, new_token, *_ = update_inference_inputs(input_ids, *found)
            yield input_ids

    @torch.no_grad()
    def eagenerate(self, input_ids: Tensor, temperature: float = 0, max_new_tokens: int = 20, log: bool = False) -> Any:
        processor = self._begin(input_ids, temperature)
        begin, new_token, passes = input_ids.shape[1], 0, -1
        tokens, paths, mask, positions, *_ = initialize_tree(input_ids, self, self.past_key_values, processor)
        while input_ids.shape[1] - begin <= max_new_tokens:
            self.base_model.model.tree_mask = mask
            logits, hidden, _ = tree_decoding(self, tokens, self.past_key_values, positions, input_ids, paths)
            candidates = torch.cat((tokens, torch.full((1, 1), -1)), 1)[0, paths]
            best, count, sample_p = evaluate_posterior(logits, candidates, processor)
            caches = self.past_key_values_data, self.current_length_data
            found = candidates, best, count, paths, processor, new_token, *caches, self, hidden, sample_p
            input_ids, tokens, paths, mask, positions, new_token, *_ = update_inference_inputs(input_ids, *found)
            passes += 1
        return (input_ids, new_token, passes) if log else input_ids

    @torch.no_grad()
    def naivegenerate(self, input_ids: Tensor, max_new_tokens: int = 20) -> Tensor:
        self._begin(input_ids, 0.0)
        new = input_ids
        for _ in range(max_new_tokens):
            token = self.base_model(new, self.past_key_values).logits[:, -1:].argmax(-1)
            input_ids, new = torch.cat((input_ids, token), 1), token
        return input_ids
