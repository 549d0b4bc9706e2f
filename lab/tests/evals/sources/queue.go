// Package mill grinds what it is given, one sack after another.
package mill

import "errors"

const capacity = 640

var label = "north mill"

// Queue holds sacks that wait.
type Queue struct {
	sacks []Sack
	Miller
}

// Push adds a sack, unless there is no room.
func (q *Queue) Push(sack Sack, at int, urgent bool) error {
	if len(q.sacks) >= capacity {
		return errors.New("no room")
	}
	q.sacks = append(q.sacks, sack)
	return nil
}

// Grind empties the queue.
func Grind(q *Queue, coarse, fine int) (int, error) {
	done := 0
	for _, sack := range q.sacks {
		done += sack.weight * fine / coarse
	}
	return done, nil
}
