"""Write long prompts, made of chats that the package carries, for `eagle-compare`: its table has rows for each length.

    python examples/long_prompts.py --lengths 1000 4000 7500 --out long.jsonl
    eagle-compare --prompts long.jsonl --sizes full --modes greedy --draft-window 0,auto

Lengths are in tokens of the built-in target's tokenizer; other targets take 16000 and 32000 as well.
"""

import argparse
import gzip
import json
from importlib.resources import files
from pathlib import Path

from eagle_slim.convert.sources.builtin import embedded_target_folder
from eagle_slim.vocab_tools.tokenizer import load_tokenizer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 4000, 7500], help="tokens (default: %(default)s)")
parser.add_argument("--num-prompts", type=int, default=5, help="of each length (default: %(default)s)")
parser.add_argument("--out", type=Path, default=Path("long.jsonl"), help="file to write (default: %(default)s)")
args = parser.parse_args()

tokenizer = load_tokenizer(embedded_target_folder(), offline=True).backend
with gzip.open(files("eagle_slim.convert.default") / "self_chat.jsonl.gz", "rt", encoding="utf-8") as lines:
    chats = [[message["content"] for message in json.loads(line)["messages"]] for line in lines]

with args.out.open("w", encoding="utf-8") as out:
    for number in range(args.num_prompts):
        question, *others = chats[number :: args.num_prompts]
        ids = tokenizer.encode("\n\n".join(text for chat in others for text in chat)).ids
        for length in args.lengths:
            # The same text and question at each length: what comes first is left out.
            text = tokenizer.decode(ids[-length:])
            prompt = f"Here are questions and answers.\n\n{text}\n\nAnswer this one: {question[0]}"
            out.write(json.dumps({"turns": [prompt], "category": f"{length:,} tokens"}) + "\n")
print(f"{args.num_prompts * len(args.lengths)} prompts are in {args.out}.")
