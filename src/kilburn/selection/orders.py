"""Standing orders in a user's message: sentences that remain valid after it ("never push"), and corrections ("no, port 8081").

`find_orders` reads the structure of a message first: code, quotations, tables, logs, mail, chat exports and documentation that
the user pasted are not the user's words, unless the user says so around them ("follow these rules:"). Of the rest it judges each
sentence by a few words: those that make an instruction last (`_LASTING`), those that forbid or wish, and the words with which a
statement begins. No model is asked, and each message is judged once. Other wordings are not recognized.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import zip_longest
from typing import NamedTuple

from kilburn.page import Span

LONG = 2000
"""Minimum characters of a message that is assumed to contain pasted text, and maximum characters read at each of its ends."""

MAX_SENTENCE = 400
"""Maximum characters of an order: a longer sentence is not an instruction."""

_LASTING = (
    r"from (?:now|here|this \w+) (?:on|forward)(?! the)|going forward|henceforth|in future|at all times|no matter what|by default"
    r"|as a rule|make (?:it|this) a habit|(?:the )?rest of (?:this|the|our) (?:session|conversation|chat|project|day)|immer|nie"
    r"|niemals|nur noch|stets|künftig|in zukunft|ab (?:jetzt|sofort)|von nun an|auf keinen fall|merke? dir|denke? daran"
    r"|vergiss nicht|altijd|nooit|voortaan|vanaf nu|onthoud|in geen geval|alltid|aldrig|framöver|hädanefter|kom ihåg|toujours"
    r"|jamais|désormais|dorénavant|à partir de maintenant|souviens-toi|rappelle-toi|n['’]oublie pas|en aucun cas|siempre|nunca"
    r"|jamás|a partir de ahora|de ahora en adelante|recuerda|no olvides|asegúrate|sempre|a partir de agora|de agora em diante"
    r"|lembre-se|não (?:se )?esqueça|certifique-se|mai|d['’]ora in poi|da ora in poi|ricordati?|non dimenticare|assicurati"
    r"|in nessun caso|zawsze|nigdy|od teraz|odtąd|pamiętaj|pod żadnym pozorem|всегда|никогда|отныне|впредь|запомни|помни"
    r"|не забудь|не забывай|завжди|ніколи|віднині|надалі|пам['’]ятай|asla|her zaman|daima|hep|bundan (?:sonra|böyle)|sakın|unutma"
    r"|jangan|selalu|mulai sekarang|ingatlah|دائما|دائمًا|أبدا|أبدًا|من الآن فصاعدا|تذكر|हमेशा|कभी|मत|अब से|याद रखना"
)
"""Words that make an instruction permanent, in languages with spaces between words."""
_UNSPACED = (
    r"总是|始终|永远|从现在起|从现在开始|以后|记住|不要|别再|切勿|禁止|必须|务必|而不是|现在可以|常に|必ず|絶対に|決して"
    r"|今後|これからは|覚えて|忘れない|ないで|ではなく|항상|절대|앞으로|기억해|잊지 마|지 마|반드시"
)
"""The same in Chinese, Japanese and Korean."""
_SUBJECT = (
    r"i|i['’]\w+|we|we['’]\w+|he|she|it|they|there|this|that|these|those|the|a(?! partir)|an|my|our|his|her|their|your|you"
    r"|everyone|everybody|someone|nobody|nothing|who|what|why|how|where|which|is|are|was|were|did|does|has|have|had|can|could"
    r"|would|will|so|because|maybe|in|thanks?|yesterday|today|last|once|some|many|most|ha|haha|oh|yeah|\w{3,}ing|ich|er|sie|es"
    r"|wir|ihr|der|die|das|ein|eine|mein|meine|unser|unsere|man|wer|was|wie|warum|bei|gestern|heute|leider|dort|hier|je|j['’]\w+"
    r"|il|elle|on|nous|ils|le|la|les|un|une|mon|ma|ce|c['’]\w+|ça|hier|yo|él|ella|nosotros|ellos|el|los|las|mi|ayer|hoy|eu|ele"
    r"|ela|nós|eles|o|os|as|meu|minha|ontem|io|lui|lei|noi|loro|lo|gli|mio|mia|ieri|ik|hij|zij|ze|wij|het|de|een|mijn|gisteren"
    r"|jag|han|hon|vi|det|den|igår|ja|ona|my|to|wczoraj|я|он|она|мы|они|это|вчера|він|вона|ми|вони|це|вчора|ben|biz|dün|saya|dia"
    r"|kami|kemarin|أنا|هو|هي|نحن|أمس|मैं|वह|हम\s|कल"
)
"""First words of a statement or a question, as opposed to an instruction."""
_INNER = r"ich|es|wir|man|je|nous|yo|io|я|мы|ми|i|is|are|was|were|['’]s"
"""Words near the beginning that make a sentence a statement."""
_MANNER = (
    r"(?:ask|avoid|begin|cite|close|default|document|end|finish|follow|format|keep|leave|mind|name|obey|omit|prefer|preserve"
    r"|quote|refer|refuse|remind|respect|sign|skip|speak|spell|start|stay|stick|tag|treat|use|warn)"
)
"""Verbs for the manner of an assistant's work."""
_VERB = (
    rf"(?:{_MANNER}|answer|append|assume|attach|call|challenge|check|commit|confirm|copy|correct|double|double-check|escape"
    rf"|explain"
    r"|fix|give|include|indent|label|limit|log|match|mention|open|pick|post|prefix|read|reject|repeat|reply|report|respond"
    r"|restate|round|run|save|say|send|show|state|store|suggest|tell|test|verify|wait|wrap|write)"
)
"""Verbs for the actions of an assistant."""
_GENERAL = (
    r"(?:\b(?:whenever|wherever|(?:every|each|any) ?time|in the future|unless|without (?:asking|my|me|first|explicit)|nowhere"
    r"|everywhere|throughout|in (?:your|every|each|all (?:my|our|the|your|\w+s\b))|after (?:each|every|any)|everything|anything"
    r"|anybody|anyone|untouched|alone|rather than|(?:every|each|all) (?:\w+ )?(?:replies|reply|answers?|responses?|messages?"
    r"|e-?mails?|commits?)|never|always|at most|(?:before|prior to|when|if) (?:you(?! can)|each|every|any|\w+ing|i|asked|unsure"
    r"|an?|some\w+)|instead(?! of the\b)|nothing else|no (?:more|longer|matter|later))\b|\bnot \w+\W*$)"
)
"""Words that make an imperative a rule, rather than a single request."""
_IMPERATIVE = (
    rf"(?:^|[,;:–—] (?:(?:so|and|but|then|please) )*)(?:{_VERB}\b(?:(?!\b(?:that|which|who|where|why|how)\b).)*?{_GENERAL}"
    rf"|{_MANNER}(?:\W+\w+){{0,5}}?\W+(?:each|every|any|all)\b)|^(?:{_MANNER}|answer|call|fix|give|reply|say|show|write)\b.*(?:, "
    rf"| \()not "
    r"|^let['’]?s (?:always|avoid|keep(?! \w+ing| at)|never|not|stick|use)\b|^keep\b.{1,40}\b(?:below|out of|to \d|under"
    r"|within)\b|^(?:default|speak|spell|stay (?:away|below|in|inside|off|on|out|under|within)|stick|treat)\b(?!.*!$)"
    r"|, so (?:avoid|keep|leave|stick|use)\b"
    rf"|^(?:for|every|each|on) (?!now|example|the|this|a\b)(?:\w+ ){{0,3}}\w+, {_VERB}\b"
    rf"|^{_MANNER}\b(?! (?!existing)\w+ing)(?!.*!$)(?!.*\b(?:the|this|these|that|those|it|them|an?|my|our|one|two|three|next"
    rf"|second|\d+)\b)(?:\W+\w+){{2,}}"
)
"""An imperative that is a rule: with a word of `_GENERAL`, or about no specific thing ("use descriptive names")."""
_WISH = (
    r"^it(?: would|['’]d) be (?:best|better|good|great|nice) if (?:all|each|every|no\b|nothing|you (?:always|never))"
    r"|^we (?:always|don['’]?t|do not|never|only) \w+ .*\bin (?:our|this) (?:code|codebase|company|house|project|repo\w*|team)\b|"
    rf"^we (?:always|never) {_VERB}\b"
    r"|^i['’]d like (?:\w+ )?(?:answers|replies|summaries)\b|^i (?:want|need|expect|would like)\b.*\b(?:(?:after|before|for|in|on"
    r"|with) (?:each|every|any)|whenever)\b|\bimportant (?:to me )?that (?:you|no|all|every)\b|\bif you (?:could"
    r"|would)\b.*\b(?:every|each|all|always|never|whenever)\b|^i (?:(?:really|do|just) )?(?:don['’]?t want (?:you|any|to see)"
    r"|insist|expect you|prefer (?:that|if|it|you\b|\w+ (?:answers|replies)))|^i(?:['’]d| would) (?:rather (?:you|hear|see|have"
    r"|get|not)|prefer (?:it|that|if|you)|like you to (?:\S+ ){1,12}(?:whenever|before|every|each|any))\b|^i(?:['’]d like"
    r"| (?:want|need|would like|expect)) (?:(?:all(?! the)|every|everything|each|no|only)|you to (?:act|always|answer|ask|keep"
    r"|never|not|only|reply|respond|speak|stay|strictly|talk|(?:\S+ ){1,12}(?:whenever|before any\w*|every|each|any)))\b|^(?:we"
    r"|wir)\b.*\b(?:from now on|ab jetzt|ab sofort|von nun an|künftig)\b|^you(?: will|['’]ll) (?:always|answer|never|only|reply"
    r"|respond)\b"
)
"""Expressions of a user's wish."""
_FORBIDS = (
    rf"^(?!(?:{_SUBJECT}|not)\b)(?!\w+(?:s|ed)\b)\w+ (?:[\w-]+ ){{0,4}}only (?:after|by|for|if|in|on|when|with)\b"
    rf"|^only (?!(?:{_SUBJECT}|one|two|three)\b)\w+(?<!s) (?:[\w-]+ )+(?:after|if|when)\b|\bunless otherwise\b"
    r"|^no (?!big|more|other|real)[\w-]+ (?:[\w-]{3,}s\W*$|[\w-]+ (?:in|on|without|before|after|unless|until) )|^(?:keep|leave"
    r"|let) .+ as (?:they are|it is|is|the (?:only|single|sole) .+)\W*$|^(?:choose|favou?r|prefer|value) .+ over \w"
    r"|^no need to (?!apologi|be\b|go\b|hurry|panic|rush|thank|wait|worry)\w+"
    rf"|^only (?:{_VERB}|change|edit|make|modify|touch|work)\b|^(?:give|make|take|use) no\b"
    r"|^(?:always|never|do not|don['’]?t|avoid|refrain|stop \w+ing|no more|hands off|(?:be sure|make sure"
    r"|ensure)(?=.*\b(?:all (?!\w+case)|any|each|every\w*|never|always|before|when\w*|no|not|\w+n['’]t|only|unless|without)\b)"
    r"|remember\b(?! (?:when|the|how|my|our))|keep in mind|prefer|be (?:concise|brief|honest|direct|terse|straight|polite|formal)"
    r"|let me (?:approve|see|check|review|confirm) (?:every|all|each|any|before))\b|^(?:call|address) me (?-i:[A-Z])|^(?:answer"
    r"|reply|respond|speak|write back)(?: \w+){0,2} (?:in|with (?!(?:at \w+ )?\d)|using|briefly)\b|^no (?!problem|worr|idea|way"
    r"|doubt|thank|need|rush|hurry|luck|matter|wonder|longer|one\b)\w+(?:s|ing)?(?:, (?:no \w+|please)| (?:on|within|in|without"
    r"|before|after|unless|until|for|at) )|(?:[,:;–—] |\b(?:and|but|please|just|also) (?:please )?)(?:always|never|do not"
    r"|don['’]?t)(?=\W*$| (?!\w+(?:s|ed)\b))"
)
"""Expressions of a prohibition, or of a manner."""
_DEONTIC = (
    r"\b(?:do not|don['’]?t) ever\b|\b(?:under no circumstances|on no account|at no (?:point|time)|in no case"
    r"|until further notice|until i (?:say|tell|ask)|nobody (?:but|except))\b|\b(?:and|but) (?:never|nothing|nowhere)(?! \w+(?:s"
    r"|ed)\b)|\byou (?:must(?! have\b| be\b)|shall|(?:may|should|need|have|ought) (?:not|only|never|always)\b|are to\b)"
    r"|\byou(?: are|['’]re) (?:not|never|only) (?:allowed|to|supposed|permitted)\b|\b(?:must|should|shall) (?:never|always"
    r"|only)\b(?! have)|^(?!(?:my|the|his|her|our|your|their|these|those|this)\b)(?:\w+ )?\w+[^s\W]s (?:should|must|shall) \w+"
    r"|\b(?:must|shall) not be\b|\b(?:forbidden|prohibited|taboo|banned|out of bounds)\b|\b(?:every (?:single )?time|always"
    r"|without exceptions?|no exceptions|only)(?:[,;] (?:i\b|please|even|not|never)\b.*)?\W*$|\b(?:off[- ]limits|read-only)\b"
    r"|\b(?:is not|are(?: not| only| always)?) to be (?!expected)\w+|^you (?:can|may) (?!see|hear).{3,60} (?:again|after all)\b"
    r"|\b(?:is|are|it['’]s) (?:ok|okay|fine|allowed) (?:again|now)\b|^(?:forget|ignore|drop|disregard) (?:the rule|my (?:rule"
    r"|order)|what i said)\b|^(?:all|every|each|any|no(?! need)|nobody|nothing|only|anything|everything)\b[^,.;?]{1,60}\b(?:must"
    r"|should|shall|may|needs?|ha(?:ve|s) to|(?:is|are) (?:not )?(?:allowed|permitted|to)|without|unless|until)\b"
    r"|^(?!(?:SUBJECT)\b)(?:[\w/.-]+ ){1,4}(?:must (?:not )?(?!be\b|have\b)\w+|(?:must|should) (?:not )?be \w+ed\b)|^(?:my|our"
    r"|the) (?:convention|policy|preference|rule) (?:here )?is\b|\b(?:disallowed|discouraged|hands off)\b|(?:; |[–—]\s?)(?:never"
    r"|always|do not|don['’]?t)(?! (?:you|\w+(?:s|ed))\b)|^(?:ahora )?ya puedes\b|^agora (?:já )?pode|^(?:ora|adesso) puoi\b"
    r"|^теперь можно\b|^(?:tu peux|vous pouvez) (?:de|à) nouveau\b|^je mag .*\bweer\b|\b(?:du|sie) (?:sollst|sollen|darfst|dürfen"
    r"|musst|müssen)\b|\btu (?:ne )?dois\b"
).replace("SUBJECT", _SUBJECT)
"""Expressions of permission and obligation."""
_CONDITION = (
    r"^(?:when|whenever|if)\b[^,]{3,100}, i(?:'d| would)? (?:expect|like|need|want) you to\b|^(?:whoever|whatever"
    r"|wherever)\b[^,]{3,60}, |^in (?:this|our) (?:chat|codebase|conversation|project|repo\w*|session|team),? we\b"
    r"|^let me \w+ .*\b(?:each|every|first|myself)\b|^(?:whenever|any ?time|every time"
    r"|each time)\b[^,]{3,100}(?:, (?!(?:SUBJECT)\b)| please )|^(?:when|if|before|after|prior to) (?:ever )?(?:any\w*|each|every"
    r"|some\w+|nobody|an?|ever|unsure|uncertain|asked|in doubt|there|\w+ing|\w+s are|i (?:ask|mention|say|send|speak|write)"
    r"|i(?: am|['’]m)|you(?! are (?:done|finished|ready)| (?:have|want|like|can|could|choose)\b))\b[^,]{0,100},(?! (?:SUBJECT"
    r"|then|both)\b)"
).replace("SUBJECT", _SUBJECT)
"""Instructions for each case of a kind."""
_FOREIGN_IMPERATIVE = (
    r"^kein\w* (?!ahnung|angst|problem|sorge|zeit)|^(?:bitte )?(?!\w+ (?:ist|war|hat|geht|kann|sind"
    r"|mir)\b)\w+(?: sie)? .*\b(?:nicht|keine?[nms]?)\b|^n(?:e |['’])\w+ .*\b(?:pas|plus)\b|^no \w+(?:es|as|en|an) (?:el|la|los"
    r"|las|un|una|nada|en|a|de|más)\b|^não \w+(?:e|es|em) (?:o|a|os|as|um|uma|nada|em|de)\b|^non \w+(?:are|ere|ire)\b|^(?:nie"
    r"|не) \w+(?:j|jcie|й|йте|и|ите|ь|ьте)\b|\b(?:stattdessen|sondern|вместо|au lieu de|en (?:lugar|vez) de)\b"
)
"""Imperatives that forbid, in other languages than English."""
_PHRASE = (
    r"^(?:don['’]?t (?:worry|bother|get me wrong|mention it|know|you\b(?! dare)|think|tell me|be (?:sorry|shy|silly|afraid)"
    r"|let the|panic|i\b|give up|quit|lose (?:faith|heart|hope)|do it\b|\w+ (?:her|him)\b|forget to \w+ yourself)|(?:never"
    r"|always) (?:in\b|say never|give up|heard|seen|been|had|saw|knew|thought|got|came|felt|took|made|again\W*$|\w+(?:ed|ing)\b)"
    r"|make sure\?|remember (?:when|the)\b|always (?:here|there)\b)|\b(?:don['’]?t be (?:late|shy|sorry)|always the same"
    r"|let (?:me|us) know|you (?:please )?make sure|hesitate|never mind|feel free|never give up)\b"
)
"""Set phrases that resemble orders."""
_REPORTED = (
    r"\b(?:says|said|they told|told me|according to|their|they|kidding|i (?:guess|suppose|think))\b|^(?:imagine|suppose)\b"
    r"|\b(?:believes|claims|thinks|thought|wants) (?:that )?(?:we|you|everyone)\b"
)
"""Words of an order that another person gives."""
_TEMPORARY = (
    r"\b(?:yet|today|tomorrow|tonight|right now|for now|the following)\b|^(?:do not|don['’]?t|stop|let['’]?s|keep|stay)\b.*!$"
)
"""Words of a temporary state, and exclamations, which concern the present."""
_CORRECTION = (
    r"^(?:(?:ok(?:ay)?|sorry|hm+|wait|oh)[,:!.]* +)*(?:no[,.:;—–-]+ (?=.*(?:\d|\b(?:meant|said|not|use|should|instead"
    r"|wrong)\b))(?!thank|but|not (?:yet|really))|nope, \w|not (?:quite|that|what)\b|wrong\b|that(?:['’]s| is) (?:wrong"
    r"|not (?:what|how|right))\b|i meant |i said\b|it(?:['’]s| is) .{2,60}, not |correction|instead,|nein(?=[,.:;])|falsch"
    r"|doch nicht|ich meinte|das stimmt nicht|korrektur|nee(?=[,.])|ik bedoelde|non(?=[,.:])|en fait|je voulais dire"
    r"|c['’]est faux|en realidad|quise decir|me refería|está mal|não(?=[,.:])|na verdade|eu quis dizer|está errado|in realtà"
    r"|volevo dire|intendevo|sbagliato|нет(?=[,.:])|я имел|я имела|неправильно|ні(?=[,.:])|nie(?=[,.:])|hayır|bukan|لا،|नहीं,"
    r"|不(?=[，,。！])|不对|错了|我是说|いいえ|違|いや|아니|틀렸)"
)
"""Beginnings of a correction."""
_OPENING = (
    r"^(?:[-*•+] +|\d+[.)] +)?(?:(?:please|kindly|and|but|so|also|again|then|important|note|reminder|ok(?:ay)?|yes|well|hey|hi|oh"
    r"|bitte|just|one more thing|rule \d+|do me a favou?r(?: and)?|this is an important \w+|s'il te plaît|por favor|per favore"
    r"|alsjeblieft|proszę|пожалуйста)\b[,:!.]* *(?:that )?)*"
)
"""Words before an order."""
_BRIDGE = (
    r"(?:\[[^\]\n]{1,40}\]:?\s+|[#@][\w.-]+:?\s+|<[\w .-]{1,25}>\s+(?!.*</)|(?-i:[A-ZÀ-Þ])\w{1,20}(?: (?-i:[A-Z])\w+)?:\s+)+"
)
"""The prefix that a chat bridge adds to a message: time, name, channel."""
_HEADER = (
    r"^(?:(?:from|to|cc|subject|sent|date|von|an|betreff|de|à|objet|asunto):\s|-{3,} ?(?:original|forwarded)|on .{5,80} wrote:)"
)
"""Lines of a mail's header. After two or more of them, the rest of the text is the mail."""
_FOREIGN = (
    r"(?:\s{4}|\t|>|\||#+ |\$ |`|<(?![\w .-]{1,25}> )|//|/\*|\*\*?/|\d+[:|]|[-=~^_*]{3,}\s*$|:\w+|\.\. |@\w+ \w+ -|\w+Error\b"
    r"|Traceback|(?:INFO|WARN|WARNING|ERROR|DEBUG)\b|[{}\])]|\w+\(.*\)\s*(?:->|$)|\w+ : \w|\d{4}-\d\d-\d\d[ T]\d"
    r"|[\"“«„].*[\"”»“]\W*$|[\"“«„][^\"”»]+[\"”»] )"
)
"""Beginnings of lines that are code, a quotation, a table, a heading, or a program's output."""
_NOUNS = r"(?:conventions?|guidelines?|polic(?:y|ies)|rules?|style(?: guide)?|regeln|reglas|regole|regras|règles|zasady|правила)"
_RULES = (
    rf"^(?:\w+ ){{0,2}}(?:befolge|follow|obey|respect|respecte|siga|segui|sigue|stick to|suis)\b.{{0,40}}\b{_NOUNS}"
    r"\b.{0,20}[:.]$"
    rf"|^(?:(?:these|here) are )?(?:(?:the|these|our|my|some|house) ){{0,2}}(?:\w+ )?{_NOUNS}\b.{{0,30}}:$"
    r"|^(?:规则|規則|ルール|규칙)[:：]$"
)
"""Words of a user that make the list or pasted text after them an order."""
_QUOTED = r"\"[^\"\n]+\"|“[^”\n]+”|«[^»\n]+»|„[^“”\n]+[“”]"
_PLEASE = r"\b(?:please|can you|could you|will you|would you)\b"


_REMINDER = r"(?s:\s*<([\w-]+)>.*</\1>\s*)"
"""Text that a framework sends under the user's name."""
_SENTENCE = r"(?s:.+?)(?:[.!?](?=\s|\Z)|[。！？]|\Z)"
_LASTS = rf"(?<!\w)(?:{_LASTING})(?!\w)"
_ASKED = r"^(?:can|could|will|would) you (?:please )?|,? (?:please|(?:would|will|could|can) you)$"
_FRAME = rf"(?:for )?(?:{_LASTING})[.:]"
_STATEMENT = (
    rf"(?:{_SUBJECT})(?!\w)|\W*(?:\w+ ){{1,3}}(?:{_INNER})\b|.*\b(?:that|which|who|where|if|nobody) (?:\w+ )?(?:never|always)\b"
)


@cache
def _pattern(text: str) -> re.Pattern[str]:
    """Compile a pattern at the first message of a user, so that it does not slow down the import."""
    return re.compile(text, re.IGNORECASE | re.MULTILINE)


def find_orders(text: str) -> tuple[Span, ...]:
    """Return the standing orders in a user's message, as spans in order."""
    if _pattern(_REMINDER).fullmatch(text):
        return ()
    orders: list[Span] = []
    framed = False
    for number, (start, stop, listed) in enumerate(own_sentences(text)):
        sentence = text[start:stop]
        if listed or framed or is_order(sentence) or (number == 0 and _pattern(_CORRECTION).match(sentence)):
            orders.append((start, stop))
        # "For the rest of this session." says that the next sentence lasts.
        framed = _pattern(_FRAME).fullmatch(sentence) is not None
    return tuple(orders)


def is_order(sentence: str) -> bool:
    """Return whether a sentence of a user remains valid after its message."""
    words = _pattern(_QUOTED).sub('""', _pattern(_OPENING).sub("", sentence, count=1))
    if not words or _pattern(_PHRASE).search(words):
        return False
    lasts = _pattern(_LASTS).search(words) or (not words.isascii() and _pattern(_UNSPACED).search(words))
    if sentence[-1] in "?？":
        return _pattern(_PLEASE).search(sentence) is not None and (bool(lasts) or is_order(_pattern(_ASKED).sub("", words[:-1])))
    if _pattern(_WISH).search(words):
        return True
    if _pattern(_IMPERATIVE).search(words):
        return _pattern(_TEMPORARY).search(words) is None
    if _pattern(_CONDITION).match(words):
        return True
    if _pattern(r"(?:i|we)\b").match(words) or _pattern(_REPORTED).search(words):
        return False
    if _pattern(_DEONTIC).search(words):
        return True
    if _pattern(_STATEMENT).match(words):
        return False
    forbids = _pattern(_FORBIDS).search(words) and not _pattern(_TEMPORARY).search(words)
    return bool(lasts or forbids or _pattern(_FOREIGN_IMPERATIVE).search(words))


class _Line(NamedTuple):
    """A line of a message. `paragraph` counts from 0; blank lines in a fence begin none. `foreign`: not the user's own words.
    `fence`: begins or ends code. `wrapped`: its sentence continues on the next line."""

    start: int
    stop: int
    paragraph: int
    foreign: bool
    fence: bool
    wrapped: bool


def own_sentences(text: str) -> Iterator[tuple[int, int, bool]]:
    """Yield the sentences of the user's own words, each with whether it is in a list of rules."""
    # Most messages are one line, which is the user's own unless it looks like code or output.
    is_line = "\n" not in text and len(text) <= LONG
    spans = [(0, len(text), False)] if is_line and not _pattern(_FOREIGN).match(text) else []
    for begin, end, listed in spans if is_line else _own_text(text):
        prefix = _pattern(_BRIDGE).match(text, begin, end)
        for match in _pattern(_SENTENCE).finditer(text, prefix.end() if prefix else begin, end):
            sentence = match[0].strip()
            if sentence and len(sentence) <= MAX_SENTENCE:
                start = match.end() - len(match[0].lstrip())
                yield start, start + len(sentence), listed


def _own_text(text: str) -> Iterator[tuple[int, int, bool]]:
    """Yield the lines that are probably the user's own words; a wrapped line is joined with the next.

    Of a message with pasted text these are the lines before it in the first paragraph, and the last paragraph. What stands in
    the list after "follow these rules:" is the user's whatever it looks like; the flag says so.
    """
    lines = _lines(text)
    pasted = len(text) > LONG or sum(line.foreign for line in lines) > 1 or sum(line.wrapped for line in lines) > 1
    last = lines[-1].paragraph if lines else 0
    closes = last > 0 and not any(line.foreign or line.wrapped for line in lines if line.paragraph == last)
    begin = rules = -1
    opens = True
    for line, follower in zip_longest(lines, lines[1:]):
        opens = opens and not line.foreign and line.paragraph == 0
        is_own = not line.foreign and (not pasted or opens or (closes and line.paragraph == last))
        listed = line.paragraph == rules and not line.fence
        goes_on = line.wrapped and follower is not None and follower.paragraph == line.paragraph
        if is_own or listed:
            begin = line.start if begin < 0 else begin
            if not goes_on:
                yield begin, line.stop, listed
                begin = -1
        if is_own and follower is not None and _pattern(_RULES).search(text, line.start, line.stop):
            rules = follower.paragraph


def _lines(text: str) -> list[_Line]:
    """Return the lines of a message that are not blank; for a long message, only those at its beginning and end."""
    ends = [(0, len(text))]
    if len(text) > 2 * LONG:
        ends = [(0, LONG), (text.find("\n", len(text) - LONG) % len(text), len(text))]
    lines: list[_Line] = []
    fenced = mailed = False
    paragraph, last_stop = 0, 0
    speakers = [re.sub(r"[\W\d]+", "", name) for name in _pattern(f"^{_BRIDGE}").findall(text, 0, LONG)]
    # In the export of a chat somebody speaks twice.
    exported = len(speakers) > max(2, len(set(speakers)))
    mail = len(_pattern(_HEADER).findall(text, 0, LONG)) > 1
    for first, last in ends:
        for match in _pattern(r"^[^\S\n]*\S[^\n]*").finditer(text, first, last):
            start, stop = match.span()
            words = match[0]
            fence = words.lstrip().startswith("```")
            # A blank line, and code, end a paragraph.
            if lines and not fenced and (fence or lines[-1].fence or start > last_stop + 1):
                paragraph += 1
            mailed = mailed or (mail and _pattern(_HEADER).match(words) is not None)
            foreign = fenced or fence or mailed or _pattern(_FOREIGN).match(words) is not None
            foreign = foreign or (exported and _pattern(_BRIDGE).match(words) is not None)
            fenced = fenced is not fence
            wrapped = len(words) > 40 and words[-1] not in ".!?:;" and text[stop + 1 : stop + 2].islower()
            lines.append(_Line(start, stop, paragraph, foreign, fence, wrapped))
            last_stop = stop
    return lines
