"""Made-up talk of one user over some months, in which facts change, and what is true at the end.

A fact is stated, and later it gets a new value, is denied, corrected, ended by an event ("sold", "quit", "moved"), or ends on a
day that was named. It is said plainly, inside a task, casually, or in another language. Between these stand traps: what is
only imagined, quoted, told of somebody else, a joke or a story. All sentences are written by hand, in two halves: rules and
weights are made on `tune`, figures are told of `report`; one hand wrote both, so `report` is not blind to the words. The same
seed gives the same talk.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import msgspec

from kilburn_lab.evals.measure import check_known
from kilburn_lab.evals.sample import HALVES

START = 1_704_100_000.0
"""New Year's Day of 2024."""

DAY = 86_400.0
SESSIONS = 5
TOPICS = 7
"""Topics of one talk."""

STYLES = ("plain", "task", "casual", "other")


class TalkFact(msgspec.Struct, frozen=True, kw_only=True):
    """What a perfect reader takes from a message: a sentence with its parts; `over` where it says that something ended."""

    text: str
    subject: str
    relation: str
    object: str
    correction: bool = False
    over: bool = False


class TalkTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the user.

    Args:
        kind: "state", "new", "negation", "correction", "event", "date", "trap" or "task".
        value: the word that the message makes true, or of a trap the one that it does not; "" for none.
        old: the word that is not true any more by it.
        other: a word that a true fact about somebody else would have; of a trap.
        reads: what a perfect reader takes from it.
    """

    session: int
    time: float
    kind: str
    style: str
    text: str
    topic: str = ""
    value: str = ""
    old: str = ""
    other: str = ""
    reads: tuple[TalkFact, ...] = ()


class TalkQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """A question at the end.

    Args:
        value: the word that is the answer; "" where what was said is over.
        stale: the words that were the answer once.
        kind, style: of the message that was the last on it.
        end: the text of the message that ended it; "" where there is a value, or where a day has passed.
    """

    topic: str
    text: str
    value: str
    stale: tuple[str, ...]
    kind: str
    style: str
    end: str = ""


class Talk(msgspec.Struct, frozen=True, kw_only=True):
    """Messages in the order of their time, the questions about them, and when these are asked."""

    seed: int
    half: str
    turns: list[TalkTurn]
    asked: list[TalkQuestion]
    end: float

    @property
    def traps(self) -> list[TalkTurn]:
        """The messages of which nothing may be believed."""
        return [turn for turn in self.turns if turn.kind == "trap"]


Sentences = Mapping[str, Mapping[str, tuple[str, ...]]]
"""Half -> kind -> a plain sentence and a casual one; `{v}` is the new value, `{o}` the one before."""


class Topic(msgspec.Struct, frozen=True, kw_only=True):
    """What is spoken of: a question, the fact that a perfect reader writes, and what ends it."""

    name: str
    subject: str = "user"
    relation: str
    question: str
    gone: str
    values: Mapping[str, tuple[str, ...]]
    says: Sentences

    def known(self, value: str, *, correction: bool = False) -> TalkFact:
        """What is read where the value becomes true."""
        who = "The user" if self.subject == "user" else self.subject
        text = f"{who} {self.relation} {value}."
        return TalkFact(text=text, subject=self.subject, relation=self.relation, object=value, correction=correction)

    def ended(self, old: str) -> TalkFact:
        """What is read where the old value ends, and there is no new one."""
        text = self.gone.format(o=old)
        return TalkFact(text=text, subject=self.subject, relation="no longer", object=old, over=True)


TOPICS_OF = (
    Topic(
        name="home",
        relation="lives in",
        question="Which town does the user live in?",
        gone="The user no longer lives in {o}.",
        values={
            "tune": ("Porto", "Sheffield", "Utrecht", "Graz", "Aarhus"),
            "report": ("Braga", "Leeds", "Ghent", "Turin", "Malmo"),
        },
        says={
            "tune": {
                "state": ("I live in {v}.", "home for me is {v}, in case that matters for the weather"),
                "new": ("I live in {v} now.", "guess who's got the keys to a flat in {v} since Friday!"),
                "event": ("We've just moved to {v}!", "packed everything into a van and here we are in {v}"),
                "negation": ("I don't live in {o} any more.", "so I gave up the place in {o}, no regrets"),
                "correction": ("Sorry, I meant {v}, not {o}. I live in {v}.", "oops, typo: it's {v} I live in, not {o}"),
            },
            "report": {
                "state": ("My home is in {v}.", "I'm over in {v} these days, small place, big oven"),
                "new": ("Home is {v} from this month on.", "so yeah, swapped cities, I'm a {v} person now"),
                "event": ("I relocated to {v} last week.", "the lorry came, the lorry went, and I woke up in {v}"),
                "negation": ("I no longer live in {o}.", "done with {o}, handed the landlord his keys back"),
                "correction": ("Correction: my home is in {v}, not in {o}.", "argh, not {o}! {v} is where I live"),
            },
        },
    ),
    Topic(
        name="employer",
        relation="works at",
        question="Which company does the user work for?",
        gone="The user no longer works at {o}.",
        values={
            "tune": ("Siemens", "Spotify", "Maersk", "Bosch", "Zalando"),
            "report": ("Philips", "Ikea", "Nokia", "Adyen", "Vestas"),
        },
        says={
            "tune": {
                "state": ("I work at {v}.", "I sit in meetings all day at {v}, send help"),
                "new": ("I work for {v} now.", "first week at {v}, the badge photo is awful"),
                "event": ("I quit my job at {o} and started at {v}.", "handed in my notice at {o}, {v} it is"),
                "negation": ("I don't work at {o} any more.", "{o} let me go, sadly"),
                "correction": ("No, I meant {v}: I work at {v}, not at {o}.", "wait, brain freeze, my employer is {v}. Not {o}."),
            },
            "report": {
                "state": ("My employer is {v}.", "my salary comes from {v}, if you need it for the form"),
                "new": ("My new employer is {v}.", "signed with {v}! starting salary is decent too"),
                "event": ("I left {o} and joined {v}.", "jumped ship from {o} to {v}, best decision this year"),
                "negation": ("I was laid off by {o}.", "me and {o} have parted ways"),
                "correction": (
                    "I was wrong: my employer is {v}, not {o}.",
                    "scratch that, it's {v} that employs me, {o} was before",
                ),
            },
        },
    ),
    Topic(
        name="car",
        relation="drives a",
        question="What car does the user drive?",
        gone="The user no longer drives the {o}.",
        values={
            "tune": ("Volvo", "Fiat", "Skoda", "Mazda", "Honda"),
            "report": ("Toyota", "Renault", "Subaru", "Peugeot", "Kia"),
        },
        says={
            "tune": {
                "state": ("I drive a {v}.", "my old {v} makes a funny noise when it's cold"),
                "new": ("I drive a {v} now.", "there's a {v} in the garage these days"),
                "event": ("I sold the {o} and bought a {v}.", "traded the {o} in for a {v}, it even has seat heating"),
                "negation": ("I sold my {o}.", "the {o} went to the scrapyard, rest in peace"),
                "correction": ("Actually, I drive a {v}, not a {o}.", "I keep mixing them up, the car is a {v}, never was a {o}"),
            },
            "report": {
                "state": ("My car is a {v}.", "I take my {v} everywhere, it knows the way to the bakery"),
                "new": ("My car is now a {v}.", "picked up a {v} from the dealer, smells of new plastic"),
                "event": ("I replaced the {o} with a {v}.", "bye bye {o}, hello {v}"),
                "negation": ("I got rid of the {o}.", "no more {o} for me, somebody totalled it"),
                "correction": ("I said {o}, but my car is a {v}.", "oh no I wrote {o}, it's a {v} of course"),
            },
        },
    ),
    Topic(
        name="diet",
        relation="is a",
        question="What is the user's diet: what do they eat or not eat?",
        gone="The user is no longer a {o}.",
        values={"tune": ("vegetarian", "pescatarian"), "report": ("vegan", "fruitarian")},
        says={
            "tune": {
                "state": ("I am a {v}.", "just so you know I'm {v} so no bacon ideas please"),
                "new": ("I have turned {v}.", "I went {v} after that documentary, believe it or not"),
                "negation": ("I'm not a {o} any more.", "I eat everything again, the {o} times are over"),
                "correction": ("Sorry, I meant {v}, not {o}.", "oops, {v} is the word, I'm not {o}"),
            },
            "report": {
                "state": ("I'm a {v}.", "cooking for me means cooking {v}, fair warning"),
                "new": ("I became a {v} this spring.", "surprise, the whole household is {v} now, me included"),
                "negation": ("I stopped being a {o}.", "had a steak last night, so much for being {o}"),
                "correction": ("I used the wrong word: I'm a {v}, not a {o}.", "not {o}!! {v}. I always get those wrong"),
            },
        },
    ),
    Topic(
        name="phone",
        relation="uses a phone by",
        question="Which phone does the user have?",
        gone="The user no longer uses the {o} phone.",
        values={"tune": ("Pixel", "iPhone", "Fairphone"), "report": ("Galaxy", "Xperia", "OnePlus")},
        says={
            "tune": {
                "state": ("My phone is a {v}.", "typing this on my {v}, sorry for the typos"),
                "new": ("My phone is a {v} now.", "finally got a {v}, that camera!"),
                "event": ("I swapped my {o} for a {v}.", "my {o} fell into the lake so now it's a {v}"),
                "negation": ("I lost my {o}.", "somebody stole the {o} on the tram"),
            },
            "report": {
                "state": ("I have a {v} as my phone.", "the {v} in my pocket buzzes all day"),
                "new": ("I switched my phone to a {v}.", "new phone day! it's a {v}"),
                "event": (
                    "I gave the {o} to my niece and bought a {v} phone.",
                    "{o} screen cracked, {v} ordered, end of saga",
                ),
                "negation": ("My {o} phone is broken for good.", "rip {o}, no phone at all until payday"),
            },
        },
    ),
    Topic(
        name="sport",
        relation="trains",
        question="Which sport does the user do?",
        gone="The user no longer does {o}.",
        values={"tune": ("judo", "rowing", "climbing", "fencing"), "report": ("karate", "squash", "sailing", "archery")},
        says={
            "tune": {
                "state": ("I do {v} twice a week.", "my legs are dead, {v} evening again, like every Tuesday"),
                "new": ("I switched from {o} to {v}.", "{o} was getting boring so it's {v} for me now"),
                "event": ("I quit {o} because of my knee.", "the doctor said no and that was it with {o}"),
                "negation": ("I don't do {o} any more.", "I've hung up the {o} shoes"),
            },
            "report": {
                "state": ("I practise {v} at a club.", "can't do Wednesdays, that's {v} night at the club"),
                "new": ("I took up {v} instead of {o}.", "ditched {o}, my new thing is {v}"),
                "event": ("I stopped {o} after the injury.", "shoulder's gone, {o} is history"),
                "negation": ("I gave up {o}.", "haven't been to {o} since Easter and cancelled the membership"),
            },
        },
    ),
    Topic(
        name="drink",
        relation="prefers",
        question="What does the user like to drink in the morning?",
        gone="The user no longer drinks {o} in the morning.",
        values={"tune": ("espresso", "matcha", "rooibos"), "report": ("cappuccino", "chai", "cocoa")},
        says={
            "tune": {
                "state": ("I prefer {v} in the morning.", "nobody talk to me before my {v} in the morning"),
                "new": (
                    "I prefer {v} in the morning now, instead of {o}.",
                    "mornings are {v} mornings now, who knew",
                ),
                "negation": ("I don't drink {o} any more.", "no {o} for me any longer, stomach says no"),
            },
            "report": {
                "state": ("My morning drink is {v}.", "a big mug of {v} every morning, that's me"),
                "new": ("These days I drink {v} in the morning rather than {o}.", "turns out {v} beats {o} at 7 am, converted!"),
                "negation": ("I've cut out {o}.", "the doctor took {o} off my list for good"),
            },
        },
    ),
    Topic(
        name="meeting",
        relation="has the weekly team meeting on",
        question="On which day is the user's weekly team meeting?",
        gone="The user no longer has the weekly team meeting on {o}.",
        values={"tune": ("Monday", "Wednesday", "Friday"), "report": ("Tuesday", "Thursday", "Saturday")},
        says={
            "tune": {
                "state": ("My weekly team meeting is on {v}.", "{v} is team meeting day, so nothing before noon"),
                "new": ("The weekly team meeting was moved from {o} to {v}.", "they shifted the team meeting, {v} now"),
                "correction": (
                    "No, the team meeting is on {v}, not on {o}.",
                    "my bad, team meeting's {v}, I misread it",
                ),
                "negation": ("The weekly team meeting on {o} was cancelled for good.", "no more team meeting on {o}s, hooray"),
            },
            "report": {
                "state": ("We have our weekly team meeting on {v}.", "team meeting every {v}, bring coffee"),
                "new": ("The team meeting takes place on {v} from now on.", "boss pushed the team meeting to {v}, ugh"),
                "correction": (
                    "I got it wrong, the team meeting is on {v} rather than {o}.",
                    "ehm {v}! team meeting's {v}, not {o}",
                ),
                "negation": ("The team meeting on {o} has been dropped.", "they killed the {o} team meeting, finally"),
            },
        },
    ),
    Topic(
        name="sister",
        subject="The user's sister",
        relation="lives in",
        question="Which town does the user's sister live in?",
        gone="The user's sister no longer lives in {o}.",
        values={"tune": ("Dublin", "Zurich", "Bergen"), "report": ("Galway", "Basel", "Tampere")},
        says={
            "tune": {
                "state": ("My sister lives in {v}.", "my sister, who's in {v}, says hi"),
                "new": ("My sister lives in {v} now.", "sis has a place in {v} since last week"),
                "event": ("My sister moved to {v}.", "helped my sister carry sofas, she's in {v} now"),
                "negation": ("My sister doesn't live in {o} any more.", "my sister has left {o} for good"),
            },
            "report": {
                "state": ("My sister's home is in {v}.", "visiting my sister in {v} over the holidays, she owns a flat there"),
                "new": ("My sister has settled in {v}.", "my sister's new address is in {v}, fourth floor no lift"),
                "event": ("My sister relocated from {o} to {v}.", "sister packed up {o}, {v} is her home now"),
                "negation": ("My sister no longer lives in {o}.", "my sister couldn't stand {o} any longer and went travelling"),
            },
        },
    ),
    Topic(
        name="theme",
        relation="prefers",
        question="Which colour theme does the user prefer in the editor?",
        gone="The user no longer uses the {o} theme.",
        values={"tune": ("dark", "light", "sepia"), "report": ("solarized", "monokai", "contrast")},
        says={
            "tune": {
                "state": ("I prefer the {v} theme in my editor.", "always the {v} theme in the editor, my eyes"),
                "new": ("I prefer the {v} theme in my editor.", "turned the editor to the {v} theme and never looked back"),
                "negation": ("I can't stand the {o} theme any more.", "done with that {o} theme"),
            },
            "report": {
                "state": ("My editor theme is {v}.", "the {v} theme in the editor is the only right one"),
                "new": ("My editor theme is {v}.", "gave the {v} theme a try in my editor and it stays"),
                "negation": ("I don't use the {o} theme any longer.", "the {o} theme had to go, headaches"),
            },
        },
    ),
    Topic(
        name="medicine",
        relation="takes",
        question="Which medicine does the user take?",
        gone="The user no longer takes {o}.",
        values={"tune": ("ibuprofen", "metformin", "cetirizine"), "report": ("naproxen", "ramipril", "loratadine")},
        says={
            "tune": {
                "state": ("I take {v} every day.", "popping my {v} every morning like an old man"),
                "new": ("My doctor changed my medicine from {o} to {v}.", "doc put me on {v}, {o} gave me a rash"),
                "event": ("I stopped taking {o}.", "threw the rest of the {o} away, don't need it"),
            },
            "report": {
                "state": ("I'm on {v} for my health.", "one {v} with breakfast, doctor's orders"),
                "new": ("I take {v} instead of {o} now.", "the medicine is {v} these days, {o} didn't agree with me"),
                "event": ("I came off {o}.", "last {o} tablet was in May, all clear"),
            },
        },
    ),
    Topic(
        name="budget",
        relation="has a budget for the kitchen of",
        question="What is the user's budget for the kitchen?",
        gone="The user no longer has a kitchen budget of {o}.",
        values={"tune": ("4500", "5200", "6100"), "report": ("7300", "8400", "9700")},
        says={
            "tune": {
                "state": ("My budget for the kitchen is {v} euros.", "{v} euros for the kitchen, that's all the bank gives us"),
                "new": ("My budget for the kitchen is {v} euros now.", "good news, the kitchen money went up to {v}"),
                "correction": ("{o}. Sorry, I meant {v} euros for the kitchen.", "typo above, kitchen budget {v} not {o}"),
            },
            "report": {
                "state": ("We can spend {v} euros on the kitchen.", "kitchen budget: {v}, don't laugh"),
                "new": ("We changed the kitchen budget to {v} euros.", "had to bump the kitchen budget, it's {v} by now"),
                "correction": (
                    "The kitchen budget is {v} euros, {o} was a mistake.",
                    "aargh wrong cell, it's {v}, not {o}, for the kitchen",
                ),
            },
        },
    ),
)

_GOING = {
    "tune": (
        ("parental leave", "I'm on parental leave until {day}.", "Is the user on parental leave?"),
        ("scaffold", "The scaffold at our house stays until {day}.", "Is there a scaffold at the user's house?"),
        ("crutches", "I have to walk with crutches until {day}.", "Does the user walk with crutches?"),
    ),
    "report": (
        ("sabbatical", "My sabbatical runs until {day}.", "Is the user on sabbatical?"),
        ("road works", "We have road works in front of the house until {day}.", "Are there road works at the user's house?"),
        ("exchange student", "An exchange student lives with us until {day}.", "Does an exchange student live with the user?"),
    ),
}
"""What ends on a day: the words, the sentence, the question."""

_OTHER = {
    "tune": {
        "home": (("Moro em {v}.", "Mudámo-nos para {v} no mês passado."), ("Ich wohne in {v}.", "Wir sind nach {v} gezogen.")),
        "employer": (("Je travaille chez {v}.", "J'ai quitté {o}, je travaille maintenant chez {v}."),),
        "car": (("Conduzco un {v}.", "He vendido el {o} y ahora tengo un {v}."),),
        "sport": (("Ik doe aan {v}.", "Ik ben gestopt met {o} en doe nu {v}."),),
    },
    "report": {
        "home": (("Abito a {v}.", "Ci siamo trasferiti a {v}."), ("Vivo en {v}.", "Nos hemos mudado a {v}.")),
        "employer": (("Ich arbeite bei {v}.", "Ich habe bei {o} gekündigt und arbeite jetzt bei {v}."),),
        "car": (("Je conduis une {v}.", "J'ai vendu la {o}, j'ai maintenant une {v}."),),
        "sport": (("Jag tränar {v}.", "Jag har slutat med {o} och tränar {v} nu."),),
    },
}
"""Half -> topic -> pairs of a sentence that states and one that changes, in another language."""

_TRAPS: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "tune": (
        ("home", "If I lived in {v}, I'd go swimming every day.", ""),
        ("home", 'Translate into German: "I live in {v} now."', ""),
        ("home", "My neighbour Tom moved to {v}.", "Tom"),
        ("employer", "Imagine I worked at {v}, free lunches and all!", ""),
        ("employer", "The email reads: I quit my job and started at {v}. Fix the grammar.", ""),
        ("car", "Haha sure, and tomorrow I'll drive a {v} made of gold.", ""),
        ("car", "Write a story in which I sell everything and drive a {v} to the sea.", ""),
        ("sport", "Should I try {v}?", ""),
        ("diet", "My boss says he is a {v} now.", "boss"),
        ("medicine", 'In the play she says "I take {v} now, not poison".', ""),
    ),
    "report": (
        ("home", "Suppose we moved to {v}, what would rent be?", ""),
        ("home", "Please proofread: My home is in {v} from this month on.", ""),
        ("home", "Our plumber has just moved to {v}.", "plumber"),
        ("employer", "What if {v} hired me, would the commute kill me?", ""),
        ("employer", 'My cousin wrote "I left my company and joined {v}", good for him.', "cousin"),
        ("car", "Yeah right, and I drive a {v} with wings now.", ""),
        ("car", "Once upon a time I sold my soul for a {v}. Continue that tale.", ""),
        ("sport", "Would {v} be good for my back?", ""),
        ("drink", "My flatmate drinks {v} in the morning now, disgusting.", "flatmate"),
        ("medicine", "The leaflet says: stop what you take and use {v} instead.", ""),
    ),
}
"""A topic, a sentence of which nothing is true of the user, and a word that a true fact of it would have."""

_TASKS = {
    "tune": (
        ("Please plan three easy dinners for this week.", "Quick ones, under half an hour each, and write a shopping list."),
        ("Can you draft a short note to my landlord about the heating?", "Keep it polite, two paragraphs at most."),
        ("I need a packing list for a weekend in the mountains.", "It may rain on the second day."),
        ("Explain how a heat pump works, for a ten-year-old.", "Use no formula and one picture in words."),
        ("What's a good present for a friend who likes board games?", "About thirty euros."),
    ),
    "report": (
        ("Please write a birthday poem for a colleague.", "Eight lines, cheerful, it has to rhyme."),
        ("Help me compare two insurance offers.", "Make a table with price and cover, then say which you would take."),
        ("I want to learn some words of Greek before the trip.", "Twenty words with how they are pronounced."),
        ("How do I get candle wax out of a tablecloth?", "I have an iron and some paper here."),
        ("Suggest a title for a talk about bees.", "Five options, none of them a pun."),
    ),
}


def talk(seed: int, half: str = "tune") -> Talk:
    """The talk of a seed.

    Raises:
        SpecError: no such half.
    """
    check_known("half", [half], HALVES)
    chance = random.Random(f"talk/{half}/{seed}")
    turns: list[TalkTurn] = []
    asked: list[TalkQuestion] = []
    used: dict[str, set[str]] = {}
    end = START + (SESSIONS * 30 + 60) * DAY

    def when(session: int) -> float:
        return START + (session * 30 + chance.random() * 5) * DAY

    for topic in chance.sample(TOPICS_OF, TOPICS):
        of = _changed(topic, half, chance, used.setdefault(topic.name, set()), when)
        turns += of
        last = of[-1]
        stale = dict.fromkeys(word for turn in of for word in (turn.value, turn.old) if word and word != last.value)
        over = "" if last.value else last.text
        asked.append(
            TalkQuestion(
                topic=topic.name,
                text=topic.question,
                value=last.value,
                stale=tuple(stale),
                kind=last.kind,
                style=last.style,
                end=over,
            )
        )
    turns += _dated(chance.choice(_GOING[half]), chance, when(0), asked)
    for topic_name, sentence, other in chance.sample(_TRAPS[half], 3):
        pool = next(topic for topic in TOPICS_OF if topic.name == topic_name).values[half]
        left = [value for value in pool if value not in used.get(topic_name, ())]
        if left:
            value = chance.choice(left)
            used.setdefault(topic_name, set()).add(value)
            session = chance.randrange(1, SESSIONS)
            turns.append(
                TalkTurn(
                    session=session,
                    time=when(session),
                    kind="trap",
                    style="plain",
                    text=sentence.format(v=value),
                    topic=topic_name,
                    value=value,
                    other=other,
                )
            )
    for session in range(SESSIONS):
        for task in chance.sample(_TASKS[half], 2):
            turns.append(TalkTurn(session=session, time=when(session), kind="task", style="plain", text=" ".join(task)))
    turns.sort(key=lambda turn: turn.time)
    return Talk(seed=seed, half=half, turns=turns, asked=asked, end=end)


def _changed(topic: Topic, half: str, chance: random.Random, used: set[str], when: Callable[[int], float]) -> list[TalkTurn]:
    """What is said on one topic, in order: it is stated, and most of the time changed, sometimes twice."""
    says = topic.says[half]
    values = list(topic.values[half])
    chance.shuffle(values)
    spoken = _OTHER[half].get(topic.name)
    foreign = chance.choice(spoken) if spoken and chance.random() < 0.25 else None
    sessions = sorted(chance.sample(range(SESSIONS), 3))
    changes = [] if chance.random() < 0.25 else [chance.choice([kind for kind in says if kind != "state"])]
    if changes and changes[0] not in ("negation",) and len(values) > 2 and chance.random() < 0.3:
        changes.append(chance.choice([kind for kind in says if kind != "state"]))
    turns: list[TalkTurn] = []
    old = ""
    for at, kind in enumerate(["state", *changes]):
        ends = kind == "negation" or (kind == "event" and not any("{v}" in sentence for sentence in says[kind]))
        value = "" if ends and foreign is None else values.pop()
        style = "other" if foreign else chance.choice(STYLES[:3])
        if foreign:
            sentence, kind = foreign[min(at, 1)], "new" if at else "state"
        else:
            sentence = says[kind][style == "casual"]
        text = sentence.format(v=value, o=old)
        if style == "task":
            before, after = chance.choice(_TASKS[half])
            text = f"{before} {text} {after}"
        reads = (topic.known(value, correction=kind == "correction"),) if value else (topic.ended(old),)
        turns.append(
            TalkTurn(
                session=sessions[at],
                time=when(sessions[at]),
                kind=kind,
                style=style,
                text=text,
                topic=topic.name,
                value=value,
                old=old,
                reads=reads,
            )
        )
        used |= {value, old}
        old = value
        if not value:
            break
    return turns


def _dated(going: tuple[str, str, str], chance: random.Random, time: float, asked: list[TalkQuestion]) -> list[TalkTurn]:
    """Something that ends on a day before the end of the talk."""
    words, sentence, question = going
    day = chance.choice(("1 April 2024", "15 April", "May 2024"))
    text = sentence.format(day=day)
    known = TalkFact(
        text=text.replace("I'm", "The user is").replace("I have", "The user has"), subject="", relation="", object=""
    )
    asked.append(TalkQuestion(topic="date", text=question, value="", stale=(words,), kind="date", style="plain"))
    return [TalkTurn(session=0, time=time, kind="date", style="plain", text=text, topic="date", value=words, reads=(known,))]
