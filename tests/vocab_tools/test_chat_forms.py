"""Turns in chats of the forms that public templates have, by hand; each template is written after its model's.

Answers are Greek, so that no template has their letters: κ is thought, ω said, λ and μ are names and values of calls.
What is expected is the text whose tokens count; "+" begins words that are counted by themselves.
"""

import json
from typing import Any

import pytest
from eagle_slim.vocab_tools.chats import ChatRenderer, ChatSpec
from eagle_slim.vocab_tools.messages import content_text, normalise_messages

Messages = list[dict[str, Any]]

USER = {"role": "user", "content": "zz"}
CALL = {"id": "call12345", "type": "function", "function": {"name": "λ", "arguments": {"v": "μμμ"}}}
RESULT = {"role": "tool", "tool_call_id": "call12345", "name": "λ", "content": "zzz"}


def says(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def counted(template: str, tokens: str, messages: Messages, eos: str | None = None, **variables: Any) -> list[str]:
    special = tuple(tokens.split())
    spec = ChatSpec(template, {"eos_token": eos, **variables}, special, special, (eos or special[-1],))
    pieces = ChatRenderer(spec).assistant_pieces(normalise_messages(messages))
    return [("+" if piece.is_apart else "") + piece.text[piece.header_chars :] for piece in pieces]


ASK = "{% if add_generation_prompt %}"


def chat(turn: str, prompt: str, begin: str = "") -> str:
    """A template that writes a turn for each message, and a generation prompt where one is asked for."""
    return begin + "{% for m in messages %}" + turn + "{% endfor %}" + (ASK + prompt + "{% endif %}" if prompt else "")


CHATML = chat(
    "<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{{ p.text if p.type == 'text' }}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments|tojson }}</call>{% endfor %}"
    "<|im_end|>\n",
    "<|im_start|>assistant\n",
)
CHATML_TOKENS = "<|im_start|> <call> </call> <|im_end|>"

TEXT, SAID, THOUGHT = {"type": "text", "text": "ωω"}, ["ωω<|im_end|>"], ["ωω<|im_end|>", "+κκ"]
WRITTEN = '<call>λ {"v": "μμμ"}</call><|im_end|>'
OF_LANGCHAIN = {"name": "λ", "args": {"v": "μμμ"}, "id": "t", "type": "tool_call"}
PLACES = {
    "text of the Responses API": (says([{"type": "output_text", "text": "ωω"}]), SAID),
    "a part without a type": (says([{"text": "ωω"}]), SAID),
    "a list of strings": (says(["ω", "ω"]), ["ω\nω<|im_end|>"]),
    "Gemini's parts": ({"role": "model", "parts": [{"text": "ωω"}]}, SAID),
    "Gemini's call": ({"role": "model", "parts": [{"functionCall": {"name": "λ", "args": {"v": "μμμ"}}}]}, [WRITTEN]),
    "a thought as a part": (says([{"type": "thinking", "thinking": "κκ"}, TEXT]), THOUGHT),
    "a thought in parts": (says([{"type": "thinking", "thinking": [{"type": "text", "text": "κκ"}]}, TEXT]), THOUGHT),
    "reasoning details": (says("ωω", reasoning_details=[{"type": "reasoning.text", "text": "κκ"}]), THOUGHT),
    "a call as a part": (
        says([TEXT, {"type": "tool_use", "id": "t", "name": "λ", "input": {"v": "μμμ"}}]),
        [f"ωω{WRITTEN}"],
    ),
    "LangChain's calls": (says("", tool_calls=[OF_LANGCHAIN]), [WRITTEN]),
    "a refusal": (says(None, refusal="ωω"), SAID),
    "a refusal as a part": (says([{"type": "refusal", "refusal": "ωω"}]), SAID),
    "what was said aloud": (says(None, audio={"id": "a", "transcript": "ωω"}), SAID),
    "an image beside the text": (says([{"type": "image_url", "image_url": {"url": "data:zz"}}, TEXT]), SAID),
}


@pytest.mark.parametrize(("message", "expected"), PLACES.values(), ids=PLACES)
def test_words_are_found_wherever_an_assistant_has_them(message: dict[str, Any], expected: list[str]) -> None:
    user = {"role": "user", "content": [{"type": "input_text", "text": "zz"}]}
    assert counted(CHATML, CHATML_TOKENS, [user, message]) == expected
    renderer = ChatRenderer(ChatSpec(CHATML, {}, tuple(CHATML_TOKENS.split()), tuple(CHATML_TOKENS.split())))
    whole, *apart = renderer.all_pieces(normalise_messages([user, message]))
    assert "zz" in whole.text
    assert [piece.text for piece in apart] == [words[1:] for words in expected if words[0] == "+"]


def test_items_of_the_responses_api_are_turns() -> None:
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ωω"}]}
    thought = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "κκ"}]}
    call = {"type": "function_call", "call_id": "c", "name": "λ", "arguments": '{"v": "μμμ"}'}
    output = {"type": "function_call_output", "call_id": "c", "output": "zzz"}
    items = [{"type": "message", **USER}, thought, call, output, {"type": "reasoning", "summary": []}, said]
    assert counted(CHATML, CHATML_TOKENS, items) == [WRITTEN, "+κκ", *SAID]
    turns = [(turn["role"], turn["content"]) for turn in normalise_messages(items)]
    assert turns == [("user", "zz"), ("assistant", None), ("tool", "zzz"), ("assistant", "ωω")]
    raw = [*items[:2], {**thought, "summary": [], "content": [{"type": "reasoning_text", "text": "κκ"}]}, said]
    assert counted(CHATML, CHATML_TOKENS, raw) == [*SAID, "+κκ\nκκ"]
    # As a table stores them; an assistant's name is no call's.
    assert normalise_messages(json.dumps(items[1:])) == normalise_messages(items[1:])
    (named,) = normalise_messages([{**said, "name": "agent"}])
    assert (content_text(named), "tool_calls" in named) == ("ωω", False)


def test_calls_of_the_responses_api_side_by_side_have_their_own_results() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "λ", "arguments": {"v": 1}}
    results = [{"type": "function_call_output", "call_id": each, "output": each} for each in "cd"]
    turn, *tools = normalise_messages([call, {**call, "call_id": "d", "name": "ν"}, *results])
    calls = [(each["id"], each["function"]["name"], each["function"]["arguments"]) for each in turn["tool_calls"]]
    assert [name for _, name, _ in calls] == ["λ", "ν"]
    assert json.loads(calls[0][2]) == {"v": 1}
    found = [(each["tool_call_id"], each["name"], each["content"]) for each in tools]
    assert found == [(calls[0][0], "λ", "c"), (calls[1][0], "ν", "d")]


LLAMA = chat(
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
)
GEMMA = chat(
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n",
    "<start_of_turn>model\n",
)
MISTRAL = chat(
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}", "", "<s>"
)
PHI = chat("<|{{ m.role }}|>\n{{ m.content }}<|end|>\n", "<|assistant|>\n{% else %}{{ eos_token }}")
KIMI = chat(
    "<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>",
    "<|im_assistant|>assistant<|im_middle|>",
)
DEEPSEEK = chat(
    "{% if m.role == 'user' %}<|User|>{{ m.content }}<|Assistant|>"
    "{% else %}{{ m.content.split('</think>')[-1] }}<|eos|>{% endif %}",
    "",
)
GLM = chat("<|{{ m.role }}|>\n{{ m.content }}", "<|assistant|>\n", "[gMASK]<sop>")
COHERE = chat(
    "<|START|><|{{ m.role }}|>{% if m.role == 'assistant' %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>"
    "{% else %}{{ m.content }}{% endif %}<|END|>",
    "<|START|><|assistant|>",
)
KIMI_3 = chat(
    "{{ o('message ' + m.role) }}{% if m.role == 'assistant' %}{{ o('response') }}{{ m.content }}{{ c('response') }}"
    "{% else %}{{ m.content }}{% endif %}{{ c('message') }}<|eom|>",
    "{{ o('message assistant') }}",
    "{% macro o(t) %}<|open|>{{ t }}<|sep|>{% endmacro %}{% macro c(t) %}<|close|>{{ t }}<|sep|>{% endmacro %}",
)
KIMI_3_TURN = "<|open|>response<|sep|>{}<|close|>response<|sep|><|close|>message<|sep|><|eom|>"
APERTUS = chat(
    "{% if m.role == 'assistant' %}{% if not ns.open %}<|a|>{% set ns.open = true %}{% endif %}{{ m.content }}"
    "{% else %}{% if ns.open %}<|/a|>{% set ns.open = false %}{% endif %}<|u|>{{ m.content }}<|/u|>{% endif %}",
    "<|a|>",
    "{% set ns = namespace(open=false) %}",
)
APRIEL = chat(
    "{% if m.role == 'assistant' %}<|a|>\n{{ m.reasoning_content if loop.last }}{{ m.content }}"
    "{{ '\n<|end|>\n' if not loop.last }}{% else %}<|u|>\n{{ m.content }}\n{% endif %}",
    "<|a|>\n",
)
PLAIN = chat("{{ m.role | capitalize }}: {{ m.content }}\n\n", "")
ZEPHYR = chat("<|{{ m.role }}|>\n{{ m.content }}</s>\n", "")
MARKED = chat(
    "<|{{ m.role }}|>{% if m.role == 'assistant' %}\n{%- generation %} {{ m.content }}</s>{% endgeneration -%}\n"
    "{% else %}{{ m.content }}{% endif %}",
    "<|assistant|>",
)

ENDS = {
    "Llama 3": (LLAMA, "<|start_header_id|> <|end_header_id|> <|eot_id|>", ["A<|eot_id|>", "ω<|eot_id|>"]),
    "Gemma": (GEMMA, "<start_of_turn> <end_of_turn>", ["A<end_of_turn>", "ω<end_of_turn>"]),
    "Mistral": (MISTRAL, "<s> [INST] [/INST] </s>", [" A</s>", " ω</s>"]),
    "Phi 3": (PHI, "<|user|> <|assistant|> <|end|> <|endoftext|>", ["A<|end|>", "ω<|end|>"]),
    "Kimi K2": (KIMI, "<|im_user|> <|im_assistant|> <|im_middle|> <|im_end|>", ["A<|im_end|>", "ω<|im_end|>"]),
    "Kimi K3": (KIMI_3, "<|open|> <|close|> <|sep|> <|eom|>", [KIMI_3_TURN.format(answer) for answer in "Aω"]),
    "DeepSeek": (DEEPSEEK, "<|User|> <|Assistant|> <|eos|>", ["A<|eos|>", "ω<|eos|>"]),
    "GLM": (GLM, "[gMASK] <sop> <|user|> <|assistant|> <|endoftext|>", ["A", "ω"]),
    "GLM, whose next header ends a turn": (GLM, "[gMASK] <sop> <|assistant|> <|user|>", ["A<|user|>", "ω"]),
    "Command R": (
        COHERE,
        "<|START|> <|user|> <|assistant|> <|START_RESPONSE|> <|END_RESPONSE|> <|END|>",
        [f"<|START_RESPONSE|>{answer}<|END_RESPONSE|><|END|>" for answer in "Aω"],
    ),
    "Apertus": (APERTUS, "<|a|> <|u|> <|/u|> <|/a|>", ["A<|/a|>", "ω"]),
    "Apriel": (APRIEL, "<|a|> <|u|> <|end|>", ["A\n<|end|>", "ω"]),
    "words alone, without a generation prompt": (PLAIN, "</s>", [" A\n\n", " ω\n\n"]),
    "Zephyr, without a generation prompt": (ZEPHYR, "<|user|> <|assistant|> </s>", ["A</s>", "ω</s>"]),
    "marks of what is generated": (MARKED, "<|user|> <|assistant|> </s>", [" A</s>", " ω</s>"]),
}


@pytest.mark.parametrize(("template", "tokens", "expected"), ENDS.values(), ids=ENDS)
def test_a_turn_ends_with_the_last_token_that_is_written_for_it(template, tokens, expected):
    # The answer "A" also stands in the word "Assistant", a header of some.
    assert counted(template, tokens, [USER, says("A"), USER, says("ω")]) == expected


# gpt-oss: thoughts stand in the last turn and before a call that no answer follows; of a call's thoughts and words the
# template takes one.
HARMONY = (
    "<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>{% for m in messages %}"
    "{% set thought = '<|start|>assistant<|channel|>analysis<|message|>' %}{% if m.role == 'user' %}<|start|>user"
    "<|message|>{{ m.content }}<|end|>{% elif m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant"
    "<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>{% elif 'tool_calls' in m %}"
    "{% set ns = namespace(final=false) %}"
    "{% for later in messages[loop.index:] if later.role == 'assistant' and 'tool_calls' not in later %}"
    "{% set ns.final = true %}{% endfor %}{% set call = m.tool_calls[0].function %}"
    "{% if m.content and m.thinking %}{{ raise_exception('Cannot pass both content and thinking') }}"
    "{% elif (m.content or m.thinking) and not ns.final %}{{ thought + (m.content or m.thinking) + '<|end|>' }}"
    "{% endif %}<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
    "{{ call.arguments | tojson }}<|call|>{% elif loop.last and not add_generation_prompt %}{% if 'thinking' in m %}"
    "{{ thought + m.thinking + '<|end|>' }}{% endif %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "<|return|>{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    + ASK
    + "<|start|>assistant{% endif %}"
)
ANSWERED = "<|start|>assistant<|channel|>final<|message|>"
CALLED = '<|start|>assistant to=functions.λ<|channel|>commentary json<|message|>{"v": "μμμ"}<|call|>'
CALLS = {"tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (says("ω", thinking="κκ"), [f"<|channel|>analysis<|message|>κκ<|end|>{ANSWERED}ω<|return|>"]),
        (says(None, **CALLS), [CALLED.removeprefix("<|start|>assistant")]),
        (says("ω", **CALLS), [f"<|channel|>analysis<|message|>ω<|end|>{CALLED}"]),
        (says(None, **CALLS, reasoning_content="κκ"), [f"<|channel|>analysis<|message|>κκ<|end|>{CALLED}"]),
        (says("ω", **CALLS, reasoning_content="κκ"), [f"<|channel|>analysis<|message|>κκ\nω<|end|>{CALLED}"]),
    ],
)
def test_the_last_turn_counts_whole_where_earlier_thoughts_are_dropped(first: Any, expected: list[str]) -> None:
    tokens = "<|start|> <|channel|> <|message|> <|end|> <|call|> <|return|>"
    between = RESULT if "tool_calls" in first else USER
    found = counted(HARMONY, tokens, [USER, first, between, says("ωω", reasoning_content="κ")])
    assert found == [*expected, f"<|channel|>analysis<|message|>κ<|end|>{ANSWERED}ωω<|return|>"]


OWN = {"role": "system", "content": [{"type": "system_content", "model_identity": "zz", "reasoning_effort": "Low"}]}
TOOLS = {"role": "developer", "content": [{"type": "developer_content", "tools": {"functions": {}}}]}
SENT = says('{"v": "μμμ"}', channel="commentary", recipient="functions.λ", content_type="<|constrain|>json")
GIVEN = {"role": "tool", "name": "functions.λ", "recipient": "assistant", "channel": "commentary", "content": [TEXT]}


def on(channel: str, text: str) -> dict[str, Any]:
    return says([{"type": "text", "text": text}], channel=channel)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([OWN, TOOLS, USER, on("analysis", "κκ"), on("final", "ωω")], ["κκ<|end|>+ωω<|return|>"]),
        ([USER, on("analysis", "κκ"), SENT], [f"κκ<|end|>{CALLED}"]),
        ([USER, on("analysis", "κ"), on("commentary", "ω"), SENT], [f"κ\nω<|end|>{CALLED}"]),
        ([USER, on("analysis", "κκ"), on("analysis", "κ"), on("final", "ω")], ["κκ\nκ<|end|>+ω<|return|>"]),
        (
            [USER, on("analysis", "κκ"), SENT, GIVEN, on("analysis", "κ"), on("final", "ωω")],
            [f"κκ<|end|>{CALLED}", "κ<|end|>+ωω<|return|>"],
        ),
    ],
)
def test_messages_for_each_channel_are_one_turn(messages: Messages, expected: list[str]) -> None:
    tokens = "<|start|> <|channel|> <|message|> <|end|> <|call|> <|return|>"
    thought = "<|channel|>analysis<|message|>"
    assert counted(HARMONY, tokens, messages) == [thought + turn.replace("+", ANSWERED) for turn in expected]
    # Words on a channel of another name, and those on none, are as they were.
    for plain in (says("ωω", channel="news"), says("ωω")):
        assert counted(CHATML, CHATML_TOKENS, [USER, plain, USER, plain]) == SAID * 2


def test_variables_of_a_template_are_given() -> None:
    thought = "{% if thinking and m.reasoning_content %}<t>{{ m.reasoning_content }}</t>{% endif %}"
    template = CHATML.replace("\n{% if", f"\n{thought}{{% if", 1)
    messages = [USER, says("ωω", reasoning_content="κκ")]
    assert counted(template, CHATML_TOKENS, messages) == ["ωω<|im_end|>", "+κκ"]
    assert counted(template, CHATML_TOKENS, messages, thinking=True) == ["<t>κκ</t>ωω<|im_end|>"]


def test_thoughts_stand_in_parts_where_a_template_looks_for_them_there() -> None:
    template = chat(
        "{% if m.role == 'user' %}[INST]{{ m.content if m.content is string else m.content[0].text }}[/INST]"
        "{% elif m.content is string %}{{ m.content }}</s>{% else %}{% for p in m.content %}"
        "{% if p.type == 'thinking' %}[THINK]{{ p.thinking }}[/THINK]{% else %}{{ p.text }}{% endif %}{% endfor %}</s>"
        "{% endif %}",
        "",
    )
    tokens = "[INST] [/INST] [THINK] [/THINK] </s>"
    assert counted(template, tokens, [USER, says("ωω", reasoning="κκ")]) == ["[THINK]κκ[/THINK]ωω</s>"]
    shown = "m.content | tojson if m.content is not string else m.content"
    writing = chat(f"<{{{{ m.role }}}}>{{{{ {shown} }}}}</s>", "")
    assert counted(writing + "{# 'thinking' #}", "</s>", [USER, says("ωω", reasoning="κκ")]) == ["ωω</s>", "+κκ"]


def test_a_template_that_shows_nothing_or_calls_itself_loses_no_word() -> None:
    messages = [USER, says("ωω", reasoning="κκ", tool_calls=[CALL])]
    apart = ["+κκ", "ωω", '{"name": "λ", "arguments": {"v": "μμμ"}}']
    assert counted(chat("<s>{{ m.role }}</s>", ""), "<s> </s>", messages) == apart
    assert counted("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "</s>", messages) == apart
