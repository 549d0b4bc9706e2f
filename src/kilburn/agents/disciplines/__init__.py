"""Queue disciplines: which waiting job runs next. One file each; each is a pure choice over a frozen line."""

from kilburn.submodules import attach

attach(__name__)
