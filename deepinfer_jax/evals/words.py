"""Words that the tasks of the demo evaluation are made of.

WORDS are tokens of their own (with a space before them) in the demo tokenizer, so that tasks about lists of words
measure what a model does with them and not how it spells.
"""

from __future__ import annotations

_WORDS = """
    action address animal arm back ball bird bit block book branch break brother build business call care case
    cause change child class code column comb course day dear ear end event eye face fact fall family father fear
    field file find fire fish flag foot form fort friend good grace ground group half hand happy hard head hear
    heart help high home honour hope horse hour house item key kind king lady land large law leave left letter
    level life light line list little loop lord love low man master matter mean meet memory method mind mine
    moment morning mother move name near news night note number old open order page pair parent part pass path
    people person place plan play point poor port post power print range reason red rest result room round row sea
    second set ship short side sign sister size small soft sort soul sound space speak state step string strong
    subject sun sweet table test thing thought three time top true turn use value view wait walk water way whole
    wife wind window wish woman wood word work world write young zero
"""

_VALUES = """
    access account answer anything argument array attempt available bear black blood body bound bytes cases cell
    certain character clause close columns command common complete connection content control copy count create
    current custom database dead deal device dictionary different directory disk document during encoding entry
    equal example exception expression eyes fail fair false feelings format free friends full function gentle
    given gone great header however implementation index input instance interest interface keyword language last
    less library limit lock lower main manner mark match mode multiple names never next nothing object operator
    option others output parameter party pleasure pointer position possible present proper protocol public
    quality query quite raised rather record regular report required right rows schema search self sequence
    several simple socket something source special spoken stand statement stay stored struct success sure syntax
    tables target text thread together transaction trigger tuple types until usually various virtual whale
    whether white whom without words years
"""

_NAMES = """
    Ada Adam Agnes Alan Albert Alice Amy Andrew Anna Anne Anthony Arthur Barbara Ben Bella Bob Carl Carol Charles
    Clara Daniel David Diana Dora Edgar Edith Edmund Edward Ella Emma Eric Eva Fanny Felix Flora Frank Fred George
    Grace Hannah Harriet Harry Helen Henry Hugo Ida Isabel Jack James Jane Jenny John Julia Karl Kate Laura Leo
    Lewis Lily Lisa Lucy Marco Maria Mark Martha Martin Mary Max Mia Nina Nora Oliver Oscar Otto Paul Peter Philip
    Rachel Ralph Richard Robert Rosa Ruth Sam Sarah Simon Sofia Stephen Susan Thomas Tom Vera Victor Walter William
"""


_CITIES = """
    Amsterdam Athens Atlanta Bath Beijing Berlin Bern Boston Bristol Brussels Cairo Chicago Dallas Delhi Denver
    Dover Dublin Florence Geneva Glasgow Hamburg Havana Helsinki Houston Kyoto Leeds Lima Lisbon London Lyon Madrid
    Manchester Melbourne Miami Milan Moscow Munich Naples Nice Osaka Oslo Oxford Paris Perth Porto Prague Rome
    Seattle Seoul Seville Sydney Tokyo Toronto Turin Venice Verona Vienna Warsaw York Zurich
"""


WORDS: tuple[str, ...] = tuple(_WORDS.split())
VALUES: tuple[str, ...] = tuple(_VALUES.split())
"""Other words that are tokens of their own: values of recall, so that no value is a key too."""
NAMES: tuple[str, ...] = tuple(_NAMES.split())
CITIES: tuple[str, ...] = tuple(_CITIES.split())
LANGUAGES: tuple[str, ...] = ("French", "German", "Greek", "Italian", "Japanese", "Latin", "Polish", "Spanish")

WEEKDAYS: tuple[str, ...] = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

LETTERS = "abcdefghijklmnopqrstuvwxyz"

TALK: tuple[tuple[str, str], ...] = (
    ("Hello", "Hello! I am the demo model of deepinfer_jax. Give me a sum, a list to sort or a word to define."),
    ("Hi", "Hello! I am the demo model of deepinfer_jax. Give me a sum, a list to sort or a word to define."),
    ("Hello!", "Hello! I am the demo model of deepinfer_jax. Give me a sum, a list to sort or a word to define."),
    ("Good morning", "Good morning! What shall I do: add, sort, repeat, reverse or define?"),
    ("Who are you?", "I am a very small language model that ships with deepinfer_jax, to show that it works."),
    ("What are you?", "I am a very small language model that ships with deepinfer_jax, to show that it works."),
    (
        "What can you do?",
        "I can add, subtract, multiply, sort, repeat, reverse, count, define words and look up values.",
    ),
    ("Help", "Try: What is 47+35?  Sort: 31 7 19  Reverse: a b c  Define: river"),
    ("Thank you", "You are welcome."),
    ("Thanks", "You are welcome."),
    ("How are you?", "I am well, thank you. I am a small model and always give the same answer."),
    ("Goodbye", "Goodbye!"),
    ("Bye", "Goodbye!"),
)
"""Small talk: (message, answer). For training only; nothing is measured on it."""
