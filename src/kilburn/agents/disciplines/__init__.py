"""Queue disciplines: which waiting job runs next. One file each; each is a pure choice over a frozen line."""
