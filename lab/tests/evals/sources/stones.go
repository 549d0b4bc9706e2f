package mill

// Every stone has a maker.
const makers = 12

var wear = 0.125

// Stone is one of a pair.
type Stone struct {
	grooves int
	maker   string
}

// Dress cuts the grooves anew.
func (s *Stone) Dress(depth, width float64, by string) {
	s.grooves++
	s.maker = by
}

// Pair finds the stone that fits.
func Pair(first Stone, others []Stone, tolerance float64) (Stone, bool) {
	for _, other := range others {
		if first.fits(other, tolerance) {
			return other, true
		}
	}
	return Stone{}, false
}
