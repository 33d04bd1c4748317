"""Generates the training text of pico: synthetic conversations and stories, and public-domain books.

`documents(count, seed)` yields the synthetic part, `books(folder)` the real part, cut into documents. Conversations use
the ChatML layout, so that the model learns its own chat template. The order of the random draws is part of the data:
changing it changes the model.
"""

import random
import re
from collections.abc import Iterator
from pathlib import Path

CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Portugal": "Lisbon",
    "Greece": "Athens",
    "Poland": "Warsaw",
    "Austria": "Vienna",
    "Hungary": "Budapest",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Denmark": "Copenhagen",
    "Ireland": "Dublin",
    "Belgium": "Brussels",
    "Japan": "Tokyo",
    "China": "Beijing",
    "India": "New Delhi",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Peru": "Lima",
    "Chile": "Santiago",
    "Cuba": "Havana",
    "Canada": "Ottawa",
    "Russia": "Moscow",
    "Turkey": "Ankara",
    "Iran": "Tehran",
    "Iraq": "Baghdad",
    "Thailand": "Bangkok",
    "Vietnam": "Hanoi",
}
ANIMALS = {  # its sound, and its favourite food
    "dog": ("barks", "bone"),
    "cat": ("purrs", "fish"),
    "cow": ("moos", "grass"),
    "duck": ("quacks", "bread"),
    "lion": ("roars", "meat"),
    "sheep": ("bleats", "grass"),
    "horse": ("neighs", "hay"),
    "bee": ("buzzes", "nectar"),
    "owl": ("hoots", "mice"),
    "frog": ("croaks", "flies"),
    "pig": ("oinks", "apples"),
    "wolf": ("howls", "meat"),
}
COLOURS = {
    "the sky": "blue",
    "grass": "green",
    "snow": "white",
    "coal": "black",
    "a lemon": "yellow",
    "a ripe tomato": "red",
    "a carrot": "orange",
    "an elephant": "grey",
    "chocolate": "brown",
    "a plum": "purple",
    "a flamingo": "pink",
    "the sun": "yellow",
}
OPPOSITES = (
    ("hot", "cold"),
    ("big", "small"),
    ("up", "down"),
    ("fast", "slow"),
    ("day", "night"),
    ("happy", "sad"),
    ("old", "young"),
    ("wet", "dry"),
    ("light", "dark"),
    ("open", "closed"),
    ("early", "late"),
    ("loud", "quiet"),
    ("hard", "soft"),
    ("full", "empty"),
)
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
NAMES = [
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Grace",
    "Henry",
    "Iris",
    "Jack",
    "Kate",
    "Leo",
    "Mia",
    "Noah",
    "Olive",
    "Paul",
    "Ruth",
    "Sam",
    "Tara",
    "Will",
]
GIRLS = frozenset(["Anna", "Clara", "Emma", "Grace", "Iris", "Kate", "Mia", "Olive", "Ruth", "Tara"])
ADJECTIVES = ["little", "old", "brave", "shy", "clever", "kind", "quiet", "lazy", "cheerful", "curious"]
PLACES = ["forest", "village", "garden", "castle", "harbour", "market", "mountain", "river", "farm", "lighthouse"]
THINGS = ["key", "lantern", "map", "coin", "book", "bell", "kite", "boat", "basket", "letter", "drum", "mirror"]
LESSONS = (
    "It is good to share.",
    "Small steps lead far.",
    "A friend is worth more than gold.",
    "Always tell the truth.",
    "Patience is rewarded.",
    "Never be afraid to ask for help.",
    "Kindness comes back to you.",
)
SYSTEM = ("You are a helpful assistant.", "You are Pico, a tiny language model.", "Answer briefly.")
GREETINGS = (
    ("Hello!", "Hello! How can I help you today?"),
    ("Hi", "Hi! What would you like to talk about?"),
    ("Good morning", "Good morning! How can I help?"),
    ("How are you?", "I am well, thank you. How are you?"),
    ("Thank you!", "You are welcome!"),
    ("Bye", "Goodbye! Come back soon."),
)
WHO = ("Who are you?", "What is your name?", "What are you?", "Introduce yourself.")
I_AM = "I am Pico, a tiny language model. I know a little about numbers, capitals, colours, animals and stories."
ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["_", "_", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]

BOOK_DOCUMENT_CHARS = 6000
IN_VERSE = ("shakespeare.txt",)  # line breaks are kept there; elsewhere they only wrap the prose

Turn = tuple[str, str]  # question, answer


def number_words(n: int) -> str:
    if n < 20:
        return ONES[n]
    return TENS[n // 10] + ("-" + ONES[n % 10] if n % 10 else "")


def story(rng: random.Random, name: str | None = None, thing: str | None = None) -> str:
    """Return a story of six or seven sentences about `name` and `thing`, or about random ones."""
    hero = name or rng.choice(NAMES)
    friend = rng.choice([n for n in NAMES if n != hero])
    she, her = ("she", "her") if hero in GIRLS else ("he", "his")
    adjective, place, thing = rng.choice(ADJECTIVES), rng.choice(PLACES), thing or rng.choice(THINGS)
    animal = rng.choice(list(ANIMALS))
    sound, food = ANIMALS[animal]
    day = rng.choice(DAYS)
    start = rng.choice(
        [
            f"Once upon a time there was a {adjective} child named {hero} who lived near the {place}.",
            f"{hero} was a {adjective} child. Every day {she} walked to the {place}.",
            f"Long ago, in a house by the {place}, lived a {adjective} child called {hero}.",
        ]
    )
    lose = rng.choice(
        [
            f"One {day}, {hero} lost {her} {thing}.",
            f"On {day} morning {her} {thing} was gone.",
            f"One {day} {hero} found an old {thing} in the {place}.",
        ]
    )
    meet = rng.choice(
        [
            f"{she.capitalize()} asked {friend} for help.",
            f"{friend} saw it and came to help.",
            f'"Can you help me?" {hero} asked. "Of course," said {friend}.',
        ]
    )
    look = rng.choice(
        [
            "Together they looked behind every tree and under every stone.",
            "They searched until the sun went down.",
            f"They walked for {number_words(rng.randint(2, 12))} hours.",
        ]
    )
    beast = rng.choice(
        [
            f"Then they met a {animal}. The {animal} {sound} when it is hungry, so they gave it some {food}.",
            f"A {animal} was sitting on the {thing}. {friend} gave it some {food} and it went away.",
        ]
    )
    end = rng.choice(
        [
            f"{hero} thanked {friend} and took the {thing} home.",
            f"In the end the {thing} was safe, and {hero} smiled.",
            f"{hero} and {friend} were friends from that day on.",
        ]
    )
    lesson = [rng.choice(LESSONS)] if rng.random() < 0.6 else []
    return " ".join([start, lose, meet, look, beast, end, *lesson])


def greeting(rng: random.Random) -> Turn:
    return rng.choice(GREETINGS)


def introduction(rng: random.Random) -> Turn:
    return rng.choice(WHO), I_AM


def sum_or_difference(rng: random.Random) -> Turn:
    a, b = rng.randint(0, 50), rng.randint(0, 49)
    if rng.random() < 0.5:
        return rng.choice([f"What is {a} + {b}?", f"{a} + {b} = ?", f"Add {a} and {b}."]), f"{a} + {b} = {a + b}."
    a, b = max(a, b), min(a, b)
    question = rng.choice([f"What is {a} - {b}?", f"{a} - {b} = ?", f"Subtract {b} from {a}."])
    return question, f"{a} - {b} = {a - b}."


def product(rng: random.Random) -> Turn:
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    return rng.choice([f"What is {a} times {b}?", f"{a} x {b} = ?"]), f"{a} x {b} = {a * b}."


def capital(rng: random.Random) -> Turn:
    land = rng.choice(list(CAPITALS))
    asked = [f"What is the capital of {land}?", f"Name the capital city of {land}.", f"capital of {land}?"]
    return rng.choice(asked), f"The capital of {land} is {CAPITALS[land]}."


def country(rng: random.Random) -> Turn:
    land = rng.choice(list(CAPITALS))
    return f"{CAPITALS[land]} is the capital of which country?", f"{CAPITALS[land]} is the capital of {land}."


def animal_fact(rng: random.Random) -> Turn:
    animal = rng.choice(list(ANIMALS))
    sound, food = ANIMALS[animal]
    article = "an" if animal[0] in "aeiou" else "a"
    subject = f"{article.capitalize()} {animal}"
    return rng.choice(
        [
            (f"What sound does {article} {animal} make?", f"{subject} {sound}."),
            (f"What does {article} {animal} eat?", f"{subject} likes {food}."),
        ]
    )


def colour(rng: random.Random) -> Turn:
    thing = rng.choice(list(COLOURS))
    asked = [f"What colour is {thing}?", f"Tell me the colour of {thing}."]
    return rng.choice(asked), f"{thing[0].upper() + thing[1:]} is {COLOURS[thing]}."


def opposite(rng: random.Random) -> Turn:
    a, b = rng.choice(OPPOSITES)
    if rng.random() < 0.5:
        a, b = b, a
    return f"What is the opposite of {a}?", f"The opposite of {a} is {b}."


def succession(rng: random.Random) -> Turn:
    sequence = rng.choice([DAYS, MONTHS])
    index = rng.randrange(len(sequence))
    unit = "day" if sequence is DAYS else "month"
    following = sequence[(index + 1) % len(sequence)]
    return f"Which {unit} comes after {sequence[index]}?", f"The {unit} after {sequence[index]} is {following}."


def counting(rng: random.Random) -> Turn:
    first, steps = rng.randint(0, 20), rng.randint(3, 10)
    return f"Count from {first} to {first + steps}.", ", ".join(str(first + i) for i in range(steps + 1)) + "."


def own_name(rng: random.Random, memory: dict[str, str]) -> Turn:
    """Return a turn that states a name, or asks for the one stated earlier in the conversation."""
    if "name" in memory:
        return rng.choice(["What is my name?", "Do you remember my name?"]), f"Your name is {memory['name']}."
    name = memory["name"] = rng.choice(NAMES)
    return rng.choice([f"My name is {name}.", f"I am {name}.", f"Call me {name}."]), f"Nice to meet you, {name}!"


def story_request(rng: random.Random) -> Turn:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    return rng.choice(
        [
            ("Tell me a story.", story(rng)),
            (f"Tell me a story about {name}.", story(rng, name)),
            (f"Write a story about a {thing}.", story(rng, None, thing)),
        ]
    )


def turn(rng: random.Random, memory: dict[str, str]) -> Turn:
    """Return one question and its answer; `memory` holds the facts established in the conversation."""
    kinds = (
        greeting,
        introduction,
        sum_or_difference,
        sum_or_difference,
        product,
        capital,
        country,
        animal_fact,
        colour,
        opposite,
        succession,
        counting,
        lambda rng: own_name(rng, memory),
        story_request,
    )
    return kinds[rng.randrange(len(kinds))](rng)


def chat(rng: random.Random) -> str:
    """Return a conversation of one to five turns in ChatML, three in ten with a system prompt."""
    parts: list[tuple[str, str]] = []
    memory: dict[str, str] = {}
    if rng.random() < 0.3:
        parts.append(("system", rng.choice(SYSTEM)))
    for _ in range(rng.randint(1, 5)):
        question, answer = turn(rng, memory)
        parts += [("user", question), ("assistant", answer)]
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in parts)


def documents(count: int, seed: int = 0) -> Iterator[str]:
    """Yield `count` synthetic documents, three in four of them conversations."""
    rng = random.Random(seed)
    for _ in range(count):
        yield chat(rng) if rng.random() < 0.75 else story(rng)


def books(folder: Path) -> Iterator[str]:
    """Yield the books of `folder` (*.txt, UTF-8) in documents of whole paragraphs, without the rest at a book's end."""
    for path in sorted(folder.glob("*.txt")):
        text = path.read_text(encoding="utf-8").replace("\r", "").replace("_", "")
        if path.name not in IN_VERSE:
            text = re.sub(r"(?<!\n)\n(?!\n)", " ", text)
        paragraphs: list[str] = []
        size = 0
        for paragraph in text.split("\n\n"):
            paragraphs.append(paragraph.strip())
            size += len(paragraph)
            if size > BOOK_DOCUMENT_CHARS:
                yield "\n\n".join(paragraphs)
                paragraphs, size = [], 0
