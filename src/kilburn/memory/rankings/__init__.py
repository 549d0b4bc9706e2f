"""Rankings: what puts the candidates of a search in order. One file each."""
