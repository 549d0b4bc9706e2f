"""What is a standing order, and what is not."""

from __future__ import annotations

import pytest

import kilburn
from kilburn.selection.orders import find_orders

# Wordings of many kinds. They served to improve the patterns, so the shares here are no estimate for others.
ORDERS = [
    "Don't book anything before nine in the morning.",
    "When you quote me, use my full name.",
    "Please never share the guest list with anyone.",
    "I want a backup taken before each upgrade.",
    "All invoices go to accounting@x.org, no exceptions.",
    "Only use the metric system.",
    "You mustn't restart the production cluster during the day.",
    "Write commit messages in the imperative.",
    "Keep the README in sync with every change.",
    "From now on answer in Dutch.",
    "Avoid global variables.",
    "I'd prefer you asked before deleting anything.",
    "Tests must pass before you push.",
    "If you are not sure, say so.",
    "The configuration file is not to be edited by hand.",
    "Remember that Leo can't have dairy.",
    "Make sure every query has a limit.",
    "Never invent references.",
    "Any change to the schema needs a migration.",
    "Please use she/her for Robin.",
    "Never quote my salary to anybody.",
    "Every answer needs a source.",
    "I'd like all times in UTC.",
    "If a payment fails twice, alert me at once.",
    "Please don't use my first name in letters.",
    "Draft replies only; I send them myself.",
    "When you summarise a meeting, list who was absent.",
    "Nothing may be ordered above 50 euros unless I agree.",
    "Always put the conclusion at the top.",
    "Do not merge your own branches.",
    "The logo must never be stretched.",
    "Ask before installing packages.",
    "No exclamation marks, please.",
    "You are only allowed to read from the replica.",
    "Use the metric ton.",
    "Refer to patients by number, not by name.",
    "For the rest of our project, call the product Orion.",
    "I don't want you to guess at dates.",
    "Once a week, remind me to water the plants.",
    "Whenever someone new joins, send them the welcome guide.",
]

OTHERS = [
    "What should I pack for Iceland?",
    "The invoice was sent last week.",
    "Make the logo a bit bigger.",
    "I never got the hang of chess.",
    "Don't you just love autumn?",
    "Please find a dentist near me.",
    "Which of these is cheaper?",
    "He said he would always be there.",
    "The job runs every hour.",
    "Only three people came.",
    "Can you update the docs for the endpoint?",
    "There is no milk left.",
    "I have to be at work before nine.",
    "It was raining all the time.",
    "We should have booked earlier.",
    "Write a commit message for this diff.",
    "My keys must be in the car.",
    "If the train is late, I miss my flight.",
    "Give it another try.",
    "Is there any way to avoid the fee?",
    "She prefers tea.",
    "Set the timeout to 30 seconds.",
    "When I was young, we had no phone.",
    "Thanks, that was exactly right.",
    "Remove the second button.",
    "I don't think so.",
    "You can stop now.",
    "Read me the last line again.",
    "Everybody was late.",
    "Plot sales per month.",
    "Which file holds the settings?",
    "I always mix up those two.",
    "Send the welcome guide to Omar.",
    "Count the words in this text.",
    "The replica is down.",
    "We never talk about work at home.",
    "Don't be late!",
    "Is there a rule about this?",
    "He may not come.",
    "Every answer was wrong.",
    "What would you rather do?",
    "I'd rather walk.",
    "Only you can decide that.",
    "Please make a backup.",
    "If it fails, we try again.",
    "Let me check my calendar.",
    "The formatter changed every line.",
    "No one answered.",
    "That must be Ben.",
    "Say cheese!",
    "Should it never end?",
    "Merge the two tables.",
    "Use less sugar in this one.",
    "Put the conclusion at the top.",
    "My doctor wants me to avoid coffee.",
    "I'll never understand taxes.",
    "You need to see this film.",
    "All good here.",
    "Add Lena to the invitation.",
    "They should be here by six.",
]


def test_most_wordings_of_orders_are_recognized_and_hardly_anything_else() -> None:
    hits = [text for text in ORDERS if find_orders(text)]
    errors = [text for text in OTHERS if find_orders(text)]
    assert len(hits) >= 0.85 * len(ORDERS)
    assert len(hits) >= 0.95 * (len(hits) + len(errors)), errors


@pytest.mark.parametrize(
    ("orders", "statement"),
    [
        (("Raak de map archief nooit aan.", "Antwoord voortaan altijd in het Nederlands."), "Gisteren heb ik niet geslapen."),
        (("Rör aldrig mappen arkiv.", "Svara alltid på svenska."), "Igår sov jag inte."),
        (("Nigdy nie usuwaj kopii zapasowych.", "Zawsze odpowiadaj po polsku."), "Wczoraj w ogóle nie spałem."),
        (("Ніколи не чіпай теку архів.", "Завжди відповідай українською."), "Вчора я не спав."),
        (("Yedekleri asla silme.", "Bundan sonra hep Türkçe cevap ver."), "Dün hiç uyumadım."),
        (("Jangan pernah hapus cadangan.", "Selalu jawab dalam bahasa Indonesia."), "Kemarin saya tidak tidur."),
        (("لا تلمس مجلد الأرشيف أبدا.", "أجب دائما بالعربية."), "لم أنم أمس."),
        (("बैकअप कभी मत हटाना।", "हमेशा हिंदी में जवाब दो।"), "कल मैं सोया नहीं।"),
    ],
)
def test_orders_in_other_languages(orders: tuple[str, str], statement: str) -> None:
    assert all(map(find_orders, orders))
    assert not find_orders(statement)


def orders_after(*messages: str) -> list[str]:
    """Return the user's messages with standing orders, after a session with these messages."""
    with kilburn.open(":memory:", window=4000, tokenizer="chars/4") as store:
        session = store.session("work")
        for text in messages:
            session.append({"role": "user", "content": text}, {"role": "assistant", "content": "Noted."})
        return [str(session.recall(f"p{page}")) for page in session.window.orders]


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("Always answer in French.", "From now on always answer in German."),
        ("Never push to main.", "Forget the rule about pushing to main."),
        ("Always use tabs.", "From now on never use tabs."),
        ("Antworte immer auf Englisch.", "Bitte antworte immer auf Englisch."),
        ("Ändere nie die Datei config.yml.", "Du darfst die Datei config.yml ab jetzt ändern."),
        ("Ne touche jamais au dossier archives.", "Tu peux de nouveau toucher au dossier archives."),
        ("Nunca borres los registros.", "Ahora ya puedes borrar los registros."),
        ("Никогда не трогай папку архив.", "Теперь можно трогать папку архив."),
        ("以后不要再问我版本号。", "记住，以后不要再问我版本号。"),
    ],
)
def test_the_newest_order_about_the_same_replaces_the_older(older: str, newer: str) -> None:
    assert orders_after("Hello.", older, "Never delete comments.", newer) == ["Never delete comments.", newer]


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("Never email Anna.", "Never email Annie."),
        ("Never email Russell.", "Please never email Holly."),
        ("Never touch core.", "Never touch cors."),
        ("Never answer in German.", "Never answer in Dutch."),
    ],
)
def test_an_order_about_another_thing_replaces_none(older: str, newer: str) -> None:
    assert orders_after("Hello.", older, newer) == [older, newer]
