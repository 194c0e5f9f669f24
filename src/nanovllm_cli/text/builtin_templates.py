"""Chat templates by name, for models that bring none (`--chat-template NAME`).

Each writes the format that its family was trained on; `plain` is for models without any. Tools are not described by these: a
model trained on tools brings its own template.
"""

from __future__ import annotations

from nanovllm_cli.errors import TemplateError

# Sets `system` to the system text, or to nothing, and `turns` to the messages after it.
_SPLIT_SYSTEM = (
    "{% if messages and messages[0].role in ('system', 'developer') %}"
    "{% set system = messages[0].content | trim %}{% set turns = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
)
_REFUSE_TWO_IN_A_ROW = (
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('this chat format takes user and assistant messages in turn') }}{% endif %}"
)


def _tagged(opening: str, closing: str, start: str = "{{ bos_token }}") -> str:
    """Every message between two tags, the role in the opening one (`ROLE`)."""
    before, after = opening.split("ROLE")
    return (
        f"{start}{{% for message in messages %}}"
        f"{{{{ '{before}' + message.role + '{after}' + (message.content | trim) + '{closing}' }}}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '{before}assistant{after}' }}}}{{% endif %}}"
    )


BUILTIN_TEMPLATES: dict[str, str] = {
    "chatml": _tagged(r"<|im_start|>ROLE\n", r"<|im_end|>\n", start=""),
    "llama3": _tagged(r"<|start_header_id|>ROLE<|end_header_id|>\n\n", "<|eot_id|>"),
    "zephyr": _tagged(r"<|ROLE|>\n", r"' + eos_token + '\n", start=""),
    "phi3": _tagged(r"<|ROLE|>\n", r"<|end|>\n", start=""),
    "llama2": (
        _SPLIT_SYSTEM + "{% for message in turns %}" + _REFUSE_TWO_IN_A_ROW + r"{% set text = message.content | trim %}"
        r"{% if loop.first and system %}{% set text = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + text %}{% endif %}"
        r"{% if message.role == 'user' %}{{ bos_token + '[INST] ' + text + ' [/INST]' }}"
        r"{% else %}{{ ' ' + text + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "rwkv": (  # whose models end an answer with an empty line
        r"{% set names = {'system': 'System', 'developer': 'System', 'user': 'User', 'assistant': 'Assistant'} %}"
        r"{% for message in messages %}{% if message.role not in names %}"
        r"{{ raise_exception('this chat format takes system, user and assistant messages') }}{% endif %}"
        r"{{ names[message.role] + ': ' + (message.content | trim) + '\n\n' }}{% endfor %}"
        r"{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
    "mistral": (
        _SPLIT_SYSTEM
        + "{{ bos_token }}{% for message in turns %}"
        + _REFUSE_TWO_IN_A_ROW
        + r"{% set text = message.content | trim %}"
        r"{% if loop.first and system %}{% set text = system + '\n\n' + text %}{% endif %}"
        r"{% if message.role == 'user' %}{{ '[INST] ' + text + ' [/INST]' }}"
        r"{% else %}{{ ' ' + text + eos_token }}{% endif %}{% endfor %}"
    ),
    "gemma": (
        _SPLIT_SYSTEM
        + "{{ bos_token }}{% for message in turns %}"
        + _REFUSE_TWO_IN_A_ROW
        + r"{% set text = message.content | trim %}"
        r"{% if loop.first and system %}{% set text = system + '\n\n' + text %}{% endif %}"
        r"{% set role = 'model' if message.role == 'assistant' else message.role %}"
        r"{{ '<start_of_turn>' + role + '\n' + text + '<end_of_turn>\n' }}{% endfor %}"
        r"{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "alpaca": (
        _SPLIT_SYSTEM + r"{{ bos_token }}{{ (system or 'Below is an instruction that describes a task. "
        r"Write a response that appropriately completes the request.') + '\n\n' }}"
        r"{% for message in turns %}{% if message.role == 'user' %}"
        r"{{ '### Instruction:\n' + (message.content | trim) + '\n\n' }}"
        r"{% else %}{{ '### Response:\n' + (message.content | trim) + eos_token + '\n\n' }}{% endif %}{% endfor %}"
        r"{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
    ),
    "vicuna": (
        _SPLIT_SYSTEM + r"{{ bos_token }}{% if system %}{{ system + '\n\n' }}{% endif %}"
        r"{% for message in turns %}{% if message.role == 'user' %}"
        r"{{ 'USER: ' + (message.content | trim) + '\n' }}"
        r"{% else %}{{ 'ASSISTANT: ' + (message.content | trim) + eos_token + '\n' }}{% endif %}{% endfor %}"
        r"{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    ),
    "deepseek-v3.2": (  # whose publisher brings code (encoding_dsv32.py); it reasons where `thinking` is true
        "{% set ns = namespace(asked=-1) %}{% for message in messages %}"
        "{% if message.role in ('user', 'developer') %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
        "{% set reasons = thinking is defined and thinking %}{{ bos_token }}{% for message in messages %}"
        "{% set now = reasons and loop.index0 >= ns.asked %}{% set answered = add_generation_prompt or not loop.last %}"
        "{% if message.role == 'system' %}{{ message.content }}{% elif message.role in ('user', 'developer') %}"
        r"{{ '<｜User｜>' + ('\n\n# The user\'s message is: ' if message.role == 'developer' else '') + message.content }}"
        "{% if answered %}{{ '<｜Assistant｜>' + ('<think>' if now and loop.index0 == ns.asked else '</think>') }}{% endif %}"
        "{% elif message.role == 'tool' %}{% if not loop.previtem or loop.previtem.role != 'tool' %}"
        r"{{ '\n\n<function_results>' }}{% endif %}{{ '\n<result>' + message.content + '</result>' }}"
        r"{% if loop.last or loop.nextitem.role != 'tool' %}{{ '\n</function_results>' }}"
        r"{% if answered %}{{ '\n\n' + ('<think>' if now else '</think>') }}{% endif %}{% endif %}"
        "{% elif message.role == 'assistant' %}{% if now %}{{ (message.reasoning_content or '') + '</think>' }}{% endif %}"
        r"{{ message.content or '' }}{% if message.tool_calls %}{{ '\n\n<｜DSML｜function_calls>\n' }}"
        r"{% for call in message.tool_calls %}{{ '<｜DSML｜invoke name=\"' + call.function.name + '\">\n' }}"
        "{% set given = call.function.arguments %}{% set given = {'arguments': given} if given is string else given %}"
        r"{% for key, value in given.items() %}{{ '<｜DSML｜parameter name=\"' + key + '\" string=\"' }}"
        r"{{ ('true\">' + value if value is string else 'false\">' + value | tojson) + '</｜DSML｜parameter>' }}"
        r"{{ '' if loop.last else '\n' }}{% endfor %}{{ '\n</｜DSML｜invoke>\n' }}{% endfor %}"
        "{{ '</｜DSML｜function_calls>' }}{% endif %}{{ eos_token }}"
        "{% else %}{{ raise_exception('this chat format has no such role') }}{% endif %}{% endfor %}"
    ),
    "deepseek-v4": (  # whose publisher brings code; it reasons where `thinking` is true, which stays beside calls
        "{% set ns = namespace(asked=-1, calls=tools is defined and tools) %}{% for message in messages %}"
        "{% if message.role in ('user', 'developer') %}{% set ns.asked = loop.index0 %}{% endif %}"
        "{% if message.tool_calls %}{% set ns.calls = true %}{% endif %}{% endfor %}"
        "{% set reasons = thinking is defined and thinking %}{{ bos_token }}{% for message in messages %}"
        "{% set last = loop.previtem.role if loop.previtem else '' %}{% if message.role == 'system' %}{{ message.content }}"
        "{% elif message.role in ('user', 'developer', 'tool') %}"
        r"{{ '\n\n' if last in ('user', 'tool') and message.role != 'developer' else '<｜User｜>' }}"
        "{{ '<tool_result>' + message.content + '</tool_result>' if message.role == 'tool' else message.content }}"
        "{% elif message.role == 'assistant' %}{% if last in ('user', 'developer', 'tool') %}{{ '<｜Assistant｜>' }}"
        "{% if reasons and (ns.calls or loop.index0 > ns.asked) %}{{ '<think>' + (message.reasoning_content or '') }}{% endif %}"
        r"{{ '</think>' }}{% endif %}{{ message.content or '' }}{% if message.tool_calls %}{{ '\n\n<｜DSML｜tool_calls>\n' }}"
        r"{% for call in message.tool_calls %}{{ '<｜DSML｜invoke name=\"' + call.function.name + '\">\n' }}"
        "{% set given = call.function.arguments %}{% set given = {'arguments': given} if given is string else given %}"
        r"{% for key, value in given.items() %}{{ '<｜DSML｜parameter name=\"' + key + '\" string=\"' }}"
        r"{{ ('true\">' + value if value is string else 'false\">' + value | tojson) + '</｜DSML｜parameter>\n' }}{% endfor %}"
        r"{{ '</｜DSML｜invoke>\n' }}{% endfor %}{{ '</｜DSML｜tool_calls>' }}{% endif %}{{ eos_token }}"
        "{% else %}{{ raise_exception('this chat format has no such role') }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜>' + ('<think>' if reasons else '</think>') }}{% endif %}"
    ),
    "paligemma": (
        "{% if messages | length != 1 %}{{ raise_exception('this model answers one message, and no conversation') }}{% endif %}"
        "{% set content = messages[0].content %}{% if content is string %}{{ bos_token + content }}{% else %}"
        "{% for part in content %}{% if part.type == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}{{ bos_token }}"
        r"{% for part in content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '\n' }}"
    ),
    "got-ocr": (
        _SPLIT_SYSTEM + r"{{ '<|im_start|>system\n' + (system or 'You should follow the instructions carefully and explain your "
        r"answers in detail.') + '<|im_end|>' }}{% for message in turns %}{{ '<|im_start|>' + message.role + '\n' }}"
        "{% if message.content is string %}{{ message.content }}{% else %}"
        "{% set images = message.content | selectattr('type', 'equalto', 'image') | list | length %}"
        "{% set text = message.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join %}"
        r"{% if images %}{{ '<img>' + '<imgpad>' * images + '</img>\n' }}{% endif %}"
        r"{{ text or (' OCR across multi pages: ' if images > 1 else ' OCR: ') }}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
        r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "plain": (
        r"{{ bos_token }}{% for message in messages %}{{ message.content }}"
        r"{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
    ),
}


def builtin_template(name: str) -> str:
    """The source called `name`. Raises TemplateError with the known names."""
    try:
        return BUILTIN_TEMPLATES[name]
    except KeyError:
        known = ", ".join(sorted(BUILTIN_TEMPLATES))
        raise TemplateError(f"unknown chat template {name!r}; known: {known}") from None
