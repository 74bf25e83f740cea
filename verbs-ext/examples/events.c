/*
 * Hears of planes and paths while they change, as a program does that sleeps in poll().
 *
 *   cc events.c -lmetaroce -libverbs -o events
 *   METAROCE_PLANES=a=127.0.0.1,b=::1 metaroce run -- ./events
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#include <metaroce/metaroce.h>
#include <poll.h>

#include "pair.h"

static const char *const kinds[] = { "path", "link", "admin" };
static const char *const states[] = { "active", "draining", "shunned", "left", "parked" };
static const char *const causes[] = { "fresh", "silence", "plane", "link", "peer", "answered", "operator" };

static int is_readable(struct metaroce_events *events)
{
	struct pollfd entry = { .events = POLLIN };

	MUST(metaroce_events_fd(events, &entry.fd));
	return poll(&entry, 1, 0) == 1;
}

/* Takes the event that must be there, and prints it. */
static struct metaroce_event take(struct metaroce_events *events)
{
	struct metaroce_event event = { .size = sizeof(event) };

	CHECK(is_readable(events));
	MUST(metaroce_next_event(events, &event));
	CHECK(event.lost == 0);
	printf("%9.3f ms  plane %u: %s", event.time_ns / 1e6, event.plane, kinds[event.kind]);
	if (event.kind == METAROCE_EVENT_PATH)
		printf(" %u of connection %u is %s, source port %u (%s), queue pair %u\n", event.path, event.connection,
		       states[event.state], event.entropy, causes[event.cause], event.qp_num);
	else
		printf(" %u\n", event.state);
	return event;
}

/* Takes all that are there; gives the number of paths of the plane that are in this state now for this cause. */
static int take_all(struct metaroce_events *events, uint32_t plane, uint32_t state, uint32_t cause)
{
	int count = 0;

	while (is_readable(events)) {
		struct metaroce_event event = take(events);

		CHECK(event.plane == plane && event.kind == METAROCE_EVENT_PATH);
		count += event.state == state && event.cause == cause;
	}
	return count;
}

int main(void)
{
	struct ibv_context *context = open_device("metaroce0");
	struct metaroce_device_attr device = { .size = sizeof(device) };
	struct metaroce_event event = { .size = sizeof(event) };
	struct metaroce_qp qp = { .size = sizeof(qp) };
	struct metaroce_events *events, *others;
	struct pair pair;
	int back = 0;

	MUST(metaroce_query_device(context, &device));
	CHECK(device.caps & METAROCE_CAP_EVENTS);
	MUST(metaroce_open_events(context, &events));
	CHECK(!is_readable(events) && metaroce_next_event(events, &event) == EAGAIN);
	pair = make_pair(context);
	write_all(&pair, 8);
	MUST(metaroce_query_qp(pair.qp[0], &qp));
	CHECK(!is_readable(events));

	/* A plane is drained, and with it the paths of both ends' connections. */
	MUST(metaroce_set_plane_admin(context, 1, METAROCE_ADMIN_DRAIN, NULL));
	event = take(events);
	CHECK(event.kind == METAROCE_EVENT_ADMIN && event.plane == 1 && event.state == METAROCE_ADMIN_DRAIN);
	CHECK(take_all(events, 1, METAROCE_PATH_DRAINING, METAROCE_CAUSE_OPERATOR) >= (int)device.paths_per_plane);

	/* Used again. */
	MUST(metaroce_set_plane_admin(context, 1, METAROCE_ADMIN_UP, NULL));
	event = take(events);
	CHECK(event.kind == METAROCE_EVENT_ADMIN && event.state == METAROCE_ADMIN_UP);
	CHECK(take_all(events, 1, METAROCE_PATH_ACTIVE, METAROCE_CAUSE_OPERATOR) >= (int)device.paths_per_plane);

	/* Left, then looked for: its paths come back as soon as they have answered. */
	MUST(metaroce_set_plane_admin(context, 1, METAROCE_ADMIN_DOWN, NULL));
	CHECK(take(events).kind == METAROCE_EVENT_ADMIN);
	CHECK(take_all(events, 1, METAROCE_PATH_PARKED, METAROCE_CAUSE_OPERATOR) >= (int)device.paths_per_plane);
	write_all(&pair, 8);
	CHECK(!is_readable(events));
	MUST(metaroce_set_plane_admin(context, 1, METAROCE_ADMIN_UP, NULL));
	CHECK(take(events).kind == METAROCE_EVENT_ADMIN);
	while (back < (int)device.paths_per_plane) {
		write_all(&pair, 1);
		back += take_all(events, 1, METAROCE_PATH_ACTIVE, METAROCE_CAUSE_ANSWERED);
	}

	/* A source port; who comes later hears of what comes later. */
	MUST(metaroce_open_events(context, &others));
	CHECK(!is_readable(others));
	take_all(events, 1, 0, 0);
	MUST(metaroce_rehash_path(context, qp.connection, 2));
	event = take(events);
	CHECK(event.kind == METAROCE_EVENT_PATH && event.connection == qp.connection && event.path == 2);
	CHECK(event.qp_num == pair.qp[0]->qp_num || event.qp_num == pair.qp[1]->qp_num);
	CHECK(!memcmp(event.peer, qp.peer, sizeof(qp.peer)));
	event = take(others);
	CHECK(event.path == 2 && event.cause == METAROCE_CAUSE_OPERATOR);
	metaroce_close_events(others);

	free_pair(&pair);
	MUST(ibv_close_device(context));
	CHECK(metaroce_next_event(events, &event) == ENODEV);
	metaroce_close_events(events);
	return 0;
}
