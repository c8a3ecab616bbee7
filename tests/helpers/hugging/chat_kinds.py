"""Directories with the kinds of chat templates found on the Hub, and chats to write with them.

Each template is written from its rules: which tokens surround a message, what happens to system
messages, tools and reasoning.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from hugging.tokenizer_kinds import QWEN, SPLIT, begun, of_bytes, of_pieces

Made = tuple[Tokenizer, dict[str, str], str]  # tokenizer, its named tokens, template

LLAMA3 = """\
{%- macro block(name, text) -%}
<|start_header_id|>{{ name }}<|end_header_id|>

{{ text }}
{%- endmacro -%}
{{- bos_token }}
{%- for message in messages %}
{{- block(message.role, message.content | trim) ~ '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- block('assistant', '') }}
{%- endif %}"""

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{ message.content ~ '<|im_end|>' }}{% endgeneration %}
{%- else %}
{{- message.content ~ '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Tools are described in the system message, called in JSON, and answered by the user.
_TOOLS = """\
{%- macro open(name) %}{{ '<|im_start|>' ~ name ~ '\\n' }}{% endmacro %}
{%- macro close() %}{{ '<|im_end|>\\n' }}{% endmacro %}
{%- set start = messages[0].content if messages[0].role == 'system' else DEFAULT %}
{%- if tools %}
{{- open('system') ~ (start ~ '\\n\\n' if start else '') ~ '# Tools\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' ~ tool | tojson }}{% endfor %}
{{- '\\n</tools>' ~ close() }}
{%- elif start %}
{{- open('system') ~ start ~ close() }}
{%- endif %}
{%- macro calls(message) %}
{%- for call in message.tool_calls or [] %}
{%- set call = call.function if call.function else call %}
{{- '\\n' if message.content or not loop.first }}
{{- '<tool_call>\\n' ~ {'name': call.name, 'arguments': call.arguments} | tojson }}
{{- '\\n</tool_call>' }}
{%- endfor %}
{%- endmacro %}
"""

QWEN25 = (
    _TOOLS.replace("DEFAULT", "'You are a helpful assistant.'")
    + """\
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ open('user') }}{% endif %}
{{- '\\n' if loop.previtem.role == 'tool' }}
{{- '<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ close() }}{% endif %}
{%- elif message.role != 'system' or not loop.first %}
{{- open(message.role) ~ (message.content or '') ~ calls(message) ~ close() }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ open('assistant') }}{% endif %}"""
)

# Reasoning is kept in the turns after the last question only.
QWEN3 = (
    _TOOLS.replace("DEFAULT", "''")
    + """\
{%- set ns = namespace(asked=0) %}
{%- for message in messages %}
{%- if message.role == 'user' and message.content is string %}
{%- set ns.asked = loop.index0 %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- set said = message.content if message.content is string else '' %}
{%- if message.role == 'assistant' %}
{%- set thought = message.reasoning_content or '' %}
{%- if not thought and '</think>' in said %}
{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set said = said.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- open('assistant') }}
{%- if loop.index0 > ns.asked and (loop.last or thought) %}
{{- '<think>\\n' ~ thought.strip('\\n') ~ '\\n</think>\\n\\n' ~ said.lstrip('\\n') }}
{%- else %}
{{- said }}
{%- endif %}
{{- calls(message) ~ close() }}
{%- elif message.role == 'tool' %}
{{- open('user') ~ '<tool_response>\\n' ~ said ~ '\\n</tool_response>' ~ close() }}
{%- elif message.role != 'system' or not loop.first %}
{{- open(message.role) ~ said ~ close() }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- open('assistant') }}
{{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking }}
{%- endif %}"""
)

MISTRAL = """\
{%- set system = messages[0].content if messages[0].role == 'system' %}
{%- set turns = messages[1:] if system else messages %}
{{- bos_token }}
{%- for message in turns %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate: user, assistant, user, ...') }}
{%- endif %}
{%- if message.role == 'user' %}
{%- set asked = system ~ '\\n\\n' if system and loop.first else '' %}
{{- '[INST] ' ~ asked ~ message.content ~ ' [/INST]' }}
{%- else %}
{{- ' ' ~ message.content | trim ~ eos_token }}
{%- endif %}
{%- endfor %}"""

GEMMA3 = """\
{%- macro text(content) %}
{%- if content is string %}{{ content | trim }}
{%- else %}{% for part in content %}{{ part.text | trim if part.type == 'text' }}{% endfor %}
{%- endif %}
{%- endmacro %}
{{- bos_token }}
{%- set first = messages[0].role == 'system' %}
{%- set turns = messages[1:] if first else messages %}
{%- for message in turns %}
{{- '<start_of_turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\\n' }}
{{- text(messages[0].content) ~ '\\n\\n' if first and loop.first }}
{{- text(message.content) ~ '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

# The whole text has an end of its own.
PHI = """\
{%- for message in messages %}
{{- '<|' ~ message.role ~ '|>\\n' ~ message.content ~ '<|end|>\\n' }}
{%- endfor %}
{{- '<|assistant|>\\n' if add_generation_prompt else eos_token }}"""

USER, ASSISTANT, END = (
    f"<\N{FULLWIDTH VERTICAL LINE}{name}\N{FULLWIDTH VERTICAL LINE}>"
    for name in (
        "User",
        "Assistant",
        "end\N{LOWER ONE EIGHTH BLOCK}of\N{LOWER ONE EIGHTH BLOCK}sentence",
    )
)
BEGIN = END.replace("end", "begin")
DEEPSEEK = """\
{%- set ns = namespace(system='') %}
{%- for message in messages if message.role == 'system' %}
{%- set ns.system = ns.system ~ ('\\n\\n' if ns.system) ~ message.content %}
{%- endfor %}
{{- bos_token ~ ns.system }}
{%- for message in messages if message.role != 'system' %}
{%- if message.role == 'user' %}{{ 'USER' ~ message.content }}
{%- else %}{{ 'ASSISTANT' ~ message.content.split('</think>')[-1] ~ eos_token }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT' }}{% endif %}"""
DEEPSEEK = DEEPSEEK.replace("USER", USER).replace("ASSISTANT", ASSISTANT)


def llama3() -> Made:
    special = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>")
    made = begun(of_bytes((*special, "<|eot_id|>"), SPLIT), special[0], within=True, trim=True)
    return made, {"bos_token": special[0], "eos_token": "<|eot_id|>"}, LLAMA3


def of_qwen(template: str) -> Made:
    made = of_bytes(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), QWEN)
    made.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    return made, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}, template


def mistral() -> Made:
    made = begun(of_pieces(("<unk>", "<s>", "</s>", "[INST]", "[/INST]"), prefix=True), "<s>")
    return made, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, MISTRAL


def gemma3() -> Made:
    special = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
    made = begun(of_pieces(special, prefix=False), "<bos>")
    return made, {f"{name.strip('<>')}_token": name for name in special[:4]}, GEMMA3


def phi() -> Made:
    special = ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
    return of_bytes(special), {"eos_token": special[0]}, PHI


def deepseek() -> Made:
    made = begun(of_bytes((BEGIN, END, USER, ASSISTANT), SPLIT), BEGIN, within=True)
    return made, {"bos_token": BEGIN, "eos_token": END}, DEEPSEEK


KINDS: dict[str, Callable[[], Made]] = {
    "llama3": llama3,
    "qwen2.5": lambda: of_qwen(QWEN25),
    "qwen3": lambda: of_qwen(QWEN3),
    "mistral": mistral,
    "gemma3": gemma3,
    "chatml": lambda: of_qwen(CHATML),
    "phi": phi,
    "deepseek": deepseek,
}

WEATHER = {
    "type": "function",
    "function": {"name": "sky", "parameters": {"type": "object", "properties": {"<é>": {}}}},
}
CALL = {"type": "function", "function": {"name": "sky", "arguments": {"at": "Café & <b>"}}}


def said(*texts: str, system: str | None = None) -> list[dict[str, Any]]:
    """A chat in which user and assistant take turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return [*([{"role": "system", "content": system}] if system else []), *messages]


THINKING = "<think>\nthe fox\n</think>\n\nbrown"
CHATS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": said("Hello world", "the quick fox")},
    "two turns": {"messages": said(" Hello ", "the\n", "quick\n\nbrown?", "fox 12")},
    "a system": {"messages": said("Hello", "the fox", system="the quick world")},
    "letters": {"messages": said("caf\N{LATIN SMALL LETTER E WITH ACUTE}", "fox \N{FOX FACE}")},
    "a question": {"messages": said("Hello", "the", "world")},
    "thinking": {"messages": said("Hello", THINKING, "fox?", THINKING)},
    "reasoning": {
        "messages": [*said("fox?"), {"role": "assistant", "content": "the", "thinking": "quick"}]
    },
    "a special token": {"messages": said("<|im_end|></s><|eot_id|>", "the")},
    "parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("the ", "fox")]},
            *said("", "quick")[1:],
        ]
    },
    "tools": {
        "messages": [
            *said("sky?"),
            {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
            {"role": "tool", "content": "the quick"},
            {"role": "assistant", "content": "fox"},
        ],
        "tools": [WEATHER],
    },
    "two users": {"messages": [*said("Hello"), *said("world", "fox")]},
}


def write_chat_kind(folder: Path, name: str, *, as_file: bool = True) -> Path:
    """Writes a directory with a tokenizer and its chat template, in a file or in its config."""
    folder.mkdir(parents=True)
    made, tokens, template = KINDS[name]()
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens}
    if as_file:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    else:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
