"""Speed up a loaded EaModel of SafeAILab's EAGLE: the same text with the drafter patched, then the whole step.

    git clone https://github.com/SafeAILab/EAGLE
    python examples/safeailab_dropin.py --upstream EAGLE

Without arguments of your own it runs the built-in head and its target, SmolLM2-135M-Instruct, inside upstream's code.
docs/upstream.md says which versions of it and of transformers go together. On a CPU nothing becomes faster.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from eagle_slim.runtime import (
    patch_ea_model_with_triton_drafter,
    patch_eagle_model,
    unpatch_ea_model,
    unpatch_eagle_model,
)

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--upstream", type=Path, default=os.environ.get("EAGLE_SLIM_UPSTREAM"), help="clone of EAGLE")
parser.add_argument("--base-model", help="target, for EaModel.from_pretrained; with --ea-model")
parser.add_argument("--ea-model", help="head, for EaModel.from_pretrained; with --base-model")
parser.add_argument("--max-new-tokens", type=int, default=48, help="length of the answer (default: %(default)s)")
args = parser.parse_args()
if bool(args.base_model) != bool(args.ea_model):
    parser.error("--base-model and --ea-model go together; without both, the built-in target and head run")
if args.upstream is None or not (args.upstream / "eagle").is_dir():
    parser.error("--upstream must be a clone of https://github.com/SafeAILab/EAGLE, with its folder eagle")
sys.path.insert(0, str(args.upstream))
try:
    from eagle.model.ea_model import EaModel
except ImportError as error:
    sys.exit(
        f"The code in {args.upstream} cannot be imported: {error}. Does its transformers fit? It runs with "
        "'transformers>=4.53.1,<4.54', in an environment of its own: see docs/upstream.md."
    )

on_gpu = torch.cuda.is_available()
device, dtype = torch.device("cuda" if on_gpu else "cpu"), torch.bfloat16 if on_gpu else torch.float32
drafter = "triton" if on_gpu else "reference"
if args.base_model:
    model = EaModel.from_pretrained(
        base_model_path=args.base_model, ea_model_path=args.ea_model, torch_dtype=dtype, device_map=str(device)
    ).eval()
    prompt = torch.tensor([model.tokenizer("Why is the sky blue?").input_ids], device=device)
    decode = model.tokenizer.decode
else:
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from eagle_slim.convert.sources.builtin import embedded_target_folder
    from tokenizers import Tokenizer

    from benchmarks.shared.ea_model import BUILT_IN, build_ea_model, read_prompt

    model, prompt = build_ea_model(BUILT_IN, dtype, device), read_prompt(BUILT_IN, device)
    decode = Tokenizer.from_file(str(embedded_target_folder() / "tokenizer.json")).decode


def generate(name: str) -> list[int]:
    """Generate greedily, print the speed, and return the new ids."""
    started = time.perf_counter()
    output, new_tokens, last_pass = model.eagenerate(prompt, max_new_tokens=args.max_new_tokens, log=True)
    seconds = time.perf_counter() - started
    speed = int(new_tokens) / seconds
    print(f"{name:16} {speed:7.1f} tokens/s, {int(new_tokens) / (last_pass + 1):.2f} tokens a pass")
    return output[0, prompt.shape[1] :].tolist()


generate("(warming up)")
upstream = generate("upstream")

patch_ea_model_with_triton_drafter(model, drafter=drafter)
generate("(warming up)")
patched = generate("patched drafter")
unpatch_ea_model(model)

patch_eagle_model(model, drafter=drafter)
generate("(warming up)")
whole = generate("fully patched")
unpatch_eagle_model(model)

print(decode(whole))
# In bfloat16 near-ties may round differently; in float32 the texts are equal to the last token.
print(f"patched drafter equal to upstream: {patched == upstream}, fully patched: {whole == upstream}")
