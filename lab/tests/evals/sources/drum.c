/* A drum that turns under its heads. */
#include <stdint.h>
#include "drum.h"

#define TRACKS 4096
#define WORD_BITS 0x28
#define NAME "mercury"

static const int latency = 17;

struct head {
	int track;
	uint32_t word;
};

static int seek(struct drum *drum, int track, struct head *head)
{
	if (track >= TRACKS)
		return -1;
	head->track = track;
	return drum_turn(drum, track, head);
}

int drum_read(struct drum *drum, uint32_t address, uint32_t *into) {
	struct head head;
	return seek(drum, address / 32, &head) ? -1 : copy(&head, into, latency);
}

int drum_write(struct drum *drum, uint32_t address, const uint32_t *words, int amount) {
	while (amount--)
		write_word(drum, address++, *words++);
	return 0;
}
