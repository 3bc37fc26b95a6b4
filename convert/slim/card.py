"""README.md of an artifact: what it is, how it was made, what it covers, and commands that serve it.

Holds no time and no path. The front matter is the Hugging Face Hub's.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from eagle_slim.vocab_tools.errors import printable

from ..artifact.manifest import Manifest

# Words that are no texts in YAML 1.1.
_YAML_WORDS = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")


def model_card(
    manifest: Manifest, title: str, rows_before: int, step_bytes: Sequence[int], licence: str | None, refused: set[str]
) -> str:
    """Write the text of README.md for an artifact of the name `title`.

    `rows_before`: of the LM head that was cut. `step_bytes`: of all weights that a draft step reads, before and after.
    `licence`: the head's, as the Hub spells it; None where its files do not say. `refused`: keys of the engines
    (`engines.ENGINES`) that cannot take the head; they get no command.
    """
    bytes_before, bytes_after = step_bytes
    sizes = [
        ("rows of the LM head", f"{rows_before:,}", f"{manifest.draft_vocab:,}"),
        ("weights that a draft step reads, bytes", f"{bytes_before:,}", f"{bytes_after:,}"),
    ]
    terms = "The files of the original head name no license; ask its authors before you share this one."
    if licence is not None:
        terms = f"That of the original head: {printable(licence)}."
        terms += " Rows of the target's LM head stay under the target's license."
    doubts = "".join(f"- {printable(warning)}\n" for warning in manifest.warnings)
    parts = [
        _front_matter(manifest, licence),
        f"# {printable(title)}\n",
        _summary(manifest, rows_before),
        _table(("", "before", "after"), sizes),
        _coverage(manifest.coverage),
        _serving(manifest, refused),
        _making(manifest),
        f"## Good to know\n\n{doubts}" if doubts else "",
        f"## License\n\n{terms}\n",
    ]
    return "\n".join(part for part in parts if part)


def _front_matter(manifest: Manifest, licence: str | None) -> str:
    lines = ["---"]
    if target := manifest.target.get("repo_id"):
        lines.append(f"base_model: {_yaml(target)}")
    counted = [source.get("provenance") for source in (manifest.vocabulary or {}).get("sources") or []]
    listed = [each.get("parts", [each]) for each in counted if isinstance(each, Mapping)]
    parts = [part for each in listed if isinstance(each, list) for part in each]
    named = (part.get("dataset") for part in parts if isinstance(part, Mapping))
    if datasets := sorted({name for name in named if name and isinstance(name, str)}):
        lines += ["datasets:", *(f"- {_yaml(name)}" for name in datasets)]
    lines += [f"license: {_yaml(licence or 'unknown')}", "pipeline_tag: text-generation", "tags:"]
    tags = ["speculative-decoding", "draft-model", manifest.kind, "eagle-slim"]
    return "\n".join([*lines, *(f"- {tag}" for tag in tags), "---", ""])


def _yaml(text: str) -> str:
    """Spell a text of others as one scalar: in quotes, which are JSON's, unless it is a plain word."""
    is_plain = re.fullmatch(r"[A-Za-z][\w.-]*|\w[\w.-]*(/[\w.-]+)+", text) and text.lower() not in _YAML_WORDS
    return text if is_plain else json.dumps(text)


def _summary(manifest: Manifest, rows_before: int) -> str:
    name = printable(manifest.head["name"])
    kind = {"eagle3": "EAGLE-3", "eagle": "EAGLE-1/2", "dflash": "DFlash"}[manifest.kind]
    target = printable(manifest.target.get("repo_id") or manifest.target.get("name") or "its target model")
    what = f"with its draft vocabulary cut from {rows_before:,} to {manifest.draft_vocab:,} tokens"
    if manifest.draft_vocab == rows_before:
        what = f"normalised to the layout that engines share, with its draft vocabulary of {rows_before:,} tokens"
    lossless = "The target still verifies every token over its whole vocabulary, so its output does not change."
    return f"The {kind} draft head {name} for {target}, {what}. {lossless}\n"


def _coverage(coverage: Mapping[str, Any] | None) -> str:
    if coverage is None:
        return ""
    note = f" ({coverage['note']})" if coverage.get("note") else ""
    text = f"## Coverage\n\nShare of held-out tokens that the draft vocabulary can propose{note}.\n\n"
    rows = []
    for source in coverage["sources"]:
        name, low, high = f"{source['name']} ({source['part']})", source["low"], source["high"]
        for at, size in enumerate(coverage["sizes"]):
            rows_kept = f"**{size:,}**" if size == coverage["draft_vocab"] else f"{size:,}"
            interval = "–" if low is None else f"{low[at]:.2%} to {high[at]:.2%}"
            covered, first_ids = (f"{source[key][at]:.2%}" for key in ("coverage", "baseline_first_ids"))
            rows.append((name, rows_kept, covered, interval, first_ids))
    return text + _table(("text", "draft vocabulary", "covered", "95% interval", "first ids instead"), rows)


def _serving(manifest: Manifest, refused: Collection[str]) -> str:
    # A head's own files may name it.
    target = shlex.quote(printable(manifest.target.get("repo_id") or "TARGET"))
    text = "## Serving\n\n`HEAD` is this repository or folder, `TARGET` the target model.\n"
    for title, command in _commands(manifest, target, refused).items():
        text += f"\n{title}:\n\n```bash\n{command}\n```\n"
    if manifest.kind == "eagle":
        text += (
            "\nSGLang loads the head only under a class name that ends in `Eagle`, which `eagle-convert --for sglang` "
            "writes. It gathers the rows of `freq_N.pt` from the target itself.\n"
        )
    return text


def _commands(manifest: Manifest, target: str, refused: Collection[str]) -> dict[str, str]:
    if manifest.flavour == "lmdeploy":
        command = f"lmdeploy serve api_server {target} --backend pytorch --speculative-algorithm eagle3 \\\n"
        return {"LMDeploy": command + "    --speculative-draft-model HEAD --speculative-num-draft-tokens 3"}
    vllm = {"method": manifest.kind, "model": "HEAD", "num_speculative_tokens": 7 if manifest.kind == "dflash" else 3}
    served = {"vLLM": f"vllm serve {target} --speculative-config '{json.dumps(vllm)}'"}
    if manifest.kind == "dflash":
        return served
    algorithm, token_map = "EAGLE3", ""
    if manifest.kind == "eagle":
        algorithm, token_map = "EAGLE", f" --speculative-token-map HEAD/freq_{manifest.draft_vocab}.pt"
    sglang = (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm} \\\n"
        "    --speculative-draft-model-path HEAD --speculative-num-steps 5 --speculative-eagle-topk 8 \\\n"
        f"    --speculative-num-draft-tokens 32{token_map}"
    )
    if manifest.kind == "eagle":
        return {"SGLang": sglang}
    served = {name: each for name, each in {**served, "SGLang": sglang}.items() if name.lower() not in refused}
    return served | {"eagle-slim": f"eagle-generate HEAD --target {target} --prompt 'Why is the sky blue?'"}


def _making(manifest: Manifest) -> str:
    lines = [f"## How it was made\n\nBy eagle-slim {manifest.tool['version']}, from:\n"]
    lines += [f"- head: {_source(manifest.head)}", f"- target: {_source(manifest.target)}"]
    if (rows := manifest.lm_head) is not None:
        kept = f"rounded from {rows['source_dtype']} to nearest even {rows['dtype']}"
        kept = kept if rows["rounded"] else "bit-identical"
        lines.append(f"- LM-head rows: the {rows['from']}'s `{rows['tensor']}`, {kept}")
    if manifest.vocabulary is not None:
        lines.append(f"- ranking: {_ranking(manifest.vocabulary)}")
        lines.append(f"- {manifest.num_forced} ids whatever their rank (end of turn, chat markers, single bytes)")
    lines.append("\n`eagle_slim.json` lists every id in rank order and the checksums that `eagle-verify` compares.\n")
    return "\n".join(lines)


def _source(part: Mapping[str, Any]) -> str:
    name = part.get("repo_id") or part.get("name") or "not known"
    subfolder, revision = part.get("subfolder"), part.get("revision")
    return printable(name) + (f"/{subfolder}" if subfolder else "") + (f", revision {revision}" if revision else "")


def _ranking(vocabulary: Mapping[str, Any]) -> str:
    if vocabulary.get("token_map"):
        # A ranking of ours that came as a token map, or with an artifact, says itself how it was made.
        return _ranking(vocabulary["token_map"])
    named = {"ids": "order of the token ids, no corpus", "token map": "a token map that was given"}
    sources = vocabulary.get("sources") or []
    counted = "; ".join(f"{each['name']} ({each['tokens']:,} tokens, weight {each['weight']:g})" for each in sources)
    return named.get(str(vocabulary.get("method"))) or f"token counts of {printable(counted)}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(printable(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
