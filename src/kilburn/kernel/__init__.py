"""The kernel: the only code that moves pages. It imports no policy, store or model; it finds them by name."""
