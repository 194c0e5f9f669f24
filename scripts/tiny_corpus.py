"""The corpus of the bundled model `tiny`: documents made by a seeded grammar, in the format of its chat template.

A document is a row of segments (text, loss weight). It depends on nothing but (seed, split, index), so the corpus has
no files and no end. A document belongs to the held-out split by a hash of its text, which makes the splits disjoint by
construction. The border: this module knows nothing about tokens or training; see `train_tiny.py`.

    python scripts/tiny_corpus.py            # prints a few documents
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from random import Random
from typing import Any, Literal, NamedTuple

import tiny_chat as chats
import tiny_stories as stories
import tiny_tools as tools
import tiny_words as w

Split = Literal["train", "held_out"]
Message = dict[str, Any]

HELD_OUT_ONE_IN = 40
CONTEXT_WEIGHT = 0.25  # what the user and the system say is context; learning to predict it costs capacity
ANSWER_WEIGHT = 1.0
THINKING_RATE = 0.4
Mixture = dict[str, float]
KINDS: Mixture = {"story": 0.20, "plain": 0.04, "chat": 0.50, "tools": 0.26}

UNITS = ("celsius", "fahrenheit")

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"


class Segment(NamedTuple):
    """A stretch of text. `skip_first`: its first token is not learnt, as an earlier answer has lost its thoughts."""

    text: str
    weight: float
    skip_first: bool = False


@dataclass(frozen=True)
class Document:
    """One document; for chats also the messages and tools that the segments render."""

    kind: str
    segments: tuple[Segment, ...]
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    thinking: bool = False

    @property
    def text(self) -> str:
        """The whole document."""
        return "".join(segment.text for segment in self.segments)


def documents(split: Split, seed: int, start: int = 0, mixture: Mixture = KINDS) -> Iterator[Document]:
    """The documents of a split from an index on, without end. Equal arguments give equal documents."""
    for index in count(start):
        document = make(Random(f"{split}/{seed}/{index}"), mixture)
        if is_held_out(document.text) == (split == "held_out"):
            yield document


def is_held_out(text: str) -> bool:
    """Whether a document with this text belongs to the held-out split."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


def make(r: Random, mixture: Mixture = KINDS) -> Document:
    """One document of a random kind."""
    kind = r.choices(list(mixture), list(mixture.values()))[0]
    if kind == "story":
        return story_document(r)
    if kind == "plain":
        return Document("plain", (Segment(chats.plain_text(r) + END_OF_TEXT, ANSWER_WEIGHT),))
    return chat_document(r) if kind == "chat" else tool_document(r)


def story_document(r: Random) -> Document:
    """A bare story, as a base model would continue it."""
    text = stories.tell(r).text
    return Document("story", (Segment(text + END_OF_TEXT, ANSWER_WEIGHT),))


def system_message(r: Random) -> tuple[Message | None, str]:
    """Perhaps a system message, and the name that the assistant goes by under it."""
    x = r.random()
    if x < 0.5:
        return None, chats.MODEL_NAME
    if x < 0.8:
        text = r.choice(("You are a helpful assistant.", "You are a kind and helpful assistant.", "Be short and clear.",
                         "You are a helpful assistant. Answer briefly.", "You answer in simple words.",
                         f"You are {chats.MODEL_NAME}, a small language model."))  # fmt: skip
        return {"role": "system", "content": text}, chats.MODEL_NAME
    name = r.choice((*w.PET_NAMES, chats.name_of(r)))
    text = r.choice(
        ("You are {}, a helpful assistant.", "Your name is {}.", "You are {}.", "You are a robot named {}.")
    )
    return {"role": "system", "content": text.format(name)}, name


def chat_document(r: Random) -> Document:
    """A chat without tools, or with tools that are not needed."""
    system, me = system_message(r)
    tool_list: list[dict[str, Any]] = []
    if r.random() < 0.08:
        turns = [chats.Turn(*tools.without_tool(r))]
    else:
        turns = chats.chat(r, me)
        short = sum(len(turn.user) + len(turn.answer) for turn in turns) < 300
        if short and r.random() < 0.12:
            tool_list = tools.toolbox(r, None, 2)
    messages = [system] if system else []
    for turn in turns:
        messages.append({"role": "user", "content": turn.user})
        messages.append({"role": "assistant", "content": turn.answer, "reasoning_content": turn.think})
    return conversation("chat", messages, tool_list, r.random() < THINKING_RATE)


def tool_document(r: Random) -> Document:
    """A request, the call, what the tool returned and the answer; sometimes cut after the call or followed by more."""
    needed = tools.request(r)
    system, me = system_message(r)
    tool_list = tools.toolbox(r, needed)
    messages = [system] if system else []
    if r.random() < 0.15:
        turn = r.choice((chats.greeting, chats.who_are_you, chats.facts, chats.sums))(r, me)[0]
        messages += [
            {"role": "user", "content": turn.user},
            {"role": "assistant", "content": turn.answer, "reasoning_content": turn.think},
        ]
    messages += tool_messages(r, needed)
    if needed.follow_up and r.random() < 0.12:
        messages[-4:] = two_calls(needed, needed.follow_up(r))
    elif r.random() < 0.25:
        messages = messages[: -2 if messages[-2]["role"] == "tool" else None]
    elif needed.follow_up and r.random() < 0.3:
        messages += tool_messages(r, needed.follow_up(r))
    elif r.random() < 0.15:
        messages += [
            {"role": "user", "content": "Thank you!"},
            {"role": "assistant", "content": "You are welcome!", "reasoning_content": "The user says thank you."},
        ]
    return conversation("tools", messages, tool_list, r.random() < THINKING_RATE)


def tool_messages(r: Random, needed: tools.Request) -> list[Message]:
    """The four messages around one call."""
    said = ", ".join(f"{key} {value}" for key, value in needed.call.items())
    think = f"I use the tool {needed.name}" + (f" with {said}." if said else ".")
    result = needed.result if isinstance(needed.result, str) else json.dumps(needed.result)
    call = {"type": "function", "function": {"name": needed.name, "arguments": needed.call}}
    return [
        {"role": "user", "content": needed.user},
        {"role": "assistant", "content": "", "reasoning_content": think, "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": needed.answer, "reasoning_content": "The tool has answered. I tell the user."},
    ]


def two_calls(one: tools.Request, two: tools.Request) -> list[Message]:
    """Two calls in one turn, two results and one answer: the weather in A and B."""
    (first,), (second,) = ([v for v in x.call.values() if v not in UNITS] for x in (one, two))
    calls = [{"type": "function", "function": {"name": x.name, "arguments": x.call}} for x in (one, two)]
    results = [x.result if isinstance(x.result, str) else json.dumps(x.result) for x in (one, two)]
    question = one.user.replace(first, f"{first} and {second}")
    if any(unit in one.call.values() for unit in UNITS):
        calls[1]["function"] = {"name": two.name, "arguments": {**one.call, **two.call}}
    think = f"I use the tool {one.name} twice, for {first} and for {second}."
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "reasoning_content": think, "tool_calls": calls},
        *({"role": "tool", "content": result} for result in results),
        {"role": "assistant", "content": f"{one.answer} {two.answer}", "reasoning_content": "Both results are there."},
    ]


def conversation(kind: str, messages: list[Message], tool_list: list[dict[str, Any]], thinking: bool) -> Document:
    """A chat as a document: earlier answers without thoughts, the last with its own or with an empty block."""
    segments = render(messages, tool_list, thinking)
    return Document(kind, tuple(segments), tuple(messages), tuple(tool_list), thinking)


TOOLS_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


def render(messages: list[Message], tool_list: list[dict[str, Any]], thinking: bool) -> list[Segment]:
    """What the chat template makes of the messages, cut into segments with their loss weights.

    The last message is the answer to be learnt; it follows the generation prompt, which holds an empty think block when
    thinking is off. Answers after the last question keep their thoughts when thinking is on, as the template has it.
    """
    rest = list(messages)
    head = ""
    system = rest.pop(0)["content"] if rest[0]["role"] == "system" else ""
    if tool_list:
        listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tool_list)
        system = (system + "\n\n" if system else "") + TOOLS_BEFORE + listed + TOOLS_AFTER
    if system:
        head = f"{TURN_START}system\n{system}{TURN_END}\n"
    last_question = max(i for i, message in enumerate(rest) if message["role"] == "user")
    segments: list[Segment] = []
    context = head
    for i, message in enumerate(rest):
        if message["role"] == "user":
            context += f"{TURN_START}user\n{message['content']}{TURN_END}\n"
        elif message["role"] == "tool":
            context += "" if rest[i - 1]["role"] == "tool" else f"{TURN_START}user"
            context += f"\n<tool_response>\n{message['content']}\n</tool_response>"
            context += "" if rest[i + 1]["role"] == "tool" else f"{TURN_END}\n"
        else:
            context += f"{TURN_START}assistant\n"
            said = spoken(message) + TURN_END
            bare = True
            if i > last_question and thinking:
                said = f"<think>\n{message['reasoning_content']}\n</think>\n\n{said}"
                bare = False
            elif i == len(rest) - 1:
                context += "<think>\n\n</think>\n\n"
                bare = False
            segments += [Segment(context, CONTEXT_WEIGHT), Segment(said, ANSWER_WEIGHT, skip_first=bare)]
            context = "\n"
    segments.append(Segment(context, CONTEXT_WEIGHT))
    return segments


def spoken(message: Message) -> str:
    """The text of an assistant's message with its tool calls."""
    calls = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls", ())
    ]
    return "\n".join(([message["content"]] if message["content"] else []) + calls)


if __name__ == "__main__":
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    for shown in islice(documents("train", seed=0), number):
        print(f"----- {shown.kind}\n{shown.text}")
