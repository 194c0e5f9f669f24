"""tekken.json, as Mistral publishes vocabularies: control tokens, and behind them bytes by rank (`byte_ranks.py`).

Beside such a file there is often no chat template; which one its models were trained with follows from the version in it. Forms:
mistral-common's (Mistral AI, Apache 2.0), of which the tests have examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from tokenizers import AddedToken

from nanovllm_cli.text import byte_ranks
from nanovllm_cli.text.byte_ranks import MAX_TOKENS, ranks_of
from nanovllm_cli.text.pre_tokenizers import PreTokenization
from nanovllm_cli.text.vocabulary import TokenizerParts, guard_library

FILE = "tekken.json"
_broken = partial(byte_ranks.broken, FILE)
# What files of the first versions leave out.
_FIRST = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip


def read_tekken(data: Mapping[str, Any]) -> TokenizerParts:
    """data: the file's. Raises CheckpointError where it is broken or larger than any is."""
    config = data.get("config")
    if not isinstance(config, dict) or not isinstance(pattern := config.get("pattern"), str):
        raise _broken("it has no pattern to cut texts by")
    special = _special(data, config)
    with guard_library(FILE):
        tokens = [AddedToken(name, special=True, normalized=False) for name in special]
    backend = byte_ranks.build(_ranks(data, config, len(special)), PreTokenization((pattern,)), tokens, 0, FILE)
    bos, eos, pad, unk = map(backend.token_to_id, ("<s>", "</s>", "<pad>", "<unk>"))
    parts = TokenizerParts(backend, bos, eos, pad, unk)
    parts.prefix_ids = () if parts.bos_id is None else (parts.bos_id,)
    template = chat_template(config.get("version"), thinks="[THINK]" in special)
    parts.chat_templates = {} if template is None else {"default": template}
    return parts


def _special(data: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Control tokens in the order of their ids, filled up with names of none to as many as there are."""
    listed = data.get("special_tokens")
    names = [*_FIRST] if listed is None else _in_order(listed, "token_str")
    count = config.get("default_num_special_tokens", len(names))
    if not isinstance(count, int) or not len(names) <= count <= MAX_TOKENS:
        raise _broken("it has more control tokens than it says")
    names += [f"<SPECIAL_{i}>" for i in range(len(names), count)]
    if len(set(names)) < len(names) or not all(names):
        raise _broken("it has a control token twice, or one without a name")
    return names


def _ranks(data: Mapping[str, Any], config: Mapping[str, Any], num_special: int) -> dict[bytes, int]:
    """Bytes -> rank, of the tokens that count: files have more than models do."""
    texts = _in_order(data.get("vocab"), "token_bytes")
    size = config.get("default_vocab_size", num_special + len(texts))
    if not isinstance(size, int) or not num_special < size <= num_special + len(texts):
        raise _broken("it has fewer tokens than it says")
    return ranks_of(texts[: size - num_special], FILE)


def _in_order(listed: Any, key: str) -> list[str]:
    """What entries have under that key, by their ranks, which must be 0, 1, …"""
    if not isinstance(listed, list) or len(listed) > MAX_TOKENS:
        raise _broken("it has no list of tokens, or too long a one")
    found: dict[int, str] = {}
    for entry in listed:
        rank, text = (entry.get("rank"), entry.get(key)) if isinstance(entry, dict) else (None, None)
        if type(rank) is not int or not isinstance(text, str):
            raise _broken(f"it has tokens without rank and {key}")
        found[rank] = text
    if found.keys() != set(range(len(listed))):
        raise _broken("the ranks of its tokens leave gaps")
    return [found[rank] for rank in range(len(listed))]


# ---- chat templates ----

_CONTENT = (
    "{% macro written(content) %}{% if content is string %}{{ content }}{% elif content %}{% for part in content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% elif part.type in ('image', 'image_url') %}[IMG]{% else %}"
    "{{ raise_exception('this chat format takes texts and images') }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
)
_TOOLS = (
    "{% macro described() %}[AVAILABLE_TOOLS][{% for tool in tools %}{% set known = tool.function %}"
    "{{ {'type': 'function', 'function': {'name': known.name, 'description': known.description or '', "
    "'parameters': known.parameters or {}}} | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}][/AVAILABLE_TOOLS]"
    "{% endmacro %}"
)
_LISTED_CALLS = (  # before v11
    "[TOOL_CALLS][{% for call in message.tool_calls %}{% set called = {'name': call.function.name, "
    "'arguments': call.function.arguments} %}{% if call.id %}{% set called = dict(called, id=call.id) %}{% endif %}"
    "{{ called | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}]"
)
_CALLS = (
    "{% for call in message.tool_calls %}{{ '[TOOL_CALLS]' + call.function.name }}ID{{ '[ARGS]' }}"
    "{{ call.function.arguments | tojson }}{% endfor %}"
)
_CALL_ID = "{% if call.id %}{{ '[CALL_ID]' + call.id }}{% endif %}"
_RESULT_OBJECT = (  # v3: JSON in JSON stays as it is (as far as a template can tell), other text is a string
    """{% set text = written(message.content) %}{{ '[TOOL_RESULTS]{"content": ' }}"""
    "{% if text[:1] in ('{', '[') or text in ('true', 'false', 'null') or text.lstrip('-').isdigit() %}{{ text }}"
    "{% else %}{{ text | tojson }}{% endif %}"
    """{{ ', "call_id": ' }}{{ message.tool_call_id | tojson }}{{ '}[/TOOL_RESULTS]' }}"""
)
_RESULT_WITH_ID = (
    "{{ '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + written(message.content) + '[/TOOL_RESULTS]' }}"
)
_RESULT = "{{ '[TOOL_RESULTS]' + written(message.content) + '[/TOOL_RESULTS]' }}"
_SYSTEM_BEFORE = (
    "{% if at.users == at.last %}{% for each in systems %}{{ written(each.content) + '\\n\\n' }}{% endfor %}{% endif %}"
)
_THOUGHT = "{% if message.reasoning_content %}{{ '[THINK]' + message.reasoning_content + '[/THINK]' }}{% endif %}"


def chat_template(version: Any, *, thinks: bool = False) -> str | None:
    """Jinja's, for a tekken.json of this version; None for one whose forms are not known here. thinks: its models reason between
    tokens of their own.

    v3 has what a system says in front of the last user's message; later ones where it stands. Tools are told before the last
    user's message, and from v13 on before the first. Calls are a list up to v7, then each by itself, with its id in v11.
    """
    if version not in ("v3", "v7", "v11", "v13"):
        return None
    number = int(version[1:])
    calls = _LISTED_CALLS if number < 11 else _CALLS.replace("ID", _CALL_ID if number == 11 else "")
    result = _RESULT_OBJECT if number == 3 else _RESULT_WITH_ID if number < 13 else _RESULT
    system = "" if number == 3 else "{{ '[SYSTEM_PROMPT]' + written(message.content) + '[/SYSTEM_PROMPT]' }}"
    before = _SYSTEM_BEFORE if number == 3 else ""
    told = "1" if number >= 13 else "at.last"
    return (
        f"{_CONTENT}{_TOOLS}{{{{ bos_token }}}}"
        "{% set systems = messages | selectattr('role', 'in', ['system', 'developer']) | list %}"
        "{% set at = namespace(users=0, last=messages | selectattr('role', 'equalto', 'user') | list | length) %}"
        "{% for message in messages %}"
        f"{{% if message.role in ('system', 'developer') %}}{system}"
        "{% elif message.role == 'user' %}{% set at.users = at.users + 1 %}"
        f"{{% if tools and at.users == {told} %}}{{{{ described() }}}}{{% endif %}}"
        f"{{{{ '[INST]' }}}}{before}{{{{ written(message.content) + '[/INST]' }}}}"
        f"{{% elif message.role == 'assistant' %}}{_THOUGHT if thinks and number >= 13 else ''}"
        f"{{{{ written(message.content).rstrip(' ') }}}}{{% if message.tool_calls %}}{calls}{{% endif %}}{{{{ eos_token }}}}"
        f"{{% elif message.role == 'tool' %}}{result}"
        "{% else %}{{ raise_exception('this chat format takes system, user, assistant and tool messages') }}{% endif %}"
        "{% endfor %}"
    )
