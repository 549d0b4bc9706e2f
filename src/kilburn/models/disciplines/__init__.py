"""Queue disciplines: which waiting job runs next. One file each; each is a pure choice over a frozen line."""

from kilburn.models.queue import Discipline
from kilburn.submodules import attach

KIND = Discipline
"""What each file here has a class of."""

attach(__name__)
