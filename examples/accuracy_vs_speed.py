"""Accepted length and speed over several draft vocabularies, from one loaded model, as a table and an HTML page.

    python examples/accuracy_vs_speed.py --sizes 16384 4096 1024 --out compare.html

The command `eagle-compare` does this and more; this script shows the calls behind it.
"""

import argparse
from pathlib import Path

from eagle_slim.convert.sources.builtin import embedded_target_folder
from eagle_slim.convert.sources.builtin_counts import load_embedded_counts
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.comparison.compare import Mode, Size, compare
from eagle_slim.runtime.comparison.output import html_page, text_table
from eagle_slim.runtime.comparison.prompt_file import load_prompts
from eagle_slim.runtime.comparison.recommend import recommend
from eagle_slim.vocab_tools.ranking.rank import rank_vocabulary
from eagle_slim.vocab_tools.tokenizer.load import load_tokenizer

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--sizes", type=int, nargs="+", default=[16384, 4096, 1024])
parser.add_argument("--num-prompts", type=int, default=4)
parser.add_argument("--max-new-tokens", type=int, default=32)
parser.add_argument("--out", type=Path, default=Path("compare.html"))
args = parser.parse_args()

model = SpeculativeModel.from_pretrained()  # the built-in head over its full vocabulary, with its target
ranked = rank_vocabulary(load_embedded_counts(), tokenizer=load_tokenizer(embedded_target_folder()))
sizes = [Size("full", None), *(Size(str(size), ranked.prefix(size)) for size in args.sizes)]
prompts = load_prompts(Path(__file__).with_name("prompts.jsonl"), limit=args.num_prompts)

report = compare(model, sizes, prompts, [Mode("greedy")], args.max_new_tokens, rank_order=ranked.target_ids)
advice = recommend(report)
args.out.write_text(html_page(report, advice), encoding="utf-8")

print(text_table(report))
print(advice.headline, *advice.reasons, f"The page is {args.out}.", sep="\n")
