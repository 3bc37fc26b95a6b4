import hashlib
import json

import numpy as np
import pytest
from eagle_slim.vocab_tools import TokenizerError, UsageError, forced_ids
from eagle_slim.vocab_tools.tokenizer import LoadedTokenizer, bytes_of_symbols, load_tokenizer
from support.raising import raises
from support.small_tokenizers import CHATML, byte_level_bpe, with_reserved, write_folder
from support.tokenizers import smollm2
from tokenizers import Tokenizer, models, normalizers


def test_folder_file_and_relative_path_give_one_tokenizer(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "model", byte_level_bpe(), eos_token="<|im_end|>")
    by_folder, by_file = load_tokenizer(folder), load_tokenizer(folder / "tokenizer.json")
    monkeypatch.chdir(tmp_path)
    by_name = load_tokenizer("model")
    assert by_folder.tokenizer_hash == by_file.tokenizer_hash == by_name.tokenizer_hash
    assert by_file.chat_template == CHATML
    assert by_file.special_tokens["eos_token"] == "<|im_end|>"
    assert by_folder.real_ids.tolist() == list(range(360))


def test_holes_are_not_real_ids(tmp_path):
    state = json.loads(byte_level_bpe().to_str())
    state["model"]["vocab"] = {k: v for k, v in state["model"]["vocab"].items() if v not in (10, 11)}
    state["model"]["merges"] = []
    loaded = load_tokenizer(write_folder(tmp_path / "t", Tokenizer.from_str(json.dumps(state))))
    assert 10 not in loaded.real_ids
    assert loaded.vocab_size == 360
    assert loaded.token_texts[10] is None
    assert loaded.token_bytes(10) == b""


def test_hash_sees_ids_special_flags_normaliser_and_pre_tokeniser_only(tmp_path):
    base = load_tokenizer(write_folder(tmp_path / "base", byte_level_bpe()))
    same = load_tokenizer(write_folder(tmp_path / "same", byte_level_bpe(), chat_template="{{ messages }}"))
    assert same.tokenizer_hash == base.tokenizer_hash
    assert same.chat_template_hash != base.chat_template_hash
    normalised = byte_level_bpe()
    normalised.normalizer = normalizers.NFC()
    unspecial = json.loads(byte_level_bpe().to_str())
    unspecial["added_tokens"][1]["special"] = False
    others = [normalised, Tokenizer.from_str(json.dumps(unspecial)), byte_level_bpe(359)]
    folders = [write_folder(tmp_path / f"other{i}", other) for i, other in enumerate(others)]
    hashes = {load_tokenizer(folder).tokenizer_hash for folder in folders}
    assert len(hashes) == 3
    assert base.tokenizer_hash not in hashes
    assert base.tokenizer_hash.startswith("sha256:")
    assert load_tokenizer(write_folder(tmp_path / "again", base.backend)).tokenizer_hash == base.tokenizer_hash


def test_hash_is_of_the_list_as_json(tmp_path):
    loaded = load_tokenizer(write_folder(tmp_path / "t", byte_level_bpe(added=['"\\\n\x01', "😀é"])))
    state = json.loads(loaded.backend.to_str())
    tokens = [[token_id, text, token_id in loaded.special_ids] for token_id, text in enumerate(loaded.token_texts)]
    text = json.dumps([tokens, state["normalizer"], state["pre_tokenizer"]], sort_keys=True, separators=(",", ":"))
    assert {'"\\\n\x01', "😀é"} < set(loaded.token_texts)
    assert loaded.tokenizer_hash == f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def test_bytes_of_tokens(tmp_path):
    table = bytes_of_symbols()
    assert sorted(table.values()) == list(range(256))
    assert (table["Ġ"], table["A"], table["Ċ"]) == (32, 65, 10)
    loaded = load_tokenizer(write_folder(tmp_path / "a", byte_level_bpe()))
    assert sorted(loaded.byte_of_id.values()) == list(range(256))
    assert loaded.token_bytes(loaded.vocab["Ġ"]) == b" "
    assert loaded.token_bytes(1) == b"<|im_start|>"
    text = "Fuchs über 你\n"
    assert b"".join(loaded.token_bytes(i) for i in loaded.backend.encode(text).ids) == text.encode()
    # An added token is no text in the byte alphabet, where é stands for the byte 0xE9; nor is an HTML tag an end.
    loaded.backend.add_tokens(["née", "</s>"])
    added = LoadedTokenizer(loaded.backend, "added")
    assert added.token_bytes(added.vocab["née"]) == "née".encode()
    assert added.vocab["</s>"] not in forced_ids(added).ids


def test_forced_ids_of_a_chat_model(tmp_path):
    tokenizer, ids = with_reserved(byte_level_bpe(300), 50), {"eos_token_id": [2, 0], "bos_token_id": 1}
    ids["pad_token_id"] = -1
    folder = write_folder(tmp_path / "t", tokenizer, generation_config=ids, pad_token="<|endoftext|>")
    forced = forced_ids(load_tokenizer(folder))
    others = {i: reason for i, reason in forced.reasons.items() if not reason.startswith("byte ")}
    assert others == {0: "eos, pad, end of turn", 1: "bos, chat template", 2: "eos, end of turn, chat template"}
    assert len(forced.ids) == 259
    assert forced.reasons[3] == "byte 0x21"
    assert np.all(np.diff(forced.ids) > 0)
    assert forced.warnings == ()
    assert len(forced_ids(load_tokenizer(folder), "all").ids) == 309


TEMPLATES = {
    "assembled from the role": "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}",
    "assembled from constants": "{{ '<|' ~ 'assist' + 'ant|>' }}{{ '<|' + 'user|>' }}",
    "behind a condition": (
        "{% if messages[0].never %}<|user|>{% set x = '<|ASSISTANT|>' | lower %}{% else %}{{ bos_token }}{% endif %}"
    ),
    "refusing most conversations": (
        "{% if messages | length != 7 %}{{ raise_exception('seven please') }}{% endif %}<|user|>{{'<|assistant|>'}}"
    ),
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_markers_are_found_however_the_template_spells_them(tmp_path, template):
    added = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|unused|>"]
    loaded = load_tokenizer(write_folder(tmp_path / "t", byte_level_bpe(300, added), template))
    reasons = forced_ids(loaded).reasons
    assert "chat template" in reasons[1]
    assert "chat template" in reasons[2]
    assert 3 not in reasons


def test_tool_and_thinking_branches_are_probed(tmp_path):
    added = ["<|endoftext|>", "<|call_get_weather|>", "<|think_True|>", "<|tools_1|>", "<|from_tool|>"]
    template = (
        "{% if tools %}{{ '<|tools_' + (tools | length | string) + '|>' }}{% endif %}"
        "{% if enable_thinking %}{{ '<|think_' + (enable_thinking | string) + '|>' }}{% endif %}"
        "{% for m in messages %}{% for call in m.tool_calls or [] %}"
        "{{ '<|call_' + call.function.name + '|>' }}{% endfor %}"
        "{% if m.role == 'tool' %}{{ '<|from_' + m.role + '|>' }}{% endif %}{% endfor %}"
    )
    reasons = forced_ids(load_tokenizer(write_folder(tmp_path / "t", byte_level_bpe(300, added), template))).reasons
    assert all(reasons[token_id] == "chat template" for token_id in (1, 2, 3, 4))


def test_several_templates_and_generation_tags(tmp_path):
    added = ["<|endoftext|>", "<|user|>", "<|tool|>", "<|rag|>"]
    folder = write_folder(tmp_path / "t", byte_level_bpe(300, added), None)
    (folder / "chat_template.jinja").write_text("{%generation%}<|user|>{% endgeneration +%}")
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("{%- generation -%}<|tool|>{% endgeneration %}")
    loaded = load_tokenizer(folder)
    assert set(loaded.chat_templates) == {"default", "tool_use"}
    reasons = forced_ids(loaded).reasons
    assert reasons[1] == "chat template"
    assert reasons[2] == "chat template 'tool_use'"
    assert 3 not in reasons


def test_without_a_template_the_user_is_told(tmp_path):
    loaded = load_tokenizer(write_folder(tmp_path / "t", byte_level_bpe(), None))
    forced = forced_ids(loaded)
    assert "no chat template" in forced.warnings[0]
    assert forced.reasons[2] == "end of turn"
    invalid = load_tokenizer(write_folder(tmp_path / "invalid", byte_level_bpe(), "{% for %}"))
    with raises(TokenizerError, option="--chat-template"):
        forced_ids(invalid)


def test_tokens_that_only_the_config_knows_are_added(tmp_path):
    entry = {"content": "<|extra|>", "special": True}
    folder = write_folder(tmp_path / "a", byte_level_bpe(300), added_tokens_decoder={"300": entry})
    loaded = load_tokenizer(folder)
    assert loaded.vocab["<|extra|>"] == 300
    assert 300 in loaded.special_ids
    wrong = write_folder(tmp_path / "b", byte_level_bpe(300), added_tokens_decoder={"305": entry})
    with pytest.raises(TokenizerError, match=r"id 305.*300"):
        load_tokenizer(wrong)


def test_damaged_files(tmp_path):
    template, decoder = '{"chat_template": [{"name": "default"}]}', '{"added_tokens_decoder": '
    configs = ("[1]", template, decoder + '{"x": {"content": "a"}}}', decoder + '["a"]}')
    damages = [("tokenizer.json", "{"), ("tokenizer.json", '{"version": "1.0"}'), ("chat_template.jinja", "\xff")]
    damages += [("tokenizer_config.json", content) for content in configs]
    damages += [("tokenizer.json", Tokenizer(models.BPE()).to_str())]
    for number, (name, content) in enumerate(damages):
        folder = write_folder(tmp_path / str(number), byte_level_bpe())
        (folder / name).write_text(content, encoding="latin-1")
        with pytest.raises(TokenizerError, match=str(folder / name)):
            load_tokenizer(folder)


def test_ids_of_another_type_or_of_no_token_are_no_ids(tmp_path):
    config = {"eos_token_id": [True, "2", 10**30, 299], "pad_token_id": {"id": 1}}
    loaded = load_tokenizer(write_folder(tmp_path / "t", byte_level_bpe(300), None, generation_config=config))
    forced = forced_ids(loaded, extra=[298])
    assert [token_id for token_id, reason in forced.reasons.items() if "eos" in reason or "pad" in reason] == [299]
    assert str(10**30) in forced.warnings[0]
    assert forced.reasons[298] == "by request"
    with raises(UsageError, option="--force-id"):
        forced_ids(loaded, extra=[300])
    # Those of config.json stand in for others.
    folder = write_folder(tmp_path / "c", byte_level_bpe(300), None)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 299, "text_config": {"pad_token_id": 298}}))
    reasons = forced_ids(load_tokenizer(folder)).reasons
    assert (reasons[299], reasons[298]) == ("eos", "pad")


def test_code_of_a_folder_is_never_run(tmp_path):
    mapped = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    ran = tmp_path / "ran"
    folder = write_folder(tmp_path / "t", byte_level_bpe(), **mapped)
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    assert load_tokenizer(folder).vocab_size == 360
    (folder / "tokenizer.json").unlink()
    with raises(TokenizerError, option="--tokenizer"):
        load_tokenizer(folder)
    assert not ran.exists()


def test_missing_paths_and_hub_ids(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    missing = (str(tmp_path / "none"), "./none/tokenizer.json", "models/org/Llama-3.1-8B", tmp_path / "empty", "")
    for name in missing:
        with raises(TokenizerError, option="--tokenizer"):
            load_tokenizer(name)
    monkeypatch.chdir(write_folder(tmp_path / "here", byte_level_bpe()))
    for name in ("no-such-org-here/Llama-3.1-8B", "no-such-org-here/Qwen2.5-7B-Instruct", "not//valid"):
        with pytest.raises(TokenizerError, match=name):
            load_tokenizer(name, offline=True)


def test_smollm2_lacks_21_single_bytes_and_forces_the_rest():
    forced = forced_ids(smollm2())
    markers = {smollm2().token_texts[i]: reason for i, reason in forced.reasons.items() if "byte" not in reason}
    assert markers == {
        "<|endoftext|>": "end of turn",
        "<|im_start|>": "bos, chat template",
        "<|im_end|>": "eos, pad, end of turn, chat template",
    }
    assert (len(forced.ids), forced.warnings) == (256 - 21 + 3, ())
