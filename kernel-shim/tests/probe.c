/* Calls every kind of hook as a C program does and checks what comes back; prints what is wrong, exits 1 if anything is.
   Linked against nothing but libc. Argument: the interface the device is on. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <limits.h>
#include <linux/netlink.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#define DEV "/sys/class/infiniband/metaroce0"
#define NODE "/dev/infiniband/uverbs0"
#define CM_NODE "/dev/infiniband/rdma_cm"

static int failures;
#define CHECK(what)                                                                          \
	do {                                                                                 \
		errno = 0;                                                                   \
		if (!(what)) {                                                               \
			fprintf(stderr, "line %d: %s (errno %d)\n", __LINE__, #what, errno); \
			failures++;                                                          \
		}                                                                            \
	} while (0)
#define FAILS(what, code) CHECK((long)(what) == -1 && errno == (code))

static int reads(int fd, const char *text)
{
	char buffer[64] = "";
	ssize_t n = fd < 0 ? -1 : read(fd, buffer, sizeof buffer - 1);
	if (fd >= 0)
		close(fd);
	return n == (ssize_t)strlen(text) && !strcmp(buffer, text);
}

/* Symbols that today's headers do not name. */
static void *symbol(const char *name)
{
	void *found = dlsym(RTLD_DEFAULT, name);
	if (!found) {
		fprintf(stderr, "no symbol %s\n", name);
		failures++;
	}
	return found;
}

static void opens(void)
{
	int at = open("/sys/class", O_RDONLY | O_DIRECTORY), dev = open(DEV, O_RDONLY);
	CHECK(reads(open(DEV "/node_type", O_RDONLY), "1: CA\n"));
	CHECK(reads(open64(DEV "/ports/1/pkeys/0", O_RDONLY), "0xffff\n"));
	CHECK(reads(open("//sys/class/./net/../infiniband/metaroce0/node_type", O_RDONLY), "1: CA\n"));
	CHECK(reads(openat(at, "infiniband/metaroce0/node_type", O_RDONLY), "1: CA\n"));
	CHECK(reads(openat(dev, "node_type", O_RDONLY), "1: CA\n"));
	CHECK(reads(openat(-1, DEV "/node_type", O_RDONLY), "1: CA\n"));
	CHECK(reads(openat64(dev, "ports/1/link_layer", O_RDONLY), "Ethernet\n"));
	int (*open_2)(const char *, int) = symbol("__open_2"), (*open64_2)(const char *, int) = symbol("__open64_2");
	int (*openat_2)(int, const char *, int) = symbol("__openat_2");
	int (*openat64_2)(int, const char *, int) = symbol("__openat64_2");
	CHECK(reads(open_2(DEV "/node_type", O_RDONLY), "1: CA\n"));
	CHECK(reads(open64_2(DEV "/node_type", O_RDONLY), "1: CA\n"));
	CHECK(reads(openat_2(at, "infiniband/metaroce0/node_type", O_RDONLY), "1: CA\n"));
	CHECK(reads(openat64_2(at, "infiniband/metaroce0/node_type", O_RDONLY), "1: CA\n"));
	FAILS(open(DEV "/node_desc", O_WRONLY), EACCES);
	FAILS(open(DEV "/new", O_RDWR | O_CREAT, 0600), EACCES);
	FAILS(open(DEV "/nothing", O_RDONLY), ENOENT);
	FAILS(open(NODE "/", O_RDWR), ENOTDIR);
	FAILS(open(NULL, O_RDONLY), EFAULT);
	FILE *file = fopen(DEV "/fw_ver", "re");
	CHECK(file != NULL);
	CHECK(file && (file = freopen(DEV "/node_type", "r", file)) && fgetc(file) == '1');
	if (file)
		fclose(file);
	CHECK(fopen64(DEV "/fw_ver", "r+") == NULL && errno == EACCES);
	/* Creating files elsewhere still takes the mode from the third argument. */
	umask(0);
	int made = open("probe-file", O_CREAT | O_RDWR | O_EXCL, 0640);
	struct stat st;
	CHECK(made >= 0 && !fstat(made, &st) && (st.st_mode & 0777) == 0640);
	unlink("probe-file");
	close(made), close(at), close(dev);
}

static void stats(void)
{
	struct stat st;
	struct stat64 st64;
	struct statx sx;
	int at = open("/dev", O_RDONLY | O_DIRECTORY);
	CHECK(!stat(DEV, &st) && S_ISDIR(st.st_mode));
	CHECK(!lstat64(DEV "/node_guid", &st64) && S_ISREG(st64.st_mode));
	CHECK(!stat(NODE, &st) && S_ISCHR(st.st_mode));
	CHECK(!lstat(NODE, &st) && S_ISCHR(st.st_mode));
	dev_t rdev = st.st_rdev;
	CHECK(!stat64(NODE, &st64) && st64.st_rdev == rdev);
	CHECK(!fstatat(at, "infiniband/uverbs0", &st, 0) && st.st_rdev == rdev);
	CHECK(!fstatat64(at, "infiniband/uverbs0", &st64, AT_SYMLINK_NOFOLLOW) && st64.st_rdev == rdev);
	CHECK(!statx(AT_FDCWD, NODE, 0, STATX_BASIC_STATS, &sx) && makedev(sx.stx_rdev_major, sx.stx_rdev_minor) == rdev);
	int node = open(NODE, O_RDWR | O_CLOEXEC);
	CHECK(node >= 0 && !fstat(node, &st) && S_ISCHR(st.st_mode) && st.st_rdev == rdev);
	char text[64];
	snprintf(text, sizeof text, "%u:%u\n", major(rdev), minor(rdev));
	CHECK(reads(open("/sys/class/infiniband_verbs/uverbs0/dev", O_RDONLY), text));
#ifdef __x86_64__
	int (*xstat)(int, const char *, struct stat *) = symbol("__xstat"), (*lxstat)(int, const char *, struct stat *) = symbol("__lxstat");
	int (*fxstatat)(int, int, const char *, struct stat *, int) = symbol("__fxstatat");
	CHECK(!xstat(1, DEV, &st) && S_ISDIR(st.st_mode));
	CHECK(!lxstat(1, NODE, &st) && S_ISCHR(st.st_mode));
	CHECK(!fxstatat(1, at, "infiniband", &st, 0) && S_ISDIR(st.st_mode));
#endif
	CHECK(!access(NODE, R_OK | W_OK));
	CHECK(!faccessat(at, "infiniband/uverbs0", R_OK, AT_EACCESS));
	CHECK(!euidaccess(DEV, R_OK | X_OK) && !eaccess(DEV, R_OK));
	CHECK(!access(CM_NODE, R_OK | W_OK) && !stat(CM_NODE, &st) && S_ISCHR(st.st_mode) && st.st_rdev == rdev);
	CHECK(reads(open("/sys/class/misc/rdma_cm/abi_version", O_RDONLY), "4\n"));
	FAILS(access("/dev/infiniband/uverbs1", F_OK), ENOENT);
	FAILS(access("/sys/class/infiniband/mlx5_0", F_OK), ENOENT);
	close(node), close(at);
}

static int lists(DIR *directory, const char *name)
{
	int found = 0;
	for (struct dirent *entry; directory && (entry = readdir(directory));)
		found |= !strcmp(entry->d_name, name);
	if (directory)
		closedir(directory);
	return found;
}

static void names(const char *interface)
{
	char path[PATH_MAX], small[8], *result;
	struct dirent **list;
	CHECK(lists(opendir("/sys/class/infiniband"), "metaroce0"));
	CHECK(lists(opendir("/dev/infiniband"), "uverbs0"));
	CHECK(lists(opendir(DEV "/device/net"), interface));
	CHECK(scandir("/sys/class/infiniband_verbs", &list, NULL, alphasort) == 4);
	CHECK((result = realpath(DEV "/ports/../device", NULL)) && !strcmp(result, DEV "/device"));
	CHECK((result = canonicalize_file_name(NODE)) && !strcmp(result, NODE));
	CHECK(realpath(NODE, path) == path && !strcmp(path, NODE));
	CHECK(realpath("/dev/infiniband/uverbs1", path) == NULL && errno == ENOENT);
	CHECK(readlink(DEV "/device/infiniband/metaroce0", path, sizeof path) == 5);
	CHECK(!chdir(DEV "/ports") && getcwd(path, sizeof path) == path && !strcmp(path, DEV "/ports"));
	CHECK((result = get_current_dir_name()) && !strcmp(result, DEV "/ports"));
	CHECK((result = realpath("1", NULL)) && !strcmp(result, DEV "/ports/1"));
	CHECK(readlink("/proc/self/cwd", path, sizeof path) == strlen(DEV "/ports") && !memcmp(path, DEV "/ports", strlen(DEV "/ports")));
	CHECK(readlinkat(-1, "/proc/self/cwd", small, sizeof small) == sizeof small && !memcmp(small, DEV, sizeof small));
	CHECK(reads(open("1/sm_sl", O_RDONLY), "0\n"));
	CHECK(!chdir("/"));
	glob_t found = { .gl_offs = 2 };
	CHECK(!glob("/sys/class/infiniband/*/ports/*/state", GLOB_DOOFFS, NULL, &found));
	CHECK(!glob("/dev/infiniband/uverbs*", GLOB_DOOFFS | GLOB_APPEND, NULL, &found) && found.gl_pathc == 2);
	CHECK(!strcmp(found.gl_pathv[2], DEV "/ports/1/state") && !strcmp(found.gl_pathv[3], NODE));
	globfree(&found);
}

/* struct ib_uverbs_ioctl_hdr with two attributes. */
struct request {
	uint16_t length, object, method, count;
	uint64_t reserved;
	uint32_t driver, reserved2;
	struct { uint16_t id, length, flags, data_type; uint64_t data; } attr[2];
};
#define RDMA_VERBS_IOCTL _IOC(_IOC_READ | _IOC_WRITE, 0x1b, 1, 24)

static void ioctls(void)
{
	int node = open(NODE, O_RDWR | O_CLOEXEC), other = open("/dev/zero", O_RDWR), copy = dup(node), channel = -1;
	struct request probe = { .length = 40, .count = 1, .attr = { { 2, 8, 1, 0, 1 } } };
	FAILS(ioctl(node, RDMA_VERBS_IOCTL, &probe), ENOSPC);
	FAILS(ioctl(copy, RDMA_VERBS_IOCTL, &probe), ENOSPC);
	FAILS(ioctl(other, RDMA_VERBS_IOCTL, &probe), ENOTTY);
	FAILS(ioctl(-1, RDMA_VERBS_IOCTL, &probe), EBADF);
	FAILS(ioctl(node, TIOCGWINSZ, &probe), ENOTTY);
	struct request create = { .length = 56, .count = 2, .attr = { { 2, 8, 1, 0, 17 }, { 1, 4, 1, 0, (uintptr_t)&channel } } };
	CHECK(!ioctl(node, RDMA_VERBS_IOCTL, &create) && channel >= 0);
	uint64_t event = 7, back = 0;
	CHECK(fcntl(channel, F_GETFD) == FD_CLOEXEC);
	CHECK(write(channel, &event, 8) == 8 && read(channel, &back, 8) == 8 && back == 7);
	close(channel), close(node), close(copy), close(other);
}

static void netlinks(void)
{
	struct { struct nlmsghdr header; } get = { { 16, 5 << 10 | 1, NLM_F_REQUEST | NLM_F_DUMP, 9, 0 } };
	struct sockaddr_nl kernel = { .nl_family = AF_NETLINK }, from, self;
	char reply[4096] __attribute__((aligned(8)));
	struct iovec part = { &get, sizeof get }, into = { reply, sizeof reply };
	struct msghdr out = { .msg_name = &kernel, .msg_namelen = sizeof kernel, .msg_iov = &part, .msg_iovlen = 1 };
	struct msghdr in = { .msg_name = &from, .msg_namelen = sizeof from, .msg_iov = &into, .msg_iovlen = 1 };
	socklen_t length = sizeof self;
	for (int round = 0; round < 2; round++) {
		int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, 20);
		CHECK(fd >= 0);
		if (round == 0) {
			CHECK(!bind(fd, (struct sockaddr *)&kernel, sizeof kernel));
			CHECK(sendmsg(fd, &out, 0) == sizeof get);
		} else {
			CHECK(sendto(fd, &get, sizeof get, 0, (struct sockaddr *)&kernel, sizeof kernel) == sizeof get);
		}
		CHECK(!getsockname(fd, (struct sockaddr *)&self, &length) && self.nl_pid != 0);
		in.msg_namelen = sizeof from;
		CHECK(recvmsg(fd, &in, MSG_DONTWAIT) > 100 && in.msg_namelen == 12);
		struct nlmsghdr *header = (void *)reply;
		CHECK(header->nlmsg_type == (5 << 10 | 1) && header->nlmsg_seq == 9 && header->nlmsg_pid == self.nl_pid);
		CHECK(memmem(reply, sizeof reply, "metaroce0", 10) != NULL);
		close(fd);
	}
	/* Other netlink protocols still talk to the kernel: RTM_GETLINK. */
	struct { struct nlmsghdr header; char family[16]; } route = { { 32, 18, NLM_F_REQUEST | NLM_F_DUMP, 1, 0 }, { 0 } };
	int fd = socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE);
	CHECK(sendto(fd, &route, sizeof route, 0, (struct sockaddr *)&kernel, sizeof kernel) == sizeof route);
	CHECK(recv(fd, reply, sizeof reply, 0) > 32 && ((struct nlmsghdr *)reply)->nlmsg_type == 16);
	close(fd);
}

static void *looks_until_cancelled(void *unused)
{
	for (;;) {
		int fd = open(DEV "/node_type", O_RDONLY);
		if (fd >= 0)
			close(fd);
	}
	return unused;
}

static void *sends_until_cancelled(void *fd)
{
	char data[4096] = "";
	struct iovec part = { data, sizeof data };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1 };
	while (sendmsg(*(int *)fd, &message, 0) > 0)
		;
	return NULL;
}

static void *looks_often(void *unused)
{
	for (int i = 0; i < 50; i++)
		if (!lists(opendir("/sys/class/infiniband"), "metaroce0") || access(NODE, R_OK))
			return (void *)1;
	return unused;
}

static void threads(void)
{
	pthread_t looker, sender, many[8];
	void *result;
	int pair[2];
	CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
	CHECK(!pthread_create(&looker, NULL, looks_until_cancelled, NULL));
	CHECK(!pthread_create(&sender, NULL, sends_until_cancelled, &pair[0]));
	CHECK(!pthread_cancel(looker) && !pthread_join(looker, &result) && result == PTHREAD_CANCELED);
	CHECK(!pthread_cancel(sender) && !pthread_join(sender, &result) && result == PTHREAD_CANCELED);
	close(pair[0]), close(pair[1]);
	for (int i = 0; i < 8; i++)
		CHECK(!pthread_create(&many[i], NULL, looks_often, NULL));
	/* A child forked while the threads are looking must be able to look, too. */
	pid_t child = fork();
	if (child == 0)
		_exit(looks_often(NULL) != NULL);
	int status = -1;
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	for (int i = 0; i < 8; i++)
		CHECK(!pthread_join(many[i], &result) && result == NULL);
}

/* The kernel's commands, as librdmacm lays them out: header {number, bytes that follow, room for the answer}. */
struct cm_command {
	uint32_t number;
	uint16_t in, out;
	uint64_t word[8];
};

static ssize_t commands(int fd, uint32_t number, uint16_t in, uint16_t out, struct cm_command *command)
{
	command->number = number, command->in = in, command->out = out;
	return write(fd, command, 8 + in);
}

static uint32_t creates_id(int fd)
{
	uint32_t id = ~0u;
	struct cm_command create = { .word = { 77, (uintptr_t)&id, 0x0106 | 2 << 16 } };
	CHECK(commands(fd, 0, 24, 4, &create) == 32);
	return id;
}

static int destroys_id(int fd, uint32_t id)
{
	uint32_t reported = ~0u;
	struct cm_command destroy = { .word = { (uintptr_t)&reported, id } };
	return commands(fd, 1, 16, 4, &destroy) == 24 ? (int)reported : -1;
}

static int has_event(int fd)
{
	struct pollfd ready = { fd, POLLIN, 0 };
	return poll(&ready, 1, 0) == 1 && ready.revents == POLLIN;
}

/* Resolves an address of this host, which gives one event at once. */
static void resolves(int fd, uint32_t id)
{
	struct cm_command resolve = { 0 };
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(7471), .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	memcpy((char *)resolve.word + 28, &to, sizeof to);
	memcpy((char *)resolve.word + 56, &id, sizeof id);
	CHECK(commands(fd, 3, 64, 0, &resolve) == 72);
}

static void *waits_for_event(void *fd)
{
	char event[336];
	struct cm_command get = { .word = { (uintptr_t)event } };
	CHECK(commands(*(int *)fd, 12, 8, sizeof event, &get) == 16);
	return NULL;
}

static void connection_manager(void)
{
	struct stat st;
	struct stat64 st64;
	char event[336];
	struct cm_command get = { .word = { (uintptr_t)event } }, odd = { 0 };
	int fd = open(CM_NODE, O_RDWR | O_CLOEXEC | O_NONBLOCK), copy = dup(fd);
	CHECK(fd >= 0 && fd < 1024 && fcntl(fd, F_GETFD) == FD_CLOEXEC && (fcntl(fd, F_GETFL) & O_NONBLOCK));
	CHECK(!fstat(fd, &st) && S_ISCHR(st.st_mode) && !fstat64(copy, &st64) && S_ISCHR(st64.st_mode));
	FAILS(commands(fd, 12, 8, sizeof event, &get), EAGAIN);
	FAILS(commands(fd, 13, 8, 0, &odd), ENOSYS);
	FAILS(commands(fd, 7, 8, 0, &odd), ENOENT);
	/* Nothing else that is written is taken for a command. */
	int file = memfd_create("x", 0), pair[2];
	CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair) && !fstat(pair[0], &st) && S_ISSOCK(st.st_mode));
	CHECK(commands(file, 12, 8, 0, &get) == 16 && commands(pair[0], 12, 8, 0, &get) == 16);
	close(file), close(pair[0]), close(pair[1]);
	/* Events: readable while there are any, through every copy of the descriptor, counted exactly. */
	uint32_t id = creates_id(fd), other = creates_id(copy);
	CHECK(id != other && !has_event(fd));
	resolves(fd, id), resolves(copy, other);
	CHECK(has_event(fd) && has_event(copy));
	CHECK(commands(copy, 12, 8, sizeof event, &get) == 16 && has_event(fd));
	CHECK(destroys_id(copy, id) == 1 && has_event(fd) && destroys_id(fd, other) == 0 && !has_event(copy));
	CHECK(destroys_id(fd, id) == -1 && errno == ENOENT);
	/* Another channel's id is not ours; a descriptor opened in place of a channel is none. */
	int second = open(CM_NODE, O_RDWR);
	id = creates_id(fd);
	CHECK(destroys_id(second, id) == -1 && errno == EINVAL);
	CHECK(dup2(open("/dev/null", O_WRONLY), second) == second && commands(second, 12, 8, 0, &get) == 16);
	/* A blocked reader is woken by an event, or cancelled. */
	pthread_t waiter;
	void *result;
	CHECK(!fcntl(fd, F_SETFL, 0) && !pthread_create(&waiter, NULL, waits_for_event, &copy));
	resolves(fd, id);
	CHECK(!pthread_join(waiter, &result) && result == NULL);
	CHECK(!pthread_create(&waiter, NULL, waits_for_event, &copy) && !pthread_cancel(waiter));
	CHECK(!pthread_join(waiter, &result) && result == PTHREAD_CANCELED);
	/* A child may go on with what it inherited, or begin anew. */
	for (int anew = 0; anew < 2; anew++) {
		pid_t child = fork();
		if (child == 0) {
			int own = anew ? open(CM_NODE, O_RDWR) : fd;
			resolves(own, anew ? creates_id(own) : id);
			CHECK(has_event(own));
			_exit(failures != 0);
		}
		int status = -1;
		CHECK(waitpid(child, &status, 0) == child && status == 0);
	}
	CHECK(destroys_id(fd, id) == 1);
	close(fd), close(copy), close(second);
}

int main(int argc, char **argv)
{
	/* Descriptors the shim may hold are none of the program's; closing them all must not disturb it. */
	for (int round = 0; round < 2; round++) {
		opens();
		stats();
		names(argc > 1 ? argv[1] : "lo");
		ioctls();
		netlinks();
		threads();
		connection_manager();
		for (int fd = 3; fd < 1024; fd++)
			close(fd);
	}
	return failures != 0;
}
