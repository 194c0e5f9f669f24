"""What requests of Ollama's API mean with a model: conversations in OpenAI's form, or texts to go on with.

A message becomes one message. Its images come ahead of its text, as Ollama writes them. Calls have no ids there, or ids of the
client's: results belong to the first call of their name that waits for one. Thinking that is not asked for either way is the
template's to decide, as with every other API here; where Ollama's own server turns it on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm_cli.constraint import Constraint
from nanovllm_cli.errors import NanovllmError
from nanovllm_cli.server.api_error import ApiError, invalid_value
from nanovllm_cli.server.fim import fill_in_the_middle
from nanovllm_cli.server.function_tools import Tool, checked_tools
from nanovllm_cli.server.ports import ChatAsked, ServedModel, TextAsked
from nanovllm_cli.server.reading import schema_form, unsupported
from nanovllm_cli.server.schemas_ollama import (
    AnsweredRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
)
from nanovllm_cli.text.answer_format import AnswerFormat

ChatMessage = dict[str, Any]


def form_of(body: AnsweredRequest) -> Constraint | None:
    """Of `format`. Raises ApiError 400."""
    if body.format is None or body.format == "":
        return None
    return Constraint("json_object") if body.format == "json" else schema_form(body.format, "format")


def chat_asked(body: OllamaChatRequest, model: ServedModel, form: Constraint | None) -> ChatAsked:
    messages, paths = _conversation(body.messages or ())
    tools: list[Tool] = [{"type": "function", "function": tool["function"]} for tool in body.tools or ()]
    last = messages[-1]
    return ChatAsked(
        messages,
        tools=checked_tools(tools, "auto")[0],
        continues=last["role"] == "assistant" and not last.get("tool_calls"),
        image_paths=paths,
        **_how(body, model, form),
    )


def generate_asked(body: OllamaGenerateRequest, model: ServedModel, form: Constraint | None) -> ChatAsked | TextAsked:
    """A prompt is a user's message, but for one that is raw, begins a middle, or has no template to be written by."""
    prompt = body.prompt or ""
    _check_fields(body)
    if body.suffix:
        model.check_texts([prompt, body.suffix], "prompt")
        try:
            return _text(body, model, form, fill_in_the_middle(model.tokenizer, prompt, body.suffix))
        except NanovllmError as error:
            raise ApiError.of(error, "suffix") from None
    is_plain = model.chat_template is None and not (body.system or body.images or body.context or body.think)
    if body.raw or is_plain:
        return _text(body, model, form, prompt)
    said: list[ChatMessage] = [{"role": "system", "content": body.system}] if body.system else []
    images = body.images or ()
    said.append({"role": "user", "content": _content(prompt, images)})
    return ChatAsked(
        said,
        before=body.context or (),
        param="prompt",
        image_paths=[f"images[{place}]" for place in range(len(images))],
        **_how(body, model, form),
    )


def thinks(format: AnswerFormat | None, thinking_switch: str | None) -> bool:
    """Whether a model can reason aloud."""
    return thinking_switch is not None or (format is not None and format.thinks)


def num_logprobs(body: AnsweredRequest) -> int | None:
    """Alternatives to each token; None where no log-probabilities are wanted."""
    if body.top_logprobs and not body.logprobs:
        raise invalid_value("top_logprobs needs logprobs: true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _check_fields(body: OllamaGenerateRequest) -> None:
    """Refuses what cannot be meant together, or at all."""
    if body.template:
        raise unsupported("template", "a model's template is chosen when it is served (--chat-template, Jinja's): leave it out")
    without = [name for name in ("system", "context", "images", "think") if getattr(body, name)]
    if body.suffix and without:
        raise unsupported("suffix", f"{without[0]} does not go with it: a middle is asked for by prompt and suffix alone")
    if body.raw and without:
        raise unsupported("raw", f"{without[0]} does not go with it: the prompt is all that the model gets")
    if body.context and body.images:
        raise unsupported("context", "does not go with images: /api/chat takes both, as messages")


def _how(body: AnsweredRequest, model: ServedModel, form: Constraint | None) -> dict[str, Any]:
    """How the next turn is to be made."""
    thinking, variables = _thinking(body, model)
    options = body.options or OllamaOptions()
    return {
        "params": options.sampling(model.default_params, num_logprobs(body)),
        "whole_calls": True,  # they have no other form
        "form": form,
        "template_kwargs": variables,
        "thinking": thinking,
        # A model that always thinks is stopped at once where it must not.
        "reasoning_budget": 0 if thinking is False and model.thinking_switch is None else None,
        "most_tokens": options.num_ctx or None,
    }


def _text(body: AnsweredRequest, model: ServedModel, form: Constraint | None, prompt: str | Sequence[int]) -> TextAsked:
    options = body.options or OllamaOptions()
    params = options.sampling(model.default_params, num_logprobs(body))
    return TextAsked(prompt, params, form, most_tokens=options.num_ctx or None)


def _thinking(body: AnsweredRequest, model: ServedModel) -> tuple[bool | None, dict[str, Any]]:
    """Whether to reason, and variables of the template that say how hard: a level is only that where the template knows any."""
    if body.think and not thinks(model.format, model.thinking_switch):
        raise unsupported("think", f"the model {model.id!r} does not support thinking")
    if not isinstance(body.think, str):
        return body.think, {}
    if not model.template_reads("reasoning_effort"):
        return True, {}
    assert model.chat_template is not None
    knows_max = re.search("""['"]max['"]""", model.chat_template.source) is not None
    return True, {"reasoning_effort": "high" if body.think == "max" and not knows_max else body.think}


def _conversation(given: Sequence[OllamaMessage]) -> tuple[list[ChatMessage], list[str]]:
    """In OpenAI's form; and where the images stand in the request."""
    messages: list[ChatMessage] = []
    paths: list[str] = []
    waiting: list[tuple[str, str]] = []  # ids and names of calls without a result
    for place, message in enumerate(given):
        images = message.get("images") or ()
        paths += [f"messages[{place}].images[{index}]" for index in range(len(images))]
        plain: ChatMessage = {
            "role": message["role"].lower(),
            "content": _content(message.get("content") or "", images),
        }
        if thinking := message.get("thinking"):
            plain["reasoning_content"] = thinking
        if calls := message.get("tool_calls"):
            called = [_call(call, f"call_{place}_{index}") for index, call in enumerate(calls)]
            plain["tool_calls"] = called
            waiting = [(call["id"], call["function"]["name"]) for call in called]
        if plain["role"] == "tool":
            plain |= _answered(message, waiting)
        messages.append(plain)
    return messages, paths


def _call(call: Mapping[str, Any], call_id: str) -> ChatMessage:
    function = call["function"]
    arguments = function.get("arguments") or {}
    return {"id": call.get("id") or call_id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _answered(result: OllamaMessage, waiting: list[tuple[str, str]]) -> ChatMessage:
    """Which call a result is of. It is taken out of those that wait."""
    call_id, name = result.get("tool_call_id"), result.get("tool_name")
    for each in waiting:
        if each[0] == call_id or (not call_id and name in (None, "", each[1])):
            waiting.remove(each)
            return {"tool_call_id": each[0], "name": each[1]}
    said = {"tool_call_id": call_id, "name": name}
    return {key: value for key, value in said.items() if value}


def _content(text: str, images: Sequence[str]) -> str | list[ChatMessage]:
    if not images:
        return text
    parts: list[ChatMessage] = [{"type": "image_url", "image_url": {"url": image}} for image in images]
    return [*parts, {"type": "text", "text": text}] if text else parts
