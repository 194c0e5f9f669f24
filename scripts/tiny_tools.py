"""Tool use for the bundled model: tools with schemas, requests that need one, and answers from what the tool returned.

Two kinds of tools: real ones with natural requests, and invented ones, whose names, arguments and values the model can
only copy. A share of the invented names never occurs in training (`is_held_out`), so that copying can be tested.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import tiny_words as w
from tiny_chat import invented_word, name_of

HELD_OUT_SHARE = 12  # one name of twelve


@dataclass(frozen=True)
class Argument:
    """A parameter of a tool: its JSON type and, perhaps, a description and allowed values."""

    name: str
    type: str = "string"
    description: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """A tool, a user's message that needs it, the arguments to call it with, its result and the answer from that."""

    name: str
    description: str
    arguments: tuple[Argument, ...]
    required: tuple[str, ...]
    user: str
    call: dict[str, Any]
    result: Any
    answer: str
    follow_up: Callable[[Random], "Request"] | None = None

    def schema(self, r: Random) -> dict[str, Any]:
        """The tool as an OpenAI function; descriptions of the parameters are often left out."""
        terse = r.random() < 0.5
        properties: dict[str, Any] = {}
        for argument in self.arguments:
            entry: dict[str, Any] = {"type": argument.type}
            if argument.description and not terse:
                entry["description"] = argument.description
            if argument.choices:
                entry["enum"] = list(argument.choices)
            properties[argument.name] = entry
        parameters: dict[str, Any] = {"type": "object", "properties": properties}
        if self.required and r.random() < 0.85:
            parameters["required"] = list(self.required)
        function: dict[str, Any] = {"name": self.name}
        if r.random() < 0.95:
            function["description"] = self.description
        function["parameters"] = parameters
        return {"type": "function", "function": function}


def is_held_out(name: str) -> bool:
    """Whether an invented tool of this name is kept out of training."""
    return zlib.crc32(name.encode()) % HELD_OUT_SHARE == 0


def weather(r: Random) -> Request:
    """The weather somewhere, the tool that everybody tries first."""
    city = r.choice((*w.CITIES, *w.CITIES, *w.CITIES, invented_word(r).capitalize()))
    name = r.choice(("get_weather", "get_weather", "get_current_weather", "weather", "weather_lookup"))
    key = r.choice(("city", "city", "location", "place"))
    unit = r.choice(("celsius", "fahrenheit")) if r.random() < 0.3 else None
    ask_unit = unit is not None and r.random() < 0.7
    call: dict[str, Any] = {key: city}
    user = r.choice((f"What is the weather in {city}?", f"What's the weather like in {city}?", f"Weather in {city}?",
                     f"How is the weather in {city} today?", f"Tell me the weather in {city}.",
                     f"Is it raining in {city}?", f"How warm is it in {city}?"))  # fmt: skip
    if ask_unit:
        user += f" Use {unit}."
        call["unit"] = unit
    condition = r.choice(("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear"))
    degrees = r.randint(-10, 38)
    style = r.randrange(4)
    result: Any
    if style == 0:
        result, answer = (
            {"temperature": degrees, "condition": condition},
            f"It is {condition} and {degrees} degrees in {city}.",
        )
    elif style == 1:
        result, answer = {key: city, "temperature": degrees}, f"It is {degrees} degrees in {city}."
    elif style == 2:
        result, answer = {"weather": condition, "temp": degrees}, f"It is {condition} and {degrees} degrees in {city}."
    else:
        result, answer = f"{condition}, {degrees} degrees", f"It is {condition} and {degrees} degrees in {city}."
    arguments = [Argument(key, description=r.choice(("The city", "Name of the city", "The name of the place")))]
    if unit:
        arguments.append(Argument("unit", choices=("celsius", "fahrenheit")))
    description = r.choice(("Get the weather for a city", "Get the current weather", "Look up the weather of a place."))
    return Request(name, description, tuple(arguments), (key,), user, call, result, answer, weather_like(name, key))


def weather_like(name: str, key: str) -> Callable[[Random], Request]:
    """A second request for the same tool that says only the new city."""

    def again(r: Random) -> Request:
        city, degrees = r.choice(w.CITIES), r.randint(-10, 38)
        user = r.choice((f"And in {city}?", f"What about {city}?"))
        return Request(name, "", (), (), user, {key: city}, {"temperature": degrees, "condition": "cloudy"},
                       f"It is cloudy and {degrees} degrees in {city}.")  # fmt: skip

    return again


def clock(r: Random) -> Request:
    city, time = r.choice(w.CITIES), f"{r.randint(0, 23):02d}:{r.randint(0, 59):02d}"
    key = r.choice(("city", "timezone", "location"))
    user = r.choice((f"What time is it in {city}?", f"Tell me the time in {city}.", f"How late is it in {city}?"))
    return Request(r.choice(("get_time", "current_time", "get_current_time")), "Get the current time in a city",
                   (Argument(key, description="The city"),), (key,), user, {key: city}, {"time": time},
                   f"It is {time} in {city}.")  # fmt: skip


def arithmetic(r: Random) -> Request:
    x, y = r.randint(10, 999), r.randint(10, 999)
    name, word, sign, total = r.choice(
        (("add", "plus", "+", x + y), ("multiply", "times", "*", x * y), ("subtract", "minus", "-", x - y))
    )
    if r.random() < 0.4:
        key = r.choice(("expression", "formula"))
        user = r.choice((f"What is {x} {sign} {y}?", f"Please calculate {x} {sign} {y}."))
        return Request(r.choice(("calculator", "calculate", "evaluate")), "Calculate the value of an expression",
                       (Argument(key),), (key,), user, {key: f"{x} {sign} {y}"}, {"result": total},
                       f"{x} {sign} {y} = {total}")  # fmt: skip
    first, second = r.choice((("a", "b"), ("x", "y"), ("left", "right"), ("first", "second")))
    user = r.choice((f"What is {x} {word} {y}?", f"Calculate {x} {sign} {y} with the tool.", f"{x} {sign} {y}?"))
    title = name.capitalize()
    return Request(name, f"{title} two numbers", (Argument(first, "number"), Argument(second, "number")),
                   (first, second), user, {first: x, second: y}, r.choice((total, {"result": total})),
                   f"{x} {sign} {y} = {total}")  # fmt: skip


def search(r: Random) -> Request:
    topic = r.choice((*w.UNKNOWN_TOPICS, *w.HOBBY_NOUNS, f"the {r.choice(w.ADJECTIVES)} {r.choice(w.THINGS)}",
                      f"{r.choice(w.FOODS)} recipes", invented_word(r)))  # fmt: skip
    user = r.choice((f"Search for {topic}.", f"Look up {topic}.", f"Find something about {topic}.",
                     f"Search the web for {topic}."))  # fmt: skip
    key, title = r.choice(("query", "query", "q", "text", "topic")), f"A short guide to {topic}"
    return Request(r.choice(("search", "web_search", "search_web", "lookup", "find_pages")), "Search the web",
                   (Argument(key, description="What to search for"),), (key,), user, {key: topic},
                   {"results": [{"title": title}]}, f'I found "{title}".')  # fmt: skip


def message(r: Random) -> Request:
    to, text = name_of(r), r.choice((
        "I will be late", "See you at {}".format(r.choice(("noon", "home", "the park"))), "Happy birthday",
        f"Please buy {r.choice(w.FOODS)}", f"The {r.choice(w.THINGS)} is ready", "Good night", "Call me back",
        f"I found the {r.choice(w.COLOURS)} {r.choice(w.THINGS)}",
    ))  # fmt: skip
    who, what = r.choice((("to", "text"), ("recipient", "message"), ("name", "body"), ("to", "message")))
    user = r.choice((f'Send a message to {to}: "{text}"', f"Tell {to}: {text}", f'Write to {to} that "{text}".',
                     f'Send {to} the message "{text}".'))  # fmt: skip
    return Request(r.choice(("send_message", "send_text", "send_email", "notify")), "Send a message to a person",
                   (Argument(who, description="Who gets it"), Argument(what, description="What to say")), (who, what),
                   user, {who: to, what: text}, {"status": "sent"}, f"I sent the message to {to}.")  # fmt: skip


def timer(r: Random) -> Request:
    count = r.randint(1, 90)
    unit = r.choice(("minutes", "seconds", "hours"))
    user = r.choice((f"Set a timer for {count} {unit}.", f"Wake me up in {count} {unit}.", f"Timer: {count} {unit}"))
    return Request(r.choice(("set_timer", "start_timer")), "Start a timer", (Argument(unit, "integer"),), (unit,), user,
                   {unit: count}, {"status": "started"}, f"The timer is set for {count} {unit}.")  # fmt: skip


def music(r: Random) -> Request:
    song = r.choice((f"The {r.choice(w.ADJECTIVES)} {r.choice(w.THINGS)}",
                     f"{r.choice(w.COLOURS)} {r.choice(w.PLACES)}",
                     f"Dance of the {r.choice(w.ANIMALS)}"))  # fmt: skip
    key = r.choice(("song", "title", "name"))
    user = r.choice((f'Play "{song}".', f"Play the song {song}.", f'I want to hear "{song}".'))
    return Request(r.choice(("play_song", "play_music")), "Play a song", (Argument(key),), (key,), user, {key: song},
                   {"playing": song}, f'Now playing "{song}".')  # fmt: skip


def light(r: Random) -> Request:
    room, state = r.choice(w.words("kitchen bedroom bathroom garden hall office garage")), r.choice(("on", "off"))
    user = r.choice((f"Turn {state} the light in the {room}.", f"Switch the {room} light {state}.",
                     f"Please turn the light in the {room} {state}."))  # fmt: skip
    return Request(r.choice(("set_light", "switch_light", "turn_light")), "Turn a light on or off",
                   (Argument("room"), Argument("state", choices=("on", "off"))), ("room", "state"), user,
                   {"room": room, "state": state}, {"ok": True}, f"The light in the {room} is {state}.")  # fmt: skip


def translate(r: Random) -> Request:
    word, language = r.choice((*w.FOODS, *w.THINGS, *w.ANIMALS)), r.choice(w.words("French Spanish German Italian"))
    result = invented_word(r)
    user = r.choice((f'Translate "{word}" into {language}.', f'How do you say "{word}" in {language}?'))
    key = r.choice(("language", "target", "to"))
    return Request(r.choice(("translate", "translate_text")), "Translate a text", (Argument("text"), Argument(key)),
                   ("text", key), user, {"text": word, key: language}, {"translation": result},
                   f'"{word}" in {language} is "{result}".')  # fmt: skip


def price(r: Random) -> Request:
    item, cost = r.choice((*w.THINGS, *w.FOODS)), r.randint(1, 200)
    key = r.choice(("item", "product", "name"))
    user = r.choice((f"How much does the {item} cost?", f"What is the price of the {item}?", f"Price of {item}?"))
    return Request(r.choice(("get_price", "price_lookup", "find_price")), "Get the price of a product",
                   (Argument(key),), (key,), user, {key: item}, {"price": cost},
                   f"The {item} costs {cost}.")  # fmt: skip


def table(r: Random) -> Request:
    people, day = r.randint(2, 9), r.choice(w.DAYS)
    place = r.choice((f"The {r.choice(w.ADJECTIVES)} {r.choice(w.FOODS)}", name_of(r)))
    user = r.choice(
        (f"Book a table for {people} at {place} on {day}.", f"Reserve a table at {place} for {people} on {day}.")
    )
    return Request(r.choice(("book_table", "reserve_table")), "Book a table in a restaurant",
                   (Argument("restaurant"), Argument("people", "integer"), Argument("day")),
                   ("restaurant", "people", "day"),
                   user, {"restaurant": place, "people": people, "day": day}, {"booking": r.randint(100, 999)},
                   f"The table for {people} at {place} is booked for {day}.")  # fmt: skip


def no_arguments(r: Random) -> Request:
    """Tools that take nothing."""
    number, day = r.randint(1, 6), r.choice(w.DAYS)
    return r.choice(
        (
            Request("roll_dice", "Roll a dice", (), (), r.choice(("Roll a dice.", "Throw the dice for me.")), {},
                    {"value": number}, f"You rolled a {number}."),
            Request("get_date", "Get today's date", (), (), r.choice(("What day is it?", "What day is today?")), {},
                    {"day": day}, f"Today is {day}."),
            Request("flip_coin", "Flip a coin", (), (), r.choice(("Flip a coin.", "Heads or tails?")), {},
                    {"side": "heads"}, "It is heads."),
        )
    )  # fmt: skip


VERBS = w.words(
    "get find open close start stop make send read write check move clean paint count save load buy sell show "
    "hide update delete create list rename fetch book order cancel print share lock"
)
NOUNS = w.words(
    "file room door order note user ticket car song photo task team card report event page box robot plant table "
    "train account letter window game list invoice folder camera menu"
)
KEYS = w.words(
    "name id title color size count date city user path key value label level speed amount text code day target "
    "owner topic number status weight"
)


def invented(r: Random) -> Request:
    """A tool that has to be read to be used: names, keys and values are drawn independently."""
    while True:
        made_up = r.random() < 0.35
        verb = r.choice(VERBS)
        noun = invented_word(r, 2) if made_up else r.choice(NOUNS)
        name = r.choice(
            (f"{verb}_{noun}", f"{verb}_{noun}", f"{noun}_{verb}", f"{verb}{noun.capitalize()}", f"{verb}_the_{noun}")
        )
        if not is_held_out(name):
            return invented_named(r, name, verb, noun)


def held_out(r: Random) -> Request:
    """A tool whose name never occurs in training."""
    while True:
        verb, noun = r.choice(VERBS), r.choice((r.choice(NOUNS), invented_word(r, 2)))
        name = f"{verb}_{noun}"
        if is_held_out(name):
            return invented_named(r, name, verb, noun)


def invented_named(r: Random, name: str, verb: str, noun: str) -> Request:
    keys = r.sample(KEYS, r.choice((1, 1, 2, 2, 3)))
    if r.random() < 0.2:
        keys[0] = invented_word(r, 2)
    if r.random() < 0.15:
        keys[-1] = f"{noun}_{r.choice(KEYS)}"
    arguments, call, said = [], {}, []
    for key in keys:
        value: Any
        kind = r.random()
        if kind < 0.3:
            value, type_ = r.choice((r.randint(0, 20), r.randint(0, 9999))), "integer"
        elif kind < 0.4:
            value, type_ = r.choice((invented_word(r), invented_word(r) + str(r.randint(1, 99)))), "string"
        elif kind < 0.5:
            value, type_ = f"{invented_word(r)}.{r.choice(('txt', 'md', 'json', 'py'))}", "string"
        elif kind < 0.65:
            value, type_ = f"{r.choice(w.COLOURS)} {r.choice(w.THINGS)}", "string"
        elif kind < 0.75:
            value, type_ = r.choice((w.DAYS, w.MONTHS, w.CITIES))[r.randrange(7)], "string"
        else:
            value, type_ = (
                r.choice((r.choice(w.COLOURS), r.choice(w.FOODS), name_of(r), r.choice(w.ADJECTIVES))),
                "string",
            )
        arguments.append(Argument(key, type_, f"The {key.replace('_', ' ')} of the {noun}"))
        call[key] = value
        spoken = key.replace("_", " ")
        said.append(r.choice((f"{spoken} {value}", f"{spoken} {value}", f"{spoken} = {value}", f'{spoken} "{value}"')))
    if r.random() < 0.3:
        r.shuffle(said)
    listed = said[0] if len(said) == 1 else ", ".join(said[:-1]) + " and " + said[-1]
    user = r.choice((f"Please {verb} the {noun} with {listed}.", f"{verb.capitalize()} the {noun} with {listed}.",
                     f"I want to {verb} the {noun}: {listed}", f"Can you {verb} {noun} with {listed}?",
                     f"Use {name} with {listed}.", f"Call {name} with {listed}."))  # fmt: skip
    result, answer = outcome(r, verb, noun)
    description = r.choice((f"{verb.capitalize()} the {noun}", f"{verb.capitalize()} a {noun} by its {keys[0]}"))
    required = tuple(keys)
    return Request(name, description, tuple(arguments), required, user, call, result, answer)


def outcome(r: Random, verb: str, noun: str) -> tuple[Any, str]:
    """What an invented tool returns, and the answer that says so."""
    style = r.randrange(5)
    number = r.randint(1, 9999)
    if style == 0:
        return {"status": "ok", "id": number}, f"Done. The status is ok and the id is {number}."
    if style == 1:
        key, value = r.choice(KEYS), r.choice((number, r.choice(w.COLOURS), invented_word(r)))
        return {key: value}, f"Done. The {key} is {value}."
    if style == 2:
        problem = r.choice(("not found", "no access", "busy", "too slow"))
        return {"error": problem}, f"I am sorry, that did not work: {problem}."
    if style == 3:
        word = r.choice((invented_word(r), r.choice(w.THINGS)))
        return word, f"The result is {word}."
    return {"ok": True}, f"Done. I could {verb} the {noun}."


REAL: tuple[Callable[[Random], Request], ...] = (
    weather, weather, weather, clock, arithmetic, arithmetic, search, message, timer, music, light, translate, price,
    table, no_arguments,
)  # fmt: skip


def request(r: Random) -> Request:
    """A request that needs a tool, natural or invented."""
    return r.choice(REAL)(r) if r.random() < 0.5 else invented(r)


def toolbox(r: Random, needed: Request | None, most: int = 4) -> list[dict[str, Any]]:
    """Tool schemas as given in a system turn: the needed one and some others, in any order."""
    chosen = [needed] if needed else []
    for _ in range(r.choices(range(most), (5, 4, 1.5, 0.5)[:most])[0] + (0 if needed else 1)):
        other = request(r)
        if needed and other.description == needed.description:
            continue
        if all(other.name != tool.name for tool in chosen):
            chosen.append(other)
    r.shuffle(chosen)
    return [tool.schema(r) for tool in chosen]


def without_tool(r: Random) -> tuple[str, str, str]:
    """A request that would need a tool which is not there: (user, thought, answer)."""
    if r.random() < 0.3:
        return (
            r.choice(("Open the window.", "Turn on the light.", "Call my mother.", f"Buy {r.choice(w.FOODS)}.")),
            "I can not do that. I have no tool for it.",
            "I am sorry, I can not do that. I have no tool for it.",
        )
    wanted = r.choice((weather, clock, price, search, timer, message, music))(r)
    return (
        wanted.user,
        "I would need a tool for that, but I have none that fits.",
        "I am sorry, I can not do that. I have no tool for it.",
    )
