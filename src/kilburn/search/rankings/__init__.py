"""Rankings: what puts the candidates of a search in order. One file each."""

from kilburn.retrieval import Ranking
from kilburn.submodules import attach

KIND = Ranking
"""What each file here has a class of."""

attach(__name__)
