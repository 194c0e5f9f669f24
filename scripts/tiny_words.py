"""Word lists of the closed world that the bundled model `tiny` knows. Data only; no behaviour."""


def words(text: str) -> tuple[str, ...]:
    """The words of a line."""
    return tuple(text.split())


GIRLS = words(
    "Mia Lily Nora Ella Zoe Ruby Ivy Clara Anna Rosa Maya Alice Daisy Hana Lena Tess Wren Freya Sara Amy "
    "Olive Juno Nina Edith Pearl Carmen Priya Yuki Leila Greta"
)
BOYS = words(
    "Tom Ben Max Sam Leo Finn Jack Otto Hugo Noah Theo Eli Omar Ravi Kenji Luca Felix Oscar Adam Jonas "
    "Milo Arlo Ned Ivan Pablo Dan Toby Will George Amir"
)
PET_NAMES = words(
    "Pip Biscuit Pepper Hazel Bramble Moss Poppy Button Clover Ginger Pebble Rusty Tilly Nutmeg Dot Fern "
    "Bingo Socks Maple Olly Rex Luna Coco Tango Ziggy Waffles Misty Bolt Nibbles Juniper"
)
ANIMALS = words(
    "fox rabbit mouse bear owl hedgehog squirrel duck cat dog frog turtle badger otter goat lamb pony robin "
    "beaver mole penguin elephant lion monkey panda"
)
HEROES = (
    "dragon", "princess", "prince", "knight", "robot", "wizard", "witch", "king", "queen", "unicorn", "pirate", "giant",
    "fairy", "farmer", "baker", "sailor", "tiger", "wolf", "crow", "snail", "ant", "whale", "camel", "parrot", "ghost",
)  # fmt: skip
PLACES = (
    "forest", "meadow", "village", "valley", "garden", "beach", "farm", "park", "lake", "hill", "river", "town",
    "orchard", "island", "harbour", "mountain", "castle", "mill", "lighthouse", "desert",
)  # fmt: skip
THINGS = (
    "ball", "kite", "hat", "drum", "lamp", "book", "key", "bell", "basket", "boat", "scarf", "map", "whistle", "cup",
    "blanket", "button", "compass", "flute", "lantern", "shell", "spoon", "wagon", "mirror", "clock", "umbrella",
    "ribbon", "marble", "puzzle", "paintbrush", "necklace",
)  # fmt: skip
COLOURS = words("red blue green yellow purple orange pink white black brown golden silver")
FOODS = (
    "apple", "pear", "cake", "bread", "soup", "honey", "cheese", "pie", "carrot", "plum", "berry", "biscuit", "pancake",
    "banana", "cherry", "grape", "lemon", "peach", "potato", "tomato", "rice", "pizza", "salad", "noodles",
)  # fmt: skip
FRUITS = words("apple pear banana plum cherry grape lemon peach orange mango")
VEGETABLES = words("carrot potato onion pea bean cabbage pumpkin leek spinach beetroot")
GOOD_TRAITS = words("kind brave clever gentle cheerful patient careful friendly honest curious")
WEAK_TRAITS = words("shy lazy clumsy stubborn impatient grumpy messy forgetful noisy greedy")
HOBBIES = (
    "sing", "dance", "paint", "read", "swim", "climb trees", "bake", "count the stars", "tell jokes", "collect stones",
    "plant seeds", "fix old things", "watch the clouds", "make music", "draw maps", "fly kites",
)  # fmt: skip
ADJECTIVES = words("small big old new shiny soft tiny round heavy warm bright quiet")
HOBBY_NOUNS = words("football chess painting swimming reading dancing music cooking running gardening")
SUBJECTS = words("math science history art music English geography biology")

CAPITALS = {
    "France": "Paris", "Spain": "Madrid", "Italy": "Rome", "Germany": "Berlin", "Japan": "Tokyo", "England": "London",
    "Portugal": "Lisbon", "Greece": "Athens", "Egypt": "Cairo", "Norway": "Oslo", "Poland": "Warsaw",
    "Austria": "Vienna", "Ireland": "Dublin", "Cuba": "Havana", "Peru": "Lima", "Kenya": "Nairobi", "China": "Beijing",
    "Finland": "Helsinki", "Sweden": "Stockholm", "Canada": "Ottawa",
}  # fmt: skip
MORE_CITIES = (
    "Boston", "New York", "Chicago", "Sydney", "Mumbai", "Seoul", "Bangkok", "Toronto", "Hamburg", "Munich", "Porto",
    "Naples", "Seville", "Lyon", "Kyoto", "Osaka", "San Francisco", "Los Angeles", "Cape Town", "Buenos Aires",
    "Zurich", "Geneva", "Prague", "Brussels", "Amsterdam", "Manchester", "Glasgow", "Seattle", "Denver", "Shanghai",
    "Istanbul", "Jakarta", "Montreal", "Copenhagen", "Budapest", "Santiago", "Rio de Janeiro", "Mexico City",
)  # fmt: skip
CITIES = (*CAPITALS.values(), *MORE_CITIES)

# animal: (sound it makes, where it lives, number of legs, its young, what it eats)
ANIMAL_FACTS = {
    "cat": ("meow", "in a house", 4, "kitten", "fish"),
    "dog": ("woof", "in a house", 4, "puppy", "meat"),
    "cow": ("moo", "on a farm", 4, "calf", "grass"),
    "sheep": ("baa", "on a farm", 4, "lamb", "grass"),
    "duck": ("quack", "near a pond", 2, "duckling", "plants"),
    "pig": ("oink", "on a farm", 4, "piglet", "vegetables"),
    "horse": ("neigh", "on a farm", 4, "foal", "hay"),
    "hen": ("cluck", "on a farm", 2, "chick", "seeds"),
    "frog": ("croak", "near a pond", 4, "tadpole", "flies"),
    "lion": ("roar", "on the plains", 4, "cub", "meat"),
    "bee": ("buzz", "in a hive", 6, "larva", "nectar"),
    "owl": ("hoot", "in a tree", 2, "owlet", "mice"),
    "mouse": ("squeak", "in a hole", 4, "pup", "cheese"),
    "bear": ("growl", "in the forest", 4, "cub", "honey"),
    "snake": ("hiss", "in the grass", 0, "snakelet", "mice"),
    "spider": ("nothing", "in a web", 8, "spiderling", "flies"),
    "fish": ("nothing", "in the water", 0, "fry", "plants"),
    "rabbit": ("nothing", "in a burrow", 4, "kit", "carrots"),
}
THING_COLOURS = {
    "the sky": "blue", "grass": "green", "snow": "white", "a banana": "yellow", "a strawberry": "red", "coal": "black",
    "the sun": "yellow", "a carrot": "orange", "milk": "white", "chocolate": "brown", "a frog": "green",
    "a lemon": "yellow", "a tomato": "red", "the sea": "blue", "an elephant": "grey", "a flamingo": "pink",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "fast": "slow", "happy": "sad", "day": "night", "old": "new",
    "open": "closed", "wet": "dry", "loud": "quiet", "light": "dark", "full": "empty", "left": "right", "high": "low",
    "early": "late", "soft": "hard", "near": "far", "clean": "dirty",
}  # fmt: skip
USES = {
    "cut paper": "scissors", "tell the time": "a clock", "open a lock": "a key", "write a letter": "a pen",
    "eat soup": "a spoon", "stay dry in the rain": "an umbrella", "sweep the floor": "a broom",
    "hit a nail": "a hammer", "brush your teeth": "a toothbrush", "see in the dark": "a lamp",
    "catch a fish": "a net", "keep food cold": "a fridge",
}  # fmt: skip
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words("January February March April May June July August September October November December")
UNKNOWN_TOPICS = (
    "quantum physics", "the stock market", "ancient Rome", "black holes", "tax law", "rocket engines",
    "the French Revolution", "opera", "chemistry", "politics", "volcanoes", "dinosaurs", "medicine", "philosophy",
    "gravity", "the internet", "electric cars", "coffee", "photosynthesis", "machine learning", "astronomy",
    "economics", "world history", "poker", "cricket", "movies", "the Olympics", "submarines", "whales", "diamonds",
)  # fmt: skip
RHYMES = (
    ("tree", "sea", "bee", "key"), ("night", "light", "kite", "height"), ("day", "hay", "bay", "clay"),
    ("moon", "tune", "spoon", "noon"), ("hill", "mill", "bill", "till"), ("sky", "pie", "fly", "tie"),
    ("ground", "sound", "hound", "pound"), ("rain", "lane", "train", "plain"),
)  # fmt: skip

ONSETS = words("b c d f g h j k l m n p r s t v w z br cr dr fl gr pl sh sk st tr th")
VOWELS = words("a e i o u ai ea oo ou")
CODAS = ["", "", "n", "r", "l", "s", "m", "t", "x", "nd", "rt", "ck"]
