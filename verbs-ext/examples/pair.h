/*
 * Two RC queue pairs of one process, connected to each other through metaroce0: what the examples need of a program.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#ifndef PAIR_H
#define PAIR_H

#include <errno.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Ends the program unless a call gave 0, and says which and why. */
#define MUST(call)                                                                                                     \
	do {                                                                                                           \
		int must_error = (call);                                                                               \
		if (must_error) {                                                                                      \
			fprintf(stderr, "%s: %s\n", #call, strerror(must_error));                                      \
			exit(1);                                                                                       \
		}                                                                                                      \
	} while (0)
/* The same for what has to be true. */
#define CHECK(what)                                                                                                    \
	do {                                                                                                           \
		if (!(what)) {                                                                                         \
			fprintf(stderr, "line %d: not so: %s\n", __LINE__, #what);                                     \
			exit(1);                                                                                       \
		}                                                                                                      \
	} while (0)

#define PAIR_BYTES (1u << 20)

struct pair {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	struct ibv_qp *qp[2];
	uint8_t *memory; /* PAIR_BYTES to write from, and as many to write to */
};

/* Opens the device of that name. */
static inline struct ibv_context *open_device(const char *name)
{
	int count;
	struct ibv_device **list = ibv_get_device_list(&count);
	struct ibv_context *context = NULL;

	CHECK(list != NULL);
	for (int i = 0; i < count && !context; i++)
		if (!strcmp(ibv_get_device_name(list[i]), name))
			context = ibv_open_device(list[i]);
	ibv_free_device_list(list);
	CHECK(context != NULL);
	return context;
}

static inline void connect_qp(struct pair *pair, int from, int to)
{
	struct ibv_qp_attr attr;
	union ibv_gid gid;

	MUST(ibv_query_gid(pair->context, 1, 0, &gid));
	memset(&attr, 0, sizeof(attr));
	attr.qp_state = IBV_QPS_INIT;
	attr.port_num = 1;
	attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
	MUST(ibv_modify_qp(pair->qp[from], &attr,
			   IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	attr.qp_state = IBV_QPS_RTR;
	attr.path_mtu = IBV_MTU_1024;
	attr.dest_qp_num = pair->qp[to]->qp_num;
	attr.ah_attr.is_global = 1;
	attr.ah_attr.grh.dgid = gid;
	attr.ah_attr.grh.hop_limit = 64;
	attr.ah_attr.port_num = 1;
	attr.max_dest_rd_atomic = 1;
	attr.min_rnr_timer = 12;
	MUST(ibv_modify_qp(pair->qp[from], &attr,
			   IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				   IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	attr.qp_state = IBV_QPS_RTS;
	attr.timeout = 14;
	attr.retry_cnt = 7;
	attr.rnr_retry = 7;
	attr.max_rd_atomic = 1;
	MUST(ibv_modify_qp(pair->qp[from], &attr,
			   IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
				   IBV_QP_MAX_QP_RD_ATOMIC));
}

static inline struct pair make_pair(struct ibv_context *context)
{
	struct pair pair = { context, NULL, NULL, NULL, { NULL, NULL }, NULL };
	struct ibv_qp_init_attr init;

	memset(&init, 0, sizeof(init));
	pair.memory = (uint8_t *)calloc(2, PAIR_BYTES);
	CHECK(pair.memory != NULL);
	for (size_t i = 0; i < PAIR_BYTES; i++)
		pair.memory[i] = (uint8_t)(i * 7 + i / 251);
	CHECK((pair.pd = ibv_alloc_pd(context)) != NULL);
	CHECK((pair.cq = ibv_create_cq(context, 64, NULL, NULL, 0)) != NULL);
	pair.mr = ibv_reg_mr(pair.pd, pair.memory, 2 * PAIR_BYTES, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	CHECK(pair.mr != NULL);
	init.send_cq = init.recv_cq = pair.cq;
	init.qp_type = IBV_QPT_RC;
	init.cap.max_send_wr = init.cap.max_recv_wr = 16;
	init.cap.max_send_sge = init.cap.max_recv_sge = 1;
	for (int i = 0; i < 2; i++)
		CHECK((pair.qp[i] = ibv_create_qp(pair.pd, &init)) != NULL);
	connect_qp(&pair, 0, 1);
	connect_qp(&pair, 1, 0);
	return pair;
}

/* Writes the first half of the memory into the second, `count` times, each before the next, and looks at the bytes. */
static inline void write_all(struct pair *pair, int count)
{
	for (int i = 0; i < count; i++) {
		struct ibv_sge sge = { (uintptr_t)pair->memory, PAIR_BYTES, pair->mr->lkey };
		struct ibv_send_wr wr, *bad;
		struct ibv_wc wc;
		int found;

		memset(pair->memory + PAIR_BYTES, 0, PAIR_BYTES);
		memset(&wr, 0, sizeof(wr));
		wr.sg_list = &sge;
		wr.num_sge = 1;
		wr.opcode = IBV_WR_RDMA_WRITE;
		wr.send_flags = IBV_SEND_SIGNALED;
		wr.wr.rdma.remote_addr = (uintptr_t)pair->memory + PAIR_BYTES;
		wr.wr.rdma.rkey = pair->mr->rkey;
		MUST(ibv_post_send(pair->qp[0], &wr, &bad));
		while ((found = ibv_poll_cq(pair->cq, 1, &wc)) == 0)
			;
		CHECK(found == 1 && wc.status == IBV_WC_SUCCESS);
		CHECK(!memcmp(pair->memory, pair->memory + PAIR_BYTES, PAIR_BYTES));
	}
}

static inline void free_pair(struct pair *pair)
{
	for (int i = 0; i < 2; i++)
		MUST(ibv_destroy_qp(pair->qp[i]));
	MUST(ibv_dereg_mr(pair->mr));
	MUST(ibv_destroy_cq(pair->cq));
	MUST(ibv_dealloc_pd(pair->pd));
	free(pair->memory);
}

#endif
