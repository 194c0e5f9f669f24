"""Short stories for the bundled model: a plot is a row of beats, a beat a handful of sentences to choose from.

A story keeps its facts (who, where, what) in one `Story`, so that questions about it have known answers.
"""

import re
from dataclasses import dataclass
from random import Random

import tiny_words as w


@dataclass(frozen=True)
class Story:
    """A finished story and the facts in it."""

    text: str
    hero: str
    kind: str
    friend: str
    place: str
    thing: str
    trait: str


OPENINGS = (
    "Once upon a time, there was {a_small} {kind} named {hero}. {He} lived near a {place}.",
    "Once upon a time, {a_small} {kind} named {hero} lived by the {place}.",
    "Once upon a time, in a {calm} {place}, there lived {a_small} {kind} called {hero}.",
    "Once upon a time there was a {kind} called {hero}, and {he} lived close to a {calm} {place}.",
    "Once upon a time, a {trait} {kind} named {hero} had a home near the {place}.",
    "Once upon a time, not far from a {calm} {place}, lived a {trait} {kind}. {His} name was {hero}.",
    "There was once {a_small} {kind} named {hero}, who lived near a {place}.",
    "{hero} was {a_small} {kind} who lived beside a {calm} {place}.",
    "Long ago, {a_small} {kind} called {hero} lived near the {place}.",
    "One {season} morning, {a_small} {kind} named {hero} woke up in {his} house by the {place}.",
)
HABITS = (
    "{He} was very {trait}, and {he} loved to {hobby}.",
    "Every day {he} liked to {hobby} with {his} family.",
    "{hero} loved to {hobby}, even when it was raining.",
    "{He} liked to {hobby} more than anything else.",
    "Everyone knew {hero} because {he} was so {trait}.",
    "{He} was {trait}, but sometimes a little {weak}.",
    "In the evening {he} would {hobby} until the stars came out.",
)
PLOTS = {
    "lost": (
        (
            "{hero} had a {colour} {thing} that {he} took everywhere.",
            "{His} favourite thing in the world was a {colour} {thing}.",
            "{His} grandmother had given {him} a {colour} {thing}, and {he} kept it safe.",
        ),
        (
            "One day, the {thing} was gone.",
            "But one {season} day {he} could not find the {thing} anywhere.",
            "One morning {he} looked for the {thing}, but it was not there.",
        ),
        (
            "{hero} felt very sad and began to cry.",
            '"Oh no, where is my {thing}?" said {hero}.',
            "{He} looked under the bed, behind the door and in the kitchen, but {he} found nothing.",
            '"I must have lost it near the {place}," thought {hero}.',
        ),
        (
            "{friend} the {friend_kind} heard {him} and came to help.",
            "Then {he} met {friend}, a {friend_kind} with a warm smile.",
            '"Do not worry," said {friend} the {friend_kind}. "We will look for it together."',
        ),
        (
            "They searched all afternoon, step by step.",
            "They looked behind every stone and under every leaf.",
            "They walked back the way {hero} had come and looked very carefully.",
        ),
        (
            "At last they saw something {colour} in the grass. It was the {thing}!",
            'Suddenly {friend} called, "Look, there it is!" The {thing} was under an old tree.',
            "In the end they found the {thing} beside the path, wet but not broken.",
        ),
        (
            '"Thank you," said {hero}, and {he} hugged {friend}.',
            "{hero} was so happy that {he} danced all the way home.",
            "{hero} shared a {food} with {friend} to say thank you.",
        ),
    ),
    "friend": (
        (
            "But {hero} had nobody to play with, and {he} often felt lonely.",
            "{hero} had many toys, but {he} did not have a friend.",
            "Most days {he} played alone with {his} {colour} {thing}.",
        ),
        (
            "One day a {friend_kind} named {friend} moved into the house next door.",
            "One {season} day {he} saw a {friend_kind} sitting alone by the {place}. "
            "The {friend_kind} was called {friend}.",
            "One afternoon {he} heard someone singing. It was a {friend_kind} called {friend}.",
        ),
        (
            "{hero} wanted to say hello, but {he} was too shy.",
            "{hero} hid behind a tree and watched for a while.",
            "{hero} took a deep breath and walked over.",
        ),
        (
            '"Hello, I am {hero}," {he} said at last. "Do you want to play?"',
            '"Would you like to see my {thing}?" asked {hero} in a small voice.',
            'Then {friend} smiled and said, "I like your {thing}. May I try it?"',
        ),
        (
            '"Yes, please!" said {friend}.',
            '"I would love to," said {friend}, and {hero} felt warm inside.',
            "{friend} nodded, and they both laughed.",
        ),
        (
            "They played with the {thing} until the sun went down.",
            "Together they ran around the {place} and ate {a_food}.",
            "They built a little house of sticks and stones near the {place}.",
        ),
        (
            "From that day on, {hero} was never lonely again.",
            "After that, {hero} and {friend} met every day.",
            "{hero} learned that one small hello can start a big friendship.",
        ),
    ),
    "fear": (
        (
            "But {hero} was afraid of {fear}.",
            "There was only one problem. {hero} was scared of {fear}.",
            "Nobody knew that {hero} was frightened of {fear}.",
        ),
        (
            "One {season} evening, {friend} the {friend_kind} got lost near the {place}.",
            "One day {his} friend {friend} the {friend_kind} did not come home.",
            "One night {he} heard {friend} the {friend_kind} calling for help from the {place}.",
        ),
        (
            '"I am too scared to go," thought {hero}.',
            "{hero} shook from head to toe.",
            "{hero} wanted to hide under {his} blanket.",
        ),
        (
            "But {friend} needed {him}, so {hero} picked up {his} {thing} and went out.",
            "Then {he} held {his} {colour} {thing} tightly and took one small step, and then another.",
            '"A friend needs me," {he} said. {He} took {his} {thing} and began to walk.',
        ),
        (
            "The way was long, but {hero} did not stop.",
            "{He} sang a little song to keep {his} heart strong.",
            "With every step {he} felt a little less afraid.",
        ),
        (
            "At last {he} found {friend} behind a big rock and led {him_f} home.",
            "There was {friend}, cold but safe. They walked home side by side.",
            '"You came for me!" cried {friend}. "You are so brave!"',
        ),
        (
            "That night {hero} was not afraid any more.",
            "{hero} smiled. Being brave means going on even when you are scared.",
            "From then on, {fear} did not seem so bad to {hero}.",
        ),
    ),
    "share": (
        (
            "One day {hero} baked a big {food}.",
            "One {season} day {his} mother gave {him} a large {food}.",
            "One morning {hero} found a basket with a huge {food} in it.",
        ),
        (
            '"This is all for me," said {hero}.',
            "It smelled so good that {hero} wanted to eat it all alone.",
            "{hero} hid it behind the {thing} so that nobody would see it.",
        ),
        (
            "Just then {friend} the {friend_kind} came by. {He_f} looked tired and hungry.",
            "Then {friend}, a thin little {friend_kind}, knocked on the door.",
            "On the road {he} met {friend}, a {friend_kind} who had not eaten all day.",
        ),
        (
            '"May I have a small piece?" asked {friend}.',
            '"I am so hungry," said {friend} softly.',
            "{friend} did not say a word, but {his_f} tummy made a loud noise.",
        ),
        (
            "{hero} thought for a moment and looked at the {food}.",
            "At first {hero} wanted to say no. Then {he} felt sorry.",
            "{hero} remembered a day when {he} had been hungry too.",
        ),
        (
            "So {he} cut the {food} into two parts and gave one to {friend}.",
            '"Come in and eat with me," said {hero}, and they shared the {food}.',
            "{He} gave {friend} the bigger half.",
        ),
        (
            "It tasted better than anything {he} had ever eaten alone.",
            'The next day {friend} came back with a {colour} {thing}. "This is for you," {he_f} said.',
            "{hero} learned that good things grow when you share them.",
        ),
    ),
    "build": (
        (
            "One day {hero} had a big idea. {He} wanted to build a {project}.",
            '"I will make a {project}," said {hero} one {season} morning.',
            "{hero} dreamed of having {his} own {project}.",
        ),
        (
            "{He} found some wood, a rope and an old {thing}.",
            "{He} put everything {he} needed next to the {place}: wood, nails and a {colour} {thing}.",
            "First {he} drew a plan with a {colour} pencil.",
        ),
        (
            "But the {project} fell down with a loud crash.",
            "{He} worked all day, but in the evening it broke into pieces.",
            "It was harder than {he} had thought, and {he} wanted to give up.",
        ),
        (
            '"Do not give up," said {friend} the {friend_kind}. "Let me help you."',
            "Then {friend} the {friend_kind} came by and looked at it. "
            '"You need to make the bottom stronger," {he_f} said.',
            '"We can try again," said {friend}, a {friend_kind} who lived nearby.',
        ),
        (
            "They worked together, and each day the {project} grew.",
            "{hero} held the wood and {friend} tied the rope.",
            "This time they went slowly and checked every part.",
        ),
        (
            "After three days the {project} was ready.",
            "At last it stood strong and straight.",
            "When the last piece was in place, they both cheered.",
        ),
        (
            "All their friends came to see it, and {hero} was very proud.",
            "They painted it {colour} and ate {a_food} to celebrate.",
            "{hero} knew that {he} could never have done it alone.",
        ),
    ),
    "storm": (
        (
            "One {season} day dark clouds came over the {place}.",
            "One night a big storm came. The wind blew hard and the rain fell fast.",
            "One afternoon the sky turned black, and thunder rolled over the {place}.",
        ),
        (
            "{hero} ran to {his} house and shut the door.",
            "{hero} sat by the window with {his} {colour} {thing} and listened.",
            "{hero} was glad to be warm and dry at home.",
        ),
        (
            "Then {he} heard a knock. It was {friend} the {friend_kind}, wet from head to toe.",
            'Suddenly a small voice called, "Help!" It was {friend} the {friend_kind}.',
            "Outside {he} saw {friend}, a {friend_kind} who had no place to go.",
        ),
        (
            '"Come in, quickly!" said {hero}.',
            "{hero} opened the door wide and pulled {him_f} inside.",
            '"My house is small, but there is room for you," said {hero}.',
        ),
        (
            "{He} gave {friend} a towel and some hot soup.",
            "They sat by the fire and ate {a_food}.",
            "{He} put a soft blanket around {friend} and lit the lamp.",
        ),
        (
            "All night they told each other stories while the wind howled.",
            "They played games until the thunder was far away.",
            "They sang songs, and soon the storm did not seem so loud.",
        ),
        (
            "In the morning the sun was shining, and they were best friends.",
            "When the sun came back, a rainbow stood over the {place}.",
            'The next day {friend} said, "You saved me. I will never forget it."',
        ),
    ),
    "garden": (
        (
            "One {season} day {hero} found a strange little seed.",
            "One day an old woman gave {hero} a tiny {colour} seed.",
            "{hero} dug a hole near the {place} and put a seed in it.",
        ),
        (
            "{He} planted it and gave it water every morning.",
            '"Grow, little seed," {he} whispered, and {he} gave it some water.',
            "{He} put a {thing} next to it, so that {he} would find the place again.",
        ),
        (
            "Days went by, but nothing happened.",
            "{He} waited and waited, but {he} saw only brown earth.",
            "A week passed, and still there was nothing to see.",
        ),
        (
            '"It will never grow," said {hero}.',
            "{hero} became sad and almost stopped coming.",
            '"Be patient," said {friend} the {friend_kind}. "Good things take time."',
        ),
        (
            "Then one morning there was a small green leaf.",
            "But after the next rain, something green came out of the ground.",
            "On the tenth day a tiny plant looked up at the sun.",
        ),
        (
            "It grew and grew until it was a tall tree full of {food_plural}.",
            "Soon it was as tall as {hero}, with {colour} flowers on top.",
            "By the end of the year it was the most beautiful plant near the {place}.",
        ),
        (
            "{hero} called all {his} friends, and everyone got {a_food}.",
            "{hero} was proud, and {he} planted ten more seeds.",
            "{hero} learned that it is good to wait and to care.",
        ),
    ),
    "surprise": (
        (
            "It was the birthday of {friend} the {friend_kind}, and {hero} wanted to make a surprise.",
            "{hero} knew that {friend} the {friend_kind} felt sad, so {he} made a plan.",
            '"Tomorrow {friend} the {friend_kind} will be one year older," thought {hero}. "I need a present!"',
        ),
        (
            "{He} wanted to give {him_f} a {colour} {thing}, but {he} had no money.",
            "In the shop {he} saw a {colour} {thing}. It was perfect, but it cost too much.",
            "{He} looked everywhere for a good present.",
        ),
        (
            "So {hero} worked hard for the baker all week.",
            "So {he} helped the farmer carry water for three days.",
            "So {he} made the {thing} alone, out of wood and paper.",
        ),
        (
            "On the way to the party, {hero} fell and the {thing} broke.",
            "{He} put it into a box and tied it with a ribbon.",
            "At last {he} had the {thing}, and {he} ran to the {place}.",
        ),
        (
            '"I have something for you," said {hero}. {His} heart beat fast.',
            "Everyone hid behind the trees and waited.",
            "When {friend} came home, all the lights were off.",
        ),
        (
            '"Surprise!" they all shouted.',
            "{friend} opened the box and began to smile.",
            '"Is this really for me?" asked {friend}.',
        ),
        (
            '"It is the best day of my life," said {friend}, and {he_f} hugged {hero}.',
            "They ate {a_food} and danced until it was late.",
            '"The {thing} is lovely," said {friend}, "but the best present is a friend like you."',
        ),
    ),
    "treasure": (
        (
            "One day {hero} found an old map inside a {colour} {thing}.",
            "One {season} day a map fell out of an old book that {hero} was reading.",
            'One morning {hero} got a letter. It said, "Look for the treasure by the {place}."',
        ),
        (
            '"Look, {friend}!" said {hero}. {friend} was a {friend_kind} and loved adventures.',
            "{He} showed it to {friend} the {friend_kind}, and they packed some bread and water.",
            "{He} asked {friend} the {friend_kind} to come along.",
        ),
        (
            "They crossed a bridge and climbed over a wall.",
            "They walked past the {place} and through the tall grass.",
            "They followed the path until their feet hurt.",
        ),
        (
            "Then the path ended at a deep hole.",
            "Suddenly they heard a strange noise, and {friend} jumped.",
            'On the way they met an old snail. "Go left at the big stone," said the snail.',
        ),
        (
            '"We can do it if we help each other," said {hero}.',
            '"Hold my hand," said {friend}, and they went on.',
            "{hero} was tired, but {he} wanted to know what was there.",
        ),
        (
            "Under the big stone they found a box. Inside was a {colour} {thing}.",
            "They dug and dug until they found a small box full of {food_plural}.",
            "At the end of the path there was a door, and behind it a room full of books.",
        ),
        (
            '"This is the best treasure," they said, and they shared it with everyone.',
            "They carried it home and told the story to all their friends.",
            '"The best part was walking with you," said {hero}.',
        ),
    ),
    "lie": (
        (
            "One day {hero} broke the {colour} {thing} of {friend} the {friend_kind}.",
            "One {season} day {hero} played with the {thing} of {friend} the {friend_kind}, "
            "and it fell into the water.",
            "One afternoon {hero} took a {thing} from {friend} the {friend_kind} without asking, and it broke.",
        ),
        (
            "{He} was afraid and hid it behind a tree.",
            "{hero} ran home and told nobody.",
            '"Nobody saw me," thought {hero}.',
        ),
        (
            '"Have you seen my {thing}?" asked {friend} the next day.',
            "Soon {friend} came by, looking very sad.",
            "In the evening {friend} looked for the {thing} everywhere.",
        ),
        (
            '"No," said {hero}, but {his} tummy felt strange.',
            "{hero} only looked at {his} feet.",
            '"Maybe the wind took it," said {hero}, and {his} face turned red.',
        ),
        (
            "That night {hero} could not sleep.",
            "All night long {he} thought about {friend}.",
            "{hero} did not want to eat or play any more.",
        ),
        (
            'In the morning {he} went to {friend} and said, "I am sorry. It was me."',
            '"I have to tell you something," said {hero} at last. "I broke it."',
            "So {he} told {friend} the truth.",
        ),
        (
            '"Thank you for telling me," said {friend}. They repaired the {thing} together.',
            "{friend} was sad for a moment, but then {he_f} smiled and forgave {him}.",
            "{hero} felt light again. It is always better to tell the truth.",
        ),
    ),
}
ENDINGS = (
    "The end.",
    "And they lived happily ever after.",
    "It was a good day.",
    "And that is the story of {hero} the {kind}.",
    "That night {hero} slept very well.",
    "{hero} and {friend} were friends for ever.",
)
CALM = ("quiet", "green", "small", "sunny", "peaceful", "beautiful", "windy", "hidden")
SMALL = ("a little", "a small", "a young", "a tiny")
SEASONS = ("spring", "summer", "autumn", "winter")
FEARS = ("the dark", "deep water", "loud noises", "the big forest", "thunder", "high places", "strange shadows")
PROJECTS = ("tree house", "boat", "bridge", "tower", "swing", "cart", "windmill", "raft", "bird house")
PARAGRAPH_RATE = 0.25
PARAGRAPHS_AFTER = (2, 5, 7)
FEMALE = ("girl", "princess", "witch", "queen", "fairy")
MALE = ("boy", "prince", "knight", "wizard", "king")


def tell(r: Random, about: str | None = None, name: str | None = None, trait: str | None = None) -> Story:
    """A story. `about` is the place or the thing if it is a known one, else the hero's kind, known or not."""
    if about is None or about in w.PLACES or about in w.THINGS:
        kind = r.choice(["girl", "boy", *r.choices(w.ANIMALS, k=3), r.choice(w.HEROES)])
    else:
        kind = about
    girl = kind in FEMALE or (kind not in MALE and r.random() < 0.5)
    human = kind in FEMALE or kind in MALE
    hero = name or r.choice((w.GIRLS if girl else w.BOYS) if human else w.PET_NAMES)
    friend_kind = r.choice([a for a in w.ANIMALS if a != kind])
    friend = r.choice([n for n in w.PET_NAMES if n != hero])
    friend_girl = r.random() < 0.5
    place = about if about in w.PLACES else r.choice(w.PLACES)
    thing = about if about in w.THINGS else r.choice(w.THINGS)
    food = r.choice(("apple", "pear", "cake", "pie", "plum", "pancake", "biscuit", "carrot", "peach", "lemon cake"))
    trait = trait or r.choice(w.GOOD_TRAITS)
    facts = {
        "hero": hero, "kind": kind, "friend": friend, "friend_kind": friend_kind, "place": place, "thing": thing,
        "trait": trait, "weak": r.choice(w.WEAK_TRAITS), "hobby": r.choice(w.HOBBIES), "food": food,
        "a_food": ("an " if food[0] == "a" else "a ") + food,
        "food_plural": r.choice(("apples", "pears", "plums", "cherries", "peaches", "lemons")),
        "colour": r.choice([c for c in w.COLOURS if c != "orange"]), "season": r.choice(SEASONS),
        "calm": r.choice(CALM), "a_small": r.choice(SMALL), "fear": r.choice(FEARS), "project": r.choice(PROJECTS),
        "he": "she" if girl else "he", "his": "her" if girl else "his", "him": "her" if girl else "him",
        "He": "She" if girl else "He", "His": "Her" if girl else "His",
        "he_f": "she" if friend_girl else "he", "his_f": "her" if friend_girl else "his",
        "him_f": "her" if friend_girl else "him", "He_f": "She" if friend_girl else "He",
    }  # fmt: skip
    text = compose(r, facts)
    while about is not None and about not in text:  # not every plot needs the thing
        text = compose(r, facts)
    return Story(text, hero, kind, friend, place, thing, trait)


def compose(r: Random, facts: dict[str, str]) -> str:
    """An opening, perhaps a habit, the beats of a plot and perhaps a closing line."""
    sentences = [r.choice(OPENINGS), *r.sample(HABITS, r.choice((0, 1, 1, 2)))]
    sentences += [r.choice(beat) for beat in r.choice(list(PLOTS.values()))]
    if r.random() < 0.7:
        sentences.append(r.choice(ENDINGS))
    breaks = PARAGRAPHS_AFTER if r.random() < PARAGRAPH_RATE else ()
    text = "".join(s + ("\n\n" if i in breaks else " ") for i, s in enumerate(sentences))
    return articles(text.strip().format(**facts))


def sentence(r: Random, about: str) -> str:
    """One plain sentence about a thing, an animal or a place."""
    name, colour, adjective = r.choice(w.GIRLS + w.BOYS), r.choice(w.COLOURS[:5]), r.choice(w.ADJECTIVES)
    return articles(r.choice(SENTENCES).format(x=about, colour=colour, name=name, adj=adjective))


def articles(text: str) -> str:
    """`a` before a vowel becomes `an`."""
    return re.sub(r"\b([Aa]) (?=[aeiou])(?!uni)", r"\1n ", text)


SENTENCES = (
    "The {adj} {x} is near the window.",
    "{name} saw a {colour} {x} today.",
    "The {x} is {colour} and {adj}.",
    "{name} likes the {adj} {x} very much.",
    "Yesterday {name} drew a picture of a {x}.",
    "Every child in the village knows the {adj} {x}.",
)


def poem(r: Random, about: str) -> str:
    """Four lines about something, rhymed in one sound."""
    a, b, c, d = r.sample(r.choice(w.RHYMES), 4)
    first = r.choice((f"I saw a {about} beside the {a}", f"A little {about} near the {a}"))
    lines = "\n".join(
        (
            first + ",",
            r.choice(("It made me think of", "It sang a song about")) + f" the {b}.",
            r.choice(("We laughed and talked about", "We danced and dreamed of")) + f" the {c},",
            r.choice(("And then we thought about", "And in the end we found")) + f" the {d}.",
        )
    )
    return articles(lines)
