"""The words of the suite `recall` of pretrained models: what is told, of whom, and what is said beside it."""

from __future__ import annotations

from dataclasses import dataclass

_SURNAMES = "Baker Carter Cooper Fisher Gardner Hunter Mason Miller Parker Porter Turner Walker"
_TEAMS = "Lions Eagles Bears Wolves Tigers Sharks Hawks Bulls Dragons Pirates Rockets Giants"
_MATERIALS = "copper silver amber ivory velvet marble cotton granite diamond bronze pearl crystal"
_TITLES = "River Mountain Window Letter Summer Mirror Morning Dance Ocean Flower Train Memory"
_HORSES = "Storm Snow Cloud Star King Prince Moon Brown White Black Green Gold"


@dataclass(frozen=True)
class Relation:
    """A kind of fact: ``sentence``, a subject and its answer. Words are separated by spaces.

    The answer stands right after the subject: that is what small models can recall out of many facts.
    """

    sentence: str
    subjects: str
    answers: str


RELATIONS = (
    Relation("My colleague is", "Alice Brian Carol David Emma Frank Grace Henry", _SURNAMES),
    Relation("The doctor was", "Irene Karen Maria Nathan Olivia Peter Rachel Simon", _SURNAMES),
    Relation("The club is called", "Paris London Rome Berlin Madrid Vienna Dublin Tokyo", _TEAMS),
    Relation("Yesterday we watched the", "Moscow Boston Chicago Sydney Denver Lisbon Oslo Miami", _TEAMS),
    Relation("The password is", "harbour bridge tunnel garden library museum castle", _MATERIALS),
    Relation("On the box I wrote", "market station island valley desert airport forest", _MATERIALS),
    Relation("The song is called", "Silent Golden Broken Hidden Frozen Gentle Distant", _TITLES),
    Relation("I am reading", "Ancient Purple Lonely Secret Bright Empty Sweet", _TITLES),
    Relation("The horse is named", "Lucky Rusty Shadow Buddy Daisy Rocky Misty", _HORSES),
    Relation("At the farm I saw", "Sandy Ginger Bella Max Toby Luna Dusty", _HORSES),
)

FILLER = (
    "I had a long day and want to write a few things down.",
    "Before I forget it again, please note this.",
    "The weather was lovely, so I walked home and talked to some people.",
    "I am still sorting my papers.",
    "Here is more for my list.",
    "My train was late this morning, which gave me time to think.",
    "I just came back from lunch with the others.",
    "There is a lot going on this week.",
    "Sorry for the many messages.",
    "I found an old notebook with these lines.",
    "Someone called while I was cooking.",
    "Let me go on where we stopped.",
)

REPLIES = (
    "Thank you, I have noted it.",
    "All right, I will remember that.",
    "That is good to know.",
    "I see, this is now on your list.",
    "Understood, it is written down.",
    "Of course. Go on when you are ready.",
)

REQUEST = "Please tell me one of these things again."
