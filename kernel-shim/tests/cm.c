/* Two processes connect through the rdma_cm device by its commands alone, so without any library or QP.
   Argument: what happens (talk, reject, nobody, killed) and the address. Prints what is wrong, exits 1 if anything is. */
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

enum { CREATE_ID, DESTROY_ID, BIND_IP, RESOLVE_IP, RESOLVE_ROUTE, QUERY_ROUTE, CONNECT, LISTEN, ACCEPT, REJECT, DISCONNECT, INIT_QP_ATTR, GET_EVENT };
enum { ADDR_RESOLVED = 0, ROUTE_RESOLVED = 2, CONNECT_REQUEST = 4, CONNECT_RESPONSE = 5, REJECTED = 8, ESTABLISHED = 9, DISCONNECTED = 10, TIMEWAIT_EXIT = 15 };

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

static int run(uint32_t number, uint16_t in, uint16_t out)
{
	command.number = number, command.in = in, command.out = out;
	ssize_t written = write(cm, &command, 8 + in);
	int error = errno;
	memset(&command, 0, sizeof command);
	errno = error;
	return written == 8 + in;
}

static uint32_t create(uint64_t uid)
{
	uint32_t id = ~0u;
	put64(0, uid), put64(8, (uintptr_t)&id), put32(16, 0x0106 | 2 << 16);
	CHECK(run(CREATE_ID, 24, 4));
	return id;
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

int main(int argc, char **argv)
{
	CHECK(argc == 3);
	const char *what = argv[1], *address = argv[2];
	uint16_t port;
	opens();
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
