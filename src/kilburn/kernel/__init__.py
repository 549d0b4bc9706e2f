"""The kernel: the only code that moves pages. It imports no policy, store or model; it finds them by name."""

from kilburn.submodules import attach

attach(__name__)
