"""Names and codes of languages, for lines, options, requests, checks and meters."""

from __future__ import annotations

#: Codes (ISO 639-1; for Cantonese, which has none, ISO 639-3) and names of the languages that a model or a
#: meter of Nightjar knows.
_NAMES = {
    "ar": "arabic",
    "de": "german",
    "en": "english",
    "es": "spanish",
    "fr": "french",
    "hi": "hindi",
    "it": "italian",
    "ja": "japanese",
    "ko": "korean",
    "nl": "dutch",
    "pl": "polish",
    "pt": "portuguese",
    "ru": "russian",
    "tr": "turkish",
    "yue": "cantonese",
    "zh": "chinese",
}
_CODES = {name: code for code, name in _NAMES.items()}


def language_code(asked: str) -> str:
    """The code of a language that is given by its name or its tag (`English`, `en`, `en-US`, `en_US`). An
    unknown name is returned in lowercase, without its region."""
    name = asked.strip().casefold().replace("_", "-").partition("-")[0]
    return _CODES.get(name, name)


def language_of(asked: str, languages: tuple[str, ...]) -> str | None:
    """The model's own name of the language with this name or code; None if the model does not have it."""
    name = asked.strip().casefold()
    by_name = next((language for language in languages if language.casefold() == name), None)
    return by_name or next(
        (language for language in languages if language_code(language) == language_code(asked)), None
    )
