"""Word lists for dialogues, split into a training part and a held-out part.

Names, cities, animals, nouns and passphrase words of the held-out part never occur in a training
dialogue. Colours are shared: there are too few of them to split.
"""

import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

Split = Literal["train", "train_wide", "train_open", "train_pieces", "held_out"]
"""`train_wide` is `train` with invented animals, nouns, teams and passphrase words as well. `train_open` has
thousands of ordinary words in all lists, `train_pieces` also words put together from a tokenizer's pieces
(see `open_lexicon`). They are there so that a model learns to repeat words it has never seen."""

_PEOPLE = """
Alma Anton Astrid Basil Beatrix Bruno Carla Cedric Clara Conrad Dalia Damian Daria Dennis Edith Elias
Elena Emil Esther Fabian Felix Fiona Flora Frank Gerda Gilbert Gloria Greta Gustav Hanna Harold Hazel
Hector Helga Henry Hilda Hugo Ida Igor Ingrid Irene Isaac Ivan Jana Jasper Joanna Jonas Judith Julian
Karim Karl Katia Kurt Lara Laura Leon Lidia Linus Lorenz Lucia Ludwig Magda Marco Maria Martin Mateo
Maura Max Mila Miriam Mona Nadia Neil Nestor Nina Noah Nora Olga Oscar Otto Paula Pedro Petra Philip
Ralph Ramon Renata Rita Robert Roland Rosa Rufus Ruth Samuel Sandra Sergio Silvia Simon Sofia Stella
Susan Tamara Theo Thomas Tilda Tobias Ulrich Ursula Valerie Vera Victor Viola Walter Wanda Werner
Xavier Yara Yusuf Zelda Zora
"""
_PEOPLE_HELD_OUT = """
Adele Arthur Benita Caspar Dorothy Edgar Elvira Ferdinand Gisela Harriet Ismael Jolanda Kasimir Leopold
Mathilda Norbert Octavia Patrick Quentin Rosalind Sebastian Thelma Umberto Veronica Wilfred Yvonne
Zacharias Amadeus Bernice Cornelia Desmond Eugenia
"""
_CITIES = """
Lisbon Madrid Paris London Berlin Vienna Prague Warsaw Athens Rome Milan Turin Genoa Naples Oslo Bergen
Stockholm Helsinki Tallinn Riga Vilnius Dublin Cork Glasgow Leeds Bristol Lyon Nantes Geneva Basel Zurich
Munich Hamburg Bremen Dresden Leipzig Graz Linz Sofia Varna Cairo Tunis Lagos Nairobi Delhi Mumbai Tokyo
Osaka Kyoto Seoul Hanoi Manila Sydney Perth Boston Denver Austin Dallas Quito Lima Bogota Santiago
"""
_CITIES_HELD_OUT = """
Porto Valencia Marseille Antwerp Rotterdam Malmo Gdansk Budapest Zagreb Palermo Edinburgh Cardiff
Stuttgart Salzburg Casablanca Dakar Jakarta Melbourne Seattle Montreal
"""
_COLOURS = """
red green blue yellow purple orange white black silver golden crimson violet grey brown pink turquoise
"""
_ANIMALS = """
fox otter badger heron falcon rabbit turtle beaver wolf lynx raven sparrow dolphin whale lizard camel
donkey horse goat lamb panda tiger lion zebra koala moose eagle owl pigeon salmon crab spider beetle
hamster squirrel hedgehog penguin swan
"""
_ANIMALS_HELD_OUT = "leopard gecko walrus ostrich buffalo parrot cricket mole toad stork jaguar ferret"
_WORDS = """
river candle north garden copper window silent market bridge summer winter letter castle button forest
mirror planet rocket sugar pepper table violin hammer anchor island desert valley thunder feather pocket
basket blanket carpet circle corner cotton dragon engine flower ginger harbor jacket kettle ladder magnet
marble meadow needle oyster paper pencil picture pillow ribbon saddle shadow signal singer spring stone
sunset temple ticket timber tunnel velvet wagon walnut whistle willow yellow zipper
"""
_WORDS_HELD_OUT = """
acorn barrel cactus dinner emerald fiddle glacier helmet iceberg jungle kitchen lantern mustard napkin
orchid puzzle quarry rainbow sandal trumpet umbrella volcano wallet yogurt
"""
_ADJECTIVES = """
old new small large north south east west upper lower spare main second third backup portable heavy
wooden steel broken
"""
_NOUNS = """
printer scanner gate safe locker cabinet projector laptop camera van truck bicycle boiler freezer oven
drill pump generator router server elevator crane tractor trailer workshop warehouse archive cellar garage
greenhouse kiosk studio telescope microscope
"""
_NOUNS_HELD_OUT = (
    "turbine antenna forklift compressor plotter hangar vault incinerator ferry stapler sensor barn"
)
_TEAMS = """
chess rowing sailing cooking running painting hiking climbing knitting swimming cycling dancing fishing
football tennis drama poetry radio
"""
_TEAMS_HELD_OUT = "curling pottery fencing archery badminton juggling"

_ONSETS = tuple("b br d dr f g gr h j k kr l m n p pr r s st t tr v w z".split())  # noqa: SIM905
_VOWELS = ["a", "e", "i", "o", "u", "ai", "ei", "ia"]
_CODAS = ["", "", "l", "m", "n", "r", "s", "t", "x"]


@dataclass(frozen=True)
class Lexicon:
    """The words that one split may use."""

    people: tuple[str, ...]
    cities: tuple[str, ...]
    colours: tuple[str, ...]
    animals: tuple[str, ...]
    words: tuple[str, ...]
    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    teams: tuple[str, ...]


def _invented_names(count: int, seed: int) -> list[str]:
    """`count` distinct capitalised names built from syllables, in a fixed order for a fixed seed."""
    rng = random.Random(seed)
    names: dict[str, None] = {}
    while len(names) < count:
        num_syllables = rng.choice((2, 2, 3))
        name = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(num_syllables))
        names[(name + rng.choice(_CODAS)).capitalize()] = None
    return list(names)


def _widened(words: Lexicon) -> Lexicon:
    """`words` with its short lists repeated and as many invented words again, lower case."""
    invented = [name.lower() for name in _invented_names(1200, seed=21)]
    half = len(invented) // 4

    def widen(known: tuple[str, ...], part: int) -> tuple[str, ...]:
        return known * max(1, half // len(known)) + tuple(invented[part * half : (part + 1) * half])

    return replace(
        words,
        animals=widen(words.animals, 0),
        words=widen(words.words, 1),
        nouns=widen(words.nouns, 2),
        teams=widen(words.teams, 3),
    )


def held_out_words() -> frozenset[str]:
    """Every word of the held-out lists, in lower case."""
    words = lexicon("held_out")
    lists = (words.people, words.cities, words.animals, words.words, words.nouns, words.teams)
    return frozenset(word.lower() for part in lists for word in part)


def words_of_pieces(pieces: tuple[str, ...], count: int, seed: int) -> tuple[str, ...]:
    """`count` invented words that begin with every piece about equally often.

    `pieces`: the alphabetic tokens of a tokenizer, with a space in front of those that begin a word. A word
    of which the first piece is rare in text could otherwise not be repeated: its embedding was never needed.
    """
    rng = random.Random(seed)
    starts = [piece[1:] for piece in pieces if piece.startswith(" ")]
    others = [piece for piece in pieces if not piece.startswith(" ") and piece.islower()]
    words = (starts[i % len(starts)] + "".join(rng.sample(others, rng.randint(0, 2))) for i in range(count))
    return tuple(word for word in dict.fromkeys(words) if 3 <= len(word) <= 14)


def open_lexicon(vocabulary: tuple[str, ...]) -> Lexicon:
    """`train_wide` with ordinary words in every list, so that what a word is says nothing about it.

    `vocabulary`: words; those of the held-out lists are left out. Names and cities take them capitalised, the
    other lists in lower case. A known name or word is drawn about every third time.
    """
    words = lexicon("train_wide")
    kept = [word for word in vocabulary if word.lower() not in held_out_words()]
    ordinary = tuple(word for word in kept if word.islower())
    capitalised = tuple(word.capitalize() if word.islower() else word for word in kept)

    def mixed(known: tuple[str, ...], others: tuple[str, ...]) -> tuple[str, ...]:
        return known * max(1, len(others) // (2 * len(known))) + others

    return replace(
        words,
        people=mixed(words.people, capitalised),
        cities=mixed(words.cities, capitalised),
        animals=mixed(words.animals, ordinary),
        words=mixed(words.words, ordinary),
        nouns=mixed(words.nouns, ordinary),
        teams=mixed(words.teams, ordinary),
    )


@cache
def lexicon(split: Split) -> Lexicon:
    """The word lists of `split`; the two splits share only colours and adjectives.

    Raises ValueError for `train_open` and `train_pieces`, whose words come from a corpus and a tokenizer.
    """
    if split in ("train_open", "train_pieces"):
        raise ValueError(f"the words of {split} come from elsewhere: use open_lexicon")
    invented = _invented_names(1800, seed=20)
    taken = set((_PEOPLE + _PEOPLE_HELD_OUT + _CITIES + _CITIES_HELD_OUT).split())
    invented = [name for name in invented if name not in taken]
    held_out_names, train_names = invented[:60], invented[200:]
    held_out_cities, more_cities = invented[60:80], invented[80:200]
    if split == "train_wide":
        return _widened(lexicon("train"))
    if split == "train":
        # The known names are repeated so that about half of the draws are words seen elsewhere.
        people = _PEOPLE.split() * 10 + train_names
        return Lexicon(
            people=tuple(people),
            cities=tuple(_CITIES.split() * 2 + more_cities),
            colours=tuple(_COLOURS.split()),
            animals=tuple(_ANIMALS.split()),
            words=tuple(_WORDS.split()),
            adjectives=tuple(_ADJECTIVES.split()),
            nouns=tuple(_NOUNS.split()),
            teams=tuple(_TEAMS.split()),
        )
    return Lexicon(
        people=tuple(_PEOPLE_HELD_OUT.split() + held_out_names[:30]),
        cities=tuple(_CITIES_HELD_OUT.split() + held_out_cities),
        colours=tuple(_COLOURS.split()),
        animals=tuple(_ANIMALS_HELD_OUT.split()),
        words=tuple(_WORDS_HELD_OUT.split()),
        adjectives=tuple(_ADJECTIVES.split()),
        nouns=tuple(_NOUNS_HELD_OUT.split()),
        teams=tuple(_TEAMS_HELD_OUT.split()),
    )
