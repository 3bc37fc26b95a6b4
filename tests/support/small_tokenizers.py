"""Small tokenizers made on the spot: byte-level or byte fallback, ids in merge order or not."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = [
    "The quick brown fox jumps over the lazy dog, again and again and again.",
    "def main():\n    return [i for i in range(10)]\n",
    "Ein schneller brauner Fuchs springt über den faulen Hund. 你好，世界",
] * 4

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKERS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level_bpe(vocab_size: int = 360, added: list[str] | None = None) -> Tokenizer:
    """Byte-level BPE: the added tokens first, then 256 bytes, then merges in order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = {"vocab_size": vocab_size, "special_tokens": MARKERS if added is None else added, "show_progress": False}
    trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **options)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def byte_fallback_bpe() -> Tokenizer:
    """SentencePiece-like BPE: markers, 256 byte tokens, merges, and the characters after all merges."""
    merges = [("h", "e"), ("he", "l"), ("hel", "l"), ("▁", "hell")]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [left + right for left, right in merges]
    tokens += ["▁", "h", "e", "l", "o"]
    vocab = {token: position for position, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def with_reserved(tokenizer: Tokenizer, count: int) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(f"<|reserved_{i}|>", special=True) for i in range(count)])
    return tokenizer


def write_folder(folder, tokenizer, chat_template=CHATML, generation_config=None, **config):
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    values = dict(config)
    if chat_template is not None:
        values["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return folder
