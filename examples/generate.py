"""Convert the built-in head, generate with it, and show that the text is the target's own.

python examples/generate.py "Why is the sky blue?"
"""

import argparse
import tempfile

import torch
from eagle_slim.convert import ConvertOptions, convert_head
from eagle_slim.runtime import SpeculativeModel
from transformers import TextStreamer

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("prompt", nargs="?", default="Why is the sky blue?", help="default: %(default)s")
parser.add_argument("--draft-vocab", type=int, default=8192, help="rows of the LM head to keep (default: %(default)s)")
parser.add_argument("--max-new-tokens", type=int, default=64, help="length of the answer (default: %(default)s)")
args = parser.parse_args()

with tempfile.TemporaryDirectory() as folder:
    slim = convert_head(None, ConvertOptions(draft_vocab=args.draft_vocab, out=f"{folder}/slim"))[0].folder
    model = SpeculativeModel.from_pretrained(head=slim, dtype=torch.float32)

    prompt = model.encode_chat(args.prompt)
    streamer = TextStreamer(model.tokenizer, skip_prompt=True, skip_special_tokens=True)
    output = model.generate(prompt, max_new_tokens=args.max_new_tokens, streamer=streamer)
    plain = model.generate(prompt, max_new_tokens=args.max_new_tokens, speculative=False)

print(f"drafted over {model.draft_vocab} tokens: {output.stats.mean_accepted_length:.2f} tokens per target pass")
print(f"accepted lengths: {output.stats.accepted_lengths}")
print(f"the same {len(plain.token_ids[0])} tokens as plain greedy decoding: {output.token_ids == plain.token_ids}")
