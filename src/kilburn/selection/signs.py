"""What a single line of a transcript tells: a test's state, an error, a decision, an open task.

Plain patterns over English prose and the output of common tools. A sign is a hint for choosing
lines, never a verdict.
"""

from __future__ import annotations

import re
from enum import IntEnum

from kilburn.selection.lines import plain


class Sign(IntEnum):
    """What a line is, the least informative first."""

    NONE = 0
    PASSED = 1
    WARNING = 2
    DEFINITION = 3
    FRAME = 4
    LEAN = 5
    """A weak sign of intent or reason: "I will", "because"."""
    TASK = 6
    DECISION = 7
    ERROR = 8
    FAILED = 9
    """Names a failed test."""
    SUMMARY = 10
    """A run's totals, or its exit code."""


# A line's words decide which of the slower patterns below are tried.
_SPACES = {ord(char): " " for char in '!"#$%&()*+,-./:;<=>?@[\\]^`{|}~'}


def _bag(words: str) -> frozenset[str]:
    return frozenset(words.split())


_SUMMARY_WORDS = _bag(
    "passed failed failures failure xfailed deselected errors error warnings warning skipped ran ok finished tests"
    " test suites result examples example assertions"
    " assertion specs spec build found make exit exited return returned rc returncode collected process checks fail code"
)
_FAILED_WORDS = _bag("failed error fail e f x not ✕ ✗ ✘ ●")
_ERROR_WORDS = _bag(
    "fatal panic panicked undefined segmentation dumped denied such unrecognized found cannot could unable timed"
    " refused defined module unresolved failed memory"
    " traceback critical e"
)
_ERROR_PARTS = ("rror", "ERROR", "xcept", "Exit", "nterrupt", "Fail", "imeout", "NotFound", "DoesNotExist", "StopIter", "E  ")
_DEFINITION_WORDS = _bag(
    "def class func fn function struct enum trait impl interface type module namespace package macro_rules const define"
)
_PASSED_WORDS = _bag("ok pass passed ✓")
_WARNING_WORDS = _bag("warning warn caution error errors invalid unexpected found failed failure deprecated deprecation")
_DECISION_WORDS = _bag(
    "decided decide decides deciding decision decisions cause caused fix fixed issue problem bug solution reason error"
    " culprit key conclude concluded conclusion"
    " turn turns chose chosen agreed going will responsible resolved confirm confirms confirmed verified must never"
    " always not don't required important note"
    " remember successfully instead rather"
)
_TASK_WORDS = _bag(
    "todo fixme xxx next remaining still need needs has have left pending blocked yet open follow to unfinished should"
)
_LEAN_WORDS = _bag(
    "we'll we i'll let's let because since therefore indicates indicating indicated indicate suggests suggesting"
    " suggested suggest means should seems seem appears"
    " appear likely found located expected instead modify modified modifies modifying change changed changes changing"
    " update updated updates updating add added"
    " adding remove removed removes removing replace replaced replaces replacing"
)


_SUMMARY = re.compile(
    r"(?:^|[\s=(\[])\d+ (?:passed|failed|failures?|xfailed|deselected)\b|^=+.*\b\d+ (?:errors?|warnings?|skipped)\b.*=+$"
    r"|^Ran \d+ tests?\b|^(?:FAILED|OK) ?\((?:failures|errors|skipped|expected|unexpected)|^OK$|tests finished:"
    r"|^Tests?(?: Suites)?:\s+\d"
    r"|^test result:|Tests run: ?\d|\b\d+ (?:examples?|assertions?|tests?|specs?), \d+ |^BUILD \w+"
    r"|^Found \d+ (?:errors?|issues?|match)"
    r"|\b\d+ (?:errors?|warnings?) (?:generated|found)|^make(?:\[\d+\])?: \*\*\*|(?:exit(?:ed)?"
    r"|return(?:ed)?)(?: with)?:? (?:code|status):? ?-?\d"
    r"|^\S*: exit \d|\bFAIL code \d|^\[?(?:exit|rc|returncode)\]?[:=] ?-?\d|^no tests ran|All checks passed|^(?:FAIL"
    r"|ok)\s+\S+\s+[\d.]+s$"
    r"|^collected \d+ items?|^Process finished",
)
_FAILED = re.compile(
    r"^(?:FAILED|ERROR) \S+(?:::\S|\.py\b)|^(?:FAIL|ERROR): \S+|\S \.\.\. (?:ERROR|FAIL(?:ED)?)$|^\w*test\w* [EFX]$"
    r"|^_{3,} .*\w.* _{3,}$|^-+ FAIL: |^not ok \d+|^\S+::\S+ (?:FAILED|ERROR)\b|^(?:✕|✗|✘|●) ",
    re.IGNORECASE,
)
_ERROR = re.compile(
    r"^(?:E {2,}|\w+: )?(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Failure|Timeout|NotFound"
    r"|DoesNotExist|StopIteration)(?::|$| at\b)"
    r"|^(?:E {2,}\w)|^E\d{3,4} |^- [EF]\d{3}\b"
    r"|\b(?:fatal|panic|panicked|undefined reference|segmentation fault|core dumped|permission denied|no such file|unrecognized"
    r"|command not found|cannot \w+|could not|unable to|timed out|connection refused|is not defined|no module named"
    r"|unresolved|syntax errors?"
    r"|assertion failed|out of memory|traceback \(|errors? encountered)\b|\berror(?:\[\w+\])?:|^(?:ERROR|CRITICAL)\b",
    re.IGNORECASE,
)
# Source code that mentions errors reports none: numbered file views, statements, comments, grep hits.
_CODE = re.compile(
    r"^(?:\S+:)?\d+[:|\t]|^(?:raise|except|return|print|log\w*|self|assert|if|elif|else|for|while|import|from|with|try"
    r"|throw|catch|warnings)\b"
    r"|^(?:#|//|/\*|\*|>>>)|^[\w.\[\]]+ \+?= |^[\w.]+\(|[{}]$|^\"|^f?['\"]"
)
_FRAME = re.compile(r'^File "[^"]+", line \d+|^at \S+ ?\(.*:\d+|^\S+\.\w{1,4}:\d+: (?:in \w|\w+Error)|^--> ')
_DEFINITION = re.compile(
    r"^(?:\d+[:|\t ]\s*)?(?:(?:export|default|public|private|protected|static|async|pub(?:\(\w+\))?|abstract|final"
    r"|unsafe|inline|virtual) )*"
    r"(?:def|class|func|fn|function|struct|enum|trait|impl|interface|type|module|namespace|package|macro_rules!|const"
    r"|#define) \(?[\w:*&<]"
)
_PASSED = re.compile(r"(?:\bok|\bOK|\bPASS(?:ED)?|✓)\s*(?:\(.*\))?(?:\[\s*\d+%\])?$|^PASSED ")

_DECISION = re.compile(
    r"\b(?:decid(?:ed|e|ing|es)|decisions?|root cause|caused by|the (?:actual |real |main )?(?:fix|cause|issue|problem"
    r"|bug|solution|reason|error|culprit|key) "
    r"(?:is|was|lies|seems|appears|here|occurs|comes)|fix(?:ed)? (?:is|by|it by)|conclu(?:de|ded|sion)|turns? out|chose"
    r"|chosen|agreed|we will use|going with|"
    r"(?:is|was|are) responsible for|resolved|confirm(?:s|ed)|verified|must(?: not)?|never|always|do not|don't|required"
    r"|important|note that|remember|"
    r"successfully|instead of|rather than)\b",
    re.IGNORECASE,
)
_TASK = re.compile(
    r"\b(?:TODO|FIXME|XXX)\b|^(?:[-*+] |\d+[.)] )?\[ \]|\b(?i:next(?= step| up|,| we| I\b| thing)|remaining"
    r"|still (?:need|to|fail|miss)|needs? to|have to|has to"
    r"|left to do|pending|blocked|not yet|open question|follow[- ]up|to[- ]do|unfinished|we should|I should)\b"
)


def _words(line: str) -> list[str]:
    return line.lower().translate(_SPACES).split()


def classify_line(line: str) -> Sign:
    """Return the sign of a line of tool output."""
    line = plain(line)
    words = _words(line)
    sign = _of_tests(line, words)
    if sign:
        return sign
    if _FRAME.match(line):
        return Sign.FRAME
    if not _DEFINITION_WORDS.isdisjoint(words) and _DEFINITION.match(line):
        return Sign.DEFINITION
    if not _PASSED_WORDS.isdisjoint(words) and _PASSED.search(line):
        return Sign.PASSED
    if _is_error(line, words):
        return Sign.NONE if _CODE.search(line) and ": error" not in line else Sign.ERROR
    if not _WARNING_WORDS.isdisjoint(words) or "Error" in line or "Exception" in line:
        return Sign.NONE if _CODE.search(line) else Sign.WARNING
    return Sign.TASK if "TODO" in line or "FIXME" in line or "[ ] " in line else Sign.NONE


def sign_of_prose(line: str) -> Sign:
    """The sign of a line that a person or a model wrote; tool output that it quotes counts as such."""
    line = plain(line)
    words = _words(line)
    sign = _of_tests(line, words)
    if sign:
        return sign
    if not _DECISION_WORDS.isdisjoint(words) and _DECISION.search(line):
        return Sign.DECISION
    if (not _TASK_WORDS.isdisjoint(words) or "[ ]" in line) and _TASK.search(line):
        return Sign.TASK
    if _is_error(line, words):
        return Sign.ERROR
    if not _LEAN_WORDS.isdisjoint(words):
        return Sign.LEAN
    return Sign.DEFINITION if not _DEFINITION_WORDS.isdisjoint(words) and _DEFINITION.match(line) else Sign.NONE


def _of_tests(line: str, words: list[str]) -> Sign:
    """FAILED, SUMMARY or NONE."""
    if (not _FAILED_WORDS.isdisjoint(words) or line.startswith("___")) and _FAILED.search(line):
        return Sign.FAILED
    if not _SUMMARY_WORDS.isdisjoint(words) and _SUMMARY.search(line):
        return Sign.SUMMARY
    return Sign.NONE


def _is_error(line: str, words: list[str]) -> bool:
    if _ERROR_WORDS.isdisjoint(words):
        for part in _ERROR_PARTS:
            if part in line:
                break
        else:
            return False
    return _ERROR.search(line) is not None


_CASE = re.compile(
    r"^(?:(?:FAIL|ERROR|FAILED|not ok \d+(?: -)?|✕|✗|✘|●|-+ FAIL):?\s+)?[_\s]*(\S+)(?: \(([\w.]+)\))?",
    re.IGNORECASE,
)
_STEPS = re.compile(r"::|:|\.(?!py\b)|/")


def failed_test(line: str) -> tuple[str, str]:
    """Return the class (or "") and name of the test in a FAILED line, equal in all notations of a run."""
    match = _CASE.match(plain(line))
    if match is None:
        return "", plain(line)
    name, owner = match.group(1), match.group(2) or ""
    head, bracket, rest = name.partition("[")
    steps = [step for step in _STEPS.split(head) if step]
    if owner:
        return owner.rsplit(".", 1)[-1] if "." in owner else owner, name
    if not steps:
        return "", name
    owner = steps[-2] if len(steps) > 1 and steps[-2][:1].isupper() else ""
    return owner, steps[-1] + bracket + rest
