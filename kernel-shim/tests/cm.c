/* Two processes connect through the rdma_cm device by its commands alone, so without any library or QP.
   Arguments: what happens (talk, reject, nobody, killed, groups, cycles, ends, random) and the address, for
   cycles how many, for random the seed.
   Prints what is wrong, exits 1 if anything is. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(what)                                                                                          \
	do {                                                                                                 \
		errno = 0;                                                                                   \
		if (!(what)) {                                                                               \
			fprintf(stderr, "pid %d line %d: %s (errno %d)\n", getpid(), __LINE__, #what, errno); \
			exit(1);                                                                             \
		}                                                                                            \
	} while (0)

enum { CREATE_ID, DESTROY_ID, BIND_IP, RESOLVE_IP, RESOLVE_ROUTE, QUERY_ROUTE, CONNECT, LISTEN, ACCEPT, REJECT, DISCONNECT, INIT_QP_ATTR, GET_EVENT, JOIN_IP_MCAST = 16, LEAVE_MCAST };
enum { ADDR_RESOLVED = 0, ROUTE_RESOLVED = 2, CONNECT_REQUEST = 4, CONNECT_RESPONSE = 5, UNREACHABLE = 7, REJECTED = 8, ESTABLISHED = 9, DISCONNECTED = 10, MULTICAST_JOIN = 12, TIMEWAIT_EXIT = 15 };

static int cm;
static struct { uint32_t number; uint16_t in, out; char body[512]; } command;
static struct event { uint64_t uid; uint32_t id, event, status; uint32_t qp_num, qkey; char data[256]; uint8_t length, srq, resources, depth; char rest[60]; } event;

static void put(int at, const void *value, int bytes)
{
	memcpy(command.body + at, value, bytes);
}

static void put32(int at, uint32_t value)
{
	put(at, &value, 4);
}

static void put64(int at, uint64_t value)
{
	put(at, &value, 8);
}

/* Commands until this process is killed; 0: never. */
static int commands_to_live;

static int run(uint32_t number, uint16_t in, uint16_t out)
{
	if (commands_to_live && !--commands_to_live)
		kill(getpid(), SIGKILL);
	command.number = number, command.in = in, command.out = out;
	ssize_t written = write(cm, &command, 8 + in);
	int error = errno;
	memset(&command, 0, sizeof command);
	errno = error;
	return written == 8 + in;
}

static uint32_t create_of(uint64_t uid, uint32_t port_space, uint32_t qp_type)
{
	uint32_t id = ~0u;
	put64(0, uid), put64(8, (uintptr_t)&id), put32(16, port_space | qp_type << 16);
	CHECK(run(CREATE_ID, 24, 4));
	return id;
}

static uint32_t create(uint64_t uid)
{
	return create_of(uid, 0x0106, 2);
}

static uint32_t destroy(uint32_t id)
{
	uint32_t reported = ~0u;
	put64(0, (uintptr_t)&reported), put32(8, id);
	CHECK(run(DESTROY_ID, 16, 4));
	return reported;
}

/* The next event, which must be this one. */
static void expect(uint32_t kind, uint64_t uid)
{
	struct pollfd ready = { cm, POLLIN, 0 };
	CHECK(poll(&ready, 1, 30000) == 1);
	put64(0, (uintptr_t)&event);
	CHECK(run(GET_EVENT, 8, sizeof event));
	if (event.event != kind || event.uid != uid)
		fprintf(stderr, "pid %d: event %u of %lu status %d\n", getpid(), event.event, (long)event.uid, (int)event.status);
	CHECK(event.event == kind && event.uid == uid);
}

static void to_address(int at, const char *text, uint16_t port)
{
	struct sockaddr_in v4 = { .sin_family = AF_INET, .sin_port = port };
	struct sockaddr_in6 v6 = { .sin6_family = AF_INET6, .sin6_port = port };
	CHECK(inet_pton(AF_INET, text, &v4.sin_addr) == 1 || inet_pton(AF_INET6, text, &v6.sin6_addr) == 1);
	if (v4.sin_addr.s_addr)
		put(at, &v4, sizeof v4);
	else
		put(at, &v6, sizeof v6);
}

static uint32_t listener(const char *address, uint16_t *port)
{
	char route[208];
	uint32_t id = create(1);
	to_address(8, address, 0), put32(36, id);
	CHECK(run(BIND_IP, 40, 0));
	put32(0, id), put32(4, 8);
	CHECK(run(LISTEN, 8, 0));
	put64(0, (uintptr_t)route), put32(8, id);
	CHECK(run(QUERY_ROUTE, 16, sizeof route));
	memcpy(port, route + 136 + 2, 2);
	CHECK(*port != 0);
	return id;
}

static void param(int at, uint32_t qpn, const char *data, uint8_t resources, uint8_t depth)
{
	uint8_t tail[8] = { strlen(data) + 1, 0, resources, depth, 0, 7, 7, 1 };
	put32(at, qpn), put(at + 8, data, strlen(data) + 1), put(at + 264, tail, 8);
}

static uint32_t connects(const char *address, uint16_t port)
{
	uint32_t id = create(2);
	to_address(28, address, port), put32(56, id), put32(60, 2000);
	CHECK(run(RESOLVE_IP, 64, 0));
	expect(ADDR_RESOLVED, 2);
	put32(0, id);
	CHECK(run(RESOLVE_ROUTE, 8, 0));
	expect(ROUTE_RESOLVED, 2);
	param(0, 77, "who is there", 3, 5), put32(272, id);
	CHECK(run(CONNECT, 288, 0));
	return id;
}

static void accepts(uint32_t id, uint64_t uid, const char *data)
{
	put64(0, uid), put32(280, id);
	if (data)
		param(8, 99, data, 4, 2);
	CHECK(run(ACCEPT, 296, 0));
}

static void opens(void)
{
	CHECK((cm = open("/dev/infiniband/rdma_cm", O_RDWR | O_CLOEXEC)) >= 0);
}

static void client(const char *what, const char *address, uint16_t port)
{
	opens();
	uint32_t id = connects(address, port);
	if (!strcmp(what, "reject")) {
		expect(REJECTED, 2);
		CHECK(event.status == 28 && event.length == 148 && !strcmp(event.data, "go away"));
		CHECK(destroy(id) == 3);
		return;
	}
	expect(CONNECT_RESPONSE, 2);
	CHECK(event.qp_num == 99 && event.length == 196 && !strcmp(event.data, "me"));
	CHECK(event.resources == 2 && event.depth == 4);
	accepts(id, 0, NULL);
	if (!strcmp(what, "killed"))
		kill(getpid(), SIGKILL);
	put32(0, id);
	CHECK(run(DISCONNECT, 4, 0));
	expect(DISCONNECTED, 2);
	expect(TIMEWAIT_EXIT, 2);
	CHECK(destroy(id) == 5);
}

static void server(const char *what, uint32_t listen)
{
	expect(CONNECT_REQUEST, 1);
	uint32_t id = event.id;
	CHECK(id != listen && event.qp_num == 77 && event.length == 56 && !strcmp(event.data, "who is there"));
	CHECK(event.resources == 5 && event.depth == 3);
	if (!strcmp(what, "reject")) {
		uint8_t length = 8;
		put32(0, id), put(4, &length, 1), put(8, "go away", 8);
		CHECK(run(REJECT, 264, 0) && destroy(id) == 0);
	} else {
		accepts(id, 3, "me");
		expect(ESTABLISHED, 3);
		expect(DISCONNECTED, 3);
		CHECK((int)event.status == (strcmp(what, "killed") ? 0 : -ETIMEDOUT));
		CHECK(destroy(id) == 2);
	}
	CHECK(destroy(listen) == 1);
}

static uint32_t join(uint32_t id, const char *group, int error)
{
	uint32_t handle = ~0u;
	put64(0, (uintptr_t)&handle), put64(8, 5), to_address(16, group, 0), put32(44, id);
	int got = run(JOIN_IP_MCAST, 48, 4) ? 0 : errno;
	CHECK(got == error);
	return handle;
}

static uint32_t leave(uint32_t handle)
{
	uint32_t reported = ~0u;
	put64(0, (uintptr_t)&reported), put32(8, handle);
	CHECK(run(LEAVE_MCAST, 16, 4));
	return reported;
}

static int quiet(void)
{
	struct pollfd ready = { cm, POLLIN, 0 };
	return poll(&ready, 1, 0) == 0;
}

/* A datagram id joins and leaves groups; the events it took are counted for the group and for the id. */
static void groups(const char *address)
{
	int v6 = strchr(address, ':') != NULL;
	const char *group = v6 ? "ff05::1:3" : "239.1.2.3";
	uint8_t gid[16] = { 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 239, 1, 2, 3 };
	if (v6)
		CHECK(inet_pton(AF_INET6, group, gid) == 1);
	uint32_t id = create_of(4, 0x0111, 4);
	join(id, group, EINVAL);
	to_address(8, address, 0), put32(36, id);
	CHECK(run(BIND_IP, 40, 0));
	join(id, address, EINVAL);
	join(id, v6 ? "239.1.2.3" : "ff05::1:3", EINVAL);
	uint32_t handle = join(id, group, 0);
	expect(MULTICAST_JOIN, 5);
	CHECK(event.id == handle && event.status == 0 && event.qp_num == 0xffffff && event.qkey == 0x01234567);
	CHECK(memcmp(event.data, gid, 16) == 0);
	CHECK(leave(handle) == 1 && quiet());
	put64(0, (uintptr_t)&handle), put32(8, handle);
	int left = run(LEAVE_MCAST, 16, 4) ? 0 : errno;
	CHECK(left == ENOENT);
	handle = join(id, group, 0);
	CHECK(!quiet() && leave(handle) == 0 && quiet());
	join(id, group, 0);
	CHECK(destroy(id) == 1 && quiet());
	uint32_t stream = create(6);
	to_address(8, address, 0), put32(36, stream);
	CHECK(run(BIND_IP, 40, 0));
	join(stream, group, EINVAL);
	destroy(stream);
}

static int descriptors(void)
{
	int count = 0;
	for (int fd = 0; fd < 4096; fd++)
		count += fcntl(fd, F_GETFD) >= 0;
	return count;
}

static long pages(void)
{
	long size, resident = 0;
	FILE *statm = fopen("/proc/self/statm", "r");
	CHECK(statm && fscanf(statm, "%ld %ld", &size, &resident) == 2);
	fclose(statm);
	return resident;
}

/* Ends an id. Nothing grows from one quarter of all connections to the next, memory by 2 MiB at most; of a client's
   nothing waits any more after its end. */
static void ended(uint32_t id, uint64_t uid, int round, int count)
{
	static int had_descriptors;
	static long had_pages;
	int quarter = (round + 1) % (count / 4) == 0;
	if (quarter && uid == 2)
		expect(TIMEWAIT_EXIT, uid);
	destroy(id);
	if (quarter && !had_descriptors)
		had_descriptors = descriptors(), had_pages = pages();
	else if (quarter) {
		if (descriptors() != had_descriptors || pages() > had_pages + 512)
			fprintf(stderr, "%d descriptors, had %d; %ld pages, had %ld\n", descriptors(), had_descriptors, pages(), had_pages);
		CHECK(descriptors() == had_descriptors && pages() <= had_pages + 512);
	}
}

static void cycles(const char *address, uint16_t port, uint32_t listen, int count)
{
	pid_t child = fork();
	if (child == 0) {
		opens();
		for (int round = 0; round < count; round++) {
			uint32_t id = connects(address, port);
			expect(CONNECT_RESPONSE, 2);
			accepts(id, 0, NULL);
			put32(0, id);
			CHECK(run(DISCONNECT, 4, 0));
			expect(DISCONNECTED, 2);
			ended(id, 2, round, count);
		}
		exit(0);
	}
	for (int round = 0; round < count; round++) {
		expect(CONNECT_REQUEST, 1);
		uint32_t id = event.id;
		accepts(id, 3, "me");
		expect(ESTABLISHED, 3);
		expect(DISCONNECTED, 3);
		ended(id, 3, round, count);
	}
	int status = -1;
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(destroy(listen) == (uint32_t)count);
}

/* What an id hears last, of all that may follow. */
static uint32_t last_event(uint32_t listen)
{
	for (;;) {
		struct pollfd ready = { cm, POLLIN, 0 };
		CHECK(poll(&ready, 1, 30000) == 1);
		put64(0, (uintptr_t)&event);
		CHECK(run(GET_EVENT, 8, sizeof event));
		switch (event.event) {
		case CONNECT_REQUEST:
			accepts(event.id, 3, "me");
			break;
		case CONNECT_RESPONSE:
			accepts(event.id, 0, NULL);
			break;
		case ESTABLISHED:
			break;
		default:
			if (event.id != listen)
				destroy(event.id);
			return event.event;
		}
	}
}

/* A child that listens, and says where: gives what fork() does, in the child with the id of its listener. */
static pid_t listening_child(const char *address, uint16_t *port, uint32_t *listen)
{
	int told[2];
	CHECK(pipe(told) == 0);
	pid_t child = fork();
	if (child == 0) {
		opens();
		*listen = listener(address, port);
		CHECK(write(told[1], port, 2) == 2);
	} else {
		CHECK(read(told[0], port, 2) == 2);
	}
	close(told[0]), close(told[1]);
	return child;
}

/* One side is killed before each of its commands in turn: the other hears of it. The first six of a client lead to
   its request; who is killed before them was never seen. */
static void ends(const char *address)
{
	enum { BEFORE_REQUEST = 6, POINTS = 11 };
	int had = descriptors();
	for (int point = 1; point <= POINTS; point++) {
		uint16_t port;
		opens();
		uint32_t listen = listener(address, &port);
		pid_t child = fork();
		if (child == 0) {
			opens();
			commands_to_live = point;
			uint32_t id = connects(address, port);
			expect(CONNECT_RESPONSE, 2);
			accepts(id, 0, NULL);
			for (;;)
				run(QUERY_ROUTE, 4, 0);
		}
		if (point > BEFORE_REQUEST) {
			uint32_t last = last_event(listen);
			CHECK(last == UNREACHABLE || last == REJECTED || last == DISCONNECTED);
		}
		int status = -1;
		CHECK(waitpid(child, &status, 0) == child && WTERMSIG(status) == SIGKILL);
		CHECK(quiet());
		destroy(listen);
		close(cm);
	}
	for (int point = 1; point <= POINTS; point++) {
		uint16_t port;
		uint32_t listen;
		pid_t child = listening_child(address, &port, &listen);
		if (child == 0) {
			commands_to_live = point;
			if (last_event(listen))
				for (;;)
					run(QUERY_ROUTE, 4, 0);
		}
		opens();
		uint32_t id = connects(address, port);
		if (point > 3)
			/* It sees everything through, and is killed when it has nothing more to do. */
			expect(CONNECT_RESPONSE, 2), accepts(id, 0, NULL), put32(0, id), run(DISCONNECT, 4, 0);
		uint32_t last = last_event(~0u);
		CHECK(last == UNREACHABLE || last == REJECTED || last == DISCONNECTED);
		int status = -1;
		CHECK(waitpid(child, &status, 0) == child && WTERMSIG(status) == SIGKILL);
		close(cm);
	}
	for (int waited = 0; descriptors() > had + 8 && waited < 100; waited++)
		usleep(50000);
	CHECK(descriptors() <= had + 8);
}

static uint64_t chance;

static uint32_t below(uint32_t limit)
{
	chance = chance * 6364136223846793005u + 1442695040888963407u;
	return (chance >> 33) % limit;
}

static void dies(int signal)
{
	(void)signal;
	kill(getpid(), SIGKILL);
}

/* This process is killed in the midst of whatever it does by then. */
static void dies_within(uint32_t microseconds)
{
	struct itimerval when = { { 0, 0 }, { 0, 1 + below(microseconds) } };
	CHECK(signal(SIGALRM, dies) != SIG_ERR && setitimer(ITIMER_REAL, &when, NULL) == 0);
}

static int is_dead(pid_t child)
{
	int status = 0;
	pid_t got = waitpid(child, &status, WNOHANG);
	CHECK(got == 0 || (got == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL));
	return got != 0;
}

/* One side makes connections and ends them until it is killed, at moments that chance chooses: the other hears the end
   of each connection that it knows of, and nothing is left. */
static void at_random(const char *address, uint64_t seed)
{
	enum { DEATHS = 20, WITHIN = 5000 };
	uint16_t port;
	chance = seed;
	int had = descriptors();
	for (int death = 0; death < DEATHS; death++, below(2)) {
		opens();
		uint32_t listen = listener(address, &port);
		pid_t child = fork();
		if (child == 0) {
			dies_within(WITHIN);
			opens();
			for (;;) {
				uint32_t id = connects(address, port);
				expect(CONNECT_RESPONSE, 2);
				accepts(id, 0, NULL);
				put32(0, id);
				run(DISCONNECT, 4, 0);
				expect(DISCONNECTED, 2);
				destroy(id);
			}
		}
		for (int open = 0, dead = 0; open || !dead || !quiet();) {
			dead = dead || is_dead(child);
			struct pollfd ready = { cm, POLLIN, 0 };
			if (poll(&ready, 1, open && dead ? 30000 : 1) == 0) {
				CHECK(!open || !dead);
				continue;
			}
			put64(0, (uintptr_t)&event);
			CHECK(run(GET_EVENT, 8, sizeof event));
			if (event.event == CONNECT_REQUEST)
				accepts(event.id, 3, "me"), open++;
			else if (event.event != ESTABLISHED)
				destroy(event.id), open--;
		}
		destroy(listen);
		close(cm);
	}
	for (int death = 0; death < DEATHS; death++, below(2)) {
		uint32_t listen;
		pid_t child = listening_child(address, &port, &listen);
		if (child == 0) {
			dies_within(WITHIN);
			for (;;)
				last_event(listen);
		}
		opens();
		for (uint32_t last = DISCONNECTED; last == DISCONNECTED;) {
			uint32_t id = connects(address, port);
			struct pollfd ready = { cm, POLLIN, 0 };
			CHECK(poll(&ready, 1, 30000) == 1);
			put64(0, (uintptr_t)&event);
			CHECK(run(GET_EVENT, 8, sizeof event));
			last = event.event;
			if (last == CONNECT_RESPONSE) {
				accepts(id, 0, NULL);
				put32(0, id), run(DISCONNECT, 4, 0);
				last = last_event(id);
			}
			CHECK(last == UNREACHABLE || last == REJECTED || last == DISCONNECTED);
			destroy(id);
		}
		int status = -1;
		CHECK(waitpid(child, &status, 0) == child && WTERMSIG(status) == SIGKILL);
		close(cm);
	}
	for (int waited = 0; descriptors() > had + 8 && waited < 100; waited++)
		usleep(50000);
	CHECK(descriptors() <= had + 8);
}

int main(int argc, char **argv)
{
	CHECK(argc == 3 || argc == 4);
	const char *what = argv[1], *address = argv[2];
	uint16_t port;
	if (!strcmp(what, "ends")) {
		ends(address);
		return 0;
	}
	if (!strcmp(what, "random")) {
		CHECK(argc == 4);
		at_random(address, strtoull(argv[3], NULL, 10));
		return 0;
	}
	opens();
	if (!strcmp(what, "groups")) {
		groups(address);
		return 0;
	}
	if (!strcmp(what, "cycles")) {
		CHECK(argc == 4);
		uint32_t listen = listener(address, &port);
		cycles(address, port, listen, atoi(argv[3]));
		return 0;
	}
	uint32_t listen = listener(address, &port);
	if (!strcmp(what, "nobody")) {
		destroy(listen);
		uint32_t id = connects(address, port);
		expect(REJECTED, 2);
		CHECK(event.status == 8 && destroy(id) == 3);
		return 0;
	}
	for (int round = 0; round < 5; round++) {
		pid_t child = fork();
		if (child == 0) {
			client(what, address, port);
			return 0;
		}
		server(what, listen);
		int status = -1;
		CHECK(waitpid(child, &status, 0) == child);
		CHECK(strcmp(what, "killed") ? status == 0 : WTERMSIG(status) == SIGKILL);
		if (round < 4)
			listen = listener(address, &port);
	}
	return 0;
}
