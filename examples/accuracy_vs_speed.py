"""Accepted length and speed over several draft vocabularies, from one loaded model, as a table and an HTML page.

    python examples/accuracy_vs_speed.py --sizes 16384 4096 1024 --out compare.html

The command `eagle-compare` makes the same call.
"""

import argparse
from pathlib import Path

from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.compare import CompareOptions, compare, load_prompts

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--sizes", type=int, nargs="+", default=[16384, 4096, 1024], help="rows (default: %(default)s)")
parser.add_argument("--num-prompts", type=int, default=4, help="of examples/prompts.jsonl (default: %(default)s)")
parser.add_argument("--max-new-tokens", type=int, default=32, help="length of an answer (default: %(default)s)")
parser.add_argument("--out", type=Path, default=Path("compare.html"), help="page to write (default: %(default)s)")
args = parser.parse_args()

model = SpeculativeModel.from_pretrained()  # the built-in head over its full vocabulary, with its target
prompts = load_prompts(Path(__file__).with_name("prompts.jsonl"), limit=args.num_prompts)
options = CompareOptions(sizes=["full", *args.sizes], modes=["greedy"], max_new_tokens=args.max_new_tokens)
result = compare(model, prompts, options)

print(result.to_text())
args.out.write_text(result.to_html(), encoding="utf-8")
print(f"The page is {args.out}.")
