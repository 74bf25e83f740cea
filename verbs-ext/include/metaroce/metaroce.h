/*
 * libmetaroce.so.1: what metaroce0 offers beyond verbs. Link with -lmetaroce; the objects come from libibverbs.
 *
 * Every function returns 0 or an errno value. A context or queue pair of another device gives ENODEV, NULL gives
 * EINVAL, the child of a fork gives EIO. All functions may be called from any thread at any time; none of them waits
 * for the network.
 *
 * Every structure begins with `size` and `comp_mask`, which the caller sets before the call: sizeof the structure,
 * and the optional parts wanted. No optional parts are defined yet: a bit that is set gives EOPNOTSUPP. A size below
 * that of the structure as declared here gives EINVAL. On return `size` is the number of bytes that were filled; a
 * program built against a newer header finds 0 in what an older device does not know.
 *
 * Addresses are 16 bytes in network order, IPv4 ones as ::ffff:a.b.c.d. Times are nanoseconds of the device's clock, which
 * begins when the device is opened first (`now_ns`, and the completion timestamps of verbs).
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#ifndef METAROCE_METAROCE_H
#define METAROCE_METAROCE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ibv_context;
struct ibv_qp;

#define METAROCE_API_MAJOR 1
#define METAROCE_API_MINOR 0

/* Versions. The same major number means that old programs go on working; the minor one counts additions. */
struct metaroce_version {
	uint32_t size;
	uint32_t comp_mask;
	uint16_t api_major;        /* of the library */
	uint16_t api_minor;
	uint16_t device_api_major; /* of the device behind the context; 0 without one */
	uint16_t device_api_minor;
	uint32_t wire;             /* of the protocol on the wire; 0 without a context */
	uint32_t reserved;
};

/*
 * metaroce_query_version - versions of this library, of the device, and of the protocol on the wire
 *
 * `context` may be NULL: then only the library's version is told.
 */
int metaroce_query_version(struct ibv_context *context, struct metaroce_version *version);

/*
 * metaroce_owns - 0 when the context is an open one of metaroce0, else ENODEV
 */
int metaroce_owns(struct ibv_context *context);

/* What the device can do: bits of `caps`. */
#define METAROCE_CAP_PLANE_ADMIN 1ull /* metaroce_set_plane_admin */
#define METAROCE_CAP_ENTROPY 2ull     /* metaroce_deny_entropy, metaroce_allow_entropy, metaroce_rehash_path */
#define METAROCE_CAP_SNAPSHOT 4ull    /* metaroce_take_snapshot, metaroce_query_qp */
#define METAROCE_CAP_EVENTS 8ull      /* metaroce_open_events */

struct metaroce_device_attr {
	uint32_t size;
	uint32_t comp_mask;
	uint64_t caps;
	uint64_t now_ns;
	uint32_t planes;
	uint32_t paths_per_plane;     /* paths of a connection on each plane */
	uint32_t entropies_per_plane; /* UDP source ports of each plane that paths choose from */
	uint32_t base_port;           /* the device receives on UDP port base_port + slot */
	uint32_t slot;                /* UINT32_MAX while nothing was made with the device */
	uint32_t reserved;
};

/*
 * metaroce_query_device - capabilities, numbers of planes and paths, UDP ports
 */
int metaroce_query_device(struct ibv_context *context, struct metaroce_device_attr *attr);

/* How a plane is to be used. */
enum metaroce_admin {
	METAROCE_ADMIN_UP = 0,
	METAROCE_ADMIN_DRAIN = 1, /* nothing new; what is on its way there may arrive */
	METAROCE_ADMIN_DOWN = 2,  /* nothing: what is on its way there goes again elsewhere */
};

/* A plane: one network, by one interface. The counters are sums over all connections there were. */
struct metaroce_plane {
	uint32_t size;
	uint32_t comp_mask;
	char label[64];      /* pairs it with the peer's planes */
	char netdev[16];
	uint32_t ifindex;
	uint32_t mtu;        /* of the interface, bytes */
	uint32_t link;       /* 1: up and has carrier */
	uint32_t admin;      /* enum metaroce_admin */
	uint64_t denied;     /* source ports not to be used, a bit for each entropy value */
	uint64_t rate_bps;   /* of its link, as configured or as the link says; 0: not known, or without limit */
	uint32_t addr_count; /* all there are; the first eight are below */
	uint32_t reserved;
	uint8_t addrs[8][16];
	uint64_t tx_packets;
	uint64_t tx_bytes;        /* UDP payload */
	uint64_t tx_data_packets; /* that carried data, repairs included */
	uint64_t retransmits;
	uint64_t lost;
	uint64_t rx_packets;
	uint64_t rx_bytes;
	uint64_t rx_data_packets;
	uint64_t rx_ce;           /* arrived with the ECN mark CE */
	uint64_t rx_reordered;    /* overtaken by later ones of their path */
	uint64_t rx_duplicates;
	uint64_t srtt_ns;         /* smallest smoothed round trip of its paths; 0: none yet */
};

/*
 * metaroce_query_plane - a plane by its number
 *
 * EINVAL: there is none of that number.
 */
int metaroce_query_plane(struct ibv_context *context, uint32_t plane, struct metaroce_plane *attr);

/*
 * metaroce_set_plane_admin - has a plane used, drained or left, by all connections of the process
 *
 * `kept`, if not NULL, is the number of connections that go on using it because none of their other paths answers; they
 * leave it as soon as one does. It concerns what this side sends.
 *
 * EBUSY: it is the last plane in use. EINVAL: no such plane or state. ENODEV: nothing was made with the device yet, or
 * it is another's.
 */
int metaroce_set_plane_admin(struct ibv_context *context, uint32_t plane, enum metaroce_admin admin, uint32_t *kept);

/*
 * metaroce_deny_entropy - has no path use a source port of a plane any more
 *
 * Paths that use it change to another at once, and what was on its way goes again.
 *
 * EBUSY: fewer would be left than a connection has paths on the plane. EINVAL: no such plane or entropy value. ENODEV:
 * nothing was made with the device yet, or it is another's.
 */
int metaroce_deny_entropy(struct ibv_context *context, uint32_t plane, uint32_t entropy);

/*
 * metaroce_allow_entropy - takes metaroce_deny_entropy back
 *
 * EINVAL and ENODEV as there.
 */
int metaroce_allow_entropy(struct ibv_context *context, uint32_t plane, uint32_t entropy);

/*
 * metaroce_rehash_path - has a path of a connection change its source port
 *
 * The numbers are those of struct metaroce_path. EINVAL: there is none of these numbers. ENODEV: nothing was made
 * with the device yet, or it is another's.
 */
int metaroce_rehash_path(struct ibv_context *context, uint32_t connection, uint32_t path);

enum metaroce_connection_state {
	METAROCE_CONNECTION_CONNECTING = 0,
	METAROCE_CONNECTION_ESTABLISHED = 1,
	METAROCE_CONNECTION_CLOSING = 2,
};

/* A connection: all queue pairs of this process that talk to one process elsewhere share one. */
struct metaroce_connection {
	uint32_t size;
	uint32_t comp_mask;
	uint32_t number;
	uint32_t state;          /* enum metaroce_connection_state */
	uint8_t peer[16];
	uint32_t peer_slot;
	uint32_t segment;        /* UDP payload of a full packet, bytes; 0 before the handshake */
	uint64_t incarnation;    /* the peer's life; 0: unknown */
	uint32_t qps;            /* queue pairs that use it */
	uint32_t paths;
	uint32_t in_flight_bytes;
	uint32_t budget_bytes;   /* that the peer lets us have in flight */
	uint64_t hint_taken_bps; /* rate the peer allows us; 0: it gives no hints */
	uint64_t hint_given_bps; /* rate we have allowed the peer; 0: none was told */
	uint64_t retransmits_waiting;
	uint64_t srtt_ns;        /* on all paths */
	uint64_t silent_ns;      /* since when nothing was heard of the peer */
	uint64_t state_bytes;    /* memory */
};

enum metaroce_path_state {
	METAROCE_PATH_ACTIVE = 0,
	METAROCE_PATH_DRAINING = 1, /* takes nothing new */
	METAROCE_PATH_SHUNNED = 2,  /* did not answer: probed, keeps its source port */
	METAROCE_PATH_LEFT = 3,     /* probed on another source port */
	METAROCE_PATH_PARKED = 4,   /* not even probed */
};

enum metaroce_cause {
	METAROCE_CAUSE_FRESH = 0,    /* made so */
	METAROCE_CAUSE_SILENCE = 1,  /* did not answer while its siblings did */
	METAROCE_CAUSE_PLANE = 2,    /* half of its plane's paths did not */
	METAROCE_CAUSE_LINK = 3,     /* the link of its plane went down */
	METAROCE_CAUSE_PEER = 4,     /* the peer says that the plane is down at its end */
	METAROCE_CAUSE_ANSWERED = 5, /* has answered again */
	METAROCE_CAUSE_OPERATOR = 6, /* an operator or the application wanted it */
};

/* A transmit path of a connection. The counters cover its life, whatever source ports it has used. */
struct metaroce_path {
	uint32_t size;
	uint32_t comp_mask;
	uint32_t connection;
	uint32_t number;        /* within the connection */
	uint32_t plane;
	uint32_t entropy;       /* which of the plane's source ports it uses */
	uint32_t generation;    /* counts changes of the source port, modulo 256 */
	uint32_t state;         /* enum metaroce_path_state */
	uint32_t cause;         /* enum metaroce_cause: why it is in that state ... */
	uint32_t dst_port;
	uint8_t dst[16];        /* where its packets go */
	uint64_t since_ns;      /* ... and for how long */
	uint64_t rtt_min_ns;    /* of this generation; 0: no sample yet */
	uint64_t rtt_ns;        /* smoothed */
	uint64_t rtt_var_ns;    /* mean deviation */
	uint64_t reorder_tolerance_ns;
	uint32_t cwnd_packets;
	uint32_t in_flight_packets;
	uint64_t sent;          /* data packets, repairs included */
	uint64_t sent_bytes;    /* their UDP payload */
	uint64_t retransmitted;
	uint64_t delivered;     /* packets acknowledged */
	uint64_t delivered_bytes;
	uint64_t lost;          /* declared lost, by a gap or by silence */
	uint64_t spurious;      /* of these, that had arrived */
	uint64_t reordered;     /* of these, that later ones had overtaken */
	uint64_t ce;            /* arrived with the ECN mark CE */
};

/* A queue pair. Types and states are those of <infiniband/verbs.h>. */
struct metaroce_qp {
	uint32_t size;
	uint32_t comp_mask;
	uint32_t qp_num;
	uint32_t qp_type;
	uint32_t qp_state;
	uint32_t dest_qp_num;
	uint32_t has_connection; /* 1: `connection` is the number of the one its requests leave on */
	uint32_t connection;
	uint8_t peer[16];
	uint64_t sends;         /* requests posted and not complete */
	uint64_t sends_waiting; /* of these, never begun */
	uint64_t recvs;         /* receives posted */
	uint32_t reads;         /* Reads and atomics not answered */
	uint32_t rnr_tries;     /* refusals in a row for lack of a receive */
};

/*
 * metaroce_query_qp - the transport's view of a queue pair
 *
 * Its paths are those of its connection: take a snapshot and look for them there.
 */
int metaroce_query_qp(struct ibv_qp *qp, struct metaroce_qp *attr);

/* What a snapshot holds. */
struct metaroce_snapshot_info {
	uint32_t size;
	uint32_t comp_mask;
	uint64_t taken_ns;
	uint32_t one_moment; /* 1: all of it belongs to one moment, 0: only what is of one connection does */
	uint32_t planes;
	uint32_t connections;
	uint32_t paths;
	uint32_t qps;
	uint32_t reserved;
};

struct metaroce_snapshot;

/*
 * metaroce_take_snapshot - all planes, connections, paths and queue pairs of the device, copied
 *
 * Traffic stops for no longer than it takes to copy 32 connections; with up to 32 connections and 512 queue pairs all of
 * it belongs to one moment, and the counters of paths, connections and planes can be compared. The snapshot stays as it is,
 * also when the device is closed, until metaroce_free_snapshot.
 */
int metaroce_take_snapshot(struct ibv_context *context, struct metaroce_snapshot **snapshot);

/*
 * metaroce_free_snapshot - gives a snapshot's memory back; NULL is allowed
 */
void metaroce_free_snapshot(struct metaroce_snapshot *snapshot);

/*
 * metaroce_snapshot_info - when a snapshot was taken and how much is in it
 */
int metaroce_snapshot_info(struct metaroce_snapshot *snapshot, struct metaroce_snapshot_info *info);

/*
 * metaroce_snapshot_plane - a plane of a snapshot
 *
 * ENOENT: there are no more. The same holds for connections, paths and queue pairs; the paths of a connection lie
 * together, in the order of their numbers.
 */
int metaroce_snapshot_plane(struct metaroce_snapshot *snapshot, uint32_t index, struct metaroce_plane *plane);

/*
 * metaroce_snapshot_connection - a connection of a snapshot
 *
 * ENOENT: there are no more.
 */
int metaroce_snapshot_connection(struct metaroce_snapshot *snapshot, uint32_t index,
				 struct metaroce_connection *connection);

/*
 * metaroce_snapshot_path - a path of a snapshot
 *
 * ENOENT: there are no more.
 */
int metaroce_snapshot_path(struct metaroce_snapshot *snapshot, uint32_t index, struct metaroce_path *path);

/*
 * metaroce_snapshot_qp - a queue pair of a snapshot
 *
 * ENOENT: there are no more.
 */
int metaroce_snapshot_qp(struct metaroce_snapshot *snapshot, uint32_t index, struct metaroce_qp *qp);

enum metaroce_event_kind {
	METAROCE_EVENT_PATH = 0,  /* a path has changed its state or source port, or the cause is known better */
	METAROCE_EVENT_LINK = 1,  /* the link of a plane: `state` is 1 for up, 0 for down */
	METAROCE_EVENT_ADMIN = 2, /* somebody wants a plane used in another way: `state` is an enum metaroce_admin */
};

/* Something that has happened to a plane or a path. What is behind `state` is 0 unless it is of a path. */
struct metaroce_event {
	uint32_t size;
	uint32_t comp_mask;
	uint64_t time_ns;    /* when the device noticed */
	uint64_t lost;       /* events before this one that were lost: the program was 1024 behind */
	uint32_t kind;       /* enum metaroce_event_kind */
	uint32_t plane;
	uint32_t state;      /* of a path: enum metaroce_path_state */
	uint32_t cause;      /* enum metaroce_cause */
	uint32_t connection;
	uint32_t path;       /* number within the connection */
	uint32_t entropy;    /* source port now */
	uint32_t generation;
	uint8_t peer[16];
	uint32_t peer_slot;
	uint32_t qps;        /* queue pairs that use the connection ... */
	uint32_t qp_num;     /* ... and one of them that sends on it; 0: none does */
	uint32_t reserved;
};

struct metaroce_events;

/*
 * metaroce_open_events - begins to listen for what happens to planes and paths of the device
 *
 * Every listener hears everything from here on. EMFILE: no descriptor is left.
 */
int metaroce_open_events(struct ibv_context *context, struct metaroce_events **events);

/*
 * metaroce_close_events - ends listening and closes the descriptor; NULL is allowed
 */
void metaroce_close_events(struct metaroce_events *events);

/*
 * metaroce_events_fd - a descriptor that poll, select and epoll find readable while there is an event to take
 *
 * It belongs to the listener: neither read nor close it.
 */
int metaroce_events_fd(struct metaroce_events *events, int *fd);

/*
 * metaroce_next_event - takes the next event
 *
 * EAGAIN: there is none now. ENODEV: the device is closed.
 */
int metaroce_next_event(struct metaroce_events *events, struct metaroce_event *event);

#ifdef __cplusplus
}
#endif

#endif
