"""English sentences for measurements of speech: varied in length and kind, made by a seeded generator, so
nothing is copied."""

from __future__ import annotations

import random

_PEOPLE = (
    "the old baker", "my younger sister", "our new neighbor", "the tall captain", "a quiet student", "the night nurse", "her uncle Martin",
    "the village doctor", "two farmers", "the train driver", "a famous painter", "the whole family", "the school teacher", "Mister Wilson",
    "the gardener", "a young engineer",
)  # fmt: skip
_PAST = (
    "carried a heavy box up the stairs", "found a silver coin under the table", "painted the wooden fence bright green",
    "read a long letter beside the window", "fixed the broken clock in the kitchen", "bought fresh bread and yellow cheese",
    "watched the ships leave the harbor", "planted seven apple trees behind the house", "forgot the keys on the garden wall",
    "told a funny story about a clever fox", "waited an hour for the last bus", "cooked a large pot of vegetable soup",
    "lost a warm glove in the snow", "heard a strange noise in the attic", "drew a map of the northern mountains",
    "borrowed a ladder from the fire station", "sold the small boat to a stranger", "washed every window of the office",
)  # fmt: skip
_WHEN = (
    "early in the morning", "after the heavy rain", "on a cold winter evening", "just before sunset", "last Saturday",
    "during the summer holiday",
    "while the children slept", "shortly after lunch", "at the end of the week", "on the first day of spring",
)  # fmt: skip
_THEN = (
    "and nobody noticed until the next day", "because the weather was finally warm", "although the road was still wet",
    "so everyone was happy", "and then walked slowly home", "but the dog only wagged its tail", "which made the others laugh",
    "while music played in the distance",
)  # fmt: skip
_QUESTIONS = (
    "Where did {person} put the blue umbrella?", "Have you seen what {person} wrote on the board?",
    "Why does {person} always leave so early?",
    "Could you please ask {person} to close the door?", "What will {person} think about our plan?",
)  # fmt: skip
_FACTS = (
    "The bridge is {number} meters long and was built by hand.", "There are {number} chairs in the concert hall.",
    "Please turn left after {number} steps and open the red gate.", "The museum closes in {number} minutes.",
    "Only {number} people live on the island during the winter.", "It takes {number} days to cross the desert on foot.",
)  # fmt: skip
_NUMBERS = ("twelve", "thirty", "forty five", "ninety", "two hundred", "seventeen", "sixty", "eleven")
_SHORT = (
    "The kettle is boiling.", "Please close the window.", "We will meet at the station.", "The soup tastes wonderful.",
    "Nobody answered the door.",
    "The river froze last night.", "Keep the receipt, please.", "The lights went out again.", "She smiled and waved goodbye.",
    "This road leads to the sea.", "Breakfast is almost ready.", "The library opens at nine.",
)  # fmt: skip


def sentences(count: int, seed: int = 7) -> list[str]:
    """`count` different sentences of 4 to about 25 words; equal arguments give equal sentences."""
    chance = random.Random(seed)
    made: dict[str, None] = {}
    while len(made) < count:
        made[_sentence(chance)] = None
    return list(made)


def _sentence(chance: random.Random) -> str:
    person, kind = chance.choice(_PEOPLE), chance.random()
    if kind < 0.04:
        return chance.choice(_SHORT)
    if kind < 0.2:
        return chance.choice(_QUESTIONS).format(person=person)
    if kind < 0.35:
        return chance.choice(_FACTS).format(number=chance.choice(_NUMBERS))
    parts = [person, chance.choice(_PAST)]
    if kind > 0.5:
        parts.append(chance.choice(_WHEN))
    text = " ".join(parts)
    if kind > 0.75:
        text += f", {chance.choice(_THEN)}"
    return f"{text[0].upper()}{text[1:]}."
