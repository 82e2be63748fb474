"""Words and sentences of an answer, as the IFBench rules count them. All knowledge of English is in this file.

A sentence ends at . ! or ? before a space, or before a closing quote or bracket and a space; abbreviations are not
recognised. A contraction is one word. No data are downloaded: function words and pronouns are listed, syllables are
counted by rules, and emoji are recognised by Unicode block.
"""

from __future__ import annotations

import re
import string
import unicodedata
from typing import Final

MARKS: Final = string.punctuation
CLOSERS: Final = "\"'”’)]"
_REMOVED: Final = str.maketrans("", "", MARKS)
_END: Final = re.compile(r"[.!?]+[\"'”’)\]]*(?=\s|$)")
_VOWELS: Final = re.compile(r"[aeiouy]+")
_SILENT_E: Final = re.compile(r"[^aeiouyl]e$|[aeiouy]le$|[^aeiouytd]ed$|[^aeiouyszxcgh]es$")
_EMOJI: Final = re.compile(
    "[\u00a9\u00ae\u203c\u2049\u2122\u2139\u2194-\u21aa\u231a-\u23ff\u24c2\u25aa-\u25fe\u2600-\u27bf\u2934\u2935"
    "\u2b05-\u2b55\u3030\u303d\u3297\u3299\U0001f000-\U0001faff]"
)


def listed(words: str) -> frozenset[str]:
    """Return the words of a list separated by spaces."""
    return frozenset(words.split())


FUNCTION_WORDS: Final = listed(
    # articles, conjunctions, prepositions
    "a an the and but if or nor because as until while so than of at by for with about against between into through "
    "during before after above below to from up down in out on off over under "
    # pronouns and determiners
    "i me my myself we our ours ourselves you your yours yourself yourselves he him his himself she her hers herself "
    "it its itself they them their theirs themselves what which who whom this that these those all any both each few "
    "more most other some such own same "
    # auxiliary verbs
    "am is are was were be been being have has had having do does did doing can will should "
    # adverbs
    "again further then once here there when where why how no not only too very just now "
    # parts of contractions around the apostrophe
    "s t d ll m o re ve y don ain aren couldn didn doesn hadn hasn haven isn ma mightn mustn needn shan shouldn wasn "
    "weren won wouldn"
)
"""Also called stop words."""

PRONOUNS: Final = listed(
    "i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers "
    "herself it its itself they them their theirs themselves this that these those who whom whose which what whoever "
    "whomever whatever whichever anybody anyone anything everybody everyone everything nobody nothing somebody someone "
    "something each either neither both all some any none"
)


def sentences(text: str) -> list[str]:
    """Split a text into sentences with their end marks; text after the last end mark is also a sentence."""
    found, begin = [], 0
    for match in _END.finditer(text):
        found.append(text[begin : match.end()].strip())
        begin = match.end()
    return [one for one in (*found, text[begin:].strip()) if one]


def end_of(sentence: str) -> str:
    """Return the last character of a sentence, before closing quotes and brackets."""
    return sentence.rstrip(CLOSERS)[-1:]


def without_marks(text: str) -> list[str]:
    """Return the words with all ASCII punctuation removed: "well-known" becomes wellknown."""
    return text.translate(_REMOVED).split()


def stripped(text: str) -> list[str]:
    """Return the words without surrounding punctuation; skip tokens that are only punctuation."""
    return [word for word in (part.strip(MARKS + "“”‘’…") for part in text.split()) if word]


def plain(text: str) -> str:
    """Return the text without accents: "São Tomé" becomes Sao Tome."""
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def is_emoji(character: str) -> bool:
    return _EMOJI.fullmatch(character) is not None


def syllables(word: str) -> int:
    """Count an English word's syllables by its vowel groups; an e at the end, or in -es and -ed, is mostly silent."""
    word = plain(word.lower())
    count = len(_VOWELS.findall(word))
    return max(count - (_SILENT_E.search(word) is not None), 1)
