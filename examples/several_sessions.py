"""One agent over several sessions: what is said on Monday is known on Friday, until it is corrected, or forgotten.

Each day is a session of its own, and the agent sees nothing of the days before but what is brought into its prompt: facts that
were learned from what Ana said, and a block that the agent keeps for itself, a note. What the agent answers cites the facts that
it was shown, so it is forgotten with them. The model is a script that answers from its prompt alone, so the run is the same
everywhere; `python several_sessions.py --model qwen` takes a real one, or `--model "chat('gpt-5')"`.

It prints:

    Monday
      Ana:   I live in Porto.
      agent: Noted, Ana.
             learned: The user lives in Porto.
    Wednesday
      Ana:   Sorry, I was wrong: I live in Braga.
      agent: Noted, Ana.
             learned: The user lives in Braga.
             no longer true: The user lives in Porto.
    Friday
      Ana:   Where do I live?
      agent: You live in Braga, Ana.
             from @memory/ana f2, made from wednesday p1
      Ana:   My friends call me Captain.
      agent: Noted, Captain.
             the agent changed its block core/agent:
             -The user is called Ana.
             +The user is called Captain.
    Saturday, after Ana restored the block to p1
      Ana:   Where do I live?
      agent: You live in Braga, Ana.
    Sunday, after Ana had wednesday p1 forgotten, with all that was made from it:
             p1, @memory/ana f2, friday p2, saturday p2
      Ana:   Where do I live?
      agent: I do not know, Ana.
    In the files of the store, Braga stands 0 times.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path

import kilburn
from kilburn.agents.tool import Tool
from kilburn.kernel.resolve import resolve
from kilburn.message import Kind
from kilburn.model import Request, complete
from kilburn.testing import Scripted

BLOCK = "core/agent"


def reply(request: Request) -> str | kilburn.Message:
    """What the script says: it may use nothing but what the prompt shows."""
    shown = "\n".join(str(message["content"]) for message in request.messages)
    asked = next(str(message["content"]) for message in reversed(request.messages) if message["role"] == "user")
    called = re.findall(r"The user is called (\w+)", shown)[-1]
    name = re.search(r"call me (\w+)", asked)
    if name and name[1] != called:
        text = json.dumps({"text": f"The user is called {name[1]}."})
        part = kilburn.Part(kind=Kind.CALL, call="c1", name="rewrite", text=text)
        return kilburn.Message(role=kilburn.Role.ASSISTANT, parts=(part,))
    if not asked.startswith("Where"):
        return f"Noted, {called}."
    lives = re.search(r"The user lives in (\w+)", shown)
    return f"You live in {lives[1]}, {called}." if lives else f"I do not know, {called}."


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="", metavar="SPEC", help="a real model in place of the script")
    spec = options.parse_args().model

    with tempfile.TemporaryDirectory() as folder, kilburn.open(f"{folder}/agent.db", tokenizer="chars/4", embedder=None) as store:
        notes, memory = store.notes("ana"), store.memory("ana")
        facts = memory.collection
        block = notes.write(BLOCK, "The user is called Ana.", policy="agent")
        model = resolve("models", spec) if spec else Scripted([reply] * 20)

        def rewrite(text: str) -> str:
            """Rewrite the block that you keep for yourself, such as how the user is called."""
            return notes.write(BLOCK, text, policy="agent").text

        tool = Tool(rewrite)

        def answer(session: kilburn.Session, text: str) -> str:
            """What the agent says to a message, beside which stand the block and what is known about it."""
            known = store.search(text, where="facts", user="ana", abstain=True)
            cites = tuple((facts.number, facts.contents.resolve(fact.address)[0]) for fact in known)
            beside = "\n".join([f"Your block says: {notes.read(BLOCK).text}", "Remembered:", *(fact.text for fact in known)])
            while True:
                messages = [{"role": "system", "content": beside}, *session.render()]
                said = complete(model, Request(messages=messages, tools=(tool.spec,)))
                session.append(kilburn.Message(role=kilburn.Role.ASSISTANT, parts=said.message.parts, cites=cites))
                for call in said.calls:
                    session.append({"role": "tool", "tool_call_id": call.call, "content": tool.call(call.text)})
                if not said.calls:
                    return said.text

        def say(day: str, text: str) -> None:
            """Ana says something, the agent answers, and what she said is learned."""
            session = store.session(day, user="ana")
            session.append({"role": "user", "content": text})
            print(f"  Ana:   {text}")
            print(f"  agent: {answer(session, text)}")
            learned = memory.learn(session)
            for address in learned.stored:
                print(f"         learned: {memory.recall(address)}")
            for address in learned.retired:
                print(f"         no longer true: {memory.recall(address)}")

        print("Monday")
        say("monday", "I live in Porto.")
        print("Wednesday")
        say("wednesday", "Sorry, I was wrong: I live in Braga.")

        print("Friday")
        say("friday", "Where do I live?")
        fact = store.search("Where does the user live?", where="facts", user="ana")[0]
        page, _ = facts.read(facts.contents.resolve(fact.address)[0])
        source = store.segment(page.cites[0][0]).name
        print(f"         from {fact.reference}, made from {source} p{page.cites[0][1]}")
        say("friday", "My friends call me Captain.")
        print(f"         the agent changed its block {BLOCK}:")
        for line in notes.diff(BLOCK).splitlines()[3:]:
            print(f"         {line}")

        notes.restore(BLOCK, block.address)
        print(f"Saturday, after Ana restored the block to {block.address}")
        say("saturday", "Where do I live?")

        gone = store.session("wednesday").forget("p1")
        print("Sunday, after Ana had wednesday p1 forgotten, with all that was made from it:")
        print(f"         {', '.join(gone)}")
        say("sunday", "Where do I live?")
        store.close()
        written = b"".join(path.read_bytes() for path in Path(folder).iterdir())
        print(f"In the files of the store, Braga stands {written.count(b'Braga')} times.")


if __name__ == "__main__":
    main()
