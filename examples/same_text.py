"""Ask two servers the same prompts at temperature 0: how many answers are equal, and where does the first part?

    vllm serve TARGET --port 8000
    vllm serve TARGET --port 8001 --speculative-config "$CONFIG"        # docs/serving.md has the configuration
    python examples/same_text.py http://localhost:8000 http://localhost:8001

For any servers with OpenAI's chat API, `eagle-serve` among them; needs the package openai. Their keys are read from
EAGLE_KEY_1 and EAGLE_KEY_2.
The exit code is 1 where an answer differs, which rounding may do, too.
"""

import argparse
import os
import sys
from pathlib import Path

from eagle_slim.runtime.compare import load_prompts

try:
    from openai import OpenAI, OpenAIError
except ImportError:
    sys.exit("examples/same_text.py needs the package openai: pip install openai")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("servers", nargs=2, metavar="URL", help="a server, such as http://localhost:8000")
parser.add_argument(
    "--prompts", type=Path, default=Path(__file__).with_name("prompts.jsonl"), help="file of prompts; first turns only"
)
parser.add_argument("--limit", type=int, help="use only the first N prompts")
parser.add_argument("--max-tokens", type=int, default=128, help="most tokens of an answer (default: %(default)s)")
args = parser.parse_args()


def ask(client: OpenAI, model: str, prompt: str) -> str:
    """Return the text of an answer, thoughts included."""
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=args.max_tokens
    )
    if not answer.choices:
        sys.exit(f"{client.base_url}: an answer without a choice: {answer.to_json(indent=None)}")
    message = answer.choices[0].message
    extra = message.model_extra or {}
    return (extra.get("reasoning_content") or extra.get("reasoning") or "") + (message.content or "")


prompts = [prompt.turns[0] for prompt in load_prompts(args.prompts, args.limit)]
texts: list[list[str]] = []
for number, url in enumerate(args.servers, 1):
    address = url.rstrip("/").removesuffix("/v1") + "/v1"
    key = os.environ.get(f"EAGLE_KEY_{number}") or "none"
    try:
        with OpenAI(base_url=address, api_key=key) as client:
            model = client.models.list().data[0].id
            texts.append([ask(client, model, prompt) for prompt in prompts])
    except (OpenAIError, LookupError) as error:
        sys.exit(f"{url}: {error!r}. Expected a server with OpenAI's chat API: is one running there?")

differing = [number for number, (one, two) in enumerate(zip(*texts, strict=True)) if one != two]
print(f"{len(prompts) - len(differing)} of {len(prompts)} answers are equal")
if differing:
    pair = [each[differing[0]] for each in texts]
    place = next((i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), min(map(len, pair)))
    print(f"the first that differs: prompt {differing[0]}, from character {place} on")
    for url, text in zip(args.servers, pair, strict=True):
        print(f"  {url}: {text[place : place + 60]!r}")
sys.exit(bool(differing))
