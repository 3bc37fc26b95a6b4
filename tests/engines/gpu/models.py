"""The models of some waves: ``python models.py FOLDER WAVE...``. Needs eagle_slim, and for SmolLM2 its pack; on a CPU.

* ``smollm2/target`` and heads ``full``, ``16384``, ``4096``: converted from the built-in head as a user would;
* ``smollm2/4096-missing``, ``-reordered``, ``-shifted``: the last with a broken map;
* ``oracle/target``, heads ``eagle3`` and (for SGLang) ``eagle2``: all their drafts are right;
* ``llama-8b``, ``qwen3-8b``: configurations alone, targets and heads, for dummy weights.
"""

import json
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from eagle_slim.convert.conversion.convert import convert_head
from eagle_slim.convert.conversion.vocab_choice import VocabRequest
from eagle_slim.convert.sources.builtin import embedded_target_folder
from eagle_slim.vocab_tools.tokenizer.load import load_tokenizer
from safetensors.torch import load_file, save_file
from starts import BROKEN, WAVES

sys.path.insert(0, str(Path(__file__).parents[2]))
from engines import oracle

SMOLLM2_ROWS = {"full": "full", "16384": 16384, "4096": 4096}
ORACLE_ROWS = 320
PROMPTS = Path(__file__).parents[3] / "examples" / "prompts.jsonl"
NUM_PROMPTS = 16

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
QWEN3_8B = {
    **LLAMA_8B, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "intermediate_size": 12288,
    "num_hidden_layers": 36, "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
DUMMIES = {"llama-8b": LLAMA_8B, "qwen3-8b": QWEN3_8B}
DUMMY_ROWS = (32000, 16000)


def break_map(artifact: Path, out: Path, how: str) -> None:
    """Copy an artifact and damage its map in one of the ways that no engine notices.

    ``missing``: no d2t; ``reordered``: rows no longer in the order of their ids; ``shifted``: every id one too high.
    """
    shutil.copytree(artifact, out)
    tensors = load_file(artifact / "model.safetensors")
    if how == "missing":
        del tensors["d2t"], tensors["t2d"]
    elif how == "reordered":
        tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(len(tensors["lm_head.weight"]) // 2, dims=0)
    else:
        tensors["d2t"] += 1
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def write_smollm2(folder: Path) -> None:
    """Target, heads, broken heads, and ``prompts.json``: [16][ids] in the chat form."""
    folder.mkdir(parents=True)
    target = embedded_target_folder()
    (folder / "target").symlink_to(target)
    for name, rows in SMOLLM2_ROWS.items():
        convert_head(draft_vocab=rows, out=folder / name)
    for how in BROKEN:
        break_map(folder / "4096", folder / f"4096-{how}", how)
    tokenizer = load_tokenizer(target)
    questions = [json.loads(line)["turns"][0] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    rendered = [
        tokenizer.apply_chat([{"role": "user", "content": question}], add_generation_prompt=True)
        for question in questions[:NUM_PROMPTS]
    ]
    ids = [tokenizer.backend.encode(text, add_special_tokens=False).ids for text in rendered]
    (folder / "prompts.json").write_text(json.dumps(ids))


def write_oracle(folder: Path) -> None:
    """The oracle's target, a slim EAGLE-3 head, and an EAGLE-2 head with its token map ``freq_320.pt``."""
    folder.mkdir(parents=True)
    target = oracle.build_target(folder / "target")
    head = oracle.build_eagle1_head(folder / "eagle2-unconverted")
    ranks = oracle.write_token_map(folder / "ranks.pt")
    ranking = VocabRequest(token_map=ranks)
    convert_head(
        head, target=target, draft_vocab=ORACLE_ROWS, vocabulary=ranking, out=folder / "eagle2", flavour="sglang"
    )
    head = oracle.build_eagle3_head(folder / "eagle3-unconverted")
    convert_head(head, target=target, draft_vocab=ORACLE_ROWS, vocabulary=ranking, out=folder / "eagle3")
    prompts = [oracle.prompt(cycle) for cycle in range(NUM_PROMPTS)]
    (folder / "prompts.json").write_text(json.dumps(prompts))


def write_dummy(folder: Path, config: dict[str, object]) -> None:
    """Configurations of a target and of EAGLE-3 heads for it; engines fill in the weights."""
    vocabulary = int(str(config["vocab_size"]))
    heads = {"full": vocabulary, **{str(rows): rows for rows in DUMMY_ROWS}}
    (folder / "target").mkdir(parents=True)
    (folder / "target" / "config.json").write_text(json.dumps(config, indent=2))
    for name, rows in heads.items():
        head = {
            **LLAMA_8B, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": rows,
            "vocab_size": vocabulary, "intermediate_size": config["intermediate_size"],
        }  # fmt: skip
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(head, indent=2))
    (folder / "prompts.json").write_text(json.dumps([list(range(1000 + i, 1064 + i)) for i in range(NUM_PROMPTS)]))


WRITERS: dict[str, Callable[[Path], None]] = {
    "smollm2": write_smollm2,
    "oracle": write_oracle,
    **{name: partial(write_dummy, config=config) for name, config in DUMMIES.items()},
}


def main(folder: Path, waves: list[str]) -> None:
    """Write the models of the waves (names joined by commas too) below ``folder``, where they are not there yet."""
    torch.set_num_threads(4)
    needed = {start.model for names in waves for name in names.split(",") for start in WAVES[name]}
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(WRITERS[name], folder / name) for name in needed if not (folder / name).exists()]
        for job in jobs:
            job.result()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
