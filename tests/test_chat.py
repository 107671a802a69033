"""Chat templates and conversations: what transformers renders, the sandbox, the command."""

from __future__ import annotations

import datetime
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from localtrain import api
from localtrain.chat import Chat
from localtrain.complete import Settings, Writer
from localtrain.data.template import ChatTemplate, encode_chat, find_template, turn_ends
from localtrain.data.tokenizer import load_tokenizer
from localtrain.errors import ConfigError, DataError
from localtrain.models import spec_from
from localtrain.nn.decoder import build

TESTS = Path(__file__).parent
TOKENIZER = TESTS / "data" / "tokenizer"
GOLDEN = json.loads((TOKENIZER / "golden_tokenizer.json").read_text())
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="session")
def hub(tmp_path_factory) -> Path:
    """A small random model with the golden tokenizer and its template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    hf = json.loads((TESTS / "golden_small" / "qwen3" / "config.json").read_text())
    hf |= {"vocab_size": 512, "max_position_embeddings": 200}
    network = build(spec_from(hf))
    api.LanguageModel(hf, network, jax.jit(network.init)(jax.random.key(3))).save_hub(str(folder))
    for file in TOKENIZER.iterdir():
        shutil.copy(file, folder)
    return folder


def tokenizer_with(folder: Path, template: object = None, **config: object):
    """A copy of the golden tokenizer with another tokenizer_config.json."""
    shutil.copytree(TOKENIZER, folder, dirs_exist_ok=True)
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_text()) | {"chat_template": template} | config
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return load_tokenizer(str(folder))


# templates --------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", GOLDEN["chats"], ids=["system", "turns", "tools"])
def test_chats_render_and_tokenize_as_in_transformers(chat):
    tokenizer = load_tokenizer(str(TOKENIZER))
    template = find_template(tokenizer)
    options = {
        "tools": chat.get("tools"),
        "add_generation_prompt": chat["add_generation_prompt"],
    }
    assert template.render(chat["messages"], **options).text == chat["rendered"]
    ids, mask = encode_chat(template, tokenizer, chat["messages"], **options)
    assert ids.tolist() == chat["ids"]
    assert mask.tolist() == chat["assistant_mask"]
    assert template.marks_assistant and turn_ends(template, tokenizer) == (2,)


def test_there_is_one_begin_token_when_template_and_tokenizer_both_want_it(tmp_path):
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = tokenizer_with(tmp_path, source, bos_token="<|endoftext|>", add_bos_token=True)
    assert tokenizer.bos_id == 0
    ids, _ = encode_chat(find_template(tokenizer), tokenizer, USER)
    assert ids.tolist()[0] == 0 and ids.tolist().count(0) == 1


def test_a_template_may_be_a_file_a_list_or_given(tmp_path):
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    tokenizer = tokenizer_with(tmp_path / "list", several)
    assert find_template(tokenizer).render(USER).text == "yes"
    (tmp_path / "list" / "chat_template.jinja").write_text("from the file")
    tokenizer = load_tokenizer(str(tmp_path / "list"))
    assert find_template(tokenizer).render(USER).text == "from the file"
    (tmp_path / "own.jinja").write_text("{{ messages | length }} of {{ eos_token }}")
    given = find_template(tokenizer, str(tmp_path / "own.jinja"))
    assert given.render(USER).text == "1 of <|im_end|>"
    chatml = find_template(tokenizer, "chatml").render(USER, add_generation_prompt=True)
    assert chatml.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(ConfigError, match="none called default"):
        find_template(tokenizer_with(tmp_path / "other", several[:1]))
    with pytest.raises(ConfigError, match="neither a text file nor one of chatml"):
        find_template(tokenizer, "nothing.jinja")


def test_templates_have_what_transformers_gives_them():
    def render(source: str, **more) -> str:
        return ChatTemplate(source, {"bos_token": "<s>"}, "t").render(USER, **more).text

    assert render('{{ {"a": "\u00e9<&"} | tojson }}') == '{"a": "\u00e9<&"}'
    assert render("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=True) }}").count("\n") == 5
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
    assert (
        render("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "012"
    )
    assert (
        render("{{ bos_token }}{{ unknown }}{{ enable_thinking }}", enable_thinking=False)
        == "<s>False"
    )
    assert render("  {% if true %}\n x\n  {% endif %}\n") == " x\n"  # trim_blocks, lstrip_blocks


def test_the_assistant_is_found_inside_macros_and_captured_blocks():
    source = (
        "{% macro say(m) %}{% generation %}{{ m.content }}!{% endgeneration %}{% endmacro %}"
        "{% set body %}{% for m in messages %}[{% if m.role == 'assistant' %}{{ say(m) }}"
        "{% else %}{{ m.content }}{% endif %}]{% endfor %}{% endset %}{{ body | trim }}"
    )
    chat = [*USER, {"role": "assistant", "content": "yo"}]
    rendered = ChatTemplate(source, {}, "t").render([*chat, *chat])
    assert rendered.text == "[hi][yo!][hi][yo!]"
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["yo!", "yo!"]


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ cycler.__init__.__globals__.os.system('touch OUT') }}",
    "{{ joiner.__init__.__globals__['__builtins__']['open']('OUT', 'w') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['datetime'] }}",
    "{{ messages.append({}) }}",
    "{{ messages[0].update(content='x') }}",
    "{{ ('%s' | attr('__mod__')) or 1 / 0 }}",
    "{{ '{0.__class__.__mro__}'.format('') or 1 / 0 }}",
    "{{ (['{0.__class__}'] | map('format', '') | list)[0].upper() }}",
    "{{ namespace(x=1).__init__.__globals__ }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ self.__init__.__globals__ }}",
    "{{ lipsum.__globals__.os.popen('touch OUT').read() }}",
    "{{ caller.__globals__ }}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_malicious_template_gets_nowhere(source, tmp_path):
    """It is stopped with an error, or what it asked for is simply not there."""
    out, messages = tmp_path / "out", [dict(USER[0])]
    try:
        text = ChatTemplate(source.replace("OUT", str(out)), {}, "t").render(messages).text
    except DataError as error:
        assert re.match("t: the (template does something that is|chat template failed)", str(error))
    else:
        assert not re.search("class|module|function|root:|<", text)
    assert not out.exists() and messages == USER


def test_what_a_template_says_and_what_is_wrong_in_it_reaches_the_user():
    with pytest.raises(
        ConfigError, match="t: the chat template refuses this: roles must alternate"
    ):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}, "t").render(USER)
    with pytest.raises(DataError, match="t, line 2: not a chat template"):
        ChatTemplate("\n{% if %}", {}, "t")
    with pytest.raises(DataError, match="UndefinedError: 'nothing' is undefined"):
        ChatTemplate("{{ nothing.x }}", {}, "t").render(USER)


# conversations ----------------------------------------------------------------------------------


def test_the_cache_of_earlier_turns_changes_no_answer(hub):
    writer = Writer.open(str(hub))
    settings = Settings(max_new_tokens=6, temperature=1.5, seed=9)
    template = find_template(writer.tokenizer)
    kept = Chat(writer, template, settings, system="Be brief.")
    for turn, text in enumerate(["Hello", "Hello again", "And again"]):
        fresh = Chat(writer, template, settings, system="Be brief.")
        fresh.messages, fresh.turns = list(kept.messages), turn
        answer = "".join(kept.answer(text))
        assert "".join(fresh.answer(text)) == answer
        assert kept.messages == fresh.messages
        assert kept.messages[-1] == {"role": "assistant", "content": answer}
    ids, _ = encode_chat(template, writer.tokenizer, kept.messages)
    assert len(kept._held) > 60 and kept._held[:60].tolist() == ids[:60].tolist()
    kept.reset()
    assert kept.messages == [{"role": "system", "content": "Be brief."}]


def test_an_answer_can_be_ended_and_a_conversation_grow_too_long(hub):
    writer = Writer.open(str(hub))
    chat = Chat(writer, find_template(writer.tokenizer), Settings(temperature=2.0))
    answer = chat.answer("Hello")
    first = next(answer)
    answer.close()
    assert chat.messages[-1] == {"role": "assistant", "content": first}
    said = list(chat.messages)
    with pytest.raises(ConfigError, match="tokens and the model was made for 200: /reset"):
        list(chat.answer("word " * 200))
    assert chat.messages == said


def test_a_model_without_a_template_says_what_to_do(hub, tmp_path, capsys):
    from localtrain.cli import run

    folder = tmp_path / "plain"
    shutil.copytree(hub, folder)
    tokenizer_with(folder)
    assert run(["chat", str(folder)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "no chat template" in error and "--template chatml" in error


def test_the_command_answers_line_by_line(hub):
    """Greedy, so the answer after /reset is the first one again."""
    lines = "Hello, world!\n\n/what\nAnd then?\n/reset\nHello, world!\n/exit\nnever said\n"
    command = [sys.executable, "-m", "localtrain", "chat", str(hub), "--temperature", "0"]
    done = subprocess.run(
        [*command, "--max-new-tokens", "5"], input=lines, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "there is no /what. /reset starts over" in done.stderr
    writer = Writer.open(str(hub))
    settings = Settings(max_new_tokens=5, temperature=0)
    chat = Chat(writer, find_template(writer.tokenizer), settings)
    first, second = ("".join(chat.answer(t)) + "\n" for t in ("Hello, world!", "And then?"))
    assert done.stdout == first + second + first


def test_byte_tokens_know_their_characters():
    byte = load_tokenizer("byte")
    text = "a\u00e9<|im_end|>\U0001f642"
    ids, starts, ends = byte.encode_spans(text)
    assert ids.tolist() == byte.encode(text).tolist()
    assert starts.tolist() == [0, 1, 1, 2, 12, 12, 12, 12]
    assert np.all(ends > starts) and ends.tolist()[-1] == len(text)
