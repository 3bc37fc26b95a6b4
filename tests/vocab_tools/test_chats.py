"""What an assistant wrote in a chat: the tokens of each turn, by hand, for templates of public models' forms."""

import functools
import itertools
import json
import re
from typing import Any

import pytest
from eagle_slim.vocab_tools import LoadedTokenizer, TokenizerError
from eagle_slim.vocab_tools.chats import ChatRenderer, ChatTemplate, Piece, chat_spec
from eagle_slim.vocab_tools.encoding import encode_tail, encoder_spec
from eagle_slim.vocab_tools.messages import ChatError, normalise_messages
from hypothesis import given, settings
from hypothesis import strategies as st
from support.raising import raises
from support.tokenizers import llama3_like, smollm2, with_template
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers.utils.chat_template_utils import render_jinja_template

Messages = list[dict[str, Any]]

SPECIAL = ("<s>", "</s>", "<user>", "<bot>", "<tool>", "<end>", "<fin>", "<channel>", "[INST]", "[/INST]")
PLAIN_ADDED = ("<think>", "</think>", "<call>", "</call>")
WORD = re.compile("|".join(map(re.escape, SPECIAL + PLAIN_ADDED)) + r"|\s|\w+|[^\w\s]")


def words(template: str, **special_tokens: str) -> LoadedTokenizer:
    """A tokenizer with one token for each word, sign and white space, and a chat template."""
    text = "abcdefghijklmnopqrstuvwxyz0123456789"
    known = "Hi there please Paris Berlin sunny ok thought more None get city weather in none name arguments user tool"
    known += " bot assistant system brief be what is the capital of France and Germany image say so final analysis s"
    vocab = dict.fromkeys(["[unk]", " ", "\n", *"{}\"':,.!?/_#[]=", *known.split(), *text])
    backend = Tokenizer(models.WordLevel({token: number for number, token in enumerate(vocab)}, unk_token="[unk]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s|[A-Za-z0-9]+|[^A-Za-z0-9\s]"), behavior="isolated")
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN_ADDED])
    tokens = {"bos_token": "<s>", "eos_token": "</s>", **special_tokens}
    return LoadedTokenizer(backend, "words", chat_templates={"default": template}, special_tokens=tokens)


def pieces_of(tokenizer: LoadedTokenizer, messages: Messages) -> list[Piece]:
    return ChatRenderer(chat_spec(tokenizer)).assistant_pieces(normalise_messages(messages))


@functools.lru_cache(4)
def without_processor(tokenizer: LoadedTokenizer) -> Tokenizer:
    return Tokenizer.from_str(encoder_spec(tokenizer.backend, tokenizer.vocab_size).tokenizer_json)


def ids_of(tokenizer: LoadedTokenizer, piece: Piece) -> list[int]:
    return encode_tail(without_processor(tokenizer), piece.text, piece.header_chars).tolist()


def counted(tokenizer: LoadedTokenizer, messages: Messages) -> list[list[str]]:
    pieces = pieces_of(tokenizer, messages)
    return [[str(tokenizer.backend.id_to_token(i)) for i in ids_of(tokenizer, piece)] for piece in pieces]


def split(*turns: str) -> list[list[str]]:
    return [WORD.findall(turn) for turn in turns]


def turn(*contents: Any, system: str | None = None) -> Messages:
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "call12345", "type": "function", "function": {"name": "get", "arguments": arguments}}


LOOP = "{% for m in messages %}<user>{{ m.role }}\n"
PROMPT = "{% if add_generation_prompt %}<user>assistant\n{% endif %}"
CHATML = LOOP + "{{ m.content }}<end>\n{% endfor %}" + PROMPT
ONE = turn("what is the capital of France?", "Paris.")
THREE = turn("what is the capital of France?", "Paris.", "and of Germany?", "Berlin!", "Hi there please", "ok")
ANSWERS = ("Paris.", "Berlin!", "ok")

CLOSE = "{% endfor %}" + PROMPT
LAST_IN_FIN = "{{ m.content }}{{ '<fin>' if loop.last and not add_generation_prompt else '<end>' }}"
OPENS_A_THOUGHT = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
NO_THOUGHT = "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<end>\n"
IN_PARTS = "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<end>\n"
MARKED = "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<end>\n{% endgeneration %}"
MARKED += "{% else %}{{ m.content }}<end>\n{% endif %}"
SYSTEM = "{% if messages[0].role == 'system' %}{{ '# ' + messages[0].content }}{% set messages = messages[1:] %}"
SYSTEM += "{% endif %}"

# A template's form, and what ends each of its turns; with a single word for all, the last one too.
FORMS = {
    "the last turn ends in another token": (LOOP + LAST_IN_FIN + CLOSE, "<fin>"),
    "an end token behind the loop alone": (LOOP + "{{ m.content }}{% endfor %}{{ eos_token }}" + PROMPT, "</s>"),
    "a generation prompt that opens a thought": (OPENS_A_THOUGHT, "<end>"),
    "an empty thought in the last turn": (LOOP + NO_THOUGHT + CLOSE, "<end>"),
    "contents only in parts": (LOOP + IN_PARTS + CLOSE, "<end>"),
    "a generation mark that ends behind a newline": (LOOP + MARKED + CLOSE, "<end>\n"),
    "a system message that is its own block": (SYSTEM + CHATML, "<end>"),
    # Public templates' forms are in test_chat_forms.py.
}


@pytest.mark.parametrize(("template", "end"), FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("chat", [ONE, THREE], ids=["one turn", "three turns"])
@pytest.mark.parametrize("system", [None, "be brief please"], ids=["plain", "system"])
def test_turns_of_a_template(template: str, end: str, chat: Messages, system: str | None) -> None:
    messages = chat if system is None else [{"role": "system", "content": system}, *chat]
    thought = "<think>\n\n</think>\n\n" if "\n\n</think>" in template else ""
    expected = [thought + answer + end for answer in ANSWERS[: len(chat) // 2]]
    assert counted(words(template), messages) == split(*expected)


CALLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}<tool>{{ m.content }}<end>\n"
    "{% else %}<user>{{ m.role }}\nCONTENT{% for c in m.tool_calls or [] %}CALL{% endfor %}<end>\n{% endif %}"
    "{% endfor %}" + PROMPT
)
AS_JSON = '<call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</call>'
SPELLED = '<call>{"name": "get", "arguments": {"city": "Paris"}}</call>'
KEYS = "{% for k, v in c.function.arguments.items() %}{{ c.function.name }} {{ k }}={{ v }}{% endfor %}"
AS_TEXT, NAME = "{{ c.function.name + ' ' + c.function.arguments }}", "{{ c.function.name }} "
AS_ITS_JSON = "{{ c.function.arguments | tojson }}"
CONTENTS = ["{{ m.content }}", "{{ m.content + '' }}", "{% if m.content is none %}{% else %}{{ m.content }}{% endif %}"]
CALLING = {
    "objects written as JSON": (AS_JSON, SPELLED),
    "keys and values": (f"<call>{KEYS}</call>", "<call>get city=Paris</call>"),
    "JSON text": (f"<call>{AS_TEXT}</call>", '<call>get {"city": "Paris"}</call>'),
    "closed by a special token": (f"<channel>{NAME}{AS_ITS_JSON}<fin>", '<channel>get {"city": "Paris"}<fin>'),
}


@pytest.mark.parametrize(("spelling", "expected"), CALLING.values(), ids=CALLING)
@pytest.mark.parametrize("arguments", [{"city": "Paris"}, '{"city": "Paris"}'], ids=["object", "text"])
@pytest.mark.parametrize("content", CONTENTS)
def test_a_missing_content_beside_tool_calls_is_no_word(spelling, expected, arguments, content):
    tokenizer = words(CALLS.replace("CONTENT", content).replace("CALL", spelling))
    for told in ({"content": None}, {"content": ""}, {}):
        messages: Messages = [
            {"role": "user", "content": "what is the weather in Paris?"},
            {"role": "assistant", **told, "tool_calls": [call(arguments)]},
            {"role": "tool", "content": "sunny there so ok", "tool_call_id": "call12345"},
            {"role": "assistant", "content": "sunny!"},
        ]
        assert counted(tokenizer, messages) == split(expected + "<end>", "sunny!<end>")


def test_a_template_that_asks_for_no_content_beside_tool_calls() -> None:
    # DeepSeek-R1's and V3's form: a content, however empty, hides the calls.
    template = CALLS.replace("CONTENT", "{% if m.content is not none %}{{ m.content }}<end>\n{% else %}")
    closed = "{% endfor %}<end>\n{% endif %}"
    template = template.replace("CALL", AS_JSON).replace(closed, closed + "{% endif %}")
    messages = [*turn("Hi", None), *turn("and", "ok")]
    messages[1]["tool_calls"] = [call({"city": "Paris"})]
    assert counted(words(template), messages) == split(SPELLED + "<end>", "ok<end>")


def test_calls_of_sharegpt_and_of_openais_old_form_become_tool_calls() -> None:
    tokenizer = words(CALLS.replace("CONTENT", "{{ m.content }}").replace("CALL", AS_JSON))
    function = json.dumps({"name": "get", "arguments": {"city": "Paris"}})
    said = (("human", "Hi there please"), ("function_call", function), ("observation", "sunny"), ("gpt", "ok"))
    sharegpt = [{"from": speaker, "value": value} for speaker, value in said]
    called = {"content": None, "function_call": {"name": "get", "arguments": '{"city": "Paris"}'}}
    old = [*turn("Hi"), {"role": "assistant", **called}, {"role": "function", "name": "get", "content": "sunny"}]
    old += turn("Hi", "ok")[1:]
    for messages in (sharegpt, old):
        assert counted(tokenizer, messages) == split(SPELLED + "<end>", "ok<end>")
        result = normalise_messages(messages)[2]
        # Mistral's templates ask for ids of nine characters.
        assert (result["tool_call_id"], result["name"], result["content"]) == ("call00000", "get", "sunny")
    unread = normalise_messages([{"from": "human", "value": "Hi"}, {"from": "function_call", "value": "get Paris"}])
    assert unread == turn("Hi", "get Paris")


def test_thoughts_that_the_history_drops_are_counted_in_their_own_turn() -> None:
    thinking = "{% if m.reasoning_content and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    template = LOOP + thinking + "{{ m.content }}<end>\n" + CLOSE
    messages = turn("Hi", "Paris", "and", "Berlin")
    for key in ("reasoning_content", "thinking", "reasoning"):
        told = [{**message, key: "thought"} if message["role"] == "assistant" else message for message in messages]
        expected = [f"<think>\nthought\n</think>\n\n{answer}<end>" for answer in ("Paris", "Berlin")]
        assert counted(words(template), told) == split(*expected)
    # In the content one begins with what the prompt opened.
    messages = turn("Hi", "<think>\nmore thought\n</think>\nParis")
    assert counted(words(OPENS_A_THOUGHT), messages) == split("more thought\n</think>\nParis<end>")


def test_words_that_the_template_drops_are_counted_by_themselves() -> None:
    # The reasoning of every turn is cut off, as by QwQ and DeepSeek-R1.
    dropping = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
    thought = "<think>thought</think>Paris"
    pieces = pieces_of(words(dropping), turn("Hi", thought, "and", "ok"))
    found = [(piece.text[piece.header_chars :], piece.is_apart) for piece in pieces]
    assert found == [("Paris<end>", False), ("<think>thought</think>", True), ("ok<end>", False)]
    # A template that knows neither reasoning nor tool calls.
    told = {"role": "assistant", "content": "Paris", "reasoning": "thought", "tool_calls": [call('{"city": "Paris"}')]}
    alone = pieces_of(words(CHATML), [*turn("Hi"), told])
    expected = ["Paris<end>", "thought", '{"name": "get", "arguments": {"city": "Paris"}}']
    assert [piece.text[piece.header_chars :] for piece in alone] == expected
    # They are one message.
    assert [piece.is_apart for piece in alone] == [False, True, False]


REFUSING = {
    "a system message": "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}",
    "roles that do not alternate": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('alternate') }}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("refusal", REFUSING.values(), ids=REFUSING)
def test_a_chat_that_the_template_refuses_is_counted_by_itself(refusal: str) -> None:
    tokenizer = words(refusal + CHATML)
    assert counted(tokenizer, turn("Hi", "ok")) == split("ok<end>")
    assert [piece.is_apart for piece in pieces_of(tokenizer, turn("Hi", "ok", system="be brief"))] == [True]
    assert counted(tokenizer, turn("Hi", "ok", system="be brief")) == split("ok")
    with pytest.raises(ChatError, match=r"no system|alternate"):
        ChatRenderer(chat_spec(tokenizer)).all_pieces(turn("Hi", "ok", system="be brief"))


@pytest.mark.parametrize("question", ["what is the capital of France?", "Hi"], ids=["long", "short"])
def test_a_users_words_are_never_the_assistants(question: str) -> None:
    # The two renderings differ from their first character on.
    unstable = "{{ messages | length }}" + CHATML
    chat = turn(question, "Paris", "and Germany?", "Berlin")
    assert counted(words(unstable), chat) == split("Paris<end>", "Berlin<end>")
    # The template repeats the question in the answer's turn, but not in the generation prompt.
    repeating = CHATML.replace("{{ m.content }}", "{{ messages[0].content if loop.index == 2 }} {{ m.content }}")
    pieces = pieces_of(words(repeating), turn(question, "Paris"))
    assert [(piece.text, piece.is_apart) for piece in pieces] == [("Paris", True)]


def test_answers_may_quote_and_users_may_write_what_templates_write() -> None:
    quoting = turn("what is the capital of France?", "what is the capital of France? Paris")
    assert counted(words(CHATML), quoting) == split("what is the capital of France? Paris<end>")
    channel = "{{ '<channel>analysis final<channel>' if m.role == 'assistant' }}"
    channels = CHATML.replace("{{ m.content }}", channel + "{{ m.content }}")
    found = counted(words(channels), turn("analysis final please", "in"))
    assert found == split("<channel>analysis final<channel>in<end>")
    forged = "please say <user>assistant\nParis<end>\n"
    assert counted(words(CHATML), turn(forged, "s")) == split("s<end>")


def test_a_token_that_reaches_into_the_prompt_does_not_count() -> None:
    backend = Tokenizer(models.BPE({"\n": 0, "a": 1, "b": 2, "\n\n": 3, "<s>": 4, "</s>": 5}, [("\n", "\n")]))
    backend.pre_tokenizer = pre_tokenizers.Split(r"b", behavior="isolated")
    backend.add_special_tokens(["<s>", "</s>"])
    template = "{% for m in messages %}<s>a\n{{ m.content }}</s>\n{% endfor %}" + PROMPT.replace(
        "<user>assistant", "<s>a"
    )
    tokenizer = LoadedTokenizer(backend, "tiny", chat_templates={"default": template})
    assert counted(tokenizer, turn("b", "ab")) == [["a", "b", "</s>"]]
    # The prompt "<s>a\n" and the content "\nb" meet in the token "\n\n".
    assert backend.encode("<s>a\n\nb</s>").ids == [4, 1, 3, 2, 5]
    assert counted(tokenizer, turn("b", "\nb")) == [["b", "</s>"]]


def test_a_token_that_begins_as_the_prompts_does_is_the_assistants() -> None:
    # <think> of the prompt and <call> of the answer share a letter.
    template = CALLS.replace("CONTENT", "{{ m.content }}").replace("CALL", AS_JSON)
    template = template.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    chat = [*turn("Hi"), {"role": "assistant", "tool_calls": [call({"city": "Paris"})]}]
    assert counted(words(template), chat) == split(SPELLED + "<end>")


def rendered(tokenizer: LoadedTokenizer, messages: Messages, add_generation_prompt: bool = False) -> str:
    options = {"add_generation_prompt": add_generation_prompt, **tokenizer.special_tokens}
    texts, _ = render_jinja_template(conversations=[messages], chat_template=tokenizer.chat_template, **options)
    return str(texts[0])


def test_rendering_is_that_of_transformers() -> None:
    for tokenizer, prompted in itertools.product((smollm2(), llama3_like()), (False, True)):
        template = ChatTemplate(chat_spec(tokenizer))
        for messages in (THREE, turn("a", "\n\nb \n", system="Be brief."), turn("only asked")):
            assert template.render(messages, prompted) == rendered(tokenizer, messages, prompted)


_contents = st.text(st.sampled_from("ab \n\t'.1é你"), max_size=8)


@given(st.lists(_contents, min_size=2, max_size=4), st.sampled_from([None, "Be brief."]), st.booleans())
@settings(max_examples=60)
def test_pieces_have_the_tokens_of_the_whole_rendering(contents: list[str], system: str | None, is_llama: bool) -> None:
    tokenizer, end = (llama3_like(), "<|eot_id|>") if is_llama else (smollm2(), "<|im_end|>")
    messages = turn(*contents, system=system)
    for position, piece in zip(range(1, len(contents), 2), pieces_of(tokenizer, messages), strict=True):
        before = len(messages) - len(contents) + position
        prompt = rendered(tokenizer, messages[:before], add_generation_prompt=True)
        spoken = contents[position].strip() if is_llama else contents[position]
        assert piece.text[piece.header_chars :] == spoken + end
        expected = encode_tail(without_processor(tokenizer), prompt + spoken + end, len(prompt)).tolist()
        assert ids_of(tokenizer, piece) == expected


def test_templates_run_in_a_sandbox_at_a_fixed_date() -> None:
    def render(template: str) -> str:
        return ChatTemplate(chat_spec(with_template(template, "<s>"))).render(turn("<ä>"))

    for attack in ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}"):
        with pytest.raises(ChatError):
            render(attack)
    assert render("{{ strftime_now('%Y-%m-%d') }}") == "2024-07-26"
    assert render("{%- for m in messages %}{{ m | tojson }}{% continue %}{% endfor %}") == (
        '{"role": "user", "content": "<ä>"}'
    )


def test_a_template_for_tools_alone_gets_an_empty_list_of_them() -> None:
    template = "{% for tool in tools %}{{ tool }}{% endfor %}" + CHATML
    assert counted(words(template), turn("Hi", "ok")) == split("ok<end>")


def test_no_template_is_an_error() -> None:
    tokenizer = LoadedTokenizer(llama3_like().backend, "base")
    with raises(TokenizerError, option="--chat-template"):
        chat_spec(tokenizer)
    with raises(TokenizerError, option="--chat-template"):
        ChatRenderer(chat_spec(words("{% for %}")))


def test_chats_of_all_forms_are_brought_into_one() -> None:
    told = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": None}]
    assert normalise_messages(told) == turn("a", "b")
    for calls in (None, [], "", "[]"):
        table_row = {"role": "user", "content": "a", "tool_calls": calls, "name": None}
        assert normalise_messages([table_row]) == turn("a")
    in_text = {"role": "assistant", "content": None, "tool_calls": json.dumps([call({"city": "Paris"})])}
    assert normalise_messages([in_text])[0]["tool_calls"] == [call({"city": "Paris"})]
    for user, assistant in (("human", "gpt"), ("User", "model"), ("user", "Assistant")):
        messages = [{"role": user, "content": "a"}, {"role": assistant, "content": "b"}]
        assert normalise_messages(messages) == turn("a", "b")
        assert normalise_messages(json.dumps(messages)) == turn("a", "b")
    kept = [{"role": role, "content": "a"} for role in ("system", "developer", "tool", "observation", "ipython")]
    assert normalise_messages(kept) == kept


def test_what_is_not_a_chat_is_refused() -> None:
    for value, problem in (
        (None, "found nothing"),
        ("text", "type str"),
        ([], "an empty list"),
        (["x"], "message 0: expected an object"),
        ([{"from": "martian", "value": "x"}], "message 0: unknown speaker 'martian'"),
        ([{"content": "x"}], "message 0: no role"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], "message 1 .*no content"),
        ([{"role": "user", "content": 5}], "message 0 .*type int"),
    ):
        with pytest.raises(ChatError, match=problem):
            normalise_messages(value)


def test_contents_in_parts_are_joined_for_a_template_that_takes_text() -> None:
    def parts(*texts: str) -> list[dict[str, Any]]:
        return [{"type": "text", "text": text, "image": None} for text in texts]

    # One fails on a list, the other would write it down as Python does.
    adding = LOOP + "{{ m.content + '<end>' }}{% endfor %}" + PROMPT
    for template in (adding, CHATML.replace("m.content", "m.content | trim")):
        assert counted(words(template), turn(parts("Hi"), parts("ok", "so"))) == split("ok\nso<end>")
        renderer = ChatRenderer(chat_spec(words(template)))
        assert renderer.all_pieces(normalise_messages(turn(parts("Hi")))) == renderer.all_pieces(turn("Hi"))


def test_the_whole_rendering_loses_no_content() -> None:
    template, _ = FORMS["contents only in parts"]
    whole = ChatRenderer(chat_spec(words(template))).all_pieces(turn("Hi", "ok"))
    assert whole == [Piece("<user>user\nHi<end>\n<user>assistant\nok<end>\n")]
    images = "{% for part in m.content %}{{ part.text if part.type == 'text' else '<channel>' }}{% endfor %}"
    either = "{% if m.content is string %}{{ m.content }}{% else %}" + images + "{% endif %}"
    seeing = CHATML.replace("{{ m.content }}", either)
    asked = turn([{"type": "image"}, {"type": "text", "text": "what is the image"}], "ok")
    assert counted(words(seeing), asked) == split("ok<end>")
    assert "<channel>what" in ChatRenderer(chat_spec(words(seeing))).all_pieces(asked)[0].text


def test_added_tokens_that_overlap_are_cut_as_the_whole_text_is() -> None:
    # After an "a" the template's "bc" is no token, and its "c" joins the "y", which then begins in the prompt.
    backend = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2, "x": 3, "y": 4, "cy": 5, "ab": 6, "bc": 7}, [("c", "y")]))
    backend.add_special_tokens(["ab", "bc", "</s>"])
    template = (
        "{% for m in messages %}{{ m['content'] }}{{ '</s>' if m['role'] == 'assistant' }}"
        "{% if loop.last and add_generation_prompt or m['role'] == 'user' and not loop.last %}bc{% endif %}{% endfor %}"
    )
    tokenizer = LoadedTokenizer(backend, "overlapping", chat_templates={"default": template})
    assert counted(tokenizer, turn("x", "y")) == [["y", "</s>"]]
    assert counted(tokenizer, turn("xa", "y")) == [["</s>"]]
