"""Whether a text is in the language whose words are known here."""

from __future__ import annotations

import re

_ENGLISH = (
    "the my and that this it you with have for from to at they she your our are been just what when how us because until who "
    "there then his her i'm i've i'd don't didn't can't it's is was were not but all a an on in no so be do should would every "
    "of me we i more out over than had did got get into as by too after before if or about will back off up"
)
_FOREIGN = (
    "der die das und ich wir nicht mit bei nach ein eine den dem ist bin habe hat zu im je tu il elle nous vous le la les un une "
    "des du et est suis ai chez pas de que qui en el los las y no soy tengo con mi una ho sono abito ci siamo di che non per del "
    "della il lo gli ik wij het een niet ben doe aan van met jag är och inte har med på det en em na os uma eu não moro para "
    "meu minha jeg og ikke er til ja nie jest mam w z się na do"
)
_ONLY_ENGLISH = frozenset(_ENGLISH.split()) - frozenset(_FOREIGN.split())
"""Words of English that are none of other languages of Europe."""
_ONLY_FOREIGN = frozenset(_FOREIGN.split()) - frozenset(_ENGLISH.split())


def is_english(text: str) -> bool:
    """Whether a text is in the language whose words are known here, as far as its small words tell; one that has none of them
    is not, unless it is very short."""
    words = re.findall(r"[^\W\d_]+(?:['’][^\W\d_]+)?", text.casefold().replace("’", "'"))
    english, foreign = ([word for word in words if word in listed] for listed in (_ONLY_ENGLISH, _ONLY_FOREIGN))
    if sum(not word.isascii() for word in words) * 2 > len(words) or len(foreign) > len(english):
        return False
    return len(words) < 3 or bool(english)
