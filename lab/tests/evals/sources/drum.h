/* What others may call. */
#ifndef DRUM_H
#define DRUM_H

#include <stdint.h>

#define DRUM_VERSION 61
#define DRUM_SPEED 1500

struct drum {
	int speed;
	uint32_t *words;
};

extern int drum_turn(struct drum *drum, int track, struct head *head);
extern int drum_read(struct drum *drum, uint32_t address, uint32_t *into);
extern int drum_write(struct drum *drum, uint32_t address, const uint32_t *words, int amount);
extern void drum_free(struct drum *drum);

/* The drum is stopped by the operator alone. */
extern int drum_stop(struct drum *drum, const char *reason, int force);

#endif
