/*
 * Uses planes: shows them, keeps all traffic on one of them, and reads what each path has carried.
 *
 *   cc planes.c -lmetaroce -libverbs -o planes
 *   METAROCE_PLANES=a=127.0.0.1,b=::1 metaroce run -- ./planes
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#include <metaroce/metaroce.h>

#include "pair.h"

#define OF(type) { .size = sizeof(struct type) }

static const char *admin_name(uint32_t admin)
{
	return admin == METAROCE_ADMIN_UP ? "up" : admin == METAROCE_ADMIN_DRAIN ? "drain" : "down";
}

static struct metaroce_plane plane_of(struct ibv_context *context, uint32_t number)
{
	struct metaroce_plane plane;

	memset(&plane, 0, sizeof(plane));
	plane.size = sizeof(plane);
	MUST(metaroce_query_plane(context, number, &plane));
	return plane;
}

static void show_planes(struct ibv_context *context, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++) {
		struct metaroce_plane plane = plane_of(context, i);

		printf("plane %u %s on %s, mtu %u, link %s, %s: %llu data packets sent\n", i, plane.label, plane.netdev,
		       plane.mtu, plane.link ? "up" : "down", admin_name(plane.admin),
		       (unsigned long long)plane.tx_data_packets);
	}
}

/* Data packets of the connection that a queue pair uses, by plane, out of one snapshot. */
static void sent_by_plane(struct pair *pair, uint64_t sent[2])
{
	struct metaroce_qp qp = OF(metaroce_qp);
	struct metaroce_path path = OF(metaroce_path);
	struct metaroce_snapshot_info info = OF(metaroce_snapshot_info);
	struct metaroce_plane plane = OF(metaroce_plane);
	struct metaroce_snapshot *snapshot;
	uint64_t all[2] = { 0, 0 };

	sent[0] = sent[1] = 0;
	MUST(metaroce_query_qp(pair->qp[0], &qp));
	CHECK(qp.qp_num == pair->qp[0]->qp_num && qp.dest_qp_num == pair->qp[1]->qp_num);
	CHECK(qp.qp_state == IBV_QPS_RTS && qp.qp_type == IBV_QPT_RC && qp.has_connection);
	MUST(metaroce_take_snapshot(pair->context, &snapshot));
	MUST(metaroce_snapshot_info(snapshot, &info));
	CHECK(info.one_moment && info.qps == 2);
	for (uint32_t i = 0; !metaroce_snapshot_path(snapshot, i, &path); i++) {
		all[path.plane] += path.sent;
		if (path.connection == qp.connection)
			sent[path.plane] += path.sent;
	}
	/* The planes' own counters say the same: what is in one snapshot is of one moment. */
	for (uint32_t i = 0; i < 2; i++) {
		MUST(metaroce_snapshot_plane(snapshot, i, &plane));
		CHECK(plane.tx_data_packets == all[i]);
	}
	CHECK(metaroce_snapshot_plane(snapshot, 2, &plane) == ENOENT);
	metaroce_free_snapshot(snapshot);
}

int main(void)
{
	struct ibv_context *context = open_device("metaroce0");
	struct metaroce_device_attr device = OF(metaroce_device_attr);
	struct metaroce_version version = OF(metaroce_version);
	struct pair pair;
	uint64_t before[2], after[2];
	uint32_t kept;

	MUST(metaroce_query_version(context, &version));
	MUST(metaroce_query_device(context, &device));
	printf("API %u.%u, device %u.%u, wire %u; %u planes of %u paths\n", version.api_major, version.api_minor,
	       version.device_api_major, version.device_api_minor, version.wire, device.planes, device.paths_per_plane);
	CHECK(device.caps & METAROCE_CAP_PLANE_ADMIN);
	CHECK(device.planes == 2);

	pair = make_pair(context);
	write_all(&pair, 32);
	sent_by_plane(&pair, before);
	printf("both planes up:  %llu and %llu packets\n", (unsigned long long)before[0], (unsigned long long)before[1]);
	CHECK(before[0] > 1000 && before[1] > 1000);

	for (uint32_t off = 0; off < 2; off++) {
		MUST(metaroce_set_plane_admin(context, off, METAROCE_ADMIN_DRAIN, &kept));
		CHECK(kept == 0 && plane_of(context, off).admin == METAROCE_ADMIN_DRAIN);
		/* The last plane is never taken out of use. */
		CHECK(metaroce_set_plane_admin(context, 1 - off, METAROCE_ADMIN_DOWN, NULL) == EBUSY);
		sent_by_plane(&pair, before);
		write_all(&pair, 32);
		sent_by_plane(&pair, after);
		printf("plane %u drained: %llu and %llu packets\n", off, (unsigned long long)(after[0] - before[0]),
		       (unsigned long long)(after[1] - before[1]));
		CHECK(after[off] == before[off] && after[1 - off] > before[1 - off] + 4000);
		MUST(metaroce_set_plane_admin(context, off, METAROCE_ADMIN_UP, NULL));
		/* It carries traffic again as soon as it has answered. */
		do
			write_all(&pair, 1), sent_by_plane(&pair, before);
		while (before[off] == after[off]);
	}
	show_planes(context, device.planes);
	free_pair(&pair);
	MUST(ibv_close_device(context));
	return 0;
}
