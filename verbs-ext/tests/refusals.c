/*
 * What is not metaroce's, too small, unknown or not there is refused with the right errno; nothing crashes.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#include <metaroce/metaroce.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../examples/pair.h"

#define OF(type) { .size = sizeof(struct type) }

/* A context as another driver, or the library itself, could have made it. */
static void others(void)
{
	static struct ibv_context foreign;
	struct ibv_qp qp = { .context = &foreign };
	struct metaroce_version version = OF(metaroce_version);
	struct metaroce_device_attr device = OF(metaroce_device_attr);
	struct metaroce_plane plane = OF(metaroce_plane);
	struct metaroce_qp attr = OF(metaroce_qp);
	struct metaroce_snapshot *snapshot;
	struct metaroce_events *events;
	/* No functions, functions of the program, of the C library, and no address at all. */
	uintptr_t functions[] = { 0, (uintptr_t)&others, (uintptr_t)&strlen, 1 };

	for (size_t i = 0; i < sizeof(functions) / sizeof(*functions); i++) {
		memcpy(&foreign.ops.poll_cq, &functions[i], sizeof(functions[i]));
		CHECK(metaroce_owns(&foreign) == ENODEV);
		CHECK(metaroce_query_version(&foreign, &version) == ENODEV);
		CHECK(metaroce_query_device(&foreign, &device) == ENODEV);
		CHECK(metaroce_query_plane(&foreign, 0, &plane) == ENODEV);
		CHECK(metaroce_set_plane_admin(&foreign, 0, METAROCE_ADMIN_UP, NULL) == ENODEV);
		CHECK(metaroce_deny_entropy(&foreign, 0, 0) == ENODEV);
		CHECK(metaroce_allow_entropy(&foreign, 0, 0) == ENODEV);
		CHECK(metaroce_rehash_path(&foreign, 0, 0) == ENODEV);
		CHECK(metaroce_query_qp(&qp, &attr) == ENODEV);
		snapshot = (struct metaroce_snapshot *)&plane;
		CHECK(metaroce_take_snapshot(&foreign, &snapshot) == ENODEV && !snapshot);
		events = (struct metaroce_events *)&plane;
		CHECK(metaroce_open_events(&foreign, &events) == ENODEV && !events);
	}
}

static void nothing(struct ibv_context *context)
{
	struct metaroce_plane plane = OF(metaroce_plane);

	CHECK(metaroce_owns(NULL) == EINVAL);
	CHECK(metaroce_query_version(NULL, NULL) == EINVAL);
	CHECK(metaroce_query_version(context, NULL) == EINVAL);
	CHECK(metaroce_query_device(NULL, NULL) == EINVAL);
	CHECK(metaroce_query_device(context, NULL) == EINVAL);
	CHECK(metaroce_query_plane(context, 0, NULL) == EINVAL);
	CHECK(metaroce_query_qp(NULL, NULL) == EINVAL);
	CHECK(metaroce_take_snapshot(context, NULL) == EINVAL);
	CHECK(metaroce_snapshot_info(NULL, NULL) == EINVAL);
	CHECK(metaroce_snapshot_plane(NULL, 0, &plane) == EINVAL);
	metaroce_free_snapshot(NULL);
	CHECK(metaroce_open_events(context, NULL) == EINVAL);
	CHECK(metaroce_next_event(NULL, NULL) == EINVAL && metaroce_events_fd(NULL, NULL) == EINVAL);
	metaroce_close_events(NULL);
}

/* Sizes and masks. */
static void shapes(struct ibv_context *context)
{
	struct {
		struct metaroce_version known;
		uint8_t later[24], guard[8];
	} grown;
	struct metaroce_version version = OF(metaroce_version);

	MUST(metaroce_query_version(NULL, &version));
	CHECK(version.api_major == METAROCE_API_MAJOR && version.api_minor == METAROCE_API_MINOR);
	CHECK(version.device_api_major == 0 && version.wire == 0);
	version.size = sizeof(version) - 1;
	CHECK(metaroce_query_version(context, &version) == EINVAL);
	CHECK(metaroce_query_version(NULL, &version) == EINVAL);
	version.size = 0;
	CHECK(metaroce_query_version(context, &version) == EINVAL);
	version.size = sizeof(version);
	for (int bit = 0; bit < 32; bit++) {
		version.comp_mask = UINT32_C(1) << bit;
		CHECK(metaroce_query_version(context, &version) == EOPNOTSUPP);
	}
	/* A program of a newer header: what this device does not know becomes 0, and nothing behind it is touched. */
	memset(&grown, 0xaa, sizeof(grown));
	grown.known.size = sizeof(grown.known) + sizeof(grown.later);
	grown.known.comp_mask = 0;
	MUST(metaroce_query_version(context, &grown.known));
	CHECK(grown.known.size == sizeof(grown.known) && grown.known.device_api_major == METAROCE_API_MAJOR);
	for (size_t i = 0; i < sizeof(grown.later); i++)
		CHECK(grown.later[i] == 0);
	for (size_t i = 0; i < sizeof(grown.guard); i++)
		CHECK(grown.guard[i] == 0xaa);
}

/* Numbers that there are not; a device that nothing was made with. */
static void numbers(struct ibv_context *context)
{
	struct metaroce_device_attr device = OF(metaroce_device_attr);
	struct metaroce_snapshot_info info = OF(metaroce_snapshot_info);
	struct metaroce_plane plane = OF(metaroce_plane);
	struct metaroce_path path = OF(metaroce_path);
	struct metaroce_qp qp = OF(metaroce_qp);
	struct metaroce_snapshot *snapshot;
	struct pair pair;

	MUST(metaroce_query_device(context, &device));
	CHECK(device.slot == UINT32_MAX && device.planes == 2);
	CHECK(metaroce_set_plane_admin(context, 0, METAROCE_ADMIN_DRAIN, NULL) == ENODEV);
	MUST(metaroce_take_snapshot(context, &snapshot));
	MUST(metaroce_snapshot_info(snapshot, &info));
	CHECK(info.planes == 2 && info.paths == 0 && info.qps == 0);
	metaroce_free_snapshot(snapshot);

	pair = make_pair(context);
	write_all(&pair, 1);
	MUST(metaroce_query_device(context, &device));
	CHECK(device.slot < 1024 && device.now_ns > 0);
	CHECK(metaroce_query_plane(context, 2, &plane) == EINVAL);
	CHECK(metaroce_query_plane(context, UINT32_MAX, &plane) == EINVAL);
	CHECK(metaroce_set_plane_admin(context, 2, METAROCE_ADMIN_UP, NULL) == EINVAL);
	CHECK(metaroce_set_plane_admin(context, 256, METAROCE_ADMIN_UP, NULL) == EINVAL);
	CHECK(metaroce_set_plane_admin(context, 0, (enum metaroce_admin)3, NULL) == EINVAL);
	CHECK(metaroce_deny_entropy(context, 0, device.entropies_per_plane) == EINVAL);
	CHECK(metaroce_rehash_path(context, 4000000, 0) == EINVAL);
	/* As many source ports have to be left as a connection has paths. */
	for (uint32_t i = 0; i < device.entropies_per_plane - device.paths_per_plane; i++)
		MUST(metaroce_deny_entropy(context, 0, i));
	CHECK(metaroce_deny_entropy(context, 0, device.entropies_per_plane - 1) == EBUSY);
	write_all(&pair, 2);
	MUST(metaroce_query_plane(context, 0, &plane));
	CHECK(plane.denied == (UINT64_C(1) << (device.entropies_per_plane - device.paths_per_plane)) - 1);
	MUST(metaroce_take_snapshot(context, &snapshot));
	for (uint32_t i = 0; !metaroce_snapshot_path(snapshot, i, &path); i++)
		CHECK(path.plane != 0 || path.entropy >= device.entropies_per_plane - device.paths_per_plane);
	metaroce_free_snapshot(snapshot);
	for (uint32_t i = 0; i < device.entropies_per_plane - device.paths_per_plane; i++)
		MUST(metaroce_allow_entropy(context, 0, i));
	MUST(metaroce_query_plane(context, 0, &plane));
	CHECK(plane.denied == 0);
	/* Another source port for one path. */
	MUST(metaroce_query_qp(pair.qp[0], &qp));
	MUST(metaroce_rehash_path(context, qp.connection, 1));
	write_all(&pair, 1);
	/* A snapshot outlives the device. */
	MUST(metaroce_take_snapshot(context, &snapshot));
	free_pair(&pair);
	MUST(ibv_close_device(context));
	MUST(metaroce_snapshot_info(snapshot, &info));
	CHECK(info.qps == 2 && !metaroce_snapshot_qp(snapshot, 1, &qp) && metaroce_snapshot_qp(snapshot, 2, &qp) == ENOENT);
	metaroce_free_snapshot(snapshot);
}

/* The child of a fork has a dead copy. */
static void child(struct ibv_context *context)
{
	struct metaroce_version version = OF(metaroce_version);
	struct metaroce_snapshot *snapshot;
	int status;
	pid_t pid = fork();

	CHECK(pid >= 0);
	if (pid == 0)
		_exit(metaroce_query_version(context, &version) != EIO || metaroce_owns(context) != EIO ||
		      metaroce_take_snapshot(context, &snapshot) != EIO);
	CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(void)
{
	struct ibv_context *context;

	others();
	context = open_device("metaroce0");
	MUST(metaroce_owns(context));
	others();
	nothing(context);
	shapes(context);
	child(context);
	numbers(context);
	puts("done");
	return 0;
}
