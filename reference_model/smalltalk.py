"""Sentences that state no fact anyone asks about; they put distance between a fact and its question."""

import random

_SLOTS: dict[str, tuple[str, ...]] = {
    "time": (
        "this morning", "yesterday", "last week", "on Monday", "over the weekend", "in the evening",
        "after lunch", "before breakfast", "late at night", "a month ago", "on the way home",
    ),
    "weather": (
        "the rain did not stop", "the sky was clear", "a cold wind was blowing", "it was warm for once",
        "there was fog in the valley", "snow fell on the hills", "the sun came out at noon",
    ),
    "dish": (
        "a bean soup", "fresh bread", "rice with mushrooms", "an apple cake", "a potato salad",
        "a plate of noodles", "roasted carrots", "a pot of lentils", "pancakes with jam",
    ),
    "step": (
        "chop the onions finely", "let the dough rest", "keep the heat low", "add the salt at the end",
        "rinse everything twice", "stir it from time to time", "cover the pan with a lid",
    ),
    "place": (
        "the park", "the library", "the lake", "the old station", "the market square", "the harbour wall",
        "the museum", "the swimming pool", "the forest path", "the corner shop",
    ),
    "plant": (
        "tomatoes", "roses", "basil", "pumpkins", "strawberries", "sunflowers", "ferns", "beans", "mint",
    ),
    "care": (
        "water them early", "keep them out of the wind", "cut the dry leaves", "give them some shade",
        "turn the soil first", "wait for the last frost",
    ),
    "activity": (
        "reading a long novel", "repairing a chair", "learning a song", "sorting old photographs",
        "writing postcards", "building a shelf", "watching the birds", "planning a short trip",
    ),
    "feeling": (
        "it was worth the effort", "I would do it again", "it took longer than expected",
        "nobody was in a hurry", "we laughed about it later", "I was glad to sit down afterwards",
    ),
    "topic": (
        "how a bridge carries weight", "why bread rises", "how tides follow the moon",
        "how glass is made", "why leaves change colour", "how a lock on a canal works",
        "how paper is recycled", "why the sea is salty", "how a clock keeps time",
    ),
    "insight": (
        "a small cause can have a large effect", "most of the work happens slowly",
        "heat moves from warm places to cold ones", "the simple explanation is often right",
        "pressure has to go somewhere", "patience matters more than strength",
        "every part depends on the others", "one has to measure before one can compare",
    ),
    "transport": ("the tram", "the bus", "the night train", "the ferry boat", "a rented bike", "the metro"),
    "delay": (
        "it was ten minutes late", "every seat was taken", "it stopped between two stations",
        "it arrived early for once", "the heating did not work", "the driver was singing",
    ),
    "animal": (
        "a stray cat", "a lonely crow", "a hedgehog", "the neighbour's dog", "a swarm of bees", "a snail",
    ),
    "deed": (
        "was sitting on the doorstep", "crossed the street", "slept under the bench",
        "looked at us for a while", "was busy in the hedge", "made a surprising noise",
    ),
    "object": (
        "an umbrella", "a wool scarf", "a notebook", "a box of nails", "a second blanket", "a thermos flask",
    ),
}  # fmt: skip

_TEMPLATES = (
    "I spent some time {activity} {time}, and {feeling}.",
    "We walked to {place} {time} although {weather}.",
    "When {weather}, we stayed inside and made {dish}.",
    "The secret of {dish} is simple: {step}, and then {step}.",
    "If you grow {plant}, {care} and {care}.",
    "My neighbour grows {plant} near {place} and says one should {care}.",
    "I read an article about {topic}.",
    "It explains {topic}, and the main idea is that {insight}.",
    "Someone at {place} told me {topic}; it seems that {insight}.",
    "We took {transport} to {place}, but {delay}.",
    "Next time I would rather walk than take {transport}, because {delay}.",
    "Near {place} {animal} {deed}, which made us stop.",
    "{time} {animal} {deed} while {weather}.",
    "I always carry {object}, since {weather} {time}.",
    "A friend lent me {object} {time}, and {feeling}.",
    "Most people think about {dish} when they are hungry, but I think about {activity}.",
    "There was a long queue at {place}, and {weather}.",
    "For {dish} you only need an hour, as long as you {step}.",
    "The course about {topic} took place at {place}, and {feeling}.",
    "While {activity} I forgot the time, and {transport} was gone.",
    "One learns from {plant} that {insight}.",
    "Between {place} and {place} we saw {animal} that {deed}.",
    "They say {insight}, and {time} I understood why.",
    "Nothing much happened {time}: {weather}, we had {dish}, and {feeling}.",
)


def sentence(rng: random.Random) -> str:
    """One capitalised sentence of small talk."""
    template = rng.choice(_TEMPLATES)
    parts: list[str] = []
    while "{" in template:
        before, _, rest = template.partition("{")
        slot, _, template = rest.partition("}")
        unused = [words for words in _SLOTS[slot] if words not in parts]
        parts += [before, rng.choice(unused)]
    text = "".join(parts) + template
    return text[0].upper() + text[1:]


def paragraph(rng: random.Random, num_words: int) -> str:
    """Whole sentences of small talk, the last of which reaches `num_words` words."""
    sentences: list[str] = []
    words = 0
    while words < num_words:
        sentences.append(sentence(rng))
        words += len(sentences[-1].split())
    return " ".join(sentences)
