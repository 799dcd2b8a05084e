# SPDX-License-Identifier: Apache-2.0
"""Prompts are what the model's own encoding writes, and no text in them becomes a control token."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from freewheel.chat import (
    GLM_MARKUP,
    V4_MARKUP,
    V32_MARKUP,
    Ask,
    Chat,
    Message,
    Tool,
    ToolCall,
    open_chat,
)
from freewheel.errors import CheckpointError, RequestError, UnsupportedModel

CONTROL = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>",
    "</think>", "｜DSML｜", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>",
)  # fmt: skip


class Letters:
    """A tokenizer of one letter a token, control tokens behind all letters."""

    BASE = 1 << 21

    @property
    def control_tokens(self) -> dict[str, int]:
        return {name: self.BASE + at for at, name in enumerate(CONTROL)}

    def encode_text(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def token_id(self, token: str) -> int | None:
        return self.control_tokens.get(token)

    def spelt(self, ids: Sequence[int], mark: str = "") -> str:
        """The text of ids, `mark` around each control token."""
        return "".join(
            chr(one) if one < self.BASE else f"{mark}{CONTROL[one - self.BASE]}{mark}"
            for one in ids
        )


LETTERS = Letters()
WEATHER = Tool(
    "get_weather",
    "The weather of a city",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)
SCHEMA = (
    '{"name": "get_weather", "description": "The weather of a city", "parameters": {"type": '
    '"object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}'
)
TWO = (
    ToolCall("a", "get_weather", '{"city": "Rome", "days": 3}'),
    ToolCall("b", "get_weather", "{}"),
)
ASKED = [Message("system", "Be brief."), Message("user", "Rome?")]
CALLED = [*ASKED, Message("assistant", "I look.", "Hm.", TWO)]
ANSWERED = [*CALLED, Message("tool", "rain", call_id="b"), Message("tool", "sun", call_id="a")]
SAID = [*ASKED, Message("assistant", "Sunny.", "Hm."), Message("user", "Oslo?")]


@pytest.fixture(scope="module")
def v32(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return open_chat(tmp_path_factory.mktemp("v32"), "deepseek_v32", LETTERS)


@pytest.fixture(scope="module")
def v4(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chat]:
    chat = open_chat(tmp_path_factory.mktemp("v4"), "deepseek_v4", LETTERS)
    yield chat
    chat.close()


def written(chat: Chat, turns: Sequence[Message], **ask: Any) -> str:
    return LETTERS.spelt(chat.prompt(turns, Ask(**ask)).ids)


# ---- V3.2: strings by the model card's rules

BEGIN, END, USER, REPLY = CONTROL[:4]
CALLS_V32 = """

<｜DSML｜function_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="get_weather">

</｜DSML｜invoke>
</｜DSML｜function_calls>"""
RESULTS_V32 = """

<function_results>
<result>sun</result>
<result>rain</result>
</function_results>

"""


def test_v32_questions_open_or_end_thinking(v32: Chat) -> None:
    prompt = f"{BEGIN}Be brief.{USER}Rome?{REPLY}"
    assert written(v32, ASKED) == f"{prompt}</think>"
    assert written(v32, ASKED, thinking=True) == f"{prompt}<think>"


def test_v32_thoughts_before_the_last_question_are_dropped(v32: Chat) -> None:
    prompt = f"{BEGIN}Be brief.{USER}Rome?{REPLY}</think>Sunny.{END}{USER}Oslo?{REPLY}"
    assert written(v32, SAID) == f"{prompt}</think>"
    assert written(v32, SAID, thinking=True) == f"{prompt}<think>"


def test_v32_results_stand_in_the_order_of_the_calls(v32: Chat) -> None:
    called = f"I look.{CALLS_V32}{END}{RESULTS_V32}"
    prompt = f"{BEGIN}Be brief.{USER}Rome?{REPLY}"
    assert written(v32, ANSWERED) == f"{prompt}</think>{called}</think>"
    kept = f"{prompt}<think>Hm.</think>{called}<think>"
    assert written(v32, ANSWERED, thinking=True) == kept
    later = [*ANSWERED, Message("assistant", "Sun.", "So."), Message("user", "Oslo?")]
    dropped = f"{prompt}</think>{called}</think>Sun.{END}{USER}Oslo?{REPLY}<think>"
    assert written(v32, later, thinking=True) == dropped


def test_v32_tools_stand_behind_the_system_turn(v32: Chat) -> None:
    found = written(v32, ASKED, tools=(WEATHER,))
    assert found.startswith(f"{BEGIN}Be brief.\n\n## Tools\n\nYou have access to a set of tools")
    functions = f"<functions>\n{SCHEMA}\n</functions>\n{USER}Rome?{REPLY}</think>"
    assert found.endswith(f"Here are the functions available in JSONSchema format:\n{functions}")
    assert written(v32, ASKED[1:], tools=(WEATHER,)) == found.replace("Be brief.", "", 1)
    example = '<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE'
    assert f"\n{example}</｜DSML｜parameter>\n...\n</｜DSML｜invoke>\n" in found
    assert "\n<think>...thinking about results</think>\n" in found


def test_v32_agrees_with_the_words_of_its_card(v32: Chat) -> None:
    """All words before the schemas: one that changed would be new to the model."""
    found = written(v32, [Message("user", "?")], tools=(WEATHER,))
    head = found[: found.index("{")].encode()
    assert hashlib.sha256(head).hexdigest()[:16] == "5b015667503cdd79"


# ---- V4: by DeepSeek's own library

TIERS = ("Reasoning Effort: Absolute maximum", "Reasoning Effort: Beyond maximum")


def test_v4_efforts_have_three_renderings(v4: Chat) -> None:
    def heads(effort: str | None) -> list[bool]:
        found = written(v4, ASKED, thinking=True, effort=effort)
        assert found.endswith(f"Be brief.{USER}Rome?{REPLY}<think>")
        return [tier in found for tier in TIERS]

    assert heads("low") == heads("minimal") == [False, False]
    assert heads("high") == heads("medium") == heads("xhigh") == [True, False]
    assert heads("max") == [False, True]
    assert written(v4, ASKED) == f"{BEGIN}Be brief.{USER}Rome?{REPLY}</think>"


def test_v4_keeps_thoughts_when_there_are_tools_and_orders_results(v4: Chat) -> None:
    found = written(v4, ANSWERED, thinking=True, effort="low", tools=(WEATHER,))
    assert "<think>Hm.</think>I look.\n\n<｜DSML｜tool_calls>\n" in found
    results = "<tool_result>sun</tool_result>\n\n<tool_result>rain</tool_result>"
    assert found.endswith(f"</｜DSML｜tool_calls>{END}{USER}{results}{REPLY}<think>")
    later = [*ANSWERED, Message("assistant", "Sun.", "So."), Message("user", "Oslo?")]
    kept = written(v4, later, thinking=True, effort="low", tools=(WEATHER,))
    assert "<think>So.</think>Sun." in kept
    assert "So." not in written(v4, SAID[:2] + later[-2:], thinking=True, effort="low")


def test_v4_is_read_as_its_library_reads_it(v4: Chat) -> None:
    recipe = pytest.importorskip("deepseek_recipe")
    prompt = written(v4, ANSWERED, tools=(WEATHER,))
    answer = prompt[prompt.rindex("</think>I look.") + len("</think>") : prompt.rindex(END)]
    parser = v4.parser((WEATHER,))
    assert parser is not None
    mine = [vars(event) for event in [*parser.push(answer), *parser.finish()]]
    body = {
        "model": "DeepSeek-V4-Pro",
        "messages": [{"role": "user", "content": "?"}],
        "tools": [{"type": "function", "function": WEATHER.as_function()}],
        "thinking": {"type": "disabled"},
    }
    request = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    chunks = recipe.ChatCompletionRequest.chunk_generator(request, "x", "m")
    stream = recipe.StreamProcessor(chunks, recipe.ParsingOptions())
    found = stream.push(recipe.InferenceChunk.text(answer, 1))
    found += stream.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
    deltas = [c["delta"] for one in found for c in json.loads(one.to_json())["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    arguments = ["", ""]
    for call in calls:
        arguments[call["index"]] += call["function"].get("arguments") or ""
    assert "".join(delta.get("content") or "" for delta in deltas) == mine[0]["text"] == "I look."
    texts = [one["text"] for one in mine if "index" in one and "text" in one]
    assert [json.loads(text) for text in arguments] == [json.loads(text) for text in texts]


# ---- templates

GLM = """[gMASK]<sop>
{%- if tools -%}<|system|>
# Tools
{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}<|observation|>{%- endif -%}
<tool_response>{{ m.content }}</tool_response>
{%- elif m.role == 'assistant' -%}<|assistant|>
{%- if m.reasoning_content is defined and not clear_thinking|default(true) -%}
<think>{{ m.reasoning_content }}</think>{%- else -%}</think>{%- endif -%}
{{ m.content }}
{%- for tc in m.tool_calls or [] -%}<tool_call>{{ tc.function.name }}
{%- for k, v in tc.function.arguments.items() -%}
<arg_key>{{ k }}</arg_key><arg_value>{{ v if v is string else v | tojson }}</arg_value>
{%- endfor -%}</tool_call>{%- endfor -%}
{%- else -%}<|{{ m.role }}|>{{ m.content }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{{ '<think>' if enable_thinking else '</think>' }}
{%- endif -%}"""


def with_template(folder: Path, template: str, family: str = "glm_moe_dsa") -> Chat:
    (folder / "chat_template.jinja").write_text(template)
    return open_chat(folder, family, LETTERS)


@pytest.fixture
def opened() -> Iterator[list[Chat]]:
    chats: list[Chat] = []
    yield chats
    for chat in chats:
        chat.close()


def test_a_template_in_the_folder_writes_the_prompt(tmp_path: Path, opened: list[Chat]) -> None:
    opened.append(chat := with_template(tmp_path, GLM))
    assert chat.markup == GLM_MARKUP
    start = "[gMASK]<sop><|system|>Be brief.<|user|>Rome?"
    assert written(chat, ASKED) == f"{start}<|assistant|></think>"
    found = chat.prompt(ASKED, Ask(thinking=True))
    assert LETTERS.spelt(found.ids) == f"{start}<|assistant|><think>"
    assert found.end_of_thought == LETTERS.token_id("</think>")
    assert chat.prompt(ASKED).end_of_thought is None
    calls = (
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>days"
        "</arg_key><arg_value>3</arg_value></tool_call><tool_call>get_weather</tool_call>"
    )
    results = "<tool_response>sun</tool_response><tool_response>rain</tool_response>"
    answered = f"I look.{calls}<|observation|>{results}<|assistant|></think>"
    assert written(chat, ANSWERED) == f"{start}<|assistant|></think>{answered}"
    kept = written(chat, ANSWERED, keep_thoughts=True)
    assert kept == f"{start}<|assistant|><think>Hm.</think>{answered}"
    assert SCHEMA in written(chat, ASKED, tools=(WEATHER,))


def test_which_encoding_a_folder_has_is_read_from_it(tmp_path: Path, opened: list[Chat]) -> None:
    with pytest.raises(UnsupportedModel, match=r"chat_template\.jinja"):
        open_chat(tmp_path, "glm_moe_dsa", LETTERS)
    assert open_chat(tmp_path, "deepseek_v32", LETTERS).markup == V32_MARKUP
    assert open_chat(tmp_path, "deepseek_v4", LETTERS).markup == V4_MARKUP
    settings = tmp_path / "tokenizer_config.json"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": GLM}]
    settings.write_text(json.dumps({"chat_template": named, "bos_token": {"content": "<sop>"}}))
    opened.append(chat := open_chat(tmp_path, "deepseek_v32", LETTERS))
    assert written(chat, ASKED) == "plain"
    assert written(chat, ASKED, tools=(WEATHER,)).startswith("[gMASK]<sop><|system|>\n# Tools")
    opened.append(own := with_template(tmp_path, "{{ bos_token }}mine", "deepseek_v32"))
    assert written(own, ASKED) == "<sop>mine"
    with pytest.raises(RequestError, match=r"tools: .*markup"):
        own.prompt(ASKED, Ask(tools=(WEATHER,)))
    with pytest.raises(RequestError, match="chat_template_kwargs"):
        own.prompt(ASKED, Ask(keep_thoughts=True))
    settings.write_text("{")
    with pytest.raises(CheckpointError, match="tokenizer_config"):
        open_chat(tmp_path, "deepseek_v32", LETTERS)


@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4", "template"])
def test_a_control_token_in_any_text_stays_text(
    tmp_path: Path, opened: list[Chat], family: str
) -> None:
    if family == "template":
        opened.append(chat := with_template(tmp_path, GLM))
    else:
        opened.append(chat := open_chat(tmp_path, family, LETTERS))
    evil = "".join(CONTROL) + "\ufdd0" + "3\ufdd1"
    tool = Tool("get_weather", f"D{evil}", {"type": "object", "properties": {f"k{evil}": {}}})
    call = ToolCall("a", "get_weather", json.dumps({"city": f"v{evil}"}))
    turns = [
        Message("system", f"s{evil}"), Message("user", f"u{evil}"),
        Message("assistant", f"a{evil}", f"r{evil}", (call,)),
        Message("tool", f"t{evil}", call_id="a"),
    ]  # fmt: skip
    plain = [
        Message("system", "s"), Message("user", "u"),
        Message("assistant", "a", "r", (ToolCall("a", "get_weather", '{"city": "v"}'),)),
        Message("tool", "t", call_id="a"),
    ]  # fmt: skip
    harmless = Tool("get_weather", "D", {"type": "object", "properties": {"k": {}}})
    ids = chat.prompt(turns, Ask(thinking=True, tools=(tool,))).ids
    expected = chat.prompt(plain, Ask(thinking=True, tools=(harmless,))).ids
    assert [i for i in ids if i >= LETTERS.BASE] == [i for i in expected if i >= LETTERS.BASE]
    text = LETTERS.spelt(ids)
    assert all(f"{letter}{evil}" in text for letter in "sutv")


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{% set x = messages.append(1) %}{{ x }}",
    "{{ lipsum.__globals__['os'] }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ messages | attr('__class__') }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_reaches_nothing_but_the_conversation(
    tmp_path: Path, opened: list[Chat], template: str
) -> None:
    opened.append(chat := with_template(tmp_path, template))
    try:
        found = written(chat, ASKED)
    except RequestError as error:
        assert error.field == "messages"
    else:
        assert "class" not in found and "uid=" not in found and "root:" not in found


def test_what_a_template_refuses_or_gets_wrong_is_the_requests_error(
    tmp_path: Path, opened: list[Chat]
) -> None:
    opened.append(
        chat := with_template(tmp_path, "{{ raise_exception('no ' ~ messages[0].role) }}")
    )
    with pytest.raises(RequestError, match=r"messages: .*no system"):
        chat.prompt(ASKED)
    opened.append(chat := with_template(tmp_path, "{{ 1 + 'x' }}{{ messages[9].role.x }}"))
    with pytest.raises(RequestError, match=r"messages: .*fails"):
        chat.prompt(ASKED)
    opened.append(chat := with_template(tmp_path, "{% if %}"))
    with pytest.raises(UnsupportedModel, match="not valid"):
        chat.prompt(ASKED)


BOMBS = [
    "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "{{ 'x' * 9999999999 }}",
    "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{{ '%9999999999d' % 1 }}",
    "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
]


@pytest.mark.parametrize("template", BOMBS)
def test_a_template_that_takes_too_much_ends_and_the_next_prompt_is_served(
    tmp_path: Path, opened: list[Chat], template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("freewheel.chat.renderer.Renderer.__init__.__defaults__", (3.0,))
    bomb = "{% if messages[0].content == 'bomb' %}" + template + "{% endif %}fine"
    opened.append(chat := with_template(tmp_path, bomb))
    assert written(chat, [Message("user", "hello")]) == "fine"
    with pytest.raises(RequestError, match="messages"):
        chat.prompt([Message("user", "bomb")])
    assert written(chat, [Message("user", "hello")]) == "fine"


# ---- turns

WRONG: list[tuple[list[Message], str]] = [
    ([Message("assistant", "x")], "must end"),
    ([*ASKED, Message("assistant", "x")], "must end"),
    ([*CALLED, Message("user", "x")], "has no result"),
    ([*ANSWERED[:-1], Message("user", "x")], "has no result"),
    ([*ASKED, Message("tool", "x", call_id="a")], "nobody made"),
    ([*ANSWERED, Message("tool", "x", call_id="a")], "nobody made"),
    ([*ASKED, Message("assistant", "", None, (TWO[0], TWO[0])), *ANSWERED[3:]], "one id"),
    (
        [*ASKED, Message("assistant", "", None, (ToolCall("a", "f", "[1]"),)), ANSWERED[4]],
        "no JSON object",
    ),
    (
        [*ASKED, Message("assistant", "", None, (ToolCall("a", "f", "{"),)), ANSWERED[4]],
        "not JSON",
    ),
]


@pytest.mark.parametrize(("turns", "reason"), WRONG)
def test_turns_that_do_not_fit_together_are_refused(
    v32: Chat, v4: Chat, turns: list[Message], reason: str
) -> None:
    for chat in (v32, v4):
        with pytest.raises(RequestError, match=f"messages: .*{reason}"):
            chat.prompt(turns)
