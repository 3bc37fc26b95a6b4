"""Accepted length and speed over several draft vocabularies, from one loaded model, as a table and an HTML page.

    python examples/accuracy_vs_speed.py --sizes 16384 4096 1024 --out compare.html

The command `eagle-compare` does this and more; this script shows the calls behind it.
"""

import argparse
from pathlib import Path

from eagle_slim.convert.sources.builtin import embedded_target_folder
from eagle_slim.convert.sources.builtin_counts import load_embedded_counts
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.comparison.compare import Mode, Plan, answer_coverage, compare, cut_sizes
from eagle_slim.runtime.comparison.output import html_page, text_table
from eagle_slim.runtime.comparison.prompt_file import load_prompts
from eagle_slim.runtime.comparison.recommend import recommend
from eagle_slim.runtime.comparison.report import build_report
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
candidates = cut_sizes(model, [None, *(ranked.prefix(size) for size in args.sizes)], head="the built-in head")
prompts = load_prompts(Path(__file__).with_name("prompts.jsonl"), limit=args.num_prompts)
plan = Plan(prompts, [Mode("greedy")], args.max_new_tokens)

answers = compare(candidates, plan)
tokens = [token for answer in answers for row in answer.token_ids for token in row]
report = build_report(candidates, plan, answers, [answer_coverage(ranked.target_ids, tokens)])
advice = recommend(report)
args.out.write_text(html_page(report, advice), encoding="utf-8")

print(text_table(report))
for each in advice:
    print(each.headline, *each.reasons, sep="\n")
print(f"The page is {args.out}.")
