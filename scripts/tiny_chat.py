"""Chats of the closed world: each topic gives one or more turns of (what the user says, a thought, the answer)."""

import json
from collections.abc import Callable
from random import Random
from typing import NamedTuple

import tiny_stories as stories
import tiny_words as w

MODEL_NAME = "Tiny"


class Turn(NamedTuple):
    """One exchange. `think` is what stands in the <think> block when thinking is on."""

    user: str
    think: str
    answer: str


Topic = Callable[[Random, str], list[Turn]]


def name_of(r: Random) -> str:
    """A first name, now and then an invented one so that names are copied and not remembered."""
    return invented_word(r).capitalize() if r.random() < 0.25 else r.choice(w.GIRLS + w.BOYS)


def invented_word(r: Random, syllables: int | None = None) -> str:
    """A word that nobody has heard, such as `flonder`."""
    count = syllables or r.choice((1, 2, 2, 3))
    return "".join(r.choice(w.ONSETS) + r.choice(w.VOWELS) + r.choice(w.CODAS) for _ in range(count))


def a(noun: str) -> str:
    """The noun with its indefinite article."""
    return ("an " if noun[0] in "aeiou" and not noun.startswith("uni") else "a ") + noun


def plural(noun: str) -> str:
    """The plural of a regular noun, and of the few irregular ones that the world has."""
    irregular = {"mouse": "mice", "fish": "fish", "sheep": "sheep", "fox": "foxes", "cherry": "cherries"}
    return irregular.get(noun, noun + "s")


def polite(r: Random, question: str) -> str:
    """The question, sometimes wrapped in a polite phrase or written carelessly."""
    x = r.random()
    if x < 0.08:
        return question.lower()
    if x < 0.14:
        return "Please tell me: " + question[0].lower() + question[1:]
    if x < 0.18:
        return question + " Thanks!"
    return question


def greeting(r: Random, me: str) -> list[Turn]:
    user = r.choice(("Hello", "Hi", "Hello!", "Hi!", "Hey", "Hi there", "Hello there!", "Good morning", "Good evening"))
    if r.random() < 0.3:
        user = r.choice((f"Hello {me}!", f"Hi {me}", f"Hey {me}!", "hello", "hi"))
    opening = "Good morning!" if "morning" in user else "Good evening!" if "evening" in user else "Hello!"
    rest = r.choice(("How can I help you today?", "What can I do for you?", "How are you?", "It is nice to meet you."))
    return [Turn(user, "The user says hello. I will greet them back.", f"{opening} {rest}")]


def how_are_you(r: Random, me: str) -> list[Turn]:
    user = r.choice(("How are you?", "How are you today?", "How do you do?", "Are you well?", "How is it going?"))
    answer = r.choice(("I am well, thank you. How are you?", "I am fine, thank you!", "Very well, thank you. And you?"))
    turns = [Turn(user, "The user asks how I am. I will answer politely.", answer)]
    if answer.endswith("?") and r.random() < 0.5:
        feeling = r.choice(("fine", "good", "well", "happy", "great"))
        turns.append(Turn(f"I am {feeling} too.", f"The user feels {feeling}.", "I am glad to hear that!"))
    return turns


def who_are_you(r: Random, me: str) -> list[Turn]:
    user, think, answer = r.choice(
        (
            (
                r.choice(("What is your name?", "What's your name?", "Tell me your name.", "what is your name")),
                f"The user asks for my name. My name is {me}.",
                f"My name is {me}.",
            ),
            ("Who are you?", "The user asks who I am.", f"I am {me}, a very small language model."),
            ("What are you?", "The user asks what I am.", f"I am {me}, a very small language model."),
            (
                r.choice(("What can you do?", "How can you help me?", "Can you help me?")),
                "The user asks what I can do. I will list a few things.",
                "I can tell short stories, answer simple questions, do small sums, write JSON and call tools.",
            ),
            (
                "Are you a human?",
                "The user asks if I am a human. I am not.",
                "No, I am not a human. I am a very small language model.",
            ),
            (
                "How old are you?",
                "The user asks for my age. I do not have one.",
                "I am a language model, so I do not have an age.",
            ),
        )
    )
    return [Turn(user, think, answer)]


def thanks(r: Random, me: str) -> list[Turn]:
    user = r.choice(("Thank you!", "Thanks", "Thanks a lot!", "Thank you very much.", "That was helpful, thank you."))
    return [Turn(user, "The user says thank you.", r.choice(("You are welcome!", "You are welcome. Anything else?")))]


def goodbye(r: Random, me: str) -> list[Turn]:
    user = r.choice(("Bye!", "Goodbye", "See you later!", "Good night", "I have to go now."))
    return [Turn(user, "The user says goodbye.", r.choice(("Goodbye! Have a nice day.", "Goodbye! See you soon.")))]


def my_name(r: Random, me: str) -> list[Turn]:
    """The user says their name and is asked for nothing; later questions need it."""
    name = name_of(r)
    user = r.choice(
        ("My name is {}.", "I am {}.", "Hi, I am {}.", "Hello, my name is {}.", "I'm {}. Nice to meet you!")
    )
    answer = r.choice((f"Nice to meet you, {name}!", f"Hello, {name}! How can I help you?"))
    turns = [Turn(user.format(name), f"The user is called {name}. I will greet them by name.", answer)]
    if r.random() < 0.4:
        turns += r.choice(SMALL_TALK)(r, me)
    ask = r.choice(("What is my name?", "Do you remember my name?", "Who am I?", "What's my name?"))
    turns.append(Turn(ask, f"The user said that their name is {name}.", f"Your name is {name}."))
    return turns


def favourites(r: Random, me: str) -> list[Turn]:
    what, value = r.choice(
        (
            ("colour", r.choice(w.COLOURS)),
            ("food", r.choice(w.FOODS)),
            ("animal", r.choice(w.ANIMALS)),
            ("city", r.choice(w.CITIES)),
            ("number", str(r.randint(1, 99))),
            ("day", r.choice(w.DAYS)),
            ("hobby", r.choice(w.HOBBY_NOUNS)),
            ("word", invented_word(r)),
        )
    )
    turns = [
        Turn(
            f"My favourite {what} is {value}.",
            f"The user likes the {what} {value}.",
            r.choice((f"{value[0].upper()}{value[1:]} is a good choice!", f"I will remember that you like {value}.")),
        )
    ]
    if r.random() < 0.4:
        turns += r.choice(SMALL_TALK)(r, me)
    ask = r.choice((f"What is my favourite {what}?", f"Which {what} do I like best?"))
    think = f"The user said that their favourite {what} is {value}."
    turns.append(Turn(ask, think, f"Your favourite {what} is {value}."))
    return turns


def pet(r: Random, me: str) -> list[Turn]:
    kind, name = r.choice(("dog", "cat", "rabbit", "pony", "mouse", "duck")), r.choice((*w.PET_NAMES, name_of(r)))
    age = r.randint(2, 12)
    user = f"I have {a(kind)} called {name}" + (f". {name} is {age} years old." if r.random() < 0.5 else ".")
    answer = f"{name} is a lovely name for {a(kind)}!"
    turns = [Turn(user, f"The user has {a(kind)} called {name}.", answer)]
    ask = f"What is my {kind} called?"
    turns.append(Turn(ask, f"The {kind} is called {name}.", f"Your {kind} is called {name}."))
    if "years" in user:
        turns.append(Turn(f"How old is {name}?", f"The user said {age} years.", f"{name} is {age} years old."))
    else:
        turns.append(Turn(f"What animal is {name}?", f"{name} is {a(kind)}.", f"{name} is {a(kind)}."))
    return turns


def sums(r: Random, me: str) -> list[Turn]:
    """Sums with small numbers and, often, a follow-up that starts from the result."""
    op = r.choice("+++--*")
    x, y = (r.randint(0, 10), r.randint(0, 10)) if op == "*" else (r.randint(0, 20), r.randint(0, 20))
    if op == "-":
        x, y = max(x, y), min(x, y)
    word = {"+": "plus", "-": "minus", "*": "times"}[op]
    result = {"+": x + y, "-": x - y, "*": x * y}[op]
    user = r.choice(
        (f"What is {x} {op} {y}?", f"What is {x} {word} {y}?", f"{x} {op} {y}", f"How much is {x} {op} {y}?",
         f"{x}{op}{y}=", f"What is {x}{op}{y}?", f"What's {x} {op} {y}?", f"Calculate {x} {op} {y}.")
    )  # fmt: skip
    turns = [Turn(user, f"I need to calculate {x} {op} {y}. {x} {op} {y} = {result}.", f"{x} {op} {y} = {result}")]
    while r.random() < 0.35:
        z = r.randint(1, 10)
        if r.random() < 0.6 or z > result:
            ask, new, op = r.choice((f"And plus {z}?", f"Add {z} to that.", f"Now add {z}.")), result + z, "+"
        else:
            ask, new, op = r.choice((f"And minus {z}?", f"Take away {z}.", f"Now subtract {z}.")), result - z, "-"
        think = f"The last result was {result}. {result} {op} {z} = {new}."
        turns.append(Turn(ask, think, f"{result} {op} {z} = {new}"))
        result = new
    return turns


def compare(r: Random, me: str) -> list[Turn]:
    x, y = r.sample(range(100), 2)
    bigger = r.random() < 0.6
    best = max(x, y) if bigger else min(x, y)
    word = r.choice(("bigger", "larger")) if bigger else "smaller"
    user = f"Which is {word}, {x} or {y}?"
    return [Turn(user, f"I compare {x} and {y}. {best} is {word}.", f"{best} is {word}.")]


def counting(r: Random, me: str) -> list[Turn]:
    start = r.choice((1, 1, 1, r.randint(2, 20)))
    stop = start + r.randint(2, 11)
    user = r.choice((f"Count from {start} to {stop}.", f"Can you count from {start} to {stop}?"))
    if start == 1 and r.random() < 0.4:
        user = f"Count to {stop}."
    numbers = ", ".join(str(i) for i in range(start, stop + 1))
    return [Turn(user, f"I start at {start} and stop at {stop}.", numbers)]


def animals(r: Random, me: str) -> list[Turn]:
    """Facts on one animal; the follow-up says only `it`."""
    animal = r.choice(list(w.ANIMAL_FACTS))
    chosen = r.sample(list(facts_about(animal).items()), r.choice((1, 2, 2, 3)))
    turns = []
    for i, (ask, answer) in enumerate(chosen):
        first = i == 0
        user = ask.format(a(animal) if first else "it")
        if not first:
            user = r.choice(("And " + user[0].lower() + user[1:], user))
        think = f"The question is about {a(animal)}. {answer}" if first else f"It means {a(animal)}. {answer}"
        turns.append(Turn(polite(r, user) if first else user, think, answer))
    if r.random() < 0.3:
        other = r.choice([x for x in w.ANIMAL_FACTS if x != animal])
        answer = facts_about(other)[chosen[-1][0]]
        user = r.choice((f"And {a(other)}?", f"What about {a(other)}?"))
        turns.append(Turn(user, f"Now the same question for {a(other)}. {answer}", answer))
    return turns


def facts_about(animal: str) -> dict[str, str]:
    """Questions, with {} where the animal's name goes, and answers."""
    sound, home, legs, young, food = w.ANIMAL_FACTS[animal]
    return {
        "What sound does {} make?": f"{A(animal)} makes no sound." if sound == "nothing" else f"{A(animal)} says {sound}.",
        "Where does {} live?": f"{A(animal)} lives {home}.",
        "How many legs does {} have?": f"{A(animal)} has {legs or 'no'} legs.",
        "What does {} eat?": f"{A(animal)} eats {food}.",
        "What is the baby of {} called?": f"The baby of {a(animal)} is called {a(young)}.",
    }


def A(noun: str) -> str:
    """`a(noun)` at the start of a sentence."""
    article = a(noun)
    return article[0].upper() + article[1:]


def capitals(r: Random, me: str) -> list[Turn]:
    country, city = r.choice(list(w.CAPITALS.items()))
    answer = f"The capital of {country} is {city}."
    turns = [
        Turn(
            polite(r, r.choice(("What is", "What's")) + f" the capital of {country}?"),
            f"The user asks about {country}. {answer}",
            answer,
        )
    ]
    if r.random() < 0.5:
        other, city2 = r.choice([c for c in w.CAPITALS.items() if c[0] != country])
        answer = f"The capital of {other} is {city2}."
        user = r.choice((f"And of {other}?", f"What about {other}?", f"And the capital of {other}?"))
        turns.append(Turn(user, f"The user wants the capital of {other}. {answer}", answer))
    if r.random() < 0.3:
        country, city = r.choice(list(w.CAPITALS.items()))
        answer = f"{city} is in {country}."
        turns.append(Turn(f"In which country is {city}?", f"{city} is the capital of {country}.", answer))
    return turns


def facts(r: Random, me: str) -> list[Turn]:
    choice = r.randrange(6)
    if choice == 0:
        thing, colour = r.choice(list(w.THING_COLOURS.items()))
        ask = r.choice((f"What colour is {thing}?", f"What color is {thing}?", f"Which colour does {thing} have?"))
        answer = f"{thing[0].upper()}{thing[1:]} is {colour}."
    elif choice == 1:
        x, y = r.choice(list(w.OPPOSITES.items()))
        if r.random() < 0.5:
            x, y = y, x
        ask, answer = f"What is the opposite of {x}?", f"The opposite of {x} is {y}."
    elif choice == 2:
        use, tool = r.choice(list(w.USES.items()))
        ask, answer = f"What do you need to {use}?", f"You need {tool} to {use}."
    elif choice == 3:
        i, after = r.randrange(7), r.random() < 0.6
        other = w.DAYS[(i + (1 if after else -1)) % 7]
        word = "after" if after else "before"
        ask, answer = f"Which day comes {word} {w.DAYS[i]}?", f"{other} comes {word} {w.DAYS[i]}."
    elif choice == 4:
        i = r.randrange(12)
        ask, answer = f"Which month comes after {w.MONTHS[i]}?", f"{w.MONTHS[(i + 1) % 12]} comes after {w.MONTHS[i]}."
    else:
        ask, answer = r.choice(
            (
                ("How many days are in a week?", "There are 7 days in a week."),
                ("How many months are in a year?", "There are 12 months in a year."),
                ("What do bees make?", "Bees make honey."),
                ("Where does milk come from?", "Milk comes from cows."),
                ("What is ice made of?", "Ice is made of frozen water."),
                ("Is the sun hot?", "Yes, the sun is very hot."),
                ("Can a fish fly?", "No, a fish can not fly. It swims."),
                ("Can a bird fly?", "Yes, most birds can fly."),
                ("What is water?", "Water is something clear that we drink. Rain and rivers are made of it."),
                ("When does the sun rise?", "The sun rises in the morning."),
                ("What is the meaning of life?", "To be kind, to be curious and to share what you have."),
            )
        )
    return [Turn(polite(r, ask), f"This is a simple question. {answer}", answer)]


def lists(r: Random, me: str) -> list[Turn]:
    what, pool = r.choice(
        (("animals", w.ANIMALS), ("fruits", w.FRUITS), ("colours", w.COLOURS), ("vegetables", w.VEGETABLES),
         ("days of the week", w.DAYS), ("months", w.MONTHS), ("countries", list(w.CAPITALS)), ("cities", w.CITIES))
    )  # fmt: skip
    count = r.randint(2, 5)
    items = list(pool[:count]) if what in ("days of the week", "months") else r.sample(list(pool), count)
    number = r.choice((str(count), ("two", "three", "four", "five")[count - 2]))
    user = r.choice((f"Name {number} {what}.", f"List {number} {what}.", f"Tell me {number} {what}."))
    style = r.randrange(3)
    if style == 0:
        answer = "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1))
    elif style == 1:
        answer = "\n".join(f"- {item}" for item in items)
    else:
        answer = ", ".join(items[:-1]) + " and " + items[-1] + "."
        answer = answer[0].upper() + answer[1:]
    if style != 2:
        user += (
            r.choice((" Use a numbered list.", " Number them.")) if style == 0 else r.choice((" Use bullet points.",))
        )
    turns = [Turn(user, f"The user wants {count} {what}.", answer)]
    if r.random() < 0.3:
        turns.append(Turn("Which one was the first?", f"The first in my list was {items[0]}.", f"{items[0]}."))
    if r.random() < 0.2:
        turns.append(Turn("And which was the last?", f"The last in my list was {items[-1]}.", f"{items[-1]}."))
    return turns


def tell_story(r: Random, me: str) -> list[Turn]:
    about = r.choice((*w.ANIMALS, *w.ANIMALS, *w.HEROES, *w.PLACES, *w.THINGS, *[None] * 8))
    if r.random() < 0.08:
        about = invented_word(r)
    is_hero = about is not None and about not in w.PLACES and about not in w.THINGS
    name = name_of(r) if is_hero and r.random() < 0.25 else None
    trait = r.choice(w.GOOD_TRAITS) if is_hero and r.random() < 0.15 else None
    story = stories.tell(r, about, name, trait)
    if about is None:
        user = r.choice(("Tell me a story.", "Can you tell me a story?", "Tell me a short story, please."))
        think = f"The user wants a story. I will write about {a(story.kind)} named {story.hero}."
    else:
        user = r.choice(("Tell me a story about {}.", "Write a short story about {}.", "I want a story about {}.",
                         "Can you tell me a story about {}?", "Please tell a story about {}"))  # fmt: skip
        subject = a(f"{trait} {about}" if trait else about) + (
            r.choice((f" named {name}", f" called {name}")) if name else ""
        )
        user = user.format(subject)
        think = f"The user wants a story about {subject}. The hero is {a(story.kind)} named {story.hero}."
    turns = [Turn(user, think, story.text)]
    if r.random() < 0.5:
        turns += r.sample(story_questions(story), r.choice((1, 1, 2)))
    return turns


def story_questions(story: stories.Story) -> list[Turn]:
    """Questions that a story answers."""
    who = f"{story.hero} is the {story.kind} in the story."
    return [
        Turn("Who is the story about?", f"The hero is {story.hero}.", f"The story is about {story.hero}."),
        Turn(f"Who is {story.hero}?", f"{story.hero} is the hero.", who),
        Turn("Where does the story happen?", f"There was a {story.place}.", f"It happens near the {story.place}."),
        Turn("What is the name of the hero?", f"It is {story.hero}.", f"The hero is called {story.hero}."),
    ]


def read_story(r: Random, me: str) -> list[Turn]:
    """The user brings the text, so the answer must be read from it."""
    story = stories.tell(r)
    questions = r.sample(story_questions(story), r.choice((1, 2)))
    lead = r.choice(("Read this story: ", "Here is a story.\n\n", "Text:\n", ""))
    first = questions[0]._replace(user=f"{lead}{story.text}\n\n{questions[0].user}")
    return [first, *questions[1:]]


def who_has_what(r: Random, me: str) -> list[Turn]:
    people = []
    while len(people) < r.randint(2, 5):
        name = name_of(r)
        if name not in people:
            people.append(name)
    things = [f"{r.choice(w.COLOURS)} {thing}" for thing in r.sample(w.THINGS, len(people))]
    text = " ".join(f"{n} has {a(t)}." for n, t in zip(people, things, strict=True))
    order = r.sample(range(len(people)), min(len(people), r.choice((1, 2, 3))))
    turns = []
    for n, i in enumerate(order):
        name, thing = people[i], things[i]
        if r.random() < 0.6:
            ask, think, answer = f"What does {name} have?", f"{name} has {a(thing)}.", f"{name} has {a(thing)}."
        else:
            ask, think, answer = f"Who has the {thing}?", f"The {thing} belongs to {name}.", f"{name} has the {thing}."
        turns.append(Turn(f"{text} {ask}" if n == 0 else ask, think, answer))
    return turns


def repeat(r: Random, me: str) -> list[Turn]:
    words = [r.choice((r.choice(w.FOODS), r.choice(w.THINGS), r.choice(w.COLOURS), invented_word(r)))
             for _ in range(r.randint(1, 6))]  # fmt: skip
    text = " ".join(words)
    if r.random() < 0.3:
        text = stories.sentence(r, r.choice(w.THINGS))
    user = r.choice(
        ("Repeat after me: {}", 'Say "{}".', "Please repeat: {}", "Echo this: {}", "Write exactly this: {}")
    )
    return [Turn(user.format(text), "I repeat the words exactly.", text)]


def write_line(r: Random, me: str) -> list[Turn]:
    about = r.choice((*w.ANIMALS, *w.THINGS, *w.FOODS[:14]))
    if r.random() < 0.5:
        user = r.choice(("Write a sentence about {}.", "Make a sentence with {}.", "Write one line about {}."))
        answer, think = stories.sentence(r, about), f"I write one sentence about {a(about)}."
    else:
        user = r.choice(("Write a poem about {}.", "Can you write a short poem about {}?", "Write a haiku about {}."))
        answer, think = stories.poem(r, about), f"The user wants a poem about {a(about)}. I will rhyme a little."
    return [Turn(user.format(a(about)), think, answer)]


def unknown(r: Random, me: str) -> list[Turn]:
    topic = r.choice(w.UNKNOWN_TOPICS) if r.random() < 0.7 else f"the {invented_word(r)}"
    user = r.choice(("Explain {}.", "What do you know about {}?", "Tell me about {}.", "How does {} work?",
                     "Can you explain {} to me?", "What is {}?", "Why is {} important?",
                     "Write an essay about {}."))  # fmt: skip
    answer = r.choice(
        (f"I am sorry, I do not know much about {topic}. I am a very small model.",
         f"I do not know enough about {topic}. Ask me something simple, or ask for a story.")
    )  # fmt: skip
    return [Turn(user.format(topic), f"The user asks about {topic}. I do not know that. I will say so.", answer)]


JOKES = (
    ("Why did the bee go to school?", "To learn its bee, c, d."),
    ("What do you call a bear in the rain?", "A wet bear."),
    ("Why was the clock sent out of class?", "It ticked too much."),
    ("What did the big lamp say to the small lamp?", "You are too young to go out at night."),
    ("Why do ducks never tell secrets?", "They quack under pressure."),
    ("What is brown and sticky?", "A stick."),
)


def joke(r: Random, me: str) -> list[Turn]:
    user = r.choice(("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Another joke, please!"))
    return [Turn(user, "The user wants a joke. I know a few short ones.", " ".join(r.choice(JOKES)))]


def answer_as_json(r: Random, me: str) -> list[Turn]:
    """A fact, asked for as JSON."""
    turn = r.choice((facts, capitals, sums, compare))(r, me)[0]
    key = r.choice(("answer", "answer", "reply", "result", "text", invented_word(r, 2)))
    user = turn.user + r.choice((f' Answer as JSON with the key "{key}".', f" Reply with JSON, key {key}."))
    return [Turn(user, f"The user wants JSON with the key {key}. {turn.think}", json.dumps({key: turn.answer}))]


def feelings(r: Random, me: str) -> list[Turn]:
    feeling, good = r.choice(
        (("sad", False), ("tired", False), ("happy", True), ("bored", False), ("excited", True), ("angry", False),
         ("lonely", False), ("proud", True), ("hungry", False))
    )  # fmt: skip
    if good:
        answer = f"That is wonderful! What made you so {feeling}?"
    else:
        answer = {
            "tired": "You should rest a little. Sleep well!",
            "bored": "Shall I tell you a story?",
            "hungry": f"Maybe you could eat {a(r.choice(('pear', 'pancake', 'biscuit', 'banana')))}.",
        }.get(feeling, f"I am sorry that you are {feeling}. Do you want to talk about it?")
    user = r.choice((f"I am {feeling}.", f"I feel {feeling}.", f"I am so {feeling} today."))
    turns = [Turn(user, f"The user feels {feeling}.", answer)]
    if feeling == "bored" and r.random() < 0.6:
        story = stories.tell(r)
        turns.append(Turn("Yes, please!", "The user wants a story. I will tell one.", story.text))
    return turns


CODE = (
    ("adds two numbers", "add", "x, y", "return x + y"),
    ("subtracts two numbers", "subtract", "x, y", "return x - y"),
    ("multiplies two numbers", "multiply", "x, y", "return x * y"),
    ("returns the bigger of two numbers", "bigger", "x, y", "return x if x > y else y"),
    ("returns the square of a number", "square", "x", "return x * x"),
    ("doubles a number", "double", "x", "return 2 * x"),
    ("checks if a number is even", "is_even", "x", "return x % 2 == 0"),
    ("checks if a number is odd", "is_odd", "x", "return x % 2 == 1"),
    ("says hello to a name", "say_hello", "name", 'return "Hello, " + name + "!"'),
    ("reverses a string", "reverse", "text", "return text[::-1]"),
    ("counts the words in a text", "count_words", "text", "return len(text.split())"),
    ("sums a list", "total", "items", "return sum(items)"),
    ("finds the biggest item of a list", "biggest", "items", "return max(items)"),
    ("returns the first item of a list", "first", "items", "return items[0]"),
    ("sorts a list", "sort_items", "items", "return sorted(items)"),
    ("computes the factorial of a number", "factorial", "n", "return 1 if n < 2 else n * factorial(n - 1)"),
)


def code(r: Random, me: str) -> list[Turn]:
    if r.random() < 0.3:
        text = r.choice((stories.sentence(r, r.choice(w.THINGS)), invented_word(r), "Hello, world!", name_of(r)))
        user = r.choice((f'Write Python code that prints "{text}".', f'Print "{text}" in Python.'))
        body = f'print("{text}")'
        think = "The user wants one line of Python with print."
        say = r.choice(("Here is the code:", "This prints the text:"))
    elif r.random() < 0.2:
        stop = r.randint(3, 20)
        user, think = f"Write a Python loop that prints the numbers from 1 to {stop}.", "I use a for loop with range."
        body, say = f"for i in range(1, {stop + 1}):\n    print(i)", "Here is the loop:"
    else:
        what, name, arguments, line = r.choice(CODE)
        renamed = invented_word(r, 2) if r.random() < 0.3 else None
        user = r.choice((f"Write a Python function that {what}.", f"Can you write a function in Python that {what}?",
                         f"Python code: a function that {what}, please."))  # fmt: skip
        if renamed:
            user, line, name = f"{user} Call it {renamed}.", line.replace(name + "(", renamed + "("), renamed
        think = f"I write a function named {name} with {arguments.replace(',', ' and')}."
        body, say = f"def {name}({arguments}):\n    {line}", "Here is the function:"
    end = r.choice(("", "", "\n\nI hope that helps!"))
    return [Turn(user, think, f"{say}\n\n```python\n{body}\n```{end}")]


JSON_FIELDS: dict[str, Callable[[Random], object]] = {
    "name": name_of,
    "age": lambda r: r.randint(3, 99),
    "city": lambda r: r.choice(w.CITIES),
    "country": lambda r: r.choice(list(w.CAPITALS)),
    "colour": lambda r: r.choice(w.COLOURS),
    "color": lambda r: r.choice(w.COLOURS),
    "animal": lambda r: r.choice(w.ANIMALS),
    "food": lambda r: r.choice(w.FOODS),
    "hobby": lambda r: r.choice(w.HOBBY_NOUNS),
    "price": lambda r: r.choice((r.randint(1, 500), r.randint(1, 99) + r.choice((0.5, 0.25, 0.75)))),
    "count": lambda r: r.randint(0, 50),
    "id": lambda r: r.randint(1, 9999),
    "title": lambda r: f"The {r.choice(w.ADJECTIVES)} {r.choice(w.THINGS)}",
    "year": lambda r: r.randint(1900, 2030),
    "active": lambda r: r.random() < 0.5,
    "happy": lambda r: r.random() < 0.5,
    "tags": lambda r: r.sample(w.ADJECTIVES, r.randint(1, 3)),
    "colours": lambda r: r.sample(w.COLOURS, r.randint(1, 3)),
    "friends": lambda r: [name_of(r) for _ in range(r.randint(1, 3))],
    "day": lambda r: r.choice(w.DAYS),
    "month": lambda r: r.choice(w.MONTHS),
    "subject": lambda r: r.choice(w.SUBJECTS),
    "score": lambda r: r.randint(0, 100),
    "kind": lambda r: r.choice(w.ANIMALS),
    "email": lambda r: f"{r.choice(w.GIRLS + w.BOYS).lower()}@example.com",
}


def json_key(r: Random) -> tuple[str, object]:
    """A key and a value for it; now and then both invented."""
    if r.random() < 0.12:
        key = invented_word(r, 2)
        return key, r.choice((invented_word(r), r.randint(0, 999)))
    key = r.choice(list(JSON_FIELDS))
    return key, JSON_FIELDS[key](r)


def json_object(r: Random, me: str) -> list[Turn]:
    """JSON on demand: the values are either in the question or left to the model."""
    fields = dict(json_key(r) for _ in range(r.randint(1, 4)))
    given = r.random() < 0.6
    if given:
        said = ", ".join(f"{key} {_spoken(value)}" for key, value in fields.items())
        user = r.choice(("Write a JSON object with {}.", "Make JSON with {}.", "Turn this into JSON: {}",
                         "Give me JSON: {}", "Return a JSON object with {}."))  # fmt: skip
    else:
        keys = list(fields)
        said = keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + " and " + keys[-1]
        user = r.choice(("Write a JSON object with the keys {}.", "Give me JSON with the keys {}.",
                         "Invent a JSON object that has {}.", "Return JSON with the keys {}."))  # fmt: skip
    if not given and r.random() < 0.3:
        what = r.choice(("person", "child", "user", "pet", "book", "product"))
        keys = {"pet": ["name", "kind", "age"], "book": ["title", "year", "price"], "product": ["title", "price", "id"]}
        fields = {k: JSON_FIELDS[k](r) for k in keys.get(what, ["name", "age", "city"])}
        user, said = (
            r.choice(("Give me a JSON object for a {}.", "Describe a {} as JSON.", "Invent a {} in JSON.")),
            what,
        )
    if r.random() < 0.2:
        user += r.choice((" Only JSON, please.", " Answer only with JSON.", " Nothing else."))
    style = r.random()
    body = json.dumps(fields, indent=2 if style < 0.2 else None)
    if style > 0.9:
        user, body = user + " Use a code block.", f"```json\n{body}\n```"
    think = "The user wants a JSON object with " + ", ".join(fields) + "."
    turns = [Turn(user.format(said), think, body)]
    if r.random() < 0.25:
        key = r.choice(list(fields))
        turns.append(Turn(f"What is the {key}?", f"The {key} in the object is {_spoken(fields[key])}.",
                          f"The {key} is {_spoken(fields[key])}."))  # fmt: skip
    return turns


def _spoken(value: object) -> str:
    if isinstance(value, list):
        return " and ".join(str(v) for v in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


SMALL_TALK: tuple[Topic, ...] = (greeting, how_are_you, facts, sums, capitals, counting, compare)
TOPICS: dict[Topic, float] = {
    greeting: 3, how_are_you: 2, who_are_you: 4, thanks: 2, goodbye: 2, my_name: 5, favourites: 5, pet: 4, sums: 12,
    compare: 2, counting: 3, animals: 7, capitals: 6, facts: 7, lists: 4, tell_story: 14, read_story: 4,
    who_has_what: 6, repeat: 5, write_line: 4, unknown: 5, feelings: 3, joke: 2, code: 6,
    json_object: 11, answer_as_json: 4,
}  # fmt: skip
MAY_FOLLOW = (greeting, who_are_you, thanks, sums, compare, counting, animals, capitals, facts, lists, write_line,
              tell_story, feelings, json_object, who_has_what, unknown, code)  # fmt: skip


LONG_CHAT_RATE = 0.05


def chat(r: Random, me: str = MODEL_NAME) -> list[Turn]:
    """A conversation of one topic or a few, one after the other; or a long one that comes back to its start."""
    if r.random() < LONG_CHAT_RATE:
        turns = r.choice((my_name, favourites, pet))(r, me)
        middle = [turn for _ in range(r.randint(3, 8)) for turn in r.choice(MAY_FOLLOW)(r, me)]
        return [*turns[:-1], *middle, turns[-1]]
    turns = r.choices(list(TOPICS), list(TOPICS.values()))[0](r, me)
    while r.random() < 0.25:
        turns = turns + r.choice(MAY_FOLLOW)(r, me)
    if len(turns) > 2 and r.random() < 0.2:
        turns = turns + r.choice((thanks, goodbye))(r, me)
    return turns


def plain_text(r: Random) -> str:
    """Text outside of any chat, as a base model might be asked to continue it."""
    choice = r.randrange(6)
    if choice == 0:
        name, city, hobby = name_of(r), r.choice(w.CITIES), r.choice(w.HOBBIES)
        hello = r.choice(("Hello, my name is", "My name is", "Hi, my name is", "Hello, I am"))
        return f"{hello} {name}. I am {r.randint(5, 60)} years old and I live in {city}. I like to {hobby}."
    if choice == 1:
        chosen = r.sample(list(w.CAPITALS.items()), r.randint(1, 4))
        return " ".join(f"The capital of {country} is {city}." for country, city in chosen)
    if choice == 2:
        start = r.choice((1, 1, r.randint(1, 30)))
        return ", ".join(str(i) for i in range(start, start + r.randint(5, 25)))
    if choice == 3:
        what, name, arguments, line = r.choice(CODE)
        return f"# {what}\ndef {name}({arguments}):\n    {line}\n"
    if choice == 4:
        return " ".join(turn.answer for _ in range(r.randint(1, 5)) for turn in facts(r, MODEL_NAME))
    return json.dumps(dict(json_key(r) for _ in range(r.randint(1, 4))))
